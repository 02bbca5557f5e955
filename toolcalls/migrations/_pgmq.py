"""PGMQ, the queue inside PostgreSQL, installed as plain SQL: no extension files and no superuser are needed."""

from django.apps.registry import Apps
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from pgmq import get_embedded_install_sql

QUEUES = ("call_tool", "call_single_attempt_tool")


def install_pgmq(_apps: Apps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Make the schema `pgmq`, unless the database has one (its extension, say), and our two queues in it."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT to_regnamespace('pgmq') IS NULL")
        row = cursor.fetchone()
        if row and row[0]:
            cursor.execute(get_embedded_install_sql())
        for queue in QUEUES:
            cursor.execute("SELECT pgmq.create(%s)", [queue])
            cursor.execute("SELECT pgmq.enable_notify_insert(%s, 0)", [queue])
