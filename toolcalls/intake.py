"""From a proposal to a call that is admitted or refused, and stored either way (behaviour, section 4).

A tool's own check may do I/O, so it is asked before the admitting transaction; there, with the session's and the limits' rows
locked, everything is decided again. Many calls of one request share one transaction and one doorbell.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import connection, transaction

from toolcalls import lifecycle, permissions, pipeline, policy, sql, tools
from toolcalls.canonical import digest, safe_text
from toolcalls.codes import OF_STAGE_ZERO, OF_THE_BUDGET, OF_THE_GUARD
from toolcalls.effects import Effect
from toolcalls.hot import NewCall, Room
from toolcalls.journal import Line, write
from toolcalls.models import Agent, Call, LimitRow, Session, new_id
from toolcalls.pipeline import (
    Admitted,
    AgentTerms,
    Batch,
    Earlier,
    Examined,
    Facts,
    NeedsCheck,
    Proposal,
    Refusal,
    Refused,
    Replay,
)
from toolcalls.policy import Defaults, Limit
from toolcalls.states import Status

CHECK_SECONDS = 5.0
COUNTED_BY_LIMITS = ("awaiting_approval", "approved", "executing", "outcome_unknown", "succeeded")
EARLIER_AT_MOST = 64

logger = logging.getLogger(__name__)
_checkers = ThreadPoolExecutor(16, thread_name_prefix="check")


class NoSuchSession(Exception):
    """This agent has no session of this name."""


class SessionMismatch(Exception):
    """The agent opened a session of this name before, with another body."""


class WiderThanAllowed(Exception):
    """A session may only tighten what its agent may do; the text says what is wider."""


@dataclass(frozen=True)
class Answered:
    """A stored call: ``new`` is its row as it was inserted just now, None where it was there before.

    ``replayed`` where it, or its operation's result, was there before.
    """

    id: UUID
    status: str
    replayed: bool
    new: NewCall | None = None


@dataclass(frozen=True)
class Mismatch:
    """The same call ID stands for something else; the first stands and nothing was stored."""

    tool_call_id: str
    message: str


@dataclass(frozen=True)
class Opening:
    """What an agent asks of a new session."""

    session_id: str
    body_digest: str
    on_behalf_of: str = ""
    default_effect: str = ""
    allowed_tools: list[str] | None = None
    calls: int | None = None
    turns: int | None = None
    seconds: int | None = None
    spend: int | None = None
    metadata: str = ""


def open_session(agent: Agent, opening: Opening) -> tuple[Session, bool]:
    """Open a session, or find the one that the same request opened before; the flag says which.

    Raises SessionMismatch, and WiderThanAllowed where it would relax what a manager set.
    """
    found = Session.objects.filter(agent=agent, session_id=opening.session_id).first()
    if found is None:
        limits = _budgets(agent, opening)
        if opening.default_effect:
            own = Effect(agent.default_effect) if agent.default_effect else Effect.UNCLASSIFIED
            if not Effect(opening.default_effect).at_least_as_strict_as(own):
                raise WiderThanAllowed(f"default_effect {opening.default_effect} is laxer than the agent's {own}.")
        _only_narrower_tools(agent, opening.allowed_tools)
        with transaction.atomic():
            now = lifecycle.clock()
            values = dict(
                team_id=agent.team_id,
                body_digest=opening.body_digest,
                on_behalf_of=opening.on_behalf_of,
                default_effect=opening.default_effect,
                allowed_tools=opening.allowed_tools,
                metadata=opening.metadata,
                opened_at=now,
                **limits,
            )
            session = Session(agent=agent, session_id=opening.session_id, **values)
            Session.objects.bulk_create([session], ignore_conflicts=True)
            found = Session.objects.get(agent=agent, session_id=opening.session_id)
            if found.pk == session.pk:
                write([Line(agent.team_id, "session.opened", actor(agent), session=found.pk)])
                return found, True
    if found.body_digest != opening.body_digest:
        raise SessionMismatch(f"Session {opening.session_id} was opened before with another body.")
    return found, False


def _budgets(agent: Agent, opening: Opening) -> dict[str, int | None]:
    limits = {}
    for name in ("calls", "turns", "seconds", "spend"):
        own, asked = agent.budgets.get(name), getattr(opening, name)
        if own is not None and asked is not None and asked > own:
            raise WiderThanAllowed(f"budgets.{name} {asked} is more than the agent's {own}.")
        limits[f"{name}_limit"] = own if asked is None else asked
    return limits


def _only_narrower_tools(agent: Agent, asked: list[str] | None) -> None:
    for pattern in asked or ():
        if not any(permissions.covers(own, pattern) for own in agent.tools):
            raise WiderThanAllowed(f"allowed_tools: {safe_text(pattern, 80)!r} is not within what the agent may use.")


def actor(agent: Agent) -> str:
    """Name an agent as the journal does."""
    return f"agent:{agent.name}"


def submit(
    agent: Agent, session_id: str, turn_id: str, proposals: Sequence[Proposal], *, trace_id: str = ""
) -> list[Answered | Mismatch]:
    """Admit or refuse each call of a turn, store it, and answer in the order asked.

    Raises NoSuchSession. Model mistakes are no errors: they are stored calls with a code.
    """
    admission = _Admission(agent, session_id, turn_id, list(proposals), trace_id=trace_id)
    checked: dict[int, Refusal | bool] = {}
    for _ in range(3):
        needed = admission.unchecked(checked)
        checked |= admission.check(needed)
        answers = admission.admit(checked)
        if answers is not None:
            return answers
    # What was true before each check was no longer true after it: the agent may try once more.
    return admission.admit(dict.fromkeys(range(len(proposals)), _UNAVAILABLE) | checked) or []


_UNAVAILABLE = Refusal("CHECK_UNAVAILABLE", "The tool's own check could not be made; nothing ran.")


class _Admission:
    """One request on its way in."""

    def __init__(
        self, agent: Agent, session_id: str, turn_id: str, proposals: list[Proposal], *, trace_id: str
    ) -> None:
        self.agent, self.session_id, self.turn_id, self.proposals = agent, session_id, turn_id, proposals
        self.trace_id = trace_id
        self.terms = terms_of(agent)

    def unchecked(self, checked: Mapping[int, Refusal | bool]) -> dict[int, Examined]:
        """Find the calls whose tool's own check must be asked: those that all cheaper stages would let pass."""
        with_check = [i for i, each in enumerate(self.proposals) if _has_check(each.tool) and i not in checked]
        if not with_check:
            return {}
        read = _read(self.agent, self.session_id, self.turn_id, self.proposals, lock=False)
        needed, batch = {}, Batch()
        for index in with_check:
            examined = read.examined[index]
            if self.proposals[index].tool_call_id in read.existing:
                continue
            verdict = pipeline.decide(
                examined, batch.seen_by(read.facts), self.terms, used=lambda *_: 0, defaults=deployment_defaults()
            )
            if isinstance(verdict, NeedsCheck):
                needed[index] = examined
        return needed

    def check(self, needed: Mapping[int, Examined]) -> dict[int, Refusal | bool]:
        """Ask the tools' own checks, side by side, outside any transaction and within CHECK_SECONDS."""
        asked = {
            index: _checkers.submit(_ask, examined, self._context(examined.proposal))
            for index, examined in needed.items()
        }
        answers: dict[int, Refusal | bool] = {}
        for index, future in asked.items():
            try:
                answers[index] = future.result(timeout=CHECK_SECONDS) or True
            except TookTooLong:
                answers[index] = _UNAVAILABLE
        return answers

    def _context(self, proposal: Proposal) -> tools.ToolContext:
        # No attempt exists yet; a check reads only, so it is given no key that a service could take for an effect's.
        return tools.ToolContext(
            idempotency_key="",
            key_digest="",
            attempt=0,
            deadline=datetime.now(UTC) + timedelta(seconds=CHECK_SECONDS),
            agent=self.agent.name,
            on_behalf_of="",
        )

    def _limited(self, read: "_Read") -> Iterator[str]:
        """Name the limits per day that calls of this request may fall under."""
        for each in read.examined:
            if each.tool is not None and each.refusal is None:
                applied = pipeline.policy_for(each.tool, read.facts, self.terms, defaults=deployment_defaults())
                yield from (
                    scope for scope, limit in pipeline.scoped(applied, self.terms, each.tool.name) if limit.per == "day"
                )

    def admit(self, checked: Mapping[int, Refusal | bool]) -> list[Answered | Mismatch] | None:
        """Decide everything again with the rows locked, and store it. None where a check turns out to be missing."""
        with transaction.atomic():
            read = _read(self.agent, self.session_id, self.turn_id, self.proposals, lock=True)
            batch = Batch()
            seen: dict[str, Call | NewCall] = {**read.existing}
            stock = _Stock(self.agent, read, turn_name=self.turn_id)
            stock.lock(self._limited(read))
            answers: list[Answered | Mismatch] = []
            for index, proposal in enumerate(self.proposals):
                examined = read.examined[index]
                first = seen.get(proposal.tool_call_id)
                if first is not None:
                    answers.append(_again(first, proposal, examined))
                    continue
                facts = batch.seen_by(read.facts)
                verdict = pipeline.decide(
                    examined,
                    facts,
                    self.terms,
                    used=stock.used,
                    defaults=deployment_defaults(),
                    checked=checked.get(index),
                )
                if isinstance(verdict, NeedsCheck):
                    transaction.set_rollback(True)
                    return None
                new, lines = build(
                    verdict,
                    examined,
                    agent=self.agent,
                    session=read.facts.session,
                    turn=stock.turn,
                    now=facts.now,
                    trace_id=self.trace_id,
                )
                if not (isinstance(verdict, Refused) and verdict.stage == 0):
                    batch.calls += 1
                    batch.turns += not facts.turn_counted
                stock.add(new, lines)
                if new.code not in OF_THE_GUARD | OF_STAGE_ZERO and new.replay_of_id is None:
                    batch.earlier.append(_as_earlier(new))
                seen[proposal.tool_call_id] = new
                answers.append(Answered(new.id, new.status, isinstance(verdict, Replay), new))
            stock.flush(calls_used=batch.calls, counts=batch.turns > 0)
        return answers


def _has_check(name: str) -> bool:
    found = tools.find(name)
    return found is not None and found.run_check is not None


def _ask(examined: Examined, context: tools.ToolContext) -> Refusal | None:
    assert examined.tool is not None
    assert examined.tool.run_check is not None
    try:
        examined.tool.run_check(examined.model, context)
    except tools.ToolRejected as error:
        return Refusal(error.code, safe_text(error.message, pipeline.MESSAGE_LIMIT), retry=error.retry)
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing ran and the agent may call again
        logger.warning("a check could not be made", extra={"tool": examined.tool.name, "error": type(error).__name__})
        return _UNAVAILABLE
    finally:
        connection.close()
    return None


def _again(first: Call | NewCall, proposal: Proposal, examined: Examined) -> Answered | Mismatch:
    same = (first.tool, first.received_hash, first.operation_id) == (
        proposal.tool,
        digest(examined.received),
        proposal.operation_id,
    )
    if same:
        return Answered(first.id, first.status, replayed=True)
    return Mismatch(
        proposal.tool_call_id,
        "This call ID stands for another tool, arguments or operation; the first stands. Use a new ID for a correction.",
    )


def terms_of(agent: Agent) -> AgentTerms:
    """Give what a manager set for an agent. A stored limit that cannot be read allows nothing."""
    limits = tuple(Limit.model_validate(each) for each in agent.limits)
    return AgentTerms(agent.pk, tuple(agent.tools), agent.default_effect, limits)


def deployment_defaults() -> Defaults:
    """Give what this deployment sets for policies that are silent."""
    return Defaults(
        approval_within=settings.APPROVAL_WITHIN,
        start_within=settings.START_WITHIN,
        grace=settings.GRACE,
    )


# -- what is read


@dataclass(frozen=True)
class _Read:
    facts: Facts
    turn: UUID | None
    existing: dict[str, Call]
    examined: list[Examined]


# The locked row itself, not a snapshot of it: what others committed while this waited is in it.
_SESSION = """
    SELECT s.allowed_tools::text, s.id, s.status, s.opened_at, s.calls_limit, s.turns_limit, s.seconds_limit, s.spend_limit,
        s.calls_used, s.turns_used, s.spend_used, s.default_effect
    FROM toolcalls_session s WHERE s.agent_id = %s AND s.session_id = %s
"""

_FACTS = """
    SELECT clock_timestamp(),
        (SELECT ARRAY[t.id::text, (t.cancelled_at IS NOT NULL)::int::text, t.counted::int::text] FROM toolcalls_turn t
            WHERE t.session_id = %(session)s AND t.turn_id = %(turn)s),
        (SELECT array_agg(b.tool) FROM toolcalls_brake b
            WHERE (b.team_id IS NULL OR b.team_id = %(team)s) AND (b.agent_id IS NULL OR b.agent_id = %(agent)s)),
        (SELECT array_agg(ARRAY[p.tool, p.values::text]) FROM toolcalls_storedpolicy p
            WHERE p.team_id = %(team)s AND p.tool = ANY(%(tools)s)),
        (SELECT array_agg(c.id) FROM toolcalls_call c JOIN toolcalls_turn t ON t.id = c.turn_id
            WHERE t.session_id = %(session)s AND t.turn_id = %(turn)s AND c.tool_call_id = ANY(%(ids)s))
"""

_EARLIER_COLUMNS = """
    c.id, c.session_id, c.tool, c.operation, c.operation_id, c.arguments_hash, c.status, c.code, c.writes, c.result_hash,
    c.status = 'outcome_unknown' OR c.running_again AND c.finished_at IS NULL
"""

# Refusals by the guard or before it say nothing of their own, and a replay only repeats its original.
_SPEAKS_FOR_ITSELF = "c.replay_of_id IS NULL AND c.code <> ALL(%(silent)s)"

_OF_THE_OPERATION = f"""
    SELECT one.* FROM unnest(%(operations)s::text[]) AS o (operation) CROSS JOIN LATERAL (
        SELECT {_EARLIER_COLUMNS} FROM toolcalls_call c
        WHERE c.session_id = %(session)s AND c.operation = o.operation AND {_SPEAKS_FOR_ITSELF}
        ORDER BY c.id DESC LIMIT %(most)s
    ) one
"""

_OF_THE_OPERATION_ID = f"""
    SELECT {_EARLIER_COLUMNS} FROM toolcalls_call c
    WHERE c.session_id = %(session)s AND c.operation_id <> '' AND c.operation_id = ANY(%(operation_ids)s)
        AND c.operation <> ALL(%(operations)s) AND {_SPEAKS_FOR_ITSELF}
"""

_UNKNOWN = f"""
    SELECT {_EARLIER_COLUMNS} FROM toolcalls_call c
    WHERE c.agent_id = %(agent)s AND (c.status = 'outcome_unknown' OR c.running_again AND c.finished_at IS NULL) AND (c.operation = ANY(%(operations)s)
        OR (c.tool, c.arguments_hash) IN (SELECT * FROM unnest(%(tools)s::text[], %(hashes)s::text[])))
"""


def _read(agent: Agent, session_id: str, turn_id: str, proposals: Sequence[Proposal], *, lock: bool) -> _Read:
    found = sql.run(_SESSION + ("FOR NO KEY UPDATE" if lock else ""), [agent.pk, session_id])
    if not found:
        raise NoSuchSession(f"There is no session {session_id}.")
    allowed, session, *terms = found[0]
    session_tools = json.loads(allowed) if allowed is not None else None
    examined = [pipeline.examine(each, agent_tools=agent.tools, session_tools=session_tools) for each in proposals]
    asked = {
        "session": session,
        "team": agent.team_id,
        "agent": agent.pk,
        "turn": turn_id,
        "tools": list({each.tool for each in proposals}),
        "ids": [each.tool_call_id for each in proposals],
    }
    now, turn, brakes, policies, existing = sql.run(_FACTS, asked)[0]
    identity, cancelled, counted = turn or (None, "0", "0")
    turn_facts = (cancelled == "1", counted == "1", frozenset(brakes or ()), dict(policies or ()))
    facts = Facts(now, session, *terms, *turn_facts, _earlier(agent, session, examined))  # type: ignore[call-arg]
    stored = Call.objects.filter(pk__in=existing).defer(*lifecycle.BULKY) if existing else ()
    return _Read(facts, UUID(identity) if identity else None, {each.tool_call_id: each for each in stored}, examined)


def _earlier(agent: Agent, session: UUID, examined: Sequence[Examined]) -> list[Earlier]:
    """Read what the guard needs. A branch that cannot find anything is left out: it would still be planned."""
    valid = [each for each in examined if each.operation]
    if not valid:
        return []
    asked: dict[str, Any] = {
        "session": session,
        "operations": list({each.operation for each in valid}),
        "silent": sorted(OF_THE_GUARD | OF_STAGE_ZERO),
        "most": EARLIER_AT_MOST,
    }
    statements = [_OF_THE_OPERATION]
    if operation_ids := list({each.proposal.operation_id for each in valid if each.proposal.operation_id}):
        statements.append(_OF_THE_OPERATION_ID)
        asked |= {"operation_ids": operation_ids}
    statements.append(_UNKNOWN)
    asked |= {
        "agent": agent.pk,
        "tools": [each.proposal.tool for each in valid],
        "hashes": [each.arguments_hash for each in valid],
    }
    return [Earlier(*row) for row in sql.run(" UNION ALL ".join(statements), asked)]


# -- what is stored


class _Stock:
    """Rows of a request that are decided and not yet inserted; limits are added up over what is inserted.

    ``besides`` is a call that is about to be replaced: it gives its share back.
    """

    def __init__(self, agent: Agent, read: "_Read", *, turn_name: str, besides: UUID | None = None) -> None:
        self._agent, self._session, self._besides = agent, read.facts.session, besides
        self.turn, self._turn_name = read.turn or new_id(), turn_name
        self._opened_at = None if read.turn else read.facts.now
        self._calls: list[NewCall] = []
        self._lines: list[Line] = []
        self._locked: set[str] = set()

    def lock(self, scopes: Iterable[str]) -> None:
        """Lock the rows of these limits, so that shares are decided one after the other.

        In one order: two requests that name the same tools the other way round must not wait for one another.
        """
        for scope in sorted(set(scopes) - self._locked):
            LimitRow.objects.bulk_create([LimitRow(team_id=self._agent.team_id, scope=scope)], ignore_conflicts=True)
            LimitRow.objects.select_for_update(no_key=True).get(team_id=self._agent.team_id, scope=scope)
            self._locked.add(scope)

    def add(self, call: NewCall, lines: Sequence[Line]) -> None:
        self._calls.append(call)
        self._lines += lines

    def flush(self, *, calls_used: int = 0, counts: bool = False) -> None:
        """Insert what is decided, with the turn where it is new."""
        if self._calls:
            room = Room(self._session, self.turn, self._turn_name, self._opened_at, counts, calls_used)
            lifecycle.admit(self._calls, self._lines, room)
            self._calls, self._lines, self._opened_at = [], [], None

    def used(self, scope: str, limit: Limit, measures: Mapping[str, int | str]) -> int:
        """Add up what a limit has used today, with its row locked."""
        self.flush()
        self.lock([scope])
        return used_today(self._agent, scope, limit, measures, besides=self._besides)


def used_today(
    agent: Agent, scope: str, limit: Limit, measures: Mapping[str, int | str], *, besides: UUID | None = None
) -> int:
    """Add up a limit's share of today (the team's day) over waiting, running, unknown and succeeded calls."""
    what = "count(*)" if limit.measure is None else "coalesce(sum((c.measures ->> %(measure)s)::numeric), 0)"
    owner, name = scope.split(":", 1)
    whose = "c.tool = %(name)s" if owner == "tool" else "c.agent_id = %(name)s::uuid"
    group = "AND c.measures ->> %(group)s = %(value)s" if limit.group_by else ""
    has = "AND jsonb_typeof(c.measures -> %(measure)s) = 'number'" if limit.measure else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"""SELECT {what} FROM toolcalls_call c
                WHERE c.team_id = %(team)s AND {whose} AND c.measures IS NOT NULL AND c.replay_of_id IS NULL
                    AND c.proposed_at >= %(since)s AND c.status = ANY(%(counted)s)
                    AND c.id IS DISTINCT FROM %(besides)s {group} {has}""",
            {
                "besides": besides,
                "team": agent.team_id,
                "name": name,
                "measure": limit.measure,
                "group": limit.group_by,
                "value": str(measures.get(limit.group_by or "")),
                "since": start_of_day(agent, lifecycle.clock()),
                "counted": list(COUNTED_BY_LIMITS),
            },
        )
        return int(cursor.fetchone()[0])


def start_of_day(agent: Agent, now: datetime) -> datetime:
    """Give the moment at which the team's current day began."""
    here = now.astimezone(ZoneInfo(agent.team.time_zone))
    return here.replace(hour=0, minute=0, second=0, microsecond=0)


def build(
    verdict: Admitted | Replay | Refused,
    examined: Examined,
    *,
    agent: Agent,
    session: UUID,
    turn: UUID,
    now: datetime,
    trace_id: str,
    by: str = "",
    amends: Call | None = None,
) -> tuple[NewCall, list[Line]]:
    """Make the row of a decided proposal and its journal lines: proposed, validated, and where admission ended."""
    proposal = examined.proposal
    new = NewCall(
        id=new_id(),
        team_id=agent.team_id,
        agent_id=agent.pk,
        session_id=session,
        turn_id=turn,
        tool_call_id=proposal.tool_call_id,
        tool=safe_text(proposal.tool, 200),
        received=examined.received,
        received_hash=digest(examined.received),
        proposed_at=now,
        trace_id=trace_id,
        status="",
        moves=1,
        tool_version=examined.tool.version if examined.tool else "",
        operation_id=proposal.operation_id,
        operation=examined.operation,
        arguments=examined.arguments,
        arguments_hash=examined.arguments_hash,
        amends_id=amends.pk if amends else None,
    )
    _apply(new, verdict.policy)
    detail: dict[str, Any] = {"effect": new.effect, "requires_approval": new.requires_approval} if new.effect else {}
    match verdict:
        case Refused(refusal=refusal):
            exhausted = refusal.code in OF_THE_BUDGET
            new.status = Status.BUDGET_EXHAUSTED if exhausted else Status.FAILED
            new.code, new.message, new.retry = refusal.code, refusal.message, refusal.retry
            new.refers_to_id, new.finished_at = refusal.refers_to, now
        case Replay(of=original):
            new.status, new.code, new.replay_of_id, new.finished_at = Status.SUCCEEDED, "OK", original, now
        case Admitted(policy=applied, measures=measures, waits=waits, why=why):
            new.measures, new.why, new.summary = measures, why, _summary(examined)
            new.requires_approval = waits = waits or amends is not None
            if waits:
                new.status = Status.AWAITING_APPROVAL
                ends = now + timedelta(seconds=applied.deadline) if applied.deadline else None
                new.deadline = new.alarm_at = amends.deadline if amends else ends
            else:
                new.status, new.approved_at, new.due_at = Status.APPROVED, now, now
                new.alarm_at = now + timedelta(seconds=applied.start_within)
            detail |= {"requires_approval": waits, "why": why}
    by = by or actor(agent)
    line = Line(agent.team_id, "", by, session=session, call=new.id)
    lines = [replace(line, event="call.proposed", target="proposed")]
    if not (isinstance(verdict, Refused) and verdict.stage < 4):
        lines.append(replace(line, event="call.validated", detail=detail or None))
    lines.append(replace(line, event="call.moved", move=1, source="proposed", target=new.status, code=new.code))
    return new, lines


def _apply(new: NewCall, applied: policy.Effective | None) -> None:
    if applied is None:
        return
    rules = applied.effect.rules
    new.effect, new.writes, new.retryable = str(applied.effect), rules.writes, rules.retryable
    new.requires_approval, new.approvers_needed = applied.requires_approval, applied.approvers_needed
    new.policy, new.max_attempts, new.timeout, new.grace = (
        applied.text(),
        applied.max_attempts,
        applied.timeout,
        applied.grace,
    )
    new.start_within, new.stored_limit = applied.start_within, applied.stored_limit


def _summary(examined: Examined) -> str:
    assert examined.tool is not None
    if examined.tool.run_summary is None:
        return ""
    try:
        return safe_text(str(examined.tool.run_summary(examined.model)), 500)
    except Exception:  # noqa: BLE001 - a summary is a courtesy; the whole text is shown anyway
        return ""


def _as_earlier(new: NewCall) -> Earlier:
    return Earlier(
        new.id,
        new.session_id,
        new.tool,
        new.operation,
        new.operation_id,
        new.arguments_hash,
        new.status,
        new.code,
        new.writes,
        new.result_hash,
        unresolved=False,
    )


# -- amendment


@dataclass(frozen=True)
class AmendmentRefused(Exception):
    """The changed arguments are not admitted; nothing was changed."""

    refusal: Refusal


def examine_amendment(call: Call, received: object) -> tuple[Examined, Refusal | bool | None]:
    """Doubt changed arguments of a waiting call, and ask the tool's own check. Raises AmendmentRefused."""
    proposal = Proposal(f"amended-{new_id().hex}", call.tool, received)
    session_tools = call.session.allowed_tools
    examined = pipeline.examine(proposal, agent_tools=call.agent.tools, session_tools=session_tools)
    if examined.refusal:
        raise AmendmentRefused(examined.refusal)
    if examined.arguments_hash == call.arguments_hash:
        raise AmendmentRefused(Refusal("INVALID_ARGUMENTS", "The arguments are the same as before."))
    if examined.tool is None or examined.tool.run_check is None:
        return examined, None
    admission = _Admission(call.agent, call.session.session_id, call.turn.turn_id, [proposal], trace_id=call.trace_id)
    return examined, admission.check({0: examined})[0]


def amend(call: Call, examined: Examined, checked: Refusal | bool | None, *, by: str) -> Call:
    """Store the changed arguments as a new waiting call of the same turn, inside the caller's transaction.

    The session's row is locked by the caller, before the call's. Raises AmendmentRefused; then nothing is changed.
    """
    read = _read(call.agent, call.session.session_id, call.turn.turn_id, [examined.proposal], lock=True)
    others = [each for each in read.facts.earlier if each.id != call.pk]
    stock = _Stock(call.agent, read, turn_name=call.turn.turn_id, besides=call.pk)
    verdict = pipeline.decide(
        examined,
        replace(read.facts, earlier=others),
        terms_of(call.agent),
        used=stock.used,
        defaults=deployment_defaults(),
        checked=checked,
        amending=True,
    )
    match verdict:
        case Refused(refusal=refusal):
            raise AmendmentRefused(refusal)
        case Replay() | NeedsCheck():
            raise AmendmentRefused(
                Refusal("OPERATION_MISMATCH", "This operation has been done in this session already.")
            )
    new, lines = build(
        verdict,
        examined,
        agent=call.agent,
        session=call.session_id,
        turn=call.turn_id,
        now=read.facts.now,
        trace_id=call.trace_id,
        by=by,
        amends=call,
    )
    stock.add(new, lines)
    stock.flush()
    return Call.objects.select_related("session", "turn", "agent").get(pk=new.id)


def effects_of(agent: Agent, of: Sequence[tools.Tool]) -> dict[str, str]:
    """Give the effect class that each tool would have for this agent now."""
    stored = dict(agent.team.policies.filter(tool__in=[each.name for each in of]).values_list("tool", "values"))
    default = Effect(agent.default_effect) if agent.default_effect else None
    return {
        each.name: policy.resolve(
            each.policy,
            measures=set(each.measures),
            stored=stored.get(each.name),
            agent_default=default,
            session_default=None,
            defaults=deployment_defaults(),
        ).effect
        for each in of
    }
