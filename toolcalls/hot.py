"""The statements of the hot path: admit, claim, enter, record. Only ``lifecycle`` uses them.

Each is one SQL statement that moves calls and writes their journal lines together, guarded by the call's live attempt
rather than by a status literal: with stale statistics a partial index on the status makes such a guard eight times
slower (performance notes). The triggers verify them as they verify everything else, and a test holds their edges
against the ``@transition`` methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from toolcalls import journal, sql


@dataclass
class NewCall:
    """A row of calls as admission inserts it. Columns that are not here begin at the database's defaults."""

    id: UUID
    team_id: UUID
    agent_id: UUID
    session_id: UUID
    turn_id: UUID
    tool_call_id: str
    tool: str
    received: str | None
    received_hash: str
    proposed_at: datetime
    trace_id: str
    status: str
    moves: int
    tool_version: str = ""
    operation_id: str = ""
    operation: str = ""
    arguments: str | None = None
    arguments_hash: str = ""
    effect: str = ""
    writes: bool = True
    retryable: bool = False
    requires_approval: bool = False
    approvers_needed: int = 1
    policy: str = ""
    why: str = ""
    measures: dict[str, Any] | None = None
    summary: str = ""
    max_attempts: int = 1
    timeout: int = 30
    grace: int = 10
    start_within: int = 900
    stored_limit: int = 1024 * 1024
    deadline: datetime | None = None
    replay_of_id: UUID | None = None
    refers_to_id: UUID | None = None
    amends_id: UUID | None = None
    code: str = ""
    message: str = ""
    retry: str = ""
    result: str | None = None
    raw_result: str | None = None
    result_hash: str = ""
    warning: str = ""
    due_at: datetime | None = None
    alarm_at: datetime | None = None
    approved_at: datetime | None = None
    finished_at: datetime | None = None


_SQL_TYPES: dict[Any, str] = {
    UUID: "uuid",
    UUID | None: "uuid",
    str: "text",
    str | None: "text",
    int: "int",
    bool: "bool",
    datetime: "timestamptz",
    datetime | None: "timestamptz",
    dict[str, Any] | None: "jsonb",
}
_CALL_COLUMNS = ", ".join(each.name for each in fields(NewCall))
_CALL_TYPES = ", ".join(f"{each.name} {_SQL_TYPES[each.type]}" for each in fields(NewCall))
"""Rows travel as one JSON text: the statement is the same for any number of calls, and there is little to bind."""


@dataclass(frozen=True)
class Room:
    """Where calls are admitted to: a session's turn, and what they take of the session's budgets.

    opened_at: set where the turn has yet to be inserted. counts: the turn takes its share of ``turns`` now.
    """

    session: UUID
    turn: UUID
    turn_name: str
    opened_at: datetime | None
    counts: bool
    calls_used: int


def admit(calls: Sequence[NewCall], lines: Sequence[journal.Line], room: Room) -> None:
    """Insert calls with their journal lines and their turn, and take their shares of the budgets: one statement."""
    parts, values = [], []
    if room.opened_at is not None:
        parts.append(
            "opened AS (INSERT INTO toolcalls_turn (id, session_id, turn_id, counted, opened_at) VALUES (%s, %s, %s, %s, %s))"
        )
        values += [room.turn, room.session, room.turn_name, room.counts, room.opened_at]
    elif room.counts:
        parts.append("counted AS (UPDATE toolcalls_turn SET counted = true WHERE id = %s)")
        values.append(room.turn)
    if room.calls_used or room.counts:
        parts.append("""used AS (UPDATE toolcalls_session SET calls_used = calls_used + %s, turns_used = turns_used + %s
            WHERE id = %s)""")
        values += [room.calls_used, int(room.counts), room.session]
    sql.run(
        f"""WITH {"".join(f"{part}, " for part in parts)}admitted AS (
            INSERT INTO toolcalls_call ({_CALL_COLUMNS}) SELECT {_CALL_COLUMNS} FROM json_to_recordset(%s) AS one ({_CALL_TYPES})
        )
        {journal.INSERT}""",
        [*values, journal.as_json([vars(call) for call in calls]), journal.as_json([line.row() for line in lines])],
    )


@dataclass(frozen=True)
class Candidate:
    """A due call that this claim has locked, with what the claim decides on."""

    id: UUID
    team_id: UUID
    agent_id: UUID
    session_id: UUID
    turn_name: str
    tool_call_id: str
    tool: str
    arguments: str
    hash_holds: bool
    status: str
    writes: bool
    claims: int
    entered: int
    entered_before: int
    doubt: str
    running_again: bool
    max_attempts: int
    timeout: int
    grace: int
    start_by: datetime
    agent_name: str
    agent_enabled: bool
    agent_tools: list[str]
    session_tools: list[str] | None
    on_behalf_of: str
    budget_left: bool
    twin: UUID | None
    stored_limit: int
    now: datetime

    @property
    def unstarted(self) -> bool:
        """Say whether no attempt has entered since the call was approved or ordered to run again."""
        return self.entered == self.entered_before


_LOCK_DUE = """
    WITH RECURSIVE teams AS (
        (SELECT team_id FROM toolcalls_call WHERE retryable = %(retryable)s AND due_at IS NOT NULL ORDER BY team_id LIMIT 1)
        UNION ALL
        SELECT (SELECT c.team_id FROM toolcalls_call c WHERE c.retryable = %(retryable)s AND c.due_at IS NOT NULL
                AND c.team_id > teams.team_id ORDER BY c.team_id LIMIT 1)
        FROM teams WHERE teams.team_id IS NOT NULL
    )
    SELECT one.id FROM teams CROSS JOIN LATERAL (
        SELECT c.id, c.team_id, c.due_at FROM toolcalls_call c
        WHERE c.team_id = teams.team_id AND c.retryable = %(retryable)s AND c.due_at <= statement_timestamp()
            AND c.tool || ' ' || c.tool_version = ANY(%(tools)s)
            AND NOT EXISTS (
                SELECT 1 FROM toolcalls_brake b
                WHERE (b.team_id IS NULL OR b.team_id = c.team_id) AND (b.agent_id IS NULL OR b.agent_id = c.agent_id)
                    AND (b.tool = '' OR b.tool = c.tool)
            )
        ORDER BY c.due_at LIMIT %(limit)s FOR NO KEY UPDATE OF c SKIP LOCKED
    ) one
    ORDER BY row_number() OVER (PARTITION BY one.team_id ORDER BY one.due_at), one.due_at LIMIT %(limit)s
"""

# A statement of its own: it reads the rows as they are under their locks, not as they were when the first one began.
_CANDIDATES = """
    SELECT c.id, c.team_id, c.agent_id, c.session_id, t.turn_id, c.tool_call_id, c.tool, c.arguments,
        c.arguments IS NOT NULL AND encode(sha256(convert_to(c.arguments, 'UTF8')), 'hex') = c.arguments_hash,
        c.status, c.writes, c.claims, c.entered, c.entered_before, c.doubt, c.running_again, c.max_attempts,
        c.timeout, c.grace, c.approved_at + make_interval(secs => c.start_within),
        a.name, a.enabled, ARRAY(SELECT jsonb_array_elements_text(a.tools)),
        CASE WHEN s.allowed_tools IS NOT NULL THEN ARRAY(SELECT jsonb_array_elements_text(s.allowed_tools)) END,
        s.on_behalf_of,
        c.entered = c.entered_before OR (
            (s.seconds_limit IS NULL OR clock_timestamp() <= s.opened_at + make_interval(secs => s.seconds_limit))
            AND (s.spend_limit IS NULL OR s.spend_used < s.spend_limit)),
        CASE WHEN c.writes AND c.entered = 0 AND NOT c.running_again THEN coalesce(
            (SELECT u.id FROM toolcalls_call u WHERE u.agent_id = c.agent_id AND u.operation = c.operation
                AND u.id <> c.id AND (u.status = 'outcome_unknown' OR u.running_again AND u.finished_at IS NULL) LIMIT 1),
            (SELECT u.id FROM toolcalls_call u WHERE u.agent_id = c.agent_id AND u.tool = c.tool
                AND u.arguments_hash = c.arguments_hash AND u.id <> c.id
                AND (u.status = 'outcome_unknown' OR u.running_again AND u.finished_at IS NULL) LIMIT 1)) END,
        c.stored_limit, clock_timestamp()
    FROM unnest(%s::uuid[]) WITH ORDINALITY AS locked (id, place) JOIN toolcalls_call c ON c.id = locked.id
        JOIN toolcalls_turn t ON t.id = c.turn_id JOIN toolcalls_agent a ON a.id = c.agent_id
        JOIN toolcalls_session s ON s.id = c.session_id
    ORDER BY locked.place
"""


def anything_due(*, retryable: bool) -> bool:
    """Say, at little cost, whether looking for due calls of a kind is worth a transaction."""
    statement = """SELECT 1 FROM toolcalls_call WHERE retryable = %s AND due_at <= statement_timestamp() LIMIT 1"""
    return bool(sql.run(statement, [retryable]))


def lock_due(*, retryable: bool, tools: Sequence[tuple[str, str]], limit: int) -> list[Candidate]:
    """Lock due calls of a kind, oldest first and fair between teams, skipping what others hold or a brake stops.

    ``tools`` are the (name, version) pairs that this process has; calls of others stay for a process that has them.
    """
    have = [f"{name} {version}" for name, version in tools]
    asked: dict[str, Any] = {"retryable": retryable, "tools": have, "limit": limit}
    locked = [row[0] for row in sql.run(_LOCK_DUE, asked)]
    return [Candidate(*row) for row in sql.run(_CANDIDATES, [locked])] if locked else []


def claim(worker: UUID, chosen: Sequence[tuple[Candidate, bool]]) -> dict[UUID, datetime]:
    """Move locked candidates to executing, insert their attempts and journal lines: one statement.

    The flag says whether the claim is the mark: then the attempt has entered. Gives each call's attempt deadline.
    """
    rows = sql.run(
        """
        WITH chosen AS (
            SELECT * FROM unnest(%s::uuid[], %s::bool[]) AS chosen (id, enters)
        ), before AS (
            SELECT c.id, c.status, chosen.enters FROM toolcalls_call c JOIN chosen USING (id)
        ), moved AS (
            UPDATE toolcalls_call c SET
                status = 'executing', moves = moves + (c.status = 'approved')::int, claims = claims + 1,
                entered = entered + enters::int, live_attempt = claims + 1, due_at = NULL, code = '', message = '',
                started_at = coalesce(started_at, clock_timestamp()),
                alarm_at = CASE WHEN enters
                    THEN clock_timestamp() + make_interval(secs => timeout + c.grace)
                    ELSE approved_at + make_interval(secs => start_within) END
            FROM before WHERE c.id = before.id
            RETURNING c.id, c.team_id, c.session_id, c.claims, c.entered, c.moves, c.timeout, before.status AS source, enters
        ), attempts AS (
            INSERT INTO toolcalls_attempt (call_id, number, entered_as, worker_id, state, claimed_at, entered_at, deadline)
            SELECT id, claims, CASE WHEN enters THEN entered END, %s, CASE WHEN enters THEN 'entered' ELSE 'claimed' END,
                clock_timestamp(), CASE WHEN enters THEN clock_timestamp() END,
                CASE WHEN enters THEN clock_timestamp() + make_interval(secs => timeout) END
            FROM moved RETURNING call_id, deadline
        ), lines AS (
            INSERT INTO toolcalls_journalline
                (team_id, session_id, call_id, event, move, source, target, code, actor, attempt, detail_hash, at)
            SELECT team_id, session_id, id,
                CASE WHEN source = 'approved' THEN 'call.moved' ELSE 'attempt.claimed' END,
                CASE WHEN source = 'approved' THEN moves END, CASE WHEN source = 'approved' THEN source ELSE '' END,
                CASE WHEN source = 'approved' THEN 'executing' ELSE '' END, '', %s, claims, '', clock_timestamp()
            FROM moved
        )
        SELECT call_id, deadline FROM attempts
        """,
        [[each.id for each, _ in chosen], [enters for _, enters in chosen], worker, f"worker:{worker}"],
    )
    return dict(rows)


def enter(call: UUID, attempt: int, *, worker: UUID) -> datetime | None:
    """Mark a claimed attempt as entered, unless it was fenced, cancelled, or start_within has passed.

    Gives the attempt's deadline; None where the mark was refused.
    """
    rows = sql.run(
        """
        WITH moved AS (
            UPDATE toolcalls_call SET entered = entered + 1,
                alarm_at = clock_timestamp() + make_interval(secs => timeout + grace)
            WHERE id = %s AND live_attempt = %s AND cancel_asked_at IS NULL
                AND clock_timestamp() <= approved_at + make_interval(secs => start_within)
            RETURNING id, team_id, session_id, live_attempt, entered, timeout
        ), marked AS (
            UPDATE toolcalls_attempt a SET state = 'entered', entered_at = clock_timestamp(), entered_as = moved.entered,
                deadline = clock_timestamp() + make_interval(secs => moved.timeout)
            FROM moved WHERE a.call_id = moved.id AND a.number = moved.live_attempt RETURNING a.deadline
        ), line AS (
            INSERT INTO toolcalls_journalline
                (team_id, session_id, call_id, event, source, target, code, actor, attempt, detail_hash, at)
            SELECT team_id, session_id, id, 'attempt.entered', '', '', '', %s, live_attempt, '', clock_timestamp()
            FROM moved
        )
        SELECT deadline FROM marked
        """,
        [call, attempt, f"worker:{worker}"],
    )
    return rows[0][0] if rows else None


def record_success(call: UUID, attempt: int, *, worker: UUID, result: str, result_hash: str, raw: str | None) -> bool:
    """Record that the live attempt succeeded, and with it the call: one statement. False where it is no longer live."""
    rows = sql.run(
        """
        WITH moved AS (
            UPDATE toolcalls_call SET status = 'succeeded', moves = moves + 1, code = 'OK', message = '', retry = '',
                result = %s, result_hash = %s, raw_result = %s, live_attempt = NULL, alarm_at = NULL,
                finished_at = clock_timestamp()
            WHERE id = %s AND live_attempt = %s
            RETURNING id, team_id, session_id, moves, claims
        ), ended AS (
            UPDATE toolcalls_attempt a SET state = 'succeeded', code = 'OK', finished_at = clock_timestamp()
            FROM moved WHERE a.call_id = moved.id AND a.number = moved.claims
        )
        INSERT INTO toolcalls_journalline
            (team_id, session_id, call_id, event, move, source, target, code, actor, attempt, detail_hash, at)
        SELECT team_id, session_id, id, 'call.moved', moves, 'executing', 'succeeded', 'OK', %s, claims, '',
            clock_timestamp() FROM moved
        RETURNING id
        """,
        [result, result_hash, raw, call, attempt, f"worker:{worker}"],
    )
    return bool(rows)
