"""The worker's half alone: claim, run and record whatever is due, once told to on standard input."""

import json
import sys
import time
from typing import Any

from django.conf import settings
from django.core.management import BaseCommand

from toolcalls.executor import Runner
from toolcalls.models import Call


class Command(BaseCommand):
    """Say `ready`, wait for a line, run what is due, and say how many calls in how many seconds."""

    help = "Part of the benchmark: run what is due, with the product's own runner."
    requires_system_checks = ()

    def handle(self, *_args: Any, **_options: Any) -> None:
        runner = Runner(slots=settings.WORKER_SLOTS)
        runner.start()
        calls = Call.objects.filter(due_at__isnull=False).count()
        self._say("ready")
        sys.stdin.readline()
        begun = time.perf_counter()
        while Call.objects.filter(due_at__isnull=False).exists():
            runner.drain(retryable=True)
        seconds = time.perf_counter() - begun
        self._say(json.dumps({"calls": calls, "seconds": seconds}))
        # Its processor time is read while it lives.
        sys.stdin.read()
        runner.close()

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
