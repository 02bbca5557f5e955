"""Telling waiting processes that calls were answered: one coalesced NOTIFY per process, outside the write transactions.

A NOTIFY inside them would serialise all commits. A notice may be lost; whoever waits reads the row again anyway.
"""

import logging
import threading
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from uuid import UUID

from django.db import connection

from toolcalls import sql

CHANNEL = "dexsite_answered"
AT_MOST = 200  # a payload holds 8,000 bytes

logger = logging.getLogger(__name__)
_queue: SimpleQueue[UUID | None] = SimpleQueue()
_start = threading.Lock()
_thread: threading.Thread | None = None


def publish(calls: Iterable[UUID]) -> None:
    """Tell that these calls were answered. Returns at once and never raises."""
    global _thread  # noqa: PLW0603 - one sender per process
    for call in calls:
        _queue.put(call)
    if _thread is None or not _thread.is_alive():
        with _start:
            if _thread is None or not _thread.is_alive():
                _thread = threading.Thread(target=_send_for_ever, name="notices", daemon=True)
                _thread.start()


def stop() -> None:
    """End the sending thread and close its connection, once what is queued was sent."""
    if _thread is not None:
        _queue.put(None)
        _thread.join()


def _send_for_ever() -> None:
    while (first := _queue.get()) is not None:
        calls = {first}  # and whatever else was answered while the one before was on its way
        while len(calls) < AT_MOST:
            try:
                call = _queue.get_nowait()
            except Empty:
                break
            if call is None:
                _queue.put(None)
                break
            calls.add(call)
        try:
            if connection.connection is None:
                # A notice needs no durability: without this it would wait for the disk like a commit.
                sql.run("SELECT set_config('synchronous_commit', 'off', false)", [])
            sql.run("SELECT pg_notify(%s, %s)", [CHANNEL, ",".join(map(str, calls))])
        except Exception:
            logger.info("a notice was not sent", exc_info=True)
            connection.close()
    connection.close()
