"""The stages of admission, each by itself and in their order (behaviour, sections 4 and 5). No database."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field, create_model

from tests.worlds import a_tool
from toolcalls import pipeline, tools
from toolcalls.canonical import MISSING
from toolcalls.codes import KNOWN, OF_STAGE_ZERO, OF_THE_BUDGET, advice, next_actions
from toolcalls.models import new_id
from toolcalls.pipeline import (
    Admitted,
    AgentTerms,
    Earlier,
    Examined,
    Facts,
    InvalidArguments,
    NeedsCheck,
    Proposal,
    Refusal,
    Refused,
    Replay,
    decide,
    examine,
    guard_repeats,
    operation_of,
    validate,
)
from toolcalls.policy import Defaults, Limit
from toolcalls.states import Status
from toolcalls.tools import Tool, ToolContext

DEFAULTS = Defaults(approval_within=86_400, start_within=900, grace=10)
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
HERE, ELSEWHERE = new_id(), new_id()

FACTS = Facts(
    now=NOW,
    session=HERE,
    status="open",
    opened_at=NOW - timedelta(seconds=100),
    calls_limit=None,
    turns_limit=None,
    seconds_limit=None,
    spend_limit=None,
    calls_used=0,
    turns_used=0,
    spend_used=0,
    default_effect="",
    turn_cancelled=False,
    turn_counted=False,
    brakes=frozenset(),
    policies={},
)
ANYTHING = AgentTerms(new_id(), ("*",), "", ())


def nothing_used(scope: str, limit: Limit, measures: Any) -> int:
    return 0


def looked_at(
    tool: Tool | str, received: object = None, *, operation_id: str = "", may: tuple[str, ...] = ("*",)
) -> Examined:
    name = tool if isinstance(tool, str) else tool.name
    proposal = Proposal("call-1", name, {} if received is None else received, operation_id)
    return examine(proposal, agent_tools=may, session_tools=None)


def decided(examined: Examined, facts: Facts = FACTS, agent: AgentTerms = ANYTHING, **how: Any) -> pipeline.Verdict:
    return decide(examined, facts, agent, **{"used": nothing_used, "defaults": DEFAULTS, **how})


def code_of(verdict: pipeline.Verdict) -> str:
    assert isinstance(verdict, Refused), verdict
    return verdict.refusal.code


# -- stage 0


BOUNDS: dict[str, dict[str, Any]] = {
    "SESSION_CLOSED": {"status": "closed"},
    "TURN_CLOSED": {"turn_cancelled": True},
    "PAUSED": {"brakes": frozenset({""})},
    "STEP_LIMIT": {"calls_limit": 3, "calls_used": 3},
    "TURN_LIMIT": {"turns_limit": 2, "turns_used": 2},
    "TIME_LIMIT": {"seconds_limit": 99},
    "SPEND_LIMIT": {"spend_limit": 5, "spend_used": 5},
}


@pytest.mark.parametrize(("code", "change"), BOUNDS.items(), ids=BOUNDS)
def test_stage_0_refuses_before_the_tool_is_even_known(code: str, change: dict[str, Any]) -> None:
    verdict = decided(looked_at("no_such_tool", "{"), replace(FACTS, **change))
    assert code_of(verdict) == code
    assert isinstance(verdict, Refused)
    assert verdict.stage == 0


@pytest.mark.parametrize(
    "change",
    [
        {"calls_limit": 3, "calls_used": 2},
        {"turns_limit": 2, "turns_used": 1},
        {"turns_limit": 2, "turns_used": 2, "turn_counted": True},  # a counted turn goes on
        {"seconds_limit": 100},
        {"spend_limit": 5, "spend_used": 4},
        {"brakes": frozenset({"another_tool"})},
    ],
    ids=repr,
)
def test_stage_0_lets_the_last_one_within_the_budget_pass(change: dict[str, Any]) -> None:
    with a_tool(effect="read") as tool:
        assert isinstance(decided(looked_at(tool), replace(FACTS, **change)), Admitted)


def test_a_brake_on_one_tool_stops_that_tool() -> None:
    with a_tool(effect="read") as tool:
        assert code_of(decided(looked_at(tool), replace(FACTS, brakes=frozenset({tool.name})))) == "PAUSED"


@pytest.mark.parametrize("code", ["SESSION_CLOSED", "STEP_LIMIT", "TURN_LIMIT", "TIME_LIMIT", "SPEND_LIMIT"])
def test_an_amendment_is_not_tested_for_closed_and_budget(code: str) -> None:
    with a_tool() as tool:
        assert isinstance(decided(looked_at(tool), replace(FACTS, **BOUNDS[code]), amending=True), Admitted)


@pytest.mark.parametrize(
    ("change", "code"), [({"brakes": frozenset({""})}, "PAUSED"), ({"turn_cancelled": True}, "TURN_CLOSED")]
)
def test_an_amendment_is_still_stopped_by_a_brake_and_a_cancelled_turn(change: dict[str, Any], code: str) -> None:
    with a_tool() as tool:
        assert code_of(decided(looked_at(tool), replace(FACTS, **change), amending=True)) == code


# -- stages 1 to 3


def test_an_unknown_tool_is_refused_with_a_list_of_what_is_allowed() -> None:
    with a_tool(effect="read") as one, a_tool(effect="read") as other:
        refusal = looked_at("Refund_Order", may=(one.name,)).refusal
    assert refusal is not None
    assert refusal.code == "UNKNOWN_TOOL"
    assert one.name in refusal.message
    assert other.name not in refusal.message, "what it may not use is not told"


@pytest.mark.parametrize(
    "change", [str.upper, lambda n: n + " ", lambda n: n.replace("_", "-"), lambda n: "\uff54" + n[1:]]
)
def test_a_name_that_only_looks_like_a_tools_is_unknown(change: Any) -> None:
    """F-18."""
    with a_tool(effect="read") as tool:
        refusal = looked_at(change(tool.name)).refusal
    assert refusal is not None
    assert refusal.code == "UNKNOWN_TOOL"


def test_a_tool_outside_the_list_is_refused_before_its_arguments_are_read() -> None:
    """F-20."""
    with a_tool(effect="read") as tool:
        refusal = looked_at(tool, "{", may=("get_*",)).refusal
    assert refusal is not None
    assert refusal.code == "TOOL_NOT_ALLOWED"


@pytest.mark.parametrize(
    "received",
    [
        '{"amount": 99999',
        "[]",
        "null",
        None,
        '{"amount":NaN}',
        "{} {}",
        '"{}"',
        "```json\n{}\n```",
        '{"a":1,"a":2}',
        7,
        True,
    ],
    ids=repr,
)
def test_what_is_not_one_json_object_never_becomes_an_empty_one(received: object) -> None:
    """F-17: never executed, never "no approval needed"."""
    with a_tool(effect="read") as tool:
        found = examine(Proposal("c", tool.name, received), agent_tools=["*"], session_tools=None)
    assert found.refusal is not None
    assert found.refusal.code == "INVALID_JSON"
    assert found.arguments is None


@pytest.mark.parametrize("received", ["", "  ", "\n", MISSING, {}, "{}"], ids=repr)
def test_blank_arguments_are_an_empty_object_which_is_then_validated(received: object) -> None:
    """F-71: for a tool whose fields have defaults, and for one that requires some."""
    with a_tool(effect="read") as tool:
        assert looked_at(tool, received).arguments == '{"amount":0,"name":"x"}'
    with _strict_tool() as strict:
        found = looked_at(strict, received)
    assert found.refusal is not None
    assert found.refusal.code == "INVALID_ARGUMENTS"


class Inner(BaseModel):
    model_config = ConfigDict(extra="allow", strict=False)
    note: str = ""


class Refund(BaseModel):
    """What an author wrote who did not think of strictness."""

    model_config = ConfigDict(extra="allow", strict=False)
    order: Annotated[str, Field(pattern=r"^ORD-\d+$", description="The order's ID, like ORD-1001.")]
    cents: Annotated[int, Field(ge=1, strict=False, description="In cents: 25.90 is 2590.")]
    currency: Annotated[Literal["BRL", "USD"], Field(description="BRL or USD.")] = "BRL"
    inner: Inner = Inner()
    many: Annotated[list[int], Field(description="Whole numbers.")] = []


def _strict_tool() -> Any:
    return _tool_of(Refund)


class _tool_of:  # noqa: N801 - used like a function
    """A registered tool with this model for its arguments."""

    def __init__(self, model: type[BaseModel], **policy: Any) -> None:
        def function(arguments: Any, context: ToolContext) -> None:
            """Do it."""

        function.__name__ = f"tool_of_{model.__name__.lower()}"
        function.__annotations__ = {"arguments": model, "context": ToolContext}
        self.made = tools.tool(**{"effect": "read", **policy})(function)

    def __enter__(self) -> Tool:
        return self.made

    def __exit__(self, *_: object) -> None:
        tools._registry.pop(self.made.name)


GOOD = {"order": "ORD-1", "cents": 5}


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"cents": "2590"}, "cents", "In cents"),  # F-73
        ({"cents": 25.9}, "cents", "In cents"),
        ({"cents": True}, "cents", "In cents"),
        ({"cents": 0}, "cents", "In cents"),
        ({"cents": None}, "cents", "In cents"),
        ({"order": "1001"}, "order", "like ORD-1001"),
        ({"order": 1001}, "order", "like ORD-1001"),
        ({"order": "ORD-1\n"}, "order", "like ORD-1001"),
        ({"currency": "brl"}, "currency", "BRL or USD"),
        ({"many": [1, "2"]}, "many.1", ""),
        ({"approved": True}, "approved", ""),  # S-B19, F-21
        ({"confirmed": True}, "confirmed", ""),
        ({"inner": {"note": "n", "more": 1}}, "inner.more", ""),
        ({"inner": {"note": 5}}, "inner.note", ""),
    ],
    ids=repr,
)
def test_stage_3_names_the_faulty_field_and_its_description(change: dict[str, Any], field: str, hint: str) -> None:
    """Strict whatever the author's model says."""
    with _strict_tool() as tool:
        found = looked_at(tool, GOOD | change)
    assert found.refusal is not None
    assert found.refusal.code == "INVALID_ARGUMENTS"
    assert found.refusal.message.startswith(f"{field}: ")
    assert hint in found.refusal.message
    assert found.arguments is None


def test_every_faulty_field_is_named_at_once() -> None:
    with _strict_tool() as tool:
        found = looked_at(tool, {"cents": "1", "currency": "EUR", "extra": 1})
    assert found.refusal is not None
    assert [line.split(":")[0] for line in found.refusal.message.splitlines()] == [
        "order",
        "cents",
        "currency",
        "extra",
    ]


def test_a_declared_secret_is_not_repeated_in_the_refusal() -> None:
    """F-28: the text goes where the arguments of a call are masked."""
    model = create_model("Secretive", api_key=(int, ...), order=(int, ...))
    with _tool_of(model, sensitive=["api_key"]) as tool:
        found = looked_at(tool, {"api_key": "hunter2", "order": "here"})
    assert found.refusal is not None
    assert "hunter2" not in found.refusal.message
    assert "'here'" in found.refusal.message


@pytest.mark.parametrize(
    "spelled",
    [
        '{"cents":100,"order":"ORD-1"}',
        '{ "order" : "ORD-1", "cents" : 1e2 }',
        '{"cents":100.0,"order":"\\u004fRD-1"}',
        {"cents": 100, "order": "ORD-1", "currency": "BRL"},
    ],
    ids=repr,
)
def test_what_means_the_same_has_one_text_and_one_hash(spelled: object) -> None:
    """F-30, F-22: the effective arguments, defaults filled in, are what is stored, hashed and shown."""
    with _strict_tool() as tool:
        found = looked_at(tool, spelled)
    assert found.arguments == '{"cents":100,"currency":"BRL","inner":{"note":""},"many":[],"order":"ORD-1"}'


@pytest.mark.parametrize("number", [18446744073709551615, 10**999, -(10**400), 0, -1])
def test_whole_numbers_stay_exact(number: int) -> None:
    """F-73."""
    model = create_model("Count", n=(int, ...))
    with _tool_of(model) as tool:
        found = looked_at(tool, f'{{"n":{number}}}')
    assert found.arguments == f'{{"n":{number}}}'
    assert found.model is not None
    assert found.model.n == number  # type: ignore[attr-defined]


def test_a_number_with_more_digits_than_a_float_keeps_is_refused_and_named() -> None:
    model = create_model("Share", share=(float, ...))
    with _tool_of(model) as tool:
        found = looked_at(tool, '{"share":0.1234567890123456789}')
    assert found.refusal is not None
    assert found.refusal.code == "INVALID_ARGUMENTS"
    assert "share" in found.refusal.message


class Spoken(BaseModel):
    """Fields whose names in JSON differ, and one that is derived."""

    from_: Annotated[str, Field(alias="from")]
    amount: Decimal = Decimal(0)

    @computed_field
    def shout(self) -> str:
        return self.from_.upper()


def test_a_model_with_aliases_and_derived_fields_can_be_called() -> None:
    with _tool_of(Spoken) as tool:
        found = looked_at(tool, {"from": "a"})
        assert found.refusal is None, found.refusal
        assert found.arguments == '{"amount":"0","from":"a"}'
        model, text = validate(tool, found.arguments, {})
    assert (text, model) == (found.arguments, found.model)


class Restless(BaseModel):
    name: str

    def model_post_init(self, context: Any) -> None:
        self.name = f"{self.name}!"


def test_arguments_that_change_with_each_reading_are_refused() -> None:
    """F-22: else the approver would see other arguments than the tool gets."""
    with _tool_of(Restless) as tool, pytest.raises(InvalidArguments, match="each time"):
        validate(tool, '{"name":"a"}', {"name": "a"})


# -- operations and repeats


def test_an_operation_is_named_by_its_id_or_by_its_arguments() -> None:
    assert operation_of("t", "op", "h") == "t/id/op"
    assert operation_of("t", "", "h") == "t/arguments/h"
    assert operation_of("t", "arguments", "h") != operation_of("t", "", "h")


_ids: Iterator[UUID] = iter(new_id, None)


def earlier(
    status: str = "failed",
    *,
    code: str = "",
    tool: str = "t",
    arguments: str = "h",
    operation_id: str = "",
    session: UUID = HERE,
    result: str = "",
) -> Earlier:
    return Earlier(
        next(_ids),
        session,
        tool,
        operation_of(tool, operation_id, arguments),
        operation_id,
        arguments,
        status,
        code,
        True,
        result,
        status == "outcome_unknown",
    )


def guarded(*before: Earlier, operation_id: str = "", writes: bool = True, most: int = 3) -> Any:
    new = Examined(
        Proposal("c", "t", {}, operation_id), "{}", arguments_hash="h", operation=operation_of("t", operation_id, "h")
    )
    found = guard_repeats(new, replace(FACTS, earlier=before), writes=writes, max_repeats=most)
    return (found.code, found.refers_to) if isinstance(found, Refusal) else found


DONE, WAITING, DOUBT = earlier("succeeded"), earlier("awaiting_approval"), earlier("outcome_unknown")
REJECTED = earlier("rejected", code="APPROVAL_REJECTED")


@pytest.mark.parametrize("status", ["awaiting_approval", "approved", "executing"])
def test_an_operation_under_way_is_a_duplicate(status: str) -> None:
    first = earlier(status)
    assert guarded(first) == ("DUPLICATE_IN_PROGRESS", first.id)


def test_a_finished_operation_is_replayed() -> None:
    assert guarded(DONE) == DONE.id


@pytest.mark.parametrize("session", [HERE, ELSEWHERE])
def test_an_unknown_outcome_blocks_in_any_session_of_the_agent(session: UUID) -> None:
    """F-97."""
    first = earlier("outcome_unknown", session=session)
    assert guarded(first) == ("OUTCOME_UNRESOLVED", first.id)


def test_an_unknown_outcome_blocks_equal_arguments_whatever_the_operation_id() -> None:
    first = earlier("outcome_unknown", operation_id="before", session=ELSEWHERE)
    assert guarded(first, operation_id="now") == ("OUTCOME_UNRESOLVED", first.id)
    assert guarded(first) == ("OUTCOME_UNRESOLVED", first.id)
    same_operation = earlier("outcome_unknown", operation_id="now", arguments="other", session=ELSEWHERE)
    assert guarded(same_operation, operation_id="now") == ("OUTCOME_UNRESOLVED", same_operation.id)
    assert guarded(earlier("outcome_unknown", arguments="other", operation_id="before"), operation_id="now") is None


@pytest.mark.parametrize("code", ["APPROVAL_REJECTED", "AMENDED"])
def test_people_are_not_asked_twice(code: str) -> None:
    first = earlier("rejected", code=code)
    assert guarded(first) == ("ALREADY_REJECTED", first.id)
    assert guarded(earlier("rejected", code=code, session=ELSEWHERE)) is None, "in the same session only"


@pytest.mark.parametrize(
    "first",
    [
        earlier("failed", code="RETRIES_EXHAUSTED"),
        earlier("failed", code="CONFIRMED_NOT_DONE"),
        earlier("rejected", code="APPROVAL_EXPIRED"),
        earlier("rejected", code="CANCELLED"),
        earlier("succeeded", session=ELSEWHERE),
        earlier("executing", session=ELSEWHERE),
        earlier("succeeded", operation_id="one"),
    ],
    ids=lambda e: f"{e.status} {e.code}",
)
def test_what_ended_without_effect_or_is_another_operation_runs_as_a_new_call(first: Earlier) -> None:
    assert guarded(first) is None


@pytest.mark.parametrize("status", [*Status])
@pytest.mark.parametrize("changed", [{"arguments": "other"}, {"tool": "other"}])
def test_the_same_operation_id_with_anything_else_is_a_mismatch_before_all_other_rows(
    status: str, changed: dict[str, str]
) -> None:
    first = earlier(status, operation_id="op", **changed)
    rest = [earlier(each, operation_id="op") for each in ("succeeded", "executing", "outcome_unknown")]
    assert guarded(*rest, first, operation_id="op") == ("OPERATION_MISMATCH", first.id)
    elsewhere = replace(first, session=ELSEWHERE, status="failed", unresolved=False)
    assert guarded(elsewhere, operation_id="op") is None, "in the same session only"


def test_the_first_matching_row_from_the_top_decides() -> None:
    looped = [earlier() for _ in range(3)]
    assert guarded(*looped, REJECTED, DOUBT, WAITING, DONE) == DONE.id
    assert guarded(*looped, REJECTED, DOUBT, WAITING)[0] == "DUPLICATE_IN_PROGRESS"
    assert guarded(*looped, REJECTED, DOUBT)[0] == "OUTCOME_UNRESOLVED"
    assert guarded(*looped, REJECTED)[0] == "ALREADY_REJECTED"
    assert guarded(*looped)[0] == "LOOP_DETECTED"


def test_after_max_repeats_failures_a_loop_is_detected() -> None:
    """F-91, S-F10."""
    assert guarded(*[earlier() for _ in range(2)]) is None
    assert guarded(*[earlier() for _ in range(3)])[0] == "LOOP_DETECTED"
    assert guarded(earlier(), most=1)[0] == "LOOP_DETECTED"
    assert guarded(*[earlier(session=ELSEWHERE) for _ in range(9)]) is None


def test_a_read_loops_only_while_its_result_stays_the_same() -> None:
    """F-91: same arguments six times with changing results."""
    changing = [earlier("succeeded", result=str(n)) for n in range(6)]
    assert guarded(*changing, writes=False) is None
    stuck = [*changing, *[earlier("succeeded", result="5") for _ in range(2)]]
    assert guarded(*stuck, writes=False)[0] == "LOOP_DETECTED"
    assert guarded(*stuck[:-1], writes=False) is None
    failing = [earlier("failed") for _ in range(6)]
    assert guarded(*failing, writes=False) is None


@pytest.mark.parametrize("status", [*Status])
def test_a_read_is_never_replayed_or_refused_as_a_duplicate(status: str) -> None:
    assert guarded(earlier(status), writes=False) is None


# -- the order of the stages


def test_each_stage_is_reached_only_when_those_before_it_pass() -> None:
    calls: list[str] = []
    with a_tool(
        limits=[{"measure": "amount", "per": "call", "max": 10}],
        effect="idempotent_write",
        approval_when=[{"measure": "amount", "above": 5}],
    ) as tool:
        tool.check(lambda arguments, context: calls.append("asked"))
        twice = Earlier(next(_ids), HERE, tool.name, "", "op", "other", "failed", "", True, "", False)
        bad: dict[str, Any] = {"amount": 11}
        no = Refusal("NO", "no")

        repeated = replace(FACTS, earlier=[twice])
        faulty = looked_at(tool, {"amount": "x"}, operation_id="op")
        assert code_of(decided(faulty, replace(repeated, brakes=frozenset({""})))) == "PAUSED"
        assert code_of(decided(faulty, repeated)) == "INVALID_ARGUMENTS"
        known = looked_at(tool, bad, operation_id="op")
        assert code_of(decided(known, repeated, checked=no)) == "OPERATION_MISMATCH"
        fresh = looked_at(tool, bad)
        assert isinstance(decided(fresh), NeedsCheck)
        assert code_of(decided(fresh, checked=no)) == "NO"
        assert code_of(decided(fresh, checked=True)) == "POLICY_LIMIT"
        waits = decided(looked_at(tool, {"amount": 6}), checked=True)
        assert isinstance(waits, Admitted)
        assert waits.waits
        goes = decided(looked_at(tool, {"amount": 5}), checked=True)
        assert isinstance(goes, Admitted)
        assert not goes.waits
    assert calls == [], "decide asks nobody; it is told"


def test_a_replay_comes_before_check_limits_and_approval() -> None:
    with a_tool(
        effect="idempotent_write", requires_approval=True, limits=[{"count": True, "per": "day", "max": 0}]
    ) as tool:
        tool.check(lambda arguments, context: None)
        examined = looked_at(tool)
        done = Earlier(
            next(_ids),
            HERE,
            tool.name,
            examined.operation,
            "",
            examined.arguments_hash,
            "succeeded",
            "OK",
            True,
            "r",
            False,
        )
        verdict = decided(examined, replace(FACTS, earlier=[done]))
    assert isinstance(verdict, Replay)
    assert verdict.of == done.id


# -- stages 6 and 7


def raises(arguments: Any) -> int:
    raise KeyError("no such measure today")


RULE = [{"measure": "amount", "above": 100}]


@pytest.mark.parametrize(
    ("derive", "waits"),
    [
        (lambda a: 100, False),
        (lambda a: 101, True),
        (lambda a: 10**900, True),
        (raises, True),
        (lambda a: None, True),
        (lambda a: "50", True),
        (lambda a: True, True),
        (lambda a: 5.5, True),
    ],
)
def test_a_rule_asks_above_its_bound_and_wherever_it_cannot_be_told(derive: Any, waits: bool) -> None:
    with a_tool(effect="idempotent_write", approval_when=RULE, measures={"amount": derive}) as tool:
        verdict = decided(looked_at(tool))
    assert isinstance(verdict, Admitted)
    assert verdict.waits is waits
    assert bool(verdict.why) is waits
    assert not waits or "amount" in verdict.why


@pytest.mark.parametrize("derive", [raises, lambda a: None, lambda a: "50", lambda a: 1.5])
def test_a_limit_that_cannot_be_told_refuses(derive: Any) -> None:
    limit = {"measure": "amount", "per": "call", "max": 10**9}
    with a_tool(effect="read", limits=[limit], measures={"amount": derive}) as tool:
        assert code_of(decided(looked_at(tool))) == "POLICY_LIMIT"


@pytest.mark.parametrize(
    ("limit", "used", "code"),
    [
        ({"measure": "amount", "per": "call", "max": 7}, 100, ""),
        ({"measure": "amount", "per": "call", "max": 6}, 0, "POLICY_LIMIT"),
        ({"measure": "amount", "per": "day", "max": 10}, 3, ""),
        ({"measure": "amount", "per": "day", "max": 10}, 4, "POLICY_LIMIT"),
        ({"count": True, "per": "day", "max": 3}, 2, ""),
        ({"count": True, "per": "day", "max": 3}, 3, "POLICY_LIMIT"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("whose", ["policy", "agent"])
def test_a_limit_holds_at_its_bound(limit: dict[str, Any], used: int, code: str, whose: str) -> None:
    policy = {"limits": [limit]} if whose == "policy" else {}
    agent = replace(ANYTHING, limits=() if policy else (Limit(**limit),))
    with a_tool(effect="read", **policy) as tool:
        verdict = decided(looked_at(tool, {"amount": 7}), agent=agent, used=lambda *_: used)
    assert (code_of(verdict) if isinstance(verdict, Refused) else "") == code


def test_an_agents_limit_on_money_says_nothing_of_tools_that_move_none() -> None:
    agent = replace(ANYTHING, limits=(Limit(measure="amount", per="call", max=0),))
    with a_tool(effect="read", measures={}) as tool:
        assert isinstance(decided(looked_at(tool), agent=agent), Admitted)


def test_an_approval_does_not_lift_a_limit() -> None:
    """F-27: what could not run never reaches the queue."""
    with a_tool(requires_approval=True, limits=[{"measure": "amount", "per": "call", "max": 1}]) as tool:
        assert code_of(decided(looked_at(tool, {"amount": 2}))) == "POLICY_LIMIT"
        assert code_of(decided(looked_at(tool, {"amount": 2}), amending=True)) == "POLICY_LIMIT"


def test_a_declared_secret_is_not_told_by_the_reason_to_ask() -> None:
    """F-28: the reason stands in lists and answers, unmasked."""
    with a_tool(effect="read", approval_when=RULE, sensitive=["amount"]) as tool:
        verdict = decided(looked_at(tool, {"amount": 987654}))
    assert isinstance(verdict, Admitted)
    assert verdict.why == "tool: amount is above 100"


def test_why_a_call_waits_is_told_with_its_source() -> None:
    with a_tool(requires_approval=True) as asked, a_tool() as by_default:
        one, other = decided(looked_at(asked)), decided(looked_at(by_default))
    assert isinstance(one, Admitted)
    assert isinstance(other, Admitted)
    assert one.why == "tool: requires_approval is true"
    assert other.why.startswith("unclassified tools wait")


# -- codes (interfaces, Codes)

ADVICE = {
    "succeeded": {"do_not_retry": "OK OK_WITH_WARNING PARTIAL CONFIRMED_DONE"},
    "failed": {
        "correct_and_call": "INVALID_JSON INVALID_ARGUMENTS ORDER_NOT_FOUND CURRENCY_MISMATCH",
        "do_not_retry": "UNKNOWN_TOOL TOOL_NOT_ALLOWED POLICY_LIMIT SESSION_CLOSED TURN_CLOSED OUTCOME_UNRESOLVED OPERATION_MISMATCH"
        " ALREADY_REJECTED LOOP_DETECTED PERMISSION_WITHDRAWN INTERNAL_ERROR INVALID_RESULT",
        "new_call_ok": "PAUSED CHECK_UNAVAILABLE CANCELLED NOT_STARTED_IN_TIME NOT_RUN TOOL_CHANGED UPSTREAM_UNAVAILABLE"
        " RETRIES_EXHAUSTED CONFIRMED_NOT_DONE",
        "wait": "DUPLICATE_IN_PROGRESS",
    },
    "budget_exhausted": {"do_not_retry": "STEP_LIMIT TURN_LIMIT TIME_LIMIT SPEND_LIMIT"},
    "rejected": {"do_not_retry": "APPROVAL_REJECTED AMENDED", "new_call_ok": "APPROVAL_EXPIRED CANCELLED"},
    "outcome_unknown": {"do_not_retry": "TIMEOUT_UNKNOWN WORKER_LOST CONNECTION_LOST INTERNAL_ERROR"},
}
ROWS = [
    (status, code, retry)
    for status, kinds in ADVICE.items()
    for retry, codes in kinds.items()
    for code in codes.split()
]


@pytest.mark.parametrize(("status", "code", "retry"), ROWS)
def test_each_code_gives_the_advice_of_the_table(status: str, code: str, retry: str) -> None:
    given = advice(status, code)
    assert given == retry
    actions = next_actions(status, given)
    again = {"new_call_ok": "call_again_with_a_new_id", "correct_and_call": "call_corrected_with_a_new_id"}
    assert [each for each in actions if each.startswith("call_")] == [again[each] for each in again if each == retry]
    assert ("wait_for_settlement" in actions) is (status == "outcome_unknown")


@pytest.mark.parametrize("status", ["awaiting_approval", "approved", "executing"])
@pytest.mark.parametrize("code", ["", "CONNECTION_LOST", "NOT_RUN"])
def test_while_a_call_waits_or_runs_the_advice_is_to_wait(status: str, code: str) -> None:
    given = advice(status, code, tool_says="do_not_retry")
    assert given == "wait"
    assert next_actions(status, given) == ["wait", "cancel"]


def test_what_a_tool_says_about_its_own_code_is_what_the_agent_reads() -> None:
    assert advice("failed", "SOLD_OUT", tool_says="do_not_retry") == "do_not_retry"


def test_the_table_of_codes_is_complete() -> None:
    own = {"ORDER_NOT_FOUND", "CURRENCY_MISMATCH"}
    assert {code for _, code, _ in ROWS} - own == KNOWN
    assert OF_THE_BUDGET < OF_STAGE_ZERO <= KNOWN
