"""What a person may do with a call, and doing it: permission, freshness, row, lifecycle verb (behaviour, sections 7 and 9).

``actions`` is the one list: buttons, API and the checks themselves read it. Identity and time come from the server alone. A
decision names one call and the hash of the arguments that the person saw; the database's clock, read once the row is
locked, says whether it came in time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth.base_user import AbstractBaseUser
from django.db import transaction

from approvals.models import Decision, Reconciliation
from toolcalls import intake, lifecycle, masking, policy, tools
from toolcalls.canonical import canonical_text
from toolcalls.models import Call, Membership, Session
from toolcalls.states import Status

APPROVE, REJECT = Decision.Verdict.APPROVE, Decision.Verdict.REJECT


class NotVisible(Exception):
    """No call of this ID is in the person's teams; it may or may not exist."""


class NotAllowed(Exception):
    """The person sees the call and may not do this; the text says why."""


class Conflict(Exception):
    """What the person wanted is not possible any more; nothing was changed. ``code`` is the interface's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class Action:
    """Something a person could do with a call as it stands: ``name``, and why this person may not, or empty."""

    name: str
    refused: str = ""


def actor(user: AbstractBaseUser) -> str:
    """Name a person as the journal does."""
    return f"user:{user.get_username()}"


def membership(user: AbstractBaseUser, call: Call) -> Membership | None:
    return Membership.objects.filter(user_id=user.pk, team_id=call.team_id).first()


def actions(call: Call, user: AbstractBaseUser) -> list[Action]:
    """List what can be done with a call as it stands, and for each whether this person may."""
    member = membership(user, call)
    if member is None or not user.is_active:
        return []
    found = []
    if call.status == Status.AWAITING_APPROVAL:
        decides = "" if member.may_decide else "You may not decide in this team."
        found.append(Action("approve", decides or _why_not_approve(call, user)))
        found.append(Action("reject", decides))
        if policy.thaw(call.policy).amend:
            found.append(Action("amend", decides or _why_not_approve(call, user)))
    if call.status in (Status.AWAITING_APPROVAL, Status.APPROVED, Status.EXECUTING):
        found.append(Action("cancel", "" if member.may_decide else "You may not decide in this team."))
    if call.status == Status.OUTCOME_UNKNOWN:
        found.append(Action("settle", "" if member.may_reconcile else "You may not reconcile in this team."))
        found.append(Action("run_again", "" if member.may_run_again else "You may not order another run in this team."))
    return found


def _why_not_approve(call: Call, user: AbstractBaseUser) -> str:
    frozen = policy.thaw(call.policy)
    asked = call.agent.owner_id == user.pk or call.session.on_behalf_of == user.get_username()
    if asked and not frozen.requester_may_approve:
        return "You are the one this call is made for; somebody else must approve it."
    if frozen.group and not user.groups.filter(name=frozen.group).exists():  # type: ignore[attr-defined]
        return f"Only members of {frozen.group} may approve this."
    return ""


def _insist(call: Call, user: AbstractBaseUser, name: str) -> None:
    refused = next((each.refused for each in actions(call, user) if each.name == name), None)
    if refused is None and name == "amend" and call.status == Status.AWAITING_APPROVAL:
        raise NotAllowed("The policy of this tool allows no amendments.")
    if refused is None:
        raise Conflict("WRONG_STATE", f"The call is {call.status}; this is not possible now.")
    if refused:
        raise NotAllowed(refused)


def visible(user: AbstractBaseUser) -> Any:
    """Give the calls that this person may see."""
    return Call.objects.of_operator(user)


def _lock(call: UUID, user: AbstractBaseUser, *, session_too: bool = False) -> Call:
    """Lock a call that this person may see, and before it its session where that is wanted."""
    seen = visible(user).filter(pk=call).values_list("session_id", flat=True).first()
    if seen is None:
        raise NotVisible
    if session_too:
        Session.objects.select_for_update(no_key=True).get(pk=seen)
    return lifecycle.lock(call)


# -- deciding


def decide(
    call: UUID, user: AbstractBaseUser, *, decision: str, arguments_hash: str, reason: str, channel: str
) -> Call:
    """Answer a waiting call. The same answer again by the same person changes nothing.

    Raises NotVisible, NotAllowed, and Conflict that says what happened instead.
    """
    verdict = Decision.Verdict(decision)
    with transaction.atomic():
        row = _lock(call, user)
        at = lifecycle.clock()
        earlier = row.decisions.filter(user_id=user.pk).first()
        if earlier is not None and earlier.decision == verdict and arguments_hash == masking.hash_of(row):
            return row
        conflict = _why_too_late(row, at=at, earlier=earlier)
        if conflict is None:
            _insist(row, user, verdict)
            conflict = _why_stale(row, arguments_hash, approves=verdict == APPROVE)
        if conflict is None:
            made = Decision.objects.create(
                call=row,
                user_id=user.pk,
                decision=verdict,
                reason=reason,
                arguments_hash=row.arguments_hash,
                channel=channel,
                at=at,
            )
            _carry_out(row, made, by=actor(user), at=at)
        else:
            lifecycle.note(
                row,
                "decision.refused",
                by=actor(user),
                code=conflict.code,
                detail={"decision": verdict, "reason": reason},
            )
    if conflict is not None:
        raise conflict
    return row


def _carry_out(call: Call, made: Decision, *, by: str, at: datetime) -> None:
    detail = {
        "decision": made.decision,
        "reason": made.reason,
        "arguments_hash": made.arguments_hash,
        "channel": made.channel,
    }
    if made.decision == REJECT:
        message = (
            f"A person rejected this call{f': {made.reason}' if made.reason else '.'} Do not retry or work around it."
        )
        lifecycle.reject(call, by=by, at=at, code="APPROVAL_REJECTED", message=message, detail=detail)
    elif call.approvers_needed == 1 or len(_standing_approvals(call)) >= call.approvers_needed:
        lifecycle.approve(call, by=by, at=at, detail=detail)
    else:
        lifecycle.note(call, "approval.counted", by=by, detail=detail)


def _standing_approvals(call: Call) -> list[Decision]:
    """Weigh all approvals again at the last click: who may not approve any more does not count."""
    approvals = Decision.objects.filter(call=call, decision=APPROVE).select_related("user")
    return [each for each in approvals if any(a.name == "approve" and not a.refused for a in actions(call, each.user))]


def _why_too_late(call: Call, *, at: datetime, earlier: Decision | None) -> Conflict | None:
    if call.status == Status.AWAITING_APPROVAL:
        if call.deadline is not None and at > call.deadline:
            lifecycle.expire(call, at=at)
            return Conflict("EXPIRED", f"The deadline passed at {_shown(call.deadline)}; the call did not run.")
        if earlier is not None:
            return Conflict("ALREADY_DECIDED", f"You decided {earlier.decision} at {_shown(earlier.at)}.")
        return None
    if call.code == "APPROVAL_EXPIRED":
        return Conflict("EXPIRED", f"The deadline passed at {_shown(call.deadline)}; the call did not run.")
    if call.code == "CANCELLED":
        return Conflict("CANCELLED", f"The call was cancelled at {_shown(call.finished_at)}.")
    if call.code == "AMENDED":
        made = call.amended_by.decisions.select_related("user").earliest("at")
        said = f"{made.user.get_username()} amended the call at {_shown(made.at)}"
        return Conflict("ALREADY_DECIDED", f"{said}; see call {made.call_id}.")
    last = Decision.objects.filter(call=call).select_related("user").order_by("-at").first()
    if last is not None:
        said = f"{last.user.get_username()} decided {last.decision} at {_shown(last.at)}"
        return Conflict("ALREADY_DECIDED", f"{said}; the call is {call.status}.")
    return Conflict("WRONG_STATE", f"The call is {call.status}; there is nothing to decide.")


def _why_stale(call: Call, arguments_hash: str, *, approves: bool) -> Conflict | None:
    if arguments_hash != masking.hash_of(call):
        return Conflict("STALE", "These are not the arguments of this call; open it again and read them.")
    found = tools.find(call.tool)
    if approves and (found is None or found.version != call.tool_version):
        now = f"is {found.version} now" if found else "is gone"
        return Conflict("TOOL_CHANGED", f"The call was made for {call.tool} {call.tool_version}, which {now}.")
    return None


def _shown(at: datetime | None) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S %Z") if at else "an unknown time"


def amend(
    call: UUID, user: AbstractBaseUser, *, arguments_hash: str, arguments: object, reason: str, channel: str
) -> Call:
    """Approve a waiting call with changed arguments: a new call, linked both ways, counts this as the person's approval.

    Raises what ``decide`` raises, and intake.AmendmentRefused; then nothing is changed.
    """
    # What can be told without I/O is told first, and again when the tool's own check has been asked.
    with transaction.atomic():
        conflict = _why_not_amend(_lock(call, user), user, arguments_hash, at=lifecycle.clock())
    if conflict is not None:
        raise conflict
    seen = visible(user).select_related("session", "turn", "agent__team").get(pk=call)
    examined, checked = intake.examine_amendment(seen, arguments)
    with transaction.atomic():
        row = _lock(call, user, session_too=True)
        at = lifecycle.clock()
        conflict = _why_not_amend(row, user, arguments_hash, at=at)
        if conflict is None:
            new = intake.amend(row, examined, checked, by=actor(user))
            message = f"A person changed the arguments; see call {new.pk}.{f' {reason}' if reason else ''}"
            detail = {"reason": reason, "amended_to": str(new.pk)}
            lifecycle.reject(row, by=actor(user), at=at, code="AMENDED", message=message, detail=detail)
            made = Decision.objects.create(
                call=new,
                user_id=user.pk,
                decision=APPROVE,
                reason=reason,
                arguments_hash=new.arguments_hash,
                channel=channel,
                at=at,
            )
            _carry_out(new, made, by=actor(user), at=at)
    if conflict is not None:
        raise conflict
    return new


def _why_not_amend(call: Call, user: AbstractBaseUser, arguments_hash: str, *, at: datetime) -> Conflict | None:
    conflict = _why_too_late(call, at=at, earlier=call.decisions.filter(user_id=user.pk).first())
    if conflict is None:
        _insist(call, user, "amend")
        conflict = _why_stale(call, arguments_hash, approves=True)
    return conflict


def cancel(call: UUID, user: AbstractBaseUser) -> Call:
    """Cancel an unfinished call. Raises NotVisible, NotAllowed, Conflict."""
    with transaction.atomic():
        row = _lock(call, user)
        _insist(row, user, "cancel")
        lifecycle.cancel(row, by=actor(user), at=lifecycle.clock())
        return row


@dataclass(frozen=True)
class Wanted:
    """One item of a list of decisions."""

    call: UUID
    decision: str
    arguments_hash: str
    reason: str = ""


@dataclass(frozen=True)
class Answer:
    """What became of one item: ``code`` is empty where it was carried out."""

    call: UUID
    code: str = ""
    message: str = ""


def decide_several(wanted: Sequence[Wanted], user: AbstractBaseUser, *, channel: str) -> list[Answer]:
    """Decide an explicit list of calls; each answers for itself, and no other call is touched."""
    return [_answer(each, user, channel=channel) for each in wanted]


def _answer(each: Wanted, user: AbstractBaseUser, *, channel: str) -> Answer:
    try:
        decide(
            each.call,
            user,
            decision=each.decision,
            arguments_hash=each.arguments_hash,
            reason=each.reason,
            channel=channel,
        )
    except NotVisible:
        return Answer(each.call, "NOT_FOUND", "There is nothing here that you may see.")
    except NotAllowed as error:
        return Answer(each.call, "FORBIDDEN", str(error))
    except Conflict as error:
        return Answer(each.call, error.code, error.message)
    return Answer(each.call)


# -- reconciling


def settle(
    call: UUID, user: AbstractBaseUser, *, verdict: str, evidence: str, result: object = None, channel: str
) -> Call:
    """Settle a call of unknown outcome on a person's word and evidence, or leave it with a note.

    The same settlement again by the same person changes nothing. Raises NotVisible, NotAllowed, Conflict.
    """
    chosen = Reconciliation.Verdict(verdict)

    def carry_out(row: Call, at: datetime, detail: dict[str, Any]) -> None:
        if chosen == Reconciliation.Verdict.STILL_UNKNOWN:
            lifecycle.note(row, "reconciliation.noted", by=actor(user), detail=detail)
        else:
            took_effect = chosen == Reconciliation.Verdict.TOOK_EFFECT
            lifecycle.settle(row, took_effect=took_effect, by=actor(user), at=at, detail=detail, result=text)

    text = canonical_text(result) if result is not None else None
    return _reconcile(
        call, user, chosen, evidence=evidence, result=text, channel=channel, action="settle", carry_out=carry_out
    )


def run_again(call: UUID, user: AbstractBaseUser, *, evidence: str, channel: str) -> Call:
    """Order another run of a call of unknown outcome, under the same key. Raises NotVisible, NotAllowed, Conflict."""

    def carry_out(row: Call, at: datetime, detail: dict[str, Any]) -> None:
        found = tools.find(row.tool)
        if found is None or found.version != row.tool_version:
            raise Conflict(
                "TOOL_CHANGED", f"The call was made for {row.tool} {row.tool_version}, which this is no more."
            )
        lifecycle.run_again(row, by=actor(user), at=at, detail=detail)

    chosen = Reconciliation.Verdict.RUN_AGAIN
    return _reconcile(
        call, user, chosen, evidence=evidence, result=None, channel=channel, action="run_again", carry_out=carry_out
    )


def _reconcile(
    call: UUID,
    user: AbstractBaseUser,
    verdict: Reconciliation.Verdict,
    *,
    evidence: str,
    result: str | None,
    channel: str,
    action: str,
    carry_out: Callable[[Call, datetime, dict[str, Any]], None],
) -> Call:
    with transaction.atomic():
        row = _lock(call, user)
        at = lifecycle.clock()
        if row.status != Status.OUTCOME_UNKNOWN:
            last = Reconciliation.objects.filter(call=row).select_related("user").order_by("-at").first()
            if last is not None and (last.user_id, last.verdict) == (user.pk, verdict):
                return row
            said = f"{last.user.get_username()} said {last.verdict} at {_shown(last.at)}; " if last else ""
            raise Conflict("ALREADY_DECIDED" if last else "WRONG_STATE", f"{said}the call is {row.status}.")
        _insist(row, user, action)
        Reconciliation.objects.create(
            call=row, user_id=user.pk, verdict=verdict, evidence=evidence, result=result, channel=channel, at=at
        )
        carry_out(row, at, {"verdict": verdict, "evidence": evidence, "channel": channel})
        return row


def teams_of(user: AbstractBaseUser) -> list[Membership]:
    """List the teams that this person is a member of."""
    return list(Membership.objects.filter(user_id=user.pk).select_related("team").order_by("team__name"))
