"""Decisions at the same time: exactly one wins, and the journal says which (behaviour, section 7)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from approvals import desk
from approvals.desk import Conflict
from approvals.models import Decision, Reconciliation
from tests.worlds import Script, World, a_tool, let_pass, together
from toolcalls import directory, intake, lifecycle, masking
from toolcalls.lifecycle import WrongState
from toolcalls.models import Call
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt


def outcomes(answers: list[Any]) -> Counter[str]:
    for each in answers:
        assert not isinstance(each, BaseException) or isinstance(each, Conflict | WrongState), each
    return Counter(each.code if isinstance(each, Conflict | WrongState) else "won" for each in answers)


def one_move_from_waiting(world: World, call: Call) -> str:
    """Give where the call went, of which there is exactly one line."""
    (line,) = [each for each in world.journal(call) if each.source == "awaiting_approval"]
    return f"{line.target} {line.code} {line.actor}"


def people(world: World, many: int) -> list[User]:
    return [
        directory.create_operator(f"p{n}", team=world.team, may=["decide", "reconcile"], by="test")[0]
        for n in range(many)
    ]


def test_of_eight_people_who_approve_at_once_one_wins(world: World) -> None:
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        answers = together(*[lambda who=who: world.approve(call, by=who) for who in people(world, 8)])
        assert outcomes(answers) == {"won": 1, "ALREADY_DECIDED": 7}
        made = Decision.objects.get()
        assert one_move_from_waiting(world, call) == f"approved  user:{made.user.username}"
        world.run()
    assert tried.applied == 1
    assert all(made.user.username in str(each) for each in answers if isinstance(each, Conflict))


def test_a_double_click_is_one_decision_and_both_are_answered(world: World) -> None:
    """F-01."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        assert outcomes(together(*[lambda: world.approve(call)] * 6)) == {"won": 6}
        world.run()
    assert (Decision.objects.count(), tried.applied) == (1, 1)


@pytest.mark.parametrize("who", ["one person", "two people"])
def test_of_approve_and_reject_at_once_exactly_one_wins(world: World, who: str) -> None:
    tried = Script()
    other = world.ana if who == "one person" else world.bob
    with a_tool(tried) as tool:
        for n in range(4):
            call = world.propose(tool, {"amount": n})
            answers = together(lambda call=call: world.approve(call), lambda call=call: world.reject(call, by=other))
            assert outcomes(answers) == {"won": 1, "ALREADY_DECIDED": 1}
            made = Decision.objects.get(call=call)
            assert (
                one_move_from_waiting(world, call).split()[0]
                == {"approve": "approved", "reject": "rejected"}[made.decision]
            )
        world.run()
    assert tried.applied == Decision.objects.filter(decision="approve").count()


def test_of_approve_and_expiry_and_cancel_at_once_exactly_one_wins(world: World) -> None:
    tried = Script()
    ends = Counter[str]()
    with a_tool(tried) as tool:
        for n in range(6):
            call = world.propose(tool, {"amount": n})
            if n % 2:
                let_pass(90_000, call)
            acts: list[Callable[[], Any]] = [
                lambda call=call: world.approve(call),
                lambda call=call: lifecycle.cancel_call(call.pk, by="agent:x"),
                sweep,
            ]
            answers = together(*acts)
            outcomes(answers)
            end = one_move_from_waiting(world, call)
            ends[end] += 1
            late = bool(n % 2)
            assert end.startswith("approved") is (Decision.objects.filter(call=call).exists())
            assert not (late and end.startswith("approved")), "by the database's clock it was too late"
            assert end in (
                "rejected APPROVAL_EXPIRED system",
                "rejected CANCELLED agent:x",
                f"approved  user:{world.ana.username}",
            )
            stopped = world.now(call)
            if stopped.code == "CANCELLED":
                assert tried.applied == 0
    assert sum(ends.values()) == 6


def test_of_two_last_approvals_at_once_one_starts_the_call(world: World) -> None:
    tried = Script()
    with a_tool(tried, approvers_needed=2) as tool:
        call = world.propose(tool)
        answers = together(lambda: world.approve(call), lambda: world.approve(call, by=world.bob))
        assert outcomes(answers) == {"won": 2}
        assert one_move_from_waiting(world, call).startswith("approved")
        world.run()
    assert (Decision.objects.count(), tried.applied) == (2, 1)


def test_of_amend_and_approve_at_once_exactly_one_wins(world: World) -> None:
    tried = Script()
    with a_tool(tried, amend=True) as tool:
        for n in range(4):
            call = world.now(world.propose(tool, {"amount": 100 + n}))
            seen = masking.hash_of(call)
            answers = together(
                lambda call=call, seen=seen, n=n: desk.amend(
                    call.pk, world.ana, arguments_hash=seen, arguments={"amount": n}, reason="", channel="desk"
                ),
                lambda call=call: world.approve(call, by=world.bob),
            )
            assert outcomes(answers) == {"won": 1, "ALREADY_DECIDED": 1}
            amended = Call.objects.filter(amends=call).exists()
            assert (world.now(call).code == "AMENDED") is amended
            assert (world.now(call).status == "approved") is not amended
        world.run()
    assert tried.applied == 4


def test_two_amendments_at_once_make_one_new_call(world: World) -> None:
    with a_tool(amend=True) as tool:
        call = world.now(world.propose(tool, {"amount": 100}))
        seen = masking.hash_of(call)
        answers = together(
            *[
                lambda who=who, n=n: desk.amend(
                    call.pk, who, arguments_hash=seen, arguments={"amount": n}, reason="", channel="desk"
                )
                for n, who in enumerate((world.ana, world.bob))
            ]
        )
    assert outcomes(answers) == {"won": 1, "ALREADY_DECIDED": 1}
    assert Call.objects.count() == 2


def test_an_amendment_and_new_proposals_under_one_limit_do_not_deadlock_or_exceed_it(world: World) -> None:
    limit = [{"measure": "amount", "per": "day", "max": 120}]
    with a_tool(amend=True, limits=limit) as tool:
        call = world.now(world.propose(tool, {"amount": 100}))
        seen = masking.hash_of(call)

        def amend() -> Any:
            try:
                return desk.amend(
                    call.pk, world.ana, arguments_hash=seen, arguments={"amount": 110}, reason="", channel="desk"
                )
            except intake.AmendmentRefused as error:
                return error.refusal.code

        answers = together(
            amend,
            *[lambda n=n: world.propose(tool, {"amount": 10, "name": f"n{n}"}, session=world.open()) for n in range(4)],
        )
    assert not [each for each in answers if isinstance(each, BaseException)], answers
    kept = Call.objects.exclude(status__in=("failed", "rejected"))
    assert sum(each.measures["amount"] for each in kept) <= 120


def test_of_two_settlements_at_once_one_wins(world: World) -> None:
    """Section 9."""
    with a_tool(Script(InDoubt("cut")), requires_approval=False) as tool:
        call = world.propose(tool)
        world.run()

        def settle(who: User, verdict: str) -> Any:
            return desk.settle(call.pk, who, verdict=verdict, evidence="e", channel="desk")

        answers = together(
            lambda: settle(world.ana, "took_effect"),
            lambda: settle(world.bob, "did_not_take_effect"),
            lambda: desk.run_again(call.pk, world.bob, evidence="e", channel="desk"),
        )
    assert outcomes(answers) == {"won": 1, "ALREADY_DECIDED": 2}
    assert Reconciliation.objects.count() == 1
    assert len([each for each in world.journal(call) if each.source == "outcome_unknown"]) == 1
