"""The doorbell: a message that says "there is work of this kind", never which (performance, "What follows").

A bell is rung only where none is waiting: the mark in its row is set by whoever rings, stays while a task looks for work, and is
cleared, committed, before that task looks for the last time. The ringer tests the mark after its own commit, so either the task
has yet to look, and will see the work, or the mark is clear and it rings. A lost message, or a task that died with the mark set,
costs one sweep; nothing depends on a message's arrival. Tasks are named as strings, which keeps the one real cycle of this domain
out of the imports.
"""

import logging

from celery import current_app
from django.db import transaction

from toolcalls import sql

logger = logging.getLogger(__name__)


def kind_of(*, retryable: bool) -> str:
    """Name the kind of work, which is the name of its queue and of its bell."""
    return "call_tool" if retryable else "call_single_attempt_tool"


def ring_after_commit(*, retryable: bool) -> None:
    """Ring for a kind of work once the current transaction has committed."""
    transaction.on_commit(lambda: ring(retryable=retryable), robust=True)


def ring(*, retryable: bool) -> None:
    """Ring unless a bell is waiting already. A broker that is away costs a log line; a sweep rings again."""
    kind = kind_of(retryable=retryable)
    mark = """UPDATE toolcalls_bell SET rung_at = clock_timestamp(), last_rung_at = clock_timestamp()
        WHERE kind = %s AND rung_at IS NULL"""
    if sql.change(mark, [kind]):
        _publish(kind)


def ring_again(*, retryable: bool) -> None:
    """Ring although a bell may be waiting: its message may be lost."""
    kind = kind_of(retryable=retryable)
    mark = """UPDATE toolcalls_bell SET rung_at = clock_timestamp(), last_rung_at = clock_timestamp(),
        rings_again = rings_again + 1 WHERE kind = %s"""
    sql.change(mark, [kind])
    _publish(kind)


def ring_on(*, retryable: bool) -> None:
    """Ring for other processes: this one has as much as it can take, and the mark says only that somebody looks."""
    _publish(kind_of(retryable=retryable))


def leave(*, retryable: bool) -> None:
    """Clear the mark, committed, before a task looks for work for the last time."""
    sql.change(
        "UPDATE toolcalls_bell SET rung_at = NULL WHERE kind = %s AND rung_at IS NOT NULL",
        [kind_of(retryable=retryable)],
    )


def come_back(*, retryable: bool) -> None:
    """Set the mark again: the last look found work, so this task goes on looking and nobody needs to ring."""
    mark = "UPDATE toolcalls_bell SET rung_at = clock_timestamp() WHERE kind = %s AND rung_at IS NULL"
    sql.change(mark, [kind_of(retryable=retryable)])


def _publish(kind: str) -> None:
    try:
        current_app.send_task(f"toolcalls.{kind}", ignore_result=True)
    except Exception as error:  # noqa: BLE001 - any transport's error: the call is stored, a sweep rings again
        logger.warning("the broker did not take a bell", extra={"kind": kind, "error": type(error).__name__})
