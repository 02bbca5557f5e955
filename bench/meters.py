"""What a stretch of work took: CPU by part, transactions and write-ahead log, read before and after it.

CPU is read from /proc, so it is known on Linux only, and that of PostgreSQL only where it runs on this machine. The
broker of the default deployment is PostgreSQL too: its share is that of the connections that speak to its queues.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from django.db import connection

PROC = Path("/proc")
ROLES = ("web", "worker", "sweeps")
OWN_NAME = "dexsite bench"
TICK = 1 / os.sysconf("SC_CLK_TCK")
PARTS = (*ROLES, "pg web", "pg worker", "pg sweeps", "pg broker", "pg rest")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    own: float
    reaped: float


@dataclass(frozen=True)
class Reading:
    """The counters at one moment: seconds of CPU by process and part, transactions, bytes of log, busy seconds."""

    at: float
    processes: Mapping[int, float]
    parts: Mapping[int, str]
    server: float
    machine: float
    ours: float
    writes: int
    log_bytes: int
    last_line: int


@dataclass(frozen=True)
class Taken:
    """What was taken between two readings.

    cpu: seconds by part. own_commits: commits that moved calls, so neither seals nor heartbeats nor the broker's.
    writes: all that wrote. elsewhere: how many cores anything that is not ours kept busy.
    """

    cpu: dict[str, float]
    own_commits: int
    writes: int
    log_bytes: int
    elsewhere: float


def read() -> Reading:
    """Read every counter now."""
    with connection.cursor() as cursor:
        cursor.execute(
            """SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
                pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,
                (SELECT coalesce(max(id), 0) FROM toolcalls_journalline)"""
        )
        writes, log_bytes, last_line = cursor.fetchone()
        cursor.execute(
            """SELECT pid, application_name, query ~* 'pgmq|LISTEN "?pgmq' FROM pg_stat_activity
               WHERE backend_type = 'client backend' AND datname = current_database()"""
        )
        backends = cursor.fetchall()
    processes = _processes()
    parts = {pid: f"pg {_speaks_for(name, broker=broker)}" for pid, name, broker in backends if name != OWN_NAME}
    postmaster = _postmaster([pid for pid, _, _ in backends], processes)
    of_server = [each for each in processes.values() if postmaster in (each.pid, each.parent)] if postmaster else []
    parts |= _roles(processes)
    known = {pid: processes[pid].own for pid in parts if pid in processes and (postmaster or parts[pid] in ROLES)}
    server = sum(each.own for each in of_server) + (processes[postmaster].reaped if postmaster else 0.0)
    ours = server + sum(seconds for pid, seconds in known.items() if parts[pid] in ROLES) + sum(os.times()[:4])
    return Reading(
        at=time.monotonic(), processes=known, parts=parts, server=server, machine=_machine(), ours=ours,
        writes=writes, log_bytes=log_bytes, last_line=last_line,
    )  # fmt: skip


def taken(before: Reading, after: Reading) -> Taken:
    """The difference of two readings."""
    cpu = dict.fromkeys(PARTS, 0.0)
    for pid, seconds in after.processes.items():
        cpu[after.parts[pid]] += seconds - before.processes.get(pid, 0.0)
    cpu["pg rest"] = after.server - before.server - sum(cpu[part] for part in PARTS if part.startswith("pg "))
    with connection.cursor() as cursor:
        # The transactions that wrote lines are those of the calls themselves.
        cursor.execute(
            "SELECT count(DISTINCT xmin::text) FROM toolcalls_journalline WHERE id > %s AND id <= %s",
            [before.last_line, after.last_line],
        )
        own_commits = cursor.fetchone()[0]
    return Taken(
        cpu=cpu,
        own_commits=own_commits,
        writes=after.writes - before.writes,
        log_bytes=after.log_bytes - before.log_bytes,
        elsewhere=max(0.0, after.machine - before.machine - (after.ours - before.ours)) / (after.at - before.at),
    )


def yardstick() -> float:
    """The CPU time, in milliseconds, of one fixed piece of Python: how slow the machine is just now."""
    begun = time.thread_time()
    for _ in range(10):
        sum(number * number for number in range(100_000))
    return (time.thread_time() - begun) * 100


def _speaks_for(application_name: str, *, broker: bool) -> str:
    role = application_name.removeprefix("dexsite ")
    if broker or role.endswith(" broker"):
        return "broker"
    return role if role in ROLES else "rest"


def _processes() -> dict[int, _Process]:
    found = {}
    for entry in PROC.glob("[0-9]*/stat"):
        try:
            words = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        user, system, reaped_user, reaped_system = (int(word) * TICK for word in words[11:15])
        pid = int(entry.parent.name)
        found[pid] = _Process(pid, int(words[1]), user + system, reaped_user + reaped_system)
    return found


def _roles(processes: Mapping[int, _Process]) -> dict[int, str]:
    """The role of each of our children: the last word of its command."""
    found = {}
    for each in processes.values():
        if each.parent == os.getpid():
            words = (PROC / str(each.pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            role = {b"bench_drain": "worker"}.get(words[-1], words[-1].removeprefix(b"--").decode(errors="replace"))
            if role in ROLES:
                found[each.pid] = role
    return found


def _postmaster(backends: list[int], processes: Mapping[int, _Process]) -> int | None:
    """The server's first process, None where it is on another machine."""
    local = [processes[pid].parent for pid in backends if pid in processes and _is_postgres(pid)]
    return local[0] if local else None


def _is_postgres(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "comm").read_text().strip() == "postgres"
    except OSError:
        return False


def _machine() -> float:
    try:
        words = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = (int(word) * TICK for word in words[:7])
    return user + nice + system + interrupts + soft_interrupts
