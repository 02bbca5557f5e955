"""Who is calling: an agent by its key, an operator by a personal token or a signed-in session with CSRF.

An agent's key can never decide, and an operator never acts as an agent: each route names whom it takes.
"""

import json
from typing import Any

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import Q
from django.db.models.functions import Now
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from toolcalls import sql
from toolcalls.models import Agent, Team, UserToken
from toolcalls.secrets import TOKEN_PREFIX, digest_of


class AgentPrincipal:
    """An authenticated agent, in the place where DRF keeps the user."""

    is_authenticated = True
    is_active = True
    pk = None

    def __init__(self, agent: Agent) -> None:
        self.agent = agent


_AGENT = """
    SELECT a.id, a.name, a.tools::text, a.default_effect, a.limits::text, a.budgets::text, a.owner_id, t.id, t.name, t.time_zone
    FROM toolcalls_agentkey k JOIN toolcalls_agent a ON a.id = k.agent_id JOIN toolcalls_team t ON t.id = a.team_id
    WHERE k.digest = %s AND a.enabled AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
"""


def agent_of(key: str) -> Agent | None:
    """Find the enabled agent whose usable key this is, by one statement: every request of an agent asks."""
    found = sql.run(_AGENT, [digest_of(key)])
    if not found:
        return None
    identity, name, tools, default_effect, limits, budgets, owner, *team = found[0]
    return Agent(
        id=identity,
        name=name,
        tools=json.loads(tools),
        default_effect=default_effect,
        limits=json.loads(limits),
        budgets=json.loads(budgets),
        owner_id=owner,
        team=Team(**dict(zip(("id", "name", "time_zone"), team, strict=True))),
    )


class KeyAuthentication(BaseAuthentication):
    """Take ``Authorization: Bearer`` with an agent's key or an operator's personal token."""

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        usable = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=Now()))
        if secret.startswith(TOKEN_PREFIX):
            token = UserToken.objects.filter(usable, digest=digest_of(secret)).select_related("user").first()
            if token is not None and token.user.is_active:
                return token.user, token
        else:
            agent = agent_of(secret)
            if agent is not None:
                return AgentPrincipal(agent), None
        raise exceptions.AuthenticationFailed

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = KeyAuthentication
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}


class IsAgent(BasePermission):
    """Let agents in, and nobody else."""

    message = "This route is for agents."

    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.user, AgentPrincipal)


class IsOperator(BasePermission):
    """Let signed-in people in; what they may do is asked of their membership. An agent's key never passes."""

    message = "This route is for operators; an agent's key can never decide."

    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.user, AbstractBaseUser) and request.user.is_active


class IsAnyone(BasePermission):
    """Let agents and operators in."""

    def has_permission(self, request: Request, view: Any) -> bool:
        return IsAgent().has_permission(request, view) or IsOperator().has_permission(request, view)
