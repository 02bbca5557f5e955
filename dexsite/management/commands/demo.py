"""`manage.py demo`: everything on this machine, an agent that proposes calls, and a person who decides."""

import contextlib
import secrets
import shlex
import socket
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management import BaseCommand, CommandError
from django.db import connections

from dexsite import demo, readiness
from dexsite.environment import Environment
from dexsite.management.commands.serve import ROLES, keep_embedded_server, program
from dexsite.orders import gateway
from dexsite.supervisor import Echo, Program, ProgramFailedError, Supervisor
from toolcalls import directory
from toolcalls.models import Agent, Team

BY = "demo"
TEAM = "demo"
AGENT = "support-bot"
PERSON = "demo"
STAND_IN = "demo-stand-in"
MAY = ("decide", "reconcile")
WITHIN = 60.0


class Command(BaseCommand):
    """Play the demo; with --once without a person, exiting with 0 only if all went as it should."""

    help = "Start everything on this machine and let a scripted agent propose calls."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="a signed-in session decides, no person")

    def handle(self, *_args: Any, once: bool, **_options: Any) -> None:
        port = Environment().whole("ORDERS_PORT", 8001, least=1, most=65535)
        try:
            readiness.require_free_port(settings.PORT)
            _require_free_orders_port(port)
            readiness.require_database()
            readiness.migrate()
            readiness.require_broker()
            stage = Stage(port, say=self._say, once=once)
            connections.close_all()
            faults = stage.play()
        except (readiness.NotReadyError, ProgramFailedError, demo.DemoError, httpx.HTTPError) as problem:
            reason = str(problem) or type(problem).__name__
            raise CommandError(f"{reason} (what the programs said is in {_log_file()})") from problem
        if faults:
            raise CommandError("\n".join(["Not as expected:", *faults]))

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


class Stage:
    """Set up team, agent and operator, start the programs, and let the story be played."""

    def __init__(self, orders_port: int, *, say: demo.Say, once: bool) -> None:
        self._orders_port, self._say, self._once = orders_port, say, once
        self._operator = STAND_IN if once else PERSON
        team = Team.objects.filter(name=TEAM).first() or directory.create_team(TEAM, by=BY)
        self._password = _password_of(self._operator, team, renew=once)
        self._key = _key_of(AGENT, team)

    def play(self) -> list[str]:
        """Start everything, play, and stop what it started; it gives what was not as expected."""
        url, orders_url = f"http://127.0.0.1:{settings.PORT}", f"http://127.0.0.1:{self._orders_port}"
        with _log() as log, ThreadPoolExecutor(1) as pool:
            self._say(f"Starting the order service, web, worker and sweeps; their log is {_log_file()}.")
            with Supervisor(echo=log, watch=keep_embedded_server) as supervisor:
                supervisor.start(_order_service(self._orders_port))
                supervisor.start(*(_pointed_at(orders_url, program(role)) for role in ROLES))
                agent = demo.Agent(url, self._key, session=demo.session_name())
                run = demo.Run(demo.Story(demo.Orders.new()), agent, demo.Shop(orders_url), self._say)
                play = self._with_a_stand_in if self._once else self._with_a_person
                # The supervisor keeps the main thread, where signals arrive.
                played = pool.submit(play, run, supervisor)
                supervisor.run(until=lambda: played.done() and (self._once or bool(played.exception())))
                if played.done() and not supervisor.stopping:
                    return played.result()
                self._say("Stopping what was started here.")
        return ["it was stopped before its end"] if self._once else []

    def _with_a_stand_in(self, run: demo.Run, supervisor: Supervisor) -> list[str]:
        run.begin()
        operator = demo.Operator(run.agent.url)
        operator.sign_in(self._operator, self._password)
        self._say(f"The operator {self._operator} signs in through the login form.")
        run.decide_all(operator)
        self._follow(run, supervisor, until=time.monotonic() + WITHIN)
        self._say(f"\n{run.table(judged=True)}\n")
        faults = run.faults()
        if not faults:
            self._say("Every call, every state and every effect is as expected.")
        return faults

    def _with_a_person(self, run: demo.Run, supervisor: Supervisor) -> list[str]:
        run.begin()
        self._say(f"\nNow a person decides: sign in at http://localhost:{settings.PORT}/, approve or reject.")
        self._say(f"    user      {self._operator}")
        if self._password:
            self._say(f"    password  {self._password}    (printed this once)")
        else:
            command = shlex.join([_relative(sys.executable), "manage.py", "changepassword", self._operator])
            self._say(f"    password  the one printed when this user was made; for a new one: {command}")
        self._say("Ctrl-C stops everything that was started here.\n")
        self._follow(run, supervisor)
        if not supervisor.stopping:
            self._say(f"\n{run.table(judged=False)}\n")
            self._say("The agent has read every outcome. The desk stays open until Ctrl-C.")
        return []

    def _follow(self, run: demo.Run, supervisor: Supervisor, *, until: float = float("inf")) -> None:
        while not supervisor.stopping and time.monotonic() < until:
            # While the web server is being started again, what waits there waits on.
            with contextlib.suppress(httpx.TransportError):
                if not run.go_on():
                    return
            time.sleep(0.3)


def _order_service(port: int) -> Program:
    file = settings.DATA_DIR / "orders.sqlite3"
    return Program(
        name="orders",
        command=[sys.executable, gateway.__file__, "--port", str(port), "--data", file],
        directory=settings.BASE_DIR,
        ready=lambda: _accepts(port),
        # The worker's last refund needs it.
        stop_round=1,
    )


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _require_free_orders_port(port: int) -> None:
    if _accepts(port):
        raise readiness.NotReadyError(
            f"Port {port} is taken: stop what uses it, or choose another with ORDERS_PORT={port + 1}."
        )


def _pointed_at(orders_url: str, program: Program) -> Program:
    return replace(program, environment={**program.environment, "ORDERS_URL": orders_url})


def _password_of(username: str, team: Team, *, renew: bool) -> str:
    """The operator's password where it is known: a new or renewed one; else empty."""
    user, password = directory.create_operator(username, team=team, may=MAY, by=BY)
    if not password and renew:
        password = secrets.token_urlsafe(18)
        user.set_password(password)
        user.save(update_fields=["password"])
    return password


def _key_of(name: str, team: Team) -> str:
    """A new key of the agent: the earlier ones are known to nobody."""
    agent = Agent.objects.filter(team=team, name=name).first()
    if agent:
        return directory.create_key(agent, by=BY)
    return directory.create_agent(name, team=team, tools=demo.TOOLS, by=BY)[1]


def _relative(path: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(settings.BASE_DIR))
    return path


def _log_file() -> Path:
    return Path(settings.DATA_DIR) / "demo.log"


@contextlib.contextmanager
def _log() -> Iterator[Echo]:
    """Write what the programs print to a file: the story has the terminal to itself."""
    with _log_file().open("a", buffering=1) as file:

        def echo(name: str, line: str) -> None:
            file.write(f"{datetime.now(UTC):%H:%M:%S.%f} {name:<7} {line}\n")

        yield echo
