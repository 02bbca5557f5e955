"""What the executor does when the database, the clock or its own process fail it at the worst moment."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, OperationalError, connection

from tests import worlds
from tests.worlds import Held, Script, Thing, World, a_tool, beside, make_due
from toolcalls import lifecycle, notices
from toolcalls.codes import DID_NOT_RUN
from toolcalls.effects import Effect
from toolcalls.executor import Runner
from toolcalls.models import Call, Session, Worker
from toolcalls.sweeps import sweep
from toolcalls.tools import Tool, ToolContext, ToolRejected

KEYED: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 0.001, "backoff_cap": 0.001}
SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}
BOTH = pytest.mark.parametrize("policy", [KEYED, SINGLE], ids=["keyed", "single"])


def failing(function: Callable[..., Any], *, times: int, after: bool = False) -> Callable[..., Any]:
    """Wrap a verb so that its first answers are lost: before it did anything, or after its commit."""
    left = itertools_count(times)

    def wrapper(*args: Any, **named: Any) -> Any:
        fails = next(left, None) is not None
        if fails and not after:
            raise OperationalError("the server closed the connection unexpectedly")
        answer = function(*args, **named)
        if fails:
            raise OperationalError("the server closed the connection unexpectedly")
        return answer

    return wrapper


def itertools_count(times: int) -> Iterator[int]:
    yield from range(times)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    pause = threading.Event()
    for _ in range(int(worlds.WITHIN * 100)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


@contextmanager
def checked(script: Script, check: Callable[[], None] = lambda: None, **policy: Any) -> Iterator[Tool]:
    with a_tool(script, **policy) as tool:

        @tool.check
        def of_the_author(arguments: Thing, context: ToolContext) -> None:
            if context.attempt:  # admission asks before there is one
                check()

        yield tool


# -- recording


@BOTH
def test_a_session_that_is_killed_during_the_effect_costs_no_second_effect(
    world: World, database_url: str, policy: dict[str, Any]
) -> None:
    """F-46, and the database's own end of the connection."""

    def lose_the_connection(arguments: Thing, context: ToolContext) -> dict[str, int]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (mine,) = cursor.fetchone()
        with psycopg.connect(database_url) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [mine])
        return {"receipt": 7}

    script = Script(lose_the_connection)
    with a_tool(script, **policy) as tool:
        call = world.propose(tool)
        world.run()
    ended = world.now(call)
    assert (ended.status, ended.code, ended.result, script.applied) == ("succeeded", "OK", '{"receipt":7}', 1)
    assert world.states(call) == ["succeeded"]


@BOTH
@pytest.mark.parametrize("after", [False, True], ids=["before its commit", "after its commit"])
def test_recording_is_tried_until_it_is_made_and_the_tool_is_not_entered_again(
    world: World, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], after: bool
) -> None:
    """F-46."""
    script = Script({"receipt": 7})
    monkeypatch.setattr(lifecycle, "record", failing(lifecycle.record, times=3, after=after))
    with a_tool(script, **policy) as tool:
        call = world.propose(tool)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)
    attempt = world.attempts(call)[0]
    assert (attempt.state, attempt.late_at) == ("succeeded", None), "a record that finds itself made is done"
    assert world.moves(call) == ["proposed", "approved", "executing", "succeeded"]


def test_a_spend_is_counted_once_although_its_record_was_answered_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dear(arguments: Thing, context: ToolContext) -> None:
        context.spend(5)

    monkeypatch.setattr(lifecycle, "record", failing(lifecycle.record, times=2, after=True))
    with a_tool(dear, **SINGLE) as tool:
        world.propose(tool)
        world.run()
    assert Session.objects.get(pk=world.session.pk).spend_used == 5


@BOTH
def test_a_refusal_whose_record_was_lost_is_recorded_once(
    world: World, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    script = Script(ToolRejected("DECLINED", "no"))
    monkeypatch.setattr(lifecycle, "record", failing(lifecycle.record, times=1, after=True))
    with a_tool(script, **policy) as tool:
        call = world.run_to_the_end(world.propose(tool))
    assert (call.status, call.code, script.applied, call.moves) == ("failed", "DECLINED", 1, 3)


def test_a_notice_that_cannot_be_sent_changes_no_outcome(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-46, F-54."""

    def refuse(*_: Any) -> None:
        raise OSError("nobody listens")

    script = Script()
    monkeypatch.setattr(notices, "publish", refuse)
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
    assert (world.now(call).status, script.applied, world.moves(call)[-1]) == ("succeeded", 1, "succeeded")


# -- a journal that cannot be written


@contextmanager
def no_line_may_say(target: str) -> Iterator[None]:
    """Make PostgreSQL refuse every journal line of a move to a state."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"""CREATE OR REPLACE FUNCTION refuse_the_line() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'the journal is full'; END $$;
                CREATE TRIGGER refuse_the_line BEFORE INSERT ON toolcalls_journalline FOR EACH ROW
                WHEN (NEW.target = '{target}') EXECUTE FUNCTION refuse_the_line()"""
        )
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER refuse_the_line ON toolcalls_journalline; DROP FUNCTION refuse_the_line()")


def test_a_journal_that_cannot_be_written_before_the_effect_blocks_it(world: World) -> None:
    """F-54."""
    script = Script()
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        with no_line_may_say("executing"):
            for _ in range(6):  # more often than there are slots: none may be lost
                with pytest.raises(DatabaseError):
                    world.run()
            assert (world.now(call).status, world.now(call).claims, script.applied) == ("approved", 0, 0)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


def test_a_journal_that_cannot_be_written_after_the_effect_never_changes_its_outcome(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """F-54, F-46."""
    script = Script({"receipt": 7})

    def failures() -> int:
        return sum("recording failed" in line.message for line in caplog.records)

    with a_tool(script, **SINGLE) as tool, caplog.at_level(logging.WARNING):
        call = world.propose(tool)
        with no_line_may_say("succeeded"), world.running():
            until(lambda: failures() >= 2)
            assert world.now(call).status == "executing"
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE toolcalls_journalline DISABLE TRIGGER refuse_the_line")
    assert (world.now(call).status, world.now(call).result, script.applied) == ("succeeded", '{"receipt":7}', 1)


# -- claiming


def lose_the_claims_answer(world: World, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the world's runner claim a call and never learn of it."""
    assert world.worker
    assert world._runner is not None
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "claim", failing(lifecycle.claim, times=1, after=True))
        with pytest.raises(OperationalError):
            world._runner.drain(retryable=call.retryable)
    assert world.now(call).live_attempt == 1


@pytest.mark.parametrize(
    ("policy", "states", "status", "applied"),
    [(KEYED, ["nothing_sent", "succeeded"], "succeeded", 1), (SINGLE, ["nothing_sent"], "failed", 0)],
    ids=["keyed", "single"],
)
def test_a_claim_whose_answer_was_lost_is_looked_up_and_nothing_is_unknown(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    policy: dict[str, Any],
    states: list[str],
    status: str,
    applied: int,
) -> None:
    """F-96: this process knows that it never started it."""
    script = Script()
    with a_tool(script, **policy) as tool:
        call = world.propose(tool)
        lose_the_claims_answer(world, call, monkeypatch)
        ended = world.run_to_the_end(call)
    assert (ended.status, world.states(call), script.applied) == (status, states, applied)
    if status == "failed":
        assert ended.code == "NOT_RUN"
        assert ended.message.startswith(DID_NOT_RUN)


def test_a_claim_before_the_mark_whose_answer_was_lost_uses_no_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-96: without the mark nothing is unknown."""
    script = Script()
    with checked(script, **SINGLE) as tool:
        call = world.propose(tool)
        lose_the_claims_answer(world, call, monkeypatch)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)
    assert (world.states(call), script.entries[0].attempt) == (["not_entered", "succeeded"], 1)


def test_a_database_that_cannot_be_asked_executes_nothing_and_costs_no_slot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-19."""
    script = Script()
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "claim", failing(lifecycle.claim, times=20))
            for _ in range(6):
                with pytest.raises(OperationalError):
                    world.run()
        assert (world.now(call).status, script.applied) == ("approved", 0)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


def test_while_one_thread_looks_for_lost_claims_what_another_has_just_claimed_is_not_taken_from_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, script, real = Held(), Script({"ok": 1}), lifecycle.claim

    def slow(*args: Any, **named: Any) -> Any:
        claimed = real(*args, **named)
        if claimed and not committed.entered.is_set():
            committed.wait()
        return claimed

    runner = Runner(slots=2)
    runner.start()
    monkeypatch.setattr(lifecycle, "claim", slow)
    with a_tool(Script(), effect=Effect.READ) as other, a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        with beside(lambda: runner.drain(retryable=False)):
            assert committed.entered.wait(worlds.WITHIN)
            runner._unsure = True
            runner._give_back_slots(1)  # one that a finished call gave back
            world.propose(other)
            with beside(lambda: runner.drain(retryable=True)):
                threading.Event().wait(0.2)  # time to do the wrong thing
                assert world.states(call) == ["entered"], "another thread has claimed it and is about to start it"
                committed.let_go()
    runner.close()
    assert (world.now(call).status, world.states(call), script.applied) == ("succeeded", ["succeeded"], 1)


# -- the mark


@pytest.mark.parametrize("after", [False, True], ids=["before its commit", "after its commit"])
def test_a_mark_whose_answer_was_lost_is_looked_up(world: World, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    script = Script()
    monkeypatch.setattr(lifecycle, "enter", failing(lifecycle.enter, times=1, after=after))
    with checked(script, **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
    assert (world.now(call).status, world.now(call).entered, script.applied) == ("succeeded", 1, 1)


def test_a_mark_that_cannot_be_made_is_handed_back_and_made_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script()
    with checked(script, **SINGLE) as tool:
        call = world.propose(tool)
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "enter", failing(lifecycle.enter, times=2))
            world.run()
        assert (world.now(call).status, world.states(call), script.applied) == ("executing", ["not_entered"], 0)
        make_due(call)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


@pytest.mark.parametrize("verb", ["hand_back", "refuse"])
def test_what_the_check_said_is_recorded_again_and_again_too(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    script = Script()
    said: list[Exception] = [RuntimeError("away")] if verb == "hand_back" else [ToolRejected("GONE", "It is gone.")]

    def check() -> None:
        if said:
            raise said.pop()

    monkeypatch.setattr(lifecycle, verb, failing(getattr(lifecycle, verb), times=2))
    with checked(script, check, **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
        assert (world.states(call), script.applied) == (["not_entered"], 0)
        if verb == "hand_back":
            make_due(call)
            world.run()
    ended = world.now(call)
    assert (ended.status, ended.code) == (("succeeded", "OK") if verb == "hand_back" else ("failed", "GONE"))


# -- leases and identities


def test_a_process_whose_lease_is_over_enters_nothing(world: World) -> None:
    script = Script()
    runner = Runner(slots=1)
    runner.start()

    def sleep_through_the_lease() -> None:
        assert runner.lease is not None
        runner.lease._until = 0.0

    with checked(script, sleep_through_the_lease, **SINGLE) as tool:
        call, other = world.propose(tool), world.propose(tool, {"amount": 2})
        runner.drain(retryable=False)
    assert (world.now(call).status, world.now(call).code, script.applied) == ("failed", "NOT_RUN", 0)
    assert world.now(other).status == "approved", "it claims nothing either"
    runner.close()


@BOTH
def test_what_was_claimed_under_an_identity_that_is_gone_is_not_entered_under_the_next(
    world: World, policy: dict[str, Any], settings: Any
) -> None:
    """A paused process wakes up: its heartbeat thread registers anew before the claimed call's thread goes on."""
    settings.SWEEP_EVERY, settings.WORKER_SILENT_AFTER = 100, 1000
    script = Script()
    runner = Runner(slots=1)
    before = runner.start()
    with a_tool(script, **policy, timeout=5000) as tool:
        call = world.propose(tool)
        ((claimed, lease),) = runner._claim(retryable=policy is KEYED, limit=1)
        for _ in range(3):
            sweep()
            worlds.let_workers_pass(1001, before)
        assert not lifecycle.beat(before)
        lease._until = 0.0
        runner.lease = runner._register()
        runner._run(claimed, lease)
        assert script.applied == 0
        assert world.attempts(call)[0].late_state == "nothing_sent"
    connection.close()
    runner.close()


def test_a_process_that_was_declared_gone_goes_on_under_a_new_identity(world: World, settings: Any) -> None:
    settings.HEARTBEAT_EVERY = 0.01
    script = Script()
    before = world.worker
    Worker.objects.filter(pk=before).update(gone_at=lifecycle.clock())
    until(lambda: world.worker != before)
    with a_tool(script, **SINGLE) as tool:
        call = world.propose(tool)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)
    assert world.attempts(call)[0].worker_id == world.worker


def test_a_heartbeat_that_fails_is_tried_again(world: World, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.HEARTBEAT_EVERY = 0.01
    monkeypatch.setattr(lifecycle, "beat", failing(lifecycle.beat, times=3))
    first = Worker.objects.get(pk=world.worker).beat_at
    until(lambda: Worker.objects.get(pk=world.worker).beat_at > first)


def test_a_worker_that_closes_records_what_runs_and_claims_nothing_more(world: World) -> None:
    """S-G08."""
    helds = [Held({"ok": 1}), Held({"ok": 2})]
    script = Script(*helds)
    runner = Runner(slots=1)
    with a_tool(script, **SINGLE) as tool:
        calls = [world.propose(tool, {"amount": number}) for number in range(2)]
        with beside(lambda: runner.drain(retryable=False)):
            assert helds[0].entered.wait(worlds.WITHIN)
            runner.stopping.set()
            helds[0].let_go()
        runner.close()
        assert [world.now(call).status for call in calls] == ["succeeded", "approved"]
        helds[1].let_go()
        world.run()
    assert [world.now(call).status for call in calls] == ["succeeded", "succeeded"]
    assert script.applied == 2


def test_two_workers_that_come_and_go_lose_no_call_and_enter_each_once(world: World) -> None:
    """S-G08: fifty calls in flight while one worker drains and the next starts."""
    script = Script()
    with a_tool(script, **SINGLE) as tool:
        calls = [world.propose(tool, {"amount": number}) for number in range(50)]
        old, new = Runner(slots=3), Runner(slots=3)
        old.start()
        new.start()

        def leave_half_way() -> None:
            until(lambda: script.applied >= 10)
            old.close()

        worlds.together(
            lambda: old.drain(retryable=False),
            leave_half_way,
            lambda: new.drain(retryable=False, seconds=worlds.WITHIN),
        )
        new.close()
    assert {Call.objects.get(pk=call.pk).status for call in calls} == {"succeeded"}
    assert sorted(entry.arguments.amount for entry in script.entries) == list(range(50))
