"""From a proposal to a stored call: each stage against the database (behaviour, section 4)."""

import json
import time
from typing import Any

import pytest
from django.db import connection
from django.db.models import JSONField, Value

from tests.worlds import Script, World, a_tool, a_world, let_pass, let_session_pass
from toolcalls import intake, lifecycle
from toolcalls.effects import Effect
from toolcalls.intake import Answered, Mismatch, NoSuchSession, Opening
from toolcalls.models import Attempt, Call, Session, StoredPolicy, Turn
from toolcalls.pipeline import Proposal
from toolcalls.sweeps import sweep
from toolcalls.tools import NotRun, Tool, ToolRejected


def refused(world: World, call: Call, code: str, *, status: str = "failed") -> None:
    """A refused call is recorded with its code, final, and nothing of it ever reaches the tool."""
    stored = world.now(call)
    assert (stored.status, stored.code) == (status, code)
    assert stored.finished_at is not None
    assert stored.message
    assert (stored.due_at, stored.alarm_at, stored.claims) == (None, None, 0)
    world.run()
    assert not Attempt.objects.filter(call=call).exists()
    assert world.moves(call) == ["proposed", status]


# -- which policy applies, from the outside


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        ({"effect": "read"}, "approved"),  # S-A01
        ({"effect": "idempotent_write"}, "approved"),  # S-A02
        ({"effect": "non_idempotent_write"}, "awaiting_approval"),  # S-A03
        ({}, "awaiting_approval"),  # S-A04
        ({"effect": "read", "requires_approval": True}, "awaiting_approval"),  # S-A05
        ({"effect": "idempotent_write", "requires_approval": True}, "awaiting_approval"),  # S-A06
        ({"effect": "non_idempotent_write", "requires_approval": False}, "approved"),  # S-A07
        ({"requires_approval": False}, "approved"),  # S-A08
    ],
    ids=repr,
)
def test_a_call_waits_or_runs_as_its_class_and_policy_say(world: World, policy: dict[str, Any], status: str) -> None:
    tried = Script()
    with a_tool(tried, **policy) as tool:
        call = world.propose(tool)
        assert call.status == status
        world.run()
        assert tried.applied == (status == "approved")
        if status == "awaiting_approval":
            world.approve(call)
            world.run()
        world.run()
    assert (world.now(call).status, tried.applied) == ("succeeded", 1)


@pytest.mark.parametrize("policy", [{"effect": "non_idempotent_write"}, {}], ids=repr)
def test_a_single_attempt_tool_that_runs_unasked_still_runs_at_most_once(world: World, policy: dict[str, Any]) -> None:
    """S-A07, S-A08: also where nothing at all was sent."""
    tried = Script(NotRun("refused"))
    with a_tool(tried, requires_approval=False, **policy) as tool:
        call = world.run_to_the_end(world.propose(tool))
    assert (call.status, tried.applied, call.max_attempts) == ("failed", 1, 1)


def test_a_teams_override_wins_over_what_the_tool_declares(world: World) -> None:
    """S-A09 in kind, F-14: and it applies to later calls only."""
    with a_tool(effect="read") as tool:
        before = world.propose(tool)
        lifecycle.store_policy(world.team, tool, {"effect": "non_idempotent_write"}, by="test")
        after = world.propose(tool, {"amount": 1})
    assert (world.now(before).status, world.now(before).effect) == ("approved", "read")
    assert (after.status, after.effect, after.retryable, after.max_attempts) == (
        "awaiting_approval",
        "non_idempotent_write",
        False,
        1,
    )


def test_another_teams_override_changes_nothing(world: World) -> None:
    other = a_world()
    with a_tool(effect="read") as tool:
        lifecycle.store_policy(other.team, tool, {"requires_approval": True}, by="test")
        assert world.propose(tool).status == "approved"
        assert other.propose(tool).status == "awaiting_approval"


@pytest.mark.parametrize("values", [{"requires_approval": "ture"}, {"effekt": "read"}, [], None, "read"], ids=repr)
def test_an_override_that_is_no_policy_makes_the_tool_wait(world: World, values: Any) -> None:
    """F-16: written past the product."""
    with a_tool(effect="read") as tool:
        StoredPolicy.objects.create(team=world.team, tool=tool.name, values=Value(values, JSONField()))
        call = world.propose(tool)
    assert (call.status, call.effect) == ("awaiting_approval", "unclassified")


@pytest.mark.parametrize(
    ("default", "status"), [("read", "approved"), ("idempotent_write", "approved"), ("", "awaiting_approval")]
)
def test_an_agents_default_speaks_where_nobody_else_does(world: World, default: str, status: str) -> None:
    world.agent.default_effect = default
    world.agent.save()
    with a_tool() as silent, a_tool(effect="unclassified") as explicit:
        assert world.propose(silent).status == status
        assert world.propose(explicit).status == "awaiting_approval", "S-A10"


def test_what_was_admitted_is_frozen_while_policies_change(world: World) -> None:
    """F-14, F-24: nothing reaches a call that waits."""
    with a_tool(approvers_needed=1, timeout=7) as tool:
        call = world.propose(tool, {"amount": 3})
        frozen = world.now(call).policy
        lifecycle.store_policy(
            world.team, tool, {"requires_approval": False, "timeout": 99, "approvers_needed": 2}, by="test"
        )
        stored = world.now(call)
        assert (stored.policy, stored.timeout, stored.approvers_needed, stored.status) == (
            frozen,
            7,
            1,
            "awaiting_approval",
        )
        world.reject(call)
        world.run()
    assert world.now(call).status == "rejected"


# -- stage 0


def test_a_closed_session_refuses_and_tells_so(world: World) -> None:
    with a_tool(effect="read") as tool:
        before = world.propose(tool)
        lifecycle.close_session(world.session.pk, by="test")
        refused(world, world.propose("no_such_tool"), "SESSION_CLOSED")
        assert world.now(before).status == "succeeded", "closing stops new calls and nothing else"


def test_a_cancelled_turn_refuses_and_other_turns_go_on(world: World) -> None:
    with a_tool(effect="read") as tool:
        world.propose(tool, turn="one")
        lifecycle.cancel_turn(world.session.pk, Turn.objects.get(turn_id="one").pk, by="test")
        refused(world, world.propose("no_such_tool", turn="one"), "TURN_CLOSED")
        assert world.propose(tool, turn="two").status == "approved"


@pytest.mark.parametrize("what", ["team", "agent", "tool here", "tool everywhere"])
def test_a_brake_refuses_new_calls_until_it_is_released(world: World, what: str) -> None:
    with a_tool(effect="read") as tool, a_tool(effect="read") as other:
        brake: dict[str, Any] = {
            "team": {"team": world.team},
            "agent": {"team": world.team, "agent_id": world.agent.pk},
            "tool here": {"team": world.team, "tool": tool.name},
            "tool everywhere": {"team": None, "tool": tool.name},
        }[what]
        assert lifecycle.pull_brake(**brake, by="test")
        refused(world, world.propose(tool), "PAUSED")
        assert (world.propose(other).code == "PAUSED") is (not what.startswith("tool"))
        assert lifecycle.release_brake(**brake, by="test")
        assert world.propose(tool).status == "approved"


@pytest.mark.parametrize(
    ("budget", "code"), [({"calls": 1}, "STEP_LIMIT"), ({"turns": 1}, "TURN_LIMIT"), ({"seconds": 60}, "TIME_LIMIT")]
)
def test_a_budget_that_is_used_up_comes_before_everything_else(world: World, budget: dict[str, int], code: str) -> None:
    """S-F09: even before the tool is known; no attempt."""
    session = world.open(**budget)
    with a_tool(effect="read") as tool:
        assert world.propose(tool, session=session, turn="one").status == "approved"
        let_session_pass(61, session)
        call = world.propose("no_such_tool", session=session, turn="two")
        refused(world, call, code, status="budget_exhausted")
        assert world.propose(tool, turn="two").status == "approved", "another session has its own"


def test_a_budget_of_nothing_admits_nothing(world: World) -> None:
    with a_tool(effect="read") as tool:
        for budget in ({"calls": 0}, {"turns": 0}, {"spend": 0}):
            assert world.propose(tool, session=world.open(**budget)).status == "budget_exhausted"


def test_spend_is_counted_when_a_tool_has_spent(world: World) -> None:
    session = world.open(spend=5)
    with a_tool(lambda arguments, context: context.spend(arguments.amount), effect="read") as tool:
        world.propose(tool, {"amount": 4}, session=session)
        world.run()
        assert world.propose(tool, {"amount": 1}, session=session).status == "approved"
        world.run()
        refused(world, world.propose(tool, session=session), "SPEND_LIMIT", status="budget_exhausted")


def test_every_new_row_takes_one_call_but_not_those_refused_at_stage_0(world: World) -> None:
    session = world.open(calls=10)

    def used() -> int:
        return Session.objects.get(pk=session.pk).calls_used

    with a_tool(effect="idempotent_write") as tool:
        world.propose(tool, session=session, call_id="a")
        world.run()
        world.propose(tool, session=session)  # a replay
        world.propose(tool, "{", session=session)
        world.propose("no_such_tool", session=session)
        assert used() == 4
        world.propose(tool, session=session, call_id="a")  # the same again
        world.answer(tool, {"amount": 1}, session=session, call_id="a")  # a mismatch
        lifecycle.pull_brake(team=world.team, tool=tool.name, by="test")
        assert world.propose(tool, session=session).code == "PAUSED"
        assert used() == 4


def test_a_turn_is_counted_once_and_not_by_what_stage_0_refuses(world: World) -> None:
    session = world.open(turns=2)
    with a_tool(effect="read") as tool:
        lifecycle.pull_brake(team=world.team, by="test")
        world.propose(tool, session=session, turn="paused")
        lifecycle.release_brake(team=world.team, by="test")
        for turn in ("one", "one", "two", "one", "two"):
            assert world.propose(tool, session=session, turn=turn).status == "approved"
        assert world.propose(tool, session=session, turn="paused").code == "TURN_LIMIT"
    assert Session.objects.get(pk=session.pk).turns_used == 2


def test_calls_of_one_request_take_their_shares_one_after_the_other(world: World) -> None:
    session = world.open(calls=2)
    with a_tool(effect="read") as tool:
        answers = intake.submit(
            world.agent, session.session_id, "t", [Proposal(f"c{n}", tool.name, {}) for n in range(4)]
        )
    codes = [world.stored(each).code for each in answers if isinstance(each, Answered)]
    assert codes == ["", "", "STEP_LIMIT", "STEP_LIMIT"]


# -- stages 1 to 3


def test_a_tool_off_the_list_never_reaches_the_queue(world: World) -> None:
    """F-20: no approval row."""
    world.agent.tools = ["get_*"]
    world.agent.save()
    with a_tool(requires_approval=True) as tool:
        call = world.propose(tool)
        refused(world, call, "TOOL_NOT_ALLOWED")
        assert world.now(call).deadline is None
        narrow = world.open(allowed_tools=[])
        assert world.propose("get_order", {"order_id": "ORD-1"}, session=narrow).code == "TOOL_NOT_ALLOWED"


def test_an_unknown_tool_is_recorded_with_its_name(world: World) -> None:
    call = world.propose("refund_order2", {"x": 1})
    refused(world, call, "UNKNOWN_TOOL")
    assert world.now(call).tool == "refund_order2"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("{", "INVALID_JSON"),
        ('{"amount":1,"amount":999}', "INVALID_JSON"),  # F-70
        ('{"name":"\\u0000"}', "INVALID_JSON"),  # F-66
        ('{"name":"\\ud83d"}', "INVALID_JSON"),
        ('{"amount":1e400}', "INVALID_JSON"),  # F-68
        ("[" * 20_000, "INVALID_JSON"),  # F-69
        ('{"name":"' + "x" * (256 * 1024) + '"}', "INVALID_JSON"),  # F-74
        ({"amount": "1"}, "INVALID_ARGUMENTS"),
        ({"amount": 1, "approved": True}, "INVALID_ARGUMENTS"),  # S-B19
        ({"amount": 1.5}, "INVALID_ARGUMENTS"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_that_are_no_good_are_recorded_and_run_nowhere(world: World, arguments: object, code: str) -> None:
    """S-A15: no approval row, no attempt, backend count 0; what was received is kept."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool, arguments)
        refused(world, call, code)
    stored = world.now(call)
    assert (stored.arguments, stored.arguments_hash, stored.requires_approval) == (None, "", False)
    assert stored.received
    assert tried.applied == 0


def test_a_literal_that_only_looks_like_a_null_character_survives(world: World) -> None:
    """F-66."""
    tried = Script()
    with a_tool(tried, effect="read") as tool:
        world.propose(tool, '{"name":"\\\\u0000"}')
        world.run()
    assert [each.arguments.name for each in tried.entries] == ["\\u0000"]


# -- stage 5


def checked(tool: Tool, error: Exception | None) -> list[Any]:
    asked: list[Any] = []

    @tool.check
    def check(arguments: Any, context: Any) -> None:
        asked.append((arguments, context.idempotency_key, context.attempt))
        if error:
            raise error

    return asked


@pytest.mark.parametrize(
    ("error", "code", "retry"),
    [
        (ToolRejected("ORDER_NOT_FOUND", "There is no such order."), "ORDER_NOT_FOUND", ""),
        (ToolRejected("SOLD_OUT", "Gone.", retry="do_not_retry"), "SOLD_OUT", "do_not_retry"),
        (NotRun("away"), "CHECK_UNAVAILABLE", ""),
        (KeyError("a bug"), "CHECK_UNAVAILABLE", ""),
    ],
    ids=repr,
)
def test_a_tools_own_check_refuses_before_anybody_is_asked(
    world: World, error: Exception, code: str, retry: str
) -> None:
    with a_tool() as tool:
        asked = checked(tool, error)
        call = world.propose(tool, {"amount": 3})
        refused(world, call, code)
    assert world.now(call).retry == retry
    assert "a bug" not in world.now(call).message
    assert [(each.amount, key, attempt) for each, key, attempt in asked] == [(3, "", 0)]


def test_a_check_that_takes_too_long_is_unavailable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "CHECK_SECONDS", 0.05)
    with a_tool(effect="read") as tool:
        tool.check(lambda arguments, context: time.sleep(0.3))
        refused(world, world.propose(tool), "CHECK_UNAVAILABLE")


def test_a_check_is_not_asked_where_a_cheaper_stage_refuses(world: World) -> None:
    with a_tool(effect="idempotent_write") as tool:
        asked = checked(tool, None)
        world.propose(tool, "{")
        world.propose(tool, {"amount": "1"})
        world.propose(tool, {"amount": 1}, session=world.open(calls=0))
        assert asked == []
        world.propose(tool, {"amount": 1}, call_id="first")
        assert len(asked) == 1
        world.propose(tool, {"amount": 1}, call_id="first")
        assert world.propose(tool, {"amount": 1}).code == "DUPLICATE_IN_PROGRESS"
        assert len(asked) == 1


def test_a_check_runs_outside_any_transaction(world: World) -> None:
    seen = []
    with a_tool(effect="read") as tool:
        tool.check(lambda arguments, context: seen.append(connection.in_atomic_block))
        world.propose(tool)
    assert seen == [False]


# -- what is stored


def test_an_admitted_call_is_stored_with_its_canonical_text_and_what_was_received(world: World) -> None:
    with a_tool(effect="read") as tool:
        call = world.now(world.propose(tool, '{ "name" : "\\u00e9",  "amount": 1e2 }', call_id="functions.search:0"))
    assert call.arguments == '{"amount":100,"name":"é"}'
    assert json.loads(call.received or "") == '{ "name" : "\\u00e9",  "amount": 1e2 }'
    assert call.measures == {"amount": 100, "name": "é"}
    assert call.idempotency_key == f"{world.session.pk}/turn-1/functions.search:0", "S-E02, S-C03"
    lines = [(line.event, line.source, line.target, line.actor) for line in world.journal(call)]
    agent = f"agent:{world.agent.name}"
    assert lines == [
        ("call.proposed", "", "proposed", agent),
        ("call.validated", "", "", agent),
        ("call.moved", "proposed", "approved", agent),
    ]


def test_a_call_that_waits_has_its_deadline_from_the_policy(world: World) -> None:
    """S-B03, S-B04."""
    with a_tool(deadline=60) as soon, a_tool(deadline="none") as never, a_tool() as by_default:
        calls = [world.now(world.propose(each)) for each in (soon, never, by_default)]
    left = [call.deadline and (call.deadline - call.proposed_at).total_seconds() for call in calls]
    assert left == [60, None, 86_400]
    assert [call.alarm_at for call in calls] == [call.deadline for call in calls]


def test_an_agent_without_such_a_session_gets_nothing_stored(world: World) -> None:
    with pytest.raises(NoSuchSession):
        intake.submit(world.agent, "nobody", "t", [Proposal("c", "get_order", {})])
    assert not Call.objects.exists()


# -- the same ID again


def test_the_same_call_again_answers_with_the_stored_one(world: World) -> None:
    """S-C15, F-02, F-57: in any state, nothing counted, the tool is not entered."""
    tried = Script()
    with a_tool(tried) as tool:
        first = world.answer(tool, {"amount": 1}, call_id="c")
        assert isinstance(first, Answered)
        assert not first.replayed
        for act in (
            lambda: None,
            lambda: world.approve(world.stored(first)),
            world.run,
            lambda: lifecycle.close_session(world.session.pk, by="t"),
        ):
            act()
            again = world.answer(tool, {"amount": 1}, call_id="c")
            assert isinstance(again, Answered)
            assert again.replayed
            assert again.id == first.id
            assert again.status == world.now(world.stored(first)).status
    assert tried.applied == 1


@pytest.mark.parametrize(
    "again", [{"arguments": {"amount": 2}}, {"tool": "get_order"}, {"operation_id": "op"}, {"arguments": "{"}], ids=repr
)
def test_the_same_id_with_anything_different_is_a_mismatch_and_the_first_stands(
    world: World, again: dict[str, Any]
) -> None:
    """F-56, S-G07."""
    with a_tool(effect="read") as tool:
        first = world.propose(tool, {"amount": 1}, call_id="c")
        asked: dict[str, Any] = {"tool": tool, "arguments": {"amount": 1}, **again}
        answer = world.answer(call_id="c", **asked)
        assert isinstance(answer, Mismatch)
        assert "new ID" in answer.message
        assert Call.objects.count() == 1
        assert world.propose(tool, {"amount": 1}, call_id="c").pk == first.pk


def test_a_refused_call_keeps_its_id(world: World) -> None:
    """F-62: a correction comes under a new one."""
    with a_tool(effect="read") as tool:
        first = world.propose(tool, {"amount": "x"}, call_id="c")
        assert isinstance(world.answer(tool, {"amount": 1}, call_id="c"), Mismatch)
        again = world.propose(tool, {"amount": "x"}, call_id="c")
        assert (again.pk, again.code) == (first.pk, "INVALID_ARGUMENTS"), "F-101"
        assert world.propose(tool, {"amount": 1}, call_id="d").status == "approved"


def test_the_same_id_twice_in_one_request_is_one_call(world: World) -> None:
    """F-65: and with other arguments a mismatch in its place; the session stays usable."""
    with a_tool(effect="read") as tool:
        asked = [
            Proposal("c", tool.name, {"amount": 1}),
            Proposal("c", tool.name, {"amount": 1}),
            Proposal("c", tool.name, {}),
        ]
        one, same, other = intake.submit(world.agent, world.session.session_id, "t", asked)
        assert isinstance(one, Answered)
        assert isinstance(same, Answered)
        assert (one.replayed, same.replayed, same.id) == (False, True, one.id)
        assert isinstance(other, Mismatch)
        assert world.propose(tool, turn="t").status == "approved"


def test_two_agents_of_one_session_name_have_calls_and_keys_of_their_own(world: World) -> None:
    """F-60."""
    other = a_world()
    session, opened = intake.open_session(other.agent, Opening(session_id=world.session.session_id, body_digest=""))
    assert opened
    with a_tool(effect="idempotent_write") as tool:
        mine = world.now(world.propose(tool, call_id="c"))
        world.run()
        theirs = other.now(other.propose(tool, call_id="c", session=session))
    assert mine.pk != theirs.pk
    assert mine.idempotency_key != theirs.idempotency_key
    assert (theirs.status, theirs.replay_of_id) == ("approved", None)


def test_reads_and_writes_of_one_turn_go_their_own_ways(world: World) -> None:
    """F-12, F-11: the read finishes at once, only the other waits."""
    with a_tool(effect="read") as read, a_tool() as write:
        asked = [Proposal("r", read.name, {}), Proposal("w", write.name, {}), Proposal("v", write.name, {"amount": 1})]
        answers = intake.submit(world.agent, world.session.session_id, "t", asked)
        calls = [world.stored(each) for each in answers if isinstance(each, Answered)]
        world.run()
        assert [world.now(each).status for each in calls] == ["succeeded", "awaiting_approval", "awaiting_approval"]
        world.approve(calls[1])
        world.reject(calls[2])
        world.run()
    assert [world.now(each).status for each in calls] == ["succeeded", "succeeded", "rejected"]


def test_an_admitted_call_still_starts_after_the_budget(world: World) -> None:
    session = world.open(seconds=60, calls=1)
    with a_tool(effect="read") as tool:
        call = world.propose(tool, session=session)
        let_session_pass(61, session)
        world.run()
    assert world.now(call).status == "succeeded"


def test_a_day_without_time_passes_nothing_on(world: World) -> None:
    """A call's own clock is its own: another call's passed deadline ends that call alone."""
    with a_tool(deadline=60) as tool:
        late, early = world.propose(tool, {"amount": 1}), world.propose(tool, {"amount": 2})
        let_pass(61, late)
        assert world.now(early).status == "awaiting_approval"
        sweep()
    assert (world.now(late).code, world.now(early).status) == ("APPROVAL_EXPIRED", "awaiting_approval")


def test_a_summary_that_raises_costs_nothing_but_itself(world: World) -> None:
    with a_tool(effect=Effect.UNCLASSIFIED) as tool:
        tool.summary(lambda arguments: f"Do {arguments.amount / 0}")
        assert world.now(world.propose(tool)).summary == ""
        tool.summary(lambda arguments: f"Do it {arguments.amount} times.")
        assert world.now(world.propose(tool, {"amount": 2})).summary == "Do it 2 times."
