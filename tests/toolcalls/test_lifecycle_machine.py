"""A machine that does to calls whatever can be done to them, in any order, and asks after each step what must always hold."""

import itertools
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from approvals import desk
from tests import worlds
from tests.worlds import World, a_tool, let_pass, make_due
from toolcalls import dispatch, lifecycle, tools
from toolcalls.codes import DID_NOT_RUN
from toolcalls.effects import Effect
from toolcalls.journal import Broken, seal_waiting, verify
from toolcalls.models import Attempt, Call, JournalLine
from toolcalls.outcomes import Crashed, Ending, InDoubt, NothingSent, Refused, Succeeded
from toolcalls.states import EDGES, FINAL, UNFINISHED, Status
from toolcalls.sweeps import sweep

ENDINGS: list[Ending] = [
    Succeeded('{"done":true}'),
    Succeeded("null", warning="cut"),
    Refused("DECLINED", "no"),
    NothingSent("refused"),
    InDoubt("CONNECTION_LOST", "reset"),
    Crashed(),
]
WITHOUT_EFFECT = (Refused, NothingSent)


@dataclass
class Run:
    """One entry into a tool: what it really did is known here, whatever the system comes to know of it."""

    call: Call
    attempt: int
    ending: Ending | None = None


@dataclass
class Known:
    """What the machine itself did to a call."""

    runs: list[Run] = field(default_factory=list)
    ordered_again: int = 0
    final: tuple[Any, ...] | None = None


class Lifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: World = worlds.a_world()
        self.stack = ExitStack()
        self.tools = [
            self.stack.enter_context(
                a_tool(
                    effect=effect, timeout=100, grace=10, backoff=3000.0, backoff_cap=3000.0, start_within=900,
                    max_attempts=2 if effect.rules.retryable else 1, requires_approval=asked,
                )
            )
            for effect, asked in [
                (Effect.READ, False), (Effect.IDEMPOTENT_WRITE, False), (Effect.NON_IDEMPOTENT_WRITE, True),
                (Effect.UNCLASSIFIED, False), (Effect.NON_IDEMPOTENT_WRITE, False), (Effect.IDEMPOTENT_WRITE, True),
            ]
        ]  # fmt: skip
        for checked in self.tools[-2:]:
            checked.check(lambda arguments, context: None)
        self.worker = worlds.a_worker()
        self.known: dict[Any, Known] = {}
        self.running: list[Run] = []
        self.claimed: list[lifecycle.Claimed] = []
        self.numbers = itertools.count()

    def teardown(self) -> None:
        self.stack.close()
        while seal_waiting(chains=100):
            pass
        assert [each for each in verify() if isinstance(each, Broken)] == []
        worlds.sweep_away()

    # -- choosing

    def calls(self, *states: Status) -> list[Call]:
        return list(Call.objects.filter(status__in=states).order_by("pk"))

    def one(self, data: st.DataObject, *states: Status) -> Call | None:
        found = self.calls(*states)
        return data.draw(st.sampled_from(found)) if found else None

    # -- what can be done

    @initialize()
    def begin(self) -> None:
        for which in range(6):
            self.propose(which, again=False)

    @rule(which=st.integers(0, 5), again=st.booleans())
    def propose(self, which: int, again: bool) -> None:
        amount = 0 if again else next(self.numbers)
        call = self.world.propose(self.tools[which], {"amount": amount})
        self.known[call.pk] = Known()

    @rule(data=st.data(), decision=st.sampled_from(["approve", "approve", "reject"]))
    def decide(self, data: st.DataObject, decision: str) -> None:
        call = self.one(data, Status.AWAITING_APPROVAL)
        if call is not None:
            too_late = call.deadline is not None and call.deadline < lifecycle.clock()
            with pytest.raises(desk.Conflict, match="deadline passed") if too_late else nullcontext():
                self.world.decide(call, decision)

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        for retryable in (True, False):
            self.claimed += lifecycle.claim(self.worker, retryable=retryable, tools=list(tools.every()), limit=3)
        for each in [each for each in self.claimed if each.entered]:
            self.claimed.remove(each)
            self.enter(each)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), what=st.sampled_from(["mark", "refuse", "hand back", "lose"]))
    def after_its_check(self, data: st.DataObject, what: str) -> None:
        each = self.claimed.pop(0)
        match what:
            case "mark":
                if lifecycle.enter(each, worker=self.worker) is not None:
                    self.enter(each)
            case "refuse":
                lifecycle.refuse(each.call, each.attempt, worker=self.worker, code="GONE", message="gone")
            case "hand back":
                lifecycle.hand_back(each.call, each.attempt, worker=self.worker, delay=0, why="away")
            case "lose":
                lifecycle.lose(Attempt.objects.get(call=each.call, number=each.attempt).pk)

    def enter(self, each: lifecycle.Claimed) -> None:
        run = Run(Call.objects.get(pk=each.call), each.attempt)
        self.known[each.call].runs.append(run)
        self.running.append(run)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ending=st.sampled_from(ENDINGS), twice=st.booleans())
    def end(self, data: st.DataObject, ending: Ending, twice: bool) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.running.remove(run)
        run.ending = ending
        for _ in range(1 + twice):
            lifecycle.record(run.call.pk, run.attempt, ending, worker=self.worker)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_its_worker(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running))
        lifecycle.lose(Attempt.objects.get(call=run.call, number=run.attempt).pk)

    @rule(data=st.data(), seconds=st.sampled_from([200, 1000, 100_000]))
    def time_passes(self, data: st.DataObject, seconds: int) -> None:
        call = self.one(data, *UNFINISHED)
        if call is not None:
            let_pass(seconds, call)

    @rule(data=st.data())
    def its_delay_passes(self, data: st.DataObject) -> None:
        call = self.one(data, Status.EXECUTING)
        if call is not None and call.due_at is not None:
            make_due(call)

    @rule()
    def sweep(self) -> None:
        sweep()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = self.one(data, *UNFINISHED)
        if call is not None:
            lifecycle.cancel_call(call.pk, by="test")

    @rule(data=st.data(), took_effect=st.booleans())
    def settle(self, data: st.DataObject, took_effect: bool) -> None:
        call = self.one(data, Status.OUTCOME_UNKNOWN)
        if call is not None:
            verdict = "took_effect" if took_effect else "did_not_take_effect"
            desk.settle(call.pk, self.world.ana, verdict=verdict, evidence="seen", channel="desk")

    @rule(data=st.data())
    def run_again(self, data: st.DataObject) -> None:
        call = self.one(data, Status.OUTCOME_UNKNOWN)
        if call is not None:
            desk.run_again(call.pk, self.world.ana, evidence="again", channel="desk")
            self.known[call.pk].ordered_again += 1

    # -- what always holds

    @invariant()
    def what_always_holds(self) -> None:
        lines: dict[Any, list[JournalLine]] = defaultdict(list)
        for line in JournalLine.objects.filter(call__isnull=False, move__isnull=False).order_by("pk"):
            lines[line.call_id].append(line)
        words = desk.Reconciliation.objects.filter(verdict__in=["took_effect", "did_not_take_effect"])
        people = set(words.values_list("call", flat=True))
        for call in Call.objects.defer("policy", "received"):
            known = self.known[call.pk]
            the_journal_is_a_chain_from_proposed_to_the_state(call, lines[call.pk])
            each_is_entered_no_more_often_than_it_may_be(call, known)
            what_was_refused_or_not_started_has_no_effect(call, known)
            a_final_state_stands(call, known)
            what_is_unfinished_is_watched(call)
            if call.pk not in people and not call.replay_of_id:
                no_guess_is_called_a_fact(call, known)


def the_journal_is_a_chain_from_proposed_to_the_state(call: Call, lines: list[JournalLine]) -> None:
    assert [line.move for line in lines] == list(range(1, call.moves + 1))
    assert (lines[0].source, lines[-1].target) == ("proposed", call.status)
    for before, after in itertools.pairwise(lines):
        assert after.source == before.target
        assert (after.source, after.target) in EDGES


def each_is_entered_no_more_often_than_it_may_be(call: Call, known: Known) -> None:
    """A single attempt once, and once more for each order of a person; others as their policy says."""
    assert len(known.runs) == call.entered
    assert len(known.runs) <= call.max_attempts * (1 + known.ordered_again)
    assert call.retryable or call.max_attempts == 1


def what_was_refused_or_not_started_has_no_effect(call: Call, known: Known) -> None:
    if call.status == Status.REJECTED or call.replay_of_id or call.claims == 0:
        assert known.runs == []
    if call.message.startswith(DID_NOT_RUN):
        assert all(isinstance(run.ending, WITHOUT_EFFECT) for run in known.runs)


def no_guess_is_called_a_fact(call: Call, known: Known) -> None:
    """Without a person's word, a write that failed really did nothing and runs no more, and what succeeded really did."""
    if call.writes and call.status == Status.FAILED:
        assert not call.doubt or call.settled_verdict
        assert all(isinstance(run.ending, WITHOUT_EFFECT) for run in known.runs)
    if call.status == Status.SUCCEEDED:
        assert any(isinstance(run.ending, Succeeded) for run in known.runs)
    assert call.writes or call.status != Status.OUTCOME_UNKNOWN


def a_final_state_stands(call: Call, known: Known) -> None:
    if call.status in FINAL:
        stands = (call.status, call.code, call.result, call.finished_at is not None, call.moves)
        known.final = known.final or stands
        assert known.final == stands


def what_is_unfinished_is_watched(call: Call) -> None:
    """Nothing is stuck: it is due, or an alarm watches it."""
    if call.status in (Status.APPROVED, Status.EXECUTING):
        assert call.due_at is not None or call.alarm_at is not None


@pytest.mark.usefixtures("database")
def test_whatever_is_done_to_calls_in_whatever_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_publish", lambda kind: None)
    run_state_machine_as_test(
        Lifecycle,
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, database=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
