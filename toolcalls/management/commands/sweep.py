import logging
import signal
import threading
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import DatabaseError, connection

from toolcalls.sweeps import Swept, sweep

logger = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Sweep for ever: deadlines, silent workers, bells to ring again, lines to seal. Any number may run anywhere."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help="make one pass and say what it did")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["once"]:
            done = sweep()
            self.stdout.write(f"deadlines {done.alarms}, lost attempts {done.lost}, sealed lines {done.sealed}")
            return
        stop = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stop.set())
        away = False
        while not stop.is_set():
            began = time.monotonic()
            try:
                done = sweep()
                away = False
                _tell(done)
            except DatabaseError as error:
                connection.close()
                if not away:
                    logger.warning(
                        "the database is away; sweeping again until it is back", extra={"error": str(error).strip()}
                    )
                away = True
            stop.wait(max(0.0, settings.SWEEP_EVERY - (time.monotonic() - began)))


def _tell(done: Swept) -> None:
    if done.alarms or done.lost:
        logger.info("swept", extra={"deadlines": done.alarms, "lost_attempts": done.lost})
