"""The example shop's tools: one of each effect class, found as Django finds an app's ``admin.py``."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dexsite.orders import client
from toolcalls.effects import Effect
from toolcalls.tools import Found, NotFound, ToolContext, ToolRejected, tool

OrderId = Annotated[str, Field(pattern=r"^ORD-[0-9]+$", max_length=40, description="The order's ID, like ORD-1001.")]
CustomerId = Annotated[str, Field(pattern=r"^CUS-[0-9]+$", max_length=40, description="The customer's ID, like CUS-1.")]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class GetOrder(_Arguments):
    order_id: OrderId


class RefundOrder(_Arguments):
    order_id: OrderId
    amount_cents: Annotated[int, Field(gt=0, description="The amount to refund, in cents: 25.90 is 2590.")]
    currency: Annotated[Literal["BRL", "USD", "EUR"], Field(description="The order's own currency: BRL, USD or EUR.")]
    reason: Annotated[
        Literal["damaged", "not_delivered", "wrong_item", "customer_request", "other"],
        Field(description="Why: damaged, not_delivered, wrong_item, customer_request or other."),
    ] = "customer_request"
    note: Annotated[str, Field(max_length=500, description="For the person who decides, at most 500 characters.")] = ""


class CancelOrder(_Arguments):
    order_id: OrderId
    reason: Annotated[str, Field(max_length=500, description="Why, in a sentence of at most 500 characters.")] = ""


class NotifyCustomer(_Arguments):
    customer_id: CustomerId
    message: Annotated[str, Field(min_length=1, max_length=1000, description="Plain text, at most 1,000 characters.")]


@tool(effect=Effect.READ, timeout=10)
def get_order(arguments: GetOrder, context: ToolContext) -> client.Order:
    """Look up one order: its customer, currency, total and what was refunded of it. Amounts are in cents."""
    return client.get_order(arguments.order_id, deadline=context.deadline)


@tool(
    effect=Effect.IDEMPOTENT_WRITE,
    requires_approval=True,
    timeout=20,
    max_attempts=4,
    amend=True,
    measures={"amount_cents": lambda a: a.amount_cents, "order_id": lambda a: a.order_id},
)
def refund_order(arguments: RefundOrder, context: ToolContext) -> client.Refund:
    """Refund part or all of an order. Call get_order first. Amount in cents, in the order's currency."""
    return client.refund(
        arguments.order_id,
        amount_cents=arguments.amount_cents,
        currency=arguments.currency,
        key=context.idempotency_key,
        deadline=context.deadline,
    )


@refund_order.check
def refund_is_possible(arguments: RefundOrder, context: ToolContext) -> None:
    """Refuse what the order does not allow, before a person is asked."""
    order = client.get_order(arguments.order_id, deadline=context.deadline)
    if arguments.currency != order.currency:
        text = f"Order {order.order_id} is in {order.currency}, not in {arguments.currency}."
        raise ToolRejected("CURRENCY_MISMATCH", text)
    left = order.total_cents - order.refunded_cents
    if arguments.amount_cents > left:
        total, refunded = (
            money(order.total_cents, order.currency),
            money(order.refunded_cents, order.currency),
        )
        text = (
            f"{money(arguments.amount_cents, order.currency)} is more than {order.order_id} has left: its "
            f"total is {total}, {refunded} of it is refunded already. amount_cents can be at most {left}."
        )
        raise ToolRejected("AMOUNT_EXCEEDS_ORDER", text, retry="do_not_retry" if left == 0 else "")


@refund_order.summary
def refund_in_a_sentence(arguments: RefundOrder) -> str:
    """Say to the approver what would happen."""
    amount = money(arguments.amount_cents, arguments.currency)
    return f"Refund {amount} of order {arguments.order_id} ({arguments.reason.replace('_', ' ')})."


@refund_order.find_outcome
def refund_under(_arguments: RefundOrder, key: str) -> Found | NotFound:
    """Look the refund up by its key; absence proves nothing, a request may still be on its way."""
    made = client.find_refund(key)
    return Found(made.model_dump(mode="json")) if made else NotFound()


@tool(effect=Effect.NON_IDEMPOTENT_WRITE, timeout=20, measures={"order_id": lambda a: a.order_id})
def cancel_order(arguments: CancelOrder, context: ToolContext) -> client.Cancellation:
    """Cancel an order. This cannot be undone. Call get_order first."""
    return client.cancel(arguments.order_id, reason=arguments.reason, deadline=context.deadline)


@cancel_order.check
def order_exists(arguments: CancelOrder, context: ToolContext) -> None:
    """Refuse an order that does not exist, before a person is asked."""
    client.get_order(arguments.order_id, deadline=context.deadline)


@cancel_order.summary
def cancellation_in_a_sentence(arguments: CancelOrder) -> str:
    """Say to the approver what would happen."""
    return f"Cancel order {arguments.order_id}."


# Without an effect class: nobody has thought about what a repeat of it does, so it is treated as the worst.
@tool(timeout=20)
def notify_customer(arguments: NotifyCustomer, context: ToolContext) -> client.Notification:
    """Send a customer a message."""
    return client.notify(arguments.customer_id, message=arguments.message, deadline=context.deadline)


@notify_customer.summary
def notification_in_a_sentence(arguments: NotifyCustomer) -> str:
    """Say to the approver what would happen."""
    return f"Send customer {arguments.customer_id} a message of {len(arguments.message)} characters."


def money(cents: int, currency: str) -> str:
    """Write an amount the way people read it: 2590 and BRL are ``BRL 25.90``."""
    return f"{currency} {cents // 100:,}.{cents % 100:02d}"
