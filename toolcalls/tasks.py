"""The two doorbells as Celery tasks. They carry nothing: a task looks into the database for what is due of its kind."""

import functools
from typing import Any

from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings

from toolcalls.executor import Runner


@functools.cache
def runner() -> Runner:
    """Give this process's runner; made in the process that runs tasks, after any fork."""
    return Runner(slots=settings.WORKER_SLOTS)


@shared_task(name="toolcalls.call_tool", acks_late=True, ignore_result=True)
def call_tool() -> None:
    """Run what is due of the classes where a second run is harmless."""
    runner().drain(retryable=True)


@shared_task(name="toolcalls.call_single_attempt_tool", acks_late=False, ignore_result=True)
def call_single_attempt_tool() -> None:
    """Run what is due of the classes that get a single attempt."""
    runner().drain(retryable=False)


@worker_shutting_down.connect
def _stop_claiming(**_: Any) -> None:
    runner().stopping.set()
