"""Several programs as one: started together, restarted when they die, stopped in order, never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

PR_SET_PDEATHSIG = 1
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

BACKOFF_FIRST, BACKOFF_MOST = 0.5, 30.0
# A program that ran this long (seconds) was well: its next restart is quick again.
WELL_AFTER = 30.0
TICK = 0.1

Echo = Callable[[str, str], None]


class ProgramFailedError(RuntimeError):
    """A program ended or stayed unready while everything was being started; the text is one line."""


@dataclass(frozen=True)
class Program:
    """One child process: what to run, when it counts as ready and how it is stopped.

    `stop_round` orders the stops: all of round 0 end before those of round 1 are asked to. After
    `stop_within` seconds a program and its children are killed.
    """

    name: str
    command: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    ready: Callable[[], bool] | None = None
    stop_round: int = 0
    stop_within: float = 15.0


class _Child:
    def __init__(self, program: Program, echo: Echo | None) -> None:
        self.program = program
        self.failures = 0
        self.due = 0.0
        self.stopping = False
        self._echo = echo
        self.start()

    def start(self) -> None:
        supervisor = os.getpid()

        def end_with_the_supervisor() -> None:
            if _libc is not None:
                _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
                if os.getppid() != supervisor:
                    os._exit(1)

        self.started = time.monotonic()
        # A process group of its own: Ctrl-C reaches the supervisor alone, which stops its programs in order.
        self.process = subprocess.Popen(
            [str(word) for word in self.program.command],
            env=os.environ | self.program.environment,
            cwd=self.program.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._echo else None,
            stderr=subprocess.STDOUT if self._echo else None,
            text=True if self._echo else None,
            errors="replace" if self._echo else None,
            process_group=0,
            preexec_fn=end_with_the_supervisor,  # noqa: PLW1509 - no locks are taken in it
        )
        if self._echo and self.process.stdout:
            reader = threading.Thread(target=self._pass_on, args=(self.process.stdout, self._echo), daemon=True)
            reader.start()

    def _pass_on(self, stream: IO[str], echo: Echo) -> None:
        with stream:
            for line in stream:
                echo(self.program.name, line.rstrip("\n"))

    def alive(self) -> bool:
        return self.process.poll() is None

    def signal_group(self, number: signal.Signals) -> None:
        # A group's number is not given to another while a process of the group is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Supervisor:
    """Run programs until it is told to stop; use it in the main thread.

    `echo(name, line)` receives what the programs print; without it they print straight to our own output
    (JSON lines stay whole). `watch` is called about once a second, for whatever else has to be kept up; a
    RuntimeError of it is said and tried again.
    """

    def __init__(self, *, echo: Echo | None = None, watch: Callable[[], object] | None = None) -> None:
        self._echo = echo
        self._watch = watch
        self._children: dict[str, _Child] = {}
        self._asked = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._ask_to_stop)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _ask_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._asked += 1

    @property
    def stopping(self) -> bool:
        """True once a signal has asked us to stop."""
        return self._asked > 0

    def start(self, *programs: Program, within: float = 60.0) -> None:
        """Start the programs together and return when all are ready.

        Raises `ProgramFailedError` if one ends or is not ready in `within` seconds; returns early when asked
        to stop.
        """
        for program in programs:
            self._children[program.name] = _Child(program, self._echo)
        deadline = time.monotonic() + within
        unready = [program for program in programs if program.ready]
        while not self.stopping:
            for program in programs:
                child = self._children[program.name]
                if not child.alive():
                    raise ProgramFailedError(f"{program.name} ended at its start with {child.process.returncode}")
            unready = [program for program in unready if program.ready and not program.ready()]
            if not unready:
                return
            if time.monotonic() > deadline:
                raise ProgramFailedError(f"{unready[0].name} was not ready within {within:g} seconds")
            time.sleep(TICK)

    def run(self, *, until: Callable[[], bool] | None = None) -> None:
        """Keep the programs running until a signal comes or `until()` is true."""
        for tick in itertools.count():
            if self.stopping or (until and until()):
                return
            for child in self._children.values():
                self._revive(child)
            if self._watch and tick % 10 == 0:
                try:
                    self._watch()
                except RuntimeError as problem:
                    self._say(str(problem))
            time.sleep(TICK)

    def _revive(self, child: _Child) -> None:
        if child.alive() or child.stopping:
            return
        now = time.monotonic()
        if not child.due:
            child.failures = 0 if now - child.started > WELL_AFTER else child.failures
            delay = min(BACKOFF_MOST, BACKOFF_FIRST * 2**child.failures)
            child.failures += 1
            child.due = now + delay
            child.signal_group(signal.SIGKILL)
            self._say(f"{child.program.name} ended with {child.process.returncode}; it starts again in {delay:g} s")
        elif now >= child.due:
            child.due = 0.0
            child.start()

    def stop(self, *names: str) -> None:
        """Stop the named programs, or all, round by round; a second signal kills what is left."""
        chosen = [child for name, child in self._children.items() if not names or name in names]
        for stop_round in sorted({child.program.stop_round for child in chosen}):
            self._stop_together([child for child in chosen if child.program.stop_round == stop_round])
        for child in chosen:
            del self._children[child.program.name]

    def _stop_together(self, children: list[_Child]) -> None:
        asked, begun = self._asked, time.monotonic()
        for child in children:
            child.stopping = True
            if child.alive():
                child.process.terminate()
        while any(child.alive() for child in children):
            for child in children:
                if time.monotonic() - begun > child.program.stop_within or self._asked > max(asked, 1):
                    child.signal_group(signal.SIGKILL)
            time.sleep(TICK / 2)
        for child in children:
            child.signal_group(signal.SIGKILL)

    def _say(self, line: str) -> None:
        if self._echo:
            self._echo("dexsite", line)
        else:
            print(f"dexsite: {line}", file=sys.stderr, flush=True)


COLOURS = (36, 33, 32, 35, 34, 31)


def prefixed(stream: IO[str], *, width: int = 8) -> Echo:
    """An echo that writes `name | line`; on a terminal each name has a colour of its own."""
    colours: dict[str, int] = {}
    lock = threading.Lock()
    coloured = stream.isatty() and "NO_COLOR" not in os.environ

    def echo(name: str, line: str) -> None:
        with lock:
            colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
            label = f"{name:<{width}} |"
            label = f"\x1b[{colour}m{label}\x1b[0m" if coloured else label
            print(f"{label} {line}", file=stream, flush=True)

    return echo
