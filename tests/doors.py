"""The API as its two kinds of callers meet it: an agent with a key, a person with a token or a signed-in session."""

import json
from dataclasses import dataclass, field
from typing import Any

from django.contrib.auth.models import User
from django.test import Client

from toolcalls import directory


@dataclass
class Answer:
    """What the API answered."""

    status: int
    body: Any
    headers: Any

    @property
    def code(self) -> str:
        """The stable code of a problem."""
        assert self.headers["Content-Type"] == "application/problem+json", self
        assert self.body["status"] == self.status
        assert set(self.body) <= {"type", "title", "status", "detail", "code", "errors"}
        assert self.body["title"]
        assert self.body["detail"]
        return str(self.body["code"])


@dataclass
class Door:
    """Sends requests under ``/api/v1/`` with a bearer's secret, if any."""

    secret: str = ""
    client: Client = field(default_factory=lambda: Client(raise_request_exception=False))

    def __call__(
        self, method: str, path: str, body: object = None, *, raw: bytes | None = None, **headers: str
    ) -> Answer:
        """Send a request; ``raw`` stands for a body that is no JSON of ours."""
        sent = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        if self.secret:
            headers.setdefault("authorization", f"Bearer {self.secret}")
        kind = headers.pop("content_type", "application/json")
        response = self.client.generic(method, f"/api/v1/{path}", sent, content_type=kind, headers=headers)
        text = response.content.decode()
        return Answer(response.status_code, json.loads(text) if text else None, response.headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self("GET", path, **headers)

    def post(self, path: str, body: object = None, **how: Any) -> Answer:
        return self("POST", path, body, **how)


def with_token(user: User) -> Door:
    """Give the door of a person with a personal token."""
    return Door(directory.create_token(user, by="test"))


def signed_in(user: User, *, csrf: bool = True) -> Door:
    """Give the door of a person who signed in with a browser; ``csrf`` says whether requests are tested for it."""
    client = Client(enforce_csrf_checks=csrf, raise_request_exception=False)
    client.force_login(user)
    return Door(client=client)
