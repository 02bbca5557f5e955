"""Errors are problem details with stable codes, whatever was sent (interfaces, REST; F-75)."""

from base64 import urlsafe_b64encode
from typing import Any

import pytest

from tests.doors import Door
from tests.worlds import World, a_tool
from toolcalls import intake

HUGE = "99999999999999999999"


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=201",
        "limit=-1",
        "limit=x",
        "limit=",
        "limit=1.0",
        f"limit={HUGE}",
        "limit=%00",
        "limit=%D9%A1",
        "since=2026-01-01T00:00:00",  # F-42
        "until=2026-01-01",
        "since=x",
        "since=2026-13-45T00:00:00Z",
        "since=0001-01-01T00:00:00%2B23:59",
        "until=9999-12-31T23:59:59-23:59",
        "since=%00",
        "status=done",
        "status=%00",
        "tool=%00",
        "q=%00",
        "key=%00",
        "session=%00",
        "hash=%00",
        "code=%00",
        "agent=%00",
        f"tool={'x' * 65}",
        f"q={'x' * 201}",
        "cursor=x",
        "cursor=%00",
        "cursor=%C3%A9",
        "cursor=W10",
        "cursor=WzFd",
        "cursor=WyJ4Il0",
    ],
)
def test_a_query_that_cannot_be_read_is_malformed(world: World, agent: Door, query: str) -> None:
    refused = agent.get(f"calls?{query}")
    assert (refused.status, refused.code) == (400, "MALFORMED")


def cursor(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize("path", ["calls", "approvals", "unknown-outcomes"])
@pytest.mark.parametrize(
    "key",
    [
        '["","x"]',
        '["2026-99-99T00:00:00+00:00","01890000-0000-7000-8000-000000000000"]',
        '["2026-01-01T00:00:00","01890000-0000-7000-8000-000000000000"]',
        '["2026-01-01","01890000-0000-7000-8000-000000000000"]',
        '["\\u0000","\\u0000"]',
        '["\\ud800"]',
        "[[1]]",
        "{}",
        "[" * 20_000,
        "1" * 5000,
    ],
    ids=lambda key: key[:30],
)
def test_a_cursor_that_was_not_made_here_is_malformed(world: World, ana: Door, path: str, key: str) -> None:
    refused = ana.get(f"{path}?cursor={cursor(key)}")
    assert (refused.status, refused.code) == (400, "MALFORMED")


@pytest.mark.parametrize("since", ["0001-01-01T00:00:00%2B14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_at_the_ends_of_the_calendar_is_no_error_of_ours(world: World, agent: Door, since: str) -> None:
    assert agent.get(f"calls?since={since}").status in (200, 400)


@pytest.mark.parametrize(
    "path", ["calls/not-a-uuid", "calls/1", "approvals/7/approve", "nowhere", "sessions/nobody", "calls/" + HUGE]
)
def test_what_is_not_there_is_a_404_of_one_body(world: World, agent: Door, path: str) -> None:
    refused = agent.get(path)
    assert (refused.status, refused.code) == (404, "NOT_FOUND")
    assert refused.body == agent.get("calls/01890000-0000-7000-8000-000000000000").body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "calls"),
        ("PUT", "sessions"),
        ("PATCH", "calls/01890000-0000-7000-8000-000000000000"),
    ],
)
def test_a_method_that_a_route_does_not_have_is_a_405(agent: Door, method: str, path: str) -> None:
    """F-24: there is nothing with which a stored call could be edited."""
    refused = agent(method, path)
    assert (refused.status, refused.code) == (405, "METHOD_NOT_ALLOWED")


def test_an_error_that_nobody_expected_is_json_and_tells_nothing(
    world: World, agent: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the secret is 42")

    monkeypatch.setattr(intake, "submit", broken)
    with a_tool(effect="read") as tool:
        refused = agent.post(
            f"sessions/{world.session.session_id}/turns/t/calls", {"calls": [{"tool_call_id": "c", "tool": tool.name}]}
        )
    assert (refused.status, refused.code) == (500, "INTERNAL_ERROR")
    assert "42" not in str(refused.body)


@pytest.mark.parametrize("path", ["calls?wait=1&wait=x", "tools?format=%00", "calls?cursor="])
def test_odd_queries_never_end_in_an_error_of_ours(agent: Door, path: str) -> None:
    assert agent.get(path).status in (200, 400)
