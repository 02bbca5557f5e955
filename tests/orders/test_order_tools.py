"""The example shop's tools: what a model sees of them, what they refuse, and what they do."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from dexsite.orders import tools
from tests.gateways import Gateway
from toolcalls.effects import Effect
from toolcalls.tools import Found, InDoubt, NotFound, Tool, ToolContext, ToolRejected, find


def context(key: str = "s/t/c", *, attempt: int = 1) -> ToolContext:
    deadline = datetime.now(UTC) + timedelta(seconds=5)
    return ToolContext(
        idempotency_key=key,
        key_digest="0" * 32,
        attempt=attempt,
        deadline=deadline,
        agent="bot",
        on_behalf_of="",
    )


def refund(**changes: Any) -> tools.RefundOrder:
    return tools.RefundOrder(**{"order_id": "ORD-1001", "amount_cents": 2590, "currency": "BRL", **changes})


def refused(tool: Tool, arguments: Any) -> ToolRejected:
    assert tool.run_check is not None
    with pytest.raises(ToolRejected) as caught:
        tool.run_check(arguments, context())
    return caught.value


def test_each_tool_is_registered_under_its_name_with_its_class() -> None:
    classes = {name: tool.policy.effect for name in ("get_order", "refund_order") if (tool := find(name))}
    assert classes == {"get_order": Effect.READ, "refund_order": Effect.IDEMPOTENT_WRITE}
    assert tools.cancel_order.policy.effect == Effect.NON_IDEMPOTENT_WRITE
    assert tools.notify_customer.policy.effect is None, "unclassified: nothing was declared"
    assert tools.refund_order.policy.requires_approval is True


def test_the_schema_of_a_refund_gives_the_unit_and_allows_nothing_extra() -> None:
    schema = tools.refund_order.schema
    assert "25.90 is 2590" in schema["properties"]["amount_cents"]["description"]
    assert schema["properties"]["currency"]["enum"] == ["BRL", "USD", "EUR"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["order_id", "amount_cents", "currency"]
    assert all(field.get("description") for field in schema["properties"].values())


@pytest.mark.parametrize(
    "changes",
    [
        {"amount_cents": 25.9},
        {"amount_cents": "2590"},
        {"amount_cents": 0},
        {"amount_cents": -1},
        {"amount_cents": True},
        {"currency": "brl"},
        {"currency": "GBP"},
        {"order_id": "1001"},
        {"order_id": "ORD-1001 "},
        {"order_id": "ORD-1001\n"},
        {"order_id": "ORD-\u0661\u0660"},
        {"order_id": "ord-1001"},
        {"reason": "because"},
        {"approved": True},
    ],
)
def test_arguments_that_are_nearly_right_are_refused(changes: dict[str, Any]) -> None:
    arguments = {"order_id": "ORD-1001", "amount_cents": 2590, "currency": "BRL", **changes}
    with pytest.raises(ValidationError):
        tools.RefundOrder.model_validate_json(json.dumps(arguments))


def test_a_read_shows_the_order(gateway: Gateway) -> None:
    shown = tools.get_order(tools.GetOrder(order_id="ORD-1001"), context())
    assert (shown.total_cents, shown.currency, shown.customer_id) == (12000, "BRL", "CUS-1")


def test_the_check_of_a_refund_refuses_what_the_order_does_not_allow(gateway: Gateway) -> None:
    assert refused(tools.refund_order, refund(order_id="ORD-9")).code == "ORDER_NOT_FOUND"
    wrong = refused(tools.refund_order, refund(currency="USD"))
    assert (wrong.code, "BRL" in wrong.message) == ("CURRENCY_MISMATCH", True)
    above = refused(tools.refund_order, refund(amount_cents=12001))
    assert (above.code, above.retry) == ("AMOUNT_EXCEEDS_ORDER", "")
    assert "BRL 120.01 is more than ORD-1001 has left: its total is BRL 120.00" in above.message
    assert gateway.applied == 0
    assert gateway.requests("refunds") == []


def test_the_check_counts_what_is_refunded_already(gateway: Gateway) -> None:
    tools.refund_order(refund(amount_cents=11000), context())
    assert "at most 1000" in refused(tools.refund_order, refund(amount_cents=1001)).message
    assert tools.refund_order.run_check is not None
    tools.refund_order.run_check(refund(amount_cents=1000), context())
    tools.refund_order(refund(amount_cents=1000), context("s/t/d"))
    assert refused(tools.refund_order, refund(amount_cents=1)).retry == "do_not_retry"


def test_a_cancellation_of_no_order_is_refused_before_anybody_is_asked(gateway: Gateway) -> None:
    assert refused(tools.cancel_order, tools.CancelOrder(order_id="ORD-9")).code == "ORDER_NOT_FOUND"
    assert gateway.requests("cancellations") == []


def test_a_refund_passes_the_key_of_its_call_on_every_attempt(gateway: Gateway) -> None:
    gateway.switch("refunds", "lose_answer")
    with pytest.raises(InDoubt):
        tools.refund_order(refund(amount_cents=12000), context(attempt=1))
    made = tools.refund_order(refund(amount_cents=12000), context(attempt=2))
    assert made.repeated
    assert made.amount_cents == 12000
    assert [r["key"] for r in gateway.requests("refunds")] == ["s/t/c", "s/t/c"]
    assert gateway.applied == 1


def test_the_outcome_of_a_refund_is_found_by_its_key(gateway: Gateway) -> None:
    look_up = tools.refund_order.run_find_outcome
    assert look_up is not None
    assert look_up(refund(), "s/t/c") == NotFound()
    made = tools.refund_order(refund(), context())
    found = look_up(refund(), "s/t/c")
    assert isinstance(found, Found)
    assert found.result["receipt_id"] == made.receipt_id
    json.dumps(found.result)


def test_cancellation_and_notification_act_once_per_run(gateway: Gateway) -> None:
    tools.cancel_order(tools.CancelOrder(order_id="ORD-1001", reason="late"), context())
    tools.notify_customer(tools.NotifyCustomer(customer_id="CUS-1", message="Sorry."), context())
    assert gateway.effects()["counts"] == {"refund": 0, "cancellation": 1, "notification": 1}


def test_the_approver_reads_one_sentence(gateway: Gateway) -> None:
    summary = tools.refund_order.run_summary
    assert summary is not None
    text = summary(refund(amount_cents=1234567, reason="not_delivered"))
    assert text == "Refund BRL 12,345.67 of order ORD-1001 (not delivered)."


def test_measures_are_taken_from_the_arguments() -> None:
    measures = {name: measure(refund()) for name, measure in tools.refund_order.measures.items()}
    assert measures == {"amount_cents": 2590, "order_id": "ORD-1001"}
