"""What PostgreSQL itself refuses, whoever writes, and that it agrees with the methods (architecture; behaviour, section 6)."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import IntegrityError, ProgrammingError, connection, transaction

from tests.worlds import World, a_tool
from toolcalls import lifecycle
from toolcalls.journal import Line, seal_waiting, write
from toolcalls.models import Attempt, Call, JournalLine, Seal, Session, Team
from toolcalls.states import ADMISSION_ENDS_IN, EDGES, FINAL, MOVES, Status
from toolcalls.tools import InDoubt, ToolRejected
from toolcalls.triggers import FROZEN_ON_A_CALL

REFUSED = (IntegrityError, ProgrammingError)


@contextmanager
def undone() -> Iterator[Any]:
    """Run statements as they would commit, deferred checks included, and take them back."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            yield cursor
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        transaction.set_rollback(True)


def _awaiting(world: World) -> Call:
    with a_tool() as tool:
        return world.propose(tool)


def _approved(world: World) -> Call:
    with a_tool(effect="read") as tool:
        return world.propose(tool)


def _executing(world: World) -> Call:
    with a_tool(effect="read") as tool:
        call = world.propose(tool)
        lifecycle.claim(world.worker, retryable=True, tools=[tool], limit=1)
        return call


def _ran(world: World, run: Callable[..., Any]) -> Call:
    with a_tool(run, effect="non_idempotent_write", requires_approval=False) as tool:
        call = world.propose(tool)
        world.run()
        return call


def _unknown(world: World) -> Call:
    def run(arguments: Any, context: Any) -> None:
        raise InDoubt("cut off")

    return _ran(world, run)


def _succeeded(world: World) -> Call:
    return _ran(world, lambda arguments, context: 1)


def _failed(world: World) -> Call:
    def run(arguments: Any, context: Any) -> None:
        raise ToolRejected("NO", "no")

    return _ran(world, run)


def _rejected(world: World) -> Call:
    return world.reject(_awaiting(world))


def _exhausted(world: World) -> Call:
    with a_tool() as tool:
        return world.propose(tool, session=world.open(calls=0))


REACH: dict[Status, Callable[[World], Call]] = {
    Status.AWAITING_APPROVAL: _awaiting,
    Status.APPROVED: _approved,
    Status.EXECUTING: _executing,
    Status.OUTCOME_UNKNOWN: _unknown,
    Status.SUCCEEDED: _succeeded,
    Status.FAILED: _failed,
    Status.REJECTED: _rejected,
    Status.BUDGET_EXHAUSTED: _exhausted,
}


# -- methods, table and triggers are one


def test_every_transition_method_is_a_row_of_the_table() -> None:
    methods: dict[str, tuple[set[str], str]] = {}
    for each in Call._meta.get_field("status").get_all_transitions(Call):
        sources, _ = methods.setdefault(each.name, (set(), each.target))
        sources.add(each.source)
    assert methods == {verb: (set(sources), target) for verb, (sources, target) in MOVES.items()}


def test_nothing_leaves_a_final_state_and_every_other_state_is_left() -> None:
    left = {source for source, _ in EDGES}
    assert left == set(Status) - FINAL


@pytest.mark.parametrize("source", Status)
def test_the_database_takes_exactly_the_edges_of_the_table(world: World, source: Status) -> None:
    call = world.now(REACH[source](world))
    assert call.status == source
    taken, reasons = set(), set()
    for target in Status:
        try:
            with undone() as cursor:
                cursor.execute(
                    """UPDATE toolcalls_call SET status = %s, moves = moves + 1, due_at = NULL, live_attempt = NULL,
                        finished_at = CASE WHEN %s THEN coalesce(finished_at, clock_timestamp()) END WHERE id = %s""",
                    [target, target in FINAL, call.pk],
                )
                write([_line(call, move=call.moves + 1, target=target)])
            taken.add(target)
        except REFUSED as error:
            if source != target:
                reasons.add(str(error).splitlines()[0])
    assert reasons <= {"dexsite: there is no such edge"}
    # To stay is no edge; a row that is written without moving is another matter.
    assert taken - {source} == {target for start, target in EDGES if start == source}


def _line(call: Call, **values: Any) -> Line:
    return Line(call.team_id, "call.moved", "test", session=call.session_id, call=call.pk, **values)


# -- a call begins


@pytest.mark.parametrize("status", [*Status, "proposed", "validated", ""])
def test_a_call_is_inserted_only_where_admission_ends(world: World, status: str) -> None:
    call = _awaiting(world)
    try:
        with undone() as cursor:
            _insert_like(cursor, call, status=status)
        inserted = True
    except REFUSED:
        inserted = False
    assert inserted is (status in ADMISSION_ENDS_IN)


@pytest.mark.parametrize("change", [{"moves": 0}, {"claims": 1}])
def test_a_call_does_not_begin_with_a_past(world: World, change: dict[str, int]) -> None:
    call = _awaiting(world)
    with pytest.raises(REFUSED, match="in which admission ends"), undone() as cursor:
        _insert_like(cursor, call, status="failed", **change)


def _insert_like(cursor: Any, call: Call, **values: Any) -> None:
    """Insert a row like this call's, with these columns changed, and the line that tells of it."""
    final = values["status"] in FINAL
    changed = {"tool_call_id": "another", "operation": "another", "due_at": None, **values}
    finished = "clock_timestamp()" if final else "NULL"
    cursor.execute(
        f"""INSERT INTO toolcalls_call SELECT (jsonb_populate_record(c, %s::jsonb
            || jsonb_build_object('id', gen_random_uuid(), 'finished_at', {finished}))).* FROM toolcalls_call c WHERE id = %s
            RETURNING id, moves""",
        [json.dumps(changed), call.pk],
    )
    identity, moves = cursor.fetchone()
    write([Line(call.team_id, "call.moved", "test", call=identity, move=moves, target=values["status"])])


# -- a move has its line


@pytest.mark.parametrize(
    "line", [None, {"move": 9, "target": "rejected"}, {"move": 2, "target": "failed"}, {"target": "rejected"}]
)
def test_a_move_without_its_own_line_is_refused_at_the_commit(world: World, line: dict[str, Any] | None) -> None:
    """S-G15."""
    call = _awaiting(world)

    @transaction.atomic
    def move() -> None:
        write([_line(call, **line)] if line else [Line(call.team_id, "call.note", "test")])
        Call.objects.filter(pk=call.pk).update(status="rejected", moves=2, finished_at=lifecycle.clock(), alarm_at=None)

    with pytest.raises(REFUSED, match="journal line in the same transaction"):
        move()
    assert world.now(call).status == "awaiting_approval"


def test_a_call_without_its_first_line_is_refused_at_the_commit(world: World) -> None:
    call = _awaiting(world)
    with pytest.raises(REFUSED, match="journal line in the same transaction"), transaction.atomic():
        Call(**{**_row(call), "id": None, "tool_call_id": "new", "operation": "new"}).save(force_insert=True)


def _row(call: Call) -> dict[str, Any]:
    names = [each.attname for each in Call._meta.concrete_fields]
    row = Call.objects.values(*names).get(pk=call.pk)
    del row["id"]
    return row


def test_a_move_counts_by_one(world: World) -> None:
    call = _awaiting(world)
    with pytest.raises(REFUSED, match="no such edge"):
        Call.objects.filter(pk=call.pk).update(status="rejected", moves=3, finished_at=lifecycle.clock(), alarm_at=None)


# -- what is frozen


OTHER = {
    "UUIDField": "gen_random_uuid()",
    "ForeignKey": "gen_random_uuid()",
    "OneToOneField": "gen_random_uuid()",
    "BooleanField": "NOT {}",
    "SmallIntegerField": "{} + 1",
    "IntegerField": "{} + 1",
    "DateTimeField": "clock_timestamp() - interval '1 year'",
    "JSONField": """'{{"amount": 7}}'""",
}


def test_no_frozen_column_ever_changes(world: World) -> None:
    """F-24, S-B12."""
    call = _awaiting(world)

    @transaction.atomic
    def change(column: str, other: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE toolcalls_call SET {column} = {other} WHERE id = %s", [call.pk])

    for field in FROZEN_ON_A_CALL:
        column = Call._meta.get_field(field)
        other = OTHER.get(column.get_internal_type(), "'else'").format(column.column)
        with pytest.raises(REFUSED, match="Cannot update rows"):
            change(column.column, other)


def test_what_a_decision_rests_on_is_frozen() -> None:
    rests_on = {
        "tool", "tool_version", "operation", "arguments_hash", "effect", "writes", "retryable", "requires_approval",
        "approvers_needed", "policy", "measures", "max_attempts", "timeout", "grace", "start_within", "deadline",
    }  # fmt: skip
    assert rests_on <= set(FROZEN_ON_A_CALL)


@pytest.mark.parametrize("column", ["arguments", "received"])
def test_the_texts_can_be_emptied_once_and_never_rewritten(world: World, column: str) -> None:
    call = _awaiting(world)
    calls = Call.objects.filter(pk=call.pk)
    with pytest.raises(REFUSED, match="frozen arguments"):
        calls.update(**{column: '{"amount":9}'})
    calls.update(**{column: None})
    with pytest.raises(REFUSED, match="frozen arguments"):
        calls.update(**{column: "{}"})


@pytest.mark.parametrize(
    "change", [{"code": "OK"}, {"finished_at": "now"}, {"result_hash": "x"}, {"claims": 9}, {"entered": 9}]
)
def test_a_final_state_stands(world: World, change: dict[str, Any]) -> None:
    call = _rejected(world)
    values = {name: lifecycle.clock() if value == "now" else value for name, value in change.items()}
    with pytest.raises(REFUSED, match="a final state stands"):
        Call.objects.filter(pk=call.pk).update(**values)


@pytest.mark.parametrize(
    "change",
    [
        {"result": "{}"},
        {"raw_result": "{}"},
        {"warning": "w"},
        {"message": "m"},
        {"settled_verdict": "x"},
        {"retry": "wait"},
    ],
)
def test_what_a_final_call_says_is_not_rewritten(world: World, change: dict[str, Any]) -> None:
    call = _succeeded(world)
    with pytest.raises(REFUSED, match="a final state stands"):
        Call.objects.filter(pk=call.pk).update(**change)


def test_the_result_of_a_final_call_can_be_emptied_once(world: World) -> None:
    calls = Call.objects.filter(pk=_succeeded(world).pk)
    calls.update(result=None)
    with pytest.raises(REFUSED, match="a final state stands"):
        calls.update(result="{}")


@pytest.mark.parametrize(
    "table",
    [
        "toolcalls_call",
        "toolcalls_attempt",
        "toolcalls_journalline",
        "toolcalls_seal",
        "approvals_decision",
        "toolcalls_team",
    ],
)
def test_no_table_of_the_past_is_emptied(world: World, table: str) -> None:
    call = _succeeded(world)
    with pytest.raises(REFUSED, match="not emptied"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {table} CASCADE")
    assert Call.objects.filter(pk=call.pk).exists()


def test_a_chain_is_not_cut_at_its_head(world: World) -> None:
    _succeeded(world)
    while seal_waiting(chains=10):
        pass
    for heads in (Session.objects.filter(pk=world.session.pk), Team.objects.filter(pk=world.team.pk)):
        for change in ({"sealed_number": 0}, {"sealed_hash": "x"}):
            with pytest.raises(REFUSED, match="only grows"):
                heads.update(**change)


def test_a_doubt_is_never_taken_back(world: World) -> None:
    call = _unknown(world)
    with pytest.raises(REFUSED, match="in doubt"):
        Call.objects.filter(pk=call.pk).update(doubt="")


def test_nothing_that_happened_is_deleted(world: World) -> None:
    call = _succeeded(world)
    while seal_waiting(chains=10):
        pass
    attempt = Attempt.objects.get(call=call)
    line = JournalLine.objects.filter(call=call).first()
    assert line is not None
    for rows in (
        Call.objects.filter(pk=call.pk),
        Attempt.objects.filter(pk=attempt.pk),
        JournalLine.objects.filter(pk=line.pk),
        Seal.objects.filter(pk=line.pk),
    ):
        with pytest.raises(REFUSED, match=r"(?i)cannot delete|append-only"), transaction.atomic():
            rows._raw_delete(rows.db)
        assert rows.exists()


@pytest.mark.parametrize(
    "change", [{"state": "failed"}, {"code": "X"}, {"finished_at": None}, {"number": 7}, {"entered_at": None}]
)
def test_an_attempt_that_ended_stands(world: World, change: dict[str, Any]) -> None:
    call = _succeeded(world)
    with pytest.raises(REFUSED):
        Attempt.objects.filter(call=call).update(**change)


# -- journal and seals


def _told(world: World) -> JournalLine:
    call = _awaiting(world)
    world.reject(call, reason="because")
    line = world.journal(call)[-1]
    assert line.detail is not None
    assert "because" in line.detail
    return line


@pytest.mark.parametrize(
    "change",
    [
        {"event": "x"},
        {"actor": "x"},
        {"code": "x"},
        {"target": "x"},
        {"move": 9},
        {"at": "now"},
        {"detail_hash": "x"},
        {"detail": "{}"},
    ],
)
def test_a_journal_line_is_never_rewritten(world: World, change: dict[str, Any]) -> None:
    line = _told(world)
    values = {name: lifecycle.clock() if value == "now" else value for name, value in change.items()}
    with pytest.raises(REFUSED, match="append-only"):
        JournalLine.objects.filter(pk=line.pk).update(**values)


def test_what_lies_beside_a_line_can_be_emptied_once(world: World) -> None:
    line = _told(world)
    lines = JournalLine.objects.filter(pk=line.pk)
    lines.update(detail=None)
    with pytest.raises(REFUSED, match="append-only"):
        lines.update(detail=line.detail)
    left = lines.get()
    assert (left.detail, left.detail_hash) == (None, line.detail_hash)


@pytest.mark.parametrize("change", [{"hash": "x"}, {"number": 99}])
def test_a_seal_is_never_changed(world: World, change: dict[str, Any]) -> None:
    line = _told(world)
    while seal_waiting(chains=10):
        pass
    with pytest.raises(REFUSED, match="append-only"):
        Seal.objects.filter(pk=line.pk).update(**change)
