"""Calls and sessions as the API shows them. Only what is stored; nothing is decided here."""

import json
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Prefetch, QuerySet

from toolcalls import masking, tools
from toolcalls.canonical import parse, result_text
from toolcalls.codes import advice, next_actions
from toolcalls.models import Attempt, Call, JournalLine, Session

LATE_TEXT = 1000


def complete(calls: QuerySet[Call]) -> QuerySet[Call]:
    """Fetch along what rendering a call reads."""
    attempts = Attempt.objects.order_by("number").defer("message")
    return (
        calls.select_related("session", "turn", "replay_of", "amended_by", "amends")
        .defer("received", "raw_result", "replay_of__received", "replay_of__raw_result")
        .prefetch_related(Prefetch("attempts", attempts), "decisions")
    )


def when(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def fresh_call(call: Call, *, replayed: bool) -> dict[str, Any]:
    """Show a call that was just admitted: it has no attempts and no decisions yet, and none are looked for."""
    return _call(call, replayed=replayed, attempts=[], decisions=[], amended_to=None)


def call(row: Call, *, replayed: bool = False) -> dict[str, Any]:
    """Show a call; the query should have gone through ``complete``."""
    amended = getattr(row, "amended_by", None)
    return _call(
        row,
        replayed=replayed or row.replay_of_id is not None,
        attempts=[_attempt(each) for each in row.attempts.all()],
        decisions=[
            {"decision": each.decision, "reason": each.reason, "at": when(each.at)}
            for each in row.decisions.all()
        ],
        amended_to=str(amended.pk) if amended else None,
    )


def _call(
    row: Call,
    *,
    replayed: bool,
    attempts: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    amended_to: str | None,
) -> dict[str, Any]:
    retry = advice(row.status, row.code, tool_says=row.retry)
    frozen = json.loads(row.policy) if row.policy else None
    sensitive = frozen["values"]["sensitive"] if frozen else []
    message = row.message or _MEANINGS.get(row.status, "")
    return {
        "id": str(row.pk),
        "session_id": row.session.session_id,
        "turn_id": row.turn.turn_id,
        "tool_call_id": row.tool_call_id,
        "operation_id": row.operation_id or None,
        "operation": row.operation,
        "tool": row.tool,
        "tool_version": row.tool_version,
        "status": str(row.status),
        "code": row.code,
        "message": masking.masked_text(message),
        "retry": str(retry),
        "replayed": replayed,
        "replay_of": _id(row.replay_of_id),
        "refers_to": _id(row.refers_to_id),
        "result": _result(row, frozen, sensitive),
        "partial": row.code == "PARTIAL",
        "warning": row.warning,
        "effect": row.effect,
        "requires_approval": row.requires_approval,
        "policy": _policy(row, frozen),
        "arguments": masking.masked(parse(row.arguments), sensitive) if row.arguments else None,
        "arguments_hash": masking.shown_hash(row),
        "idempotency_key": row.idempotency_key,
        "attempts": attempts,
        "approval": {"deadline": when(row.deadline), "needed": row.approvers_needed, "decisions": decisions}
        if row.requires_approval
        else None,
        "settled": {"verdict": row.settled_verdict, "at": when(row.settled_at)} if row.settled_at else None,
        "amended_to": amended_to,
        "amends": _id(row.amends_id),
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


def _id(value: Any) -> str | None:
    return str(value) if value else None


def _policy(row: Call, frozen: dict[str, Any] | None) -> dict[str, Any] | None:
    return {**frozen, "why": row.why, "measures": row.measures} if frozen else None


def _result(row: Call, frozen: dict[str, Any] | None, sensitive: list[str]) -> Any:
    """Show the stored result, cut to the policy's shown limit with a visible marker; a replay shows its original's."""
    text = row.replay_of.result if row.replay_of_id and row.replay_of else row.result
    if text is None:
        return None
    value = masking.masked(json.loads(text), sensitive)
    limit = frozen["values"]["shown_limit"] if frozen else 16 * 1024
    return value if len(text) * 4 <= limit else json.loads(result_text(value, limit=limit)[0])


def _attempt(each: Attempt) -> dict[str, Any]:
    late = None
    if each.late_at:
        text = masking.masked_text((each.late_text or "")[:LATE_TEXT])
        late = {"state": each.late_state, "code": each.late_code, "at": when(each.late_at), "text": text}
    return {
        "number": each.number,
        "state": each.state,
        "started_at": when(each.entered_at or each.claimed_at),
        "finished_at": when(each.finished_at),
        "code": each.code,
        "late": late,
    }


def session(row: Session) -> dict[str, Any]:
    """Show a session with its budgets, turns, calls, what waits, and the application's notes."""
    calls = [call(each) for each in complete(Call.objects.filter(session=row)).order_by("pk")]
    notes = JournalLine.objects.filter(session=row, event="session.note").order_by("pk")
    return {
        **session_head(row),
        "turns": [
            {"turn_id": each.turn_id, "opened_at": when(each.opened_at), "cancelled_at": when(each.cancelled_at)}
            for each in row.turns.order_by("pk")
        ],
        "calls": calls,
        "waiting": [each["id"] for each in calls if each["status"] == "awaiting_approval"],
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
