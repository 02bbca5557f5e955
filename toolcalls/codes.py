"""The stable codes of the interface, the advice that goes with each, and what the agent reads. No Django.

Rule: interfaces, section Codes; behaviour, section 6 ("every answer to an agent says `retry`").
"""

from enum import StrEnum
from typing import Final

from toolcalls.states import Status


class Retry(StrEnum):
    """What the agent may do next about a call."""

    NEW_CALL_OK = "new_call_ok"
    CORRECT_AND_CALL = "correct_and_call"
    WAIT = "wait"
    DO_NOT_RETRY = "do_not_retry"


DID_NOT_RUN: Final = "The tool did not run, so it is safe to call again"

_ADVICE: Final[dict[str, Retry]] = {
    "INVALID_JSON": Retry.CORRECT_AND_CALL,
    "INVALID_ARGUMENTS": Retry.CORRECT_AND_CALL,
    "PAUSED": Retry.NEW_CALL_OK,
    "CHECK_UNAVAILABLE": Retry.NEW_CALL_OK,
    "DUPLICATE_IN_PROGRESS": Retry.WAIT,
    "APPROVAL_EXPIRED": Retry.NEW_CALL_OK,
    "CANCELLED": Retry.NEW_CALL_OK,
    "NOT_STARTED_IN_TIME": Retry.NEW_CALL_OK,
    "NOT_RUN": Retry.NEW_CALL_OK,
    "TOOL_CHANGED": Retry.NEW_CALL_OK,
    "UPSTREAM_UNAVAILABLE": Retry.NEW_CALL_OK,
    "RETRIES_EXHAUSTED": Retry.NEW_CALL_OK,
    "CONFIRMED_NOT_DONE": Retry.NEW_CALL_OK,
}

OF_THE_GUARD: Final = frozenset(
    {"DUPLICATE_IN_PROGRESS", "OUTCOME_UNRESOLVED", "OPERATION_MISMATCH", "ALREADY_REJECTED", "LOOP_DETECTED"}
)
"""Refusals of stage 4. They say something of an earlier call and never count as one themselves."""

OF_THE_BUDGET: Final = frozenset({"STEP_LIMIT", "TURN_LIMIT", "TIME_LIMIT", "SPEND_LIMIT"})

OF_STAGE_ZERO: Final = OF_THE_BUDGET | {"SESSION_CLOSED", "TURN_CLOSED", "PAUSED"}
"""Refused before anything was looked at; such a row takes nothing from the budgets."""

KNOWN: Final = (
    frozenset(_ADVICE)
    | OF_THE_GUARD
    | OF_STAGE_ZERO
    | {
        "OK", "OK_WITH_WARNING", "PARTIAL", "UNKNOWN_TOOL", "TOOL_NOT_ALLOWED", "POLICY_LIMIT", "APPROVAL_REJECTED",
        "AMENDED", "PERMISSION_WITHDRAWN", "INTERNAL_ERROR", "INVALID_RESULT", "TIMEOUT_UNKNOWN", "WORKER_LOST",
        "CONNECTION_LOST", "CONFIRMED_DONE",
    }
)  # fmt: skip
"""What the system itself says. A tool's own codes must differ from these."""


def advice(status: str, code: str, *, tool_says: str = "") -> Retry:
    """Say what the agent may do about a call in this state with this code.

    ``tool_says`` is what a tool attached to a code of its own; such codes default to correct_and_call.
    """
    if status in (Status.AWAITING_APPROVAL, Status.APPROVED, Status.EXECUTING):
        return Retry.WAIT
    if tool_says:
        return Retry(tool_says)
    if status == Status.FAILED and code not in KNOWN:
        return Retry.CORRECT_AND_CALL
    return _ADVICE.get(code, Retry.DO_NOT_RETRY)


def next_actions(status: str, retry: Retry) -> list[str]:
    """List what an agent can usefully do next, in words of the interface."""
    match status:
        case Status.AWAITING_APPROVAL | Status.APPROVED | Status.EXECUTING:
            return ["wait", "cancel"]
        case Status.OUTCOME_UNKNOWN:
            return ["wait_for_settlement", "tell_the_user"]
    match retry:
        case Retry.NEW_CALL_OK:
            return ["acknowledge", "call_again_with_a_new_id"]
        case Retry.CORRECT_AND_CALL:
            return ["acknowledge", "call_corrected_with_a_new_id"]
        case Retry.WAIT:
            return ["acknowledge", "wait_for_the_linked_call"]
        case _:
            return ["acknowledge"]
