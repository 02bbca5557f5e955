"""The brokers as the deployment uses them: PGMQ in the test database, and servers that do not answer."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from django.db import connection, transaction
from kombu import Connection, Consumer, Producer, Queue

from dexsite.celery import KeepsConnections, app
from dexsite.environment import broker

pytestmark = pytest.mark.usefixtures("database")
NAME = "call_tool"
QUEUE = next(queue for queue in settings.CELERY_TASK_QUEUES if queue.name == NAME)


@pytest.fixture
def pgmq() -> Iterator[Connection]:
    made = broker("pgmq://", database=connection.settings_dict)
    with Connection(made["broker_url"], transport_options=made["broker_transport_options"]) as opened:
        yield opened
    ask("SELECT pgmq.purge_queue(%s)", NAME)


def ask(question: str, *values: object) -> object:
    with connection.cursor() as cursor:
        cursor.execute(question, values)
        row = cursor.fetchone()
    return row[0] if row else None


def trigger() -> object:
    return ask("SELECT oid FROM pg_trigger WHERE tgrelid = 'pgmq.q_call_tool'::regclass AND NOT tgisinternal")


def listening(pgmq: Connection, heard: list[float]) -> Consumer:
    def hear(body: object, message: object) -> None:
        heard.append(time.monotonic())
        message.ack()  # type: ignore[attr-defined]

    return Consumer(pgmq.default_channel, [Queue(QUEUE.name, QUEUE.exchange, QUEUE.routing_key)], callbacks=[hear])


def drain(pgmq: Connection, until: Callable[[], bool], within: float = 5.0) -> None:
    deadline = time.monotonic() + within
    while not until() and time.monotonic() < deadline:
        try:
            pgmq.drain_events(timeout=0.2)
        except TimeoutError:
            continue


def bell() -> str:
    """A bell as SQL rings it: Celery's message, protocol 2, as kombu stores it."""
    ident = str(uuid.uuid4())
    return json.dumps(
        {
            "body": base64.b64encode(b"[[], {}, {}]").decode(),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {
                "lang": "py",
                "task": "toolcalls.call_tool",
                "id": ident,
                "root_id": ident,
                "retries": 0,
            },
            "properties": {
                "correlation_id": ident,
                "delivery_tag": ident,
                "body_encoding": "base64",
                "delivery_info": {"exchange": NAME, "routing_key": NAME},
            },
        }
    )


def test_a_bell_rung_by_sql_is_heard_after_the_commit_and_not_before(pgmq: Connection) -> None:
    heard: list[float] = []
    with listening(pgmq, heard):
        drain(pgmq, lambda: True)
        with transaction.atomic():
            ask("SELECT pgmq.send(%s, %s::jsonb)", NAME, bell())
            drain(pgmq, lambda: bool(heard), within=0.5)
            assert heard == []
        rung = time.monotonic()
        drain(pgmq, lambda: bool(heard))
    assert len(heard) == 1
    # NOTIFY brings it; the poll behind it would take up to a second.
    assert heard[0] - rung < 0.4
    assert ask("SELECT count(*) FROM pgmq.q_call_tool") == 0


def test_a_bell_rung_by_celery_is_heard_once(pgmq: Connection) -> None:
    heard: list[float] = []
    with listening(pgmq, heard):
        Producer(pgmq.default_channel).publish(
            [[], {}, {}],
            exchange=QUEUE.exchange,
            routing_key=QUEUE.routing_key,
            declare=[QUEUE],
            serializer="json",
        )
        drain(pgmq, lambda: bool(heard))
        drain(pgmq, lambda: len(heard) > 1, within=0.3)
    assert len(heard) == 1


def test_declaring_a_queue_again_leaves_its_notify_trigger_alone(pgmq: Connection) -> None:
    before = trigger()
    assert before is not None
    channel = pgmq.default_channel
    QUEUE(channel).declare()
    with listening(pgmq, []):
        pass
    assert trigger() == before


def test_a_notify_lost_with_a_crash_is_set_up_again(pgmq: Connection) -> None:
    # The table is unlogged: a crash of PostgreSQL empties it, and the trigger then stays silent.
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE pgmq.notify_insert_throttle")
    with listening(pgmq, []):
        pass
    assert ask("SELECT count(*) FROM pgmq.notify_insert_throttle WHERE queue_name = %s", NAME) == 1


def test_the_brokers_connections_keep_the_time_limits(pgmq: Connection) -> None:
    pgmq.connect()
    with pgmq.transport._pool.connection() as raw:
        assert raw.execute("SHOW statement_timeout").fetchone()[0] == "30s"


def test_a_connection_outlives_a_task() -> None:
    connection.ensure_connection()
    raw = connection.connection
    KeepsConnections(app).close_database()
    assert connection.connection is raw
    assert ask("SELECT 1") == 1


def test_a_broken_connection_does_not_outlive_a_task() -> None:
    connection.ensure_connection()
    connection.connection.close()
    KeepsConnections(app).close_database()
    assert ask("SELECT 1") == 1


# -- brokers that are away

RING = """
import sys, time, django
django.setup()
from kombu.exceptions import OperationalError
from dexsite.celery import app
app.finalize()
for _ in range(2):
    begun = time.monotonic()
    try:
        app.send_task("toolcalls.call_tool")
    except OperationalError:
        print(time.monotonic() - begun)
"""


@pytest.mark.parametrize("scheme", ["redis", "amqp", "pgmq"])
@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_ringing_gives_up_within_a_second_when_the_broker_is_away(scheme: str, kind: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "silent":
            server.listen(16)
        url = f"{scheme}://me:secret@127.0.0.1:{server.getsockname()[1]}/0"
        answer = subprocess.run(
            [sys.executable, "-c", RING],
            env=os.environ | {"CELERY_BROKER_URL": url, "DJANGO_SETTINGS_MODULE": "dexsite.settings"},
            cwd=settings.BASE_DIR, capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    took = [float(line) for line in answer.stdout.split()]
    assert len(took) == 2
    assert max(took) < 1.2
    assert took[1] < 1.0
    assert "secret" not in answer.stderr
