"""The client turns whatever happens on its way into an honest ending, and never retries."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dexsite.orders import client
from tests.gateways import Gateway
from toolcalls.tools import InDoubt, NotRun, ToolRejected

Ask = Callable[..., Any]


def read(**options: Any) -> Any:
    return client.get_order("ORD-1001", **options)


def look_up(**options: Any) -> Any:
    return client.find_refund("s/t/c", **options)


def refund(**options: Any) -> Any:
    return client.refund("ORD-1001", amount_cents=2590, currency="BRL", key="s/t/c", **options)


def cancel(**options: Any) -> Any:
    return client.cancel("ORD-1001", reason="late", **options)


def notify(**options: Any) -> Any:
    return client.notify("CUS-1", message="Hello.", **options)


READS = {"orders": read, "lookup": look_up}
WRITES = {"refunds": refund, "cancellations": cancel, "notifications": notify}
EVERY = READS | WRITES
every_request = pytest.mark.parametrize(("path", "ask"), EVERY.items(), ids=EVERY)
every_write = pytest.mark.parametrize(("path", "ask"), WRITES.items(), ids=WRITES)
every_read = pytest.mark.parametrize(("path", "ask"), READS.items(), ids=READS)


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


@contextmanager
def one_answer(settings: Any, answer: bytes) -> Iterator[None]:
    """A server that takes one request, answers these bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        settings.ORDERS_URL = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield
        thread.join()


def test_what_works_is_answered_with_a_receipt(gateway: Gateway) -> None:
    assert (read().total_cents, read().currency, read().status) == (12000, "BRL", "paid")
    made = refund()
    assert (made.order_id, made.amount_cents, made.repeated) == ("ORD-1001", 2590, False)
    assert refund().receipt_id == made.receipt_id
    assert refund().repeated
    found = look_up()
    assert found
    assert found.receipt_id == made.receipt_id
    assert client.find_refund("another") is None
    assert {cancel().receipt_id[:3], notify().receipt_id[:3]} == {"CN-", "NT-"}
    assert gateway.effects()["counts"] == {"refund": 1, "cancellation": 1, "notification": 1}


def test_names_go_over_the_wire_untouched(gateway: Gateway) -> None:
    gateway.add_order("ORD-1 ü?#", total_cents=5)
    assert client.get_order("ORD-1 ü?#").order_id == "ORD-1 ü?#"
    key = "0190/functions.search:0/call_x|fc_y&a=b+%"
    client.refund("ORD-1 ü?#", amount_cents=5, currency="BRL", key=key)
    found = client.find_refund(key)
    assert found
    assert found.amount_cents == 5


@every_request
def test_a_refused_connection_did_not_run(path: str, ask: Ask, settings: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        settings.ORDERS_URL = f"http://127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(NotRun, match="nothing was sent"):
            ask()
        assert time.monotonic() - began < 0.4, "the client does not try again by itself"


def test_a_name_that_is_not_found_did_not_run(settings: Any) -> None:
    settings.ORDERS_URL = "http://no-such-host.invalid"
    with pytest.raises(NotRun):
        refund()


def test_a_connection_that_is_never_accepted_did_not_run(settings: Any) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        settings.ORDERS_URL = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(NotRun):
            refund(deadline=soon(0.5))
        for each in waiting:
            each.close()


@every_request
def test_no_time_left_sends_nothing(gateway: Gateway, path: str, ask: Ask) -> None:
    with pytest.raises(NotRun):
        ask(deadline=soon(-1))
    assert gateway.requests() == []


@every_request
@pytest.mark.parametrize("behaviour", ["busy_503", "busy_429"])
def test_busy_with_a_promise_did_not_run_and_tells_the_delay(
    gateway: Gateway, path: str, ask: Ask, behaviour: str
) -> None:
    gateway.switch(path, behaviour, retry_after=2.5)
    with pytest.raises(NotRun) as caught:
        ask()
    assert caught.value.retry_after == 2.5
    assert gateway.applied == 0


@every_request
@pytest.mark.parametrize("behaviour", ["bare_503", "close_before", "lose_answer", "error_500_after"])
def test_no_answer_or_a_fault_after_sending_is_in_doubt(gateway: Gateway, path: str, ask: Ask, behaviour: str) -> None:
    gateway.switch(path, behaviour)
    with pytest.raises(InDoubt) as caught:
        ask()
    assert caught.value.code == "CONNECTION_LOST"
    assert len(gateway.requests(path)) == 1, "the client never asks again by itself"
    done = path in WRITES and behaviour in ("lose_answer", "error_500_after")
    assert gateway.applied == (1 if done else 0)


@every_request
@pytest.mark.parametrize("behaviour", ["hang", "commit_then_hang", "slow"])
def test_no_answer_by_the_deadline_is_in_doubt(gateway: Gateway, path: str, ask: Ask, behaviour: str) -> None:
    gateway.switch(path, behaviour, seconds=2)
    with pytest.raises(InDoubt) as caught:
        ask(deadline=soon(0.25))
    assert caught.value.code == "TIMEOUT_UNKNOWN"
    if path in WRITES and behaviour == "slow":
        until = time.monotonic() + 10
        while not gateway.applied and time.monotonic() < until:
            time.sleep(0.05)
        assert gateway.applied == 1, "it happened after the client had given up"


@every_write
def test_an_unreadable_answer_to_a_write_is_in_doubt(gateway: Gateway, path: str, ask: Ask) -> None:
    gateway.switch(path, "garbled_200")
    with pytest.raises(InDoubt):
        ask()
    assert gateway.applied == 1


@every_read
def test_an_unreadable_answer_to_a_read_has_failed(gateway: Gateway, path: str, ask: Ask) -> None:
    gateway.switch(path, "garbled_200")
    with pytest.raises(ToolRejected) as caught:
        ask()
    assert (caught.value.code, caught.value.retry) == ("UNREADABLE_ANSWER", "new_call_ok")


@every_request
@pytest.mark.parametrize(
    ("behaviour", "code", "retry"),
    [
        ("refuse", "REFUSED", ""),
        ("invalid_422", "INVALID", ""),
        ("unauthorized_401", "UNAUTHORIZED", "do_not_retry"),
    ],
)
def test_a_refusal_of_the_service_is_definite(
    gateway: Gateway, path: str, ask: Ask, behaviour: str, code: str, retry: str
) -> None:
    gateway.switch(path, behaviour)
    with pytest.raises(ToolRejected) as caught:
        ask()
    assert (caught.value.code, caught.value.retry) == (code, retry)
    assert gateway.applied == 0


def test_business_refusals_keep_their_own_codes(gateway: Gateway) -> None:
    refund()

    def code_of(order_id: str, amount: int, currency: str, key: str) -> str:
        with pytest.raises(ToolRejected) as caught:
            client.refund(order_id, amount_cents=amount, currency=currency, key=key)
        return caught.value.code

    assert code_of("ORD-9", 1, "BRL", "new") == "ORDER_NOT_FOUND"
    assert code_of("ORD-1001", 1, "USD", "new") == "CURRENCY_MISMATCH"
    assert code_of("ORD-1001", 12000, "BRL", "new") == "EXCEEDS_TOTAL"
    assert code_of("ORD-1001", 1, "BRL", "s/t/c") == "KEY_REUSED"
    client.refund("ORD-1001", amount_cents=12000 - 2590, currency="BRL", key="rest")
    assert code_of("ORD-1001", 1, "BRL", "new") == "ALREADY_REFUNDED"


def test_a_code_of_the_service_that_the_system_uses_itself_is_told_apart(gateway: Gateway) -> None:
    gateway.switch("refunds", "refuse", code="cancelled")
    with pytest.raises(ToolRejected) as caught:
        refund()
    assert caught.value.code == "ORDER_SERVICE_CANCELLED"


@pytest.mark.parametrize("status", [301, 308, 403, 404, 408, 429, 500, 502, 503, 504])
def test_an_answer_without_a_word_of_the_service_is_in_doubt(settings: Any, status: int) -> None:
    page = f"HTTP/1.1 {status} X\r\nLocation: /elsewhere\r\nContent-Length: 4\r\n\r\noops"
    with one_answer(settings, page.encode()), pytest.raises(InDoubt):
        refund()


@pytest.mark.parametrize(
    "head",
    [b"", b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"receipt', b"\x16\x03\x01 nonsense\r\n\r\n"],
)
def test_an_answer_that_breaks_off_or_is_no_http_is_in_doubt(settings: Any, head: bytes) -> None:
    with one_answer(settings, head), pytest.raises(InDoubt):
        refund()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_fault_in_the_services_words_but_without_its_promise_is_in_doubt(settings: Any, status: int) -> None:
    body = b'{"code": "busy", "message": "Busy."}'
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with one_answer(settings, head.encode() + body), pytest.raises(InDoubt):
        refund()


@pytest.mark.parametrize("delay", ["nan", "inf", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
def test_a_delay_that_is_no_number_of_seconds_is_left_to_the_system(settings: Any, delay: str) -> None:
    body = b'{"code": "busy", "message": "Busy.", "nothing_done": true}'
    head = f"HTTP/1.1 503 X\r\nRetry-After: {delay}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with one_answer(settings, head.encode() + body), pytest.raises(NotRun) as caught:
        refund()
    assert caught.value.retry_after is None


def test_a_retry_after_a_lost_answer_finds_the_one_refund(gateway: Gateway) -> None:
    gateway.switch("refunds", "lose_answer")
    with pytest.raises(InDoubt):
        client.refund("ORD-1001", amount_cents=12000, currency="BRL", key="s/t/c")
    again = client.refund("ORD-1001", amount_cents=12000, currency="BRL", key="s/t/c")
    assert again.repeated
    assert gateway.applied == 1
    assert [r["key"] for r in gateway.requests("refunds")] == ["s/t/c", "s/t/c"]


def test_a_restarted_service_is_reached_at_once_over_a_new_connection(tmp_path: Path, settings: Any) -> None:
    with Gateway(tmp_path / "orders.sqlite3") as gateway:
        settings.ORDERS_URL = gateway.url
        read()
        gateway.kill()
        with pytest.raises(NotRun):
            cancel()
        gateway.start()
        cancel()
        assert gateway.applied == 1


def test_one_connection_serves_one_call_after_another(settings: Any) -> None:
    body = client.Order(
        order_id="ORD-1001",
        customer_id="CUS-1",
        currency="BRL",
        total_cents=1,
        refunded_cents=0,
        status="paid",
    ).model_dump_json()
    accepted = 0

    def serve() -> None:
        nonlocal accepted
        connection, _ = server.accept()
        accepted += 1
        with connection:
            while connection.recv(65536):
                connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        settings.ORDERS_URL = f"http://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=serve, daemon=True).start()
        for _ in range(20):
            read(deadline=soon(2))
    assert accepted == 1


def test_many_threads_share_the_client(gateway: Gateway) -> None:
    with ThreadPoolExecutor(32) as pool:
        keys = [f"k{n}" for n in range(200)]
        made = list(pool.map(lambda k: client.refund("ORD-1001", amount_cents=1, currency="BRL", key=k), keys))
    assert len({each.receipt_id for each in made}) == 200 == gateway.applied


# Celery forks before it has threads; a test process may have some, which newer Pythons warn of.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_opens_connections_of_its_own(gateway: Gateway) -> None:
    read()
    parent = client._client()
    child = os.fork()
    if child == 0:
        os._exit(0 if client._client() is not parent and read().total_cents == 12000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client._client() is parent
    assert read().total_cents == 12000
