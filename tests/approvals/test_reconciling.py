"""Settling an unknown outcome, and ordering another run (behaviour, section 9), by the desk's verbs."""

import json

import pytest

from approvals import desk
from approvals.desk import Conflict, NotAllowed, NotVisible
from approvals.models import Reconciliation
from tests.worlds import Script, World, a_tool, a_world
from toolcalls.models import Call, Membership
from toolcalls.tools import InDoubt, Tool

CUT_OFF = InDoubt("cut off")


def unknown(world: World, tool: Tool, amount: int = 0) -> Call:
    call = world.propose(tool, {"amount": amount})
    world.run()
    stored = world.now(call)
    assert stored.status == "outcome_unknown"
    return stored


def settle(world: World, call: Call, verdict: str, **how: object) -> Call:
    given = {"evidence": "the provider's receipt 7", "channel": "desk", **how}
    return desk.settle(call.pk, given.pop("by", world.ana), verdict=verdict, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdict", "status", "code"),
    [("took_effect", "succeeded", "CONFIRMED_DONE"), ("did_not_take_effect", "failed", "CONFIRMED_NOT_DONE")],
)
def test_a_person_settles_with_evidence_and_the_unknown_record_stays(
    world: World, verdict: str, status: str, code: str
) -> None:
    """S-E03, S-E04."""
    tried = Script(CUT_OFF)
    with a_tool(tried, requires_approval=False) as tool:
        call = unknown(world, tool)
        settle(world, call, verdict, result={"receipt": 7} if status == "succeeded" else None)
        world.run()
    stored = world.now(call)
    assert (stored.status, stored.code, stored.settled_verdict) == (status, code, verdict)
    assert stored.settled_at == stored.finished_at
    assert json.loads(stored.result or "null") == ({"receipt": 7} if status == "succeeded" else None)
    assert world.moves(call) == ["proposed", "approved", "executing", "outcome_unknown", status]
    assert world.states(call) == ["in_doubt"], "the attempts stay as they were"
    assert tried.applied == 1, "it is never run again silently"
    made = Reconciliation.objects.get()
    assert (made.user, made.verdict, made.evidence, made.channel) == (
        world.ana,
        verdict,
        "the provider's receipt 7",
        "desk",
    )
    last = [line for line in world.journal(call) if line.move is not None][-1]
    assert (last.actor, "receipt 7" in (last.detail or "")) == (f"user:{world.ana.username}", True)


def test_the_session_is_told_by_a_note_of_the_application(world: World) -> None:
    """S-E05: and repeating the settlement adds nothing."""
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        call = unknown(world, tool)
        for _ in range(3):
            settle(world, call, "took_effect")
    notes = [line for line in world.journal(call) if line.event == "session.note"]
    assert len(notes) == 1
    assert Reconciliation.objects.count() == 1


def test_a_note_leaves_the_outcome_unknown(world: World) -> None:
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        call = unknown(world, tool)
        settle(world, call, "still_unknown", evidence="asked, no answer yet")
        assert world.now(call).status == "outcome_unknown"
        assert [line.event for line in world.journal(call)][-1] == "reconciliation.noted"
        settle(world, call, "took_effect")
    assert world.now(call).status == "succeeded"


@pytest.mark.parametrize("second", ["took_effect", "did_not_take_effect"])
def test_a_second_word_by_somebody_else_is_told_who_settled(world: World, second: str) -> None:
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        call = unknown(world, tool)
        settle(world, call, "took_effect")
        with pytest.raises(Conflict) as refused:
            settle(world, call, second, by=world.bob)
    assert refused.value.code == "ALREADY_DECIDED"
    assert world.ana.username in refused.value.message
    assert world.now(call).code == "CONFIRMED_DONE"


@pytest.mark.parametrize("state", ["awaiting_approval", "approved", "succeeded"])
def test_only_an_unknown_outcome_is_settled_or_run_again(world: World, state: str) -> None:
    with a_tool(requires_approval=state == "awaiting_approval", effect="idempotent_write") as tool:
        call = world.propose(tool)
        if state == "succeeded":
            world.run()
        for act in (
            lambda: settle(world, call, "did_not_take_effect"),
            lambda: desk.run_again(call.pk, world.ana, evidence="e", channel="desk"),
        ):
            with pytest.raises(Conflict) as refused:
                act()
            assert refused.value.code == "WRONG_STATE"
    assert world.now(call).status == state
    assert not Reconciliation.objects.exists()


def test_another_run_goes_under_the_same_key_with_numbers_that_go_on(world: World) -> None:
    """S-E11."""
    tried = Script(CUT_OFF, {"done": 1})
    with a_tool(tried) as tool:
        call = world.propose(tool)
        world.approve(call)
        world.run()
        desk.run_again(call.pk, world.ana, evidence="the service has no such key", channel="desk")
        world.run()
    assert world.now(call).status == "succeeded"
    assert [each.attempt for each in tried.entries] == [1, 2]
    assert len({each.key for each in tried.entries}) == 1
    assert world.states(call) == ["in_doubt", "succeeded"]


def test_another_run_of_a_tool_that_changed_is_refused(world: World) -> None:
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        call = unknown(world, tool)
        tool.version = "2+other"
        with pytest.raises(Conflict) as refused:
            desk.run_again(call.pk, world.ana, evidence="e", channel="desk")
        assert refused.value.code == "TOOL_CHANGED"
    assert world.now(call).status == "outcome_unknown"
    assert not Reconciliation.objects.exists()


@pytest.mark.parametrize(
    ("right", "may"), [("may_reconcile", {"settle"}), ("may_run_again", {"run_again"}), ("may_decide", set())]
)
def test_each_needs_its_own_right(world: World, right: str, may: set[str]) -> None:
    rights = dict.fromkeys(("may_decide", "may_reconcile", "may_run_again", "may_manage_policies"), False)
    Membership.objects.filter(user=world.ana).update(**{**rights, right: True})
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        for number, (name, act) in enumerate({
            "settle": lambda call: settle(world, call, "took_effect"),
            "run_again": lambda call: desk.run_again(call.pk, world.ana, evidence="e", channel="desk"),
        }.items()):  # fmt: skip
            call = unknown(world, tool, amount=number)
            if name in may:
                act(call)
                assert world.now(call).status != "outcome_unknown"
                continue
            with pytest.raises(NotAllowed):
                act(call)
            assert world.now(call).status == "outcome_unknown"


def test_nobody_of_another_team_settles_anything(world: World) -> None:
    """F-88."""
    other = a_world()
    with a_tool(Script(CUT_OFF), requires_approval=False) as tool:
        call = unknown(world, tool)
        with pytest.raises(NotVisible):
            settle(world, call, "took_effect", by=other.ana)
        with pytest.raises(NotVisible):
            desk.run_again(call.pk, other.ana, evidence="e", channel="desk")
    assert world.now(call).status == "outcome_unknown"
