"""The Celery application: started as `celery -A dexsite worker`, configured by `CELERY_…` in the settings."""

import os
import warnings
from functools import cached_property
from typing import Any

from celery import Celery
from celery.fixups.django import DjangoFixup, DjangoWorkerFixup
from celery.platforms import SecurityWarning
from celery.signals import setup_logging
from django.db import close_old_connections
from kombu.transport import TRANSPORT_ALIASES

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dexsite.settings")

# It warns of root because pickled messages could run anything; ours are JSON.
warnings.filterwarnings("ignore", category=SecurityWarning)


# `pgmq://` means our transport; see there why.
TRANSPORT_ALIASES["pgmq"] = "dexsite.pgmq_transport:Transport"


class KeepsConnections(DjangoWorkerFixup):
    """Treat a task like a request: a connection that still works is kept.

    Celery's own fixup reconnects twice per task, which costs more than half of the throughput.
    """

    def close_database(self, **_: Any) -> None:
        close_old_connections()


class Fixup(DjangoFixup):
    """Celery's integration of Django, with connections that outlive a task."""

    @cached_property
    def worker_fixup(self) -> DjangoWorkerFixup:
        return KeepsConnections(self.app)


@setup_logging.connect
def leave_logging_alone(**_: Any) -> None:
    """Keep Django's LOGGING: where this signal has a receiver, Celery configures nothing."""


app = Celery("dexsite", fixups=[lambda app: Fixup(app).install()])
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
