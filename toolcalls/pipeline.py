"""Whether a proposed call is admitted: the stages of behaviour, section 4, each a verb. Reads only what it is given.

``examine`` is stages 1 to 3 and needs no database. ``decide`` puts them in their place among the others: it is asked once
before a tool's own check, and again in the admitting transaction, with the session's row locked.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pydantic import BaseModel, ValidationError

from toolcalls import permissions, policy, tools
from toolcalls.canonical import (
    MISSING,
    Malformed,
    canonical_text,
    digest,
    inexact,
    parse_arguments,
    received_text,
    safe_text,
)
from toolcalls.effects import Effect
from toolcalls.policy import Defaults, Effective, Limit
from toolcalls.states import UNFINISHED, Status

MESSAGE_LIMIT = 4000


@dataclass(frozen=True)
class Proposal:
    """One call as an agent proposes it. ``received`` is its arguments as they stood in the body."""

    tool_call_id: str
    tool: str
    received: object = MISSING
    operation_id: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a call is refused: a stable code, a text for the agent, and the earlier call that it speaks of."""

    code: str
    message: str
    refers_to: UUID | None = None
    retry: str = ""


@dataclass(frozen=True)
class Examined:
    """A proposal after stages 1 to 3: valid, with its frozen arguments, or refused by one of them."""

    proposal: Proposal
    received: str
    refusal: Refusal | None = None
    tool: tools.Tool | None = None
    model: BaseModel | None = None
    arguments: str | None = None
    arguments_hash: str = ""
    operation: str = ""


@dataclass(frozen=True)
class Earlier:
    """What admission needs to know of an earlier call of the same operation, or of the same tool and arguments."""

    id: UUID
    session: UUID
    tool: str
    operation: str
    operation_id: str
    arguments_hash: str
    status: str
    code: str
    writes: bool
    result_hash: str
    unresolved: bool


@dataclass(frozen=True)
class Facts:
    """What is true of the session, as read by one statement; in the admitting transaction under the session's lock."""

    now: datetime
    session: UUID
    status: str
    opened_at: datetime
    calls_limit: int | None
    turns_limit: int | None
    seconds_limit: int | None
    spend_limit: int | None
    calls_used: int
    turns_used: int
    spend_used: int
    default_effect: str
    turn_cancelled: bool
    turn_counted: bool
    brakes: frozenset[str]
    policies: Mapping[str, str]
    earlier: Sequence[Earlier] = ()


@dataclass(frozen=True)
class AgentTerms:
    """What a manager set for the agent, as far as admission asks."""

    id: UUID
    tools: Sequence[str]
    default_effect: str
    limits: Sequence[Limit]


@dataclass(frozen=True)
class Admitted:
    """A call that goes on: approved at once, or waiting for a person. ``why`` says why it waits."""

    policy: Effective
    measures: dict[str, int | str]
    waits: bool
    why: str


@dataclass(frozen=True)
class Replay:
    """The operation has succeeded in this session; the call is answered with that result."""

    of: UUID
    policy: Effective


@dataclass(frozen=True)
class Refused:
    """The call is recorded as refused. ``stage`` is the number of the stage; ``policy`` what applied, if it got that far."""

    stage: int
    refusal: Refusal
    policy: Effective | None = None


@dataclass(frozen=True)
class NeedsCheck:
    """All cheap stages passed, and the tool's own check has yet to be asked."""

    policy: Effective


Verdict = Admitted | Replay | Refused | NeedsCheck
Used = Callable[[str, Limit, Mapping[str, int | str]], int]
"""Gives what a limit has used: (scope, limit, the new call's measures) → sum or count."""


def examine(proposal: Proposal, *, agent_tools: Sequence[str], session_tools: Sequence[str] | None) -> Examined:
    """Doubt a proposal by itself: stage 1 (tool), 2 (arguments parse), 3 (schema)."""
    plain = Examined(proposal, received_text(proposal.received))
    found = tools.find(proposal.tool)
    if found is None:
        return replace(plain, refusal=_unknown_tool(proposal.tool, agent_tools, session_tools))
    if not permissions.may_use(found.name, agent_tools, session_tools):
        message = f"This agent may not use {found.name} here."
        return replace(plain, tool=found, refusal=Refusal("TOOL_NOT_ALLOWED", message))
    try:
        parsed = parse_arguments(proposal.received)
    except Malformed as error:
        return replace(plain, tool=found, refusal=Refusal("INVALID_JSON", error.message))
    try:
        model, text = validate(found, canonical_text(parsed), parsed)
    except InvalidArguments as error:
        return replace(plain, tool=found, refusal=Refusal("INVALID_ARGUMENTS", str(error)))
    hashed = digest(text)
    operation = operation_of(found.name, proposal.operation_id, hashed)
    return replace(plain, tool=found, model=model, arguments=text, arguments_hash=hashed, operation=operation)


def operation_of(tool: str, operation_id: str, arguments_hash: str) -> str:
    """Name the intended effect: the tool and the agent's operation ID, else the tool and the canonical arguments.

    IDs hold no slash, so the two forms cannot meet.
    """
    return f"{tool}/id/{operation_id}" if operation_id else f"{tool}/arguments/{arguments_hash}"


def _unknown_tool(name: str, agent_tools: Sequence[str], session_tools: Sequence[str] | None) -> Refusal:
    allowed = [each.name for each in tools.every() if permissions.may_use(each.name, agent_tools, session_tools)]
    listed = ", ".join(allowed) or "none"
    return Refusal("UNKNOWN_TOOL", f"There is no tool {safe_text(name, 80)!r}. Allowed: {listed}.")


class InvalidArguments(Exception):
    """The arguments break the tool's schema; the text names every faulty field with its description."""


def validate(tool: tools.Tool, text: str, parsed: Mapping[str, Any]) -> tuple[BaseModel, str]:
    """Validate canonical arguments strictly; give the model and the frozen text, with defaults filled in.

    Types are strict and extra fields refused, whatever the author's model says. Raises InvalidArguments.
    """
    rounded = inexact(parsed)
    if rounded:
        raise InvalidArguments(f"{rounded}: the number has more digits than can be kept exactly; send it as text.")
    try:
        model = tool.arguments.model_validate_json(text, strict=True, extra="forbid")
        frozen = canonical_text(model.model_dump(mode="json", by_alias=True, round_trip=True))
        again = tool.arguments.model_validate_json(frozen, strict=True, extra="forbid")
    except ValidationError as error:
        raise InvalidArguments(_faults(tool, error)) from None
    except Malformed as error:
        raise InvalidArguments(error.message) from None
    if again != model:
        raise InvalidArguments("The tool changes these arguments each time it reads them; its author must mend that.")
    return model, frozen


def _faults(tool: tools.Tool, error: ValidationError) -> str:
    secret = set(tool.policy.sensitive or ())
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(map(str, fault["loc"])) or "arguments"
        hint = _description(tool.schema, fault["loc"])
        said = (
            fault["msg"]
            .replace("Input should be", "must be")
            .replace("Extra inputs are not permitted", "no such field")
        )
        # What was given helps a model to see its mistake, but a secret would stand in a text that nobody masks.
        untold = fault["type"] in ("missing", "extra_forbidden") or secret & {path, *map(str, fault["loc"])}
        given = "" if untold else f", not {safe_text(repr(fault['input']), 60)}"
        lines.append(f"{safe_text(path, 120)}: {said}{given}.{f' {hint}' if hint else ''}")
    return safe_text("\n".join(lines), MESSAGE_LIMIT)


def _description(schema: dict[str, Any], path: Sequence[str | int]) -> str:
    """Follow a fault's path through the schema to the description its author wrote: the unit, the format."""
    node: Any = schema
    for step in path:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        node = node.get("items", {}) if isinstance(step, int) else node.get("properties", {}).get(step, {})
    return str(node.get("description", ""))


def decide(
    examined: Examined,
    facts: Facts,
    agent: AgentTerms,
    *,
    used: Used,
    defaults: Defaults,
    checked: Refusal | bool | None = None,
    amending: bool = False,
) -> Verdict:
    """Decide one proposal: stages 0 to 7 in their order, the first refusal wins.

    ``checked`` is what the tool's own check said: None where it was not asked, True where it passed. An amendment is a
    person's: it is admitted past the tests for closed and budget of stage 0 and needs no asking.
    """
    refusal = within_bounds(facts, examined.proposal.tool, amending=amending)
    if refusal:
        return Refused(0, refusal)
    if examined.refusal or examined.tool is None or examined.model is None:
        assert examined.refusal is not None
        return Refused(1, examined.refusal)
    applied = policy_for(examined.tool, facts, agent, defaults=defaults)
    repeat = guard_repeats(examined, facts, writes=applied.effect.rules.writes, max_repeats=applied.max_repeats)
    if isinstance(repeat, Refusal):
        return Refused(4, repeat, applied)
    if repeat:
        return Replay(repeat, applied)
    if examined.tool.run_check is not None and checked is not True:
        return Refused(5, checked, applied) if isinstance(checked, Refusal) else NeedsCheck(applied)
    measures = measure(examined.tool, examined.model)
    refusal = within_limits(examined.tool.name, applied, agent, measures, used=used)
    if refusal:
        return Refused(6, refusal, applied)
    why = "" if amending else reason_to_ask(applied, measures)
    return Admitted(applied, measures, waits=bool(why), why=why)


def within_bounds(facts: Facts, tool: str, *, amending: bool) -> Refusal | None:
    """Stage 0: session and turn open, nothing paused, budgets left; whichever ends first."""
    if not amending:
        if facts.status != "open":
            return Refusal("SESSION_CLOSED", f"The session is {facts.status}; open another.")
        if facts.turn_cancelled:
            return Refusal("TURN_CLOSED", "This turn was cancelled; call in another turn.")
    elif facts.status == "cancelled" or facts.turn_cancelled:
        return Refusal("TURN_CLOSED", "This turn was cancelled.")
    if facts.brakes & {"", tool}:
        return Refusal("PAUSED", "An operator has paused this; nothing ran. Call again later, with a new ID.")
    if amending:
        return None
    if facts.calls_limit is not None and facts.calls_used >= facts.calls_limit:
        return Refusal("STEP_LIMIT", f"The session's budget of {facts.calls_limit} calls is used up.")
    if facts.turns_limit is not None and not facts.turn_counted and facts.turns_used >= facts.turns_limit:
        return Refusal("TURN_LIMIT", f"The session's budget of {facts.turns_limit} turns is used up.")
    if facts.seconds_limit is not None and facts.now > facts.opened_at + timedelta(seconds=facts.seconds_limit):
        return Refusal("TIME_LIMIT", f"The session's {facts.seconds_limit} seconds are over.")
    if facts.spend_limit is not None and facts.spend_used >= facts.spend_limit:
        return Refusal("SPEND_LIMIT", f"The session's spend of {facts.spend_limit} is used up.")
    return None


def policy_for(tool: tools.Tool, facts: Facts, agent: AgentTerms, *, defaults: Defaults) -> Effective:
    """Find the policy that applies to this tool now."""
    return _resolved(tool.name, facts.policies.get(tool.name), agent.default_effect, facts.default_effect, defaults)


@functools.lru_cache(maxsize=1024)
def _resolved(tool: str, stored: str | None, agent_default: str, session_default: str, defaults: Defaults) -> Effective:
    found = tools.find(tool)
    assert found is not None
    return policy.resolve(
        found.policy,
        measures=set(found.measures),
        # A stored JSON null is an override that is not valid, not a missing one.
        stored=stored if stored in (None, "null") else json.loads(stored),
        agent_default=Effect(agent_default) if agent_default else None,
        session_default=Effect(session_default) if session_default else None,
        defaults=defaults,
    )


def guard_repeats(examined: Examined, facts: Facts, *, writes: bool, max_repeats: int) -> Refusal | UUID | None:
    """Stage 4: the guard that ends double effects (behaviour, section 5), and loops.

    Gives the call to replay, a refusal, or None to go on.
    """
    here = [each for each in facts.earlier if each.session == facts.session]
    same = [each for each in here if each.operation == examined.operation]
    if not writes:
        return _looping_read(same, max_repeats)
    operation_id = examined.proposal.operation_id
    for each in here:
        differs = (each.tool, each.arguments_hash) != (examined.proposal.tool, examined.arguments_hash)
        if operation_id and each.operation_id == operation_id and differs and each.arguments_hash:
            message = f"Operation {operation_id} was proposed before with another tool or other arguments."
            return Refusal("OPERATION_MISMATCH", message, each.id)
    for each in same:
        if each.status == Status.SUCCEEDED:
            return each.id
    for each in same:
        if each.status in UNFINISHED:
            message = "This operation is under way; wait for that call's outcome. A wanted second effect has its own operation_id."
            return Refusal("DUPLICATE_IN_PROGRESS", message, each.id)
    for each in facts.earlier:
        alike = (each.tool, each.arguments_hash) == (examined.proposal.tool, examined.arguments_hash)
        if each.unresolved and (alike or each.operation == examined.operation):
            message = f"An earlier call of this operation may have taken effect: {each.id}. It must be settled first."
            return Refusal("OUTCOME_UNRESOLVED", message, each.id)
    for each in same:
        if each.status == Status.REJECTED and each.code in ("APPROVAL_REJECTED", "AMENDED"):
            message = "A person has decided on this operation in this session; people are not asked twice."
            return Refusal("ALREADY_REJECTED", message, each.id)
    if len(same) >= max_repeats:
        return Refusal(
            "LOOP_DETECTED", f"This operation ended without success {len(same)} times in this session.", same[0].id
        )
    return None


def _looping_read(same: Sequence[Earlier], max_repeats: int) -> Refusal | None:
    """Refuse a read whose latest ``max_repeats`` answers were all the same."""
    latest = sorted((each for each in same if each.status == Status.SUCCEEDED), key=lambda each: each.id)[-max_repeats:]
    if len(latest) == max_repeats and len({each.result_hash for each in latest}) == 1:
        return Refusal(
            "LOOP_DETECTED", f"The same read gave the same result {max_repeats} times; use that.", latest[-1].id
        )
    return None


def measure(tool: tools.Tool, arguments: BaseModel) -> dict[str, int | str]:
    """Derive a tool's measures from its arguments; one that raises or is neither whole number nor name is left out."""
    found: dict[str, int | str] = {}
    for name, derive in tool.measures.items():
        try:
            value = derive(arguments)
        except Exception:  # noqa: BLE001, S112 - a measure that cannot be told makes its rules ask and its limits refuse
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
        elif isinstance(value, str):
            found[name] = safe_text(value, 200)
    return found


def scoped(applied: Effective, agent: AgentTerms, tool: str) -> list[tuple[str, Limit]]:
    """List the limits that a call of this tool falls under, each with the scope over which it adds up."""
    of_the_tool = [(f"tool:{tool}", limit) for limit in applied.limits]
    return of_the_tool + [(f"agent:{agent.id}", limit) for limit in agent.limits]


def within_limits(
    tool: str, applied: Effective, agent: AgentTerms, measures: Mapping[str, int | str], *, used: Used
) -> Refusal | None:
    """Stage 6: what the policy and the agent's manager allow, per call and per day. A limit that cannot be told refuses."""
    found = tools.find(tool)
    derivable = found.measures if found else {}
    for scope, limit in scoped(applied, agent, tool):
        missing = sorted(limit.measures() - set(measures))
        if scope.startswith("agent:") and limit.measure and limit.measure not in derivable:
            continue  # an agent's limit on money says nothing of tools that move none
        if missing:
            return Refusal("POLICY_LIMIT", f"A limit depends on {missing[0]}, which cannot be told of this call.")
        share = 1 if limit.measure is None else measures[limit.measure]
        if not isinstance(share, int):
            return Refusal("POLICY_LIMIT", f"A limit adds up {limit.measure}, which is no number.")
        before = used(scope, limit, measures) if limit.per == "day" else 0
        if before + share > limit.max:
            return Refusal("POLICY_LIMIT", _over(limit, before, share, measures))
    return None


def _over(limit: Limit, before: int, share: int, measures: Mapping[str, int | str]) -> str:
    what = limit.measure or "calls"
    whose = f" for {limit.group_by} {measures[limit.group_by]}" if limit.group_by else ""
    if limit.per == "call":
        return f"{what} may be at most {limit.max} a call; this one has {share}."
    return f"{what} may be at most {limit.max} a day{whose}; {before} are used, this call would add {share}."


def reason_to_ask(applied: Effective, measures: Mapping[str, int | str]) -> str:
    """Stage 7: say why a person is asked; empty where nobody is. A rule that cannot be told means ask."""
    if applied.requires_approval:
        source = applied.sources["requires_approval"]
        if source == policy.DEFAULT:
            return f"{applied.effect} tools wait for a person unless their policy says otherwise"
        return f"{source}: requires_approval is true"
    for rule in applied.approval_when:
        value = measures.get(rule.measure)
        if not isinstance(value, int):
            return f"{applied.sources['approval_when']}: {rule.measure} cannot be told, so a person is asked"
        if value > rule.above and rule.measure in applied.sensitive:
            return f"{applied.sources['approval_when']}: {rule.measure} is above {rule.above}"
        if value > rule.above:
            return f"{applied.sources['approval_when']}: {rule.measure} is {value}, above {rule.above}"
    return ""


@dataclass
class Batch:
    """What earlier proposals of the same request have already taken, so that each is decided as if it came alone."""

    calls: int = 0
    turns: int = 0
    earlier: list[Earlier] = field(default_factory=list)

    def seen_by(self, facts: Facts) -> Facts:
        """Give the facts as the next proposal of the request meets them."""
        return replace(
            facts,
            calls_used=facts.calls_used + self.calls,
            turns_used=facts.turns_used + self.turns,
            turn_counted=facts.turn_counted or self.turns > 0,
            earlier=[*facts.earlier, *self.earlier],
        )
