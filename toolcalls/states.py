"""The states of a call and the edges between them (behaviour, section 6). Facts only; no Django.

``proposed`` is not a state a row can be in: it is the first journal line of the admitting transaction.
"""

from enum import StrEnum


class Status(StrEnum):
    """Where a call stands. A state exists only where a crash can leave a call."""

    AWAITING_APPROVAL = "awaiting_approval"
    APPROVED = "approved"
    EXECUTING = "executing"
    OUTCOME_UNKNOWN = "outcome_unknown"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REJECTED = "rejected"
    BUDGET_EXHAUSTED = "budget_exhausted"


PROPOSED = "proposed"

FINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.REJECTED, Status.BUDGET_EXHAUSTED})
"""A call in one of these never moves again, and is dated."""

ANSWERED = FINAL | {Status.OUTCOME_UNKNOWN}
"""What a waiting agent is told at once: nothing more happens without a person or a look-up."""

UNFINISHED = frozenset({Status.AWAITING_APPROVAL, Status.APPROVED, Status.EXECUTING})
"""What a cancel can still reach."""

ADMISSION_ENDS_IN = frozenset(
    {Status.AWAITING_APPROVAL, Status.APPROVED, Status.SUCCEEDED, Status.FAILED, Status.BUDGET_EXHAUSTED}
)
"""The only states in which a row may be inserted."""

MOVES: dict[str, tuple[frozenset[Status], Status]] = {
    # verb: (from, to). The @transition methods of models.Call are held against this by a test.
    "approve": (frozenset({Status.AWAITING_APPROVAL}), Status.APPROVED),
    "reject": (frozenset({Status.AWAITING_APPROVAL, Status.APPROVED}), Status.REJECTED),
    "claim": (frozenset({Status.APPROVED}), Status.EXECUTING),
    "succeed": (frozenset({Status.EXECUTING, Status.OUTCOME_UNKNOWN}), Status.SUCCEEDED),
    "fail": (frozenset({Status.APPROVED, Status.EXECUTING, Status.OUTCOME_UNKNOWN}), Status.FAILED),
    "lose_track": (frozenset({Status.APPROVED, Status.EXECUTING}), Status.OUTCOME_UNKNOWN),
    "run_again": (frozenset({Status.OUTCOME_UNKNOWN}), Status.APPROVED),
}

EDGES: frozenset[tuple[Status, Status]] = frozenset(
    (source, target) for sources, target in MOVES.values() for source in sources
)
"""Every edge a stored call may take; PostgreSQL refuses all others."""


def diagram() -> str:
    """Give the state diagram as Mermaid text, for docs/architecture.md."""
    lines = ["stateDiagram-v2", "    [*] --> proposed"]
    lines += [f"    proposed --> {status}" for status in sorted(ADMISSION_ENDS_IN)]
    for verb, (sources, target) in MOVES.items():
        lines += [f"    {source} --> {target}: {verb}" for source in sorted(sources)]
    lines += [f"    {status} --> [*]" for status in sorted(FINAL)]
    return "\n".join(lines)
