"""The guard that ends double effects (behaviour, section 5), through the real verbs: effects are counted."""

from collections.abc import Callable

import pytest

from approvals import desk
from tests.worlds import Script, World, a_tool, a_world, let_pass
from toolcalls import intake, lifecycle, masking
from toolcalls.intake import Answered, Mismatch, Opening
from toolcalls.models import Call
from toolcalls.pipeline import Proposal
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt, NotRun, Tool, ToolRejected

CUT_OFF = InDoubt("cut off")


def unknown(world: World, tool: Tool, **how: object) -> Call:
    call = world.propose(tool, **how)  # type: ignore[arg-type]
    world.run()
    assert world.now(call).status == "outcome_unknown"
    return call


def test_a_repeat_of_what_succeeded_is_answered_with_its_result_and_does_not_run(world: World) -> None:
    tried = Script({"n": 1}, {"n": 2})
    with a_tool(tried, effect="idempotent_write") as tool:
        first = world.propose(tool, {"amount": 5})
        world.run()
        answer = world.answer(tool, '{"name": "x", "amount": 5.0}', turn="later")
        assert isinstance(answer, Answered)
        assert answer.replayed
        replay = world.stored(answer)
        assert (replay.status, replay.code, replay.replay_of_id) == ("succeeded", "OK", first.pk)
        assert (replay.claims, replay.result) == (0, None), "linked, not copied"
        for _ in range(10):
            assert world.propose(tool, {"amount": 5}).replay_of_id == first.pk, "F-91: a replay counts for no loop"
        world.run()
    assert tried.applied == 1
    assert world.moves(replay) == ["proposed", "succeeded"]


def test_in_another_session_it_is_another_operation(world: World) -> None:
    tried = Script()
    with a_tool(tried, effect="idempotent_write") as tool:
        world.propose(tool)
        world.run()
        world.propose(tool, session=world.open())
        world.run()
    assert tried.applied == 2


@pytest.mark.parametrize("status", ["awaiting_approval", "approved", "executing"])
def test_a_repeat_of_what_is_under_way_waits_for_that_one(world: World, status: str) -> None:
    with a_tool(requires_approval=status == "awaiting_approval") as tool:
        first = world.propose(tool)
        if status == "executing":
            world.claim_and_die(first)
        assert world.now(first).status == status
        again = world.propose(tool)
        assert (again.status, again.code, again.refers_to_id) == ("failed", "DUPLICATE_IN_PROGRESS", first.pk)
        assert world.propose(tool, session=world.open()).code == ""


def test_an_unknown_outcome_that_is_ordered_to_run_again_is_not_repeated_meanwhile(world: World) -> None:
    tried = Script(CUT_OFF, {"done": 2})
    with a_tool(tried, requires_approval=False) as tool:
        first = unknown(world, tool)
        admitted = world.propose(tool, {"amount": 7}, session=world.open(), operation_id="other")
        desk.run_again(first.pk, world.ana, evidence="it is safe", channel="desk")
        again = world.propose(tool, session=world.open())
        assert (again.status, again.code, again.refers_to_id) == ("failed", "OUTCOME_UNRESOLVED", first.pk)
        assert admitted.status == "approved", "another operation is nobody's repeat"
        world.run()
        assert world.now(first).status == "succeeded"
        assert world.propose(tool, session=world.open()).code == "", "now it is known"


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("operation_id", ["", "confirmed-by-the-user"])
def test_an_unknown_outcome_is_not_run_again_by_asking_again(world: World, elsewhere: bool, operation_id: str) -> None:
    """F-97, S-D14: from any session of the agent, and whatever the operation ID where tool and arguments are equal."""
    tried = Script(CUT_OFF, {"done": 2})
    with a_tool(tried, requires_approval=False) as tool:
        first = unknown(world, tool)
        session = world.open() if elsewhere else world.session
        again = world.propose(tool, session=session, operation_id=operation_id)
        assert (again.status, again.code, again.refers_to_id) == ("failed", "OUTCOME_UNRESOLVED", first.pk)
        world.run()
        assert tried.applied == 1
        desk.settle(first.pk, world.ana, verdict="did_not_take_effect", evidence="looked", channel="desk")
        world.propose(tool, session=session, operation_id=operation_id)
        world.run()
    assert tried.applied == 2, "S-E04: once it is settled a new call is allowed"


def test_an_unknown_outcome_of_another_agent_or_of_other_arguments_is_no_matter(world: World) -> None:
    other = a_world()
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        unknown(world, tool, arguments={"amount": 1})
        assert other.propose(tool, {"amount": 1}).status == "approved"
        assert world.propose(tool, {"amount": 2}).status == "approved"


def test_an_unknown_outcome_that_was_settled_as_done_is_replayed(world: World) -> None:
    tried = Script(CUT_OFF)
    with a_tool(tried, requires_approval=False) as tool:
        first = unknown(world, tool)
        desk.settle(first.pk, world.ana, verdict="took_effect", evidence="seen", result={"id": 7}, channel="desk")
        assert world.propose(tool).replay_of_id == first.pk
        world.run()
    assert tried.applied == 1


def test_people_are_not_asked_twice_about_one_operation(world: World) -> None:
    tried = Script()
    with a_tool(tried) as tool:
        first = world.propose(tool)
        world.reject(first)
        again = world.propose(tool)
        assert (again.code, again.refers_to_id) == ("ALREADY_REJECTED", first.pk)
        assert world.propose(tool, operation_id="another-wish").status == "awaiting_approval"
        assert world.propose(tool, session=world.open()).status == "awaiting_approval"
        world.run()
    assert tried.applied == 0


def test_what_was_amended_is_not_asked_again_and_the_amendment_is_under_way(world: World) -> None:
    with a_tool(amend=True) as tool:
        first = world.propose(tool, {"amount": 100})
        new = desk.amend(
            first.pk,
            world.ana,
            arguments_hash=masking.hash_of(world.now(first)),
            arguments={"amount": 50},
            reason="",
            channel="desk",
        )
        assert world.propose(tool, {"amount": 100}).code == "ALREADY_REJECTED"
        again = world.propose(tool, {"amount": 50})
        assert (again.code, again.refers_to_id) == ("DUPLICATE_IN_PROGRESS", new.pk)
        world.run()
        assert world.propose(tool, {"amount": 50}).replay_of_id == new.pk


@pytest.mark.parametrize("changed", ["arguments", "tool"])
@pytest.mark.parametrize("end", ["under way", "done", "failed", "rejected"])
def test_an_operation_id_stands_for_one_tool_and_one_set_of_arguments(world: World, changed: str, end: str) -> None:
    tried = Script(ToolRejected("NO", "no") if end == "failed" else {"done": 1})
    with a_tool(tried) as tool, a_tool() as other:
        first = world.propose(tool, {"amount": 1}, operation_id="op")
        if end == "rejected":
            world.reject(first)
        elif end != "under way":
            world.approve(first)
            world.run()
        wants = (tool, {"amount": 2}) if changed == "arguments" else (other, {"amount": 1})
        again = world.propose(*wants, operation_id="op")
        assert (again.status, again.code, again.refers_to_id) == ("failed", "OPERATION_MISMATCH", first.pk)
        third = world.propose(*wants, operation_id="op")
        assert third.refers_to_id == first.pk, "a refusal of the guard stands for nothing itself"
        assert world.propose(*wants, operation_id="op", session=world.open()).code == ""


def test_the_same_operation_id_and_arguments_are_the_same_operation(world: World) -> None:
    with a_tool(effect="idempotent_write") as tool:
        first = world.propose(tool, {"amount": 1}, operation_id="op")
        world.run()
        assert world.propose(tool, {"amount": 1}, operation_id="op").replay_of_id == first.pk
        wanted = world.propose(tool, {"amount": 1}, operation_id="op-2")
        assert (wanted.status, wanted.replay_of_id) == ("approved", None), "a wanted second effect"
        assert world.propose(tool, {"amount": 1}).replay_of_id is None


def _expire(world: World, call: Call) -> None:
    let_pass(90_000, call)
    sweep()


def _cancel(world: World, call: Call) -> None:
    lifecycle.cancel_call(call.pk, by="test")


def _fail(world: World, call: Call) -> None:
    world.approve(call)
    world.run()


@pytest.mark.parametrize(("end", "code"), [(_expire, "APPROVAL_EXPIRED"), (_cancel, "CANCELLED"), (_fail, "NO")])
def test_what_ended_without_effect_runs_as_a_new_call_until_it_is_a_loop(
    world: World, end: Callable[[World, Call], None], code: str
) -> None:
    """F-91: writes count by ended operation; with max_repeats 2 the third is one too many."""
    tried = Script(ToolRejected("NO", "no"))
    with a_tool(tried, max_repeats=2) as tool:
        for _ in range(2):
            call = world.propose(tool)
            assert call.status == "awaiting_approval"
            end(world, call)
            assert world.now(call).code == code
        third = world.propose(tool)
        assert (third.status, third.code) == ("failed", "LOOP_DETECTED")
        assert world.propose(tool).code == "LOOP_DETECTED"
        assert world.propose(tool, {"amount": 1}).status == "awaiting_approval", "another operation"
        assert world.propose(tool, session=world.open()).status == "awaiting_approval"


def test_what_was_refused_before_the_guard_counts_for_no_loop(world: World) -> None:
    with a_tool(effect="idempotent_write", max_repeats=1) as tool:
        for _ in range(3):
            world.propose(tool, {"amount": "1"})
        lifecycle.pull_brake(team=world.team, by="test")
        for _ in range(3):
            assert world.propose(tool).code == "PAUSED"
        lifecycle.release_brake(team=world.team, by="test")
        assert world.propose(tool).status == "approved"


def test_an_approval_counts_for_no_loop(world: World) -> None:
    """F-91: approve, then execute, with max_repeats 1."""
    tried = Script()
    with a_tool(tried, max_repeats=1) as tool:
        call = world.propose(tool)
        world.approve(call)
        world.run()
        assert world.now(call).status == "succeeded"
        assert world.propose(tool).replay_of_id == call.pk
    assert tried.applied == 1


def test_a_read_runs_every_time_while_its_result_changes(world: World) -> None:
    """F-91: six times, same arguments."""
    tried = Script(*({"n": n} for n in range(6)))
    with a_tool(tried, effect="read", max_repeats=2) as tool:
        for _ in range(6):
            call = world.propose(tool)
            assert (call.status, call.replay_of_id) == ("approved", None)
            world.run()
    assert tried.applied == 6


def test_a_read_that_gives_the_same_result_again_and_again_is_a_loop(world: World) -> None:
    """S-F10."""
    tried = Script({"n": 1})
    with a_tool(tried, effect="read", max_repeats=2) as tool:
        for _ in range(2):
            world.propose(tool)
            world.run()
        last = world.propose(tool)
        assert (last.status, last.code) == ("failed", "LOOP_DETECTED")
        assert world.propose(tool, {"amount": 1}).status == "approved"
        assert world.propose(tool, session=world.open()).status == "approved"
    assert tried.applied == 2


def test_reads_under_way_are_no_duplicates(world: World) -> None:
    with a_tool(effect="read", max_repeats=1) as tool:
        assert [world.propose(tool).status for _ in range(3)] == ["approved"] * 3


def test_a_read_before_a_write_with_its_operation_id_is_a_mismatch(world: World) -> None:
    with a_tool(effect="read") as read, a_tool(effect="idempotent_write") as write:
        first = world.propose(read, operation_id="op")
        assert world.propose(write, operation_id="op").refers_to_id == first.pk


def test_calls_of_one_request_are_guarded_as_if_they_came_one_by_one(world: World) -> None:
    tried = Script()
    with a_tool(tried, effect="idempotent_write") as tool:
        asked = [
            Proposal("a", tool.name, {"amount": 1}, "op"),
            Proposal("b", tool.name, {"amount": 2}, "op"),
            Proposal("c", tool.name, {"amount": 1}, "op"),
            Proposal("d", tool.name, {"amount": 3}),
            Proposal("e", tool.name, {"amount": 3}),
        ]
        answers = intake.submit(world.agent, world.session.session_id, "t", asked)
        calls = {call.tool_call_id: call for call in map(world.stored, answers)}
        world.run()
    told = {name: (call.code, call.refers_to_id) for name, call in calls.items()}
    assert told == {
        "a": ("", None),
        "b": ("OPERATION_MISMATCH", calls["a"].pk),
        "c": ("DUPLICATE_IN_PROGRESS", calls["a"].pk),
        "d": ("", None),
        "e": ("DUPLICATE_IN_PROGRESS", calls["d"].pk),
    }
    assert tried.applied == 2


def test_an_unresolved_twin_stops_a_call_that_was_admitted_before_it_became_unknown(world: World) -> None:
    """The third row of the table is tested again at the claim; the call had waited in another session meanwhile."""
    tried = Script(CUT_OFF, {"done": 2})
    with a_tool(tried) as tool:
        first, second = world.propose(tool), world.propose(tool, session=world.open())
        world.approve(first)
        world.run()
        world.approve(second)
        world.run()
        stopped = world.now(second)
        assert (stopped.status, stopped.code, stopped.refers_to_id) == ("failed", "OUTCOME_UNRESOLVED", first.pk)
    assert tried.applied == 1


def test_a_second_run_that_a_person_ordered_is_stopped_by_no_twin(world: World) -> None:
    tried = Script(CUT_OFF, {"done": 2})
    with a_tool(tried, requires_approval=False) as tool:
        call = unknown(world, tool)
        desk.run_again(call.pk, world.ana, evidence="the service was restored from a backup", channel="desk")
        world.run()
        assert world.now(call).status == "succeeded"
    assert tried.applied == 2
    assert len({entry.key for entry in tried.entries}) == 1


def test_keys_whose_payload_retention_emptied_still_answer_and_never_run_again(world: World) -> None:
    """F-99: payloads go; key, hash and state stay."""
    tried = Script()
    with a_tool(tried, effect="idempotent_write") as tool:
        call = world.propose(tool, {"amount": 1}, call_id="c")
        world.run()
        Call.objects.filter(pk=call.pk).update(arguments=None, received=None, result=None, raw_result=None)
        same = world.answer(tool, {"amount": 1}, call_id="c")
        assert isinstance(same, Answered)
        assert (same.id, same.status) == (call.pk, "succeeded")
        assert isinstance(world.answer(tool, {"amount": 2}, call_id="c"), Mismatch)
        assert world.propose(tool, {"amount": 1}).replay_of_id == call.pk
        world.run()
    assert tried.applied == 1


def test_a_nothing_sent_failure_may_be_called_again_under_a_new_id(world: World) -> None:
    """S-D13."""
    tried = Script(NotRun("refused"), {"done": 1})
    with a_tool(tried, requires_approval=False) as tool:
        first = world.propose(tool)
        world.run()
        assert world.now(first).code == "NOT_RUN"
        second = world.propose(tool)
        world.run()
    assert world.now(second).status == "succeeded"
    assert [entry.key for entry in tried.entries] == [world.now(each).idempotency_key for each in (first, second)]
    assert len({entry.key for entry in tried.entries}) == 2


def test_another_agent_of_the_team_replays_nothing(world: World) -> None:
    """F-101: the other caller gets its own call."""
    other = a_world()
    session, _ = intake.open_session(other.agent, Opening(session_id=world.session.session_id, body_digest=""))
    tried = Script()
    with a_tool(tried, effect="idempotent_write") as tool:
        world.propose(tool, call_id="c")
        world.run()
        theirs = other.propose(tool, call_id="c", session=session)
        world.run()
        assert (other.now(theirs).status, theirs.replay_of_id) == ("succeeded", None)
    assert tried.applied == 2
