"""What PostgreSQL itself refuses, whoever writes. Models list these in ``Meta.triggers``.

Methods declare, lifecycle performs, PostgreSQL verifies (architecture): an edge that does not exist, a change of frozen
input, a move without its journal line, a settled doubt, any change of the past.
"""

import pgtrigger

from toolcalls.states import ADMISSION_ENDS_IN, EDGES, Status

FROZEN_ON_A_CALL = (
    "id", "team", "agent", "session", "turn", "tool_call_id", "tool", "tool_version", "operation_id", "operation",
    "received_hash", "arguments_hash", "effect", "writes", "retryable", "requires_approval", "approvers_needed",
    "policy", "measures", "max_attempts", "timeout", "grace", "start_within", "stored_limit", "deadline", "replay_of", "amends", "proposed_at", "trace_id",
)  # fmt: skip

_EDGES = ", ".join(f"('{source}', '{target}')" for source, target in sorted(EDGES))
_ENDS = ", ".join(f"'{status}'" for status in sorted(ADMISSION_ENDS_IN))


def _when(condition: str) -> pgtrigger.Condition:
    # pgtrigger adds brackets of its own only to what does not begin with one.
    return pgtrigger.Condition(f"({condition})")


def _refuse(reason: str) -> str:
    return f"RAISE EXCEPTION 'dexsite: {reason}' USING ERRCODE = 'integrity_constraint_violation';"


def _append_only(name: str, reason: str) -> pgtrigger.Trigger:
    return pgtrigger.Trigger(
        name=name, operation=pgtrigger.Update | pgtrigger.Delete, when=pgtrigger.Before, func=_refuse(reason)
    )


def _grows_only(name: str) -> pgtrigger.Trigger:
    return pgtrigger.Trigger(
        name=name,
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "NEW.sealed_number < OLD.sealed_number "
            "OR NEW.sealed_number = OLD.sealed_number AND NEW.sealed_hash <> OLD.sealed_hash"
        ),
        func=_refuse("a chain only grows"),
    )


def not_emptied(name: str) -> pgtrigger.Trigger:
    """Refuse to empty a whole table, which triggers on rows would not see."""
    return pgtrigger.Trigger(
        name=name,
        operation=pgtrigger.Truncate,
        when=pgtrigger.Before,
        level=pgtrigger.Statement,
        func=_refuse("the past is not emptied"),
    )


TEAM = [_grows_only("a_teams_chain_is_not_cut")]

SESSION = [
    pgtrigger.ReadOnly(
        name="a_session_keeps_its_terms",
        fields=["id", "team", "agent", "session_id", "body_digest", "on_behalf_of", "default_effect", "allowed_tools",
                "calls_limit", "turns_limit", "seconds_limit", "spend_limit", "opened_at"],
    ),
    pgtrigger.Trigger(
        name="a_session_is_not_opened_again",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when("OLD.status <> NEW.status AND (OLD.status = 'cancelled' OR NEW.status = 'open')"),
        func=_refuse("a session is not opened again"),
    ),
    _grows_only("a_sessions_chain_is_not_cut"),
]  # fmt: skip

CALL = [
    pgtrigger.ReadOnly(name="what_was_admitted_is_frozen", fields=list(FROZEN_ON_A_CALL)),
    pgtrigger.Trigger(
        name="texts_are_frozen_until_retention_empties_them",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "(OLD.arguments IS DISTINCT FROM NEW.arguments AND NEW.arguments IS NOT NULL) OR "
            "(OLD.received IS DISTINCT FROM NEW.received AND NEW.received IS NOT NULL)"
        ),
        func=_refuse("frozen arguments never change"),
    ),
    pgtrigger.Trigger(
        name="a_call_begins_where_admission_ends",
        operation=pgtrigger.Insert,
        when=pgtrigger.Before,
        condition=_when(f"NEW.status NOT IN ({_ENDS}) OR NEW.moves < 1 OR NEW.claims <> 0"),
        func=_refuse("a call is inserted only in a state in which admission ends"),
    ),
    pgtrigger.Trigger(
        name="a_call_moves_along_edges_only",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            f"OLD.status <> NEW.status AND ((OLD.status, NEW.status) NOT IN ({_EDGES}) OR NEW.moves <> OLD.moves + 1)"
        ),
        func=_refuse("there is no such edge"),
    ),
    pgtrigger.Trigger(
        name="a_final_state_stands",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "OLD.finished_at IS NOT NULL AND ("
            "(OLD.code, OLD.finished_at, OLD.result_hash, OLD.claims, OLD.entered, OLD.settled_verdict, OLD.settled_at, OLD.retry) "
            "IS DISTINCT FROM "
            "(NEW.code, NEW.finished_at, NEW.result_hash, NEW.claims, NEW.entered, NEW.settled_verdict, NEW.settled_at, NEW.retry) "
            "OR NEW.result IS NOT NULL AND OLD.result IS DISTINCT FROM NEW.result "
            "OR NEW.raw_result IS NOT NULL AND OLD.raw_result IS DISTINCT FROM NEW.raw_result "
            "OR NEW.warning <> '' AND OLD.warning <> NEW.warning OR NEW.message <> '' AND OLD.message <> NEW.message "
            "OR OLD.reported_at IS NOT NULL AND OLD.reported_at IS DISTINCT FROM NEW.reported_at)"
        ),
        func=_refuse("a final state stands"),
    ),
    pgtrigger.Trigger(
        name="doubt_outlives_the_attempt",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "OLD.doubt <> '' AND (NEW.doubt = '' OR NEW.status IN ('rejected', 'budget_exhausted') OR "
            f"(NEW.status = 'failed' AND OLD.status <> '{Status.OUTCOME_UNKNOWN}' AND OLD.status <> 'failed'))"
        ),
        func=_refuse("while an attempt is in doubt only a success or a settlement ends the call as known"),
    ),
    pgtrigger.Trigger(
        name="every_move_has_its_line",
        operation=pgtrigger.Insert | pgtrigger.UpdateOf("moves", "status"),
        when=pgtrigger.After,
        timing=pgtrigger.Deferred,
        func="""
            IF TG_OP = 'UPDATE' THEN
                IF OLD.moves = NEW.moves AND OLD.status = NEW.status THEN RETURN NULL; END IF;
            END IF;
            IF NOT EXISTS (
                SELECT 1 FROM toolcalls_journalline
                WHERE call_id = NEW.id AND move = NEW.moves AND target = NEW.status
            ) THEN
                RAISE EXCEPTION 'dexsite: a move has its journal line in the same transaction'
                    USING ERRCODE = 'integrity_constraint_violation';
            END IF;
            RETURN NULL;
        """,
    ),
    pgtrigger.Protect(name="a_call_is_never_deleted", operation=pgtrigger.Delete),
    not_emptied("calls_are_not_emptied"),
]

ATTEMPT = [
    pgtrigger.ReadOnly(name="a_claim_keeps_its_number", fields=["call", "number", "worker", "claimed_at"]),
    pgtrigger.Trigger(
        name="an_attempt_ends_once",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "OLD.finished_at IS NOT NULL AND (OLD.state, OLD.code, OLD.finished_at, OLD.entered_at) "
            "IS DISTINCT FROM (NEW.state, NEW.code, NEW.finished_at, NEW.entered_at)"
        ),
        func=_refuse("an attempt ends once"),
    ),
    pgtrigger.Trigger(
        name="late_evidence_stands",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "OLD.late_at IS NOT NULL AND (OLD.late_at, OLD.late_state, OLD.late_code) "
            "IS DISTINCT FROM (NEW.late_at, NEW.late_state, NEW.late_code)"
        ),
        func=_refuse("late evidence stands"),
    ),
    pgtrigger.Protect(name="an_attempt_is_never_deleted", operation=pgtrigger.Delete),
    not_emptied("attempts_are_not_emptied"),
]

JOURNAL_LINE = [
    pgtrigger.Trigger(
        name="a_line_stands",
        operation=pgtrigger.Update,
        when=pgtrigger.Before,
        condition=_when(
            "NEW.detail IS NOT NULL OR "
            "(OLD.id, OLD.team_id, OLD.session_id, OLD.call_id, OLD.at, OLD.event, OLD.move, OLD.source, OLD.target, "
            "OLD.code, OLD.actor, OLD.attempt, OLD.detail_hash) IS DISTINCT FROM "
            "(NEW.id, NEW.team_id, NEW.session_id, NEW.call_id, NEW.at, NEW.event, NEW.move, NEW.source, NEW.target, "
            "NEW.code, NEW.actor, NEW.attempt, NEW.detail_hash)"
        ),
        func=_refuse("the journal is append-only"),
    ),
    pgtrigger.Protect(name="a_line_is_never_deleted", operation=pgtrigger.Delete),
    not_emptied("the_journal_is_not_emptied"),
    pgtrigger.Trigger(
        name="a_new_line_waits_for_its_seal",
        operation=pgtrigger.Insert,
        when=pgtrigger.After,
        level=pgtrigger.Statement,
        referencing=pgtrigger.Referencing(new="fresh"),
        func="""
            INSERT INTO toolcalls_unsealedline (line_id, chain)
                SELECT id, coalesce(session_id, team_id) FROM fresh;
            RETURN NULL;
        """,
    ),
]

SEAL = [_append_only("a_seal_stands", "the seals are append-only"), not_emptied("the_seals_are_not_emptied")]
