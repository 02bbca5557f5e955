"""From approved to recorded, through a real runner: how each ending, each refusal and each delay is recorded."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from tests import worlds
from tests.worlds import (
    Held,
    Script,
    Thing,
    World,
    a_tool,
    a_world,
    beside,
    let_pass,
    let_session_pass,
    make_due,
    together,
)
from toolcalls import lifecycle, policy, tools
from toolcalls.canonical import digest
from toolcalls.codes import DID_NOT_RUN, advice
from toolcalls.effects import Effect
from toolcalls.executor import Runner
from toolcalls.models import Agent, Attempt, Call, Session, Worker
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt, NotRun, Result, ToolContext, ToolRejected

READ, KEYED, SINGLE, UNKNOWN = Effect.READ, Effect.IDEMPOTENT_WRITE, Effect.NON_IDEMPOTENT_WRITE, Effect.UNCLASSIFIED
SINGLES = pytest.mark.parametrize("effect", [SINGLE, UNKNOWN])
RETRYABLE = pytest.mark.parametrize("effect", [READ, KEYED])
EVERY = pytest.mark.parametrize("effect", list(Effect))


def unasked(effect: Effect, **others: Any) -> dict[str, Any]:
    """Give a policy under which nobody is asked, and delays are as short as they can be."""
    return {"effect": effect, "requires_approval": False, "backoff": 0.001, "backoff_cap": 0.001, **others}


def retry(call: Call) -> str:
    return advice(call.status, call.code, tool_says=call.retry)


def ran(world: World, script: Script, effect: Effect, **others: Any) -> Call:
    """Propose a call of a tool that plays the script, and run it to its end."""
    with a_tool(script, **unasked(effect, **others)) as tool:
        return world.run_to_the_end(world.propose(tool, {"amount": 3}))


# -- endings


@EVERY
def test_what_returned_is_recorded_with_its_result(world: World, effect: Effect) -> None:
    """S-A01, S-A02, S-A07, S-A08."""
    script = Script({"receipt": "R-1"})
    call = ran(world, script, effect)
    assert (call.status, call.code, call.result) == ("succeeded", "OK", '{"receipt":"R-1"}')
    assert call.result_hash == digest(call.result)
    assert (script.applied, world.states(call)) == (1, ["succeeded"])
    assert world.moves(call) == ["proposed", "approved", "executing", "succeeded"]
    assert call.started_at
    assert call.finished_at
    assert call.started_at <= call.finished_at


def test_the_raw_answer_is_kept_apart_from_what_the_model_sees(world: World) -> None:
    call = ran(world, Script(Result({"ok": True}, raw={"internal": 7})), READ)
    assert (call.result, call.raw_result) == ('{"ok":true}', '{"internal":7}')


def test_the_tool_is_given_the_frozen_arguments_the_key_and_a_deadline(world: World) -> None:
    """S-C03, S-E02."""
    seen: list[Any] = []

    def look(arguments: Thing, context: ToolContext) -> str:
        seen.append((arguments, context.idempotency_key, context.key_digest, context.attempt, context.agent))
        left = (context.deadline - datetime.now(UTC)).total_seconds()
        return "in time" if 0 < left <= 20 else f"{left} seconds left"

    with a_tool(look, **unasked(KEYED, timeout=20)) as tool:
        call = world.propose(tool, {"amount": 3}, call_id="call_x|fc_y", turn="t:0")
        world.run()
    key = f"{world.session.pk}/t:0/call_x|fc_y"
    assert seen == [(Thing(name="x", amount=3), key, digest(key)[:32], 1, world.agent.name)]
    assert (world.now(call).result, world.now(call).idempotency_key) == ('"in time"', key)


@EVERY
def test_a_definite_failure_is_not_tried_again(world: World, effect: Effect) -> None:
    """S-C06."""
    script = Script(ToolRejected("CARD_DECLINED", "The bank declined.", retry="do_not_retry"))
    call = ran(world, script, effect)
    assert (call.status, call.code, call.message) == ("failed", "CARD_DECLINED", "The bank declined.")
    assert (script.applied, world.states(call), retry(call)) == (1, ["failed"], "do_not_retry")


def test_a_tools_own_code_without_advice_may_be_corrected(world: World) -> None:
    assert retry(ran(world, Script(ToolRejected("NO_SUCH_ORDER", "There is none.")), READ)) == "correct_and_call"


@RETRYABLE
def test_a_passing_failure_is_tried_again_until_it_works(world: World, effect: Effect) -> None:
    """S-C01."""
    script = Script(NotRun("refused"), InDoubt("reset"), {"ok": 1})
    call = ran(world, script, effect, max_attempts=3)
    assert (call.status, call.code) == ("succeeded", "OK")
    assert world.states(call) == ["nothing_sent", "in_doubt", "succeeded"]
    assert [entry.attempt for entry in script.entries] == [1, 2, 3]
    assert world.moves(call) == ["proposed", "approved", "executing", "succeeded"]


def test_every_attempt_has_the_same_key_and_the_same_arguments(world: World) -> None:
    """S-C02, S-C03, S-C13."""
    script = Script(InDoubt("the answer was lost"), {"ok": 1})
    call = ran(world, script, KEYED)
    assert script.applied == 2
    assert {entry.key for entry in script.entries} == {call.idempotency_key}
    assert {entry.arguments.model_dump_json() for entry in script.entries} == {'{"name":"x","amount":3}'}


def test_a_result_after_success_is_replayed_and_the_tool_is_not_entered(world: World) -> None:
    """S-C15."""
    script = Script({"receipt": 1})
    with a_tool(script, **unasked(KEYED)) as tool:
        first = world.run_to_the_end(world.propose(tool, {"amount": 3}))
        again = world.propose(tool, {"amount": 3})
        world.run()
    assert (again.status, again.replay_of_id, script.applied) == ("succeeded", first.pk, 1)


@RETRYABLE
def test_the_delay_that_a_service_asks_for_is_kept_up_to_the_cap(world: World, effect: Effect) -> None:
    script = Script(NotRun("busy", retry_after=40), NotRun("busy", retry_after=4000), {"ok": 1})
    with a_tool(script, effect=effect, requires_approval=False, backoff_cap=60) as tool:
        call = world.propose(tool)
        for asked, waits in ((40, 40), (4000, 60)):
            world.run()
            now, ended = world.now(call), world.attempts(call)[-1].finished_at
            assert now.status == "executing"
            assert now.live_attempt is None
            assert now.due_at is not None
            assert ended is not None
            assert round((now.due_at - ended).total_seconds()) == waits, asked
            world.run()
            assert world.now(call).claims == now.claims, "it was claimed before its delay was over"
            make_due(now)
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 3)


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), -5.0, 10**30, "soon", True])
def test_a_delay_that_is_none_does_not_stop_the_record(world: World, delay: Any) -> None:
    script = Script(NotRun("busy", retry_after=delay), {"ok": 1})
    assert (ran(world, script, READ).status, script.applied) == ("succeeded", 2)


@SINGLES
def test_nothing_sent_by_a_single_attempt_did_not_run(world: World, effect: Effect) -> None:
    script = Script(NotRun("connection refused"))
    call = ran(world, script, effect)
    assert (call.status, call.code, retry(call)) == ("failed", "NOT_RUN", "new_call_ok")
    assert call.message == f"{DID_NOT_RUN}: connection refused"
    assert world.states(call) == ["nothing_sent"]


@SINGLES
def test_a_single_attempt_in_doubt_is_unknown_and_never_entered_again(world: World, effect: Effect) -> None:
    """S-C07, F-45, F-59."""
    script = Script(InDoubt("no answer", code="TIMEOUT_UNKNOWN"))
    call = ran(world, script, effect)
    assert (call.status, call.code, retry(call)) == ("outcome_unknown", "TIMEOUT_UNKNOWN", "do_not_retry")
    for _ in range(3):
        let_pass(1000, call)
        sweep()
        world.run()
    assert (script.applied, world.now(call).status, call.finished_at) == (1, "outcome_unknown", None)


def test_a_keyed_write_that_stays_in_doubt_is_unknown_once_its_attempts_are_used_up(world: World) -> None:
    """F-45."""
    script = Script(InDoubt("reset"), InDoubt("no answer", code="TIMEOUT_UNKNOWN"))
    call = ran(world, script, KEYED, max_attempts=3)
    assert (call.status, call.code, script.applied) == ("outcome_unknown", "TIMEOUT_UNKNOWN", 3)


def test_a_read_that_stays_in_doubt_failed_once_its_attempts_are_used_up(world: World) -> None:
    """S-C09, F-45."""
    script = Script(InDoubt("reset"))
    call = ran(world, script, READ, max_attempts=3)
    assert (call.status, call.code, retry(call), script.applied) == ("failed", "RETRIES_EXHAUSTED", "new_call_ok", 3)


def test_a_keyed_write_that_never_got_through_failed(world: World) -> None:
    """S-D03 by the tool's own word."""
    script = Script(NotRun("refused"))
    call = ran(world, script, KEYED, max_attempts=2)
    assert (call.status, call.code, retry(call), script.applied) == ("failed", "RETRIES_EXHAUSTED", "new_call_ok", 2)


@EVERY
def test_an_unexpected_exception_is_not_tried_again_and_tells_nothing_of_itself(world: World, effect: Effect) -> None:
    """S-G13."""
    script = Script(RuntimeError("password=hunter2"))
    call = ran(world, script, effect)
    expected = "failed" if effect == READ else "outcome_unknown"
    assert (call.status, call.code, script.applied) == (expected, "INTERNAL_ERROR", 1)
    assert retry(call) == "do_not_retry"
    assert "hunter2" not in call.message + world.attempts(call)[0].message


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_even_what_would_end_the_process_is_an_ending(world: World, raised: BaseException) -> None:
    assert ran(world, Script(raised), SINGLE).code == "INTERNAL_ERROR"


# -- results and texts that cannot be kept as they are


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("not even this")

    __str__ = __repr__


def a_cycle() -> list[Any]:
    around: list[Any] = []
    around.append(around)
    return around


UNKEEPABLE = pytest.mark.parametrize(
    "returned",
    [
        {"x": float("nan")},
        {"b": b"\xff"},
        {"s": "\ud800"},
        {"z": "a\0b"},
        {1, 2},
        a_cycle(),
        Unreadable(),
        "x" * 2_000_000,
    ],
    ids=["nan", "bytes", "surrogate", "nul", "set", "cycle", "unreadable", "too large"],
)


@UNKEEPABLE
@pytest.mark.parametrize("effect", [KEYED, SINGLE])
def test_a_write_whose_result_cannot_be_kept_whole_succeeded_with_a_warning(
    world: World, effect: Effect, returned: Any
) -> None:
    """F-51, S-G12."""
    script = Script(returned)
    call = ran(world, script, effect)
    assert (call.status, call.code, script.applied) == ("succeeded", "OK_WITH_WARNING", 1)
    assert call.warning
    assert call.message == call.warning
    assert call.result is not None
    assert len(call.result) <= 1024 * 1024


@UNKEEPABLE
def test_a_read_whose_result_cannot_be_kept_failed(world: World, returned: Any) -> None:
    """F-51."""
    script = Script(returned)
    call = ran(world, script, READ)
    assert (call.status, call.code, script.applied) == ("failed", "INVALID_RESULT", 1)
    assert retry(call) == "do_not_retry"


def test_what_can_be_written_as_json_is_no_fault(world: World) -> None:
    """F-51: a date, a model."""
    call = ran(world, Script({"when": datetime(2026, 1, 2, tzinfo=UTC), "thing": Thing()}), READ)
    assert (call.status, call.code) == ("succeeded", "OK")


class Receipt(BaseModel):
    receipt: str


class Fickle(BaseModel):
    receipt: str

    @classmethod
    def model_validate(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the author's validator is at fault")


@pytest.mark.parametrize("model", [Receipt, Fickle])
@pytest.mark.parametrize(("effect", "ends"), [(READ, "failed"), (KEYED, "succeeded"), (SINGLE, "succeeded")])
def test_a_result_off_its_declared_schema_fails_a_read_and_warns_of_a_write(
    world: World, effect: Effect, ends: str, model: type[BaseModel]
) -> None:
    script = Script({"receipt": 7})
    with a_tool(script, **unasked(effect)) as tool:
        tool.result = model
        call = world.run_to_the_end(world.propose(tool))
    assert (call.status, script.applied) == (ends, 1)
    assert call.code == ("INVALID_RESULT" if effect == READ else "OK_WITH_WARNING")
    assert "declares" in call.message


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ToolRejected("DECLINED", "a\0b\ud800"), "failed"),
        (NotRun("a\0b\ud800"), "failed"),
        (InDoubt("a\0b\ud800"), "outcome_unknown"),
        (ToolRejected("DECLINED", ValueError("an object")), "failed"),  # type: ignore[arg-type]
        (ToolRejected("DECLINED", Unreadable()), "failed"),  # type: ignore[arg-type]
    ],
)
def test_what_a_tool_says_of_its_failure_is_kept_as_safe_text(world: World, raised: Exception, status: str) -> None:
    """F-66: U+0000 in an error's text must not stop the record."""
    call = ran(world, Script(raised), SINGLE)
    assert call.status == status
    assert "\0" not in call.message


# -- timeouts


@pytest.mark.parametrize(
    ("effect", "status"),
    [(READ, "executing"), (KEYED, "executing"), (SINGLE, "outcome_unknown"), (UNKNOWN, "outcome_unknown")],
)
def test_an_attempt_is_settled_once_its_deadline_and_grace_have_passed(
    world: World, effect: Effect, status: str
) -> None:
    """F-45, S-D14."""
    held = Held({"late": True})
    with a_tool(
        Script(held), effect=effect, requires_approval=False, timeout=30, grace=10, backoff=3000.0, backoff_cap=3000.0
    ) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            let_pass(39, call)
            sweep()
            assert (world.now(call).status, world.states(call)) == ("executing", ["entered"])
            let_pass(2, call)
            sweep()
            settled = world.now(call)
            assert (settled.status, settled.code) == (status, "TIMEOUT_UNKNOWN")
            assert settled.live_attempt is None
            assert world.states(call) == ["in_doubt"]
            held.let_go()


def test_while_a_tool_goes_on_after_its_timeout_a_repeat_is_refused(world: World) -> None:
    """S-D14, F-97."""
    held, script = Held(ToolRejected("DECLINED", "no")), Script()
    script._endings = [held]
    with a_tool(script, **unasked(SINGLE, late_settles=False)) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            assert world.propose(tool).code == "DUPLICATE_IN_PROGRESS"
            let_pass(100, call)
            sweep()
            again = world.propose(tool)
            elsewhere = world.propose(tool, session=world.open(), operation_id="another")
            held.let_go()
        world.run()
    for refused in (again, elsewhere):
        assert (refused.status, refused.code, refused.refers_to_id) == ("failed", "OUTCOME_UNRESOLVED", call.pk)
    assert script.applied == 1


# -- start_within


@EVERY
def test_a_call_that_no_worker_took_in_time_did_not_run(world: World, effect: Effect) -> None:
    """S-D01, S-D02, S-D03."""
    script = Script()
    with a_tool(script, **unasked(effect, start_within=60)) as tool:
        call = world.propose(tool)
        let_pass(59, call)
        sweep()
        assert world.now(call).status == "approved"
        let_pass(2, call)
        sweep()
        world.run()
        ended = world.now(call)
        assert (ended.status, ended.code, retry(ended)) == ("failed", "NOT_STARTED_IN_TIME", "new_call_ok")
        assert ended.message.startswith(DID_NOT_RUN)
        assert (script.applied, world.attempts(call)) == (0, [])
        again = world.propose(tool)
        world.run()
        assert (world.now(again).status, script.applied) == ("succeeded", 1), "S-D13"


def test_the_claim_itself_refuses_what_is_too_late_before_any_sweep_came(world: World) -> None:
    script = Script()
    with a_tool(script, **unasked(READ, start_within=60)) as tool:
        call = world.propose(tool)
        let_pass(61, call)
        world.run()
    assert (world.now(call).code, script.applied, world.attempts(call)) == ("NOT_STARTED_IN_TIME", 0, [])


def test_a_late_approval_counts_from_the_approval(world: World) -> None:
    with a_tool(start_within=60) as tool:
        call = world.propose(tool)
        let_pass(5000, call)
        world.approve(call)
        world.run()
    assert world.now(call).status == "succeeded"


# -- the tool's own check at the claim


@pytest.fixture
def checks() -> list[Any]:
    """What the tool's check does, first to last; it passes where nothing is left."""
    return []


@pytest.fixture
def checked(checks: list[Any]) -> Iterator[tuple[tools.Tool, Script]]:
    """A single-attempt tool with a check of its own."""
    script = Script()
    with a_tool(script, **unasked(SINGLE, start_within=60)) as tool:

        @tool.check
        def plays(arguments: Thing, context: ToolContext) -> None:
            does = checks.pop(0) if checks else None
            if callable(does):
                does()
            elif isinstance(does, Exception):
                raise does

        yield tool, script


def test_a_check_that_passes_stands_before_the_mark(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    seen: list[list[str]] = []
    call = world.propose(tool)
    checks.append(lambda: seen.append(world.states(call)))
    world.run()
    assert seen == [["claimed"]]
    assert (world.now(call).status, script.applied) == ("succeeded", 1)
    assert [line.event for line in world.journal(call)][-2:] == ["attempt.entered", "call.moved"]


def test_a_check_that_refuses_at_the_claim_ends_the_call_before_it_runs(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    call = world.propose(tool)
    checks.append(ToolRejected("ORDER_IS_GONE", "Somebody cancelled it."))
    world.run()
    ended = world.now(call)
    assert (ended.status, ended.code, ended.entered) == ("failed", "ORDER_IS_GONE", 0)
    assert ended.message == f"{DID_NOT_RUN}: Somebody cancelled it."
    assert (script.applied, world.states(call)) == (0, ["not_entered"])


def test_a_check_that_raises_at_the_claim_is_made_again_and_uses_no_attempt(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    call = world.propose(tool)
    checks += [RuntimeError("the shop is away"), NotRun("busy", retry_after=float("nan"))]
    for _ in range(2):
        world.run()
        assert (world.now(call).status, world.now(call).entered, script.applied) == ("executing", 0, 0)
        make_due(call)
    world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)
    assert world.states(call) == ["not_entered", "not_entered", "succeeded"]
    assert script.entries[0].attempt == 1, "only what entered counts as an attempt"


def test_a_check_that_raises_until_start_within_is_over_did_not_run(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    call = world.propose(tool)
    checks.append(RuntimeError("the shop is away"))
    world.run()
    let_pass(61, call)
    sweep()
    ended = world.now(call)
    assert (ended.status, ended.code, script.applied) == ("failed", "NOT_STARTED_IN_TIME", 0)
    assert ended.message.startswith(DID_NOT_RUN)


def test_the_mark_is_refused_to_a_call_that_was_cancelled_during_its_check(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    call = world.propose(tool)
    checks.append(lambda: lifecycle.cancel_call(call.pk, by="test"))
    world.run()
    ended = world.now(call)
    assert (ended.status, ended.code, script.applied) == ("failed", "CANCELLED", 0)
    assert ended.message.startswith(DID_NOT_RUN)
    assert retry(ended) == "new_call_ok"


def test_the_mark_is_refused_once_start_within_is_over(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    call = world.propose(tool)
    checks.append(lambda: let_pass(61, call))
    world.run()
    assert script.applied == 0
    sweep()
    assert (world.now(call).status, world.now(call).code) == ("failed", "NOT_STARTED_IN_TIME")


def test_the_mark_is_refused_to_an_attempt_that_was_handed_back_meanwhile(
    world: World, checked: tuple[tools.Tool, Script], checks: list[Any]
) -> None:
    tool, script = checked
    call = world.propose(tool)
    checks.append(lambda: lifecycle.lose(world.attempts(call)[0].pk))
    world.run_to_the_end(call)
    assert script.applied == 1, "the second claim alone enters it"
    assert world.states(call) == ["not_entered", "succeeded"]


def test_the_check_runs_until_one_attempt_has_entered_and_never_after(world: World) -> None:
    asked: list[int] = []
    with a_tool(Script(InDoubt("reset"), {"ok": 1}), **unasked(KEYED)) as tool:

        @tool.check
        def note(arguments: Thing, context: ToolContext) -> None:
            asked.append(context.attempt)

        world.run_to_the_end(world.propose(tool))
    assert asked == [0, 1], "once at admission, once at the first claim"


# -- bounds on retries


def test_a_session_whose_time_is_over_leaves_no_further_attempt(world: World) -> None:
    """S-C11."""
    script = Script(InDoubt("reset"))
    session = world.open(seconds=3600)
    with a_tool(script, **unasked(READ, max_attempts=5)) as tool:
        call = world.propose(tool, session=session)
        world.run()
        entered = script.applied
        assert world.now(call).status == "executing" or entered == 5
        let_session_pass(3601, session)
        ended = world.run_to_the_end(call)
    assert (ended.status, ended.code) == ("failed", "RETRIES_EXHAUSTED")


def test_at_the_claim_of_a_retry_the_sessions_time_is_read_again(world: World) -> None:
    """S-C11: attempts are left, time is not."""
    script = Script(NotRun("busy", retry_after=30))
    session = world.open(seconds=3600)
    with a_tool(script, effect=KEYED, max_attempts=5) as tool:
        call = world.propose(tool, session=session)
        world.run()
        let_session_pass(3601, session)
        ended = world.run_to_the_end(call)
    assert (ended.status, ended.code, script.applied) == ("failed", "RETRIES_EXHAUSTED", 1)


def test_an_admitted_call_still_starts_after_its_sessions_time(world: World) -> None:
    session = world.open(seconds=3600)
    with a_tool(effect=READ) as tool:
        call = world.propose(tool, session=session)
        let_session_pass(3601, session)
        world.run()
    assert world.now(call).status == "succeeded"


@pytest.mark.parametrize("raised", [InDoubt("reset"), NotRun("busy")])
def test_what_attempts_spend_counts_however_they_end_and_bounds_the_retries(world: World, raised: Exception) -> None:
    entries: list[int] = []

    def dear(arguments: Thing, context: ToolContext) -> None:
        context.spend(6)
        entries.append(context.attempt)
        raise raised

    session = world.open(spend=10)
    with a_tool(dear, **unasked(READ, max_attempts=5)) as tool:
        ended = world.run_to_the_end(world.propose(tool, session=session))
    assert (ended.status, ended.code, entries) == ("failed", "RETRIES_EXHAUSTED", [1, 2])
    session.refresh_from_db()
    assert session.spend_used == 12
    assert [each.spent for each in world.attempts(ended)] == [6, 6]


def test_a_spend_is_counted_once_even_if_it_is_recorded_twice(world: World) -> None:
    with a_tool(effect=READ) as tool:
        call = world.propose(tool)
        worker = world.claim_and_die(call)
    from_tool = lifecycle.Succeeded('"done"')
    for _ in range(2):
        lifecycle.record(call.pk, 1, from_tool, worker=worker, spent=7)
    assert Session.objects.get(pk=world.session.pk).spend_used == 7
    assert world.now(call).status == "succeeded"


def test_an_amount_beyond_all_bounds_does_not_stop_the_record(world: World) -> None:
    def dear(arguments: Thing, context: ToolContext) -> str:
        context.spend(10**40)
        return "done"

    with a_tool(dear, effect=READ) as tool:
        for _ in range(2):
            assert world.run_to_the_end(world.propose(tool)).status == "succeeded"


# -- what the claim decides again


@pytest.mark.parametrize("withdrawn", [{"enabled": False}, {"tools": ["something_else"]}])
def test_permission_is_checked_again_at_the_claim(world: World, withdrawn: dict[str, Any]) -> None:
    script = Script()
    with a_tool(script, **unasked(SINGLE)) as tool:
        call = world.propose(tool)
        Agent.objects.filter(pk=world.agent.pk).update(**withdrawn)
        world.run()
    ended = world.now(call)
    assert (ended.status, ended.code, retry(ended)) == ("failed", "PERMISSION_WITHDRAWN", "do_not_retry")
    assert (script.applied, world.attempts(call)) == (0, [])


def test_a_changed_policy_applies_to_later_calls_alone(world: World) -> None:
    """F-14 and behaviour, section 3, "Frozen on the call"."""
    script = Script(InDoubt("reset"))
    with a_tool(script, **unasked(SINGLE)) as tool:
        call = world.propose(tool)
        lifecycle.store_policy(world.team, tool, {"effect": "read", "max_attempts": 5}, by="test")
        ended = world.run_to_the_end(call)
    assert (ended.status, ended.effect, script.applied) == ("outcome_unknown", "non_idempotent_write", 1)


def test_a_rejected_call_never_runs_whatever_its_policy_becomes(world: World) -> None:
    """F-14, S-B02."""
    script = Script()
    with a_tool(script) as tool:
        call = world.propose(tool)
        world.reject(call)
        lifecycle.store_policy(world.team, tool, {"requires_approval": False}, by="test")
        for _ in range(2):
            world.run()
            sweep()
    assert (world.now(call).status, script.applied, world.attempts(call)) == ("rejected", 0, [])


def test_an_operation_that_became_unresolved_elsewhere_is_not_entered(world: World) -> None:
    """Behaviour, section 5: the third row is tested again at the claim."""
    script = Script(InDoubt("reset"), {"ok": 1})
    with a_tool(script, **unasked(SINGLE, late_settles=False)) as tool:
        first = world.propose(tool)
        second = world.propose(tool, session=world.open())
        let_pass(1, first)
        with_one_slot = Runner(slots=1)
        with_one_slot.drain(retryable=False)
        with_one_slot.close()
    ended = world.now(second)
    assert world.now(first).status == "outcome_unknown"
    assert (ended.status, ended.code, ended.refers_to_id) == ("failed", "OUTCOME_UNRESOLVED", first.pk)
    assert (script.applied, world.attempts(second), retry(ended)) == (1, [], "do_not_retry")


def test_an_unresolved_twin_of_equal_arguments_counts_whatever_its_operation_id(world: World) -> None:
    script = Script(InDoubt("reset"), {"ok": 1})
    with a_tool(script, **unasked(SINGLE)) as tool:
        first = world.propose(tool, operation_id="one")
        second = world.propose(tool, operation_id="two")
        let_pass(1, first)
        with_one_slot = Runner(slots=1)
        with_one_slot.drain(retryable=False)
        with_one_slot.close()
    assert (world.now(second).code, script.applied) == ("OUTCOME_UNRESOLVED", 1)


def test_arguments_that_are_not_the_admitted_ones_never_reach_the_tool(world: World) -> None:
    """F-24: somebody with the tables' password changed them."""
    script = Script()
    with a_tool(script, **unasked(SINGLE)) as tool:
        call = world.propose(tool, {"amount": 100})
        with worlds.past_the_triggers() as cursor:
            cursor.execute(
                "UPDATE toolcalls_call SET arguments = replace(arguments, '100', '99900') WHERE id = %s", [call.pk]
            )
        world.run()
    ended = world.now(call)
    assert (ended.status, ended.code, script.applied) == ("failed", "NOT_RUN", 0)
    assert ended.message.startswith(DID_NOT_RUN)


def test_arguments_that_the_author_reads_otherwise_now_did_not_run(world: World) -> None:
    script = Script()
    with a_tool(script, **unasked(SINGLE)) as tool:
        call = world.propose(tool)

        class Strange(Thing):
            def __init__(self, **_: Any) -> None:
                raise RuntimeError

            @classmethod
            def model_validate_json(cls, *_: Any, **__: Any) -> Any:
                raise RuntimeError("read otherwise")

        tool.arguments = Strange
        world.run()
    assert (world.now(call).status, world.now(call).code, script.applied) == ("failed", "NOT_RUN", 0)


# -- what leaves a call waiting


@pytest.mark.parametrize("paused", ["tool", "tool of the team", "agent", "team"])
def test_what_is_paused_stays_waiting_and_resumes(world: World, paused: str) -> None:
    """Behaviour, section 8, "Brake"."""
    script = Script()
    with a_tool(script, **unasked(SINGLE)) as tool:
        brake: dict[str, Any] = {
            "tool": {"team": None, "tool": tool.name},
            "tool of the team": {"team": world.team, "tool": tool.name},
            "agent": {"team": None, "agent_id": world.agent.pk},
            "team": {"team": world.team},
        }[paused]
        call = world.propose(tool)
        assert lifecycle.pull_brake(**brake, by="test")
        assert not lifecycle.pull_brake(**brake, by="test")
        world.run()
        assert (world.now(call).status, script.applied, world.attempts(call)) == ("approved", 0, [])
        assert lifecycle.release_brake(**brake, by="test")
        assert not lifecycle.release_brake(**brake, by="test")
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


def test_a_brake_of_another_team_or_tool_stops_nothing_here(world: World) -> None:
    other = a_world()
    with a_tool(effect=READ) as tool:
        lifecycle.pull_brake(team=other.team, by="test")
        lifecycle.pull_brake(team=other.team, tool=tool.name, by="test")
        lifecycle.pull_brake(team=None, agent_id=other.agent.pk, by="test")
        lifecycle.pull_brake(team=None, tool="another_tool", by="test")
        call = world.propose(tool)
        world.run()
    assert world.now(call).status == "succeeded"


def test_a_brake_between_two_attempts_stops_the_second(world: World) -> None:
    script = Script(NotRun("busy", retry_after=30), {"ok": 1})
    with a_tool(script, effect=KEYED) as tool:
        call = world.propose(tool)
        world.run()
        lifecycle.pull_brake(team=world.team, by="test")
        make_due(call)
        world.run()
        assert (world.now(call).status, script.applied) == ("executing", 1)
        lifecycle.release_brake(team=world.team, by="test")
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 2)


def test_a_process_without_this_version_declines_and_uses_no_attempt(world: World) -> None:
    """S-G09."""
    script = Script()
    with a_tool(script, **unasked(SINGLE)) as tool:
        call = world.propose(tool)
        mine, tool.version = tool.version, "2+000000000000"
        world.run()
        assert (world.now(call).status, world.now(call).claims, script.applied) == ("approved", 0, 0)
        tool.version = mine
        world.run()
    assert (world.now(call).status, world.now(call).claims, script.applied) == ("succeeded", 1, 1)


def test_a_process_that_is_full_declines_and_another_takes_the_call(world: World) -> None:
    """S-G09."""
    held, script = Held(), Script()
    with a_tool(Script(held), effect=READ) as slow, a_tool(script, effect=READ) as quick:
        full, other = Runner(slots=1), Runner(slots=1)
        world.propose(slow)
        with beside(lambda: full.drain(retryable=True, seconds=0.2)):
            assert held.entered.wait(worlds.WITHIN)
            call = world.propose(quick)
            full.drain(retryable=True, seconds=0)
            assert (world.now(call).claims, script.applied) == (0, 0)
            other.drain(retryable=True)
            assert (world.now(call).status, world.now(call).claims) == ("succeeded", 1)
            held.let_go()
        full.close()
        other.close()
    assert Attempt.objects.get(call=call).worker_id == other.start()


# -- several at once


def test_no_more_are_claimed_at_once_than_can_start_at_once(world: World) -> None:
    helds = [Held() for _ in range(5)]
    runner = Runner(slots=3)
    with a_tool(Script(*helds), effect=READ) as tool:
        calls = [world.propose(tool, {"amount": n}) for n in range(5)]
        with beside(lambda: runner.drain(retryable=True)):
            for held in helds[:3]:
                assert held.entered.wait(worlds.WITHIN)
            stand = [world.now(call).status for call in calls]
            assert stand == ["executing"] * 3 + ["approved"] * 2, "oldest first"
            for held in helds:
                held.let_go()
        runner.close()
    assert {world.now(call).status for call in calls} == {"succeeded"}


def test_three_reads_of_one_turn_run_at_the_same_time(world: World) -> None:
    """S-F01."""
    meeting = threading.Barrier(3)

    def meet(arguments: Thing, context: ToolContext) -> int:
        return meeting.wait(timeout=worlds.WITHIN)

    with a_tool(meet, effect=READ) as tool:
        calls = [world.propose(tool, {"amount": n}) for n in range(3)]
        world.run()
    assert sorted(world.now(call).result or "" for call in calls) == ["0", "1", "2"]


def test_a_slow_check_keeps_no_other_call_from_its_record(world: World) -> None:
    held = Held()
    checks: list[Any] = [lambda: None, held.wait]
    with a_tool(effect=READ) as slow, a_tool(effect=READ) as quick:

        @slow.check
        def waits(arguments: Thing, context: ToolContext) -> None:
            checks.pop(0)()

        first, second = world.propose(slow), world.propose(quick)
        with world.running():
            assert held.entered.wait(worlds.WITHIN)
            for _ in range(2000):
                if world.now(second).status == "succeeded":
                    break
                threading.Event().wait(0.01)
            assert (world.now(first).status, world.now(second).status) == ("executing", "succeeded")
            held.let_go()
    assert world.now(first).status == "succeeded"


def test_one_team_with_much_to_do_does_not_keep_another_waiting(world: World) -> None:
    other = a_world()
    order: list[str] = []

    def note(arguments: Thing, context: ToolContext) -> None:
        order.append(context.agent)

    with a_tool(note, effect=READ) as tool:
        for number in range(12):
            world.propose(tool, {"amount": number})
        other.propose(tool, {"amount": 1})
        runner = Runner(slots=2)
        runner.drain(retryable=True)
        runner.close()
    assert len(order) == 13
    assert other.agent.name in order[:2]


def test_the_same_bell_answered_twice_at_once_makes_one_claim(world: World) -> None:
    """F-48, F-96, F-05: of doubled messages one copy runs, the other finds nothing."""
    script = Script()
    with a_tool(script, **unasked(SINGLE)) as tool:
        for number in range(6):
            call = world.propose(tool, {"amount": number})
            runners = [Runner(slots=2) for _ in range(3)]
            for runner in runners:
                runner.start()
            together(*[lambda each=each: each.drain(retryable=False) for each in runners])
            for runner in runners:
                runner.close()
            assert (world.now(call).status, world.now(call).claims) == ("succeeded", 1)
    assert script.applied == 6


def test_a_fast_worker_sees_a_call_only_once_it_is_committed(world: World) -> None:
    """F-50: an approval whose commit is slow; the worker that came first finds nothing, the bell brings it back."""
    script = Script()
    approving, seen = Held(), []
    with a_tool(script) as tool:
        call = world.propose(tool)

        def approve_slowly() -> None:
            with lifecycle.transaction.atomic():
                world.approve(call)
                approving.wait()

        with beside(approve_slowly):
            assert approving.entered.wait(worlds.WITHIN)
            world.run()
            seen.append((world.now(call).status, script.applied))
            approving.let_go()
        world.run()
    assert seen == [("awaiting_approval", 0)]
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


# -- run again


def unknown_call(world: World, tool: tools.Tool) -> Call:
    call = world.propose(tool)
    if call.status == "awaiting_approval":
        world.approve(call)
    world.run()
    assert world.now(call).status == "outcome_unknown"
    return call


@SINGLES
def test_a_run_again_keeps_the_key_and_continues_the_numbers(world: World, effect: Effect) -> None:
    """S-E11."""
    script = Script(InDoubt("reset"), {"receipt": 1})
    with a_tool(script, **unasked(effect)) as tool:
        call = unknown_call(world, tool)
        ordered = worlds.desk.run_again(call.pk, world.ana, evidence="The service has no trace of it.", channel="desk")
        assert (ordered.status, ordered.doubt) == ("approved", "CONNECTION_LOST")
        world.close()
        world._runner = None  # the run again survives a change of workers
        world.run()
    ended = world.now(call)
    assert (ended.status, ended.code) == ("succeeded", "OK")
    assert [entry.attempt for entry in script.entries] == [1, 2]
    assert {entry.key for entry in script.entries} == {call.idempotency_key}
    assert [each.number for each in world.attempts(call)] == [1, 2]
    assert world.moves(call) == [
        "proposed", "approved", "executing", "outcome_unknown", "approved", "executing", "succeeded"
    ]  # fmt: skip


def test_a_run_again_gets_its_attempts_anew(world: World) -> None:
    script = Script(InDoubt("reset"))
    with a_tool(script, **unasked(KEYED, max_attempts=2)) as tool:
        call = world.run_to_the_end(world.propose(tool))
        assert (call.status, script.applied) == ("outcome_unknown", 2)
        worlds.desk.run_again(call.pk, world.ana, evidence="again", channel="desk")
        ended = world.run_to_the_end(call)
    assert (ended.status, script.applied) == ("outcome_unknown", 4)


def test_its_own_unresolved_twin_does_not_stop_a_run_again(world: World) -> None:
    script = Script(InDoubt("reset"), InDoubt("reset"), {"ok": 1})
    with a_tool(script, **unasked(SINGLE)) as tool:
        first, second = world.propose(tool), world.propose(tool, session=world.open())
        world.run()
        assert {world.now(first).status, world.now(second).status} == {"outcome_unknown"}
        worlds.desk.run_again(first.pk, world.ana, evidence="again", channel="desk")
        world.run()
    assert (world.now(first).status, script.applied) == ("succeeded", 3)


# -- several workers and their identities


def test_every_start_of_a_worker_is_a_new_identity(world: World) -> None:
    runners = [Runner(slots=1), Runner(slots=1)]
    identities = {runner.start() for runner in runners} | {runner.start() for runner in runners}
    for runner in runners:
        runner.close()
    assert len(identities) == 2
    assert set(Worker.objects.values_list("pk", flat=True)) == identities


def test_policy_values_are_read_from_the_call_alone(world: World) -> None:
    """Behaviour, section 3: what is frozen is complete."""
    with a_tool(**unasked(KEYED, max_attempts=7, timeout=9, grace=3)) as tool:
        call = world.propose(tool)
    frozen = policy.thaw(call.policy)
    assert (frozen.max_attempts, frozen.timeout, frozen.grace) == (7, 9, 3)
    assert (call.max_attempts, call.timeout, call.grace) == (7, 9, 3)
