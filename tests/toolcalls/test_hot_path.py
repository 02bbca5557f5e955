"""What a call costs: commits of its own, and statements. Bounds, so that neither creeps up unseen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
import pytest
from django.db import connection

from tests.worlds import World, a_tool
from toolcalls import dispatch, lifecycle, notices
from toolcalls.effects import Effect
from toolcalls.outcomes import Succeeded
from toolcalls.states import EDGES, Status


@dataclass
class Cost:
    """Statements sent by this process, and transactions that wrote."""

    statements: int = 0
    writes: int = 0


def _next_transaction() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        return int(cursor.fetchone()[0])


@pytest.fixture
def cost_of(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    # A bell that waits is not rung again, and notices travel outside: neither is the call's own.
    dispatch.ring(retryable=True)
    monkeypatch.setattr(notices, "publish", lambda calls: None)
    execute = psycopg.Cursor.execute

    @contextmanager
    def counted() -> Iterator[Cost]:
        cost, before = Cost(), _next_transaction()

        def counting(self: object, *args: object, **kwargs: object) -> object:
            cost.statements += 1
            return execute(self, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(psycopg.Cursor, "execute", counting)
        yield cost
        monkeypatch.setattr(psycopg.Cursor, "execute", execute)
        cost.writes = _next_transaction() - before

    return counted


@pytest.mark.parametrize("calls", [1, 5])
def test_a_request_is_admitted_in_one_commit_and_five_statements(world: World, cost_of: Callable, calls: int) -> None:
    with a_tool(effect=Effect.IDEMPOTENT_WRITE) as tool:
        with cost_of() as cost:
            world.answers(tool, [{"amount": each} for each in range(calls)])
        assert (cost.statements, cost.writes) == (5, 1)


def test_calls_are_claimed_in_one_commit_and_recorded_in_one_statement_each(world: World, cost_of: Callable) -> None:
    with a_tool(effect=Effect.IDEMPOTENT_WRITE) as tool:
        world.answers(tool, [{"amount": each} for each in range(3)])
        worker = world.worker
        with cost_of() as claiming:
            claimed = lifecycle.claim(worker, retryable=True, tools=[tool], limit=3)
        with cost_of() as recording:
            for each in claimed:
                lifecycle.record(each.call, each.attempt, Succeeded("{}"), worker=worker)
    assert len(claimed) == 3
    assert (claiming.statements, claiming.writes) == (4, 1)
    assert (recording.statements, recording.writes) == (3, 3)


def test_a_look_in_vain_is_one_statement_and_writes_nothing(world: World, cost_of: Callable) -> None:
    worker = world.worker
    with a_tool(effect=Effect.READ) as tool, cost_of() as cost:
        assert lifecycle.claim(worker, retryable=True, tools=[tool], limit=3) == []
    assert (cost.statements, cost.writes) == (1, 0)


def test_the_statements_are_prepared(world: World) -> None:
    with a_tool(effect=Effect.READ) as tool:
        world.propose(tool, {"amount": 1})
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%toolcalls_session%'")
        assert cursor.fetchone()[0] >= 1


def test_the_edges_of_the_hot_statements_are_edges_of_the_declared_moves(world: World) -> None:
    with a_tool(effect=Effect.IDEMPOTENT_WRITE) as tool:
        call = world.propose(tool)
        world.run()
    taken = {(line.source, line.target) for line in world.journal(call) if line.move and line.source != "proposed"}
    assert taken == {(Status.APPROVED, Status.EXECUTING), (Status.EXECUTING, Status.SUCCEEDED)}
    assert taken <= EDGES
