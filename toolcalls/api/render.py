"""Calls and sessions as the API shows them. Only what is stored; nothing is decided here."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from toolcalls import masking, policy, sql, tools
from toolcalls.canonical import parse, result_text
from toolcalls.codes import advice, next_actions
from toolcalls.hot import NewCall
from toolcalls.models import Call, JournalLine, Session

LATE_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a call's row is shown. Read by one statement of its own: the ORM's took ten times as long."""

    pk: UUID
    session: UUID
    session_name: str
    turn_name: str
    tool_call_id: str
    operation_id: str
    operation: str
    tool: str
    tool_version: str
    status: str
    code: str
    message: str
    retry: str
    replay_of: UUID | None
    refers_to: UUID | None
    amends: UUID | None
    result: str | None
    warning: str
    effect: str
    requires_approval: bool
    approvers_needed: int
    policy: str
    why: str
    measures: str | None
    arguments: str | None
    arguments_hash: str
    deadline: datetime | None
    settled_verdict: str
    settled_at: datetime | None
    trace_id: str
    proposed_at: datetime
    approved_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    reported_at: datetime | None
    amended_to: UUID | None = None
    attempts: list[list[Any]] | None = None


_OWN = """c.tool_call_id, c.operation_id, c.operation, c.tool, c.tool_version, c.status, c.code, c.message, c.retry, c.replay_of_id,
    c.refers_to_id, c.amends_id, coalesce(c.result, original.result), c.warning, c.effect, c.requires_approval,
    c.approvers_needed, c.policy, c.why, c.measures::text, c.arguments, c.arguments_hash, c.deadline, c.settled_verdict,
    c.settled_at, c.trace_id, c.proposed_at, c.approved_at, c.started_at, c.finished_at, c.reported_at"""

_READ = f"""
    SELECT c.id, c.session_id, s.session_id, t.turn_id, {_OWN},
        (SELECT a.id FROM toolcalls_call a WHERE a.amends_id = c.id),
        (SELECT json_agg(json_build_array(a.number, a.state, coalesce(a.entered_at, a.claimed_at), a.finished_at, a.code,
                a.late_state, a.late_code, a.late_at, left(a.late_text, {LATE_TEXT})) ORDER BY a.number)
            FROM toolcalls_attempt a WHERE a.call_id = c.id)
    FROM toolcalls_call c JOIN toolcalls_session s ON s.id = c.session_id JOIN toolcalls_turn t ON t.id = c.turn_id
        LEFT JOIN toolcalls_call original ON original.id = c.replay_of_id
    WHERE c.id = ANY(%s)
"""


def when(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def fresh_call(new: NewCall, *, session: str, turn: str) -> dict[str, Any]:
    """Show a call that was just admitted, as it was inserted: nothing is read."""
    own = {each.name: getattr(new, each.name) for each in fields(Shown) if hasattr(new, each.name)}
    shown = Shown(
        **own | {"measures": json.dumps(new.measures)},
        pk=new.id,
        session=new.session_id,
        session_name=session,
        turn_name=turn,
        replay_of=new.replay_of_id,
        refers_to=new.refers_to_id,
        amends=new.amends_id,
        settled_verdict="",
        settled_at=None,
        started_at=None,
        reported_at=None,
    )
    return _call(shown, [], replayed=False)


def calls(ids: Sequence[UUID], *, replayed: Collection[UUID] = ()) -> list[dict[str, Any]]:
    """Show stored calls, in the order of their IDs given; those in ``replayed`` answered a repetition."""
    found = {row[0]: Shown(*row) for row in sql.run(_READ, [list(ids)])}
    asked = [row.pk for row in found.values() if row.requires_approval]
    decisions = _decisions(asked) if asked else {}
    return [
        _call(found[each], decisions.get(each, []), replayed=each in replayed or found[each].replay_of is not None)
        for each in ids
    ]


def call(identity: UUID) -> dict[str, Any]:
    """Show one stored call."""
    return calls([identity])[0]


def _decisions(asked: Sequence[UUID]) -> dict[UUID, list[dict[str, Any]]]:
    # The decisions belong to another app, which imports this one and never the reverse.
    decided = Call.objects.filter(pk__in=asked).only("pk").prefetch_related("decisions")
    return {
        each.pk: [{"decision": one.decision, "reason": one.reason, "at": when(one.at)} for one in each.decisions.all()]
        for each in decided
    }


def _call(row: Shown, decisions: list[dict[str, Any]], *, replayed: bool) -> dict[str, Any]:
    retry = advice(row.status, row.code, tool_says=row.retry)
    frozen = policy.shown(row.policy) if row.policy else None
    sensitive = frozen["values"]["sensitive"] if frozen else []
    message = row.message or _MEANINGS.get(row.status, "")
    asked = {"deadline": when(row.deadline), "needed": row.approvers_needed, "decisions": decisions}
    return {
        "id": str(row.pk),
        "session_id": row.session_name,
        "turn_id": row.turn_name,
        "tool_call_id": row.tool_call_id,
        "operation_id": row.operation_id or None,
        "operation": masking.shown_operation(row.operation, row.arguments_hash, sensitive),
        "tool": row.tool,
        "tool_version": row.tool_version,
        "status": str(row.status),
        "code": row.code,
        "message": masking.masked_text(message),
        "retry": str(retry),
        "replayed": replayed,
        "replay_of": _id(row.replay_of),
        "refers_to": _id(row.refers_to),
        "result": _result(row, frozen, sensitive),
        "partial": row.code == "PARTIAL",
        "warning": row.warning,
        "effect": row.effect,
        "requires_approval": row.requires_approval,
        "policy": {**frozen, "why": row.why, "measures": masking.masked(json.loads(row.measures or "null"), sensitive)}
        if frozen
        else None,
        "arguments": masking.masked(parse(row.arguments), sensitive) if row.arguments else None,
        "arguments_hash": masking.shown_hash(row.arguments_hash, sensitive),
        "idempotency_key": f"{row.session}/{row.turn_name}/{row.tool_call_id}",
        "attempts": [_attempt(*each) for each in row.attempts or ()],
        "approval": asked if row.requires_approval else None,
        "settled": {"verdict": row.settled_verdict, "at": when(row.settled_at)} if row.settled_at else None,
        "amended_to": _id(row.amended_to),
        "amends": _id(row.amends),
        "allowed_next_actions": next_actions(row.status, retry),
        "trace_id": row.trace_id,
        "proposed_at": when(row.proposed_at),
        "approved_at": when(row.approved_at),
        "started_at": when(row.started_at),
        "finished_at": when(row.finished_at),
        "reported_at": when(row.reported_at),
    }


_MEANINGS = {
    "awaiting_approval": "This call waits for a person's decision on the desk. It has not run.",
    "approved": "This call will run as soon as a worker takes it.",
    "executing": "This call is being executed.",
}


def _id(value: UUID | None) -> str | None:
    return str(value) if value else None


def _result(row: Shown, frozen: dict[str, Any] | None, sensitive: list[str]) -> Any:
    """Show the stored result, cut to the policy's shown limit with a visible marker."""
    if row.result is None:
        return None
    value = masking.masked(json.loads(row.result), sensitive)
    limit = frozen["values"]["shown_limit"] if frozen else 16 * 1024
    return value if len(row.result) * 4 <= limit else json.loads(result_text(value, limit=limit)[0])


def _attempt(
    number: int,
    state: str,
    started_at: str,
    finished_at: str | None,
    code: str,
    late_state: str,
    late_code: str,
    late_at: str | None,
    late_text: str | None,
) -> dict[str, Any]:
    late = {"state": late_state, "code": late_code, "at": late_at, "text": masking.masked_text(late_text or "")}
    return {
        "number": number,
        "state": state,
        "started_at": started_at,
        "finished_at": finished_at,
        "code": code,
        "late": late if late_at else None,
    }


def session(row: Session) -> dict[str, Any]:
    """Show a session with its budgets, turns, calls, what waits, and the application's notes."""
    shown = calls(list(Call.objects.filter(session=row).order_by("pk").values_list("pk", flat=True)))
    notes = JournalLine.objects.filter(session=row, event="session.note").order_by("pk")
    return {
        **session_head(row),
        "turns": [
            {"turn_id": each.turn_id, "opened_at": when(each.opened_at), "cancelled_at": when(each.cancelled_at)}
            for each in row.turns.order_by("pk")
        ],
        "calls": shown,
        "waiting": [each["id"] for each in shown if each["status"] == "awaiting_approval"],
        "notes": [
            {"from": "application", "call": _id(each.call_id), "code": each.code, "at": when(each.at)} for each in notes
        ],
    }


def session_head(row: Session) -> dict[str, Any]:
    """Show a session without what happened in it."""
    ends = row.opened_at + timedelta(seconds=row.seconds_limit) if row.seconds_limit else None
    until = row.ended_at or datetime.now(row.opened_at.tzinfo)
    return {
        "id": str(row.pk),
        "session_id": row.session_id,
        "status": row.status,
        "on_behalf_of": row.on_behalf_of,
        "default_effect": row.default_effect or None,
        "allowed_tools": row.allowed_tools,
        "metadata": json.loads(row.metadata) if row.metadata else {},
        "budgets": {
            "calls": {"limit": row.calls_limit, "used": row.calls_used},
            "turns": {"limit": row.turns_limit, "used": row.turns_used},
            "seconds": {
                "limit": row.seconds_limit,
                "used": int((min(until, ends or until) - row.opened_at).total_seconds()),
            },
            "spend": {"limit": row.spend_limit, "used": row.spend_used},
        },
        "opened_at": when(row.opened_at),
        "ended_at": when(row.ended_at),
    }


def tool(each: tools.Tool, *, effect: str) -> dict[str, Any]:
    """Show a tool's definition in the neutral shape."""
    result = each.result.model_json_schema() if each.result else None
    return {
        "name": each.name,
        "description": each.description,
        "version": each.version,
        "effect": effect,
        "input_schema": {**each.schema, "additionalProperties": False},
        "output_schema": result,
    }
