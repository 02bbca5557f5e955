"""A worker that is killed between the service's commit and the record: real processes, and a service that counts.

Web, worker and sweeps are started as an operator starts them, on the test's database, which is the broker too.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings

from tests.gateways import Gateway
from tests.worlds import World
from toolcalls import directory
from toolcalls.journal import Broken, seal_waiting, verify

WITHIN = 90.0
TIMINGS = {
    "HEARTBEAT_EVERY": "0.5",
    "WORKER_SILENT_AFTER": "1.5",
    "SWEEP_EVERY": "0.3",
    "GRACE": "1",
    "RING_AGAIN_AFTER": "1",
}
Process = subprocess.Popen[bytes]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for what other processes do; gives the condition's first true value."""
    pause = threading.Event()
    for _ in range(int(WITHIN * 10)):
        with contextlib.suppress(httpx.TransportError):
            if value := condition():
                return value
        pause.wait(0.1)
    raise AssertionError(f"in {WITHIN:g} seconds it did not come about that {what}")


class Deployment:
    """The roles of one deployment, each a process of its own."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self._directory, self._environment = directory, environment
        self._processes: list[Process] = []

    def start(self, role: str) -> Process:
        """Start one more process of a role."""
        with (self._directory / f"{role}-{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "manage.py", "serve", f"--{role}"],
                cwd=settings.BASE_DIR, env={**os.environ, **self._environment, "DEXSITE_ROLE": role},
                stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """Kill a process and its children on the spot."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        """Kill whatever runs."""
        for process in self._processes:
            self.kill(process)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def deployment(world: World, database_url: str, gateway: Gateway, port: int, tmp_path: Path) -> Iterator[Deployment]:
    """A deployment on the test's database, pointed at the order service; nothing of it runs yet."""
    made = Deployment(
        tmp_path, DATABASE_URL=database_url, SECRET_KEY="k" * 50, PORT=str(port), ORDERS_URL=gateway.url, **TIMINGS
    )
    yield made
    made.end()


@pytest.fixture
def door(world: World, port: int) -> Iterator[Callable[..., Any]]:
    """Asks the web process as the world's agent, or as ana where ``as_ana`` is said."""
    token = directory.create_token(world.ana, by="test")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", trust_env=False, timeout=30) as http:

        def ask(method: str, path: str, body: object = None, *, as_ana: bool = False) -> Any:
            secret = token if as_ana else world.key
            answer = http.request(method, path, json=body, headers={"Authorization": f"Bearer {secret}"})
            assert answer.status_code in (200, 201), answer.text
            return answer.json()

        yield ask


def test_a_killed_worker_repeats_no_effect_and_loses_no_call(
    world: World, gateway: Gateway, deployment: Deployment, door: Callable[..., Any], port: int
) -> None:
    """S-C02, S-D06, F-04, F-45, F-59: the keyed refund is tried again, the cancellation never; each took effect once."""
    gateway.switch("refunds", "commit_then_hang", seconds=60)
    gateway.switch("cancellations", "commit_then_hang", seconds=60)
    for role in ("web", "sweeps"):
        deployment.start(role)
    worker = deployment.start("worker")
    until(lambda: httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).is_success, "the web process answers")

    session = f"sessions/{door('POST', 'sessions', {})['session_id']}"
    proposed = {
        "calls": [
            {
                "tool_call_id": "refund",
                "tool": "refund_order",
                "arguments": {"order_id": "ORD-1001", "amount_cents": 2590, "currency": "BRL"},
            },
            {"tool_call_id": "cancel", "tool": "cancel_order", "arguments": {"order_id": "ORD-1002"}},
        ]
    }
    refund, cancel = door("POST", f"{session}/turns/t1/calls", proposed)["calls"]
    assert (refund["status"], cancel["status"], gateway.applied) == ("awaiting_approval", "awaiting_approval", 0)
    for call in (refund, cancel):
        door("POST", f"approvals/{call['id']}/approve", {"arguments_hash": call["arguments_hash"]}, as_ana=True)
    until(lambda: gateway.applied == 2, "both effects are committed")
    deployment.kill(worker)
    stand = [door("GET", f"calls/{call['id']}")["status"] for call in (refund, cancel)]
    assert stand == ["executing", "executing"], "nobody knows yet"

    deployment.start("worker")
    until(lambda: door("GET", f"calls/{refund['id']}")["status"] == "succeeded", "the refund is tried again")
    until(lambda: door("GET", f"calls/{cancel['id']}")["status"] == "outcome_unknown", "the cancellation is unknown")
    again = door("POST", f"{session}/turns/t1/calls", proposed)["calls"]
    assert [each["replayed"] for each in again] == [True, True], "the same IDs answer with the stored calls"

    refunded, cancelled = (door("GET", f"calls/{call['id']}") for call in (refund, cancel))
    assert [(each["state"], each["code"]) for each in refunded["attempts"]] == [
        ("in_doubt", "WORKER_LOST"),
        ("succeeded", "OK"),
    ]
    assert (refunded["code"], refunded["result"]["repeated"]) == ("OK", True)
    assert [(each["state"], each["code"]) for each in cancelled["attempts"]] == [("in_doubt", "WORKER_LOST")]
    assert (cancelled["code"], cancelled["retry"]) == ("WORKER_LOST", "do_not_retry")

    effects = gateway.effects()
    assert (gateway.applied, len(gateway.effects(kind="refund", key=refunded["idempotency_key"])["effects"])) == (2, 1)
    assert sorted(each["kind"] for each in effects["effects"]) == ["cancellation", "refund"]
    refunds = gateway.requests("refunds")
    assert {each["key"] for each in refunds} == {refunded["idempotency_key"]}
    assert (len(refunds), len(gateway.requests("cancellations"))) == (2, 1)
    while seal_waiting(chains=100):
        pass
    assert [each for each in verify() if isinstance(each, Broken)] == []
