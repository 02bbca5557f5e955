"""What time alone brings: lost workers, passed deadlines, bells to ring again; bounded, fair, quiet (behaviour, section 8)."""

from typing import Any
from uuid import UUID

import pytest

from approvals.models import Decision
from tests import worlds
from tests.worlds import Held, Script, World, a_tool, a_world, let_pass, let_workers_pass, make_due, together
from toolcalls import dispatch, lifecycle, sweeps, tools
from toolcalls.canonical import digest
from toolcalls.effects import Effect
from toolcalls.models import Bell, Call, JournalLine, SweepPass, Worker
from toolcalls.sweeps import sweep
from toolcalls.tools import NotRun, ToolContext

KEYED: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 3000.0, "backoff_cap": 3000.0}
SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}
EVERY = pytest.mark.parametrize("effect", list(Effect))


@pytest.fixture(autouse=True)
def calm(settings: Any) -> None:
    """Let no test be a gap between two sweeps, and no lease end by itself."""
    settings.SWEEP_EVERY = 100
    settings.WORKER_SILENT_AFTER = 1000


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bells that reached the broker, in order."""
    sent: list[str] = []
    monkeypatch.setattr(dispatch, "_publish", sent.append)
    return sent


def silence_seen_twice(worker: UUID) -> None:
    """Let a worker be silent for a lease, be suspected, and be silent for one more."""
    sweep()
    let_workers_pass(1001, worker)
    sweep()
    let_workers_pass(1001, worker)
    sweep()


def claimed(world: World, tool: tools.Tool) -> tuple[Call, UUID]:
    call = world.propose(tool)
    return call, world.claim_and_die(call)


# -- lost workers


@pytest.mark.parametrize(
    ("effect", "status"),
    [
        (Effect.READ, "executing"),
        (Effect.IDEMPOTENT_WRITE, "executing"),
        (Effect.NON_IDEMPOTENT_WRITE, "outcome_unknown"),
        (Effect.UNCLASSIFIED, "outcome_unknown"),
    ],
)
def test_silence_is_seen_twice_before_an_attempt_is_settled(world: World, effect: Effect, status: str) -> None:
    """S-D06, F-59."""
    script = Script()
    with a_tool(script, effect=effect, requires_approval=False, timeout=5000) as tool:
        call, worker = claimed(world, tool)
        sweep()
        assert Worker.objects.get(pk=worker).suspected_at is None
        let_workers_pass(1001, worker)
        sweep()
        assert Worker.objects.get(pk=worker).suspected_at is not None
        assert world.states(call) == ["entered"], "one silence is a suspicion"
        sweep()
        assert world.states(call) == ["entered"], "the second must come a lease later"
        let_workers_pass(1001, worker)
        assert sweep().lost == 1
        now = world.now(call)
        assert (now.status, now.code, world.states(call)) == (status, "WORKER_LOST", ["in_doubt"])
        assert script.applied == 0
        if status == "executing":
            ended = world.run_to_the_end(call)
            assert (ended.status, script.entries[0].attempt) == ("succeeded", 2)
        else:
            world.run()
            assert script.applied == 0, "it is not run again on its own"


def test_a_heartbeat_that_moved_lifts_the_suspicion(world: World) -> None:
    with a_tool(**SINGLE, timeout=5000) as tool:
        call, worker = claimed(world, tool)
        sweep()
        let_workers_pass(1001, worker)
        sweep()
        assert lifecycle.beat(worker)
        sweep()
        assert Worker.objects.get(pk=worker).suspected_at is None
        let_workers_pass(1001, worker)
        sweep()
        assert world.states(call) == ["entered"], "the count begins anew"


def test_a_long_gap_between_two_sweeps_voids_all_suspicions(world: World) -> None:
    """A database outage must not lose two hundred attempts at once."""
    with a_tool(**SINGLE, timeout=5000) as tool:
        call, worker = claimed(world, tool)
        sweep()
        let_workers_pass(1001, worker)
        sweep()
        let_workers_pass(1001, worker)
        with worlds.past_the_triggers() as cursor:
            cursor.execute("UPDATE toolcalls_sweeppass SET at = at - interval '301 seconds'")
        assert sweep().lost == 0
        assert world.states(call) == ["entered"]
        assert Worker.objects.get(pk=worker).gone_at is None
        let_workers_pass(1001, worker)
        assert sweep().lost == 1, "still silent a lease after the outage"
    assert world.now(call).status == "outcome_unknown"


def test_the_first_sweep_of_all_settles_nobody(world: World) -> None:
    with a_tool(**SINGLE, timeout=5000) as tool:
        call, worker = claimed(world, tool)
        Worker.objects.filter(pk=worker).update(suspected_at="2020-01-01T00:00Z", suspected_beat="2020-01-01T00:00Z")
        Worker.objects.filter(pk=worker).update(beat_at="2020-01-01T00:00Z")
        SweepPass.objects.update(at=None)
        sweep()
    assert world.states(call) == ["entered"]


def test_an_attempt_that_had_not_entered_is_handed_back_and_does_not_count(world: World) -> None:
    """S-D07: a check stands between claim and entry, and the mark was not made."""
    script = Script()
    with a_tool(script, **SINGLE, timeout=5000) as tool:

        @tool.check
        def passes(arguments: Any, context: ToolContext) -> None: ...

        call, worker = claimed(world, tool)
        assert world.states(call) == ["claimed"]
        silence_seen_twice(worker)
        now = world.now(call)
        assert (now.status, now.entered, now.doubt, now.live_attempt) == ("executing", 0, "", None)
        assert world.states(call) == ["not_entered"]
        world.run()
    assert (world.now(call).status, script.applied, script.entries[0].attempt) == ("succeeded", 1, 1)


def test_a_worker_that_was_declared_gone_can_neither_beat_nor_enter(world: World) -> None:
    with a_tool(**SINGLE, timeout=5000) as tool:

        @tool.check
        def passes(arguments: Any, context: ToolContext) -> None: ...

        call = world.propose(tool)
        worker = worlds.a_worker()
        (mine,) = lifecycle.claim(worker, retryable=False, tools=list(tools.every()), limit=5)
        silence_seen_twice(worker)
        assert not lifecycle.beat(worker)
        assert lifecycle.enter(mine, worker=worker) is None
    assert world.now(call).entered == 0


def test_a_lost_worker_leaves_the_decision_untouched(world: World) -> None:
    """F-06."""
    with a_tool(Script(), timeout=5000) as tool:
        call = world.approve(world.propose(tool))
        worker = world.claim_and_die(call)
        before = list(Decision.objects.values())
        silence_seen_twice(worker)
        again = [sweep() for _ in range(3)]
    assert list(Decision.objects.values()) == before
    assert world.now(call).status == "outcome_unknown"
    assert {(each.lost, each.alarms) for each in again} == {(0, 0)}


def test_every_attempt_of_a_lost_worker_is_settled(world: World) -> None:
    with a_tool(**SINGLE, timeout=5000) as tool:
        calls = [world.propose(tool, {"amount": number}) for number in range(5)]
        worker = world.claim_and_die(calls[0])
        silence_seen_twice(worker)
    assert {world.now(call).status for call in calls} == {"outcome_unknown"}


# -- deadlines


def test_many_of_one_team_do_not_keep_another_teams_deadline_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-38: bounded batches, fair between teams."""
    monkeypatch.setattr(sweeps, "PER_TEAM", 4)
    monkeypatch.setattr(sweeps, "A_BATCH", 8)
    other = a_world()
    with a_tool(deadline=60) as tool:
        many = [world.propose(tool, {"amount": number}) for number in range(30)]
        one = other.propose(tool)
        let_pass(100, *many)
        let_pass(61, one)
        assert one.pk in sweeps._with_a_passed_alarm(), "although thirty others are older"
        assert len(sweeps._with_a_passed_alarm()) == 5
        assert sweep(seconds=worlds.WITHIN).alarms == 31
    assert {world.now(call).code for call in [*many, one]} == {"APPROVAL_EXPIRED"}


def test_an_expiry_is_nobodys_decision(world: World) -> None:
    """S-B03, F-39."""
    with a_tool(deadline=60) as tool:
        call = world.propose(tool)
        let_pass(61, call)
        sweep()
        world.run()
    now = world.now(call)
    assert (now.status, now.code, world.attempts(call)) == ("rejected", "APPROVAL_EXPIRED", [])
    assert not Decision.objects.filter(call=call).exists()
    assert world.journal(call)[-1].actor == "system"


def test_a_call_without_a_deadline_waits_without_limit(world: World) -> None:
    """S-B04."""
    with a_tool(deadline="none") as tool:
        call = world.propose(tool)
        let_pass(10 * 365 * 86400, call)
        assert sweep().alarms == 0
    assert world.now(call).status == "awaiting_approval"


def test_three_sweeps_at_once_do_each_thing_once_and_the_next_is_quiet(world: World) -> None:
    """F-06."""
    with a_tool(**SINGLE, timeout=60, grace=10) as single, a_tool(deadline=60) as asked, a_tool(**KEYED) as keyed:
        running = [world.propose(single, {"amount": number}) for number in range(4)]
        world.claim_and_die(running[0])
        waiting = [world.propose(asked, {"amount": number}) for number in range(10)]
        unstarted = world.propose(keyed)
        for call in (*running, *waiting):
            let_pass(100, call)
        let_pass(1000, unstarted)
        swept = together(sweep, sweep, sweep)
        assert not [each for each in swept if isinstance(each, Exception)], swept
        while sweep().sealed:
            pass
        lines = JournalLine.objects.count()
        quiet = sweep()
    assert (quiet.alarms, quiet.lost, quiet.sealed, JournalLine.objects.count()) == (0, 0, 0, lines)
    assert {world.now(call).status for call in running} == {"outcome_unknown"}
    assert {world.now(call).code for call in waiting} == {"APPROVAL_EXPIRED"}
    assert world.now(unstarted).code == "NOT_STARTED_IN_TIME"
    for call in (*running, *waiting, unstarted):
        moves = [line.move for line in world.journal(call) if line.move]
        assert moves == list(range(1, world.now(call).moves + 1)), "each move once"


def test_a_row_that_somebody_holds_is_left_for_the_next_pass(world: World) -> None:
    held = Held()

    def hold() -> None:
        with lifecycle.transaction.atomic():
            lifecycle.lock(one.pk)
            held.wait()

    with a_tool(deadline=60) as tool:
        one, two = world.propose(tool), world.propose(tool, {"amount": 2})
        let_pass(61, one, two)
        with worlds.beside(hold):
            assert held.entered.wait(worlds.WITHIN)
            assert sweep().alarms == 1
            held.let_go()
        assert sweep().alarms == 1
    assert {world.now(call).code for call in (one, two)} == {"APPROVAL_EXPIRED"}


# -- bells


def test_a_retry_that_has_come_due_is_rung_for(world: World, rung: list[str]) -> None:
    """F-49: delays live in the database."""
    with a_tool(Script(NotRun("busy")), **KEYED) as tool:
        call = world.propose(tool)
        world.run()
        sweep()
        rung.clear()
        sweep()
        assert rung == [], "nothing is due yet"
        make_due(call)
        with worlds.past_the_triggers() as cursor:
            cursor.execute("UPDATE toolcalls_call SET due_at = clock_timestamp() WHERE id = %s", [call.pk])
        sweep()
    assert rung == ["call_tool"]


def test_a_bell_that_nobody_answers_is_rung_again_ever_more_slowly(
    world: World, rung: list[str], settings: Any
) -> None:
    """F-05: the message was lost."""
    settings.RING_AGAIN_AFTER = 100

    def nobody_comes_for(seconds: int) -> None:
        with worlds.past_the_triggers() as cursor:
            cursor.execute("UPDATE toolcalls_call SET due_at = due_at - make_interval(secs => %s)", [seconds])
            cursor.execute(
                "UPDATE toolcalls_bell SET last_rung_at = last_rung_at - make_interval(secs => %s)", [seconds]
            )
        sweep()

    with a_tool(**SINGLE, start_within=100_000) as tool:
        call = world.propose(tool)
        sweep()
        for pause in (100, 200, 300, 300):
            rung.clear()
            nobody_comes_for(pause // 2)
            assert rung == []
            nobody_comes_for(pause // 2 + 1)
            assert rung == ["call_single_attempt_tool"]
        world.run()
        sweep()
    assert world.now(call).status == "succeeded"
    assert Bell.objects.get(pk="call_single_attempt_tool").rings_again == 0, "then it starts from the beginning"


def test_what_is_paused_is_not_rung_for(world: World, rung: list[str]) -> None:
    with a_tool(**SINGLE) as tool:
        call = world.propose(tool)
        lifecycle.pull_brake(team=world.team, by="test")
        rung.clear()
        with worlds.past_the_triggers() as cursor:
            cursor.execute("UPDATE toolcalls_call SET due_at = due_at - interval '100 seconds'")
            cursor.execute("UPDATE toolcalls_bell SET last_rung_at = NULL, rung_at = NULL")
        sweep()
        assert rung == []
        lifecycle.release_brake(team=world.team, by="test")
        assert sorted(rung) == ["call_single_attempt_tool", "call_tool"]
    assert world.now(call).status == "approved"


def test_a_quiet_system_rings_nothing(world: World, rung: list[str]) -> None:
    for _ in range(3):
        sweep()
    assert rung == []


# -- seals


def test_a_sweep_seals_what_no_reader_did(world: World) -> None:
    with a_tool(effect=Effect.READ) as tool:
        call = world.propose(tool)
        world.run()
        assert sweep().sealed >= len(world.journal(call))
    assert all(line.seal.hash for line in JournalLine.objects.select_related("seal"))
    assert digest("") not in {line.seal.hash for line in JournalLine.objects.select_related("seal")}
