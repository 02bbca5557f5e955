"""Limits on measures, added up over a team's day (behaviour, section 4)."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from approvals import desk
from tests.worlds import Script, World, a_tool, a_world, let_pass, past_the_triggers
from toolcalls import intake, lifecycle, masking
from toolcalls.intake import Answered, start_of_day
from toolcalls.models import Call
from toolcalls.pipeline import Proposal
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt, NotRun, ToolRejected

A_DAY = [{"measure": "amount", "per": "day", "max": 100}]


def over(world: World, tool: Any, amount: int, **how: Any) -> bool:
    call = world.propose(tool, {"amount": amount, "name": how.pop("name", "x")}, operation_id=how.pop("op", ""), **how)
    assert call.code in ("", "POLICY_LIMIT"), call.code
    assert call.message or not call.code
    return call.code == "POLICY_LIMIT"


def test_a_sum_per_day_holds_at_its_bound(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=A_DAY) as tool:
        assert not over(world, tool, 60)
        assert over(world, tool, 41)
        assert not over(world, tool, 40)
        assert over(world, tool, 1)
        assert not over(world, tool, 0)


def test_a_count_per_day_and_group(world: World) -> None:
    limit = [{"count": True, "per": "day", "group_by": "name", "max": 2}]
    with a_tool(effect="read", limits=limit) as tool:
        for _ in range(2):
            assert not over(world, tool, 1, name="ORD-1")
        assert over(world, tool, 1, name="ORD-1")
        assert not over(world, tool, 1, name="ORD-2")


def test_a_sum_per_day_and_group_by_a_number(world: World) -> None:
    limit = [{"measure": "amount", "per": "day", "group_by": "amount", "max": 10}]
    with a_tool(effect="read", limits=limit) as tool:
        assert not over(world, tool, 5)
        assert not over(world, tool, 5)
        assert over(world, tool, 5)
        assert not over(world, tool, 6)


def test_numbers_of_any_size_are_added_up_exactly(world: World) -> None:
    huge = 10**400
    with a_tool(effect="read", limits=[{"measure": "amount", "per": "day", "max": 2 * huge}]) as tool:
        assert not over(world, tool, huge)
        assert over(world, tool, huge + 1)
        assert not over(world, tool, huge)


@pytest.mark.parametrize("status", ["awaiting_approval", "approved", "executing", "outcome_unknown", "succeeded"])
def test_what_waits_runs_is_unknown_or_succeeded_keeps_its_share(world: World, status: str) -> None:
    tried = Script(InDoubt("cut") if status == "outcome_unknown" else 1)
    with a_tool(tried, limits=A_DAY, requires_approval=status == "awaiting_approval") as tool:
        call = world.propose(tool, {"amount": 60})
        if status == "executing":
            world.claim_and_die(call)
        elif status in ("outcome_unknown", "succeeded"):
            world.run()
        assert world.now(call).status == status
        assert over(world, tool, 41, op="other")


@pytest.mark.parametrize("how", ["rejected", "expired", "cancelled", "failed", "not run", "settled as not done"])
def test_what_ends_without_effect_gives_its_share_back(world: World, how: str) -> None:
    ends = {"failed": ToolRejected("NO", "no"), "not run": NotRun("away"), "settled as not done": InDoubt("cut")}
    with a_tool(Script(ends.get(how)), limits=A_DAY) as tool:
        call = world.propose(tool, {"amount": 100})
        assert over(world, tool, 1)
        if how == "rejected":
            world.reject(call)
        elif how == "cancelled":
            lifecycle.cancel_call(call.pk, by="test")
        elif how == "expired":
            let_pass_deadline(call)
            sweep()
        else:
            world.approve(call)
            world.run()
        if how == "settled as not done":
            assert over(world, tool, 1), "while it is unknown it counts"
            desk.settle(call.pk, world.ana, verdict="did_not_take_effect", evidence="looked", channel="desk")
        assert world.now(call).status in ("rejected", "failed")
        assert not over(world, tool, 100, op="again")


def let_pass_deadline(call: Call) -> None:
    """Pass the deadline and no more: the call stays one of today."""
    with past_the_triggers() as cursor:
        cursor.execute(
            "UPDATE toolcalls_call SET deadline = clock_timestamp(), alarm_at = clock_timestamp() WHERE id = %s",
            [call.pk],
        )


def test_a_refused_call_takes_no_share(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=A_DAY) as tool:
        assert over(world, tool, 101)
        assert not over(world, tool, 100)


def test_a_replay_takes_no_share(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=[{"count": True, "per": "day", "max": 2}]) as tool:
        world.propose(tool, {"amount": 1})
        world.run()
        for _ in range(3):
            assert world.propose(tool, {"amount": 1}).replay_of_id
        assert not over(world, tool, 2)
        assert over(world, tool, 3)


def test_a_tools_limit_is_the_teams_and_counts_over_all_its_agents_and_sessions(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=A_DAY) as tool, a_tool(effect="read", limits=A_DAY) as another:
        assert not over(world, tool, 60)
        assert over(world, tool, 60, session=world.open())
        assert not over(a_world(), tool, 60), "another team has its own"
        assert not over(world, another, 60), "another tool has its own"


def test_an_agents_limit_counts_over_all_its_tools(world: World) -> None:
    world.agent.limits = A_DAY
    world.agent.save()
    with a_tool(effect="read") as one, a_tool(effect="read") as other, a_tool(effect="read", measures={}) as free:
        assert not over(world, one, 60)
        assert over(world, other, 60)
        assert not over(world, other, 40)
        assert not over(world, free, 60)


def test_an_agents_limit_refuses_where_a_tools_own_measure_cannot_be_told(world: World) -> None:
    def cannot_tell(arguments: Any) -> int:
        raise KeyError("no such price today")

    world.agent.limits = A_DAY
    world.agent.save()
    with a_tool(effect="read", measures={"amount": cannot_tell}) as tool:
        assert over(world, tool, 1)


def test_a_teams_override_may_tighten_a_limit(world: World) -> None:
    with a_tool(effect="read", limits=A_DAY) as tool:
        lifecycle.store_policy(
            world.team, tool, {"limits": [{"measure": "amount", "per": "call", "max": 5}]}, by="test"
        )
        assert not over(world, tool, 5)
        assert over(world, tool, 6)


def test_yesterday_is_another_day(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=A_DAY) as tool:
        call = world.propose(tool, {"amount": 100})
        assert over(world, tool, 1)
        let_pass(24 * 3600 + 1, call)
        assert not over(world, tool, 100, op="today")


@pytest.mark.parametrize(
    ("zone", "began"),
    [
        ("UTC", "2026-05-01T00:00+00:00"),
        ("America/Sao_Paulo", "2026-04-30T03:00+00:00"),
        ("Pacific/Auckland", "2026-05-01T12:00+00:00"),
    ],
)
def test_a_day_is_the_teams(world: World, zone: str, began: str) -> None:
    world.team.time_zone = zone
    world.agent.team = world.team
    noon = {"UTC": 12, "America/Sao_Paulo": 2, "Pacific/Auckland": 13}[zone]
    assert start_of_day(world.agent, datetime(2026, 5, 1, noon, tzinfo=UTC)) == datetime.fromisoformat(began)


def test_a_day_in_which_the_clocks_change_begins_at_its_own_midnight(world: World) -> None:
    world.team.time_zone = "Europe/Berlin"
    world.agent.team = world.team
    spring = datetime(2026, 3, 29, 20, tzinfo=UTC)
    assert start_of_day(world.agent, spring) == datetime(2026, 3, 28, 23, tzinfo=UTC)
    assert start_of_day(world.agent, spring + timedelta(days=1)) == datetime(2026, 3, 29, 22, tzinfo=UTC)


def test_calls_of_one_request_share_a_limit(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=A_DAY) as tool:
        asked = [Proposal(f"c{n}", tool.name, {"amount": n}) for n in (50, 51, 49, 1, 2)]
        answers = intake.submit(world.agent, world.session.session_id, "t", asked)
    codes = [world.stored(each).code for each in answers if isinstance(each, Answered)]
    assert codes == ["", "POLICY_LIMIT", "", "", "POLICY_LIMIT"]


def test_an_amendment_takes_the_share_of_the_call_that_it_replaces(world: World) -> None:
    """100 of 120 are waiting: amended to 110 that is 110, not 210."""
    with a_tool(amend=True, limits=[{"measure": "amount", "per": "day", "max": 120}]) as tool:
        call = world.now(world.propose(tool, {"amount": 100}))
        seen = masking.hash_of(call)
        with pytest.raises(intake.AmendmentRefused):
            desk.amend(call.pk, world.ana, arguments_hash=seen, arguments={"amount": 121}, reason="", channel="desk")
        assert world.now(call).status == "awaiting_approval"
        desk.amend(call.pk, world.ana, arguments_hash=seen, arguments={"amount": 110}, reason="", channel="desk")
        assert over(world, tool, 11)
        assert not over(world, tool, 10)


def test_what_a_limit_depends_on_and_cannot_be_told_is_refused(world: World) -> None:
    def broken(arguments: Any) -> int:
        raise KeyError("gone")

    with a_tool(effect="read", measures={"amount": broken}, limits=A_DAY) as tool:
        assert over(world, tool, 1)


def test_a_refusal_by_a_limit_says_how_much_is_left(world: World) -> None:
    with a_tool(effect="idempotent_write", limits=A_DAY) as tool:
        world.propose(tool, {"amount": 60})
        message = world.propose(tool, {"amount": 41}).message
    assert "100" in message
    assert "60" in message
    assert "41" in message
