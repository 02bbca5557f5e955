"""Nothing of a team is visible, decidable or guessable outside it: every address, asked by a stranger (F-88)."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.urls import URLPattern, URLResolver, get_resolver

from tests.doors import Door, with_token
from tests.worlds import Script, World, a_tool, a_world
from toolcalls import directory
from toolcalls.models import Call
from toolcalls.tools import InDoubt

NOBODY = "01890000-0000-7000-8000-000000000000"


def routes(resolver: URLResolver | None = None, before: str = "") -> Iterator[str]:
    """Give every address of the API as it stands in the URL configuration."""
    for each in (resolver or get_resolver()).url_patterns:
        path = before + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from routes(each, path)
        elif isinstance(each, URLPattern) and path.startswith("api/v1/"):
            yield path.removeprefix("api/v1/")


OBJECTS = sorted({path for path in routes() if "<" in path})
LISTS = sorted({path for path in routes() if "<" not in path})

BODIES: dict[str, Any] = {
    "calls": {"calls": [{"tool_call_id": "new", "tool": "get_order"}]},
    "acknowledge": {"tool_call_ids": ["c1"]},
    "approve": {"arguments_hash": "HASH"},
    "reject": {"arguments_hash": "HASH"},
    "amend": {"arguments_hash": "HASH", "arguments": {"amount": 5}},
    "settle": {"verdict": "took_effect", "evidence": "e"},
    "run-again": {"evidence": "e"},
}


def filled(path: str, call: Call, session: str) -> str:
    """Put real names of the other team into an address."""
    named = {"session_id": session, "turn_id": "turn-1", "tool_call_id": call.tool_call_id, "call_id": str(call.pk)}
    return re.sub(r"<(?:\w+:)?(\w+)>", lambda found: named[found[1]], path)


def state(world: World) -> Any:
    calls = (
        Call.objects.filter(team=world.team)
        .order_by("pk")
        .values_list("pk", "status", "moves", "cancel_asked_at", "reported_at")
    )
    world.session.refresh_from_db()
    return list(calls), world.session.status


@pytest.mark.parametrize(
    "who", ["agent of another team", "another agent of the team", "operator of another team", "no member at all"]
)
def test_no_address_tells_a_stranger_anything_or_does_anything(world: World, who: str) -> None:
    other = a_world()
    if who == "another agent of the team":
        stranger = Door(directory.create_agent("second", team=world.team, tools=["*"], by="test")[1])
    elif who == "agent of another team":
        stranger = Door(other.key)
    else:
        if who == "no member at all":
            other.ana.memberships.all().delete()
        stranger = with_token(other.ana)
    with a_tool(amend=True) as waits, a_tool(Script(InDoubt("cut")), requires_approval=False) as doubts:
        calls = [world.propose(waits, {"amount": 1}), world.propose(doubts)]
        world.run()
        before = state(world)
        tried = 0
        for path in OBJECTS:
            for call in calls:
                address = filled(path, call, world.session.session_id)
                unknown = filled(path, Call(pk=NOBODY, tool_call_id="nothing"), "nobody")
                for method in ("GET", "POST"):
                    word = path.rsplit("/", 1)[-1]
                    body = BODIES.get(word) if method == "POST" else None
                    if body and "arguments_hash" in body:
                        body = {**body, "arguments_hash": call.arguments_hash}
                    answer = stranger(method, address, body)
                    assert answer.status in (403, 404, 405), (method, address, answer)
                    assert answer.body == stranger(method, unknown, body).body, "as if it did not exist"
                    assert call.arguments_hash not in str(answer.body)
                    tried += answer.status == 404
        assert tried > 10
        assert state(world) == before


@pytest.mark.parametrize("who", ["agent", "operator"])
def test_no_list_holds_anything_of_another_team(world: World, who: str) -> None:
    other = a_world()
    with a_tool() as waits, a_tool(Script(InDoubt("cut")), requires_approval=False) as doubts:
        for tool in (waits, doubts):
            world.propose(tool)
        world.run()
        stranger = Door(other.key) if who == "agent" else with_token(other.ana)
        own = Door(world.key) if who == "agent" else with_token(world.ana)
        seen = 0
        for path in LISTS:
            answer = stranger.get(path)
            assert answer.status in (200, 403, 405), path
            if answer.status == 200 and "calls" in answer.body:
                assert (answer.body["calls"], answer.body["next"]) == ([], None), path
                seen += len(own.get(path).body["calls"])
        assert seen, "its own people see them"


def test_a_decision_on_a_list_finds_nothing_of_another_team(world: World) -> None:
    stranger = with_token(a_world().ana)
    with a_tool() as tool:
        call = world.propose(tool)
        items = [
            {"id": each, "arguments_hash": call.arguments_hash, "decision": "approve"}
            for each in (str(call.pk), NOBODY)
        ]
        answer = stranger.post("approvals/decide", {"decisions": items})
    told = [{**each, "id": ""} for each in answer.body["decisions"]]
    assert told[0] == told[1]
    assert told[0]["code"] == "NOT_FOUND"
    assert world.now(call).status == "awaiting_approval"


def test_every_address_with_a_name_in_it_is_walked() -> None:
    assert len(OBJECTS) >= 14
    assert {"calls/<uuid:call_id>", "approvals/<uuid:call_id>/approve"} <= set(OBJECTS)


def test_ids_are_not_to_be_guessed(world: World) -> None:
    with a_tool(effect="read") as tool:
        one, two = world.propose(tool), world.propose(tool)
    assert one.pk.version == two.pk.version == 7
    assert one.pk.int + 1 != two.pk.int
    assert one.pk.bytes[8:] != two.pk.bytes[8:]
