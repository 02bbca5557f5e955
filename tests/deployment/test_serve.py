"""`manage.py serve` as it is started: real processes, on a data directory of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from django.conf import settings

UNSET = (
    "DATABASE_URL",
    "DATABASE_URL_FILE",
    "CELERY_BROKER_URL",
    "SECRET_KEY",
    "PORT",
    "DEXSITE_ROLE",
    "DEBUG",
)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def environment(**variables: object) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return kept | {name: str(value) for name, value in variables.items()}


def serve(*arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "serve", *arguments],
        cwd=settings.BASE_DIR, env=environment(**variables),
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def processes_of(data_dir: Path) -> list[str]:
    """Every process of this data directory: its environment or its command line names it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(data_dir) in words:
                found.append(process.name)
    return found


@pytest.fixture
def served(data_dir: Path, port: int, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve"],
            cwd=settings.BASE_DIR, env=environment(DEXSITE_DATA_DIR=data_dir, PORT=port),
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        said = (tmp_path / "output").read_bytes
        within(90, lambda: b"dexsite: serving at" in said() or process.poll() is not None)
        assert b"dexsite: serving at" in said(), said().decode()
        yield process
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_machine_serves_and_a_signal_leaves_nothing_behind(
    served: "subprocess.Popen[bytes]", port: int, data_dir: Path, number: signal.Signals
) -> None:
    assert httpx.get(f"http://127.0.0.1:{port}/admin/login/").status_code == 200
    served.send_signal(number)
    assert served.wait(timeout=40) == 0
    assert processes_of(data_dir) == []


def test_a_killed_supervisor_leaves_nothing_behind(served: "subprocess.Popen[bytes]", data_dir: Path) -> None:
    assert len(processes_of(data_dir)) > 4
    served.kill()
    served.wait()
    assert within(30, lambda: processes_of(data_dir) == [])


def test_a_taken_port_is_one_line_and_exit_1(data_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = serve(DEXSITE_DATA_DIR=data_dir, PORT=port)
    assert answer.returncode == 1
    assert answer.stderr.strip() == (
        f"CommandError: Port {port} is taken: stop what uses it, or choose another with PORT={port + 1}."
    )


def test_a_database_that_is_away_is_one_line_and_exit_1(port: int) -> None:
    url = f"postgresql://me:hunter2@127.0.0.1:{port}/shop"
    answer = serve("--worker", DATABASE_URL=url, SECRET_KEY="k" * 50)
    assert answer.returncode == 1
    assert len(answer.stderr.strip().splitlines()) == 1
    assert f"PostgreSQL does not answer at 127.0.0.1:{port}" in answer.stderr
    assert "hunter2" not in answer.stderr


def test_a_broker_that_is_away_is_one_line_and_exit_1(data_dir: Path, port: int) -> None:
    broker = f"redis://:hunter2@127.0.0.1:{port}/0"
    answer = serve(DEXSITE_DATA_DIR=data_dir, PORT=port, CELERY_BROKER_URL=broker)
    assert answer.returncode == 1
    assert len(answer.stderr.strip().splitlines()) == 1
    assert f"The broker does not answer at redis://:**@127.0.0.1:{port}/0" in answer.stderr
    assert "start it, or unset CELERY_BROKER_URL" in answer.stderr


def test_a_role_does_not_migrate_and_says_who_does(tmp_path: Path) -> None:
    answer = serve("--sweeps", DEXSITE_DATA_DIR=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.strip().endswith("are not applied: run manage.py migrate.")
    assert len(answer.stderr.strip().splitlines()) == 1
