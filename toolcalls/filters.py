"""How calls are searched, for the API, the desk and the admin alike."""

from datetime import UTC, datetime
from typing import Any

import django_filters
from django import forms
from django.db.models import Q, QuerySet
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_aware

from toolcalls.models import Call
from toolcalls.states import Status


class AwareDateTimeField(forms.CharField):
    """A time in RFC 3339 with its offset; without one nobody knows which moment is meant."""

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        if not text:
            return None
        at = moment(text.replace(" ", "+"))
        if at is None:
            raise forms.ValidationError("A time has the form 2026-01-31T09:30:00+01:00, with its offset.")
        return at


def moment(text: str) -> datetime | None:
    """Read a time with its offset; None for anything else, and for a moment that no clock in UTC can show."""
    try:
        at = parse_datetime(text)
        return at.astimezone(UTC) if at is not None and is_aware(at) else None
    except (ValueError, OverflowError):
        return None


class AwareDateTimeFilter(django_filters.Filter):
    field_class = AwareDateTimeField


class CallFilter(django_filters.FilterSet):
    """Narrow calls by where they stand, whose they are, what they are called, and when they were proposed."""

    status = django_filters.MultipleChoiceFilter(choices=[(each.value, each.value) for each in Status])
    tool = django_filters.CharFilter(max_length=64)
    code = django_filters.CharFilter(max_length=64)
    session = django_filters.CharFilter(field_name="session__session_id", max_length=200)
    agent = django_filters.CharFilter(field_name="agent__name", max_length=63)
    hash = django_filters.CharFilter(method="by_hash", max_length=64)
    key = django_filters.CharFilter(method="by_key", max_length=500)
    since = AwareDateTimeFilter(field_name="proposed_at", lookup_expr="gte")
    until = AwareDateTimeFilter(field_name="proposed_at", lookup_expr="lt")
    q = django_filters.CharFilter(method="by_text", max_length=200)

    class Meta:
        model = Call
        fields: list[str] = []

    def by_hash(self, calls: QuerySet[Call], name: str, value: str) -> QuerySet[Call]:
        """Find calls by the hash of their arguments; where a field is sensitive, guessing must find nothing."""
        return calls.filter(arguments_hash=value, policy__contains='"sensitive":[]')

    def by_key(self, calls: QuerySet[Call], name: str, value: str) -> QuerySet[Call]:
        """Find the call of an idempotency key: session/turn/call."""
        parts = value.split("/")
        try:
            session = forms.UUIDField().clean(parts[0])
        except forms.ValidationError:
            return calls.none()
        if len(parts) != 3:
            return calls.none()
        return calls.filter(session_id=session, turn__turn_id=parts[1], tool_call_id=parts[2])

    def by_text(self, calls: QuerySet[Call], name: str, value: str) -> QuerySet[Call]:
        """Find calls whose names hold a text."""
        named = Q(tool_call_id__icontains=value) | Q(operation_id__icontains=value) | Q(summary__icontains=value)
        return calls.filter(named | Q(session__session_id__icontains=value) | Q(message__icontains=value))
