"""`manage.py bench`: the measuring itself. Start it as `python -m bench`, which prepares the environment."""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, Self

from django.conf import settings
from django.core.management import BaseCommand, CommandError
from django.db import connection, connections

from bench import figures, load, meters
from bench.figures import APPROVED, DRAIN, FIVE, ONE, Measured, say
from bench.floor import Floor
from dexsite import readiness
from dexsite.environment import conninfo
from dexsite.management.commands.serve import ROLES, program
from dexsite.supervisor import Supervisor
from toolcalls import directory, intake
from toolcalls.intake import Opening
from toolcalls.models import Agent, Call, UnsealedLine
from toolcalls.pipeline import Proposal

BY = "bench"
RESULTS = settings.BASE_DIR / "bench" / "results"
SETTLED_WITHIN = 60.0
ADMITTED_AT_ONCE = 100
DRAINED_PER_SECOND = 400


@dataclass(frozen=True)
class Client:
    """Who asks: an agent with its key, and the token of an operator who may decide."""

    agent: Agent
    key: str
    token: str


class Command(BaseCommand):
    """Measure every line beside its floor, and write the result to bench/results/."""

    help = "Measure the product beside its floor (start it as: python -m bench)."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=10.0, help="of load per line")

    def handle(self, *_args: Any, seconds: float, **_options: Any) -> None:
        if "bench" not in settings.INSTALLED_APPS:
            raise CommandError("start it as: python -m bench")
        begun = time.monotonic()
        readiness.migrate()
        readiness.require_broker()
        bench = Bench(seconds)
        connections.close_all()
        try:
            with Supervisor(echo=_log) as supervisor:
                bench.run(supervisor)
        except (RuntimeError, subprocess.CalledProcessError) as problem:
            raise CommandError("\n".join([str(problem), "The product's last words:", *_last_words])) from problem
        say(f"measured in {time.monotonic() - begun:.0f} s")
        self._write_down(bench.measured, about=bench.about(), command=figures.command_line(seconds))
        if any(line.faults for line in bench.measured):
            raise CommandError("some calls did not end as they should")

    def _write_down(self, measured: list[Measured], *, about: dict[str, Any], command: str) -> None:
        now = datetime.now(UTC)
        at = f"{now:%Y-%m-%d %H:%M} UTC"
        page = figures.as_markdown(measured, about=about, command=command, at=at)
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{now:%Y-%m-%d-%H%M}.md"
        file.write_text(page)
        whole = figures.as_json(measured, about=about, command=command, at=at)
        file.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
        self.stdout.write(page)
        self.stdout.write(f"written to {file.relative_to(settings.BASE_DIR)} and .json")


class Bench:
    """One run: the product with its defaults, the floor, and one line after the other."""

    def __init__(self, seconds: float) -> None:
        self.measured: list[Measured] = []
        self._seconds = seconds
        self._floor = Floor(conninfo(settings.DATABASES["default"]))
        self._names = count(1)
        team = directory.create_team("bench", by=BY)
        agent, key = directory.create_agent("bench", team=team, tools=["note", "approved_note"], by=BY)
        operator, _ = directory.create_operator("bench", team=team, may=["decide"], by=BY)
        self._client = Client(agent, key, directory.create_token(operator, by=BY))

    def run(self, supervisor: Supervisor) -> None:
        """Start the product and measure every line."""
        self._supervisor = supervisor
        supervisor.start(*(program(role) for role in ROLES))
        self._warm_up()
        for name, sessions, calls in ((ONE, 1, 1), (ONE, 8, 1), (ONE, 32, 1), (FIVE, 8, 5)):
            self._line(name, sessions, partial(self._load, sessions=sessions, seconds=self._seconds, calls=calls))
        self._line(APPROVED, 8, partial(self._load, sessions=8, seconds=self._seconds, approvals=True))
        supervisor.stop("worker")
        self._admit(round(self._seconds * DRAINED_PER_SECOND / ADMITTED_AT_ONCE) * ADMITTED_AT_ONCE)
        self._settle()
        with Drain() as drain:
            self._line(DRAIN, 8, drain.run)
        self._floor.remove()

    def _warm_up(self) -> None:
        say("warming up")
        # Every thread of web and worker has its connection and its prepared statements before anything is measured.
        warm = (
            self._load(sessions=32, seconds=5),
            self._load(sessions=8, seconds=2, calls=5),
            self._load(sessions=8, seconds=1, approvals=True),
        )
        faults = [done["faults"] for done in warm if done["faults"]]
        if faults:
            raise CommandError(f"the product does not work: {faults[0]}")
        self._settle()
        with connection.cursor() as cursor:
            # What autovacuum does in the first minute of a new database, which no run should depend on.
            cursor.execute("ANALYZE")

    def about(self) -> dict[str, Any]:
        """Name what the figures depend on."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            postgresql = cursor.fetchone()[0]
        broker = settings.CELERY_BROKER_URL.split(":", 1)[0]
        return figures.machine(
            cores=os.cpu_count() or 0,
            postgresql=postgresql,
            floor=self._floor.how,
            broker=broker,
            slots=settings.WORKER_SLOTS,
        )

    def _line(self, name: str, clients: int, work: Callable[[], dict[str, Any]]) -> None:
        if self._supervisor.stopping:
            raise CommandError("stopped")
        floor, yardstick = self._floor.sample(clients, max(1.0, self._seconds / 3)), meters.yardstick()
        before = meters.read()
        done = work()
        # Sealing follows the commits: its CPU belongs to these calls, whenever it is spent.
        self._settle()
        taken = meters.taken(before, meters.read())
        calls = max(1, done["calls"])
        self.measured.append(
            Measured(
                name=name, sessions=clients, calls=done["calls"], rate=done["calls"] / done["seconds"], floor=floor,
                milliseconds=done["milliseconds"], cpu={part: used * 1000 / calls for part, used in taken.cpu.items()},
                client_cpu=done["cpu"] * 1000 / calls, own_commits=taken.own_commits / calls, writes=taken.writes / calls,
                log_bytes=taken.log_bytes / calls, elsewhere=taken.elsewhere, yardstick=yardstick, faults=done["faults"],
            )
        )  # fmt: skip
        line = self.measured[-1]
        say(
            f"{name}, {clients}: {line.rate:.0f}/s, floor {floor:.0f}/s, ratio {line.ratio:.3f}, CPU {line.all_cpu:.2f} ms"
        )

    def _load(self, *, sessions: int, seconds: float, calls: int = 1, approvals: bool = False) -> dict[str, Any]:
        asked = {
            "port": settings.PORT, "key": self._client.key, "token": self._client.token if approvals else "",
            "seconds": seconds, "calls": calls, "sessions": [self._open() for _ in range(sessions)],
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-I", load.__file__],
            input=json.dumps(asked),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _open(self) -> str:
        name = f"session-{next(self._names)}"
        intake.open_session(self._client.agent, Opening(session_id=name, body_digest=""))
        return name

    def _admit(self, calls: int) -> None:
        sessions = [self._open() for _ in range(8)]
        begun = time.monotonic()
        for turn in range(calls // ADMITTED_AT_ONCE):
            proposed = [Proposal(f"{turn}-{n}", "note", {"text": f"{turn}-{n}"}) for n in range(ADMITTED_AT_ONCE)]
            intake.submit(self._client.agent, sessions[turn % len(sessions)], f"turn-{turn}", proposed)
        say(f"admitted {calls} calls with {ADMITTED_AT_ONCE} a turn: {calls / (time.monotonic() - begun):.0f}/s")

    def _settle(self) -> None:
        until = time.monotonic() + SETTLED_WITHIN
        while UnsealedLine.objects.exists() and not self._supervisor.stopping:
            if time.monotonic() > until:
                raise CommandError(f"the journal was not sealed within {SETTLED_WITHIN:g} s")
            time.sleep(0.1)


class Drain:
    """The worker's half alone, in a process of its own: the product's own Runner, without a broker."""

    def __enter__(self) -> Self:
        command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "bench_drain"]
        environment = os.environ | {"DEXSITE_ROLE": "worker"}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self) -> dict[str, Any]:
        """Have it run what is due, and wait until everything is recorded."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        done: dict[str, Any] = json.loads(self._said())
        left = Call.objects.exclude(status="succeeded").values_list("status", flat=True)
        return {**done, "milliseconds": [], "cpu": 0.0, "faults": dict.fromkeys(left, 1)}

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CommandError(f"the drain ended with {self._process.wait()}")
        return line


_last_words: deque[str] = deque(maxlen=10)


def _log(name: str, line: str) -> None:
    _last_words.append(f"{name:<7} {line[:400]}")
