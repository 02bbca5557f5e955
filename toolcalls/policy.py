"""Which policy applies to a call, and where each of its values comes from (behaviour, section 3).

Strongest first: the team's stored override, what the tool declares, the session's or agent's default effect class,
``unclassified``. Nothing that an agent sends can relax a policy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from toolcalls.effects import Effect

A_YEAR = 366 * 24 * 3600
MEASURE_NAME = r"^[a-z][a-z0-9_]{0,62}$"


class InvalidPolicy(Exception):
    """A misspelled or contradictory policy; the text names each faulty key."""


def _effect(value: object) -> object:
    if isinstance(value, str) and value in set(Effect):
        return Effect(value)
    raise ValueError(f"an effect is one of {', '.join(Effect)}")


def _unique(value: list[str]) -> list[str]:
    if len(set(value)) != len(value):
        raise ValueError("no name stands twice")
    return value


Seconds = Annotated[int, Field(ge=1, le=A_YEAR)]
MeasureName = Annotated[str, Field(pattern=MEASURE_NAME)]
Bytes = Annotated[int, Field(ge=256, le=16 * 1024 * 1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ApprovalRule(_Strict):
    """Ask where the measure is above the bound, or cannot be told."""

    measure: MeasureName
    above: int


class Limit(_Strict):
    """At most ``max``: of a measure or a count, per call or per day, for the tool or for each value of ``group_by``."""

    measure: MeasureName | None = None
    count: Literal[True] | None = None
    per: Literal["call", "day"]
    group_by: MeasureName | None = None
    max: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _counts_one_thing(self) -> "Limit":
        if (self.measure is None) == (self.count is None):
            raise ValueError("a limit has either a measure or count: true")
        if self.count and self.per == "call":
            raise ValueError("a count is per day")
        if self.group_by and self.per == "call":
            raise ValueError("a limit per call has no group_by")
        return self

    def measures(self) -> set[str]:
        return {name for name in (self.measure, self.group_by) if name}


class Policy(_Strict):
    """The policy keys that may be declared by a tool or stored by a team. Unset keys follow the weaker source.

    Times are whole seconds; sizes are bytes. ``deadline`` may be ``"none"``: then a call waits without limit.
    """

    effect: Annotated[Effect, BeforeValidator(_effect)] | None = None
    requires_approval: bool | None = None
    approval_when: list[ApprovalRule] | None = None
    approvers_needed: Annotated[int, Field(ge=1, le=10)] | None = None
    group: Annotated[str, Field(min_length=1, max_length=150)] | None = None
    requester_may_approve: bool | None = None
    deadline: Seconds | Literal["none"] | None = None
    start_within: Seconds | None = None
    amend: bool | None = None
    reversible: bool | None = None
    timeout: Annotated[int, Field(ge=1, le=24 * 3600)] | None = None
    grace: Seconds | None = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    backoff: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    backoff_cap: Annotated[float, Field(gt=0, le=24 * 3600, allow_inf_nan=False)] | None = None
    max_repeats: Annotated[int, Field(ge=1, le=50)] | None = None
    limits: list[Limit] | None = None
    sensitive: Annotated[list[str], AfterValidator(_unique)] | None = None
    late_settles: bool | None = None
    shown_limit: Bytes | None = None
    stored_limit: Bytes | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_a_value(cls, data: Any) -> Any:
        nulls = [key for key, value in data.items() if value is None] if isinstance(data, dict) else []
        if nulls:
            raise ValueError(f"null is no value; leave the key out: {', '.join(map(str, nulls))}")
        return data

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Policy":
        if self.effect and not self.effect.rules.retryable and (self.max_attempts or 1) > 1:
            raise ValueError(f"{self.effect} is a single-attempt class: max_attempts cannot be {self.max_attempts}")
        return self

    def values(self) -> dict[str, Any]:
        """Give the keys that are set, as plain JSON values."""
        return self.model_dump(mode="json", exclude_none=True)

    def measures(self) -> set[str]:
        """Name the measures that its rules and limits speak of."""
        named = {rule.measure for rule in self.approval_when or ()}
        return named.union(*(limit.measures() for limit in self.limits or ()))


def parse(values: object, *, measures: set[str]) -> Policy:
    """Validate policy keys from any source. Raises InvalidPolicy, naming each faulty key."""
    try:
        policy = Policy.model_validate(values)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'policy'}: {fault['msg']}" for fault in error.errors()]
        raise InvalidPolicy("; ".join(faults)) from None
    unknown = policy.measures() - measures
    if unknown:
        raise InvalidPolicy(f"rules speak of measures that the tool does not derive: {', '.join(sorted(unknown))}")
    return policy


def override(values: object, declared_policy: Policy, *, measures: set[str]) -> Policy:
    """Validate a team's override before it is saved: by itself, and against what the tool declares. Raises InvalidPolicy."""
    policy = parse(values, measures=measures)
    effect = policy.effect or declared_policy.effect
    if effect and not effect.rules.retryable and (policy.max_attempts or 1) > 1:
        raise InvalidPolicy(f"{effect} is a single-attempt class: max_attempts cannot be {policy.max_attempts}")
    return policy


def declared(values: dict[str, Any], *, measures: Mapping[str, Any]) -> Policy:
    """Validate what a tool's author wrote. Raises InvalidPolicy."""
    return parse(values, measures=set(measures))


@dataclass(frozen=True)
class Defaults:
    """What a deployment sets for policies that are silent; whole seconds."""

    approval_within: int
    start_within: int
    grace: int


@dataclass(frozen=True)
class Effective:
    """The policy that applies to one call, complete, with the source of every value. It is frozen on the call."""

    effect: Effect
    requires_approval: bool
    approval_when: tuple[ApprovalRule, ...]
    approvers_needed: int
    group: str
    requester_may_approve: bool
    deadline: int | None
    start_within: int
    amend: bool
    reversible: bool
    timeout: int
    grace: int
    max_attempts: int
    backoff: float
    backoff_cap: float
    max_repeats: int
    limits: tuple[Limit, ...]
    sensitive: tuple[str, ...]
    late_settles: bool
    shown_limit: int
    stored_limit: int
    sources: Mapping[str, str]

    def text(self) -> str:
        """Give it as JSON text, for the call's row; a source that is not named is the default."""
        values = {name: _plain(value) for name, value in vars(self).items() if name != "sources"}
        sources = {key: source for key, source in self.sources.items() if source != DEFAULT}
        return json.dumps({"values": values, "sources": sources}, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value


def thaw(text: str) -> Effective:
    """Read back what ``Effective.text`` wrote."""
    stored = json.loads(text)
    values = stored["values"]
    values["effect"] = Effect(values["effect"])
    values["approval_when"] = tuple(ApprovalRule(**rule) for rule in values["approval_when"])
    values["limits"] = tuple(Limit(**limit) for limit in values["limits"])
    values["sensitive"] = tuple(values["sensitive"])
    return Effective(**values, sources=dict.fromkeys(values, DEFAULT) | stored["sources"])


def shown(text: str) -> dict[str, Any]:
    """Read back the values and the source of each, as plain JSON."""
    stored = json.loads(text)
    return {"values": stored["values"], "sources": dict.fromkeys(stored["values"], DEFAULT) | stored["sources"]}


DEFAULT = "default"
INVALID_STORED = "stored policy is invalid"


def resolve(
    declared_policy: Policy,
    *,
    measures: set[str],
    stored: object,
    agent_default: Effect | None,
    session_default: Effect | None,
    defaults: Defaults,
) -> Effective:
    """Find the policy that applies, strongest source first.

    ``stored`` is the team's override as it lies in the database, or None where there is none. One that is not valid
    (written past the product, or outlived by a deploy) makes the tool unclassified and asks before every call: a typo
    never opens the gate.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    if stored is not None:
        try:
            layers.append(("team's stored policy", parse(stored, measures=measures).values()))
        except InvalidPolicy:
            strictest = {"effect": Effect.UNCLASSIFIED, "requires_approval": True}
            layers.append((INVALID_STORED, strictest))
    layers.append(("tool", declared_policy.values()))
    if agent_default and session_default and session_default.at_least_as_strict_as(agent_default):
        layers.append(("session's default", {"effect": session_default}))
    elif agent_default:
        # A session that was opened while the agent's default was laxer does not keep the laxer one.
        layers.append(("agent's default", {"effect": agent_default}))

    chosen: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, values in layers:
        for key, value in values.items():
            if key not in chosen:
                chosen[key], sources[key] = value, source
    effect = Effect(chosen.pop("effect", Effect.UNCLASSIFIED))
    sources.setdefault("effect", "nothing is known")
    if not effect.rules.retryable and chosen.get("max_attempts", 1) > 1:
        # A stronger source made this a single-attempt tool; the weaker source's attempts no longer apply.
        chosen["max_attempts"], sources["max_attempts"] = 1, "single-attempt class"
    by_default: dict[str, Any] = {
        "requires_approval": effect.rules.waits,
        "approval_when": [],
        "approvers_needed": 1,
        "group": "",
        "requester_may_approve": False,
        "deadline": defaults.approval_within,
        "start_within": defaults.start_within,
        "amend": False,
        "reversible": False,
        "timeout": 30,
        "grace": defaults.grace,
        "max_attempts": 3 if effect.rules.retryable else 1,
        "backoff": 1.0,
        "backoff_cap": 60.0,
        "max_repeats": 3,
        "limits": [],
        "sensitive": [],
        "late_settles": True,
        "shown_limit": 16 * 1024,
        "stored_limit": 1024 * 1024,
    }
    for key, value in by_default.items():
        if key not in chosen:
            chosen[key], sources[key] = value, DEFAULT
    chosen["deadline"] = None if chosen["deadline"] == "none" else chosen["deadline"]
    chosen["approval_when"] = tuple(ApprovalRule(**rule) for rule in chosen["approval_when"])
    chosen["limits"] = tuple(Limit(**limit) for limit in chosen["limits"])
    chosen["sensitive"] = tuple(chosen["sensitive"])
    return Effective(effect=effect, **chosen, sources=sources)
