"""The operators' door over REST: what waits, decisions, unknown outcomes. A signed-in session with CSRF, or a personal token."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal
from uuid import UUID

from django.contrib.auth.base_user import AbstractBaseUser
from django.db.models import F, Q
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from pydantic import BeforeValidator, Field
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from approvals import desk
from approvals.models import Decision
from toolcalls.api import bodies, pages, render, views
from toolcalls.api.authentication import IsOperator
from toolcalls.api.problems import NOT_FOUND, Problem
from toolcalls.canonical import MISSING
from toolcalls.filters import moment
from toolcalls.intake import AmendmentRefused
from toolcalls.models import Call, UserToken
from toolcalls.states import Status


def _call_id(value: object) -> object:
    try:
        return UUID(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("it is no call's id") from None


class Answering(bodies.Body):
    """A decision on one call: the hash of the arguments that were shown, and why."""

    arguments_hash: Annotated[bodies.Text, Field(min_length=1, max_length=64)]
    reason: bodies.Reason = ""


class Amending(Answering):
    """An approval with changed arguments of the same tool."""

    arguments: Any = MISSING


class Item(Answering):
    id: Annotated[UUID, BeforeValidator(_call_id)]
    decision: Literal["approve", "reject"]


class Deciding(bodies.Body):
    """An explicit list of calls, each with its hash and its own decision."""

    decisions: Annotated[list[Item], Field(min_length=1, max_length=100)]


class Settling(bodies.Body):
    """What a call of unknown outcome turned out to have done, and how that is known."""

    verdict: Literal["took_effect", "did_not_take_effect", "still_unknown"]
    evidence: Annotated[bodies.Reason, Field(min_length=1)]
    result: Any = None


class RunningAgain(bodies.Body):
    """Why another run is ordered."""

    evidence: Annotated[bodies.Reason, Field(min_length=1)]


class DecidedAnswer(bodies.Answer):
    """What became of each decision, in the order asked."""

    decisions: list[dict[str, Any]]


class OperatorView(APIView):
    """A route for people only."""

    permission_classes: list[type[BasePermission]] = [IsOperator]

    @property
    def user(self) -> AbstractBaseUser:
        user = self.request.user
        assert isinstance(user, AbstractBaseUser)
        return user

    @property
    def channel(self) -> str:
        return Decision.Channel.TOKEN if isinstance(self.request.auth, UserToken) else Decision.Channel.REST

    def decided(self, call_id: UUID, decision: str) -> HttpResponse:
        asked = bodies.read(self.request, Answering)
        with translated():
            call = desk.decide(
                call_id,
                self.user,
                decision=decision,
                arguments_hash=asked.arguments_hash,
                reason=asked.reason,
                channel=self.channel,
            )
        return self.shown(call)

    def shown(self, call: Call) -> HttpResponse:
        return views.answered(self.request, views.one_call(desk.visible(self.user), pk=call.pk))


@contextmanager
def translated() -> Iterator[None]:
    """Turn what the desk raises into problems."""
    try:
        yield
    except desk.NotVisible:
        raise Problem(404, "NOT_FOUND", NOT_FOUND) from None
    except desk.NotAllowed as error:
        raise Problem(403, "FORBIDDEN", str(error)) from None
    except desk.Conflict as error:
        raise Problem(409, error.code, error.message) from None
    except AmendmentRefused as error:
        raise Problem(422, error.refusal.code, error.refusal.message) from None


def page_of(
    request: Request, calls: Any, key: Callable[[Call], tuple[str, ...]], after: Callable[[list[str]], Q], *, parts: int
) -> HttpResponse:
    """Answer with a page of calls in their order, and the cursor of the next."""
    size, cursor = pages.size(request), pages.read(request, parts=parts)
    found = views.filtered(request, calls)
    rows = list((found.filter(after(cursor)) if cursor else found).only("pk", "deadline")[: size + 1])
    following = pages.cursor(*key(rows[size - 1])) if len(rows) > size else None
    return Response({"calls": render.calls([each.pk for each in rows[:size]]), "next": following})


def deadline_key(call: Call) -> tuple[str, ...]:
    return call.deadline.isoformat() if call.deadline else "", str(call.pk)


def after_deadline(cursor: list[str]) -> Q:
    last = views.as_id(cursor[1])
    if not cursor[0]:
        return Q(deadline=None, pk__gt=last)
    at = moment(cursor[0])
    if at is None:
        raise Problem(400, "MALFORMED", "This cursor was not made here.")
    return Q(deadline__gt=at) | Q(deadline=at, pk__gt=last) | Q(deadline=None)


class Approvals(OperatorView):
    @extend_schema(responses={200: bodies.CallPage, **views.problems(403)}, operation_id="waiting_calls", filters=True)
    def get(self, request: Request) -> HttpResponse:
        """List the calls of your teams that wait for a person, oldest deadline first."""
        return page_of(request, waiting(self.user), deadline_key, after_deadline, parts=2)


def waiting(user: AbstractBaseUser) -> Any:
    """Give what waits for a person in this person's teams, oldest deadline first."""
    return desk.visible(user).filter(status=Status.AWAITING_APPROVAL).order_by(F("deadline").asc(nulls_last=True), "pk")


DECIDED: dict[int, Any] = {200: bodies.CallAnswer, **views.problems(403, 404, 409)}


class Approve(OperatorView):
    @extend_schema(request=Answering, responses=DECIDED, operation_id="approve")
    def post(self, request: Request, call_id: UUID) -> HttpResponse:
        """Approve one waiting call; it runs once enough people did."""
        return self.decided(call_id, "approve")


class Reject(OperatorView):
    @extend_schema(request=Answering, responses=DECIDED, operation_id="reject")
    def post(self, request: Request, call_id: UUID) -> HttpResponse:
        """Reject one waiting call; the reason reaches the agent."""
        return self.decided(call_id, "reject")


class Amend(OperatorView):
    @extend_schema(request=Amending, responses={**DECIDED, **views.problems(422)}, operation_id="amend")
    def post(self, request: Request, call_id: UUID) -> HttpResponse:
        """Approve a waiting call with changed arguments. Answers with the new call."""
        asked = bodies.read(request, Amending)
        with translated():
            call = desk.amend(
                call_id,
                self.user,
                arguments_hash=asked.arguments_hash,
                arguments=asked.arguments,
                reason=asked.reason,
                channel=self.channel,
            )
        return self.shown(call)


class DecideSeveral(OperatorView):
    @extend_schema(request=Deciding, responses={200: DecidedAnswer, **views.problems(403)}, operation_id="decide")
    def post(self, request: Request) -> HttpResponse:
        """Decide an explicit list of calls; each answers for itself."""
        asked = bodies.read(request, Deciding)
        wanted = [desk.Wanted(each.id, each.decision, each.arguments_hash, each.reason) for each in asked.decisions]
        answers = desk.decide_several(wanted, self.user, channel=self.channel)
        return Response(
            {
                "decisions": [
                    {"id": str(each.call), "ok": not each.code, "code": each.code or "OK", "detail": each.message}
                    for each in answers
                ]
            }
        )


class UnknownOutcomes(OperatorView):
    @extend_schema(
        responses={200: bodies.CallPage, **views.problems(403)}, operation_id="unknown_outcomes", filters=True
    )
    def get(self, request: Request) -> HttpResponse:
        """List the calls of your teams whose outcome is unknown, the oldest first."""
        return page_of(
            request,
            unknown(self.user),
            lambda call: (str(call.pk),),
            lambda cursor: Q(pk__gt=views.as_id(cursor[0])),
            parts=1,
        )


def unknown(user: AbstractBaseUser) -> Any:
    """Give what is of unknown outcome in this person's teams, the oldest first."""
    return desk.visible(user).filter(status=Status.OUTCOME_UNKNOWN).order_by("pk")


class Settle(OperatorView):
    @extend_schema(request=Settling, responses=DECIDED, operation_id="settle")
    def post(self, request: Request, call_id: UUID) -> HttpResponse:
        """Settle a call of unknown outcome with evidence, or leave it with a note."""
        asked = bodies.read(request, Settling)
        with translated():
            call = desk.settle(
                call_id,
                self.user,
                verdict=asked.verdict,
                evidence=asked.evidence,
                result=asked.result,
                channel=self.channel,
            )
        return self.shown(call)


class RunAgain(OperatorView):
    @extend_schema(request=RunningAgain, responses=DECIDED, operation_id="run_again")
    def post(self, request: Request, call_id: UUID) -> HttpResponse:
        """Order another run of a call of unknown outcome, under the same key."""
        asked = bodies.read(request, RunningAgain)
        with translated():
            call = desk.run_again(call_id, self.user, evidence=asked.evidence, channel=self.channel)
        return self.shown(call)
