"""Teams, agents, operators and their secrets: who exists and what a manager allowed them.

Each verb writes a line of the team's own chain. Secrets are given once and stored hashed.
"""

from collections.abc import Sequence
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils.crypto import get_random_string

from toolcalls.effects import Effect
from toolcalls.journal import Line, write
from toolcalls.models import Agent, AgentKey, Membership, Team, UserToken
from toolcalls.secrets import AGENT_PREFIX, TOKEN_PREFIX, new_secret
from toolcalls.tools import NAME

RIGHTS = {
    "decide": "may_decide",
    "reconcile": "may_reconcile",
    "run-again": "may_run_again",
    "manage-policies": "may_manage_policies",
}


class Refused(Exception):
    """What was asked cannot be created; the text says why, in one line."""


def create_team(name: str, *, time_zone: str = "UTC", by: str) -> Team:
    """Create a team. Raises Refused."""
    team = Team(name=name, time_zone=time_zone)
    with transaction.atomic():
        _save(team)
        write([Line(team.pk, "team.created", by, detail={"name": name})])
    return team


def create_agent(
    name: str,
    *,
    team: Team,
    tools: Sequence[str],
    default_effect: str = "",
    owner: AbstractBaseUser | None = None,
    by: str,
) -> tuple[Agent, str]:
    """Create an agent with its first key. Gives the agent and the key, which is shown this once. Raises Refused."""
    for pattern in tools:
        if not NAME.fullmatch(pattern.replace("*", "_").replace("?", "_")):
            raise Refused(f"{pattern!r} is no name or pattern of tools: letters, digits, _, -, * and ?")
    if default_effect and default_effect not in set(Effect):
        raise Refused(f"default effect is one of {', '.join(Effect)}, not {default_effect!r}")
    agent = Agent(
        name=name, team=team, tools=list(tools), default_effect=default_effect, owner_id=owner.pk if owner else None
    )
    with transaction.atomic():
        _save(agent)
        detail = {"agent": name, "tools": list(tools), "default_effect": default_effect}
        write([Line(team.pk, "agent.created", by, detail=detail)])
        return agent, create_key(agent, by=by)


def create_key(agent: Agent, *, by: str) -> str:
    """Create one more key of an agent. Gives it, this once."""
    secret, digest, hint = new_secret(AGENT_PREFIX)
    with transaction.atomic():
        AgentKey.objects.create(agent=agent, digest=digest, hint=hint)
        write([Line(agent.team_id, "key.created", by, detail={"agent": agent.name, "hint": hint})])
    return secret


def create_operator(name: str, *, team: Team, may: Sequence[str], password: str = "", by: str) -> tuple[Any, str]:
    """Make a user a member of a team with these rights, creating the user where there is none.

    Gives the user and the password: the one given, else a generated one, else empty where the user existed.
    Raises Refused.
    """
    unknown = [right for right in may if right not in RIGHTS]
    if unknown:
        raise Refused(f"{unknown[0]!r} is no right; there are {', '.join(RIGHTS)}")
    users = get_user_model()
    with transaction.atomic():
        user = users.objects.filter(username=name).first()
        if user is None:
            password = password or get_random_string(20)
            user = users(username=name)
            user.set_password(password)
            _save(user)
        else:
            password = ""
        rights = {field: right in may for right, field in RIGHTS.items()}
        Membership.objects.update_or_create(user=user, team=team, defaults=rights)
        write([Line(team.pk, "member.set", by, detail={"user": name, "may": list(may)})])
    return user, password


def create_token(user: AbstractBaseUser, *, by: str) -> str:
    """Create a personal token of a user. Gives it, this once."""
    secret, digest, hint = new_secret(TOKEN_PREFIX)
    with transaction.atomic():
        UserToken.objects.create(user_id=user.pk, digest=digest, hint=hint)
        lines = [
            Line(each.team_id, "token.created", by, detail={"user": user.get_username(), "hint": hint})
            for each in Membership.objects.filter(user_id=user.pk)
        ]
        if lines:
            write(lines)
    return secret


def _save(row: Any) -> None:
    try:
        row.full_clean()
    except ValidationError as error:
        raise Refused("; ".join(error.messages)) from None
    row.save(force_insert=True)
