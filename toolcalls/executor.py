"""From approved to recorded: claim, check, mark, run, record (behaviour, section 8).

One Runner per process. A rung task drains what is due of its kind: it claims no more than there are idle slots to start
at once, each claimed call runs and is recorded in a thread of its own, and none waits for another. The database is queue and
truth; everything here may die at any moment, and ``sweeps`` settles what it leaves.
"""

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from pydantic import BaseModel, ValidationError

from toolcalls import dispatch, lifecycle, tools
from toolcalls.canonical import digest, result_text
from toolcalls.lifecycle import Claimed
from toolcalls.models import Attempt, Call, Worker, new_id
from toolcalls.outcomes import Crashed, Ending, InDoubt, NothingSent, Refused, Succeeded

SLICE_SECONDS = 10.0
LOST_CONNECTION = (DatabaseError, InterfaceError)
RECORD_AGAIN_AT_MOST = 5.0

logger = logging.getLogger(__name__)


class Lease:
    """Whether this process may still enter tools, by its own steady clock: a paused process wakes up without it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0

    def renew(self, since: float) -> None:
        """Extend it from ``since``, the steady clock's time before the heartbeat was sent."""
        self._until = since + self._seconds

    @property
    def holds(self) -> bool:
        return time.monotonic() < self._until


class Runner:
    """What one process executes calls with: an identity, a heartbeat, a lease, and slots."""

    def __init__(self, *, slots: int) -> None:
        self.worker: UUID | None = None
        self.lease = Lease(settings.WORKER_SILENT_AFTER)
        self.stopping = threading.Event()
        self._closed = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self._slots = slots
        self._idle = slots
        self._running: set[UUID] = set()
        self._unsure = False
        self._change = threading.Condition()
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="tool")
        self._start = threading.Lock()

    def start(self) -> UUID:
        """Register this process and begin its heartbeat, once. Gives its identity."""
        with self._start:
            if self.worker is None:
                self._register()
                self._heartbeat = threading.Thread(target=self._beat_for_ever, name="heartbeat", daemon=True)
                self._heartbeat.start()
            assert self.worker is not None
            return self.worker

    def close(self) -> None:
        """Stop claiming, let what runs be recorded, end the heartbeat, and close every thread's connection."""
        self.stopping.set()
        together = threading.Barrier(self._slots)
        for _ in range(self._slots):
            self._pool.submit(_close_connection, together)
        self._pool.shutdown(wait=True)
        self._closed.set()
        if self._heartbeat is not None:
            self._heartbeat.join()

    def drain(self, *, retryable: bool, seconds: float = SLICE_SECONDS) -> None:
        """Claim and run what is due of a kind until nothing is, or the slice is over; then ring on if anything is left.

        Returns when every call it started has been recorded.
        """
        started: set[Future[None]] = set()
        until = time.monotonic() + seconds
        rang_on = False
        while not self.stopping.is_set():
            slots = self._take_slots(until)
            if not slots:
                dispatch.ring(retryable=retryable)
                break
            claimed = self._claim(retryable=retryable, limit=slots)
            self._give_back_slots(slots - len(claimed))
            started.update(self._pool.submit(self._run, each) for each in claimed)
            started = {each for each in started if not each.done()}
            if len(claimed) < slots:
                if not started:
                    break
                # Whoever makes work due from here on rings; what this task still has to do is see its own calls recorded.
                wait(started)
                started.clear()
            elif not rang_on:
                dispatch.ring(retryable=retryable)
                rang_on = True
        wait(started)

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

    def _claim(self, *, retryable: bool, limit: int) -> list[Claimed]:
        worker = self.start()
        if not self.lease.holds:
            return []
        if self._unsure:
            self._hand_back_what_was_claimed_unseen(worker)
        try:
            claimed = lifecycle.claim(worker, retryable=retryable, tools=list(tools.every()), limit=limit)
        except LOST_CONNECTION:
            # The commit may have been made although its answer was lost: look before claiming again.
            self._unsure = True
            raise
        self._running.update(each.call for each in claimed)
        return claimed

    def _hand_back_what_was_claimed_unseen(self, worker: UUID) -> None:
        for call, attempt in lifecycle.claimed_but_not_running(worker, tuple(self._running)):
            # Provably not entered by this process, whatever the mark says: no thread was ever given it.
            lifecycle.record(
                call, attempt, NothingSent("its claim was not answered, so it was not started"), worker=worker
            )
        self._unsure = False

    def _run(self, claimed: Claimed) -> None:
        worker = self.worker
        assert worker is not None
        try:
            close_old_connections()
            tool = tools.find(claimed.tool)
            assert tool is not None
            context = _context(claimed)
            deadline = claimed.deadline
            if not claimed.entered:
                if not self._check(claimed, tool, context, worker=worker):
                    return
                deadline = _enter(claimed, worker=worker)
            if deadline is None:
                return  # cancelled, or too late: whoever refused the mark ends the call
            context.deadline = deadline
            # No input or output lies between the mark and the tool's first line.
            ending = perform(tool, claimed, context) if self.lease.holds else NothingSent("the worker's lease was over")
            self._record(claimed, ending, worker=worker)
        except Exception:
            logger.exception("a claimed call was left to the sweeps", extra={"call": str(claimed.call)})
        finally:
            self._running.discard(claimed.call)
            self._give_back_slots(1)

    def _check(self, claimed: Claimed, tool: tools.Tool, context: tools.ToolContext, *, worker: UUID) -> bool:
        assert tool.run_check is not None
        identity = {"worker": worker}
        try:
            tool.run_check(_arguments(tool, claimed.arguments), context)
        except tools.ToolRejected as error:
            lifecycle.refuse(
                claimed.call, claimed.attempt, **identity, code=error.code, message=error.message, retry=error.retry
            )
            return False
        except Exception as error:  # noqa: BLE001 - a check that cannot be made now is made again later
            logger.info("a check could not be made", extra={"call": str(claimed.call), "error": type(error).__name__})
            delay = getattr(error, "retry_after", None) or 1.0
            lifecycle.hand_back(
                claimed.call, claimed.attempt, **identity, delay=delay, why="its check could not be made"
            )
            return False
        return True

    def _record(self, claimed: Claimed, ending: Ending, *, worker: UUID) -> None:
        """Record, again and again while this process lives: the tool is never entered again because recording failed."""
        pause = 0.05
        while True:
            try:
                lifecycle.record(claimed.call, claimed.attempt, ending, worker=worker)
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

    def _register(self) -> None:
        since = time.monotonic()
        row = Worker(
            id=new_id(),
            host=socket.gethostname()[:100],
            pid=os.getpid(),
            slots=self._slots,
            tools={tool.name: tool.version for tool in tools.every()},
        )
        lifecycle.register(row)
        self.worker = row.pk
        self.lease.renew(since)

    def _beat_for_ever(self) -> None:
        while not self._closed.wait(settings.HEARTBEAT_EVERY):
            since = time.monotonic()
            try:
                assert self.worker is not None
                if lifecycle.beat(self.worker):
                    self.lease.renew(since)
                else:
                    # Declared gone, so its attempts are settled; go on under a new identity.
                    self._register()
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
        returned = tool(_arguments(tool, claimed.arguments), context)
    except tools.ToolRejected as error:
        return Refused(error.code, error.message, error.retry)
    except tools.NotRun as error:
        return NothingSent(error.message, error.retry_after)
    except tools.InDoubt as error:
        return InDoubt(error.code, error.message)
    except BaseException:
        logger.exception("a tool raised what nobody expected", extra={"call": str(claimed.call), "tool": tool.name})
        return Crashed()
    return success(tool, returned, stored_limit=claimed.stored_limit, spent=context.spent)


def success(tool: tools.Tool, returned: Any, *, stored_limit: int, spent: int = 0) -> Succeeded:
    """Make what a tool returned storable, with a warning where it is not what was declared or could not be kept whole."""
    shown, raw = (returned.shown, returned.raw) if isinstance(returned, tools.Result) else (returned, None)
    warning = _off_schema(tool.result, shown)
    text, altered = result_text(shown, limit=stored_limit)
    raw_text = "" if raw is None else result_text(raw, limit=stored_limit)[0]
    return Succeeded(text, raw_text, "; ".join(filter(None, (warning, altered))), spent)


def _off_schema(model: type[BaseModel] | None, shown: Any) -> str:
    if model is None or isinstance(shown, model):
        return ""
    try:
        model.model_validate(shown)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, fault["loc"])) or "result" for fault in error.errors()[:5])
        return f"the result is not what the tool declares ({fields})"
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
