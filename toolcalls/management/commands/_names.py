"""What the commands share: finding what a name on the command line means, and saying so where it means nothing."""

from typing import Any

from django.core.management.base import CommandError

from toolcalls.models import Agent, Team

BY = "command"
"""Who acts, in the journal: whoever may run commands on this machine."""


def team(name: str) -> Team:
    """Find a team. Raises CommandError."""
    found = Team.objects.filter(name=name).first()
    if found is None:
        raise CommandError(f"there is no team {name!r}; create it with: manage.py createteam {name}")
    return found


def agent(name: str, *, within: Team | None) -> Agent:
    """Find an agent, in one team or in all. Raises CommandError where there is none or more than one."""
    found = list(Agent.objects.filter(name=name, **({"team": within} if within else {})).select_related("team"))
    if not found:
        raise CommandError(f"there is no agent {name!r}")
    if len(found) > 1:
        teams = ", ".join(each.team.name for each in found)
        raise CommandError(f"there are agents {name!r} in several teams ({teams}); add --team")
    return found[0]


def what_to_brake(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Read --team, --agent and --tool of pause and resume. Gives the brake's keys and how to name it."""
    if not any(options[each] for each in ("team", "agent", "tool")):
        raise CommandError("say what: --team NAME, --agent NAME or --tool NAME (a tool with --team: only there)")
    within = team(options["team"]) if options["team"] else None
    if options["agent"]:
        found = agent(options["agent"], within=within)
        keys = {"team": found.team, "agent_id": found.pk, "tool": options["tool"] or ""}
    else:
        keys = {"team": within, "agent_id": None, "tool": options["tool"] or ""}
    named = [f"{each} {options[each]}" for each in ("team", "agent", "tool") if options[each]]
    return keys, ", ".join(named)
