"""Cancelling a call, a turn or a session: before, against and after the claim and the record."""

from typing import Any

import pytest

from approvals import desk
from tests import worlds
from tests.worlds import Held, Script, World, a_tool, together
from toolcalls import lifecycle
from toolcalls.codes import DID_NOT_RUN
from toolcalls.effects import Effect
from toolcalls.lifecycle import WrongState
from toolcalls.models import Session, Turn
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt, NotRun, ToolContext, ToolRejected

KEYED: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 3000.0, "backoff_cap": 3000.0}
SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}


# -- not yet started


def test_a_waiting_call_that_was_cancelled_cannot_be_approved_any_more(world: World) -> None:
    """S-G01, F-07: the stale tab."""
    script = Script()
    with a_tool(script) as tool:
        call = world.propose(tool)
        lifecycle.cancel_call(call.pk, by="test")
        with pytest.raises(desk.Conflict) as refused:
            world.approve(call)
        world.run()
    assert refused.value.code == "CANCELLED"
    assert (world.now(call).status, world.now(call).code, script.applied) == ("rejected", "CANCELLED", 0)
    assert world.moves(call) == ["proposed", "awaiting_approval", "rejected"]


def test_an_approved_call_that_was_cancelled_never_starts(world: World) -> None:
    script = Script()
    with a_tool(script) as tool:
        call = world.approve(world.propose(tool))
        lifecycle.cancel_call(call.pk, by="test")
        world.run()
        sweep()
    assert (world.now(call).status, world.now(call).code) == ("rejected", "CANCELLED")
    assert (script.applied, world.attempts(call)) == (0, [])


def test_the_session_lives_on_after_a_cancelled_call(world: World) -> None:
    """S-D15."""
    with a_tool() as tool:
        lifecycle.cancel_call(world.propose(tool).pk, by="test")
        assert world.propose(tool, {"amount": 5}).status == "awaiting_approval"


# -- executing


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        ({"ok": 1}, "succeeded", "OK"),
        (ToolRejected("DECLINED", "no"), "failed", "DECLINED"),
        (InDoubt("reset"), "outcome_unknown", "CONNECTION_LOST"),
        (RuntimeError(), "outcome_unknown", "INTERNAL_ERROR"),
        (NotRun("refused"), "failed", "NOT_RUN"),
    ],
)
def test_what_a_running_tool_then_really_did_is_recorded(world: World, ending: Any, status: str, code: str) -> None:
    """F-44."""
    held = Held(ending)
    script = Script(held)
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            lifecycle.cancel_call(call.pk, by="test")
            assert world.now(call).status == "executing"
            held.let_go()
        world.run()
    assert (world.now(call).status, world.now(call).code, script.applied) == (status, code, 1)


@pytest.mark.parametrize("effect", [Effect.READ, Effect.IDEMPOTENT_WRITE])
def test_a_cancelled_call_has_no_further_attempt(world: World, effect: Effect) -> None:
    """S-G02."""
    held = Held(NotRun("refused"))
    script = Script(held)
    with a_tool(script, effect=effect, backoff=0.001) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            lifecycle.cancel_call(call.pk, by="test")
            held.let_go()
        world.run()
    assert (world.now(call).status, world.now(call).code, script.applied) == ("failed", "CANCELLED", 1)
    assert not world.now(call).message.startswith(DID_NOT_RUN), "an attempt entered the tool"


def test_a_tool_that_looks_sees_that_it_was_cancelled(world: World) -> None:
    held = Held()
    answers: list[bool] = []

    def look(arguments: Any, context: ToolContext) -> str:
        held.wait()
        answers.append(context.cancelled)
        return "stopped half-way"

    with a_tool(look, **SINGLE) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            lifecycle.cancel_call(call.pk, by="test")
            held.let_go()
    assert answers == [True]
    assert world.now(call).status == "succeeded"


def test_between_two_attempts_a_call_is_cancelled_at_once(world: World) -> None:
    script = Script(NotRun("refused"))
    with a_tool(script, **KEYED) as tool:
        call = world.propose(tool)
        world.run()
        assert world.now(call).status == "executing"
        lifecycle.cancel_call(call.pk, by="test")
        ended = world.now(call)
        world.run()
    assert (ended.status, ended.code, script.applied) == ("failed", "CANCELLED", 1)
    assert not ended.message.startswith(DID_NOT_RUN)


def test_a_cancelled_attempt_whose_worker_is_lost_is_settled_by_the_table(world: World) -> None:
    with a_tool(Script(), **SINGLE) as tool:
        call = world.propose(tool)
        world.claim_and_die(call)
        lifecycle.cancel_call(call.pk, by="test")
        lifecycle.lose(world.attempts(call)[0].pk)
    assert (world.now(call).status, world.now(call).code) == ("outcome_unknown", "WORKER_LOST")


def test_a_second_cancel_of_a_running_call_changes_nothing(world: World) -> None:
    held = Held()
    with a_tool(Script(held), **SINGLE) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            first = lifecycle.cancel_call(call.pk, by="test").cancel_asked_at
            assert lifecycle.cancel_call(call.pk, by="test").cancel_asked_at == first
            held.let_go()
    assert world.now(call).status == "succeeded"


@pytest.mark.parametrize("ending", [{"ok": 1}, InDoubt("reset")])
def test_what_has_ended_cannot_be_cancelled_and_says_where_it_is(world: World, ending: Any) -> None:
    """S-G05."""
    with a_tool(Script(ending), **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
        before = world.now(call)
        with pytest.raises(WrongState, match=before.status):
            lifecycle.cancel_call(call.pk, by="test")
    assert (world.now(call).status, world.now(call).moves) == (before.status, before.moves)


# -- a turn


def test_a_cancelled_turn_ends_all_of_its_calls_and_takes_no_more(world: World) -> None:
    """S-G01."""
    held = Held({"ok": 1})
    script = Script(held)
    with a_tool(script, **SINGLE) as running, a_tool() as waiting, a_tool(effect=Effect.READ) as other:
        one, two = world.propose(running), world.propose(waiting)
        elsewhere = world.propose(waiting, {"amount": 2}, turn="turn-2")
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            became = {call.pk: what for call, what in lifecycle.cancel_turn(one.session_id, one.turn_id, by="test")}
            assert became == {one.pk: "cancelling", two.pk: "rejected"}
            assert lifecycle.cancel_turn(one.session_id, one.turn_id, by="test") == [(one, "cancelling")]
            assert world.propose(other).code == "TURN_CLOSED"
            held.let_go()
    assert (world.now(one).status, world.now(two).code) == ("succeeded", "CANCELLED")
    assert world.now(elsewhere).status == "awaiting_approval"
    assert Turn.objects.get(pk=one.turn_id).cancelled_at is not None


# -- a session


def test_a_cancelled_session_says_what_became_of_each_of_its_calls(world: World) -> None:
    held = Held({"ok": 1})
    with (
        a_tool(Script(held), **SINGLE) as running,
        a_tool() as waiting,
        a_tool(Script(NotRun("no")), **KEYED) as retried,
    ):
        again = world.propose(retried)
        world.run()
        one = world.propose(running)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            two = world.propose(waiting)
            became = {call.pk: what for call, what in lifecycle.cancel_session(world.session.pk, by="test")}
            held.let_go()
        world.run()
    assert became == {one.pk: "cancelling", two.pk: "rejected", again.pk: "failed"}
    assert world.now(one).status == "succeeded"
    assert Session.objects.get(pk=world.session.pk).status == "cancelled"


def test_a_cancelled_session_takes_no_calls_and_cannot_be_cancelled_twice(world: World) -> None:
    """S-G05."""
    lifecycle.cancel_session(world.session.pk, by="test")
    with a_tool(effect=Effect.READ) as tool:
        assert world.propose(tool).code == "SESSION_CLOSED"
    with pytest.raises(WrongState, match="cancelled"):
        lifecycle.cancel_session(world.session.pk, by="test")


def test_closing_a_session_stops_new_calls_and_nothing_else(world: World) -> None:
    script = Script()
    with a_tool(script) as tool:
        call = world.propose(tool)
        for _ in range(2):
            assert lifecycle.close_session(world.session.pk, by="test").status == "closed"
        assert world.propose(tool, {"amount": 2}).code == "SESSION_CLOSED"
        world.approve(call)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


def test_a_closed_session_can_still_be_cancelled_while_something_is_unfinished(world: World) -> None:
    with a_tool() as tool:
        call = world.propose(tool)
        lifecycle.close_session(world.session.pk, by="test")
        lifecycle.cancel_session(world.session.pk, by="test")
    assert world.now(call).code == "CANCELLED"


# -- races


@pytest.mark.parametrize("round_", range(4))
def test_cancel_against_approve_one_wins_and_the_journal_says_which(world: World, round_: int) -> None:
    """F-01, F-07."""
    script = Script()
    with a_tool(script) as tool:
        call = world.propose(tool)
        approved, cancelled = together(lambda: world.approve(call), lambda: lifecycle.cancel_call(call.pk, by="test"))
        world.run()
    moves = world.moves(call)
    assert not isinstance(cancelled, Exception)
    if isinstance(approved, desk.Conflict):
        assert approved.code == "CANCELLED"
        assert moves == ["proposed", "awaiting_approval", "rejected"]
    else:
        assert moves == ["proposed", "awaiting_approval", "approved", "rejected"]
    assert (world.now(call).code, script.applied) == ("CANCELLED", 0)


@pytest.mark.parametrize("round_", range(4))
def test_cancel_against_claim_one_wins_and_the_journal_says_which(world: World, round_: int) -> None:
    script = Script()
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        assert world.worker
        _, cancelled = together(world.run, lambda: lifecycle.cancel_call(call.pk, by="test"))
        world.run()
    ended, moves = world.now(call), world.moves(call)
    if script.applied:
        assert (ended.status, moves[-2:]) == ("succeeded", ["executing", "succeeded"])
    else:
        assert (ended.code, moves) == ("CANCELLED", ["proposed", "approved", "rejected"])
    if isinstance(cancelled, WrongState):
        assert ended.status == "succeeded"


@pytest.mark.parametrize("round_", range(4))
def test_cancel_against_record_one_wins_and_the_effect_is_known(world: World, round_: int) -> None:
    held = Held({"ok": 1})
    with a_tool(Script(held), **SINGLE) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            _, cancelled = together(held.let_go, lambda: lifecycle.cancel_call(call.pk, by="test"))
    assert world.now(call).status == "succeeded"
    assert cancelled is None or isinstance(cancelled, (WrongState, type(call)))


def test_a_session_that_is_cancelled_while_its_calls_run_loses_none(world: World) -> None:
    """Locks are taken in one order: neither a deadlock nor a call that is left behind."""
    script = Script()
    with a_tool(script, **SINGLE) as tool:
        calls = [world.propose(tool, {"amount": number}) for number in range(12)]
        assert world.worker
        _, became = together(world.run, lambda: lifecycle.cancel_session(world.session.pk, by="test"))
        world.run()
    assert not isinstance(became, Exception), became
    ended = [world.now(call) for call in calls]
    assert {call.status for call in ended} <= {"succeeded", "rejected"}
    assert script.applied == sum(call.status == "succeeded" for call in ended)
