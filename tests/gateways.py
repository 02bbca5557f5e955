"""The order service as a real process, for every test that asserts on what really happened."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from dexsite.orders import gateway as program

START_WITHIN = 20


class Gateway:
    """One order service with a store in ``file``: start it, bend it, kill it, and ask what it really did."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(trust_env=False, timeout=30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def applied(self) -> int:
        """How many effects it has, of all kinds."""
        return int(self.effects()["total"])

    def start(self) -> Self:
        """Start it; after a stop or a kill, on the same port and the same store."""
        assert self._process is None, "it runs already"
        # By path, not by name: the service is a stranger to the project and loads none of it.
        command = [sys.executable, str(program.__file__), "--port", str(self.port), "--data", str(self.file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.port = int(_first_line(self._process).rsplit(":", 1)[1])
        return self

    def stop(self) -> int:
        """Stop it in peace; gives its exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """Kill it on the spot."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        process, self._process = self._process, None
        process.send_signal(number)
        status = process.wait(timeout=20)
        process.stdout.close()
        return status

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self.kill()
        self._http.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Ask it anything; the answer as it is."""
        return self._http.request(method, self.url + path, **options)

    def _told(self, method: str, path: str, **options: Any) -> Any:
        return self.request(method, path, **options).raise_for_status().json()

    def refund(self, order_id: str, amount_cents: Any, currency: Any = "BRL", *, key: str) -> httpx.Response:
        """Ask for a refund past the product."""
        body = {"amount_cents": amount_cents, "currency": currency}
        return self.request("POST", f"/orders/{order_id}/refunds", json=body, headers={"Idempotency-Key": key})

    def effects(self, **filters: str) -> Any:
        """Counts and list of the effects; filters: kind, order, customer, key, limit."""
        return self._told("GET", "/effects", params=filters)

    def requests(self, path: str = "") -> list[dict[str, Any]]:
        """What arrived since the last reset, refused and dropped requests included."""
        arrived: list[dict[str, Any]] = self._told("GET", "/requests")["requests"]
        return [each for each in arrived if path in ("", each["path"])]

    def switch(self, path: str, behaviour: str, **details: Any) -> None:
        """Script one behaviour: times, seconds, retry_after, code, key, order."""
        self._told("POST", "/switches", json={"path": path, "behaviour": behaviour, **details})

    def switches(self) -> list[dict[str, Any]]:
        """Every switch with what is left and how often it fired."""
        listed: list[dict[str, Any]] = self._told("GET", "/switches")["switches"]
        return listed

    def add_order(self, order_id: str, *, total_cents: int, currency: str = "BRL", customer_id: str = "CUS-1") -> None:
        """Add an order."""
        order = {"order_id": order_id, "customer_id": customer_id}
        self._told("POST", "/orders", json={**order, "currency": currency, "total_cents": total_cents})

    def reset(self) -> None:
        """Back to the two seeded orders."""
        self._told("POST", "/reset")


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([process.stdout], [], [], 0.2)[0]:
            return os.read(process.stdout.fileno(), 1000).decode().strip()
    process.kill()
    raise AssertionError(f"the order service did not start: exit status {process.wait()}")


@pytest.fixture(scope="session")
def gateway_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One order service for the whole run."""
    with Gateway(tmp_path_factory.mktemp("orders") / "orders.sqlite3") as running:
        yield running


@pytest.fixture
def gateway(gateway_process: Gateway, settings: Any) -> Gateway:
    """The order service as new, and the shop's tools pointed at it."""
    gateway_process.reset()
    settings.ORDERS_URL = gateway_process.url
    return gateway_process
