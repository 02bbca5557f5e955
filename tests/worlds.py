"""Worlds for tests, built through the real verbs: a team with an agent and people, and a worker that really runs.

Nothing here inserts a state: a call gets where it is by being proposed, decided and executed.
"""

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.apps import apps
from django.contrib.auth.models import User
from django.db import connection, transaction
from pydantic import BaseModel, ConfigDict

from approvals import desk
from toolcalls import directory, intake, lifecycle, masking, tools
from toolcalls.executor import Runner
from toolcalls.intake import Answered, Mismatch, Opening
from toolcalls.models import Agent, Attempt, Call, JournalLine, Session, Team, Worker, new_id
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


@dataclass(frozen=True)
class Entry:
    """What a tool was entered with."""

    arguments: Thing
    key: str
    attempt: int


class Held:
    """An ending that comes when it is let go: until then the tool runs."""

    def __init__(self, ending: Any = None) -> None:
        self._ending = ending
        self.entered = threading.Event()
        self._released = threading.Event()

    def let_go(self) -> None:
        """Let the tool end."""
        self._released.set()

    def wait(self) -> Any:
        self.entered.set()
        assert self._released.wait(WITHIN), "nobody let the tool go"
        return self._ending


class Script:
    """A tool's body that plays endings in order, the last one from then on: what it returns, or what it raises.

    entries: every time the tool was entered; their number is the number of effects.
    """

    def __init__(self, *endings: Any) -> None:
        self._endings = list(endings) or [{"done": True}]
        self.entries: list[Entry] = []

    @property
    def applied(self) -> int:
        """How often the tool was entered."""
        return len(self.entries)

    def __call__(self, arguments: Thing, context: ToolContext) -> Any:
        self.entries.append(Entry(arguments, context.idempotency_key, context.attempt))
        ending = self._endings.pop(0) if len(self._endings) > 1 else self._endings[0]
        if isinstance(ending, Held):
            ending = ending.wait()
        if callable(ending):
            ending = ending(arguments, context)
        if isinstance(ending, BaseException):
            raise ending
        return ending


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
        return self.stored(answer)

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

    def decide(self, call: Call, decision: str, *, by: User | None = None, reason: str = "", hash: str = "") -> Call:  # noqa: A002 - the interface's word
        seen = hash or masking.hash_of(call)
        return desk.decide(
            call.pk, by or self.ana, decision=decision, arguments_hash=seen, reason=reason, channel="desk"
        )

    def run(self) -> None:
        """Let a real runner of this process execute whatever is due."""
        if self._runner is None:
            self._runner = Runner(slots=4, looks=4)
        for retryable in (True, False):
            self._runner.drain(retryable=retryable)

    @contextmanager
    def running(self) -> Iterator["Future[None]"]:
        """Let the runner execute whatever is due beside the test; at the end it has recorded what it ran."""
        with beside(self.run) as done:
            yield done

    def run_to_the_end(self, call: Call) -> Call:
        """Execute, and let the delays between attempts pass, until nothing more of this call is due."""
        self.run()
        while (now := self.now(call)).due_at is not None:
            claims = now.claims
            make_due(now)
            self.run()
            assert self.now(call).claims > claims or self.now(call).due_at is None, "it is due and nobody claimed it"
        return now

    def claim_and_die(self, call: Call) -> UUID:
        """Let a worker claim a due call and never be heard of again. Gives the worker's identity."""
        worker = a_worker()
        found = lifecycle.claim(worker, retryable=call.retryable, tools=list(tools.every()), limit=50)
        assert call.pk in [each.call for each in found], "the call was not claimed"
        return worker

    def lose_track(self, call: Call) -> Call:
        """Let a due call's worker be lost while the tool ran. Gives the call as it then is."""
        self.claim_and_die(call)
        lifecycle.lose(Attempt.objects.get(call=call, number=self.now(call).live_attempt).pk)
        return self.now(call)

    def attempts(self, call: Call) -> list[Attempt]:
        """Give a call's attempts in order."""
        return list(Attempt.objects.filter(call=call).order_by("number"))

    def states(self, call: Call) -> list[str]:
        """Give how each attempt of a call stands, in order."""
        return [each.state for each in self.attempts(call)]

    def answers(self, tool: Tool, several: list[dict[str, Any]]) -> list[Answered | Mismatch]:
        """Propose several calls of a tool in one request."""
        proposals = [Proposal(f"call-{next(self._ids)}", tool.name, arguments, "") for arguments in several]
        return intake.submit(self.agent, self.session.session_id, "turn-1", proposals)

    def stored(self, answer: Answered | Mismatch) -> Call:
        """Give the stored call of an answer."""
        assert isinstance(answer, Answered), answer
        return Call.objects.select_related("session", "turn", "agent__team").get(pk=answer.id)

    def close(self) -> None:
        """End this world's runner."""
        if self._runner is not None:
            self._runner.close()

    @property
    def worker(self) -> UUID:
        """The identity of this world's runner."""
        if self._runner is None:
            self._runner = Runner(slots=4, looks=4)
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
    with transaction.atomic():  # one wait for the disk, not a dozen
        team = directory.create_team(f"team-{number}", by="test")
        made, key = directory.create_agent(f"agent-{number}", team=team, tools=list(tools), by="test", **agent)
        people = [
            directory.create_operator(f"{name}-{number}", team=team, may=list(directory.RIGHTS), by="test")[0]
            for name in ("ana", "bob")
        ]
        session, _ = intake.open_session(made, Opening(session_id=f"session-{number}", body_digest=""))
    return World(team, made, key, people[0], people[1], session)


WITHIN = 30.0
"""Seconds in which whatever a test waits for must come."""


def a_worker() -> UUID:
    """Register a worker process of which nothing more is heard. Gives its identity."""
    row = Worker(id=new_id(), host=socket.gethostname()[:100], pid=os.getpid(), slots=4)
    lifecycle.register(row)
    return row.pk


def _and_close(function: Callable[[], Any]) -> Any:
    try:
        return function()
    finally:
        connection.close()


@contextmanager
def beside(function: Callable[[], Any]) -> Iterator["Future[Any]"]:
    """Run a function in a thread beside the block; afterwards it has ended, and what it raised is raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_and_close, function)
        yield future
        future.result(timeout=WITHIN)


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, each in a thread; gives what each returned, or the exception it raised."""
    start = threading.Barrier(len(functions))

    def begin(function: Callable[[], Any]) -> Any:
        start.wait(timeout=WITHIN)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(_and_close, lambda each=each: begin(each)) for each in functions]
    return [future.exception() or future.result() for future in futures]


@contextmanager
def past_the_triggers() -> Iterator[Any]:
    """Give a cursor on which PostgreSQL verifies nothing: what somebody with the tables' password could do."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
        yield cursor


def let_pass(seconds: float, *calls: Call) -> None:
    """Let time pass for these calls and their attempts alone: every time that they hold moves into the past."""
    with past_the_triggers() as cursor:
        for table, column, times in (
            (
                "toolcalls_call",
                "id",
                ("proposed_at", "approved_at", "due_at", "alarm_at", "deadline", "cancel_asked_at"),
            ),
            ("toolcalls_attempt", "call_id", ("claimed_at", "entered_at", "deadline", "finished_at", "late_at")),
        ):
            moved = ", ".join(f"{time} = {time} - make_interval(secs => %(seconds)s)" for time in times)
            cursor.execute(
                f"UPDATE {table} SET {moved} WHERE {column} = ANY(%(calls)s)",
                {"seconds": seconds, "calls": [each.pk for each in calls]},
            )


def make_due(call: Call) -> None:
    """Let the delay before a call's next attempt pass."""
    with past_the_triggers() as cursor:
        cursor.execute(
            "UPDATE toolcalls_call SET due_at = least(due_at, clock_timestamp() - interval '1 millisecond') WHERE id = %s",
            [call.pk],
        )


def let_session_pass(seconds: float, session: Session) -> None:
    """Let time pass for a session's own clock."""
    with past_the_triggers() as cursor:
        cursor.execute(
            "UPDATE toolcalls_session SET opened_at = opened_at - make_interval(secs => %s) WHERE id = %s",
            [seconds, session.pk],
        )


def let_workers_pass(seconds: float, *workers: UUID) -> None:
    """Let time pass for workers: their heartbeats, and a sweep's note that they are silent, move into the past."""
    with past_the_triggers() as cursor:
        cursor.execute(
            """UPDATE toolcalls_worker SET beat_at = beat_at - make_interval(secs => %(seconds)s),
               suspected_at = suspected_at - make_interval(secs => %(seconds)s),
               suspected_beat = suspected_beat - make_interval(secs => %(seconds)s) WHERE id = ANY(%(workers)s)""",
            {"seconds": seconds, "workers": list(workers)},
        )


KEPT = {"toolcalls_bell", "toolcalls_sweeppass"}


def sweep_away() -> None:
    """Empty the tables between tests, past the triggers: rows cannot be deleted, and TRUNCATE takes a second."""
    models = [each for app in ("toolcalls", "approvals") for each in apps.get_app_config(app).get_models()]
    with past_the_triggers() as cursor:
        cursor.execute("SET LOCAL synchronous_commit = off")
        cursor.execute(
            ";".join(f"DELETE FROM {each._meta.db_table}" for each in models if each._meta.db_table not in KEPT)
        )
        cursor.execute("UPDATE toolcalls_bell SET rung_at = NULL, last_rung_at = NULL, rings_again = 0")
        cursor.execute("UPDATE toolcalls_sweeppass SET at = NULL")
        cursor.execute("DELETE FROM pgmq.q_call_tool; DELETE FROM pgmq.q_call_single_attempt_tool")
        cursor.execute(
            "DELETE FROM auth_user_groups; DELETE FROM auth_user_user_permissions; DELETE FROM django_admin_log"
        )
        cursor.execute("DELETE FROM auth_group_permissions; DELETE FROM auth_group; DELETE FROM auth_user")
