"""Fixed statements of the hot path, run as prepared ones on Django's own connection.

Django binds parameters in the client, so the server parses and plans each statement anew; for the claim that planning took six
times as long as the work. The connection, its transaction and its adapters are Django's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from django.db import connection

Parameters = Sequence[Any] | Mapping[str, Any]


def run(statement: str, parameters: Parameters) -> list[tuple[Any, ...]]:
    """Run a statement and give its rows, none for a statement that returns none. Raises Django's database errors."""
    connection.ensure_connection()
    with connection.wrap_database_errors:
        cursor = psycopg.Cursor(connection.connection)
        cursor.execute(statement, parameters, prepare=True)
        return cursor.fetchall() if cursor.description else []


def change(statement: str, parameters: Parameters) -> int:
    """Run a statement and give how many rows it changed. Raises Django's database errors."""
    connection.ensure_connection()
    with connection.wrap_database_errors:
        cursor = psycopg.Cursor(connection.connection)
        cursor.execute(statement, parameters, prepare=True)
        return cursor.rowcount
