"""The deployment: composition only, imported by nobody else."""

from dexsite.celery import app as celery_app

__all__ = ["celery_app"]
