"""The order service as a real process: what it does once, what it does again, and what survives."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dexsite.orders import gateway as program
from tests.gateways import Gateway


def test_the_two_seeded_orders_are_there(gateway: Gateway) -> None:
    first = gateway.request("GET", "/orders/ORD-1001").json()
    second = gateway.request("GET", "/orders/ORD-1002").json()
    assert first == {
        "order_id": "ORD-1001",
        "customer_id": "CUS-1",
        "currency": "BRL",
        "total_cents": 12000,
        "refunded_cents": 0,
        "status": "paid",
    }
    assert (second["customer_id"], second["currency"], second["total_cents"]) == ("CUS-2", "USD", 4500)


def test_a_refund_happens_once_per_key_and_a_repeat_gets_the_first_answer(gateway: Gateway) -> None:
    first = gateway.refund("ORD-1001", 2590, key="a/b/c")
    again = gateway.refund("ORD-1001", 2590, key="a/b/c")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["repeated"] is False
    assert again.json() == {**first.json(), "repeated": True}
    assert re.fullmatch(r"RF-\d+", first.json()["receipt_id"])
    assert gateway.effects()["counts"] == {"refund": 1, "cancellation": 0, "notification": 0}
    assert gateway.request("GET", "/orders/ORD-1001").json()["refunded_cents"] == 2590


def test_twenty_at_once_under_one_key_are_one_refund(gateway: Gateway) -> None:
    barrier = threading.Barrier(20)

    def ask(_: int) -> int:
        barrier.wait()
        headers = {"Idempotency-Key": "one"}
        body = {"amount_cents": 100, "currency": "BRL"}
        return httpx.post(f"{gateway.url}/orders/ORD-1001/refunds", json=body, headers=headers).status_code

    with ThreadPoolExecutor(20) as pool:
        statuses = sorted(pool.map(ask, range(20)))
    assert statuses == [200] * 19 + [201]
    assert gateway.applied == 1


@pytest.mark.parametrize(
    ("order_id", "amount", "currency"),
    [("ORD-1001", 101, "BRL"), ("ORD-1001", 100, "USD"), ("ORD-1002", 100, "BRL")],
)
def test_a_key_with_another_body_is_refused(gateway: Gateway, order_id: str, amount: int, currency: str) -> None:
    gateway.refund("ORD-1001", 100, key="one")
    refused = gateway.refund(order_id, amount, currency, key="one")
    assert (refused.status_code, refused.json()["code"]) == (422, "key_reused")
    assert gateway.applied == 1


def test_a_second_full_refund_under_another_key_is_already_refunded(gateway: Gateway) -> None:
    assert gateway.refund("ORD-1001", 12000, key="one").status_code == 201
    refused = gateway.refund("ORD-1001", 12000, key="two")
    assert (refused.status_code, refused.json()["code"]) == (409, "already_refunded")
    assert gateway.request("GET", "/orders/ORD-1001").json()["status"] == "refunded"
    assert gateway.applied == 1


def test_the_refunds_of_an_order_never_exceed_its_total(gateway: Gateway) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: gateway.refund("ORD-1001", 5000, key=f"k{n}"), range(8)))
    assert sorted(answer.status_code for answer in answers) == [201, 201] + [409] * 6
    assert {a.json()["code"] for a in answers if a.status_code == 409} == {"exceeds_total"}
    assert gateway.request("GET", "/orders/ORD-1001").json()["refunded_cents"] == 10000


@pytest.mark.parametrize(
    ("order_id", "amount", "currency", "status", "code"),
    [
        ("ORD-1001", 100, "USD", 422, "currency_mismatch"),
        ("ORD-9999", 100, "BRL", 404, "order_not_found"),
        ("ORD-1001", 12001, "BRL", 409, "exceeds_total"),
        ("ORD-1001", 0, "BRL", 422, "invalid_amount"),
        ("ORD-1001", -5, "BRL", 422, "invalid_amount"),
        ("ORD-1001", 25.9, "BRL", 422, "invalid_amount"),
        ("ORD-1001", "100", "BRL", 422, "invalid_amount"),
        ("ORD-1001", True, "BRL", 422, "invalid_amount"),
    ],
)
def test_a_refund_that_cannot_be_is_refused_and_its_key_stays_free(
    gateway: Gateway, order_id: str, amount: Any, currency: str, status: int, code: str
) -> None:
    refused = gateway.refund(order_id, amount, currency, key="one")
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert gateway.applied == 0
    assert gateway.refund("ORD-1001", 100, key="one").status_code == 201


def test_a_refund_without_a_key_is_refused(gateway: Gateway) -> None:
    refused = gateway.request("POST", "/orders/ORD-1001/refunds", json={"amount_cents": 1, "currency": "BRL"})
    assert (refused.status_code, refused.json()["code"]) == (400, "key_required")
    assert gateway.applied == 0


def test_a_refund_is_found_by_its_key(gateway: Gateway) -> None:
    made = gateway.refund("ORD-1001", 100, key="s/t|x/c").json()
    found = gateway.request("GET", "/refunds", params={"key": "s/t|x/c"}).json()
    assert found["refund"]["receipt_id"] == made["receipt_id"]
    assert gateway.request("GET", "/refunds", params={"key": "other"}).json() == {
        "key": "other",
        "refund": None,
    }


def test_cancellations_and_notifications_take_no_key_so_each_counts(gateway: Gateway) -> None:
    receipts = set()
    for _ in range(2):
        receipts.add(gateway.request("POST", "/orders/ORD-1001/cancellations", json={}).json()["receipt_id"])
        told = gateway.request("POST", "/customers/CUS-1/notifications", json={"message": "Hello."})
        receipts.add(told.json()["receipt_id"])
    assert len(receipts) == 4
    assert gateway.effects()["counts"] == {"refund": 0, "cancellation": 2, "notification": 2}
    assert gateway.request("GET", "/orders/ORD-1001").json()["status"] == "cancelled"
    assert gateway.request("POST", "/customers/CUS-77/notifications", json={"message": "x"}).status_code == 404


def test_effects_are_listed_with_key_and_amount_and_can_be_filtered(gateway: Gateway) -> None:
    gateway.refund("ORD-1001", 100, key="one")
    gateway.refund("ORD-1002", 200, "USD", key="two")
    gateway.request("POST", "/orders/ORD-1001/cancellations", json={"reason": "late"})
    listed = gateway.effects(order="ORD-1001")
    assert [(e["kind"], e["key"], e["amount_cents"], e["note"]) for e in listed["effects"]] == [
        ("refund", "one", 100, None),
        ("cancellation", None, None, "late"),
    ]
    assert listed["total"] == 2
    assert gateway.effects(key="two")["effects"][0]["order_id"] == "ORD-1002"
    assert gateway.effects(limit="0") | {"counts": {}} == {"counts": {}, "total": 3, "effects": []}


def test_what_it_did_survives_a_kill_and_the_key_still_holds(tmp_path: Path) -> None:
    with Gateway(tmp_path / "orders.sqlite3") as gateway:
        made = gateway.refund("ORD-1001", 2590, key="one").json()
        gateway.request("POST", "/orders/ORD-1002/cancellations", json={})
        gateway.kill()
        gateway.start()
        assert gateway.effects()["counts"] == {"refund": 1, "cancellation": 1, "notification": 0}
        again = gateway.refund("ORD-1001", 2590, key="one")
        assert (again.status_code, again.json()["receipt_id"]) == (200, made["receipt_id"])
        assert gateway.applied == 2


def test_every_answered_refund_is_there_after_a_kill_in_the_middle_of_many(tmp_path: Path) -> None:
    with Gateway(tmp_path / "orders.sqlite3") as gateway:
        gateway.add_order("ORD-5", total_cents=1_000_000)
        answered: list[str] = []

        def ask(prefix: str) -> None:
            try:
                for n in range(10_000):
                    gateway.refund("ORD-5", 1, key=f"{prefix}/{n}").raise_for_status()
                    answered.append(f"{prefix}/{n}")
            except httpx.HTTPError:
                pass

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        while len(answered) < 100:
            pass
        gateway.kill()
        for thread in threads:
            thread.join()
        gateway.start()
        kept = {effect["key"] for effect in gateway.effects()["effects"]}
        assert set(answered) <= kept
        assert len(kept) <= len(answered) + len(threads)


def test_it_stops_in_peace_and_leaves_the_port_to_the_next(tmp_path: Path) -> None:
    with Gateway(tmp_path / "orders.sqlite3") as gateway:
        gateway.request("GET", "/orders/ORD-1001")
        assert gateway.stop() == 0
        gateway.start()
        assert gateway.request("GET", "/orders/ORD-1001").status_code == 200


def test_orders_can_be_added_and_the_same_again_changes_nothing(gateway: Gateway) -> None:
    order = {"order_id": "ORD-7", "customer_id": "CUS-7", "currency": "EUR", "total_cents": 100}
    first = gateway.request("POST", "/orders", json=[order, {**order, "order_id": "ORD-8"}])
    assert (first.status_code, first.json()["added"]) == (201, 2)
    assert gateway.request("POST", "/orders", json=order).status_code == 200
    refused = gateway.request("POST", "/orders", json=[{**order, "order_id": "ORD-9"}, {**order, "total_cents": 1}])
    assert (refused.status_code, refused.json()["code"]) == (409, "order_exists")
    assert gateway.request("GET", "/orders/ORD-9").status_code == 404
    assert gateway.request("POST", "/orders", json={**order, "extra": 1}).status_code == 422


def test_a_reset_leaves_nothing_but_the_seeds(gateway: Gateway) -> None:
    gateway.add_order("ORD-7", total_cents=5)
    gateway.refund("ORD-1001", 1, key="one")
    gateway.switch("refunds", "refuse")
    gateway.reset()
    assert (gateway.applied, gateway.switches(), gateway.requests()) == (0, [], [])
    assert gateway.request("GET", "/orders/ORD-7").status_code == 404


# What each behaviour leaves behind: the number of effects, and the status answered (None: no answer).
BEHAVIOURS = {
    "slow": (1, 201),
    "hang": (0, None),
    "close_before": (0, None),
    "refuse": (0, 409),
    "busy_503": (0, 503),
    "busy_429": (0, 429),
    "bare_503": (0, 503),
    "unauthorized_401": (0, 401),
    "invalid_422": (0, 422),
    "lose_answer": (1, None),
    "commit_then_hang": (1, None),
    "error_500_after": (1, 500),
    "garbled_200": (1, 200),
}


def test_the_table_above_names_every_behaviour() -> None:
    assert set(BEHAVIOURS) == set(program.BEHAVIOURS)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_switch_does_what_it_says_once_and_is_used_up(gateway: Gateway, behaviour: str) -> None:
    effects, status = BEHAVIOURS[behaviour]
    gateway.switch("refunds", behaviour, seconds=0.05)
    try:
        answered = gateway.refund("ORD-1001", 100, key="one").status_code
    except httpx.TransportError:
        answered = None
    assert (answered, gateway.applied) == (status, effects)
    assert [(s["left"], s["fired"]) for s in gateway.switches()] == [(0, 1)]
    assert [r["behaviour"] for r in gateway.requests("refunds")] == [behaviour]
    again = gateway.refund("ORD-1001", 100, key="one")
    assert again.status_code == (200 if effects else 201)
    assert gateway.applied == 1


def test_a_switch_hits_only_whom_it_is_meant_for_and_as_often_as_it_says(gateway: Gateway) -> None:
    gateway.switch("refunds", "refuse", times=2, key="/bad", code="already_refunded")
    gateway.switch("orders", "bare_503", order="ORD-1002")
    assert gateway.refund("ORD-1001", 1, key="t/good").status_code == 201
    codes = [gateway.refund("ORD-1001", 1, key=f"t/bad{n}").json().get("code") for n in range(3)]
    assert codes == ["already_refunded", "already_refunded", None]
    assert gateway.request("GET", "/orders/ORD-1001").status_code == 200
    assert [gateway.request("GET", "/orders/ORD-1002").status_code for _ in range(2)] == [503, 200]
    assert [(s["left"], s["fired"]) for s in gateway.switches()] == [(0, 2), (0, 1)]


def test_switches_can_be_cleared(gateway: Gateway) -> None:
    gateway.switch("refunds", "refuse", times=50)
    gateway.request("DELETE", "/switches").raise_for_status()
    assert gateway.switches() == []
    assert gateway.refund("ORD-1001", 1, key="one").status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {"path": "refunds", "behaviour": "explode"},
        {"path": "everything", "behaviour": "slow"},
        {"path": "refunds", "behaviour": "slow", "tmies": 3},
        {"path": "refunds", "behaviour": "slow", "times": 0},
        {"behaviour": "slow"},
        [],
    ],
)
def test_a_switch_with_a_slip_is_refused(gateway: Gateway, body: Any) -> None:
    assert gateway.request("POST", "/switches", json=body).status_code == 422
    assert gateway.switches() == []


@pytest.mark.parametrize(("content", "status"), [(b"{", 400), (b"[]", 422), (b"\xff", 400), (b"[" * 100_000, 400)])
def test_a_body_that_is_no_object_is_refused(gateway: Gateway, content: bytes, status: int) -> None:
    headers = {"Idempotency-Key": "one"}
    answer = gateway.request("POST", "/orders/ORD-1001/refunds", content=content, headers=headers)
    assert answer.status_code == status
    assert gateway.applied == 0


def test_a_route_that_does_not_exist_is_a_404(gateway: Gateway) -> None:
    answer = gateway.request("GET", "/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_such_route")
