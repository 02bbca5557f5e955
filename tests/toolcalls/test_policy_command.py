"""`manage.py policy`: the door through which a manager sees and changes what applies."""

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from tests.worlds import World, a_tool
from toolcalls.effects import Effect
from toolcalls.models import JournalLine, StoredPolicy


def policy(world: World, *words: str) -> str:
    out = StringIO()
    call_command("policy", *words, "--team", world.team.name, stdout=out)
    return out.getvalue()


def test_a_stored_override_applies_to_later_calls_and_stands_in_the_journal(world: World) -> None:
    with a_tool(effect=Effect.READ) as tool:
        before = world.propose(tool, {"amount": 1})
        shown = policy(world, tool.name, "--set", '{"requires_approval": true}')
        after = world.propose(tool, {"amount": 2})
        assert (before.status, after.status) == ("approved", "awaiting_approval")
        assert "team's stored policy" in shown
        policy(world, tool.name, "--drop")
        assert world.propose(tool, {"amount": 3}).status == "approved"
    lines = JournalLine.objects.filter(team=world.team, event__startswith="policy.").order_by("pk")
    assert [line.event for line in lines] == ["policy.stored", "policy.dropped"]


@pytest.mark.parametrize(
    "text",
    ['{"requires_approval": "ture"}', '{"require_aproval": true}', '{"max_attempts": 3}', "[]", "{", '{"effect": ""}'],
)
def test_a_policy_that_is_misspelled_or_contradictory_is_refused_when_saved(world: World, text: str) -> None:
    """F-16."""
    with a_tool(effect=Effect.NON_IDEMPOTENT_WRITE) as tool, pytest.raises(CommandError, match="nothing was stored"):
        policy(world, tool.name, "--set", text)
    assert not StoredPolicy.objects.exists()


def test_an_override_of_a_tool_that_is_gone_is_shown_as_ignored_and_can_be_dropped(world: World) -> None:
    with a_tool(effect=Effect.READ) as tool:
        policy(world, tool.name, "--set", '{"timeout": 5}')
    assert "its stored override is ignored" in policy(world)
    policy(world, tool.name, "--drop")
    assert not StoredPolicy.objects.exists()
