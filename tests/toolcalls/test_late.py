"""Results that come after their attempt was settled: kept as evidence, and what they settle (behaviour, section 8)."""

from typing import Any
from uuid import UUID

import pytest

from approvals import desk
from tests.worlds import Script, World, a_tool, make_due
from toolcalls import lifecycle
from toolcalls.canonical import digest
from toolcalls.effects import Effect
from toolcalls.models import Call
from toolcalls.outcomes import Crashed, Ending, InDoubt, NothingSent, Refused, Succeeded
from toolcalls.tools import InDoubt as ToolInDoubt
from toolcalls.tools import Tool

KEYED: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 3000.0, "backoff_cap": 3000.0}
SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}
DONE = Succeeded('{"receipt":7}')
REFUSED = Refused("DECLINED", "The bank declined.")


def lost(world: World, tool: Tool) -> tuple[Call, UUID]:
    """Propose a call whose worker is lost while the tool runs. Gives the call, and the worker that may yet be heard of."""
    call = world.propose(tool)
    worker = world.claim_and_die(call)
    lifecycle.lose(world.attempts(call)[-1].pk)
    return world.now(call), worker


def late(call: Call, ending: Ending, *, worker: UUID, attempt: int = 1) -> Call:
    lifecycle.record(call.pk, attempt, ending, worker=worker)
    return Call.objects.get(pk=call.pk)


# -- after the call became unknown


def test_a_late_success_settles_what_nobody_has_settled(world: World) -> None:
    """F-44."""
    with a_tool(**SINGLE) as tool:
        call, worker = lost(world, tool)
        assert (call.status, call.code) == ("outcome_unknown", "WORKER_LOST")
        ended = late(call, DONE, worker=worker)
    assert (ended.status, ended.code, ended.settled_verdict) == ("succeeded", "CONFIRMED_DONE", "took_effect")
    assert (ended.result, ended.result_hash) == (DONE.result, digest(DONE.result))
    attempt = world.attempts(call)[0]
    assert (attempt.state, attempt.late_state, attempt.late_text) == ("in_doubt", "succeeded", DONE.result)
    moved = [line for line in world.journal(call) if line.move][-1]
    assert (moved.actor, moved.source, moved.target) == ("system", "outcome_unknown", "succeeded")
    assert "late result of attempt 1" in (moved.detail or "")


def test_a_late_definite_failure_of_the_only_attempt_settles_it_too(world: World) -> None:
    with a_tool(**SINGLE) as tool:
        call, worker = lost(world, tool)
        ended = late(call, REFUSED, worker=worker)
    assert (ended.status, ended.code, ended.message) == ("failed", "CONFIRMED_NOT_DONE", "The bank declined.")
    assert ended.settled_verdict == "did_not_take_effect"


@pytest.mark.parametrize("ending", [InDoubt("CONNECTION_LOST", "reset"), Crashed(), NothingSent("refused")])
def test_no_other_late_ending_settles_anything(world: World, ending: Ending) -> None:
    with a_tool(**SINGLE) as tool:
        call, worker = lost(world, tool)
        ended = late(call, ending, worker=worker)
    assert (ended.status, ended.settled_verdict) == ("outcome_unknown", "")
    assert world.attempts(call)[0].late_at is not None


def test_a_policy_may_say_that_late_results_settle_nothing(world: World) -> None:
    for ending in (DONE, REFUSED):
        with a_tool(**SINGLE, late_settles=False) as tool:
            call, worker = lost(world, tool)
            ended = late(call, ending, worker=worker)
        assert (ended.status, ended.settled_verdict) == ("outcome_unknown", "")
        assert world.attempts(call)[0].late_state in ("succeeded", "failed"), "it is kept as evidence all the same"


def test_a_late_result_that_comes_twice_is_kept_once(world: World) -> None:
    with a_tool(**SINGLE) as tool:
        call, worker = lost(world, tool)
        first = late(call, DONE, worker=worker)
        lines = len(world.journal(call))
        second = late(call, DONE, worker=worker)
        third = late(call, REFUSED, worker=worker)
    assert (second.status, second.moves, third.status, third.moves) == (first.status, first.moves) * 2
    assert len(world.journal(call)) == lines


@pytest.mark.parametrize("verdict", ["took_effect", "did_not_take_effect"])
@pytest.mark.parametrize("ending", [DONE, REFUSED])
def test_what_a_person_has_settled_stands_and_the_late_result_is_kept_beside_it(
    world: World, verdict: str, ending: Ending
) -> None:
    with a_tool(**SINGLE) as tool:
        call, worker = lost(world, tool)
        desk.settle(call.pk, world.ana, verdict=verdict, evidence="seen", channel="desk")
        before = world.now(call)
        after = late(call, ending, worker=worker)
    assert (after.status, after.code, after.moves) == (before.status, before.code, before.moves)
    assert world.attempts(call)[0].late_at is not None


def test_a_result_that_tells_what_was_recorded_already_is_no_late_one(world: World) -> None:
    with a_tool(Script({"ok": 1}), **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
        before = world.now(call)
        after = late(call, Succeeded('{"ok":1}'), worker=world.worker)
    assert (after.moves, world.attempts(call)[0].late_at) == (before.moves, None)


# -- before the call became unknown


def test_a_late_success_ends_an_executing_call_without_a_live_attempt(world: World) -> None:
    script = Script()
    with a_tool(script, **KEYED) as tool:
        call, worker = lost(world, tool)
        assert (call.status, call.live_attempt) == ("executing", None)
        ended = late(call, DONE, worker=worker)
        world.run()
    assert (ended.status, ended.code, ended.result) == ("succeeded", "OK", DONE.result)
    assert script.applied == 0, "no further attempt"
    assert world.moves(call) == ["proposed", "approved", "executing", "succeeded"]


def test_a_late_success_of_a_read_ends_it_unless_its_result_cannot_be_used(world: World) -> None:
    for ending, status in ((DONE, "succeeded"), (Succeeded("{}", warning="cut"), "executing")):
        with a_tool(effect=Effect.READ, backoff=3000.0, backoff_cap=3000.0) as tool:
            call, worker = lost(world, tool)
            assert late(call, ending, worker=worker).status == status


def test_a_late_success_of_a_write_with_a_warning_keeps_the_warnings_code(world: World) -> None:
    with a_tool(**KEYED) as tool:
        call, worker = lost(world, tool)
        ended = late(call, Succeeded("{}", warning="cut"), worker=worker)
    assert (ended.status, ended.code) == ("succeeded", "OK_WITH_WARNING")


def test_a_late_failure_leaves_an_executing_call_to_its_next_attempt(world: World) -> None:
    script = Script({"ok": 1})
    with a_tool(script, **KEYED) as tool:
        call, worker = lost(world, tool)
        assert late(call, REFUSED, worker=worker).status == "executing"
        make_due(call)
        world.run()
    assert (world.now(call).status, world.now(call).code, script.applied) == ("succeeded", "OK", 1)


@pytest.mark.parametrize("then", [ToolInDoubt("reset"), RuntimeError()])
def test_a_success_that_came_while_the_next_attempt_ran_settles_the_call_once_that_is_in_doubt(
    world: World, then: Exception
) -> None:
    with a_tool(Script(then), **KEYED, max_attempts=2) as tool:
        call, worker = lost(world, tool)
        make_due(call)
        second = world.claim_and_die(call)
        assert late(call, DONE, worker=worker).status == "executing", "the second attempt is live"
        ended = late(call, InDoubt("CONNECTION_LOST", "reset"), worker=second, attempt=2)
    assert (ended.status, ended.code, ended.result) == ("succeeded", "CONFIRMED_DONE", DONE.result)
    assert world.moves(call)[-2:] == ["outcome_unknown", "succeeded"]


def test_a_success_that_came_while_the_next_attempt_ran_needs_no_third(world: World) -> None:
    with a_tool(**KEYED, max_attempts=3) as tool:
        call, worker = lost(world, tool)
        make_due(call)
        second = world.claim_and_die(call)
        late(call, DONE, worker=worker)
        ended = late(call, NothingSent("refused"), worker=second, attempt=2)
    assert (ended.status, ended.result, ended.due_at) == ("succeeded", DONE.result, None)


def test_a_late_failure_of_the_first_of_two_attempts_settles_nothing(world: World) -> None:
    with a_tool(**KEYED, max_attempts=2) as tool:
        call, worker = lost(world, tool)
        make_due(call)
        second = world.claim_and_die(call)
        late(call, REFUSED, worker=worker)
        ended = late(call, InDoubt("CONNECTION_LOST", "reset"), worker=second, attempt=2)
    assert (ended.status, ended.code) == ("outcome_unknown", "CONNECTION_LOST")


# -- a run again that nobody has claimed


@pytest.mark.parametrize(("ending", "status"), [(DONE, "succeeded"), (REFUSED, "failed")])
def test_a_run_again_that_nobody_claimed_is_taken_back_and_settled(world: World, ending: Ending, status: str) -> None:
    script = Script()
    with a_tool(script, **SINGLE) as tool:
        call, worker = lost(world, tool)
        desk.run_again(call.pk, world.ana, evidence="again", channel="desk")
        ended = late(call, ending, worker=worker)
        world.run()
    assert (ended.status, ended.due_at, ended.alarm_at) == (status, None, None)
    assert world.moves(call)[-4:] == ["outcome_unknown", "approved", "outcome_unknown", status]
    assert (script.applied, world.now(call).status) == (0, status)


def test_a_run_again_that_is_running_is_not_taken_back(world: World) -> None:
    with a_tool(**SINGLE) as tool:
        call, worker = lost(world, tool)
        desk.run_again(call.pk, world.ana, evidence="again", channel="desk")
        second = world.claim_and_die(call)
        assert late(call, DONE, worker=worker).status == "executing"
        ended = late(call, REFUSED, worker=second, attempt=2)
    assert (ended.status, ended.result) == ("succeeded", DONE.result), "the first took effect, and that is known"


def test_with_late_results_switched_off_a_run_again_goes_on(world: World) -> None:
    script = Script({"ok": 1})
    with a_tool(script, **SINGLE, late_settles=False) as tool:
        call, worker = lost(world, tool)
        desk.run_again(call.pk, world.ana, evidence="again", channel="desk")
        assert late(call, DONE, worker=worker).status == "approved"
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


def test_a_late_success_of_a_failed_read_changes_nothing(world: World) -> None:
    with a_tool(effect=Effect.READ, max_attempts=1) as tool:
        call, worker = lost(world, tool)
        assert call.status == "failed"
        ended = late(call, DONE, worker=worker)
    assert (ended.status, ended.result, ended.moves) == ("failed", None, call.moves)
    assert world.attempts(call)[0].late_state == "succeeded"
