"""Log lines: JSON, one per record, and never a value that somebody supplied."""

import json
import logging
from types import TracebackType

from dexsite.logs import JsonLines

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def record(message: str, args: object = (), exc_info: ExcInfo | None = None, **extra: object) -> logging.LogRecord:
    return logging.getLogger("t").makeRecord("t", logging.INFO, "f", 1, message, args, exc_info, extra=extra)  # type: ignore[arg-type]


def failure(text: str) -> ExcInfo:
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(text) from error
    except ValueError as error:
        return type(error), error, error.__traceback__


def test_a_record_is_one_line_with_the_known_fields() -> None:
    line = JsonLines().format(record("moved\nhere", call="c1", arguments={"card": "4111"}))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "moved\nhere"
    assert fields["call"] == "c1"
    assert "4111" not in line


def test_an_exception_is_told_by_type_and_place_but_not_by_its_text() -> None:
    line = JsonLines().format(record("failed", exc_info=failure("card 4111")))
    assert "4111" not in line
    assert [link["type"] for link in json.loads(line)["exception"]] == [
        "builtins.ValueError",
        "builtins.KeyError",
    ]
    assert "failure" in json.loads(line)["exception"][0]["at"][-1]


def test_a_failed_task_is_told_without_the_text_of_its_exception() -> None:
    words = {
        "name": "toolcalls.call_tool",
        "id": "1",
        "exc": "ValueError('card 4111')",
        "traceback": "card 4111",
    }
    line = JsonLines().format(record("Task %(name)s[%(id)s] raised: %(exc)s", (words,), failure("card 4111")))
    assert "4111" not in line
    assert json.loads(line)["message"] == "Task toolcalls.call_tool[1] raised: ValueError"
