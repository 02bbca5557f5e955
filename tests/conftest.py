"""Fixtures for every test: a real PostgreSQL, the given one or the embedded one."""

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.db import connection

from dexsite.embedded import server_of
from dexsite.environment import conninfo


@pytest.fixture(scope="session")
def postgresql() -> Iterator[None]:
    """This will hold the embedded server for the run, unless DATABASE_URL names another."""
    if not settings.EMBEDDED:
        yield
        return
    with server_of(settings.DATA_DIR):
        yield


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    postgresql: None, django_db_modify_db_settings_parallel_suffix: None
) -> None:
    """pytest-django's hook before the test database is made: by then there is a server."""


@pytest.fixture(scope="session")
def database_url(django_db_setup: None) -> str:
    """This will be the test database's connection string: DATABASE_URL for processes that a test starts."""
    return conninfo(connection.settings_dict)
