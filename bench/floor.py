"""The floor: what PostgreSQL alone takes for the three commits that no durable call can be spared.

Per call: the intent is inserted, marked as executing, and given its result, each in a transaction of its own. Measured
by pgbench with prepared statements; where there is none, by threads of psycopg, which the result then says.
"""

import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psycopg

from dexsite import embedded

TABLE = """
DROP TABLE IF EXISTS bench_floor;
CREATE TABLE bench_floor (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text NOT NULL, attempt int NOT NULL, tool text NOT NULL,
    arguments text NOT NULL, result text, at timestamptz NOT NULL, started_at timestamptz, finished_at timestamptz
)
"""
ADMIT = """INSERT INTO bench_floor (status, attempt, tool, arguments, at)
    VALUES ('approved', 0, 'note', '{"text":"7"}', clock_timestamp()) RETURNING id"""
CLAIM = """UPDATE bench_floor SET status = 'executing', attempt = 1, started_at = clock_timestamp()
    WHERE id = %s AND attempt = 0"""
RECORD = """UPDATE bench_floor SET status = 'succeeded', result = '{"noted":"7"}', finished_at = clock_timestamp()
    WHERE id = %s AND attempt = 1"""
SCRIPT = f"{ADMIT} \\gset\n{CLAIM % ':id'};\n{RECORD % ':id'};\n"


class Floor:
    """Measure the floor in the database of a connection string, as often as it is asked."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._pgbench = _find_pgbench()
        self.how = (
            "pgbench, prepared statements" if self._pgbench else "psycopg threads: no pgbench was found, so it is LOWER"
        )
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(TABLE)

    def sample(self, clients: int, seconds: float) -> float:
        """The calls per second that `clients` connections reach in `seconds`."""
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            connection.execute("TRUNCATE bench_floor")
        if self._pgbench:
            return _by_pgbench(self._pgbench, self._conninfo, clients, seconds)
        return _by_psycopg(self._conninfo, clients, seconds)

    def remove(self) -> None:
        """Drop the table."""
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            connection.execute("DROP TABLE bench_floor")


def _find_pgbench() -> str | None:
    own = embedded.binaries()
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places = [str(place) for place in (own, *debian) if place]
    return shutil.which("pgbench", path=":".join(places)) or shutil.which("pgbench")


def _by_pgbench(program: str, conninfo: str, clients: int, seconds: float) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(SCRIPT)
        script.flush()
        command = [
            program, "--no-vacuum", "--protocol=prepared", f"--file={script.name}", f"--client={clients}",
            f"--jobs={min(clients, 2)}", f"--time={max(1, round(seconds))}", conninfo,
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise RuntimeError(f"pgbench failed: {done.stderr.strip() or done.stdout.strip()}")
    return float(found[1])


def _by_psycopg(conninfo: str, clients: int, seconds: float) -> float:
    ready = threading.Barrier(clients + 1)
    done = [0] * clients
    until = 0.0

    def work(client: int) -> None:
        with psycopg.connect(conninfo, autocommit=True, prepare_threshold=0) as connection:
            cursor = connection.cursor()
            ready.wait()
            while time.monotonic() < until:
                (call,) = cursor.execute(ADMIT).fetchone() or (0,)
                cursor.execute(CLAIM, (call,))
                cursor.execute(RECORD, (call,))
                done[client] += 1

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds + 0.5
    begun = time.monotonic()
    ready.wait()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - begun)
