"""The demo from end to end, and its judgement: it proves nothing unless it can fail."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from dexsite.demo import Agent, Call, Effects, Orders, Run, Shop, Step, Story


class ObedientAgent(Agent):
    """An agent whose every call comes out as told, except where ``bent`` says otherwise."""

    def __init__(self, bent: dict[str, dict[str, Any]]) -> None:
        super().__init__("http://127.0.0.1:1", "key", session="demo-1")
        self.bent = bent

    def open(self) -> None:
        pass

    def propose(self, step: Step) -> Call:
        self.ends = getattr(self, "ends", {})
        end = {
            "id": step.name,
            "turn_id": f"turn-{step.name}",
            "tool_call_id": f"call-{step.name}",
            "tool": step.tool,
            "arguments": step.arguments,
            "status": step.status,
            "code": step.code,
            "message": "",
            "result": {"order_id": "ORD-1"},
            "replayed": step.replayed,
            "attempts": [{"number": 1, "state": "succeeded", "code": ""}] if step.code == "OK" else [],
            "approval": None,
        }
        self.ends[step.name] = {**end, **self.bent.get(step.name, {})}
        return {**end, "status": "awaiting_approval", "code": ""} if step.decision else self.ends[step.name]

    def read(self, call: Call, *, wait: int = 0) -> Call:
        end: Call = self.ends[call["id"]]
        return end

    def acknowledge(self, call: Call) -> None:
        pass


class ObedientShop(Shop):
    def __init__(self, effects: dict[str, Effects]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.done = effects

    def add_order(self, order_id: str, customer_id: str, currency: str, total_cents: int) -> None:
        pass

    def lose_one_answer(self, order_id: str) -> None:
        pass

    def effects(self, order_id: str) -> Effects:
        return self.done[order_id]


def faults(*, calls: dict[str, dict[str, Any]] | None = None, effects: Effects | None = None) -> list[str]:
    story = Story(Orders("ORD-1", "ORD-2", "ORD-3"))
    done = {each.order_id: each for each in story.effects}
    if effects:
        done[effects.order_id] = effects
    run = Run(story, ObedientAgent(calls or {}), ObedientShop(done), say=lambda line: None)
    run.begin()
    for _ in range(3):
        run.go_on()
    judged = run.table(judged=True)
    found = run.faults()
    assert (" NO" in judged) == any("instead of" in fault for fault in found)
    return found


def test_a_run_in_which_all_went_as_told_has_no_faults() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("name", "bent"),
    [
        ("refund", {"status": "outcome_unknown", "code": "CONNECTION_LOST"}),
        ("refund", {"status": "approved", "code": ""}),
        ("lost", {"status": "failed", "code": "ALREADY_REFUNDED"}),
        ("twice", {"status": "succeeded", "code": "OK"}),
        ("again", {"replayed": False}),
        ("cancel", {"status": "succeeded", "code": "OK"}),
        ("forbidden", {"code": "UNKNOWN_TOOL"}),
        ("slip", {"attempts": [{"number": 1, "state": "failed", "code": ""}]}),
    ],
)
def test_one_call_that_came_out_otherwise_is_a_fault(name: str, bent: dict[str, Any]) -> None:
    found = faults(calls={name: bent})
    assert found
    assert all(fault.startswith((f"{name}:", "again:")) for fault in found)


@pytest.mark.parametrize(
    "effects",
    [
        Effects("ORD-1", refunds=(2590, 2590), refund_requests=1),
        Effects("ORD-1", refunds=(259000,), refund_requests=1),
        Effects("ORD-1", refunds=(), refund_requests=1),
        Effects("ORD-1", refunds=(2590,), refund_requests=2),
        Effects("ORD-2", cancellations=1),
        Effects("ORD-3", refunds=(4500,), refund_requests=1),
    ],
)
def test_one_effect_too_many_or_too_few_is_a_fault(effects: Effects) -> None:
    assert [fault.split(":")[0] for fault in faults(effects=effects)] == [effects.order_id]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def demo_once(data_dir: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    port, orders_port = free_ports(2)
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("DATABASE_URL", "DEXSITE"))}
    ours |= {"DEXSITE_DATA_DIR": str(data_dir), "PORT": str(port), "ORDERS_PORT": str(orders_port), **variables}
    command = [sys.executable, "manage.py", "demo", "--once"]
    return subprocess.run(
        command, check=False, cwd=settings.BASE_DIR, env=ours, capture_output=True, text=True, timeout=180
    )


def test_the_demo_plays_to_its_end_without_a_person_and_again_on_the_same_data(tmp_path: Path) -> None:
    for _ in range(2):
        played = demo_once(tmp_path)
        assert played.returncode == 0, f"{played.stdout}\n{played.stderr}"
        assert "Every call, every state and every effect is as expected." in played.stdout
        assert " NO" not in played.stdout


def test_the_demo_says_which_port_is_taken_and_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        played = demo_once(tmp_path, ORDERS_PORT=str(port))
    assert played.returncode == 1
    assert f"Port {port} is taken" in played.stderr
    assert f"ORDERS_PORT={port + 1}" in played.stderr
    assert "Traceback" not in played.stderr
    assert not (tmp_path / "demo.log").exists()
