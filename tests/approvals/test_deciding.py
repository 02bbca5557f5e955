"""A person's answer to a waiting call (behaviour, section 7)."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Group, User

from approvals import desk
from approvals.desk import Conflict, NotAllowed, NotVisible, Wanted
from approvals.models import Decision
from tests.worlds import Script, World, a_tool, a_world, let_pass
from toolcalls import directory, lifecycle, masking, tools
from toolcalls.models import Attempt, Call, Membership
from toolcalls.sweeps import sweep

PAST = 90_000


def conflict(world: World, call: Call, decision: str, *, by: User | None = None, seen: str = "") -> Conflict:
    """Try to decide; what conflicts changes nothing of the call but what time itself has changed."""
    with pytest.raises(Conflict) as refused:
        world.decide(call, decision, by=by, hash=seen)
    return refused.value


def lines(world: World, call: Call, event: str) -> list[Any]:
    return [line for line in world.journal(call) if line.event == event]


def test_an_approved_call_runs_with_the_arguments_that_were_recorded(world: World) -> None:
    """S-B01, S-B18, F-10."""
    tried = Script()
    with a_tool(tried) as tool:
        calls = [world.propose(tool, {"amount": n}) for n in (1, 2, 3)]
        world.approve(calls[1], reason="fine")
        world.run()
    assert [world.now(each).status for each in calls] == ["awaiting_approval", "succeeded", "awaiting_approval"]
    assert [each.arguments.amount for each in tried.entries] == [2]
    made = Decision.objects.get()
    assert (made.call_id, made.user, made.decision, made.reason, made.channel) == (
        calls[1].pk,
        world.ana,
        "approve",
        "fine",
        "desk",
    )
    assert made.arguments_hash == calls[1].arguments_hash
    (line,) = [each for each in world.journal(calls[1]) if each.target == "approved"]
    assert line.actor == f"user:{world.ana.username}"
    assert calls[1].arguments_hash in (line.detail or "")


def test_a_rejected_call_is_never_entered_and_its_reason_reaches_the_agent(world: World) -> None:
    """S-B02, S-B17, F-93."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        world.reject(call, reason="Wrong customer 🙂\n<b>look</b>")
        world.run()
        stored = world.now(call)
        assert (stored.status, stored.code, stored.finished_at is not None) == ("rejected", "APPROVAL_REJECTED", True)
        assert "Wrong customer 🙂\n<b>look</b>" in stored.message
        assert "Do not retry" in stored.message, "F-41"
        assert world.propose(tool, {"amount": 1}).status == "awaiting_approval", "the session lives"
    assert tried.applied == 0
    assert Decision.objects.get().reason == "Wrong customer 🙂\n<b>look</b>"


# -- deadlines


@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_an_answer_after_the_deadline_loses_by_the_databases_clock_without_a_sweep(world: World, decision: str) -> None:
    """S-B10, F-35: and the late answer stays in the journal."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        let_pass(PAST, call)
        assert conflict(world, call, decision).code == "EXPIRED"
        assert conflict(world, call, decision).code == "EXPIRED"
        world.run()
    stored = world.now(call)
    assert (stored.status, stored.code) == ("rejected", "APPROVAL_EXPIRED")
    assert tried.applied == 0
    assert not Decision.objects.exists()
    assert [each.actor for each in world.journal(call) if each.target == "rejected"] == ["system"], "F-39"
    late = lines(world, call, "decision.refused")
    assert [(each.code, each.actor) for each in late] == [("EXPIRED", f"user:{world.ana.username}")] * 2


def test_a_deadline_that_nobody_answers_ends_the_call_by_the_sweep(world: World) -> None:
    """S-B03, F-39, F-41."""
    with a_tool() as tool:
        late, early = world.propose(tool, {"amount": 1}), world.propose(tool, {"amount": 2})
        let_pass(PAST, late)
        sweep()
        sweep()
        stored = world.now(late)
        assert (stored.status, stored.code) == ("rejected", "APPROVAL_EXPIRED")
        assert "did not run" in stored.message
        assert world.moves(late) == ["proposed", "awaiting_approval", "rejected"]
        assert world.now(early).status == "awaiting_approval"
        assert world.approve(early).status == "approved"
    assert not Decision.objects.filter(call=late).exists()


def test_a_call_without_a_deadline_waits_without_limit(world: World) -> None:
    """S-B04: and holds no worker meanwhile."""
    with a_tool(deadline="none") as tool:
        call = world.propose(tool)
        let_pass(10**8, call)
        sweep()
        assert world.now(call).alarm_at is None
        assert not Attempt.objects.exists()
        assert world.approve(call).status == "approved"


def test_one_pass_expires_a_bounded_number_of_each_team_and_starves_none(world: World) -> None:
    """F-38, in kind: two teams, more than one team's share of a batch."""
    other = a_world()
    with a_tool() as tool:
        many = [world.propose(tool, {"amount": n}, session=world.open()) for n in range(4)]
        one = other.propose(tool)
        let_pass(PAST, *many, one)
        sweep(seconds=30)
    assert {each.code for each in Call.objects.all()} == {"APPROVAL_EXPIRED"}


# -- what makes a decision too late, stale or wrong


@pytest.mark.parametrize("decision", ["approve", "reject"])
@pytest.mark.parametrize("seen", ["0" * 64, "x"])
def test_a_stale_hash_changes_nothing(world: World, decision: str, seen: str) -> None:
    """F-08."""
    with a_tool() as tool:
        call = world.propose(tool)
        assert conflict(world, call, decision, seen=seen).code == "STALE"
        assert (world.now(call).status, world.now(call).moves) == ("awaiting_approval", 1)
        assert not Decision.objects.exists()
        assert world.approve(call).status == "approved"


def test_the_hash_of_another_call_does_not_answer_this_one(world: World) -> None:
    """S-B07, S-B13, F-08."""
    with a_tool() as tool:
        one, other = world.propose(tool, {"amount": 1}), world.propose(tool, {"amount": 2})
        assert conflict(world, other, "approve", seen=masking.hash_of(one)).code == "STALE"
        world.reject(one)
        assert conflict(world, one, "approve").code == "ALREADY_DECIDED"
    assert world.now(other).status == "awaiting_approval"


@pytest.mark.parametrize("first", ["approve", "reject"])
@pytest.mark.parametrize("run", [False, True])
def test_the_same_decision_again_by_the_same_person_changes_nothing(world: World, first: str, run: bool) -> None:
    """S-B05, F-01: and the tool ran once."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        world.decide(call, first)
        if run:
            world.run()
        before = world.now(call)
        again = world.decide(call, first, reason="another reason")
        world.run()
        assert (again.status, again.moves) == (before.status, before.moves)
    assert tried.applied == (first == "approve")
    assert Decision.objects.get().reason == ""


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [
        ("approve", "reject", "same person"),
        ("reject", "approve", "same person"),
        *[(one, other, "another") for one in ("approve", "reject") for other in ("approve", "reject")],
    ],
)
def test_any_other_second_decision_is_told_who_decided_and_when(
    world: World, first: str, second: str, who: str
) -> None:
    """F-01: the same person's other word, or another person's any word."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        world.decide(call, first)
        refused = conflict(world, call, second, by=world.ana if who == "same person" else world.bob)
        assert refused.code == "ALREADY_DECIDED"
        made = Decision.objects.get()
        assert world.ana.username in refused.message
        assert f"decided {first}" in refused.message
        assert made.at.strftime("%Y-%m-%d %H:%M:%S") in refused.message
        world.run()
    assert tried.applied == (first == "approve")


def test_a_cancelled_call_can_no_longer_be_approved(world: World) -> None:
    """S-G01, F-07."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        lifecycle.cancel_turn(world.session.pk, world.now(call).turn_id, by="test")
        assert conflict(world, call, "approve").code == "CANCELLED"
        world.run()
    assert world.now(call).status == "rejected"
    assert tried.applied == 0


@pytest.mark.parametrize("change", ["version", "schema", "gone"])
def test_a_tool_that_changed_since_is_not_approved_and_may_be_rejected(world: World, change: str) -> None:
    """F-32: never new code with old arguments."""
    with a_tool() as tool:
        call = world.propose(tool)
        if change == "gone":
            tools._registry.pop(tool.name)
        else:
            tool.version = tool.version.replace("1+", "2+") if change == "version" else "1+another"
        refused = conflict(world, call, "approve")
        assert refused.code == "TOOL_CHANGED"
        assert tool.name in refused.message
        assert world.now(call).status == "awaiting_approval"
        assert world.reject(call).status == "rejected"


def test_a_call_that_never_waited_cannot_be_decided(world: World) -> None:
    with a_tool(effect="read") as tool:
        call = world.propose(tool)
        assert conflict(world, call, "approve").code == "WRONG_STATE"
        assert conflict(world, call, "reject").code == "WRONG_STATE"
    assert world.now(call).status == "approved"


@pytest.mark.parametrize("word", ["", "yes", "Approve", "approve ", "deny", "true"])
def test_anything_but_the_two_words_is_no_decision(world: World, word: str) -> None:
    """F-15."""
    with a_tool() as tool:
        call = world.propose(tool)
        with pytest.raises(ValueError, match="not a valid"):
            world.decide(call, word)
    assert world.now(call).status == "awaiting_approval"


# -- who may


def test_a_member_without_the_right_may_not_decide(world: World) -> None:
    """F-86: weighed at the click."""
    with a_tool() as tool:
        call = world.propose(tool)
        Membership.objects.filter(user=world.ana).update(may_decide=False)
        for decision in ("approve", "reject"):
            with pytest.raises(NotAllowed):
                world.decide(call, decision)
    assert world.now(call).status == "awaiting_approval"


@pytest.mark.parametrize("change", ["no member any more", "another team", "deactivated"])
def test_who_is_not_of_the_team_sees_nothing_to_decide(world: World, change: str) -> None:
    """F-88, F-86."""
    with a_tool() as tool:
        call = world.propose(tool)
        person = world.ana
        if change == "no member any more":
            Membership.objects.filter(user=world.ana).delete()
        elif change == "another team":
            person = a_world().ana
        else:
            User.objects.filter(pk=person.pk).update(is_active=False)
            person.refresh_from_db()
        with pytest.raises((NotVisible, Conflict, NotAllowed)):
            world.decide(call, "approve", by=person)
        assert not [each for each in desk.actions(world.now(call), person) if not each.refused]
    assert world.now(call).status == "awaiting_approval"
    assert not Decision.objects.exists()


def _own(world: World) -> None:
    world.agent.owner = world.ana
    world.agent.save()


def _act_for(world: World) -> None:
    world.session = world.open(on_behalf_of=world.ana.username)


@pytest.mark.parametrize("make", [_own, _act_for])
@pytest.mark.parametrize("allowed", [False, True])
def test_who_the_call_is_made_for_may_not_approve_unless_policy_says_so(
    world: World, make: Callable[[World], None], allowed: bool
) -> None:
    make(world)
    with a_tool(requester_may_approve=allowed, amend=True) as tool:
        call = world.propose(tool)
        if allowed:
            assert world.approve(call).status == "approved"
            return
        with pytest.raises(NotAllowed, match="somebody else"):
            world.approve(call)
        with pytest.raises(NotAllowed):
            desk.amend(
                call.pk,
                world.ana,
                arguments_hash=call.arguments_hash,
                arguments={"amount": 5},
                reason="",
                channel="desk",
            )
        assert world.now(call).status == "awaiting_approval"
        assert world.approve(call, by=world.bob).status == "approved"
        other = world.propose(tool, {"amount": 9})
        assert world.reject(other).status == "rejected", "to reject one's own is no danger"


def test_a_named_group_approves_and_anybody_rejects(world: World) -> None:
    with a_tool(group="finance") as tool:
        call = world.propose(tool)
        with pytest.raises(NotAllowed, match="finance"):
            world.approve(call)
        world.ana.groups.add(Group.objects.create(name="finance"))
        assert world.approve(call).status == "approved"
        other = world.propose(tool, {"amount": 1})
        assert world.reject(other, by=world.bob).status == "rejected"


def _third(world: World) -> User:
    user: User = directory.create_operator("cleo", team=world.team, may=["decide"], by="test")[0]
    return user


def test_as_many_distinct_people_as_the_policy_says_must_approve(world: World) -> None:
    tried = Script()
    with a_tool(tried, approvers_needed=2) as tool:
        call = world.propose(tool)
        assert world.approve(call).status == "awaiting_approval"
        assert world.approve(call).status == "awaiting_approval", "one person is one person"
        world.run()
        assert tried.applied == 0
        assert world.approve(call, by=world.bob).status == "approved"
        world.run()
    assert tried.applied == 1
    assert len(lines(world, call, "approval.counted")) == 1


def test_one_reject_ends_it_whatever_others_said(world: World) -> None:
    with a_tool(approvers_needed=2) as tool:
        call = world.propose(tool)
        world.approve(call)
        assert world.reject(call, by=world.bob).status == "rejected"
        assert conflict(world, call, "approve", by=_third(world)).code == "ALREADY_DECIDED"


@pytest.mark.parametrize("loses", ["right", "membership", "group", "account"])
def test_an_approval_is_weighed_again_at_the_last_click(world: World, loses: str) -> None:
    finance = Group.objects.create(name="finance")
    cleo = _third(world)
    for each in (world.ana, world.bob, cleo):
        each.groups.add(finance)
    with a_tool(approvers_needed=2, group="finance") as tool:
        call = world.propose(tool)
        world.approve(call)
        match loses:
            case "right":
                Membership.objects.filter(user=world.ana).update(may_decide=False)
            case "membership":
                Membership.objects.filter(user=world.ana).delete()
            case "group":
                world.ana.groups.clear()
            case "account":
                User.objects.filter(pk=world.ana.pk).update(is_active=False)
        assert world.approve(call, by=world.bob).status == "awaiting_approval"
        assert world.approve(call, by=cleo).status == "approved"


def test_approval_is_not_authorisation(world: World) -> None:
    """F-14, F-20: what the agent may not do any more is not run, approved or not."""
    tried = Script()
    with a_tool(tried) as tool:
        call = world.propose(tool)
        world.approve(call)
        world.agent.tools = ["get_*"]
        world.agent.save()
        world.run()
    stored = world.now(call)
    assert (stored.status, stored.code, tried.applied) == ("failed", "PERMISSION_WITHDRAWN", 0)


def test_after_its_approval_a_call_must_start_in_time(world: World) -> None:
    """F-05, S-D01: "did not run"."""
    tried = Script()
    with a_tool(tried, start_within=60) as tool:
        call = world.propose(tool)
        world.approve(call)
        let_pass(61, call)
        sweep()
        world.run()
    stored = world.now(call)
    assert (stored.status, stored.code, tried.applied) == ("failed", "NOT_STARTED_IN_TIME", 0)
    assert stored.message.startswith("The tool did not run, so it is safe to call again")


# -- several at once


def test_several_decisions_each_answer_for_themselves(world: World) -> None:
    """F-84: one expired, one cancelled, one decided by somebody else, one foreign, one stale; a new arrival is not swept in."""
    tried = Script()
    other = a_world()
    with a_tool(tried) as tool:
        good, no, expired, cancelled, taken, stale, new = (world.propose(tool, {"amount": n}) for n in range(7))
        foreign = other.propose(tool)
        let_pass(PAST, expired)
        lifecycle.cancel_call(cancelled.pk, by="test")
        world.reject(taken, by=world.bob)
        asked = [
            Wanted(good.pk, "approve", good.arguments_hash, "fine"),
            Wanted(expired.pk, "approve", expired.arguments_hash),
            Wanted(cancelled.pk, "approve", cancelled.arguments_hash),
            Wanted(taken.pk, "approve", taken.arguments_hash),
            Wanted(stale.pk, "approve", "0" * 64),
            Wanted(foreign.pk, "approve", foreign.arguments_hash),
            Wanted(no.pk, "reject", no.arguments_hash),
        ]
        answers = desk.decide_several(asked, world.ana, channel="desk")
        world.run()
    codes = ["", "EXPIRED", "CANCELLED", "ALREADY_DECIDED", "STALE", "NOT_FOUND", ""]
    assert [(each.call, each.code) for each in answers] == [
        (one.call, code) for one, code in zip(asked, codes, strict=True)
    ]
    assert [world.now(each).status for each in (good, no, stale, new)] == [
        "succeeded",
        "rejected",
        "awaiting_approval",
        "awaiting_approval",
    ]
    assert other.now(foreign).status == "awaiting_approval"
    assert [each.arguments.amount for each in tried.entries] == [0]
    assert Decision.objects.filter(user=world.ana).count() == 2


# -- what may be done, in one list


def test_the_list_of_actions_follows_state_and_rights(world: World) -> None:
    def names(call: Call, person: User) -> dict[str, bool]:
        return {each.name: not each.refused for each in desk.actions(world.now(call), person)}

    with a_tool(amend=True) as tool:
        call = world.propose(tool)
        assert names(call, world.ana) == {"approve": True, "reject": True, "amend": True, "cancel": True}
        Membership.objects.filter(user=world.ana).update(may_decide=False)
        assert names(call, world.ana) == {"approve": False, "reject": False, "amend": False, "cancel": False}
        world.reject(call, by=world.bob)
        assert names(call, world.bob) == {}
        assert names(call, a_world().ana) == {}


def test_an_operator_may_cancel_what_has_not_ended(world: World) -> None:
    with a_tool() as tool:
        call = world.propose(tool)
        assert desk.cancel(call.pk, world.ana).status == "rejected"
        with pytest.raises(Conflict):
            desk.cancel(call.pk, world.ana)
        other = a_world().propose(tool)
        with pytest.raises(NotVisible):
            desk.cancel(other.pk, world.ana)
