"""Opening, closing and cancelling sessions and turns (behaviour, sections 2, 6 and 8)."""

import pytest
from django.db import DatabaseError

from tests.worlds import Held, Script, World, a_tool
from toolcalls import intake, lifecycle
from toolcalls.intake import Opening, SessionMismatch
from toolcalls.lifecycle import WrongState
from toolcalls.models import JournalLine, Session, Turn
from toolcalls.tools import InDoubt, ToolRejected


def test_opening_again_finds_the_session_and_another_body_does_not(world: World) -> None:
    opening = Opening(session_id="s", body_digest="d", calls=3)
    first, opened = intake.open_session(world.agent, opening)
    again, anew = intake.open_session(world.agent, opening)
    assert (opened, anew, again.pk) == (True, False, first.pk)
    with pytest.raises(SessionMismatch):
        intake.open_session(world.agent, Opening(session_id="s", body_digest="e"))
    assert JournalLine.objects.filter(session=first, event="session.opened").count() == 1


def test_what_a_session_leaves_unsaid_is_its_agents(world: World) -> None:
    world.agent.budgets = {"calls": 7, "seconds": 60}
    session, _ = intake.open_session(world.agent, Opening(session_id="s", body_digest="", calls=5))
    assert (session.calls_limit, session.seconds_limit, session.turns_limit) == (5, 60, None)


@pytest.mark.parametrize(
    "change",
    [
        {"calls_limit": 99},
        {"allowed_tools": ["*"]},
        {"default_effect": "read"},
        {"on_behalf_of": "x"},
        {"session_id": "x"},
    ],
)
def test_a_session_keeps_the_terms_it_was_opened_with(world: World, change: dict[str, object]) -> None:
    with pytest.raises(DatabaseError):
        Session.objects.filter(pk=world.session.pk).update(**change)


def test_a_session_that_ended_is_not_opened_again(world: World) -> None:
    lifecycle.close_session(world.session.pk, by="test")
    with pytest.raises(DatabaseError):
        Session.objects.filter(pk=world.session.pk).update(status="open", ended_at=None)


def test_cancelling_a_session_ends_all_that_is_unfinished_in_one_go_and_says_what_became_of_each(world: World) -> None:
    held = Held({"done": 1})
    with (
        a_tool() as waits,
        a_tool(effect="read", start_within=900) as due,
        a_tool(Script(held), requires_approval=False) as runs,
    ):
        running = world.propose(runs)
        with world.running():
            assert held.entered.wait(30)
            waiting, ready, done = world.propose(waits), world.propose(due), world.propose("no_such_tool")
            became = lifecycle.cancel_session(world.session.pk, by="agent:x")
            held.let_go()
        assert {call.pk: to for call, to in became} == {
            running.pk: "cancelling",
            waiting.pk: "rejected",
            ready.pk: "rejected",
        }
        assert [world.now(each).code for each in (waiting, ready, done)] == ["CANCELLED", "CANCELLED", "UNKNOWN_TOOL"]
        assert world.now(running).status == "succeeded", "what the tool then really did is recorded"
        assert world.propose(due, {"amount": 1}).code == "SESSION_CLOSED"
    with pytest.raises(WrongState, match="cancelled"):
        lifecycle.cancel_session(world.session.pk, by="agent:x")


def test_a_closed_session_with_nothing_unfinished_has_nothing_to_cancel(world: World) -> None:
    """S-G05."""
    lifecycle.close_session(world.session.pk, by="test")
    with pytest.raises(WrongState, match="closed"):
        lifecycle.cancel_session(world.session.pk, by="test")
    assert Session.objects.get(pk=world.session.pk).status == "closed"


def test_closing_twice_changes_nothing_and_a_cancelled_session_is_not_closed(world: World) -> None:
    first = lifecycle.close_session(world.session.pk, by="test")
    assert lifecycle.close_session(world.session.pk, by="test").ended_at == first.ended_at
    assert JournalLine.objects.filter(event="session.closed").count() == 1
    other = world.open()
    lifecycle.cancel_session(other.pk, by="test")
    with pytest.raises(WrongState):
        lifecycle.close_session(other.pk, by="test")


def test_cancelling_a_turn_reaches_its_own_calls_only(world: World) -> None:
    with a_tool() as tool:
        mine, other = world.propose(tool, {"amount": 1}, turn="one"), world.propose(tool, {"amount": 2}, turn="two")
        turn = Turn.objects.get(turn_id="one")
        assert [(call.pk, to) for call, to in lifecycle.cancel_turn(world.session.pk, turn.pk, by="t")] == [
            (mine.pk, "rejected")
        ]
        assert lifecycle.cancel_turn(world.session.pk, turn.pk, by="t") == []
    assert world.now(other).status == "awaiting_approval"
    assert JournalLine.objects.filter(event="turn.cancelled").count() == 1


def test_a_failed_or_unknown_call_does_not_fail_its_session(world: World) -> None:
    """S-D15."""
    with a_tool(Script(ToolRejected("NO", "no"), InDoubt("cut"), {"ok": 1}), requires_approval=False) as tool:
        for amount in range(3):
            world.propose(tool, {"amount": amount})
            world.run()
    assert Session.objects.get(pk=world.session.pk).status == "open"
    assert [each.status for each in world.session.calls.order_by("pk")] == ["failed", "outcome_unknown", "succeeded"]
