"""Which policy applies, and what is no policy at all (behaviour, section 3)."""

from typing import Any

import pytest
from pydantic import Field, create_model

from dexsite.orders.tools import get_order
from tests.worlds import Thing
from toolcalls import permissions
from toolcalls.effects import RULES, Effect
from toolcalls.policy import (
    INVALID_STORED,
    ApprovalRule,
    Defaults,
    Effective,
    InvalidPolicy,
    Limit,
    Policy,
    declared,
    override,
    parse,
    resolve,
    thaw,
)
from toolcalls.tools import InvalidTool, Tool, ToolContext, ToolRejected, find, tool

DEFAULTS = Defaults(approval_within=86_400, start_within=900, grace=10)
MEASURES = {"amount", "name"}
READ, KEYED, SINGLE, UNKNOWN = Effect


def effective(
    declares: dict[str, Any] | None = None,
    *,
    stored: object = None,
    agent: Effect | None = None,
    session: Effect | None = None,
) -> Effective:
    """Resolve the policy of a tool that declares this."""
    return resolve(
        parse(declares or {}, measures=MEASURES),
        measures=MEASURES,
        stored=stored,
        agent_default=agent,
        session_default=session,
        defaults=DEFAULTS,
    )


# -- the table of effect classes


@pytest.mark.parametrize(
    ("effect", "retryable", "writes", "waits"),
    [
        ("read", True, False, False),
        ("idempotent_write", True, True, False),
        ("non_idempotent_write", False, True, True),
        ("unclassified", False, True, True),
    ],
)
def test_an_effect_class_allows_what_its_row_says(effect: str, retryable: bool, writes: bool, waits: bool) -> None:
    rules = RULES[Effect(effect)]
    assert (rules.retryable, rules.writes, rules.waits) == (retryable, writes, waits)


def test_there_are_the_four_classes_and_no_other() -> None:
    assert [str(each) for each in Effect] == ["read", "idempotent_write", "non_idempotent_write", "unclassified"]
    assert set(RULES) == set(Effect)


@pytest.mark.parametrize(
    ("effect", "approval", "waits", "several_attempts"),
    [
        (READ, None, False, True),  # S-A01
        (KEYED, None, False, True),  # S-A02
        (SINGLE, None, True, False),  # S-A03
        (None, None, True, False),  # S-A04
        (UNKNOWN, None, True, False),
        (READ, True, True, True),  # S-A05
        (KEYED, True, True, True),  # S-A06
        (SINGLE, False, False, False),  # S-A07
        (UNKNOWN, False, False, False),  # S-A08
        (None, False, False, False),
    ],
)
def test_approval_unset_follows_the_class_and_set_wins_but_never_changes_the_attempts(
    effect: Effect | None, approval: bool | None, waits: bool, several_attempts: bool
) -> None:
    declares = {"effect": effect and str(effect), "requires_approval": approval}
    found = effective({key: value for key, value in declares.items() if value is not None})
    assert found.requires_approval is waits
    assert (found.max_attempts > 1) is several_attempts


# -- strongest first


@pytest.mark.parametrize(
    ("stored", "declares", "agent", "effect", "source"),
    [
        ({"effect": "unclassified"}, {"effect": "read"}, READ, UNKNOWN, "team's stored policy"),
        ({"effect": "read"}, {"effect": "unclassified"}, SINGLE, READ, "team's stored policy"),
        (None, {"effect": "non_idempotent_write"}, READ, SINGLE, "tool"),  # S-A10
        ({"timeout": 5}, {"effect": "idempotent_write"}, READ, KEYED, "tool"),
        (None, {}, KEYED, KEYED, "agent's default"),
        (None, {}, None, UNKNOWN, "nothing is known"),
    ],
)
def test_the_strongest_source_that_says_anything_decides_the_effect(
    stored: object, declares: dict[str, Any], agent: Effect | None, effect: Effect, source: str
) -> None:
    found = effective(declares, stored=stored, agent=agent)
    assert (found.effect, found.sources["effect"]) == (effect, source)


def test_a_sessions_default_counts_where_it_is_stricter_than_the_agents() -> None:
    found = effective(agent=READ, session=SINGLE)
    assert (found.effect, found.sources["effect"]) == (SINGLE, "session's default")
    assert effective({"effect": "read"}, agent=READ, session=SINGLE).effect == READ, "S-A10: an explicit policy wins"


@pytest.mark.parametrize(("agent", "effect"), [(SINGLE, SINGLE), (None, UNKNOWN)])
def test_a_session_keeps_no_default_that_is_laxer_than_the_agents_is_now(agent: Effect | None, effect: Effect) -> None:
    """The session was opened while its agent's default was read; since then a manager has tightened it."""
    assert effective(agent=agent, session=READ).effect == effect


def test_each_value_says_where_it_came_from() -> None:
    found = effective({"effect": "read", "timeout": 7, "grace": 3}, stored={"timeout": 9})
    assert (found.timeout, found.sources["timeout"]) == (9, "team's stored policy")
    assert (found.grace, found.sources["grace"]) == (3, "tool")
    assert (found.deadline, found.sources["deadline"]) == (86_400, "default")
    assert set(found.sources) == set(vars(found)) - {"sources"}


def test_a_stricter_override_takes_the_weaker_sources_attempts_away() -> None:
    found = effective({"effect": "idempotent_write", "max_attempts": 4}, stored={"effect": "non_idempotent_write"})
    assert (found.effect, found.max_attempts, found.requires_approval) == (SINGLE, 1, True)


def test_a_policy_that_was_frozen_thaws_to_itself() -> None:
    found = effective(
        {
            "effect": "idempotent_write",
            "approval_when": [{"measure": "amount", "above": 10}],
            "limits": [
                {"measure": "amount", "per": "call", "max": 5},
                {"count": True, "per": "day", "group_by": "name", "max": 3},
            ],
            "sensitive": ["name"],
            "deadline": "none",
        }
    )
    assert found.deadline is None, "S-B04"
    assert found.approval_when == (ApprovalRule(measure="amount", above=10),)
    assert found.limits[1] == Limit(count=True, per="day", group_by="name", max=3)
    assert thaw(found.text()) == found


# -- what is no policy


BAD: list[dict[str, Any]] = [
    {"requires_approval": "ture"},  # F-16
    {"requires_approval": "true"},
    {"requires_approval": 0},
    {"requires_approval": None},
    {"effect": "readonly"},
    {"effect": ""},
    {"effect": "READ"},
    {"effect": 1},
    {"require_aproval": True},
    {"REQUIRES_APPROVAL": True},
    {"": None},
    {"effect": "unclassified", "max_attempts": 3},  # S-A16
    {"effect": "non_idempotent_write", "max_attempts": 2},
    {"max_attempts": 0},
    {"max_attempts": True},
    {"approvers_needed": 0},
    {"max_repeats": 0},
    {"group": ""},
    {"backoff": float("nan")},
    {"backoff": 0},
    {"backoff_cap": float("inf")},
    {"approval_when": [{"measure": "amount"}]},
    {"approval_when": [{"measure": "amount", "above": 1.5}]},
    {"approval_when": [{"measure": "amount", "above": True}]},
    {"approval_when": [{"measure": "amount", "below": 1}]},
    {"approval_when": [{"measure": "amuont", "above": 1}]},
    {"approval_when": {"measure": "amount", "above": 1}},
    {"limits": [{"per": "day", "max": 1}]},
    {"limits": [{"measure": "amount", "count": True, "per": "day", "max": 1}]},
    {"limits": [{"count": True, "per": "call", "max": 1}]},
    {"limits": [{"count": False, "per": "day", "max": 1}]},
    {"limits": [{"measure": "amount", "per": "week", "max": 1}]},
    {"limits": [{"measure": "amount", "per": "day", "max": -1}]},
    {"limits": [{"measure": "amount", "per": "day", "max": "5"}]},
    {"limits": [{"measure": "amount", "per": "day"}]},
    {"limits": [{"count": True, "per": "day", "group_by": "nobody", "max": 1}]},
    {"sensitive": ["a", "a"]},
    {"lock": "order"},
    {"measures": {"amount": 1}},
]
# F-42: whole seconds with bounds, and nothing that only looks like them.
BAD += [
    {key: value}
    for key in ("deadline", "start_within", "timeout", "grace")
    for value in (0, -1, 10**18, True, "5", None, "2026-01-01", 1.5)
]


@pytest.mark.parametrize("values", BAD, ids=repr)
def test_a_misspelled_or_contradictory_policy_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy):
        parse(values, measures=MEASURES)
    with pytest.raises(InvalidPolicy):
        declared(values, measures=dict.fromkeys(MEASURES))


# In code ``measures`` is a parameter of its own.
@pytest.mark.parametrize("values", [each for each in BAD if "measures" not in each], ids=repr)
def test_such_a_policy_in_code_stops_the_start_and_registers_nothing(values: dict[str, Any]) -> None:
    """S-A16: refused when the registry loads, not at call time."""
    with pytest.raises(InvalidTool):
        tool(measures=dict.fromkeys(MEASURES, len), **values)(_never_registered)
    assert find("_never_registered") is None


def _never_registered(arguments: Thing, context: ToolContext) -> None:
    """Do nothing."""


@pytest.mark.parametrize("values", [*BAD, None, [], ["effect"], "read", 7, True], ids=repr)
def test_such_a_stored_override_asks_before_every_call(values: object) -> None:
    """F-16, F-18: a typo never opens the gate. A JSON null reaches ``resolve`` as the text that it is."""
    found = effective({"effect": "read", "requires_approval": False}, stored="null" if values is None else values)
    assert (found.effect, found.requires_approval, found.max_attempts) == (UNKNOWN, True, 1)
    assert found.sources["effect"] == INVALID_STORED


def test_a_refused_policy_names_each_faulty_key() -> None:
    with pytest.raises(InvalidPolicy, match=r"timeout.*requires_aproval") as refused:
        parse({"timeout": 0, "requires_aproval": True, "grace": 5}, measures=set())
    assert "grace" not in str(refused.value)


def test_an_empty_override_changes_nothing() -> None:
    assert effective({"effect": "read"}, stored={}) == effective({"effect": "read"})


@pytest.mark.parametrize("effect", [SINGLE, UNKNOWN])
def test_an_override_that_contradicts_what_the_tool_declares_is_refused_when_saved(effect: Effect) -> None:
    with pytest.raises(InvalidPolicy, match="single-attempt"):
        override({"max_attempts": 3}, Policy(effect=effect), measures=set())
    assert override({"max_attempts": 3, "effect": "read"}, Policy(effect=effect), measures=set()).max_attempts == 3
    assert override({"max_attempts": 1}, Policy(effect=effect), measures=set()).max_attempts == 1


# -- tools


@pytest.mark.parametrize(
    "name", ["refund order", "refund_order ", "\uff52efund_order", "", "x" * 65, "réfund", "a.b", "a\n"]
)
def test_a_tools_name_is_of_the_plain_alphabet(name: str) -> None:
    """F-18."""

    def function(arguments: Thing, context: ToolContext) -> None:
        """Do nothing."""

    function.__name__ = name
    with pytest.raises(InvalidTool):
        tool()(function)
    assert find(name) is None


def test_a_second_tool_of_one_name_is_refused() -> None:
    def function(arguments: Thing, context: ToolContext) -> None:
        """Do nothing."""

    function.__name__ = get_order.name
    with pytest.raises(InvalidTool, match="twice"):
        tool()(function)
    assert find(get_order.name) is get_order


def _version(doc: str, field: Any, *, version: str = "1") -> str:
    model = create_model("Model", __doc__=doc, value=(field, Field(description="in cents")))

    def function(arguments: model, context: ToolContext) -> None:  # type: ignore[valid-type]
        """Do nothing."""

    function.__doc__ = doc
    function.__annotations__ = {"arguments": model, "context": ToolContext}
    made = Tool("t", doc, function, model, None, Policy(), {}, version)
    return made.version


def test_a_version_follows_the_schema_and_the_authors_word_but_never_a_docstring() -> None:
    assert _version("One text.", int) == _version("Another text.", int)
    assert _version("One text.", int) != _version("One text.", str)
    assert _version("One text.", int) != _version("One text.", int, version="2")


@pytest.mark.parametrize("code", ["OK", "INVALID_JSON", "CANCELLED", "TIMEOUT_UNKNOWN", "lower", "", "A-B", "1A"])
def test_a_tools_own_code_is_a_word_that_the_system_does_not_use(code: str) -> None:
    with pytest.raises(ValueError, match="own code"):
        ToolRejected(code, "no")


# -- permission


@pytest.mark.parametrize(
    ("tool_name", "agent", "session", "may"),
    [
        ("get_order", ["get_order"], None, True),
        ("get_order", ["get_*"], None, True),
        ("get_order", ["*"], None, True),
        ("refund_order", ["get_order"], None, False),
        ("refund_order", [], None, False),
        ("get_order", ["*"], [], False),
        ("get_order", ["*"], ["refund_*"], False),
        ("get_order", ["get_*"], ["*"], True),
        ("refund_order", ["get_*"], ["*"], False),
        ("GET_ORDER", ["get_order"], None, False),
        ("get_orders", ["get_order"], None, False),
        ("xget_order", ["get_*"], None, False),
    ],
)
def test_a_tool_may_be_used_where_both_lists_name_it(
    tool_name: str, agent: list[str], session: list[str] | None, may: bool
) -> None:
    assert permissions.may_use(tool_name, agent, session) is may


@pytest.mark.parametrize(
    ("pattern", "narrower", "is_"),
    [
        ("*", "*", True),
        ("*", "get_?", True),
        ("get_*", "get_order", True),
        ("get_*", "get_o*", True),
        ("get_*", "get_*", True),
        ("get_*", "get*", False),
        ("get_*", "*", False),
        ("get_*", "get_", True),
        ("get_order", "get_*", False),
        ("get_?", "get_*", False),
        ("get_???", "get_*", False),
        ("get_*?", "get_*", False),
        ("get_??*", "get_?*", False),
        ("get_?", "get_?", True),
        ("get_?*", "get_*?", True),
        ("a*b", "a*", False),
        ("*a*", "*xa*", True),
    ],
)
def test_a_pattern_covers_a_narrower_one(pattern: str, narrower: str, is_: bool) -> None:
    assert permissions.covers(pattern, narrower) is is_
