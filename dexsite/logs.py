"""Logs as JSON lines: who did what, when, to which row, and never with which arguments."""

import json
import logging
import os
import traceback
from datetime import UTC, datetime
from typing import Any

# What may stand beside a message (`extra={...}`): names and numbers, never what a tool or a person supplied.
FIELDS = frozenset(
    "agent attempt call call_id code command count duration_ms effect error event kind method move port "
    "queue request_id session session_id sqlstate state status status_code task team tool trace_id turn_id "
    "user_id worker".split()
)

ROLE = os.environ.get("DEXSITE_ROLE", "other")


class JsonLines(logging.Formatter):
    """One line of JSON per record.

    An exception is given as its type and where it came from. Its text is left out: PostgreSQL, pydantic and
    HTTP clients quote the values they stumbled over.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": ROLE,
            "process": record.process,
            "message": _message(record),
        }
        line.update((name, value) for name, value in vars(record).items() if name in FIELDS)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _chain(record.exc_info[1])
        return json.dumps(line, default=str, ensure_ascii=False)


def _message(record: logging.LogRecord) -> str:
    # Celery words a failed task with the text of its exception.
    if isinstance(record.args, dict) and record.exc_info and record.exc_info[0] is not None and "exc" in record.args:
        return str(record.msg) % (record.args | {"exc": record.exc_info[0].__name__, "traceback": ""})
    return record.getMessage()


def _chain(error: BaseException) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = traceback.extract_tb(current.__traceback__)
        links.append(
            {
                "type": f"{type(current).__module__}.{type(current).__qualname__}",
                "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]],
            }
        )
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return links
