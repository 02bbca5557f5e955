"""The kernel: what each effect class allows (behaviour, section 3).

Nothing else in the project compares effect classes; everything asks this table.
"""

from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """What a tool does to the world, as its author or a team's policy declares it. Ordered from lax to strict."""

    READ = "read"
    IDEMPOTENT_WRITE = "idempotent_write"
    NON_IDEMPOTENT_WRITE = "non_idempotent_write"
    UNCLASSIFIED = "unclassified"

    @property
    def rules(self) -> "EffectRules":
        return RULES[self]

    def at_least_as_strict_as(self, other: "Effect") -> bool:
        """Say whether a session may choose this class where ``other`` is its agent's default."""
        order = list(Effect)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class EffectRules:
    """One row of the table.

    retryable: a second run is harmless, so an attempt in doubt may be followed by another.
    writes: the tool may change the world, so repeats are guarded and doubt is not a failure.
    waits: a person is asked unless the policy says otherwise.
    """

    retryable: bool
    writes: bool
    waits: bool


RULES: dict[Effect, EffectRules] = {
    Effect.READ: EffectRules(retryable=True, writes=False, waits=False),
    Effect.IDEMPOTENT_WRITE: EffectRules(retryable=True, writes=True, waits=False),
    Effect.NON_IDEMPOTENT_WRITE: EffectRules(retryable=False, writes=True, waits=True),
    Effect.UNCLASSIFIED: EffectRules(retryable=False, writes=True, waits=True),
}
