"""Celery's PGMQ transport on connections of ours, to queues that a migration made.

kombu 5.7's own keeps five words of a connection string (TLS settings and timeouts are dropped), and each
connection that declares a queue drops and creates its NOTIFY trigger, which locks the queue for all who ring.
"""

from typing import Any, cast

from kombu.connection import Connection
from kombu.transport import pgmq as kombu_pgmq
from pgmq import PGMQueue
from psycopg_pool import ConnectionPool


class Channel(kombu_pgmq.Channel):
    """Use the queues as the migration made them, and make only what is missing."""

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        if not self._has_queue(queue):
            super()._new_queue(queue, **kwargs)

    def _maybe_enable_notify(self, queue: str, queue_name: str | None = None) -> None:
        queue_name = queue_name or self._queue_name(queue)
        if queue_name not in {throttle.queue_name for throttle in self.pgmq.list_notify_throttles()}:
            super()._maybe_enable_notify(queue, queue_name)

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        self.connection._register_notify_queue(self._queue_name(queue))
        return super().basic_consume(queue, *args, **kwargs)


class Transport(kombu_pgmq.Transport):
    """PGMQ over a pool that is opened with the whole connection string of `conn_string`."""

    Channel = Channel
    _pool: ConnectionPool[Any] | None = None

    def _create_pgmq_client(self) -> PGMQueue:
        options = self._options()
        self._pool = ConnectionPool(
            options["conn_string"],
            min_size=1,
            max_size=options["pool_size"],
            timeout=options["pool_timeout"],
            # The server may have been restarted between two bells.
            check=ConnectionPool.check_connection,
            open=True,
        )
        return PGMQueue(conn_string=options["conn_string"], pool=self._pool, init_extension=False)

    def _options(self) -> dict[str, Any]:
        client = cast("Connection", self.client)
        return dict(client.transport_options or {})

    def _get_notify_waiter(self) -> kombu_pgmq._NotifyWaiter:
        if self._notify_waiter is None:
            self._notify_waiter = kombu_pgmq._NotifyWaiter(self._options()["conn_string"])
        return self._notify_waiter

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        if self._pool is not None:
            self._pool.close()
            self._pool = None
