"""The only writer of calls, attempts and journal: one short function per verb.

Each verb makes a move durable: lock the row, decide on what is now true, move, save, write the journal line, in one
transaction; what must follow is sent after the commit and may be lost. Locks are taken in one order: session, limits, calls
by ID. Rows are locked FOR NO KEY UPDATE, since the journal's foreign keys hold a key share of them. Times that decide are
the database's clock, read once the lock is held.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F

from toolcalls import dispatch, hot, notices, permissions, policy, sql
from toolcalls.canonical import digest
from toolcalls.codes import DID_NOT_RUN, Retry
from toolcalls.effects import Effect
from toolcalls.journal import SYSTEM, Line, write
from toolcalls.models import Attempt, Brake, Call, Session, StoredPolicy, Team, Turn, Worker
from toolcalls.outcomes import (
    Again,
    Crashed,
    End,
    Ending,
    InDoubt,
    NothingSent,
    Refused,
    Standing,
    Succeeded,
    after,
    doubt_after,
    known_failure,
)
from toolcalls.states import ANSWERED, UNFINISHED, Status
from toolcalls.tools import Tool

STANDING_FIELDS = [
    "status",
    "moves",
    "code",
    "message",
    "retry",
    "doubt",
    "claims",
    "entered",
    "entered_before",
    "live_attempt",
    "running_again",
    "cancel_asked_at",
    "due_at",
    "alarm_at",
    "approved_at",
    "started_at",
    "finished_at",
    "settled_verdict",
    "settled_at",
]
"""What a move may change; texts of results are named where they are set."""

SPENT_AT_MOST = 2**62

BULKY = ("received", "raw_result", "result")


class WrongState(Exception):
    """The call (or session) is not where the verb could take it; ``code`` and the text say where it is."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def clock() -> datetime:
    """Read the database's clock."""
    now: datetime = sql.run("SELECT clock_timestamp()", [])[0][0]
    return now


def lock(call: UUID) -> Call:
    """Lock a call's row and read it anew. Raises Call.DoesNotExist."""
    rows = Call.objects.select_for_update(no_key=True, of=("self",)).select_related("agent", "session")
    return rows.defer(*BULKY).get(pk=call)


# -- moving


def _move(
    call: Call,
    verb: str,
    *,
    by: str,
    attempt: int | None = None,
    detail: dict[str, Any] | None = None,
    also: Sequence[str] = (),
    **assigned: Any,
) -> None:
    source = call.status
    getattr(call, verb)(**assigned)
    call.moves += 1
    call.save(update_fields=[*STANDING_FIELDS, *also])
    write(
        [
            Line(
                call.team_id,
                "call.moved",
                by,
                session=call.session_id,
                call=call.pk,
                move=call.moves,
                source=source,
                target=call.status,
                code=call.code,
                attempt=attempt,
                detail=detail,
            )
        ]
    )
    if call.status in ANSWERED:
        identity = call.pk
        transaction.on_commit(lambda: notices.publish([identity]))


def note(
    call: Call, event: str, *, by: str, code: str = "", attempt: int | None = None, detail: dict[str, Any] | None = None
) -> None:
    """Write a line about a call that does not move it, inside the caller's transaction."""
    write(
        [
            Line(
                call.team_id,
                event,
                by,
                session=call.session_id,
                call=call.pk,
                code=code,
                attempt=attempt,
                detail=detail,
            )
        ]
    )


def _end(
    call: Call, end: End, *, by: str, at: datetime, attempt: int | None = None, detail: dict[str, Any] | None = None
) -> None:
    """Take a call to where an ending says: final, or unknown and then perhaps settled by what came late."""
    call.due_at = call.alarm_at = call.live_attempt = None
    call.retry = end.retry
    match end.status:
        case Status.OUTCOME_UNKNOWN:
            _move(call, "lose_track", by=by, attempt=attempt, detail=detail, code=end.code, message=end.message)
            _settle_by_late_evidence(call, at=at)
        case Status.SUCCEEDED:
            _move(
                call,
                "succeed",
                by=by,
                attempt=attempt,
                detail=detail,
                code=end.code,
                message=end.message,
                at=at,
                also=["result", "result_hash", "raw_result", "warning"],
            )
        case Status.REJECTED:
            _move(call, "reject", by=by, attempt=attempt, detail=detail, code=end.code, message=end.message, at=at)
        case _:
            _move(call, "fail", by=by, attempt=attempt, detail=detail, code=end.code, message=end.message, at=at)


def _start_by(call: Call) -> datetime | None:
    """Until when the call must have entered, if it has not since it was approved or ordered to run again."""
    if call.approved_at is None or call.entered > call.entered_before:
        return None
    return call.approved_at + timedelta(seconds=call.start_within)


def _standing(call: Call, *, may_go_on: bool = False) -> Standing:
    return Standing(
        rules=Effect(call.effect).rules,
        doubt=call.doubt,
        may_go_on=may_go_on,
        cancelled=call.cancel_asked_at is not None,
        only_attempt=call.max_attempts == 1,
    )


# -- admission


def admit(calls: Sequence[hot.NewCall], lines: Sequence[Line], room: hot.Room) -> None:
    """Insert calls in the state in which their admission ended, with their lines, inside the admitting transaction."""
    hot.admit(calls, lines, room)
    for retryable in {call.retryable for call in calls if call.due_at is not None}:
        dispatch.ring_after_commit(retryable=retryable)


# -- approval


def approve(call: Call, *, by: str, at: datetime, detail: dict[str, Any]) -> None:
    """Approve a locked call that awaits approval: from now on it is due."""
    call.due_at, call.alarm_at = at, at + timedelta(seconds=call.start_within)
    _move(call, "approve", by=by, detail=detail, at=at)
    dispatch.ring_after_commit(retryable=call.retryable)


def reject(call: Call, *, by: str, at: datetime, code: str, message: str, detail: dict[str, Any]) -> None:
    """Reject a locked call that awaits approval: by a person's word, or because it was amended."""
    _end(call, End(Status.REJECTED, code, message), by=by, at=at, detail=detail)


def expire(call: Call, *, at: datetime) -> None:
    """End a locked call whose approval deadline has passed. Nobody decided: the actor is the system."""
    message = "Nobody decided before the deadline, so it did not run. Ask again with a new call if it is still needed."
    _end(call, End(Status.REJECTED, "APPROVAL_EXPIRED", message), by=SYSTEM, at=at)


# -- execution


@dataclass(frozen=True)
class Claimed:
    """A call that this worker may run now, with all that running it takes."""

    call: UUID
    attempt: int
    run: int
    entered: bool
    deadline: datetime | None
    tool: str
    arguments: str
    idempotency_key: str
    agent: str
    on_behalf_of: str
    stored_limit: int
    start_by: datetime


def claim(worker: UUID, *, retryable: bool, tools: Sequence[Tool], limit: int) -> list[Claimed]:
    """Claim up to ``limit`` due calls of a kind for this worker, in one fenced transaction.

    A call that can never start any more is ended here; one that cannot start yet is left waiting.
    """
    if not hot.anything_due(retryable=retryable):
        return []
    have = {tool.name: tool for tool in tools}
    with transaction.atomic():
        candidates = hot.lock_due(retryable=retryable, tools=[(tool.name, tool.version) for tool in tools], limit=limit)
        chosen: list[tuple[hot.Candidate, bool]] = []
        for each in candidates:
            refusal = _why_never(each)
            if refusal is None:
                chosen.append((each, each.entered > 0 or have[each.tool].run_check is None))
            else:
                _end_unstarted(each, refusal)
        deadlines = hot.claim(worker, chosen) if chosen else {}
    return [
        Claimed(
            call=each.id,
            attempt=each.claims + 1,
            run=each.entered + 1,
            entered=entered,
            deadline=deadlines[each.id],
            tool=each.tool,
            arguments=each.arguments,
            idempotency_key=f"{each.session_id}/{each.turn_name}/{each.tool_call_id}",
            agent=each.agent_name,
            on_behalf_of=each.on_behalf_of,
            stored_limit=each.stored_limit,
            start_by=each.start_by,
        )
        for each, entered in chosen
    ]


def _why_never(each: hot.Candidate) -> tuple[str, str] | None:
    if not each.hash_holds:
        return "NOT_RUN", f"{DID_NOT_RUN}: the stored arguments are not the ones that were admitted."
    if not each.agent_enabled or not permissions.may_use(each.tool, each.agent_tools, each.session_tools):
        return "PERMISSION_WITHDRAWN", f"The agent may no longer use {each.tool}."
    if each.unstarted and each.now > each.start_by:
        return "NOT_STARTED_IN_TIME", f"{DID_NOT_RUN}: no worker took it in time."
    if each.twin:
        return "OUTCOME_UNRESOLVED", f"An earlier call of this operation has an unknown outcome: {each.twin}."
    if not each.budget_left:
        return "RETRIES_EXHAUSTED", "The session's time or spend leaves no further attempt."
    return None


def _end_unstarted(each: hot.Candidate, refusal: tuple[str, str]) -> None:
    call, at = lock(each.id), clock()
    if refusal[0] == "OUTCOME_UNRESOLVED":
        call.refers_to_id = each.twin
        call.save(update_fields=["refers_to"])
    _end(call, known_failure(_standing(call), *refusal), by=SYSTEM, at=at)


def claimed_but_not_running(worker: UUID, running: Collection[tuple[UUID, int]]) -> list[tuple[UUID, int]]:
    """Look up live attempts of this worker that it does not run: claims whose commit was made but not answered."""
    mine = Attempt.objects.filter(worker_id=worker, finished_at=None, call__live_attempt=F("number"))
    return [each for each in mine.values_list("call_id", "number") if each not in running]


def enter(claimed: Claimed, *, worker: UUID) -> datetime | None:
    """Mark an attempt as entered after its check: a second fenced commit. Gives its deadline, None if refused."""
    return hot.enter(claimed.call, claimed.attempt, worker=worker)


def hand_back(call: UUID, attempt: int, *, worker: UUID, delay: float, why: str) -> None:
    """Give back an attempt whose tool was not entered: it does not count, and the call is due after ``delay`` seconds.

    One that was marked as entered, although the tool's first line was never reached, counts: nothing was sent.
    """
    with transaction.atomic():
        row, at = lock(call), clock()
        if row.live_attempt == attempt:
            tried = row.attempts.get(number=attempt)
            if tried.entered_at is None:
                _hand_back(row, tried, by=f"worker:{worker}", at=at, delay=delay, why=why)
            else:
                _end_attempt(row, tried, NothingSent(why, delay), by=f"worker:{worker}", at=at)


def _hand_back(call: Call, attempt: Attempt, *, by: str, at: datetime, delay: float, why: str) -> None:
    _finish(attempt, Attempt.State.NOT_ENTERED, code="", message=why, at=at)
    call.live_attempt, call.alarm_at = None, _start_by(call)
    call.due_at = at + timedelta(seconds=delay)
    call.save(update_fields=STANDING_FIELDS)
    note(call, "attempt.handed_back", by=by, attempt=attempt.number, detail={"why": why})
    dispatch.ring_after_commit(retryable=call.retryable)


def refuse(call: UUID, attempt: int, *, worker: UUID, code: str, message: str) -> None:
    """End a call whose own check refused it before it entered. An earlier attempt's doubt stays."""
    with transaction.atomic():
        row, at = lock(call), clock()
        if row.live_attempt == attempt:
            _finish(row.attempts.get(number=attempt), Attempt.State.NOT_ENTERED, code=code, message=message, at=at)
            end = known_failure(_standing(row), code, f"{DID_NOT_RUN}: {message}", retry=Retry.NEW_CALL_OK)
            _end(row, end, by=f"worker:{worker}", at=at, attempt=attempt)


_STATES: dict[type, Attempt.State] = {
    Succeeded: Attempt.State.SUCCEEDED,
    Refused: Attempt.State.FAILED,
    NothingSent: Attempt.State.NOTHING_SENT,
    InDoubt: Attempt.State.IN_DOUBT,
    Crashed: Attempt.State.IN_DOUBT,
}


def record(call: UUID, attempt: int, ending: Ending, *, worker: UUID, spent: int = 0) -> None:
    """Record how an attempt ended, in one transaction fenced on the attempt. To do it again changes nothing.

    Where the attempt is no longer live, the ending is kept on it as late evidence. ``spent`` counts however it ended.
    """
    if isinstance(ending, Succeeded) and not spent and _record_plain_success(call, attempt, ending, worker=worker):
        notices.publish([call])
        return
    with transaction.atomic():
        session = Session.objects.select_for_update(no_key=True, of=("self",)).get(calls=call) if spent else None
        row, at = lock(call), clock()
        tried = row.attempts.get(number=attempt)
        if row.live_attempt != attempt and (
            tried.late_at is not None or (tried.state, tried.code) == (_STATES[type(ending)], _code(ending))
        ):
            return
        if session is not None:
            tried.spent = min(spent, SPENT_AT_MOST)
            tried.save(update_fields=["spent"])
            session.spend_used = min(session.spend_used + tried.spent, SPENT_AT_MOST)
            session.save(update_fields=["spend_used"])
        if row.live_attempt == attempt:
            _end_attempt(row, tried, ending, by=f"worker:{worker}", at=at)
        else:
            _keep_late(row, tried, ending, by=f"worker:{worker}", at=at)


def _record_plain_success(call: UUID, attempt: int, success: Succeeded, *, worker: UUID) -> bool:
    """Record the ending that nearly every call has in one statement; False where there is more to decide."""
    if success.warning:
        return False
    return hot.record_success(
        call,
        attempt,
        worker=worker,
        result=success.result,
        result_hash=digest(success.result),
        raw=success.raw or None,
    )


def _code(ending: Ending) -> str:
    match ending:
        case Succeeded(warning=warning):
            return "OK_WITH_WARNING" if warning else "OK"
        case Refused(code=code) | InDoubt(code=code):
            return code
        case NothingSent():
            return "NOT_RUN"
        case Crashed():
            return "INTERNAL_ERROR"


def _text(ending: Ending) -> str:
    match ending:
        case Succeeded(result=result):
            return result
        case Crashed():
            return ""
        case _:
            return ending.message


def _finish(attempt: Attempt, state: Attempt.State, *, code: str, message: str, at: datetime) -> None:
    attempt.state, attempt.code, attempt.message, attempt.finished_at = state, code, message, at
    attempt.save(update_fields=["state", "code", "message", "finished_at"])


def _end_attempt(call: Call, attempt: Attempt, ending: Ending, *, by: str, at: datetime) -> None:
    succeeded = isinstance(ending, Succeeded)
    _finish(
        attempt,
        _STATES[type(ending)],
        code=_code(ending),
        message="" if succeeded else _text(ending),
        at=at,
    )
    standing = _standing(call, may_go_on=_may_go_on(call, at=at))
    call.doubt = doubt_after(ending, standing)
    call.live_attempt = None
    match after(ending, standing):
        case Again(retry_after=retry_after):
            call.due_at, call.alarm_at = at + timedelta(seconds=_delay(call, retry_after)), None
            call.code, call.message = _code(ending), _text(ending)
            call.save(update_fields=STANDING_FIELDS)
            note(call, "attempt.ended", by=by, code=_code(ending), attempt=attempt.number)
            _settle_by_late_evidence(call, at=at)
        case End() as end:
            if isinstance(ending, Succeeded):
                _keep_result(call, ending)
            _end(call, end, by=by, at=at, attempt=attempt.number)


def _keep_result(call: Call, success: Succeeded) -> None:
    call.result, call.raw_result, call.warning = success.result, success.raw or None, success.warning
    call.result_hash = digest(success.result)


def _may_go_on(call: Call, *, at: datetime) -> bool:
    if call.cancel_asked_at is not None or call.entered - call.entered_before >= call.max_attempts:
        return False
    session = Session.objects.get(pk=call.session_id)
    in_time = session.seconds_limit is None or at <= session.opened_at + timedelta(seconds=session.seconds_limit)
    return in_time and (session.spend_limit is None or session.spend_used < session.spend_limit)


def _delay(call: Call, retry_after: float | None) -> float:
    """Give the seconds to the next attempt: the service's own delay up to a cap, else full jitter under a rising bound."""
    frozen = policy.thaw(call.policy)
    if retry_after is not None:
        return min(max(0.0, retry_after), frozen.backoff_cap)
    bound = min(frozen.backoff * 2 ** (call.entered - call.entered_before - 1), frozen.backoff_cap)
    return random.uniform(0, bound)  # noqa: S311 - jitter is no secret


def lose(attempt: int) -> None:
    """Settle the live attempt of a worker that is gone: in doubt if it had entered, else given back uncounted."""
    with transaction.atomic():
        tried = Attempt.objects.get(pk=attempt)
        call, at = lock(tried.call_id), clock()
        if call.live_attempt != tried.number:
            return
        tried.refresh_from_db()
        if tried.entered_at is None:
            _hand_back(call, tried, by=SYSTEM, at=at, delay=0, why="its worker was lost before the tool was entered")
        else:
            _end_attempt(
                call, tried, InDoubt("WORKER_LOST", "The worker was lost while the tool ran."), by=SYSTEM, at=at
            )


# -- what comes late


def _keep_late(call: Call, attempt: Attempt, ending: Ending, *, by: str, at: datetime) -> None:
    attempt.late_state, attempt.late_code, attempt.late_at = _STATES[type(ending)], _code(ending), at
    attempt.late_text = _text(ending)
    attempt.save(update_fields=["late_state", "late_code", "late_at", "late_text"])
    note(call, "attempt.late", by=by, code=attempt.late_code, attempt=attempt.number)
    _settle_by_late_evidence(call, at=at)


def _settle_by_late_evidence(call: Call, *, at: datetime) -> None:
    """Let a late success, or a late definite failure of the only attempt, settle what nobody has settled.

    It may have come before or after the call became unknown. A call that executes without a live attempt ends succeeded; a
    run again that nobody claimed yet is first taken back. Rule: behaviour, section 8, "Lost workers".
    """
    if not policy.thaw(call.policy).late_settles:
        return
    entered = list(call.attempts.filter(entered_at__isnull=False))
    late = [each for each in entered if each.late_state == Attempt.State.SUCCEEDED]
    # A read whose result cannot be used has no success to show for it.
    success = next((each for each in late if call.writes or each.late_code == "OK"), None)
    failure = entered[0] if len(entered) == 1 and entered[0].late_state == Attempt.State.FAILED else None
    if success is None and failure is None:
        return
    if call.status == Status.EXECUTING and call.live_attempt is None and success:
        call.result, call.result_hash = success.late_text, digest(success.late_text or "")
        _end(call, End(Status.SUCCEEDED, success.late_code), by=SYSTEM, at=at, attempt=success.number)
        return
    if call.status == Status.APPROVED and call.running_again:
        call.due_at = call.alarm_at = None
        _move(
            call, "lose_track", by=SYSTEM, code=call.doubt, message="A late result came before the run again started."
        )
    if call.status == Status.OUTCOME_UNKNOWN:
        evidence = success or failure
        assert evidence is not None
        settle(
            call,
            took_effect=success is not None,
            by=SYSTEM,
            at=at,
            result=evidence.late_text if success else None,
            message="" if success else evidence.late_text or "",
            detail={"evidence": f"late result of attempt {evidence.number}"},
        )


# -- reconciliation


def settle(
    call: Call,
    *,
    took_effect: bool,
    by: str,
    at: datetime,
    detail: dict[str, Any],
    result: str | None = None,
    message: str = "",
) -> None:
    """Settle a locked call of unknown outcome: it ends as what it turned out to have done."""
    if call.status != Status.OUTCOME_UNKNOWN:
        raise WrongState("WRONG_STATE", f"The call is {call.status}, not outcome_unknown.")
    call.settled_verdict = "took_effect" if took_effect else "did_not_take_effect"
    call.settled_at = at
    if took_effect:
        call.result, call.result_hash = result, digest(result) if result is not None else ""
        _end(call, End(Status.SUCCEEDED, "CONFIRMED_DONE", message), by=by, at=at, detail=detail)
    else:
        text = message or "It was confirmed that the call did not take effect."
        _end(call, End(Status.FAILED, "CONFIRMED_NOT_DONE", text), by=by, at=at, detail=detail)
    write([Line(call.team_id, "session.note", by, session=call.session_id, call=call.pk, code=call.code)])


def run_again(call: Call, *, by: str, at: datetime, detail: dict[str, Any]) -> None:
    """Order another run of a locked call of unknown outcome, under the same key; its doubt stays."""
    if call.status != Status.OUTCOME_UNKNOWN:
        raise WrongState("WRONG_STATE", f"The call is {call.status}, not outcome_unknown.")
    call.due_at, call.alarm_at = at, at + timedelta(seconds=call.start_within)
    call.cancel_asked_at = None
    _move(call, "run_again", by=by, detail=detail, at=at)
    dispatch.ring_after_commit(retryable=call.retryable)


# -- deadlines


def on_alarm(call: Call) -> bool:
    """Do what a locked call's passed deadline asks for. False where, read again, none has passed."""
    at = clock()
    if call.alarm_at is None or at < call.alarm_at:
        return False
    if call.status == Status.AWAITING_APPROVAL:
        expire(call, at=at)
    elif call.status == Status.EXECUTING and call.live_attempt is not None and _start_by(call) is None:
        tried = call.attempts.get(number=call.live_attempt)
        ending = InDoubt("TIMEOUT_UNKNOWN", "The tool did not answer before its deadline and grace had passed.")
        _end_attempt(call, tried, ending, by=SYSTEM, at=at)
    else:
        if call.live_attempt is not None:
            tried = call.attempts.get(number=call.live_attempt)
            _finish(tried, Attempt.State.NOT_ENTERED, code="NOT_STARTED_IN_TIME", message="", at=at)
        refusal = known_failure(_standing(call), "NOT_STARTED_IN_TIME", f"{DID_NOT_RUN}: no worker took it in time.")
        _end(call, refusal, by=SYSTEM, at=at)
    return True


# -- cancel


def cancel(call: Call, *, by: str, at: datetime) -> str:
    """Cancel a locked, unfinished call. Gives what became of it: its status, or ``cancelling``.

    Not started: rejected. Entered and running: asked to stop, and what it then really did is recorded. Between two attempts,
    or claimed but not entered: ended at once. The doubt of an earlier attempt stays.
    """
    if call.status == Status.AWAITING_APPROVAL and call.deadline is not None and at > call.deadline:
        expire(call, at=at)  # the deadline came first, whether or not a sweep has run
        return str(call.status)
    if call.status == Status.AWAITING_APPROVAL or (call.status == Status.APPROVED and not call.doubt):
        _end(call, End(Status.REJECTED, "CANCELLED", "Cancelled before it started; it did not run."), by=by, at=at)
        return str(call.status)
    call.cancel_asked_at = call.cancel_asked_at or at
    if call.live_attempt is not None:
        tried = call.attempts.get(number=call.live_attempt)
        if tried.entered_at is not None:
            call.save(update_fields=["cancel_asked_at"])
            note(call, "call.cancel_asked", by=by, attempt=call.live_attempt)
            return "cancelling"
        _finish(tried, Attempt.State.NOT_ENTERED, code="CANCELLED", message="", at=at)
    text = "Cancelled; no further attempt was made." if call.entered else f"{DID_NOT_RUN}: it was cancelled."
    _end(call, known_failure(_standing(call), "CANCELLED", text), by=by, at=at)
    return str(call.status)


def cancel_call(call: UUID, *, by: str) -> Call:
    """Cancel one call. Raises WrongState with its real status where it has ended."""
    with transaction.atomic():
        row, at = lock(call), clock()
        if row.status not in UNFINISHED:
            raise WrongState("WRONG_STATE", f"The call is {row.status}; there is nothing left to cancel.")
        cancel(row, by=by, at=at)
        return row


def _cancel_all(unfinished: Iterable[UUID], *, by: str) -> list[tuple[Call, str]]:
    became = []
    for identity in unfinished:
        row, at = lock(identity), clock()
        if row.status in UNFINISHED:
            became.append((row, cancel(row, by=by, at=at)))
    return became


def cancel_turn(session: UUID, turn: UUID, *, by: str) -> list[tuple[Call, str]]:
    """Cancel a turn: nothing more is admitted to it, and its unfinished calls are cancelled. Once more changes nothing."""
    with transaction.atomic():
        parent = Session.objects.select_for_update(no_key=True).get(pk=session)
        at = clock()
        if Turn.objects.filter(pk=turn, cancelled_at=None).update(cancelled_at=at):
            write([Line(parent.team_id, "turn.cancelled", by, session=session, detail={"turn": str(turn)})])
        unfinished = Call.objects.filter(turn=turn, status__in=UNFINISHED).order_by("pk").values_list("pk", flat=True)
        return _cancel_all(list(unfinished), by=by)


def cancel_session(session: UUID, *, by: str) -> list[tuple[Call, str]]:
    """Cancel a session with all its unfinished calls, in one transaction over its row and theirs.

    Raises WrongState with its real status where it has ended and nothing of it is unfinished.
    """
    with transaction.atomic():
        row = Session.objects.select_for_update(no_key=True).get(pk=session)
        calls = Call.objects.filter(session=session, status__in=UNFINISHED).order_by("pk").values_list("pk", flat=True)
        unfinished = list(calls)
        if row.status == Session.Status.CANCELLED or (row.status == Session.Status.CLOSED and not unfinished):
            raise WrongState("WRONG_STATE", f"The session is {row.status}; there is nothing left to cancel.")
        row.status, row.ended_at = Session.Status.CANCELLED, row.ended_at or clock()
        row.save(update_fields=["status", "ended_at"])
        write([Line(row.team_id, "session.cancelled", by, session=session)])
        return _cancel_all(unfinished, by=by)


def close_session(session: UUID, *, by: str) -> Session:
    """Close a session: no new calls, and nothing else changes. Once more changes nothing.

    Raises WrongState where it was cancelled.
    """
    with transaction.atomic():
        row = Session.objects.select_for_update(no_key=True).get(pk=session)
        if row.status == Session.Status.CANCELLED:
            raise WrongState("WRONG_STATE", "The session is cancelled.")
        if row.status == Session.Status.OPEN:
            row.status, row.ended_at = Session.Status.CLOSED, clock()
            row.save(update_fields=["status", "ended_at"])
            write([Line(row.team_id, "session.closed", by, session=session)])
        return row


def acknowledge(calls: Iterable[UUID], *, by: str) -> None:
    """Note that the agent received what was last answered about these calls; the first time is kept."""
    with transaction.atomic():
        for each in sorted(calls):
            row = lock(each)
            if row.status in ANSWERED and row.reported_at is None:
                row.reported_at = clock()
                row.save(update_fields=["reported_at"])
                note(row, "call.reported", by=by)


# -- brakes and policies: lines of the team's own chain


def pull_brake(*, team: Team | None, agent_id: UUID | None = None, tool: str = "", by: str) -> bool:
    """Pause a team, an agent or a tool (in one team, or everywhere): nothing new starts. False where it was paused."""
    with transaction.atomic():
        _, pulled = Brake.objects.get_or_create(team=team, agent_id=agent_id, tool=tool)  # type: ignore[misc]
        if pulled:
            _brake_line("brake.pulled", team=team, agent_id=agent_id, tool=tool, by=by)
        return pulled


def release_brake(*, team: Team | None, agent_id: UUID | None = None, tool: str = "", by: str) -> bool:
    """Resume what a brake paused; what is due is rung for. False where nothing was paused."""
    with transaction.atomic():
        released, _ = Brake.objects.filter(team=team, agent_id=agent_id, tool=tool).delete()  # type: ignore[misc]
        if released:
            _brake_line("brake.released", team=team, agent_id=agent_id, tool=tool, by=by)
            for retryable in (True, False):
                dispatch.ring_after_commit(retryable=retryable)
        return bool(released)


def _brake_line(event: str, *, team: Team | None, agent_id: UUID | None, tool: str, by: str) -> None:
    detail = {"tool": tool, "agent": str(agent_id or "")}
    told = [team.pk] if team else list(Team.objects.values_list("pk", flat=True))
    if told:
        write([Line(each, event, by, detail=detail) for each in told])


def store_policy(team: Team, tool: Tool, values: Any, *, by: str) -> StoredPolicy:
    """Store a team's override for a tool; it applies to later calls. Raises policy.InvalidPolicy."""
    valid = policy.override(values, tool.policy, measures=set(tool.measures)).values()
    with transaction.atomic():
        stored, _ = StoredPolicy.objects.update_or_create(team=team, tool=tool.name, defaults={"values": valid})
        write([Line(team.pk, "policy.stored", by, detail={"tool": tool.name, "values": valid})])
        return stored


def drop_policy(team: Team, tool: str, *, by: str) -> bool:
    """Drop a team's override for a tool, also of one that a deploy removed. False where there was none."""
    with transaction.atomic():
        dropped, _ = StoredPolicy.objects.filter(team=team, tool=tool).delete()
        if dropped:
            write([Line(team.pk, "policy.dropped", by, detail={"tool": tool})])
        return bool(dropped)


# -- workers


def register(worker: Worker) -> None:
    """Insert the row of a process that is about to execute calls."""
    worker.started_at = worker.beat_at = clock()
    worker.save(force_insert=True)


def beat(worker: UUID) -> bool:
    """Move a worker's heartbeat. False where it was declared gone: its identity may do nothing more."""
    statement = "UPDATE toolcalls_worker SET beat_at = clock_timestamp() WHERE id = %s AND gone_at IS NULL"
    return sql.change(statement, [worker]) == 1
