"""Who is calling: an agent by its key, an operator by a personal token or a signed-in session with CSRF.

An agent's key can never decide, and an operator never acts as an agent: each route names whom it takes.
"""

from typing import Any

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import Q
from django.db.models.functions import Now
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from toolcalls.models import Agent, AgentKey, UserToken
from toolcalls.secrets import TOKEN_PREFIX, digest_of


class AgentPrincipal:
    """An authenticated agent, in the place where DRF keeps the user."""

    is_authenticated = True
    is_active = True
    pk = None

    def __init__(self, agent: Agent) -> None:
        self.agent = agent


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
            found = AgentKey.objects.filter(usable, digest=digest_of(secret), agent__enabled=True)
            key = found.select_related("agent__team").first()
            if key is not None:
                return AgentPrincipal(key.agent), key
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
