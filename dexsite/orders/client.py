"""The shop's way to its order service: plain HTTP, and an honest ending for whatever may happen on it.

================================================================  ===========================================
what happened                                                     what is raised
================================================================  ===========================================
no connection: refused, name not found, timeout, none left        ``NotRun``: nothing was sent
429 or 503 with the service's promise that nothing was done       ``NotRun`` with the delay it asks for
another 4xx in the service's own shape                            ``ToolRejected`` with its code, in capitals
no answer in time, connection lost, 5xx, anything unrecognised    ``InDoubt``
a 2xx that is no answer of this service, to a write               ``InDoubt``
the same, to a read                                               ``ToolRejected``: nothing was read
================================================================  ===========================================

Nothing is retried here: attempts are counted in one place, the executor (behaviour, section 8).
"""

import math
import os
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import httpx
from django.conf import settings
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolcalls import codes
from toolcalls.tools import InDoubt, NotRun, ToolRejected

CONNECT_WITHIN = 2.0
ANSWER_WITHIN = 10.0
NOTHING_WAS_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
)
NOT_FOR_THE_AGENT_TO_CORRECT = frozenset({"UNAUTHORIZED", "ALREADY_REFUNDED", "KEY_REUSED"})


class _Answer(BaseModel):
    """What the service says. Strict in what we use; a field it adds one day is no fault."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Order(_Answer):
    """One order; amounts in cents of its currency."""

    order_id: str
    customer_id: str
    currency: Literal["BRL", "USD", "EUR"]
    total_cents: int
    refunded_cents: int
    status: Literal["paid", "refunded", "cancelled"]


class Refund(_Answer):
    """A refund the service made; ``repeated`` where it had made it under this key before."""

    receipt_id: str
    order_id: str
    amount_cents: int
    currency: Literal["BRL", "USD", "EUR"]
    at: datetime = Field(strict=False)
    repeated: bool = False


class Cancellation(_Answer):
    """A cancellation the service made."""

    receipt_id: str
    order_id: str


class Notification(_Answer):
    """A message the service sent to a customer."""

    receipt_id: str
    customer_id: str


class _LookedUp(_Answer):
    key: str
    refund: Refund | None


class _Refusal(_Answer):
    code: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{1,50}$")]
    message: str
    nothing_done: bool = False


A = TypeVar("A", bound=_Answer)


def base_url() -> str:
    """Where the service is: the setting ``ORDERS_URL``."""
    return str(settings.ORDERS_URL).rstrip("/")


def get_order(order_id: str, *, deadline: datetime | None = None) -> Order:
    """Read an order. Raises NotRun, InDoubt, or ToolRejected (``ORDER_NOT_FOUND``)."""
    return _ask("GET", f"/orders/{quote(order_id, safe='')}", answer=Order, deadline=deadline)


def refund(order_id: str, *, amount_cents: int, currency: str, key: str, deadline: datetime | None = None) -> Refund:
    """Refund ``amount_cents`` once per ``key``, however often it is asked.

    Raises NotRun, InDoubt, or ToolRejected (``ALREADY_REFUNDED``, ``EXCEEDS_TOTAL``, ``CURRENCY_MISMATCH``…).
    """
    return _ask(
        "POST",
        f"/orders/{quote(order_id, safe='')}/refunds",
        answer=Refund,
        deadline=deadline,
        json={"amount_cents": amount_cents, "currency": currency},
        headers={"Idempotency-Key": key},
    )


def find_refund(key: str, *, deadline: datetime | None = None) -> Refund | None:
    """Look up what was refunded under a key. Raises as ``get_order`` does."""
    return _ask("GET", "/refunds", answer=_LookedUp, deadline=deadline, params={"key": key}).refund


def cancel(order_id: str, *, reason: str = "", deadline: datetime | None = None) -> Cancellation:
    """Cancel an order. The service takes no key: asking again is one more effect."""
    path = f"/orders/{quote(order_id, safe='')}/cancellations"
    return _ask("POST", path, answer=Cancellation, deadline=deadline, json={"reason": reason})


def notify(customer_id: str, *, message: str, deadline: datetime | None = None) -> Notification:
    """Send a customer a message. The service takes no key: asking again is one more effect."""
    path = f"/customers/{quote(customer_id, safe='')}/notifications"
    return _ask("POST", path, answer=Notification, deadline=deadline, json={"message": message})


def _ask(method: str, path: str, *, answer: type[A], deadline: datetime | None, **request: Any) -> A:
    """Send one request, once, and turn whatever happens into an answer or an ending."""
    url = base_url() + path
    try:
        response = _client().request(method, url, timeout=_timeout(deadline), **request)
    except NOTHING_WAS_SENT as error:
        raise NotRun("The order service could not be reached; nothing was sent.") from error
    except httpx.TimeoutException as error:
        raise InDoubt("The order service did not answer in time.", code="TIMEOUT_UNKNOWN") from error
    except httpx.HTTPError as error:
        raise InDoubt("The connection to the order service was lost before it answered.") from error
    if response.is_success:
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            if method == "GET":
                text = "The order service's answer could not be read."
                raise ToolRejected("UNREADABLE_ANSWER", text, retry="new_call_ok") from error
            raise InDoubt("The order service's answer could not be read; it may have acted.") from error
    raise _ending(response)


def _ending(response: httpx.Response) -> NotRun | ToolRejected | InDoubt:
    """Say what an answer other than 2xx means. Only the service's own words count as a fact."""
    status = response.status_code
    try:
        refusal = _Refusal.model_validate_json(response.content)
    except ValidationError:
        return InDoubt(f"The order service answered {status}, without a word of its own; it may have acted.")
    if status in (429, 503) and refusal.nothing_done:
        return NotRun(refusal.message, retry_after=_delay(response.headers.get("Retry-After", "")))
    if not response.is_client_error or status in (408, 429):
        return InDoubt(f"The order service answered {status}; it may have acted.")
    code = refusal.code.upper()
    if code in codes.KNOWN:
        code = f"ORDER_SERVICE_{code}"
    retry = "do_not_retry" if code in NOT_FOR_THE_AGENT_TO_CORRECT else ""
    return ToolRejected(code, refusal.message[:500], retry=retry)


def _delay(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _timeout(deadline: datetime | None) -> httpx.Timeout:
    left = ANSWER_WITHIN if deadline is None else (deadline - datetime.now(UTC)).total_seconds()
    if left <= 0:
        raise NotRun("No time was left to ask the order service; nothing was sent.")
    return httpx.Timeout(left, connect=min(CONNECT_WITHIN, left), pool=min(CONNECT_WITHIN, left))


@cache
def _client() -> httpx.Client:
    # The service is addressed directly: a proxy named in the environment would be a stranger between us.
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=50, keepalive_expiry=5)
    return httpx.Client(
        limits=limits, follow_redirects=False, trust_env=False, transport=httpx.HTTPTransport(limits=limits)
    )


# A forked worker that used its parent's connections would read its siblings' answers.
os.register_at_fork(after_in_child=_client.cache_clear)
