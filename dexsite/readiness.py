"""What has to be there before anything starts; what is missing is a `NotReadyError`: one line."""

import contextlib
import errno
import socket
from collections.abc import Iterator

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from kombu.exceptions import OperationalError

from dexsite.celery import app

OLDEST_POSTGRESQL = 15
# Any number, as long as nothing else in the database uses it as an advisory lock.
MIGRATION_LOCK = 0x0DE55173


class NotReadyError(RuntimeError):
    """Something that must be there is missing; the text says what, and what to do."""


def require_free_port(port: int) -> None:
    """Raise unless TCP `port` is free on the address that is served."""
    try:
        listening_socket(port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NotReadyError(
                f"Port {port} is taken: stop what uses it, or choose another with PORT={port + 1}."
            ) from error
        raise NotReadyError(f"Port {port} on {settings.HOST} cannot be used: {error.strerror}.") from error


def listening_socket(port: int) -> socket.socket:
    """A socket bound to `port` on the served address; raises OSError."""
    family = socket.AF_INET6 if ":" in settings.HOST else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.HOST, port))
    except OSError:
        bound.close()
        raise
    return bound


def answers(port: int) -> bool:
    """True once something accepts connections on `port`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.HOST, settings.HOST)  # noqa: S104
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def require_database() -> None:
    """Raise unless a PostgreSQL that is new enough answers."""
    where = f"{connection.settings_dict['HOST'] or 'localhost'}:{connection.settings_dict['PORT'] or 5432}"
    try:
        connection.ensure_connection()
    except DatabaseError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "run manage.py serve" if settings.EMBEDDED else "start it, or correct DATABASE_URL"
        raise NotReadyError(f"PostgreSQL does not answer at {where} ({reason}): {remedy}.") from error
    if connection.connection.info.server_version < OLDEST_POSTGRESQL * 10_000:
        raise NotReadyError(f"PostgreSQL at {where} is older than {OLDEST_POSTGRESQL}: upgrade it.")


def require_broker() -> None:
    """Raise unless the broker answers; PGMQ needs its migration."""
    with app.connection_for_write() as broker:
        try:
            broker.ensure_connection(max_retries=1, interval_start=0, timeout=1)
        except (OSError, OperationalError, *broker.recoverable_connection_errors) as error:
            if settings.BROKER_IN_DATABASE:
                remedy = "see whether the database is up and manage.py migrate has run"
            else:
                remedy = "start it, or unset CELERY_BROKER_URL to use PostgreSQL itself"
            raise NotReadyError(f"The broker does not answer at {broker.as_uri()} ({error}): {remedy}.") from error


def require_migrations() -> None:
    """Raise if a migration has not been applied."""
    executor = MigrationExecutor(connection)
    missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if missing:
        raise NotReadyError(f"{len(missing)} migrations are not applied: run manage.py migrate.")


def migrate() -> None:
    """Apply the missing migrations; of several processes one does it and the others wait."""
    with migration_lock():
        executor = MigrationExecutor(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            call_command("migrate", interactive=False, verbosity=0)


@contextlib.contextmanager
def migration_lock() -> Iterator[None]:
    """Hold the database's migration lock, on a connection without time limits."""
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = 0; SET statement_timeout = 0")
        cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
    try:
        yield
    finally:
        # The lock and the settings end with the connection.
        connection.close()
