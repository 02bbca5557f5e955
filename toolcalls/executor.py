"""From approved to recorded: claim, check, mark, run, record (behaviour, section 8).

One Runner per process. A rung task drains what is due of its kind: it claims no more than there are idle slots to start
at once, each claimed call runs and is recorded in a thread of its own, and none waits for another. The database is queue and
truth; everything here may die at any moment, and ``sweeps`` settles what it leaves.
"""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from pydantic import BaseModel, ValidationError

from toolcalls import dispatch, lifecycle, tools
from toolcalls.canonical import digest, result_text, safe_text
from toolcalls.lifecycle import Claimed
from toolcalls.models import Attempt, Call, Worker, new_id
from toolcalls.outcomes import Crashed, Ending, InDoubt, NothingSent, Refused, Succeeded

SLICE_SECONDS = 10.0
STAY_LOOKS, STAY_SECONDS = 12, 0.004
GATHER_SECONDS = 0.008
LOST_CONNECTION = (DatabaseError, InterfaceError)
RECORD_AGAIN_AT_MOST = 5.0
STEADY_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
CHECK_AGAIN_AT_MOST = 60.0
MESSAGE_LIMIT = 4000

logger = logging.getLogger(__name__)


def steady() -> float:
    """Give the seconds of a clock that only goes forward, also while this machine is suspended where the system can tell."""
    return time.clock_gettime(STEADY_CLOCK)


class Lease:
    """Whether this process may still enter tools, by its own steady clock: a paused process wakes up without it.

    It belongs to one identity: what was claimed under an identity that is gone is never entered under the next.
    """

    def __init__(self, worker: UUID, seconds: float) -> None:
        self.worker = worker
        self._seconds = seconds
        self._until = 0.0

    def renew(self, since: float) -> None:
        """Extend it from ``since``, the steady clock's time before the heartbeat was sent."""
        self._until = since + self._seconds

    @property
    def holds(self) -> bool:
        return steady() < self._until


class Runner:
    """What one process executes calls with: an identity, a heartbeat, a lease, and slots.

    looks: how often a task looks again, STAY_SECONDS apart, before it leaves; each may spare a call its bell.
    """

    def __init__(self, *, slots: int, looks: int = STAY_LOOKS) -> None:
        self.lease: Lease | None = None
        self.stopping = threading.Event()
        self._closed = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self._slots, self._looks = slots, looks
        self._idle = slots
        self._running: set[tuple[UUID, int]] = set()
        self._unsure = False
        self._change = threading.Condition()
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="tool")
        self._start = threading.Lock()
        self._claiming = threading.Lock()

    def start(self) -> UUID:
        """Register this process and begin its heartbeat, once. Gives its identity."""
        with self._start:
            if self.lease is None:
                self.lease = self._register()
                self._heartbeat = threading.Thread(target=self._beat_for_ever, name="heartbeat", daemon=True)
                self._heartbeat.start()
            return self.lease.worker

    def close(self) -> None:
        """Stop claiming, let what runs be recorded, end the heartbeat, and close every thread's connection."""
        self.stopping.set()
        together = threading.Barrier(self._slots)
        with self._claiming:  # what is claimed by now has been handed to the pool, and nothing is claimed from here on
            for _ in range(self._slots):
                self._pool.submit(_close_connection, together)
        self._pool.shutdown(wait=True)
        self._closed.set()
        if self._heartbeat is not None:
            self._heartbeat.join()

    def drain(self, *, retryable: bool, seconds: float = SLICE_SECONDS) -> None:
        """Claim and run what is due of a kind until nothing is, or the slice is over; then ring on if anything may be left.

        The bell stays marked as waiting while this looks for work, so that nobody rings meanwhile; before the last look the mark is
        cleared, committed. A short stay after the last call spares the next one a bell. Returns when every call it started
        has been recorded.
        """
        started: set[Future[None]] = set()
        until = time.monotonic() + seconds
        looks, left, rang_on = 0, False, False
        try:
            while not self.stopping.is_set() and time.monotonic() < until:
                slots = self._take_slots(until)
                if not slots:
                    break
                claimed = self._start_what_is_due(started, retryable=retryable, slots=slots)
                if claimed:
                    looks = 0
                    if left:
                        dispatch.come_back(retryable=retryable)
                        left = False
                    if claimed == slots:
                        if not rang_on:
                            dispatch.ring_on(retryable=retryable)
                            rang_on = True
                    else:
                        # What comes due meanwhile is claimed together: a claim costs as much for one call as for several.
                        self.stopping.wait(GATHER_SECONDS)
                elif left:
                    return
                elif looks < self._looks:
                    looks += 1
                    self.stopping.wait(STAY_SECONDS)
                else:
                    dispatch.leave(retryable=retryable)
                    left = True
            # The slice is over, or this process ends: whoever comes next goes on.
            dispatch.leave(retryable=retryable)
            dispatch.ring(retryable=retryable)
        finally:
            wait(started)

    def _start_what_is_due(self, started: set[Future[None]], *, retryable: bool, slots: int) -> int:
        claimed: list[tuple[Claimed, Lease]] = []
        try:
            # One at a time: between the commit and the note of what runs here, a claim looks like one that nobody runs.
            with self._claiming:
                if not self.stopping.is_set():
                    claimed = self._claim(retryable=retryable, limit=slots)
                    started.update([self._pool.submit(self._run, each, lease) for each, lease in claimed])
        finally:
            self._give_back_slots(slots - len(claimed))
        started.difference_update([each for each in started if each.done()])
        return len(claimed)

    # -- slots

    def _take_slots(self, until: float) -> int:
        with self._change:
            while not self._idle and not self.stopping.is_set():
                left = until - time.monotonic()
                if left <= 0:
                    return 0
                self._change.wait(left)
            taken, self._idle = self._idle, 0
            return taken

    def _give_back_slots(self, slots: int) -> None:
        if slots:
            with self._change:
                self._idle += slots
                self._change.notify_all()

    # -- one call

    def _claim(self, *, retryable: bool, limit: int) -> list[tuple[Claimed, Lease]]:
        self.start()
        lease = self.lease
        if lease is None or not lease.holds:
            return []
        try:
            if self._unsure:
                self._hand_back_what_was_claimed_unseen(lease.worker)
            claimed = lifecycle.claim(lease.worker, retryable=retryable, tools=list(tools.every()), limit=limit)
        except LOST_CONNECTION:
            # The commit may have been made although its answer was lost: look before claiming again.
            self._unsure = True
            connection.close()
            raise
        self._running.update((each.call, each.attempt) for each in claimed)
        return [(each, lease) for each in claimed]

    def _hand_back_what_was_claimed_unseen(self, worker: UUID) -> None:
        for call, attempt in lifecycle.claimed_but_not_running(worker, tuple(self._running)):
            # Provably not entered by this process, whatever the mark says: no thread was ever given it.
            why = "its claim was not answered, so it was not started"
            lifecycle.hand_back(call, attempt, worker=worker, delay=0, why=why)
        self._unsure = False

    def _run(self, claimed: Claimed, lease: Lease) -> None:
        try:
            close_old_connections()
            tool = tools.find(claimed.tool)
            assert tool is not None
            context = _context(claimed)
            deadline = claimed.deadline
            if not claimed.entered:
                if not self._check(claimed, tool, context, worker=lease.worker):
                    return
                try:
                    deadline = _enter(claimed, worker=lease.worker)
                except LOST_CONNECTION:
                    self._hand_back(claimed, worker=lease.worker, delay=1.0, why="it could not be marked as entered")
                    return
            if deadline is None:
                return  # cancelled, or too late: whoever refused the mark ends the call
            context.deadline = deadline
            # No input or output lies between the mark and the tool's first line.
            ending = perform(tool, claimed, context) if lease.holds else NothingSent("the worker's lease was over")
            self._insist(
                claimed,
                lambda: lifecycle.record(
                    claimed.call, claimed.attempt, ending, worker=lease.worker, spent=context.spent
                ),
            )
        except Exception:
            logger.exception("a claimed call was left to the sweeps", extra={"call": str(claimed.call)})
        finally:
            self._running.discard((claimed.call, claimed.attempt))
            self._give_back_slots(1)

    def _check(self, claimed: Claimed, tool: tools.Tool, context: tools.ToolContext, *, worker: UUID) -> bool:
        assert tool.run_check is not None
        try:
            tool.run_check(_arguments(tool, claimed.arguments), context)
        except tools.ToolRejected as error:
            code, message = error.code, _message(error.message)
            self._insist(
                claimed,
                lambda: lifecycle.refuse(claimed.call, claimed.attempt, worker=worker, code=code, message=message),
            )
            return False
        except Exception as error:  # noqa: BLE001 - a check that cannot be made now is made again later
            logger.info("a check could not be made", extra={"call": str(claimed.call), "error": type(error).__name__})
            delay = _seconds(getattr(error, "retry_after", None)) or 1.0
            self._hand_back(
                claimed, worker=worker, delay=min(delay, CHECK_AGAIN_AT_MOST), why="its check could not be made"
            )
            return False
        return True

    def _hand_back(self, claimed: Claimed, *, worker: UUID, delay: float, why: str) -> None:
        self._insist(
            claimed, lambda: lifecycle.hand_back(claimed.call, claimed.attempt, worker=worker, delay=delay, why=why)
        )

    def _insist(self, claimed: Claimed, record: Callable[[], None]) -> None:
        """Record, again and again while this process lives: the tool is never entered again because recording failed."""
        pause = 0.05
        while True:
            try:
                record()
                return
            except Exception as error:
                logger.warning(
                    "recording failed; trying again",
                    extra={"call": str(claimed.call), "error": type(error).__name__},
                    exc_info=not isinstance(error, LOST_CONNECTION),
                )
                connection.close()
                time.sleep(pause)
                pause = min(pause * 2, RECORD_AGAIN_AT_MOST)

    # -- identity and heartbeat

    def _register(self) -> Lease:
        since = steady()
        row = Worker(
            id=new_id(),
            host=socket.gethostname()[:100],
            pid=os.getpid(),
            slots=self._slots,
            tools={tool.name: tool.version for tool in tools.every()},
        )
        lifecycle.register(row)
        lease = Lease(row.pk, settings.WORKER_SILENT_AFTER)
        lease.renew(since)
        return lease

    def _beat_for_ever(self) -> None:
        while not self._closed.wait(settings.HEARTBEAT_EVERY):
            since = steady()
            try:
                assert self.lease is not None
                if lifecycle.beat(self.lease.worker):
                    self.lease.renew(since)
                else:
                    # Declared gone, so its attempts are settled; go on under a new identity.
                    self.lease = self._register()
            except Exception as error:  # noqa: BLE001 - the lease runs out by itself while the database is away
                logger.warning("a heartbeat failed", extra={"error": type(error).__name__})
                connection.close()
        connection.close()


def _close_connection(together: threading.Barrier) -> None:
    together.wait()  # so that each thread of the pool gets one of these
    connection.close()


def _enter(claimed: Claimed, *, worker: UUID) -> datetime | None:
    try:
        return lifecycle.enter(claimed, worker=worker)
    except LOST_CONNECTION:
        # The mark may have been made although its answer was lost: look it up, and make it if it was not.
        connection.close()
        attempt = Attempt.objects.get(call_id=claimed.call, number=claimed.attempt)
        if attempt.state == Attempt.State.ENTERED:
            return attempt.deadline
        return lifecycle.enter(claimed, worker=worker)


def perform(tool: tools.Tool, claimed: Claimed, context: tools.ToolContext) -> Ending:
    """Run a tool and turn whatever happens into an ending. Never raises."""
    try:
        arguments = _arguments(tool, claimed.arguments)
    except Exception as error:
        logger.exception("the frozen arguments cannot be read", extra={"call": str(claimed.call), "tool": tool.name})
        return NothingSent(f"the tool's author reads the arguments otherwise now ({type(error).__name__})")
    try:
        returned = tool(arguments, context)
    except tools.ToolRejected as error:
        return Refused(error.code, _message(error.message), error.retry)
    except tools.NotRun as error:
        return NothingSent(_message(error.message), _seconds(error.retry_after))
    except tools.InDoubt as error:
        return InDoubt(error.code, _message(error.message))
    except BaseException:
        logger.exception("a tool raised what nobody expected", extra={"call": str(claimed.call), "tool": tool.name})
        return Crashed()
    return success(tool, returned, stored_limit=claimed.stored_limit)


def _message(text: object) -> str:
    """Make an author's text storable: a tool may quote whatever its service said."""
    try:
        return safe_text(str(text), MESSAGE_LIMIT)
    except Exception:  # noqa: BLE001 - an object of the author's may do anything when it is read
        return ""


def _seconds(delay: object) -> float | None:
    """Take a delay for what it is; None where it is no number of seconds."""
    good = isinstance(delay, int | float) and not isinstance(delay, bool) and not math.isnan(delay)
    return max(0.0, min(float(delay), 1e6)) if good else None  # type: ignore[arg-type]


def success(tool: tools.Tool, returned: Any, *, stored_limit: int) -> Succeeded:
    """Make what a tool returned storable, with a warning where it is not what was declared or could not be kept whole."""
    shown, raw = (returned.shown, returned.raw) if isinstance(returned, tools.Result) else (returned, None)
    warning = _off_schema(tool.result, shown)
    text, altered = result_text(shown, limit=stored_limit)
    raw_text = "" if raw is None else result_text(raw, limit=stored_limit)[0]
    return Succeeded(text, raw_text, "; ".join(filter(None, (warning, altered))))


def _off_schema(model: type[BaseModel] | None, shown: Any) -> str:
    if model is None or isinstance(shown, model):
        return ""
    try:
        model.model_validate(shown)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, fault["loc"])) or "result" for fault in error.errors()[:5])
        return safe_text(f"the result is not what the tool declares ({fields})")
    except Exception as error:  # noqa: BLE001 - an author's validator may do anything; the effect has happened
        return f"the result could not be compared with what the tool declares ({type(error).__name__})"
    return ""


def _arguments(tool: tools.Tool, text: str) -> BaseModel:
    return tool.arguments.model_validate_json(text, strict=True, extra="forbid")


def _context(claimed: Claimed) -> tools.ToolContext:
    asked = 0.0
    answer = False

    def cancelled() -> bool:
        nonlocal asked, answer
        if not answer and time.monotonic() - asked > 1:
            asked = time.monotonic()
            answer = Call.objects.filter(pk=claimed.call, cancel_asked_at__isnull=False).exists()
        return answer

    return tools.ToolContext(
        idempotency_key=claimed.idempotency_key,
        key_digest=digest(claimed.idempotency_key)[:32],
        attempt=claimed.run,
        deadline=claimed.deadline or claimed.start_by,
        agent=claimed.agent,
        on_behalf_of=claimed.on_behalf_of,
        _ask_cancelled=cancelled,
    )
