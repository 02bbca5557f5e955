"""Fixtures for every test: a real PostgreSQL, the given one or the embedded one."""

from collections.abc import Iterator
from typing import Any

import kombu.pools
import psycopg
import pytest
from celery import current_app
from django.conf import settings
from django.db import connection
from django.test.utils import setup_databases, teardown_databases
from psycopg import sql

from dexsite.embedded import ROLE, server_of
from dexsite.environment import conninfo
from tests import worlds
from toolcalls import notices


@pytest.fixture(scope="session")
def postgresql() -> Iterator[None]:
    """Hold the embedded server for the run, unless DATABASE_URL names another."""
    if not settings.EMBEDDED:
        yield
        return
    with server_of(settings.DATA_DIR) as server:
        # Tests empty tables that nobody may empty, and damage rows to see it noticed: both need the triggers off.
        with psycopg.connect(server.url, user="postgres", dbname="postgres", autocommit=True) as superuser:
            superuser.execute(
                sql.SQL("GRANT SET ON PARAMETER session_replication_role TO {}").format(sql.Identifier(ROLE))
            )
        yield


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: Any, postgresql: None) -> Iterator[None]:
    """Make the test database for whoever asks; pytest-django's own makes none for fixtures that it does not know."""
    with django_db_blocker.unblock():
        made = setup_databases(verbosity=0, interactive=False, aliases={"default"})
    yield
    kombu.pools.reset()  # the broker's connections are to the test database
    with django_db_blocker.unblock():
        with connection.cursor() as cursor:
            # A process that a test killed may not have left the database yet.
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        teardown_databases(made, verbosity=0)


@pytest.fixture(scope="session")
def database_url(django_db_setup: None) -> str:
    """The test database's connection string: DATABASE_URL for processes that a test starts."""
    return conninfo(connection.settings_dict)


@pytest.fixture
def database(database_url: str, django_db_blocker: Any) -> Iterator[None]:
    """Give committed access to the database, as threads and processes need; afterwards the tables are emptied."""
    # Bells go to the test database too; the settings name the one it was made beside.
    current_app.conf.broker_transport_options["conn_string"] = database_url
    with django_db_blocker.unblock():
        yield
        notices.stop()
        worlds.sweep_away()
        connection.close_if_unusable_or_obsolete()


@pytest.fixture(autouse=True)
def quick_passwords(settings: Any) -> None:
    """Hash passwords the quick way: each world has two people."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def world(database: None) -> Iterator[worlds.World]:
    """Give a team with an agent, two people and an open session."""
    made = worlds.a_world()
    yield made
    made.close()
