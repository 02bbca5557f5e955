"""Django's PostgreSQL backend, with a health check that costs no round trip, and with prepared statements allowed.

Connections outlive their requests, so each is looked at before it is used again. Django asks the server ``SELECT 1``, three times a
call; but a server that ended a connection has said so, and an idle connection with anything to read is of no use.
"""

import select
from typing import Any

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Look at a connection's socket instead of asking through it."""

    connection: Any

    def get_connection_params(self) -> dict[str, Any]:
        # Django's None forbids prepared statements; its own cursors, which bind in the client, prepare nothing either way.
        return {**super().get_connection_params(), "prepare_threshold": 5}

    def is_usable(self) -> bool:
        if self.connection is None or self.connection.closed:
            return False
        socket = select.poll()
        socket.register(self.connection.fileno(), select.POLLIN)
        return not socket.poll(0)
