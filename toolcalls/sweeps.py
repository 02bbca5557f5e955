"""What time alone brings: deadlines, silent workers, bells to ring again, lines to seal (behaviour, section 8).

A pass may run anywhere, any number at once: each row is locked with SKIP LOCKED and read again under its lock. It is bounded,
fair between teams, and quiet when there is nothing to do.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection, transaction
from django.db.models import F, Q

from toolcalls import dispatch, journal, lifecycle
from toolcalls.models import Attempt, Bell, Call, SweepPass, Worker

PER_TEAM = 50
A_BATCH = 200
CHAINS = 100
LONGEST_RING_PAUSE = 300.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """What one pass did: counts of calls moved by a passed deadline, attempts of lost workers, and lines sealed."""

    alarms: int
    lost: int
    sealed: int


def sweep(*, seconds: float = 2.0) -> Swept:
    """Make one pass, of about ``seconds`` at most; what is left waits for the next."""
    until = time.monotonic() + seconds
    since = _begin_pass()
    lost = _settle_lost_attempts()
    alarms = 0
    while time.monotonic() < until:
        rung = _answer_alarms()
        alarms += rung
        if not rung:
            break
    for retryable in (True, False):
        _ring_where_nobody_came(retryable=retryable, since=since)
    sealed = 0
    while time.monotonic() < until:
        lines = journal.seal_waiting(chains=CHAINS)
        sealed += lines
        if not lines:
            break
    return Swept(alarms, lost, sealed)


def _begin_pass() -> datetime:
    """Note the pass and give the time of the one before. After a long gap nobody is suspected any more.

    The gap may have been an outage of the database: then silence proves nothing, and two hundred attempts must not be lost
    at once.
    """
    with transaction.atomic():
        row, _ = SweepPass.objects.select_for_update().get_or_create(pk=1)
        before, now = row.at, lifecycle.clock()
        if before is None or now - before > timedelta(seconds=3 * settings.SWEEP_EVERY):
            Worker.objects.filter(suspected_at__isnull=False, gone_at=None).update(
                suspected_at=None, suspected_beat=None
            )
        row.at = now
        row.save(update_fields=["at"])
        return before or now


def _settle_lost_attempts() -> int:
    """See silence twice: note the suspicion, and a lease later, if the heartbeat has not moved, settle the attempts.

    Gives how many were settled.
    """
    settled = 0
    now = lifecycle.clock()
    lease = timedelta(seconds=settings.WORKER_SILENT_AFTER)
    alive = Worker.objects.filter(gone_at=None)
    alive.filter(suspected_at__isnull=False).exclude(beat_at=F("suspected_beat")).update(
        suspected_at=None, suspected_beat=None
    )
    alive.filter(suspected_at=None, beat_at__lt=now - lease).update(suspected_at=now, suspected_beat=F("beat_at"))
    alive.filter(suspected_at__lte=now - lease, beat_at=F("suspected_beat")).update(gone_at=now)
    gone = Attempt.objects.filter(finished_at=None, worker__gone_at__isnull=False, call__live_attempt=F("number"))
    for attempt in gone.order_by("pk").values_list("pk", flat=True)[:A_BATCH]:
        with _one_row_at_a_time("a lost attempt could not be settled"):
            lifecycle.lose(attempt)
            settled += 1
    return settled


@contextmanager
def _one_row_at_a_time(what: str) -> Iterator[None]:
    """Let a row that cannot be moved wait for the next pass, and not stand in the way of all others."""
    try:
        yield
    except (InterfaceError, OperationalError):
        raise  # the database is away: so are all other rows
    except Exception:
        logger.exception(what)


def _answer_alarms() -> int:
    """Move calls whose deadline has passed, a bounded number of each team. Gives how many."""
    moved = 0
    for call in _with_a_passed_alarm():
        with _one_row_at_a_time("a passed deadline could not be answered"), transaction.atomic():
            row = (
                Call.objects.select_for_update(no_key=True, skip_locked=True)
                .defer(*lifecycle.BULKY)
                .filter(pk=call)
                .first()
            )
            moved += row is not None and lifecycle.on_alarm(row)
    return moved


def _with_a_passed_alarm() -> list[UUID]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH RECURSIVE teams AS (
                (SELECT team_id FROM toolcalls_call WHERE alarm_at IS NOT NULL ORDER BY team_id LIMIT 1)
                UNION ALL
                SELECT (SELECT c.team_id FROM toolcalls_call c WHERE c.alarm_at IS NOT NULL AND c.team_id > teams.team_id
                        ORDER BY c.team_id LIMIT 1)
                FROM teams WHERE teams.team_id IS NOT NULL
            )
            SELECT one.id FROM teams CROSS JOIN LATERAL (
                SELECT c.id, c.alarm_at FROM toolcalls_call c
                WHERE c.team_id = teams.team_id AND c.alarm_at <= statement_timestamp() ORDER BY c.alarm_at LIMIT %s
            ) one ORDER BY one.alarm_at LIMIT %s
            """,
            [PER_TEAM, A_BATCH],
        )
        return [row[0] for row in cursor.fetchall()]


def _ring_where_nobody_came(*, retryable: bool, since: datetime) -> None:
    """Ring where a retry has just come due, and again, ever more slowly, where work is due and nobody works on it."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT min(c.due_at), bool_or(c.due_at > %s), clock_timestamp() FROM (
                SELECT due_at FROM toolcalls_call c
                WHERE retryable = %s AND due_at <= statement_timestamp() AND NOT EXISTS (
                    SELECT 1 FROM toolcalls_brake b
                    WHERE (b.team_id IS NULL OR b.team_id = c.team_id) AND (b.agent_id IS NULL OR b.agent_id = c.agent_id)
                        AND (b.tool = '' OR b.tool = c.tool))
                LIMIT 1000
            ) c
            """,
            [since, retryable],
        )
        oldest, newly_due, now = cursor.fetchone()
    kind = dispatch.kind_of(retryable=retryable)
    if oldest is None:
        Bell.objects.filter(~Q(rings_again=0), kind=kind).update(rings_again=0)
        return
    if newly_due:
        dispatch.ring(retryable=retryable)
    bell = Bell.objects.get(pk=kind)
    pause = timedelta(seconds=min(settings.RING_AGAIN_AFTER * 2 ** min(bell.rings_again, 10), LONGEST_RING_PAUSE))
    if now - oldest > pause and (bell.last_rung_at is None or now - bell.last_rung_at > pause):
        dispatch.ring_again(retryable=retryable)
