"""The auditors' admin: lists and pages that search what happened and change nothing (behaviour, section 11).

Staff see the rows of their own teams, a superuser all. Nothing here adds, changes, deletes or acts. Bodies are shown masked
and are never read for a list; a lookup that no filter offers is refused, so that hidden values cannot be guessed by query.
"""

import json
from contextlib import suppress
from datetime import UTC
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin import ModelAdmin, SimpleListFilter, TabularInline
from django.core.exceptions import BadRequest
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from toolcalls import codes, masking, policy, tools
from toolcalls.canonical import Malformed, canonical_text, parse
from toolcalls.effects import Effect
from toolcalls.filters import CallFilter
from toolcalls.models import Agent, Attempt, Call, JournalLine, Session, Team

admin.site.site_header = admin.site.site_title = "Dexsite audit"
admin.site.index_title = "What happened"

BODIES = ("received", "arguments", "raw_result", "result")


class ReadOnly:
    """What lists, pages and inlines of the admin have in common here: they only show."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AuditAdmin(ReadOnly, ModelAdmin):
    """A read-only list of rows of the person's teams.

    team: the lookup that leads from a row to its team; empty where the row is the team.
    bodies: columns that no list reads.
    """

    team = "team"
    bodies: tuple[str, ...] = ()
    actions = None
    list_per_page = 50
    list_max_show_all = 50
    show_full_result_count = False
    ordering = ("-pk",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request).defer(*self.bodies)
        if request.user.is_superuser:
            return rows
        path = f"{self.team}__memberships__user" if self.team else "memberships__user"
        return rows.filter(**{path: request.user})

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        offered = {str(getattr(each, "parameter_name", each)) for each in self.list_filter}
        return lookup.partition("__")[0] in offered

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        if any("\0" in each for values in request.GET.lists() for each in (values[0], *values[1])):
            raise BadRequest("no row holds U+0000")
        return super().changelist_view(request, extra_context)


def exactly(field: str) -> Any:
    """Make a column that shows a moment to the microsecond, in UTC; it may stand among columns and fields."""

    @admin.display(description=field.replace("_", " "), ordering=field)
    def shown(row: Any) -> str:
        at = getattr(row, field)
        return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f} UTC" if at else "-"

    shown.__name__ = field
    return shown


class Choice(SimpleListFilter):
    """A filter over a column whose values are known without reading the table."""

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        return [(each, each) for each in self.values()]

    def values(self) -> list[str]:
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(**{self.parameter_name or "": self.value()}) if self.value() else queryset


class ByTool(Choice):
    title = parameter_name = "tool"

    def values(self) -> list[str]:
        return [each.name for each in tools.every()]


class ByCode(Choice):
    title = parameter_name = "code"

    def values(self) -> list[str]:
        return sorted(codes.KNOWN)


class ByEffect(Choice):
    title = parameter_name = "effect"

    def values(self) -> list[str]:
        return [each.value for each in Effect]


class LinesOf(ReadOnly, TabularInline):
    extra = 0
    can_delete = False
    show_change_link = True


class AttemptsOfCall(LinesOf):
    model = Attempt
    fields = readonly_fields = (
        "number",
        "state",
        "code",
        "worker",
        exactly("entered_at"),
        exactly("finished_at"),
        "late_state",
        exactly("late_at"),
    )
    ordering = ("number",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Attempt]:
        return super().get_queryset(request).select_related("worker").defer("message", "late_text")


class JournalOfCall(LinesOf):
    model = JournalLine
    fields = readonly_fields = (exactly("at"), "event", "source", "target", "code", "actor", "attempt")
    ordering = ("pk",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[JournalLine]:
        return super().get_queryset(request).defer("detail")


def legible(text: str) -> SafeString:
    """Show a text of any origin: what cannot be seen, or moves other characters, stands as an escape."""
    shown = "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )
    return format_html("<pre dir='ltr'>{}</pre>", shown)


def body_of(call: Call, text: str | None) -> str | SafeString:
    """Show a stored JSON text of a call, masked. What an agent sent may be a string that holds an object."""
    if text is None:
        return "-"
    found = tools.find(call.tool)
    declared = (found.policy.sensitive if found else None) or []
    sensitive = masking.sensitive_fields(call) if call.policy else declared
    try:
        value = parse(text)
        if isinstance(value, str):
            with suppress(Malformed):
                value = parse(value)
    except Malformed:
        value = text
    # Where no field can be told from another, none may be shown if one of them is sensitive.
    if sensitive and isinstance(value, str):
        return masking.MASK
    return legible(canonical_text(masking.masked(value, sensitive)))


@admin.register(Call)
class CallAdmin(AuditAdmin):
    bodies = BODIES
    list_display = (
        "tool_call_id",
        "tool",
        "status",
        "code",
        "effect",
        "agent",
        "team",
        "session",
        exactly("proposed_at"),
    )
    list_filter = ("status", ByTool, ByCode, ByEffect)
    list_select_related = ("team", "agent", "session", "turn")
    search_fields = ("tool_call_id",)
    search_help_text = (
        "A call's ID (ours or the agent's), an idempotency key, a hash, or an operation: the whole of it."
    )
    inlines = (AttemptsOfCall, JournalOfCall)
    fieldsets = (
        (None, {"fields": ("id", "tool", "tool_version", "status", "code", "told", "retry", "warning")}),
        ("Whose", {"fields": ("team", "agent", "session", "turn", "tool_call_id", "operation_id", "key", "trace_id")}),
        ("Asked", {"fields": ("frozen", "shown_hash", "as_received", "sentence", "derived")}),
        (
            "Answered",
            {"fields": ("shown_result", "shown_raw_result", "settled_verdict", exactly("settled_at"), "doubt")},
        ),
        ("Policy", {"fields": ("effect", "requires_approval", "approvers_needed", "why", "frozen_policy")}),
        ("Links", {"fields": ("replay_of", "refers_to", "amends")}),
        (
            "Times",
            {
                "fields": (
                    exactly("proposed_at"),
                    exactly("deadline"),
                    exactly("approved_at"),
                    exactly("started_at"),
                    exactly("finished_at"),
                    exactly("reported_at"),
                )
            },
        ),
        ("Counts", {"fields": ("moves", "claims", "entered", "entered_before", "live_attempt", "max_attempts")}),
    )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Call], search_term: str
    ) -> tuple[QuerySet[Call], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        # Where a field is sensitive, nobody may learn by asking whether a guess has the stored hash.
        open_ = Q(policy="") | Q(policy__contains='"sensitive":[]')
        named = Q(tool_call_id=term) | Q(operation_id=term) | open_ & (Q(arguments_hash=term) | Q(operation=term))
        named |= Q(operation=term, operation_id__gt="")
        with suppress(ValueError):
            named |= Q(pk=UUID(term))
        by_key = CallFilter({"key": term}, queryset=queryset)
        found = queryset.filter(named)
        return (found | by_key.qs if by_key.is_valid() else found), False

    @admin.display(description="idempotency key")
    def key(self, call: Call) -> str:
        return call.idempotency_key

    @admin.display(description="message")
    def told(self, call: Call) -> str:
        return masking.masked_text(call.message)

    @admin.display(description="arguments, as frozen")
    def frozen(self, call: Call) -> str:
        return body_of(call, call.arguments)

    @admin.display(description="hash of the arguments")
    def shown_hash(self, call: Call) -> str:
        return masking.hash_of(call)

    @admin.display(description="received")
    def as_received(self, call: Call) -> str:
        return body_of(call, call.received)

    @admin.display(description="summary")
    def sentence(self, call: Call) -> str:
        return masking.masked_text(call.summary)

    @admin.display(description="measures")
    def derived(self, call: Call) -> str:
        return json.dumps(masking.masked(call.measures or {}, masking.sensitive_fields(call)), ensure_ascii=False)

    @admin.display(description="result")
    def shown_result(self, call: Call) -> str:
        return body_of(call, call.result)

    @admin.display(description="raw result")
    def shown_raw_result(self, call: Call) -> str:
        return body_of(call, call.raw_result)

    @admin.display(description="policy, as frozen")
    def frozen_policy(self, call: Call) -> str | SafeString:
        return legible(json.dumps(policy.shown(call.policy), indent=2)) if call.policy else "-"


@admin.register(Attempt)
class AttemptAdmin(AuditAdmin):
    team = "call__team"
    bodies = ("message", "late_text")
    list_display = (
        "call",
        "number",
        "state",
        "code",
        "worker",
        exactly("claimed_at"),
        exactly("entered_at"),
        exactly("finished_at"),
        "late_state",
    )
    list_filter = ("state", "late_state")
    list_select_related = ("call", "worker")
    search_fields = ("call__tool_call_id__exact",)
    search_help_text = "The agent's ID of a call, the whole of it."
    fields = (
        "call", "number", "entered_as", "worker", "state", "code", "told", exactly("claimed_at"), exactly("entered_at"), exactly("deadline"),
        exactly("finished_at"), "spent", "late_state", "late_code", "late", exactly("late_at"),
    )  # fmt: skip

    @admin.display(description="message")
    def told(self, attempt: Attempt) -> str:
        return masking.masked_text(attempt.message)

    @admin.display(description="late text")
    def late(self, attempt: Attempt) -> str:
        return body_of(attempt.call, attempt.late_text)


@admin.register(JournalLine)
class JournalLineAdmin(AuditAdmin):
    bodies = ("detail",)
    list_display = (
        "id",
        exactly("at"),
        "event",
        "source",
        "target",
        "code",
        "actor",
        "attempt",
        "call",
        "session",
        "team",
    )
    list_filter = ("target", ByCode)
    list_select_related = ("call", "session", "team")
    search_fields = ("actor__exact", "event__exact", "call__tool_call_id__exact", "session__session_id__exact")
    search_help_text = "An actor, an event, or the agent's ID of a call or session: the whole of it."
    fields = (
        "id", exactly("at"), "team", "session", "call", "event", "move", "source", "target", "code", "actor", "attempt", "told",
        "sealed_as",
    )  # fmt: skip

    @admin.display(description="detail")
    def told(self, line: JournalLine) -> str | SafeString:
        if line.detail is None:
            return "-"
        detail = json.loads(line.detail)
        sensitive = masking.sensitive_fields(line.call) if line.call else []
        if line.call and "arguments_hash" in detail:
            detail["arguments_hash"] = masking.hash_of(line.call)
        return legible(json.dumps(masking.masked(detail, sensitive), ensure_ascii=False, indent=2))

    @admin.display(description="seal")
    def sealed_as(self, line: JournalLine) -> str:
        seal = getattr(line, "seal", None)
        return f"{seal.number} {seal.hash}" if seal else "not sealed yet"


@admin.register(Session)
class SessionAdmin(AuditAdmin):
    bodies = ("metadata",)
    list_display = ("session_id", "agent", "team", "status", "calls_used", exactly("opened_at"), exactly("ended_at"))
    list_filter = ("status",)
    list_select_related = ("agent", "team")
    search_fields = ("session_id__exact", "on_behalf_of__exact")
    search_help_text = "The agent's name of a session, or on whose behalf it is: the whole of it."
    fields = (
        "id", "session_id", "team", "agent", "status", "on_behalf_of", "default_effect", "allowed_tools", "told",
        "calls_limit", "calls_used", "turns_limit", "turns_used", "seconds_limit", "spend_limit", "spend_used", exactly("opened_at"),
        exactly("ended_at"), "sealed_number", "sealed_hash",
    )  # fmt: skip

    @admin.display(description="metadata")
    def told(self, session: Session) -> str | SafeString:
        return legible(masking.masked_text(session.metadata)) if session.metadata else "-"


@admin.register(Agent)
class AgentAdmin(AuditAdmin):
    list_display = ("name", "team", "owner", "default_effect", "enabled")
    list_filter = ("enabled",)
    list_select_related = ("team", "owner")
    search_fields = ("name",)
    fields = ("id", "name", "team", "owner", "tools", "default_effect", "limits", "budgets", "enabled")


@admin.register(Team)
class TeamAdmin(AuditAdmin):
    team = ""
    list_display = ("name", "time_zone")
    search_fields = ("name",)
    fields = ("id", "name", "time_zone", "sealed_number", "sealed_hash")
