"""The supervisor, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dexsite.supervisor import Program, ProgramFailedError, Supervisor

ROOT = Path(__file__).resolve().parents[2]


def python(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, arguments)]


SLEEP = "import time; time.sleep(600)"
# Says when it was asked to stop, and takes a moment.
POLITE = """
import signal, sys, time
def stop(*_):
    time.sleep(0.3); open(sys.argv[1], "a").write(sys.argv[2] + "\\n"); sys.exit(0)
signal.signal(signal.SIGTERM, stop); open(sys.argv[1] + sys.argv[2], "w").close()
time.sleep(600)
"""
# Ignores every request and has a child of its own, which does too.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", script])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def has_text(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_programs_are_stopped_round_by_round(tmp_path: Path) -> None:
    log = tmp_path / "log"
    programs = [
        Program(name, python(POLITE, log, name), stop_round=stop_round, ready=(tmp_path / f"log{name}").exists)
        for name, stop_round in (("shop", 1), ("web", 0), ("worker", 0))
    ]
    with Supervisor() as supervisor:
        supervisor.start(*programs)
    stopped = log.read_text().split()
    assert set(stopped[:2]) == {"web", "worker"}
    assert stopped[2:] == ["shop"]


def test_what_does_not_stop_in_time_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stubborn = Program("stubborn", python(STUBBORN, pid_file), stop_within=0.3, ready=lambda: has_text(pid_file))
    with Supervisor() as supervisor:
        supervisor.start(stubborn)
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    assert within(5, lambda: gone(int(pid_file.read_text())))


def test_a_program_that_dies_is_started_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.touch()
    script = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(0.2); sys.exit(3)"
    lines: list[tuple[str, str]] = []
    with Supervisor(echo=lambda name, line: lines.append((name, line))) as supervisor:
        supervisor.start(Program("frail", python(script, starts)))
        begun = time.monotonic()
        supervisor.run(until=lambda: len(starts.read_text()) >= 3 or time.monotonic() - begun > 15)
    assert len(starts.read_text()) >= 3
    # Each time it waits twice as long.
    assert [line for name, line in lines if name == "dexsite"][:2] == [
        "frail ended with 3; it starts again in 0.5 s",
        "frail ended with 3; it starts again in 1 s",
    ]


def test_a_program_that_ends_at_its_start_stops_the_others_and_is_named(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    well = Program("well", python(script, pid_file), ready=lambda: has_text(pid_file))
    broken = Program("broken", python("import sys; sys.exit(7)"), ready=lambda: False)
    with Supervisor() as supervisor:
        supervisor.start(well)
        with pytest.raises(ProgramFailedError, match="broken ended at its start with 7"):
            supervisor.start(broken)
    assert gone(int(pid_file.read_text()))


def test_a_program_that_never_gets_ready_is_named() -> None:
    slow = Program("slow", python(SLEEP), ready=lambda: False)
    with Supervisor() as supervisor, pytest.raises(ProgramFailedError, match="slow was not ready"):
        supervisor.start(slow, within=0.3)


def test_a_signal_ends_the_run_and_the_old_handlers_return() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Supervisor() as supervisor:
        supervisor.start(Program("any", python(SLEEP)))
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        supervisor.run()
        assert supervisor.stopping
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_reach_the_echo_with_the_programs_name() -> None:
    lines: list[tuple[str, str]] = []
    with Supervisor(echo=lambda name, line: lines.append((name, line))) as supervisor:
        script = "import sys; print('two', file=sys.stderr, flush=True);"
        supervisor.start(Program("loud", python(script + SLEEP)))
        supervisor.run(until=lambda: len(lines) >= 1)
    assert ("loud", "two") in lines


def test_programs_end_with_a_supervisor_that_is_killed_and_a_stranger_does_not(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a child that its parent died")
    stranger = subprocess.Popen(python(SLEEP))
    pid_file = tmp_path / "pid"
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    script = (
        "import sys; from dexsite.supervisor import Program, Supervisor\n"
        "with Supervisor() as supervisor:\n"
        "    supervisor.start(Program('child', [sys.executable, '-c', *sys.argv[1:]])); supervisor.run()"
    )
    supervisor = subprocess.Popen(python(script, child, pid_file), cwd=ROOT)
    try:
        assert within(20, lambda: has_text(pid_file))
        pid = int(pid_file.read_text())
        assert not gone(pid)
        supervisor.kill()
        supervisor.wait()
        assert within(5, lambda: gone(pid))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_is_watched_may_fail_and_is_tried_again() -> None:
    calls: list[float] = []

    def watch() -> None:
        calls.append(time.monotonic())
        raise RuntimeError("the server is away")

    lines: list[str] = []
    with Supervisor(echo=lambda _, line: lines.append(line), watch=watch) as supervisor:
        supervisor.start(Program("any", python(SLEEP)))
        supervisor.run(until=lambda: len(calls) >= 2)
    assert lines[:2] == ["the server is away"] * 2
