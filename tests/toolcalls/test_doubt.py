"""Doubt outlives the attempt: while a writing call may have taken effect, nothing but a success or a settlement ends it as known."""

from typing import Any

import pytest
from django.db import DatabaseError

from approvals import desk
from tests import worlds
from tests.worlds import Held, Script, World, a_tool, let_pass, let_session_pass, make_due
from toolcalls import lifecycle
from toolcalls.codes import DID_NOT_RUN
from toolcalls.effects import Effect
from toolcalls.models import Agent, Call
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt, NotRun, Tool, ToolRejected

KEYED: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 3000.0, "backoff_cap": 3000.0}
QUICK: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 0.001, "backoff_cap": 0.001}
SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}
LOST = InDoubt("the answer was lost")


def is_unknown(world: World, call: Call, code: str = "CONNECTION_LOST") -> None:
    now = world.now(call)
    assert (now.status, now.code, now.finished_at) == ("outcome_unknown", code, None)
    assert not now.message.startswith(DID_NOT_RUN), "an attempt entered the tool"
    assert now.due_at is None
    assert now.alarm_at is None


def in_doubt_and_waiting(world: World, tool: Tool, **where: Any) -> Call:
    """Bring a keyed write to where its first attempt is in doubt and its second waits."""
    call = world.propose(tool, **where)
    world.run()
    now = world.now(call)
    assert (now.status, now.doubt, now.live_attempt) == ("executing", "CONNECTION_LOST", None)
    assert now.due_at is not None
    return call


# -- what a later attempt says


@pytest.mark.parametrize(
    "then",
    [
        ToolRejected("ALREADY_REFUNDED", "This order was refunded already."),
        NotRun("connection refused"),
        NotRun("busy", retry_after=0),
    ],
)
def test_what_a_later_attempt_says_of_itself_does_not_make_the_first_known(world: World, then: Exception) -> None:
    """A full refund commits, its answer is lost, the retry is told "already refunded": that is no failure."""
    script = Script(LOST, then)
    with a_tool(script, **QUICK, max_attempts=3) as tool:
        call = world.run_to_the_end(world.propose(tool))
    is_unknown(world, call)
    assert script.applied == (2 if isinstance(then, ToolRejected) else 3)
    assert "may have taken effect" in call.message


def test_a_crash_of_a_later_attempt_is_a_doubt_of_its_own(world: World) -> None:
    with a_tool(Script(LOST, RuntimeError()), **QUICK) as tool:
        call = world.run_to_the_end(world.propose(tool))
    is_unknown(world, call, "INTERNAL_ERROR")


def test_a_success_ends_the_doubt(world: World) -> None:
    with a_tool(Script(LOST, {"ok": 1}), **QUICK) as tool:
        call = world.run_to_the_end(world.propose(tool))
    assert (call.status, call.code) == ("succeeded", "OK")


# -- what time and people do


def test_a_cancel_between_two_attempts_does_not_make_it_known(world: World) -> None:
    script = Script(LOST)
    with a_tool(script, **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool)
        lifecycle.cancel_call(call.pk, by="test")
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


@pytest.mark.parametrize("what", ["turn", "session"])
def test_a_cancelled_turn_or_session_does_not_make_it_known(world: World, what: str) -> None:
    with a_tool(Script(LOST), **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool)
        if what == "turn":
            became = lifecycle.cancel_turn(call.session_id, call.turn_id, by="test")
        else:
            became = lifecycle.cancel_session(call.session_id, by="test")
    assert [(each.pk, what_became) for each, what_became in became] == [(call.pk, "outcome_unknown")]
    is_unknown(world, call)


def test_a_cancel_while_a_later_attempt_runs_does_not_make_it_known(world: World) -> None:
    held = Held(ToolRejected("ALREADY_REFUNDED", "done before"))
    with a_tool(Script(LOST, held), **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool)
        make_due(call)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            lifecycle.cancel_call(call.pk, by="test")
            held.let_go()
    is_unknown(world, call)


@pytest.mark.parametrize("withdrawn", [{"enabled": False}, {"tools": ["something_else"]}])
def test_a_lost_permission_does_not_make_it_known(world: World, withdrawn: dict[str, Any]) -> None:
    script = Script(LOST)
    with a_tool(script, **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool)
        Agent.objects.filter(pk=world.agent.pk).update(**withdrawn)
        make_due(call)
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


def test_a_session_whose_time_is_over_does_not_make_it_known(world: World) -> None:
    script = Script(LOST)
    session = world.open(seconds=3600)
    with a_tool(script, **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool, session=session)
        let_session_pass(3601, session)
        make_due(call)
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


def test_a_session_whose_spend_is_used_up_does_not_make_it_known(world: World) -> None:
    def dear(arguments: Any, context: Any) -> None:
        context.spend(10)
        raise LOST

    session = world.open(spend=10)
    with a_tool(dear, **KEYED) as tool:
        call = world.propose(tool, session=session)
        world.run()
    is_unknown(world, call)


def test_a_lost_worker_of_the_last_attempt_keeps_the_latest_code(world: World) -> None:
    with a_tool(Script(LOST), **KEYED, max_attempts=2) as tool:
        call = in_doubt_and_waiting(world, tool)
        make_due(call)
        world.lose_track(call)
    is_unknown(world, call, "WORKER_LOST")


def test_arguments_that_were_changed_meanwhile_do_not_make_it_known(world: World) -> None:
    script = Script(LOST)
    with a_tool(script, **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool)
        with worlds.past_the_triggers() as cursor:
            cursor.execute("UPDATE toolcalls_call SET arguments = '{}' WHERE id = %s", [call.pk])
        make_due(call)
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


# -- after run again


def ordered_again(world: World, tool: Tool) -> Call:
    call = world.propose(tool)
    world.run()
    is_unknown(world, call)
    desk.run_again(call.pk, world.ana, evidence="The service has no trace.", channel="desk")
    now = world.now(call)
    assert (now.status, now.doubt) == ("approved", "CONNECTION_LOST")
    return call


@pytest.mark.parametrize("then", [ToolRejected("DECLINED", "no"), NotRun("connection refused")])
def test_after_run_again_a_failure_of_the_second_does_not_make_the_first_known(world: World, then: Exception) -> None:
    script = Script(LOST, then)
    with a_tool(script, **SINGLE) as tool:
        call = ordered_again(world, tool)
        world.run()
    is_unknown(world, call)
    assert script.applied == 2


def test_after_run_again_a_start_that_came_too_late_does_not_make_it_known(world: World) -> None:
    script = Script(LOST)
    with a_tool(script, **SINGLE, start_within=60) as tool:
        call = ordered_again(world, tool)
        let_pass(61, call)
        sweep()
        world.run()
    is_unknown(world, call)
    assert script.applied == 1
    assert world.moves(call)[-3:] == ["outcome_unknown", "approved", "outcome_unknown"]


def test_after_run_again_the_claim_itself_is_as_careful(world: World) -> None:
    script = Script(LOST)
    with a_tool(script, **SINGLE, start_within=60) as tool:
        call = ordered_again(world, tool)
        let_pass(61, call)
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


@pytest.mark.parametrize("how", ["call", "turn", "session", "desk"])
def test_after_run_again_a_cancel_does_not_make_it_known(world: World, how: str) -> None:
    script = Script(LOST)
    with a_tool(script, **SINGLE) as tool:
        call = ordered_again(world, tool)
        match how:
            case "call":
                lifecycle.cancel_call(call.pk, by="test")
            case "turn":
                lifecycle.cancel_turn(call.session_id, call.turn_id, by="test")
            case "session":
                lifecycle.cancel_session(call.session_id, by="test")
            case "desk":
                desk.cancel(call.pk, world.ana)
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


def test_after_run_again_a_lost_permission_does_not_make_it_known(world: World) -> None:
    script = Script(LOST)
    with a_tool(script, **SINGLE) as tool:
        call = ordered_again(world, tool)
        Agent.objects.filter(pk=world.agent.pk).update(enabled=False)
        world.run()
    is_unknown(world, call)
    assert script.applied == 1


def test_a_run_again_runs_although_its_turn_and_session_were_cancelled(world: World) -> None:
    """Behaviour, section 8, "Claim": run again excepted."""
    script = Script(LOST, {"ok": 1})
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
        other = world.propose(tool, {"amount": 9})
        lifecycle.cancel_session(world.session.pk, by="test")
        desk.run_again(call.pk, world.ana, evidence="again", channel="desk")
        world.run()
    assert (world.now(call).status, world.now(other).code, script.applied) == ("succeeded", "CANCELLED", 2)


def test_a_run_again_of_a_cancelled_call_is_not_cancelled_from_the_start(world: World) -> None:
    script = Script(Held(), {"ok": 1})
    held = script._endings[0]
    held._ending = LOST
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            lifecycle.cancel_call(call.pk, by="test")
            held.let_go()
        is_unknown(world, call)
        desk.run_again(call.pk, world.ana, evidence="again", channel="desk")
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 2)


# -- a settlement ends it


def test_a_persons_word_ends_the_doubt_and_the_record_stays(world: World) -> None:
    """S-E03, S-E05."""
    with a_tool(Script(LOST), **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
        desk.settle(
            call.pk, world.ana, verdict="took_effect", evidence="receipt 7", result={"receipt": 7}, channel="desk"
        )
    now = world.now(call)
    assert (now.status, now.code, now.result) == ("succeeded", "CONFIRMED_DONE", '{"receipt":7}')
    assert (now.settled_verdict, now.settled_at == now.finished_at) == ("took_effect", True)
    assert world.moves(call) == ["proposed", "approved", "executing", "outcome_unknown", "succeeded"]
    assert world.states(call) == ["in_doubt"]
    assert [line.event for line in world.journal(call)][-1] == "session.note"


def test_what_was_confirmed_not_done_may_be_called_again_and_never_runs_by_itself(world: World) -> None:
    """S-E04."""
    script = Script(LOST, {"ok": 1})
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
        assert world.propose(tool).code == "OUTCOME_UNRESOLVED"
        desk.settle(call.pk, world.ana, verdict="did_not_take_effect", evidence="no trace", channel="desk")
        sweep()
        world.run()
        assert (world.now(call).status, world.now(call).code) == ("failed", "CONFIRMED_NOT_DONE")
        assert script.applied == 1
        again = world.propose(tool)
        world.run()
    assert (world.now(again).status, script.applied) == ("succeeded", 2)


@pytest.mark.parametrize("state", ["failed", "rejected", "budget_exhausted"])
def test_postgresql_itself_refuses_to_end_a_doubt_as_known(world: World, state: str) -> None:
    with a_tool(Script(LOST), **KEYED) as tool:
        call = in_doubt_and_waiting(world, tool)
        with pytest.raises(DatabaseError, match=r"doubt|edge"):
            Call.objects.filter(pk=call.pk).update(status=state, moves=3, finished_at=call.proposed_at, due_at=None)
    assert world.now(call).status == "executing"
