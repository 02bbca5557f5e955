"""The doorbell: rung only where none is waiting, never relied on, and never in the way (behaviour, section 8)."""

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import current_app

from tests import worlds
from tests.worlds import Script, Thing, World, a_tool, together
from toolcalls import dispatch, sweeps, tasks
from toolcalls.effects import Effect
from toolcalls.executor import Runner
from toolcalls.models import Bell
from toolcalls.sweeps import sweep
from toolcalls.tools import ToolContext

SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}
READ: dict[str, Any] = {"effect": Effect.READ}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    """A broker that holds the bells in order."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(dispatch, "_publish", waiting.put)
    return waiting


def test_calls_of_each_kind_ring_the_bell_of_their_kind(world: World, broker: Any) -> None:
    with a_tool(**SINGLE) as single, a_tool(**READ) as read:
        world.propose(single)
        world.propose(read)
    assert sorted([broker.get_nowait(), broker.get_nowait()]) == ["call_single_attempt_tool", "call_tool"]


def test_a_bell_is_rung_only_where_none_is_waiting(world: World, broker: Any) -> None:
    with a_tool(**READ) as tool:
        for number in range(3):
            world.propose(tool, {"amount": number})
        assert broker.qsize() == 1
        world.run()
        assert Bell.objects.get(pk="call_tool").rung_at is None
        world.propose(tool, {"amount": 4})
    assert broker.qsize() == 2


def test_a_call_that_waits_for_a_person_rings_nobody_until_it_is_approved(world: World, broker: Any) -> None:
    with a_tool() as tool:
        call = world.propose(tool)
        assert broker.qsize() == 0
        world.approve(call)
    assert broker.get_nowait() == "call_single_attempt_tool"


def test_nothing_is_rung_for_what_was_rolled_back(world: World, broker: Any) -> None:
    """F-50: no ghost."""
    with a_tool(**READ) as tool, worlds.transaction.atomic():
        world.propose(tool)
        worlds.transaction.set_rollback(True)
    assert broker.qsize() == 0


def test_no_call_is_left_behind_by_bells_that_were_not_rung(world: World, broker: Any) -> None:
    """The ringer tests the mark after its own commit: what a task did not see rings again. No sweep runs here."""
    script, over = Script(), threading.Event()
    runners = [Runner(slots=2), Runner(slots=2)]

    def answer(runner: Runner) -> None:
        while not over.is_set():
            try:
                kind = broker.get(timeout=0.05)
            except queue.Empty:
                continue
            runner.drain(retryable=kind == "call_tool")

    with a_tool(script, **SINGLE) as tool:
        sessions = [world.open() for _ in range(4)]

        def propose(number: int) -> None:
            for each in range(12):
                world.propose(tool, {"amount": each}, session=sessions[number], call_id=f"c{number}-{each}")

        def wait_for_all() -> None:
            together(*[lambda number=number: propose(number) for number in range(4)])
            for _ in range(3000):
                if script.applied == 48:
                    break
                over.wait(0.01)
            over.set()

        results = together(wait_for_all, *[lambda each=each: answer(each) for each in runners])
    for runner in runners:
        runner.close()
    assert results == [None, None, None]
    assert script.applied == 48


@pytest.fixture
def gone(settings: Any, database: None) -> Iterator[None]:
    """A broker that refuses connections, as Celery would be configured for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = current_app.conf
    before = conf.broker_url, dict(conf.broker_transport_options)
    conf.broker_url, conf.broker_transport_options = f"redis://127.0.0.1:{port}/0", {"socket_connect_timeout": 1}
    current_app.amqp.__dict__.pop("producer_pool", None)
    current_app.pool.force_close_all()
    current_app._pool = None
    yield
    conf.broker_url, conf.broker_transport_options = before
    current_app._pool = None


def test_with_the_broker_away_a_call_is_stored_and_a_sweep_rings_once_it_is_back(
    world: World, gone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-05: approve still answers; the call stays approved; a sweep rings again."""
    script = Script()
    with a_tool(script) as tool:
        call = world.approve(world.propose(tool))
        assert world.now(call).status == "approved"
        back: list[str] = []
        monkeypatch.setattr(dispatch, "_publish", back.append)
        with worlds.past_the_triggers() as cursor:
            cursor.execute("UPDATE toolcalls_call SET due_at = due_at - interval '6 seconds'")
            cursor.execute("UPDATE toolcalls_bell SET last_rung_at = last_rung_at - interval '6 seconds'")
        sweep()
        assert back == ["call_single_attempt_tool"]
        world.run()
    assert (world.now(call).status, script.applied) == ("succeeded", 1)


def test_publishing_waits_for_nothing_and_tries_once() -> None:
    """Behaviour, section 8, "Publishing gives up within a second"."""
    conf = current_app.conf
    assert not conf.task_publish_retry
    assert conf.broker_connection_timeout <= 1


def test_the_tasks_have_the_names_that_the_bells_ring() -> None:
    names = {f"toolcalls.{dispatch.kind_of(retryable=retryable)}" for retryable in (True, False)}
    assert names == {tasks.call_tool.name, tasks.call_single_attempt_tool.name}
    assert tasks.call_tool.acks_late
    assert not tasks.call_single_attempt_tool.acks_late
    assert names <= set(current_app.tasks)


def test_the_message_of_a_bell_carries_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-89: Celery receives no arguments."""
    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(current_app, "send_task", lambda *args, **options: sent.append((args, options)))
    with a_tool(**READ) as tool:
        world.propose(tool, {"name": "a secret"})
    assert sent == [(("toolcalls.call_tool",), {"ignore_result": True})]


def test_a_bell_that_cannot_be_rung_never_fails_the_proposal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no broker")

    monkeypatch.setattr(current_app, "send_task", refuse)
    with a_tool(**READ) as tool:
        call = world.propose(tool)
        world.run()
    assert world.now(call).status == "succeeded"


def test_the_pause_between_two_rings_has_a_bound() -> None:
    assert sweeps.LONGEST_RING_PAUSE == 300


def test_a_task_ends_with_its_slice_though_work_keeps_coming_and_rings_on(world: World) -> None:
    many = 200
    done: list[int] = []

    def goes_on(arguments: Thing, context: ToolContext) -> dict[str, int]:
        done.append(arguments.amount)
        if arguments.amount < many:
            world.propose(tool, {"amount": arguments.amount + 1})
        return {}

    runner = Runner(slots=4)
    with a_tool(goes_on, effect=Effect.READ) as tool:
        world.propose(tool, {"amount": 1})
        runner.drain(retryable=True, seconds=0.2)
        runner.close()
    assert 0 < len(done) < many
    assert Bell.objects.get(kind="call_tool").rung_at is not None
