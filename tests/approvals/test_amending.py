"""An approval with changed arguments is a new call (behaviour, section 7)."""

from typing import Any

import pytest

from approvals import desk
from approvals.desk import Conflict, NotAllowed, NotVisible
from approvals.models import Decision
from tests.worlds import Script, World, a_tool, a_world, let_pass
from toolcalls import lifecycle, masking
from toolcalls.intake import AmendmentRefused
from toolcalls.models import Call, Membership, Session
from toolcalls.tools import ToolRejected

TO_50 = {"amount": 50}


def amend(world: World, call: Call, arguments: object = None, *, seen: str = "", reason: str = "half is due") -> Call:
    return desk.amend(
        call.pk,
        world.ana,
        arguments_hash=seen or masking.hash_of(world.now(call)),
        arguments=TO_50 if arguments is None else arguments,
        reason=reason,
        channel="desk",
    )


def unchanged(world: World, call: Call) -> None:
    """Nothing was changed: the call still waits, no other was made, nobody has decided."""
    stored = world.now(call)
    assert (stored.status, stored.moves, stored.code) == ("awaiting_approval", 1, "")
    assert not Call.objects.filter(amends=call).exists()
    assert not Decision.objects.exists()


def test_an_amendment_runs_once_with_the_new_arguments_and_both_are_linked(world: World) -> None:
    """F-25, S-B12."""
    tried = Script()
    with a_tool(tried, amend=True) as tool:
        call = world.propose(tool, {"amount": 100}, operation_id="op")
        new = amend(world, call)
        world.run()
    old, new = world.now(call), world.now(new)
    assert (old.status, old.code, old.finished_at is not None) == ("rejected", "AMENDED", True)
    assert old.arguments == '{"amount":100,"name":"x"}', "frozen input never changes"
    assert str(new.pk) in old.message
    assert "half is due" in old.message
    assert (new.status, new.amends_id, new.arguments) == ("succeeded", old.pk, '{"amount":50,"name":"x"}')
    assert (new.turn_id, new.tool, new.deadline) == (old.turn_id, old.tool, old.deadline)
    assert new.tool_call_id not in ("", old.tool_call_id)
    assert [each.arguments.amount for each in tried.entries] == [50]
    assert world.moves(new) == ["proposed", "awaiting_approval", "approved", "executing", "succeeded"]


def test_an_amendment_counts_as_that_persons_approval_of_exactly_this_text(world: World) -> None:
    with a_tool(amend=True, approvers_needed=2) as tool:
        call = world.propose(tool, {"amount": 100})
        new = world.now(amend(world, call))
        assert (new.status, new.requires_approval) == ("awaiting_approval", True)
        made = Decision.objects.get()
        assert (made.call_id, made.user, made.decision, made.reason) == (new.pk, world.ana, "approve", "half is due")
        assert made.arguments_hash == new.arguments_hash
        assert world.approve(new).status == "awaiting_approval", "the same person again"
        assert world.approve(new, by=world.bob).status == "approved"


def test_an_operation_id_stays_with_the_old_call(world: World) -> None:
    with a_tool(amend=True) as tool:
        call = world.propose(tool, {"amount": 100}, operation_id="op")
        new = amend(world, call)
        assert (new.operation_id, new.operation) == ("", f"{tool.name}/arguments/{new.arguments_hash}")
        assert world.propose(tool, {"amount": 50}, operation_id="op").code == "OPERATION_MISMATCH"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"amount": "25.90"}, "INVALID_ARGUMENTS"),  # F-27
        ({"amount": 25.9}, "INVALID_ARGUMENTS"),
        ({"amount": 50, "tool": "delete_customer"}, "INVALID_ARGUMENTS"),  # F-26
        ({"amount": 100}, "INVALID_ARGUMENTS"),  # the same as before
        ('{"amount":1,"amount":2}', "INVALID_JSON"),
        ("[]", "INVALID_JSON"),
        (["amount"], "INVALID_JSON"),
        ({"amount": 501}, "POLICY_LIMIT"),
        ({"amount": 13}, "UNLUCKY"),
        ({"amount": 7}, "DUPLICATE_IN_PROGRESS"),
        ({"amount": 8}, "ALREADY_REJECTED"),
        ({"amount": 9}, "OPERATION_MISMATCH"),
    ],
    ids=repr,
)
def test_a_refused_amendment_says_why_and_changes_nothing(world: World, arguments: object, code: str) -> None:
    with a_tool(amend=True, limits=[{"measure": "amount", "per": "call", "max": 500}]) as tool:

        @tool.check
        def check(given: Any, context: Any) -> None:
            if given.amount == 13:
                raise ToolRejected("UNLUCKY", "Not thirteen.")

        world.propose(tool, {"amount": 7})
        world.reject(world.propose(tool, {"amount": 8}))
        world.approve(world.propose(tool, {"amount": 9}))
        world.run()
        call = world.propose(tool, {"amount": 100})
        rows = Call.objects.count()
        decided = Decision.objects.count()
        with pytest.raises(AmendmentRefused) as refused:
            amend(world, call, arguments)
        assert refused.value.refusal.code == code
        assert refused.value.refusal.message
        assert (Call.objects.count(), Decision.objects.count()) == (rows, decided)
        assert (world.now(call).status, world.now(call).moves) == ("awaiting_approval", 1)
        assert world.approve(call).status == "approved"


def test_an_amendment_waits_for_a_paused_tool(world: World) -> None:
    with a_tool(amend=True) as tool:
        call = world.propose(tool, {"amount": 100})
        lifecycle.pull_brake(team=world.team, tool=tool.name, by="test")
        with pytest.raises(AmendmentRefused) as refused:
            amend(world, call)
        assert refused.value.refusal.code == "PAUSED"
        unchanged(world, call)


def test_an_amendment_needs_no_budget_and_no_open_session_and_takes_no_calls(world: World) -> None:
    session = world.open(calls=1, turns=1)
    with a_tool(amend=True) as tool:
        call = world.propose(tool, {"amount": 100}, session=session)
        lifecycle.close_session(session.pk, by="test")
        assert amend(world, call).status == "approved"
    assert Session.objects.get(pk=session.pk).calls_used == 1


def test_a_tool_that_does_not_allow_it_is_not_amended(world: World) -> None:
    with a_tool() as tool:
        call = world.propose(tool, {"amount": 100})
        with pytest.raises(NotAllowed, match="no amendments"):
            amend(world, call)
        unchanged(world, call)


def test_who_may_not_decide_may_not_amend(world: World) -> None:
    with a_tool(amend=True) as tool:
        call = world.propose(tool, {"amount": 100})
        Membership.objects.filter(user=world.ana).update(may_decide=False)
        with pytest.raises(NotAllowed):
            amend(world, call)
        foreign = a_world().propose(tool, {"amount": 100})
        with pytest.raises(NotVisible):
            desk.amend(
                foreign.pk, world.ana, arguments_hash=foreign.arguments_hash, arguments=TO_50, reason="", channel="desk"
            )
        unchanged(world, call)


@pytest.mark.parametrize(
    ("happens", "code"),
    [
        ("stale", "STALE"),
        ("expired", "EXPIRED"),
        ("cancelled", "CANCELLED"),
        ("approved", "ALREADY_DECIDED"),
        ("rejected", "ALREADY_DECIDED"),
        ("amended", "ALREADY_DECIDED"),
        ("changed", "TOOL_CHANGED"),
    ],
)
def test_an_amendment_that_comes_too_late_is_a_conflict_that_says_what_happened(
    world: World, happens: str, code: str
) -> None:
    """Also where the changed arguments are themselves at fault: the conflict is what matters."""
    with a_tool(amend=True) as tool:
        call = world.propose(tool, {"amount": 100})
        seen = ""
        match happens:
            case "stale":
                seen = "0" * 64
            case "expired":
                let_pass(90_000, call)
            case "cancelled":
                lifecycle.cancel_call(call.pk, by="test")
            case "approved":
                world.approve(call, by=world.bob)
            case "rejected":
                world.reject(call, by=world.bob)
            case "amended":
                amend(world, call)
            case "changed":
                tool.version = "2+other"
        rows = Call.objects.count()
        for arguments in ({"amount": 60}, {"amount": "x"}):
            with pytest.raises(Conflict) as refused:
                amend(world, call, arguments, seen=seen)
            assert refused.value.code == code
        assert Call.objects.count() == rows
        if happens in ("approved", "rejected"):
            assert world.bob.username in refused.value.message
        if happens == "amended":
            assert world.ana.username in refused.value.message


def test_an_amended_call_can_itself_be_amended_or_rejected_while_it_waits(world: World) -> None:
    with a_tool(amend=True, approvers_needed=2) as tool:
        call = world.propose(tool, {"amount": 100})
        new = amend(world, call)
        newer = desk.amend(
            new.pk, world.bob, arguments_hash=masking.hash_of(new), arguments={"amount": 40}, reason="", channel="desk"
        )
        assert (newer.amends_id, newer.status) == (new.pk, "awaiting_approval")
        assert world.approve(newer, by=world.ana).status == "approved"
        assert world.now(new).code == "AMENDED"
