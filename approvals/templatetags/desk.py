"""How the desk writes times, amounts and foreign text."""

from datetime import UTC, datetime, timedelta

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from approvals import text

register = template.Library()

SOON = timedelta(minutes=15)
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


@register.filter
def visible(value: object) -> SafeString:
    """Show a text of any origin: inert, isolated, with nothing hidden."""
    return text.visible(str(value))


@register.filter
def moment(at: datetime) -> SafeString:
    """Show a moment absolutely: ``2026-01-31 09:30:05 UTC``."""
    at = at.astimezone(UTC)
    return format_html(
        '<time datetime="{}">{}<span class="utc"> UTC</span></time>', at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S}"
    )


@register.filter
def distance(at: datetime) -> str:
    """Say how far off a moment is: ``in 3 h``, ``5 min ago``, ``now``."""
    seconds = (at - timezone.now()).total_seconds()
    for unit, size in _UNITS:
        if abs(seconds) >= size:
            count = f"{int(abs(seconds) // size)} {unit}"
            return f"in {count}" if seconds > 0 else f"{count} ago"
    return "in under a minute" if seconds > 0 else "just now"


@register.filter
def is_soon(at: datetime) -> bool:
    """Say whether a deadline is near or past."""
    return at - timezone.now() < SOON


@register.filter
def words(name: str) -> str:
    """Write a name of the interface as words: ``outcome_unknown`` is ``outcome unknown``."""
    return name.replace("_", " ").replace(".", " ")


@register.filter
def in_hundreds(cents: int) -> str:
    """Write an amount in cents the way people read it, without a currency: 2590 is ``25.90``."""
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole:,}.{rest:02d}"
