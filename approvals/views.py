"""The operators' desk: each view makes one call inward and shows what is stored (behaviour, sections 7, 9 and 11).

A GET changes nothing. A change is a POST with CSRF that goes through ``desk``; what it raises becomes 404 (of another team
or not there: the same page), 403 or 409 with the call as it stands now.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import BadRequest
from django.db.models import Prefetch, Q, QuerySet, prefetch_related_objects
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.shortcuts import render
from django.urls import reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST, require_safe
from rest_framework.request import Request

from approvals import api, desk, forms, text
from approvals.models import Decision, Reconciliation
from toolcalls import masking, policy, tools
from toolcalls.api import pages
from toolcalls.api.problems import Problem
from toolcalls.api.views import as_id
from toolcalls.canonical import Malformed, canonical_text, parse
from toolcalls.filters import CallFilter
from toolcalls.models import Agent, Attempt, Call
from toolcalls.states import FINAL, Status

PREVIEW = 180
"""Characters of the arguments in a list; the call's page shows them whole."""
RESULT_SHOWN = 64 * 1024
"""Characters of a result on a page. What a person decides on, the arguments, is never cut."""
NARROWED_BY = ("tool", "agent", "session", "q")
BULKY = ("received", "raw_result", "result")
DESK = Decision.Channel.DESK.value


def page(request: HttpRequest, template: str, context: dict[str, Any], *, status: int = 200) -> HttpResponse:
    """Render a page of the desk, with what its head shows."""
    head = {"unknown_count": api.unknown(person(request)).count()}
    return render(request, template, head | context, status=status)


def person(request: HttpRequest) -> User:
    """Give the signed-in person; only views that insist on one ask."""
    assert isinstance(request.user, User)
    return request.user


# -- lists


@dataclass(frozen=True)
class Listed:
    """A page of a list, and the query of the next one; ``following`` is empty on the last."""

    calls: list[Call]
    following: str
    is_first: bool


def listed(
    request: HttpRequest,
    calls: QuerySet[Call],
    key: Callable[[Call], tuple[str, ...]],
    after: Callable[[list[str]], Q],
    *,
    parts: int,
) -> Listed:
    """Cut a page out of calls in their order, behind the cursor of the query, and read what a row of it shows.

    Raises BadRequest for a cursor not made here.
    """
    try:
        cursor = pages.read(Request(request), parts=parts)
        found = calls.filter(after(cursor)) if cursor else calls
    except (Problem, ValueError):
        raise BadRequest("this cursor was not made here") from None
    # The order is found among keys alone: whole rows would be read and sorted for the sake of fifty.
    rows = list(found.only("pk", "deadline")[: pages.PAGE + 1])
    following = QueryDict(mutable=True)
    if len(rows) > pages.PAGE:
        following.update({name: request.GET[name] for name in NARROWED_BY if request.GET.get(name)})
        following["cursor"] = pages.cursor(*key(rows[pages.PAGE - 1]))
    whole = Call.objects.select_related("team", "agent", "session", "turn").defer(*BULKY)
    by_id = whole.in_bulk([each.pk for each in rows[: pages.PAGE]])
    shown = [by_id[each.pk] for each in rows[: pages.PAGE]]
    return Listed(shown, following.urlencode(), is_first=cursor is None)


@login_required
@require_safe
def queue(request: HttpRequest) -> HttpResponse:
    """Show what waits for a person in the teams of this one, oldest deadline first."""
    user = person(request)
    asked = {name: request.GET[name] for name in NARROWED_BY if request.GET.get(name)}
    narrowed = CallFilter(asked, queryset=api.waiting(user))
    fits = narrowed.is_valid()
    waiting = narrowed.qs if fits else Call.objects.none()
    shown = listed(
        request,
        waiting,
        api.deadline_key,
        api.after_deadline,
        parts=2,
    )
    context = {
        "cards": [Card(each) for each in shown.calls],
        "page": shown,
        "count": waiting.count(),
        "asked": asked,
        "faults": [] if fits else [str(fault[0]) for fault in narrowed.errors.values()],
        "teams": [each.team for each in desk.teams_of(user)],
        "agents": Agent.objects.filter(team__memberships__user=user).order_by("name").values_list("name", flat=True),
        "tools": [each.name for each in tools.every()],
    }
    return page(request, "approvals/queue.html", {"section": "queue", **context}, status=200 if fits else 400)


@login_required
@require_safe
def unknown(request: HttpRequest) -> HttpResponse:
    """Show the open unknown outcomes of this person's teams, the oldest first."""
    shown = listed(
        request,
        api.unknown(person(request)),
        lambda each: (str(each.pk),),
        lambda cursor: Q(pk__gt=as_id(cursor[0])),
        parts=1,
    )
    prefetch_related_objects(
        shown.calls, Prefetch("attempts", Attempt.objects.order_by("number").defer("message", "late_text"))
    )
    context = {"cards": [Card(each) for each in shown.calls], "page": shown, "teams": desk.teams_of(person(request))}
    return page(request, "approvals/unknown.html", {"section": "unknown", **context})


@dataclass(frozen=True)
class Measure:
    """A number or name that the tool derived; ``cents`` is set where it is an amount in cents."""

    name: str
    value: Any
    cents: int | None


class Card:
    """What a person sees of a call: only what is stored, with sensitive values masked."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.sensitive = _sensitive(call)

    @property
    def summary(self) -> str:
        return masking.masked_text(self.call.summary)

    @property
    def message(self) -> str:
        return masking.masked_text(self.call.message)

    @property
    def key(self) -> str:
        return self.call.idempotency_key

    @property
    def measures(self) -> list[Measure]:
        shown = masking.masked(self.call.measures or {}, self.sensitive)
        found = [
            Measure(name, value, value if name.endswith("_cents") and isinstance(value, int) else None)
            for name, value in shown.items()
        ]
        return sorted(found, key=lambda each: (not isinstance(each.value, int), each.name))

    @property
    def arguments(self) -> str:
        """The frozen text; only what must stay hidden is not as it is stored."""
        return self._masked(self.call.arguments or "")

    @property
    def preview(self) -> str:
        return self.arguments[:PREVIEW]

    @property
    def preview_more(self) -> int:
        return max(0, len(self.arguments) - PREVIEW)

    @property
    def attempts(self) -> list[Attempt]:
        return list(self.call.attempts.all())

    @property
    def late(self) -> list[Attempt]:
        return [each for each in self.attempts if each.late_at]

    @property
    def since(self) -> Any:
        """When the last attempt ended, which is when the outcome became unknown."""
        return max((each.finished_at for each in self.attempts if each.finished_at), default=self.call.proposed_at)

    def _masked(self, stored: str, *, nested: bool = False) -> str:
        """Mask a stored text; ``nested``: it is what an agent sent, which may be a string that holds an object."""
        try:
            value = parse(stored)
            value = parse(value) if nested and isinstance(value, str) else value
        except Malformed:
            # Where no field can be told from another, none may be shown if one of them is sensitive.
            return masking.MASK if nested and self.sensitive else masking.masked_text(stored)
        shown = canonical_text(masking.masked(value, self.sensitive))
        return shown if masking.MASK in shown else stored


def _sensitive(call: Call) -> Sequence[str]:
    """Name the sensitive fields of a call; one that was refused before it had a policy goes by what the tool declares."""
    if call.policy:
        return masking.sensitive_fields(call)
    found = tools.find(call.tool)
    return (found.policy.sensitive if found else None) or []


# -- one call


@login_required
@require_safe
def call(request: HttpRequest, call_id: UUID) -> HttpResponse:
    """Show one call, whole."""
    return call_page(request, call_id)


@dataclass(frozen=True)
class Refusal:
    """Why a change was not made."""

    title: str
    text: str


def call_page(
    request: HttpRequest,
    call_id: UUID,
    *,
    status: int = 200,
    refusal: Refusal | None = None,
    filled: forms.StrictForm | None = None,
) -> HttpResponse:
    """Show a call as it stands now, with the form that a person has filled in. Raises Http404 where it is not visible."""
    user = person(request)
    found = (
        desk.visible(user)
        .select_related("team", "agent__owner", "session", "turn", "replay_of", "refers_to", "amends", "amended_by")
        .defer(
            *(
                f"{link}__{field}"
                for link in ("replay_of", "refers_to", "amends", "amended_by")
                for field in (*BULKY, "arguments")
            )
        )
        .filter(pk=call_id)
        .first()
    )
    if found is None:
        raise Http404
    can = {each.name: each for each in desk.actions(found, user)}
    shown_forms = {each.action: each() for each in forms.ALL}
    unplaced = ""
    if filled is not None:
        shown_forms[filled.action] = filled
        if filled.action not in can and filled.words:
            unplaced = filled.data.get(filled.words, "")
    context = {
        "call": found,
        "card": Whole(found),
        "can": can,
        "forms": shown_forms,
        "refusal": refusal,
        "unplaced": unplaced,
        "is_final": found.status in FINAL,
    }
    return page(request, "approvals/call.html", context, status=status)


@dataclass(frozen=True)
class Text:
    """A JSON text on a page: as a table where it can be read as one, and exactly."""

    rows: SafeString | None
    exact: SafeString
    length: int
    more: int
    odd: text.Oddities


@dataclass(frozen=True)
class Event:
    """One line of the journal as the timeline shows it."""

    line: Any
    title: str
    detail: SafeString | None


class Whole(Card):
    """Everything a call's page shows of it."""

    @property
    def hash(self) -> str:
        return masking.hash_of(self.call)

    @property
    def described(self) -> str:
        """What the tool's author says of it, as it is now."""
        found = tools.find(self.call.tool)
        return found.description if found else ""

    @property
    def text(self) -> Text | None:
        return self._text(self.call.arguments) if self.call.arguments is not None else None

    @property
    def received(self) -> Text | None:
        """What the agent sent, where that differs from what was frozen."""
        if not self.call.received or self.call.received == self.call.arguments:
            return None
        return self._text(self.call.received, nested=True)

    @property
    def result(self) -> Text | None:
        return self._text(self.call.result, limit=RESULT_SHOWN) if self.call.result is not None else None

    @property
    def raw_result(self) -> Text | None:
        return self._text(self.call.raw_result, limit=RESULT_SHOWN) if self.call.raw_result is not None else None

    def _text(self, stored: str, *, limit: int | None = None, nested: bool = False) -> Text:
        shown = self._masked(stored, nested=nested)
        more = max(0, len(shown) - limit) if limit else 0
        rows = None
        if not more:
            try:
                value = parse(shown)
                rows = text.tree(value) if isinstance(value, dict | list) else None
            except Malformed:
                pass  # what cannot be read as JSON is shown as it came
        return Text(rows, text.exact(shown[:limit]), len(shown), more, text.oddities(shown))

    @property
    def attempts(self) -> list[Attempt]:
        return self._attempts

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._attempts = list(call.attempts.select_related("worker").order_by("number"))
        self.decisions = list(Decision.objects.filter(call=call).select_related("user").order_by("at"))
        self.reconciliations = list(Reconciliation.objects.filter(call=call).select_related("user").order_by("at"))

    @property
    def approvals(self) -> int:
        return sum(each.decision == desk.APPROVE for each in self.decisions)

    @property
    def late_texts(self) -> list[tuple[Attempt, Text]]:
        return [(each, self._text(each.late_text or "", limit=RESULT_SHOWN)) for each in self.late]

    @property
    def settled_results(self) -> list[tuple[Reconciliation, Text | None]]:
        return [
            (each, self._text(each.result, limit=RESULT_SHOWN) if each.result else None)
            for each in self.reconciliations
        ]

    @property
    def timeline(self) -> Iterable[Event]:
        return [self._event(each) for each in self.call.journal.order_by("pk")]

    def _event(self, line: Any) -> Event:
        title = line.target or line.event.partition(".")[2] or line.event
        if line.detail is None:
            return Event(line, title, None)
        detail = json.loads(line.detail)
        if "arguments_hash" in detail:
            detail["arguments_hash"] = self.hash  # the plain hash of sensitive values is shown to nobody
        return Event(line, title, text.tree(masking.masked(detail, self.sensitive)))

    @property
    def policy(self) -> list[tuple[str, str, str]]:
        """Name, value and source of every frozen policy value, what somebody chose before what nobody did."""
        if not self.call.policy:
            return []
        frozen = policy.shown(self.call.policy)
        sources = frozen["sources"]
        named = [(name, _plainly(value), sources.get(name, "")) for name, value in frozen["values"].items()]
        return sorted(named, key=lambda each: (each[2] == "default", each[0]))


def _plainly(value: Any) -> str:
    match value:
        case None | "" | []:
            return "none"
        case bool():
            return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- changes

Change = Callable[[HttpRequest, UUID], HttpResponse]


def a_change(view: Change) -> Change:
    """Take POST alone; whoever is not signed in comes back to the call, not to the address of the change."""

    @require_POST
    @wraps(view)
    def wrapped(request: HttpRequest, call_id: UUID) -> HttpResponse:
        if not request.user.is_authenticated:
            return redirect_to_login(reverse("call", args=[call_id]))
        return view(request, call_id)

    return wrapped


def carry_out(
    request: HttpRequest,
    call_id: UUID,
    form: forms.StrictForm,
    act: Callable[[dict[str, Any]], Call],
    say: Callable[[Call], str],
) -> HttpResponse:
    """Do one thing with one call, and say what came of it; what was typed is never lost."""
    if not desk.visible(person(request)).filter(pk=call_id).exists():
        raise Http404
    if not form.is_valid():
        return call_page(request, call_id, status=400, filled=form)
    try:
        done = act(form.cleaned_data)
    except desk.NotVisible:
        raise Http404 from None
    except desk.NotAllowed as error:
        return call_page(request, call_id, status=403, refusal=Refusal("You may not do this", str(error)), filled=form)
    except desk.Conflict as error:
        return call_page(
            request, call_id, status=409, refusal=Refusal("Nothing was changed", error.message), filled=form
        )
    messages.success(request, say(done))
    response = HttpResponseRedirect(reverse("call", args=[call_id]))
    response.status_code = 303
    return response


@a_change
def decide(request: HttpRequest, call_id: UUID) -> HttpResponse:
    """Approve or reject the call, on the arguments that were shown."""
    user = person(request)
    form = forms.DecisionForm(request.POST)
    return carry_out(request, call_id, form, lambda said: desk.decide(call_id, user, channel=DESK, **said), _decided)


def _decided(call: Call) -> str:
    match call.status:
        case Status.AWAITING_APPROVAL:
            missing = call.approvers_needed - Decision.objects.filter(call=call, decision=desk.APPROVE).count()
            return f"Your approval counts. {missing} more must approve before the call runs."
        case Status.REJECTED:
            return "Rejected. The call will not run, and the agent is told why."
    return "Approved. The call runs as soon as a worker takes it."


@a_change
def cancel(request: HttpRequest, call_id: UUID) -> HttpResponse:
    """Cancel the unfinished call."""
    user = person(request)
    return carry_out(request, call_id, forms.CancelForm(request.POST), lambda _: desk.cancel(call_id, user), _cancelled)


def _cancelled(call: Call) -> str:
    if call.status == Status.EXECUTING:
        return "The tool is asked to stop. What it really did will be recorded."
    return "Cancelled."


@a_change
def settle(request: HttpRequest, call_id: UUID) -> HttpResponse:
    """Settle the unknown outcome with evidence, or leave a note."""
    user = person(request)
    form = forms.SettleForm(request.POST)
    return carry_out(request, call_id, form, lambda said: desk.settle(call_id, user, channel=DESK, **said), _settled)


def _settled(call: Call) -> str:
    match call.status:
        case Status.OUTCOME_UNKNOWN:
            return "Your note is kept. The outcome stays unknown."
        case Status.SUCCEEDED:
            return "Settled: it took effect. The agent is told."
    return "Settled: it did not take effect. The agent is told."


@a_change
def run_again(request: HttpRequest, call_id: UUID) -> HttpResponse:
    """Order another run under the same key."""
    user = person(request)
    form = forms.RunAgainForm(request.POST)
    return carry_out(
        request, call_id, form, lambda said: desk.run_again(call_id, user, channel=DESK, **said), lambda _: RUNS_AGAIN
    )


RUNS_AGAIN = "Another run is ordered, under the same key."
