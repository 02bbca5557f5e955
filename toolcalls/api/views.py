"""The agents' door. Each view makes one call inward and translates the answer."""

import functools
import re
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from toolcalls import intake, lifecycle, permissions, tools
from toolcalls.api import bodies, pages, render
from toolcalls.api.authentication import AgentPrincipal, IsAgent, IsAnyone, KeyAuthentication
from toolcalls.api.door import HOLDS, Waiting
from toolcalls.api.problems import Problem, body
from toolcalls.canonical import canonical_text, check_id, digest
from toolcalls.filters import CallFilter
from toolcalls.intake import Answered, Mismatch, NoSuchSession, Opening
from toolcalls.models import Agent, Call, CallQuerySet, Session, Turn, new_id
from toolcalls.pipeline import Proposal
from toolcalls.states import ANSWERED

LONGEST_WAIT = 60
_PREFER = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})(?=$|[,;\s])")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

PROBLEM = bodies.ProblemAnswer
WAIT = OpenApiParameter(
    "wait",
    int,
    description=f"Hold the answer until the call is final, up to this many seconds ({LONGEST_WAIT} at most).",
)
PREFER = OpenApiParameter(
    "Prefer", str, OpenApiParameter.HEADER, description="`wait=N`: hold the answer up to N seconds."
)


def problems(*statuses: int) -> dict[int, type[bodies.ProblemAnswer]]:
    """Name the problems of a route for its schema; 400 and 401 go with every one."""
    return dict.fromkeys((400, 401, *statuses), PROBLEM)


class AgentView(APIView):
    """A route for agents only."""

    authentication_classes = [KeyAuthentication]
    permission_classes: list[type[BasePermission]] = [IsAgent]

    def initial(self, request: Request, *args: Any, **named: Any) -> None:
        """Refuse an address that names what can be no ID, once the caller is known."""
        super().initial(request, *args, **named)
        for name, value in named.items():
            if isinstance(value, str):
                check_id(value, what=name)

    @property
    def agent(self) -> Agent:
        principal = self.request.user
        assert isinstance(principal, AgentPrincipal)
        return principal.agent

    @property
    def actor(self) -> str:
        return intake.actor(self.agent)

    def own_session(self, name: str) -> Session:
        """Find the agent's session of this name. Raises NoSuchSession."""
        found = Session.objects.filter(agent=self.agent, session_id=name).first()
        if found is None:
            raise NoSuchSession
        return found

    def own_turn(self, session: Session, name: str) -> Turn:
        found = Turn.objects.filter(session=session, turn_id=name).first()
        if found is None:
            raise NoSuchSession
        return found

    def own_call(self, **where: Any) -> UUID:
        return one_call(Call.objects.of_agent(self.agent), **where)


def one_call(visible: CallQuerySet, **where: Any) -> UUID:
    """Find one call among those that the caller may see. Raises NoSuchSession, which is a 404 like any other."""
    found: list[UUID] = list(visible.filter(**where).values_list("pk", flat=True)[:1])
    if not found:
        raise NoSuchSession
    return found[0]


def empty(request: Request) -> None:
    """Insist on an empty body (or an empty object)."""
    bodies.read(request, bodies.Body)


class Sessions(AgentView):
    @extend_schema(
        request=bodies.OpenSession,
        responses={200: bodies.SessionAnswer, 201: bodies.SessionAnswer, **problems(403, 409)},
        operation_id="open_session",
    )
    def post(self, request: Request) -> Response:
        """Open a session. The same again answers 200, the same ID with another body 409."""
        asked = bodies.read(request, bodies.OpenSession)
        opening = Opening(
            session_id=asked.session_id or str(new_id()),
            body_digest=digest(canonical_text(asked.model_dump(mode="json"))),
            on_behalf_of=asked.on_behalf_of,
            default_effect=asked.default_effect or "",
            allowed_tools=asked.allowed_tools,
            metadata=canonical_text(asked.metadata) if asked.metadata else "",
            **asked.budgets.model_dump(),
        )
        session, opened = intake.open_session(self.agent, opening)
        return Response(render.session(session), status.HTTP_201_CREATED if opened else status.HTTP_200_OK)


class OneSession(AgentView):
    @extend_schema(responses={200: bodies.SessionAnswer, **problems(404)}, operation_id="session")
    def get(self, request: Request, session_id: str) -> Response:
        """Show a session: budgets, turns, calls, what waits, and the application's notes."""
        return Response(render.session(self.own_session(session_id)))


class CloseSession(AgentView):
    @extend_schema(
        request=None, responses={200: bodies.SessionAnswer, **problems(404, 409)}, operation_id="close_session"
    )
    def post(self, request: Request, session_id: str) -> Response:
        """Close a session: it takes no new calls, and nothing else changes."""
        empty(request)
        return Response(render.session(lifecycle.close_session(self.own_session(session_id).pk, by=self.actor)))


def became(calls: list[tuple[Call, str]]) -> Response:
    return Response(
        {"calls": [{"id": str(call.pk), "tool_call_id": call.tool_call_id, "became": to} for call, to in calls]}
    )


class CancelSession(AgentView):
    @extend_schema(
        request=None, responses={200: bodies.CancelledAnswer, **problems(404, 409)}, operation_id="cancel_session"
    )
    def post(self, request: Request, session_id: str) -> Response:
        """Cancel a session and all its unfinished calls; says what became of each."""
        empty(request)
        return became(lifecycle.cancel_session(self.own_session(session_id).pk, by=self.actor))


class CancelTurn(AgentView):
    @extend_schema(request=None, responses={200: bodies.CancelledAnswer, **problems(404)}, operation_id="cancel_turn")
    def post(self, request: Request, session_id: str, turn_id: str) -> Response:
        """Cancel a turn and all its unfinished calls; says what became of each."""
        empty(request)
        session = self.own_session(session_id)
        return became(lifecycle.cancel_turn(session.pk, self.own_turn(session, turn_id).pk, by=self.actor))


class TurnCalls(AgentView):
    @extend_schema(
        request=bodies.ProposedTurn,
        responses={200: bodies.CallsAnswer, **problems(404, 413, 422)},
        parameters=[PREFER, WAIT],
        operation_id="propose_calls",
    )
    def post(self, request: Request, session_id: str, turn_id: str) -> HttpResponse:
        """Propose the calls of a turn. Each is admitted or refused by itself, and stored either way.

        The same call again answers with what is stored; a call ID that stands for something else is a 422 in its place (of the
        whole answer, where no call was good).
        """
        asked = bodies.read(request, bodies.ProposedTurn)
        proposals = [
            Proposal(each.tool_call_id, each.tool, each.arguments, each.operation_id or "") for each in asked.calls
        ]
        answers = intake.submit(self.agent, session_id, turn_id, proposals, trace_id=trace_id(request))
        mismatches = [each for each in answers if isinstance(each, Mismatch)]
        if len(mismatches) == len(answers):
            errors = [{"tool_call_id": each.tool_call_id, "detail": each.message} for each in mismatches]
            raise Problem(422, "CALL_MISMATCH", mismatches[0].message, errors=errors)
        seconds = wanted_wait(request)
        unanswered = frozenset(
            each.id for each in answers if isinstance(each, Answered) and each.status not in ANSWERED
        )
        waits = bool(seconds and unanswered)
        show = functools.partial(_shown, answers, session=session_id, turn=turn_id)
        response = Response({} if waits and HOLDS in request.META else show())
        if waits:
            response.waiting = Waiting(unanswered, seconds, functools.partial(show, again=unanswered))  # type: ignore[attr-defined]
        return response


def _shown(
    answers: list[Answered | Mismatch], *, session: str, turn: str, again: frozenset[UUID] = frozenset()
) -> dict[str, Any]:
    """Show the answers in the order asked; those in ``again``, and any that were there before, are read anew."""
    replayed = {each.id for each in answers if isinstance(each, Answered) and each.replayed}
    stored = list(again | replayed)
    found = dict(zip(stored, render.calls(stored, replayed=replayed), strict=True)) if stored else {}
    shown = []
    for each in answers:
        if isinstance(each, Mismatch):
            problem = body(422, "CALL_MISMATCH", each.message)
            shown.append({**problem, "tool_call_id": each.tool_call_id})
        elif each.id in found:
            shown.append(found[each.id])
        elif each.new is not None:
            shown.append(render.fresh_call(each.new, session=session, turn=turn))
    return {"calls": shown}


def wanted_wait(request: Request) -> int:
    """Read for how many seconds the client wants to wait. Raises Problem (400) for a ``wait`` that is no whole number."""
    asked = request.query_params.get("wait")
    if asked is None:
        preferred = _PREFER.search(request.headers.get("Prefer", ""))
        return min(int(preferred[1]), LONGEST_WAIT) if preferred else 0
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 6):
        raise Problem(400, "MALFORMED", "wait is a whole number of seconds.")
    return min(int(asked), LONGEST_WAIT)


def trace_id(request: Request) -> str:
    """Take the trace ID of a ``traceparent`` header; one that is malformed is as good as none."""
    found = _TRACEPARENT.fullmatch(request.headers.get("traceparent", ""))
    return found[1] if found else ""


class OneCall(APIView):
    """One call, by the agent that proposed it or an operator of its team."""

    permission_classes: list[type[BasePermission]] = [IsAnyone]

    @extend_schema(responses={200: bodies.CallAnswer, **problems(404)}, parameters=[WAIT], operation_id="call")
    def get(self, request: Request, call_id: UUID) -> HttpResponse:
        """Show a call as it is stored; ``wait`` holds the answer until it is final."""
        return answered(request, one_call(visible_calls(request), pk=call_id))


class OneCallOfTurn(AgentView):
    @extend_schema(responses={200: bodies.CallAnswer, **problems(404)}, parameters=[WAIT], operation_id="call_of_turn")
    def get(self, request: Request, session_id: str, turn_id: str, tool_call_id: str) -> HttpResponse:
        """Show a call by the names that the agent gave it; ``wait`` holds the answer until it is final."""
        where = {"session__session_id": session_id, "turn__turn_id": turn_id, "tool_call_id": tool_call_id}
        return answered(request, self.own_call(**where))


def answered(request: Request, call: UUID) -> HttpResponse:
    """Answer with a call, after the wait that the client asked for."""
    seconds, shown = wanted_wait(request), render.call(call)
    response = Response(shown)
    if seconds and shown["status"] not in ANSWERED:
        response.waiting = Waiting(frozenset([call]), seconds, lambda: render.call(call))  # type: ignore[attr-defined]
    return response


def visible_calls(request: Request) -> CallQuerySet:
    """Give the calls that the caller may see: an agent its own, an operator those of the teams."""
    if isinstance(request.user, AgentPrincipal):
        return Call.objects.of_agent(request.user.agent)
    return Call.objects.of_operator(request.user)


class CancelCall(AgentView):
    @extend_schema(request=None, responses={200: bodies.CallAnswer, **problems(404, 409)}, operation_id="cancel_call")
    def post(self, request: Request, call_id: UUID) -> Response:
        """Cancel a call that has not ended; one that runs is asked to stop, and what it really did is recorded."""
        empty(request)
        call = self.own_call(pk=call_id)
        lifecycle.cancel_call(call, by=self.actor)
        return Response(render.call(call))


class Acknowledge(AgentView):
    @extend_schema(
        request=bodies.Acknowledgement, responses={200: bodies.CallsAnswer, **problems(404)}, operation_id="acknowledge"
    )
    def post(self, request: Request, session_id: str, turn_id: str) -> Response:
        """Say that the results of these calls were received; sets ``reported_at``."""
        asked = bodies.read(request, bodies.Acknowledgement)
        turn = self.own_turn(self.own_session(session_id), turn_id)
        named = Call.objects.of_agent(self.agent).filter(turn=turn, tool_call_id__in=asked.tool_call_ids)
        calls = list(named.order_by("pk").values_list("pk", flat=True))
        if len(calls) != len(set(asked.tool_call_ids)):
            raise NoSuchSession
        lifecycle.acknowledge(calls, by=self.actor)
        return Response({"calls": render.calls(calls)})


class Calls(APIView):
    """Search over calls: an agent's own, an operator's teams'."""

    permission_classes: list[type[BasePermission]] = [IsAnyone]

    @extend_schema(responses={200: bodies.CallPage, **problems()}, operation_id="search_calls", filters=True)
    def get(self, request: Request) -> Response:
        """Search calls, the newest first."""
        size, after = pages.size(request), pages.read(request, parts=1)
        found = filtered(request, visible_calls(request))
        if after is not None:
            found = found.filter(pk__lt=as_id(after[0]))
        ids = list(found.order_by("-pk").values_list("pk", flat=True)[: size + 1])
        following = pages.cursor(str(ids[size - 1])) if len(ids) > size else None
        return Response({"calls": render.calls(ids[:size]), "next": following})


def as_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Problem(400, "MALFORMED", "This cursor was not made here.") from None


def filtered(request: Request, calls: CallQuerySet) -> Any:
    """Narrow calls by the query. Raises Problem (400) naming each faulty parameter."""
    narrowed = CallFilter(request.query_params, queryset=calls)
    if not narrowed.is_valid():
        errors = [{"field": name, "detail": str(texts[0])} for name, texts in narrowed.errors.items()]
        raise Problem(400, "MALFORMED", f"{errors[0]['field']}: {errors[0]['detail']}", errors=errors)
    return narrowed.qs


class Tools(AgentView):
    @extend_schema(responses={200: bodies.ToolsAnswer, **problems()}, operation_id="tools")
    def get(self, request: Request) -> Response:
        """List the definitions of the tools that this agent may use, as neutral JSON Schema."""
        shape = request.query_params.get("format", "neutral")
        if shape != "neutral":
            raise Problem(400, "MALFORMED", "format is neutral.")
        allowed = [each for each in tools.every() if permissions.may_use(each.name, self.agent.tools, None)]
        effects = intake.effects_of(self.agent, allowed)
        return Response({"tools": [render.tool(each, effect=effects[each.name]) for each in allowed]})
