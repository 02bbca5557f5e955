"""Worlds for tests, built through the real verbs: a team with an agent and people, and a worker that really runs.

Nothing here inserts a state: a call gets where it is by being proposed, decided and executed.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User
from django.db import connection
from pydantic import BaseModel, ConfigDict

from approvals import desk
from toolcalls import directory, intake, masking, tools
from toolcalls.executor import Runner
from toolcalls.intake import Answered, Mismatch, Opening
from toolcalls.models import Agent, Call, JournalLine, Session, Team
from toolcalls.pipeline import Proposal
from toolcalls.tools import Tool, ToolContext, tool

_numbers = itertools.count(1)


class Thing(BaseModel):
    """The arguments of the tools that tests make: a name and a number."""

    model_config = ConfigDict(extra="ignore")  # the system forbids extra fields whatever an author says

    name: str = "x"
    amount: int = 0


@contextmanager
def a_tool(function: Callable[[Thing, ToolContext], Any] | None = None, /, **policy: Any) -> Iterator[Tool]:
    """Register a tool for the length of a test: by default one that returns its arguments."""
    name = f"tool_{next(_numbers)}"

    def by_default(arguments: Thing, context: ToolContext) -> Any:
        """Do a thing."""
        return {"name": arguments.name, "amount": arguments.amount}

    run = function or by_default

    def wrapper(arguments: Thing, context: ToolContext) -> Any:
        """Do a thing."""
        return run(arguments, context)

    wrapper.__name__ = name
    policy.setdefault("measures", {"amount": lambda a: a.amount, "name": lambda a: a.name})
    made = tool(**policy)(wrapper)
    try:
        yield made
    finally:
        tools._registry.pop(name, None)


@dataclass
class World:
    """One team with one agent and two people who may do everything."""

    team: Team
    agent: Agent
    key: str
    ana: User
    bob: User
    session: Session
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _runner: Runner | None = None

    def open(self, **terms: Any) -> Session:
        """Open one more session of the agent."""
        name = f"session-{next(_numbers)}"
        session, _ = intake.open_session(self.agent, Opening(session_id=name, body_digest="", **terms))
        return session

    def propose(
        self,
        tool: Tool | str,
        arguments: object = None,
        *,
        call_id: str = "",
        turn: str = "turn-1",
        session: Session | None = None,
        operation_id: str = "",
    ) -> Call:
        """Propose one call; gives the stored call. Raises AssertionError for a mismatch."""
        answer = self.answer(tool, arguments, call_id=call_id, turn=turn, session=session, operation_id=operation_id)
        assert isinstance(answer, Answered), answer
        return answer.call

    def answer(
        self,
        tool: Tool | str,
        arguments: object = None,
        *,
        call_id: str = "",
        turn: str = "turn-1",
        session: Session | None = None,
        operation_id: str = "",
    ) -> Answered | Mismatch:
        """Propose one call; gives the answer as it is."""
        name = tool if isinstance(tool, str) else tool.name
        proposal = Proposal(
            call_id or f"call-{next(self._ids)}", name, {} if arguments is None else arguments, operation_id
        )
        return intake.submit(self.agent, (session or self.session).session_id, turn, [proposal])[0]

    def approve(self, call: Call, *, by: User | None = None, reason: str = "") -> Call:
        """Approve a waiting call as a person at the desk."""
        return self.decide(call, "approve", by=by, reason=reason)

    def reject(self, call: Call, *, by: User | None = None, reason: str = "") -> Call:
        """Reject a waiting call as a person at the desk."""
        return self.decide(call, "reject", by=by, reason=reason)

    def decide(self, call: Call, decision: str, *, by: User | None = None, reason: str = "", hash: str = "") -> Call:
        seen = hash or masking.shown_hash(call)
        return desk.decide(
            call.pk, by or self.ana, decision=decision, arguments_hash=seen, reason=reason, channel="desk"
        )

    def run(self) -> None:
        """Let a real runner of this process execute whatever is due."""
        if self._runner is None:
            self._runner = Runner(slots=4)
        for retryable in (True, False):
            self._runner.drain(retryable=retryable)

    def close(self) -> None:
        """End this world's runner."""
        if self._runner is not None:
            self._runner.close()

    @property
    def worker(self) -> UUID:
        """The identity of this world's runner."""
        if self._runner is None:
            self._runner = Runner(slots=4)
        return self._runner.start()

    def now(self, call: Call) -> Call:
        """Read a call anew."""
        return Call.objects.select_related("session", "turn", "agent__team").get(pk=call.pk)

    def journal(self, call: Call) -> list[JournalLine]:
        """Give a call's journal in order."""
        return list(call.journal.order_by("pk"))

    def moves(self, call: Call) -> list[str]:
        """Give the states a call went through, from proposed on."""
        lines = [line for line in self.journal(call) if line.move is not None]
        return [lines[0].source, *(line.target for line in lines)]


def a_world(*, tools: tuple[str, ...] = ("*",), **agent: Any) -> World:
    """Make a team, an agent that may use these tools, and two people who may do everything in the team."""
    number = next(_numbers)
    team = directory.create_team(f"team-{number}", by="test")
    made, key = directory.create_agent(f"agent-{number}", team=team, tools=list(tools), by="test", **agent)
    people = [
        directory.create_operator(f"{name}-{number}", team=team, may=list(directory.RIGHTS), by="test")[0]
        for name in ("ana", "bob")
    ]
    session, _ = intake.open_session(made, Opening(session_id=f"session-{number}", body_digest=""))
    return World(team, made, key, people[0], people[1], session)


TABLES = """toolcalls_team, toolcalls_membership, toolcalls_agent, toolcalls_agentkey, toolcalls_usertoken, toolcalls_storedpolicy,
    toolcalls_brake, toolcalls_session, toolcalls_turn, toolcalls_limitrow, toolcalls_call, toolcalls_attempt,
    toolcalls_journalline, toolcalls_unsealedline, toolcalls_seal, toolcalls_worker, approvals_decision,
    approvals_reconciliation"""


def sweep_away() -> None:
    """Empty the tables between tests: rows cannot be deleted, so they are truncated, as only the tables' owner may."""
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLES} CASCADE")
        cursor.execute("UPDATE toolcalls_bell SET rung_at = NULL, last_rung_at = NULL, rings_again = 0")
        cursor.execute("UPDATE toolcalls_sweeppass SET at = NULL")
    User.objects.all().delete()
