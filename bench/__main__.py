"""`python -m bench`: measure the product beside its floor, in one run on one PostgreSQL.

Without a DATABASE_URL it brings its own server; with one it makes the database `dexsite_bench` there and
drops it afterwards. This part prepares the environment alone: the measuring is `manage.py bench`, run by the
same program that runs the product.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dexsite.environment import Environment

ROOT = Path(__file__).resolve().parent.parent
DATABASE = "dexsite_bench"
MINE = ("DEXSITE_DATA_DIR", "DATABASE_URL", "PORT", "TOOL_APPS", "SECRET_KEY")


def main() -> int:
    """Measure, print and write down; the exit status is 1 where a call did not end as it should."""
    asked = _arguments()
    url = Environment().text("DATABASE_URL")
    with _data_dir() as data_dir, _database(url) as own_url:
        environment = {name: value for name, value in os.environ.items() if name.removesuffix("_FILE") not in MINE}
        environment |= {"DEXSITE_DATA_DIR": str(data_dir), "PORT": str(_free_port()), "TOOL_APPS": "bench"}
        if own_url:
            environment |= {"DATABASE_URL": own_url, "SECRET_KEY": secrets.token_urlsafe(50)}
        command = [sys.executable, str(ROOT / "manage.py"), "bench", f"--seconds={asked.seconds:g}"]
        # Ctrl-C reaches both: the command stops what it started, and only then is the directory removed. (A handler, since
        # a signal that is ignored would stay so in the command.)
        signal.signal(signal.SIGINT, lambda *_: None)
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _arguments() -> Namespace:
    parser = ArgumentParser(prog="python -m bench", description="Measure the product beside its floor, in one run.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=10.0, help="of load per line (10: about three minutes)")
    length.add_argument("--quick", dest="seconds", action="store_const", const=3.0, help="3 s per line: about 50 s")
    return parser.parse_args()


@contextmanager
def _data_dir() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dexsite-bench-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _database(url: str) -> Iterator[str]:
    if not url:
        yield ""
        return
    name = sql.Identifier(DATABASE)
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(name))
        server.execute(sql.SQL("CREATE DATABASE {}").format(name))
    try:
        yield make_conninfo(url, dbname=DATABASE)
    finally:
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except psycopg.Error as problem:
        sys.exit(f"bench: {problem}")
