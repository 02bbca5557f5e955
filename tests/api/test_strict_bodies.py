"""What is malformed is refused whole, before anything is admitted (behaviour, sections 4 and 10)."""

import json
from typing import Any

import pytest

from tests.doors import Door
from tests.worlds import World, a_tool
from toolcalls.models import Call, Session


def calls_of(world: World) -> str:
    return f"sessions/{world.session.session_id}/turns/t/calls"


GOOD = {"tool_call_id": "c1", "tool": "get_order", "arguments": {}}
LONG = "x" * 201

BAD_IDS: list[Any] = [
    "",
    " ",
    "a b",
    " a",
    "a ",
    "a/b",
    "é",
    "a\n",
    "a\u0000",
    LONG,
    "x" * 5000,
    7,
    1.5,
    True,
    None,
    [],
    {},
    "a\u200b",
    "a\x7f",
]


@pytest.mark.parametrize("bad", BAD_IDS, ids=lambda value: repr(value)[:20])
def test_an_odd_id_is_refused_and_never_trimmed_or_converted(world: World, agent: Door, bad: object) -> None:
    """F-63."""
    for name in ("tool_call_id", "operation_id"):
        if (name, bad) == ("operation_id", None):
            continue
        refused = agent.post(calls_of(world), {"calls": [{**GOOD, name: bad}]})
        assert (refused.status, refused.code) == (400, "MALFORMED"), name
    if bad is not None:
        refused = agent.post("sessions", {"session_id": bad})
        assert (refused.status, refused.code) == (400, "MALFORMED")
    assert not Call.objects.exists()
    assert Session.objects.count() == 1


@pytest.mark.parametrize("good", ["call_x|fc_y", "functions.search:0", "x" * 200, "!", "~", '"', "%", "<b>", "a.b-c_d"])
def test_ids_that_providers_send_are_taken_as_they_are(world: World, agent: Door, good: str) -> None:
    with a_tool(effect="read") as tool:
        answer = agent.post(calls_of(world), {"calls": [{"tool_call_id": good, "tool": tool.name}]})
    assert answer.body["calls"][0]["tool_call_id"] == good
    assert Call.objects.get().tool_call_id == good


@pytest.mark.parametrize("part", ["%00", "a%20b", "%C3%A9", LONG, "a%0A", "%EF%BF%BF"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_odd_id_in_the_address_is_no_error_of_ours(world: World, agent: Door, part: str, method: str) -> None:
    """F-63, F-75."""
    session = world.session.session_id
    paths = {
        "GET": [
            f"sessions/{part}",
            f"sessions/{session}/turns/{part}/calls/c",
            f"sessions/{session}/turns/t/calls/{part}",
        ],
        "POST": [
            f"sessions/{part}/turns/t/calls",
            f"sessions/{session}/turns/{part}/calls",
            f"sessions/{part}/close",
            f"sessions/{part}/cancel",
            f"sessions/{session}/turns/{part}/cancel",
            f"sessions/{session}/turns/{part}/acknowledge",
        ],
    }[method]
    for path in paths:
        body = (
            {"calls": [GOOD]}
            if path.endswith("calls")
            else {"tool_call_ids": ["c"]}
            if path.endswith("acknowledge")
            else None
        )
        answer = agent(method, path, body)
        assert answer.status in (400, 404), path
        assert answer.code in ("MALFORMED", "NOT_FOUND")
    assert not Call.objects.exists()


UNKNOWN_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("sessions", {"session": "s"}),
    ("sessions", {"effect": "read"}),
    ("sessions", {"budgets": {"call": 1}}),
    ("sessions", {"agent": "another"}),
    ("calls", {"calls": [GOOD], "status": "approved"}),
    ("calls", {"calls": [{**GOOD, "status": "approved"}]}),  # F-34
    ("calls", {"calls": [{**GOOD, "approval": {"approved": True}}]}),
    ("calls", {"calls": [{**GOOD, "effect": "read"}]}),  # F-21
    ("calls", {"calls": [{**GOOD, "requires_approval": False}]}),
    ("calls", {"calls": [{**GOOD, "confirmed": True}]}),
    ("calls", {"calls": [{**GOOD, "annotations": {"readOnlyHint": True}}]}),
]


@pytest.mark.parametrize(("where", "body"), UNKNOWN_FIELDS, ids=repr)
def test_a_field_that_we_do_not_know_is_refused(world: World, agent: Door, where: str, body: dict[str, Any]) -> None:
    refused = agent.post(calls_of(world) if where == "calls" else where, body)
    assert (refused.status, refused.code) == (400, "MALFORMED")
    assert refused.body["errors"]
    assert not Call.objects.exists()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"calls": []},
        {"calls": None},
        {"calls": {}},
        {"calls": "x"},
        {"calls": [None]},
        {"calls": [[]]},
        {"calls": [{"tool_call_id": "c1"}]},
        {"calls": [{"tool": "t"}]},
        {"calls": [{**GOOD, "tool": ""}]},
        {"calls": [{**GOOD, "tool": 5}]},
        {"calls": [{**GOOD, "tool": "x" * 201}]},
        {"calls": [{**GOOD, "tool_call_id": f"c{n}"} for n in range(101)]},
        {"calls": [GOOD, {**GOOD, "tool_call_id": " "}]},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_malformed_request_is_refused_whole(world: World, agent: Door, body: dict[str, Any]) -> None:
    refused = agent.post(calls_of(world), body)
    assert (refused.status, refused.code) == (400, "MALFORMED")
    assert not Call.objects.exists()


def test_a_hundred_calls_are_taken_at_once(world: World, agent: Door) -> None:
    with a_tool(effect="read") as tool:
        asked = [{"tool_call_id": f"c{n}", "tool": tool.name, "arguments": {"amount": n}} for n in range(100)]
        answer = agent.post(calls_of(world), {"calls": asked})
    assert [each["status"] for each in answer.body["calls"]] == ["approved"] * 100


@pytest.mark.parametrize(
    "budgets",
    [
        {"calls": -1},
        {"calls": "5"},
        {"calls": True},
        {"calls": 1.5},
        {"seconds": 0},
        {"seconds": 10**18},
        {"spend": 10**18},
        {"turns": []},
        [],
    ],
    ids=repr,
)
def test_budgets_are_whole_numbers_within_bounds(agent: Door, budgets: object) -> None:
    """F-42 in kind."""
    refused = agent.post("sessions", {"budgets": budgets})
    assert (refused.status, refused.code) == (400, "MALFORMED")


@pytest.mark.parametrize(
    "bad",
    [
        {"default_effect": ""},
        {"default_effect": "readonly"},
        {"allowed_tools": "get_order"},
        {"allowed_tools": [""]},
        {"allowed_tools": [1]},
        {"on_behalf_of": 5},
        {"on_behalf_of": "x" * 201},
        {"metadata": []},
        {"metadata": None},
    ],
    ids=repr,
)
def test_a_session_of_another_shape_is_refused(agent: Door, bad: dict[str, Any]) -> None:
    refused = agent.post("sessions", bad)
    assert (refused.status, refused.code) == (400, "MALFORMED")


FAULTY = {
    "a null character in a value": '"\\u0000"',  # F-66
    "a null character in a key": '{"\\u0000":1}',
    "a lone surrogate": '"\\ud83d"',
    "not a number": "NaN",  # F-68
    "infinity": "-Infinity",
    "a number without end": "1e400",
    "33 levels": "[" * 33 + "]" * 33,  # F-69
    "101 levels": '{"a":' * 101 + "1" + "}" * 101,
    "20000 levels": "[" * 20_000 + "]" * 20_000,
    "a key twice": '{"a":1,"a":2}',  # F-70
    "a key twice, spelled otherwise": '{"a":1,"\\u0061":2}',
    "a key twice at depth": '[{"b":{"a":1,"a":2}}]',
    "1001 digits": "1" * 1001,
}


@pytest.mark.parametrize("value", FAULTY.values(), ids=FAULTY)
def test_a_fault_in_arguments_is_a_recorded_call_in_either_form(world: World, agent: Door, value: str) -> None:
    with a_tool() as tool:
        inside = '{"name":%s}' % value  # noqa: UP031
        forms = [inside, json.dumps(inside)]
        calls = ",".join(
            '{"tool_call_id":"c%d","tool":"%s","arguments":%s}' % (n, tool.name, form)  # noqa: UP031
            for n, form in enumerate(forms)
        )
        answer = agent.post(calls_of(world), raw=f'{{"calls":[{calls}]}}'.encode())
        assert answer.status == 200, answer.body
        assert [each["code"] for each in answer.body["calls"]] == ["INVALID_JSON"] * 2
        again = agent.post(calls_of(world), raw=f'{{"calls":[{calls}]}}'.encode())
    assert [each["replayed"] for each in again.body["calls"]] == [True, True]
    assert all(each["message"] for each in again.body["calls"])


@pytest.mark.parametrize("value", FAULTY.values(), ids=FAULTY)
def test_the_same_fault_elsewhere_refuses_the_request(world: World, agent: Door, value: str) -> None:
    for raw in (
        '{"calls":[{"tool_call_id":"c","tool":"t","arguments":{}}],"x":%s}',
        '{"calls":[{"tool_call_id":"c","tool":%s,"arguments":{}}]}',
    ):
        refused = agent.post(calls_of(world), raw=(raw % value).encode())
        assert (refused.status, refused.code) == (400, "MALFORMED")
    refused = agent.post("sessions", raw=('{"metadata":{"x":%s}}' % value).encode())  # noqa: UP031
    assert (refused.status, refused.code) == (400, "MALFORMED")
    assert not Call.objects.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{} {}",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"```json\n{}\n```",
        b'{"tool":1,"tool":2}',
    ],
)
def test_a_body_that_is_not_one_json_object_is_refused(world: World, agent: Door, raw: bytes) -> None:
    for path in (calls_of(world), "sessions"):
        refused = agent.post(path, raw=raw)
        assert (refused.status, refused.code) == (400, "MALFORMED")


def test_numbers_of_metadata_that_no_float_holds_are_kept(agent: Door) -> None:
    exact = '{"session_id":"s","metadata":{"share":0.1234567890123456789012345,"many":123456789012345678901234567890}}'
    answer = agent.post("sessions", raw=exact.encode())
    assert answer.status == 201
    assert answer.body["metadata"]["many"] == 123456789012345678901234567890
    assert "0.1234567890123456789012345" in Session.objects.get(session_id="s").metadata
    assert agent.post("sessions", raw=exact.encode()).status == 200
    assert agent.post("sessions", raw=exact.replace("2345,", "2346,").encode()).status == 409


@pytest.mark.parametrize("size", [1024 * 1024 + 1, 3_000_000])
def test_a_body_over_one_mebibyte_is_a_413_as_json(world: World, agent: Door, size: int) -> None:
    """F-74."""
    raw = json.dumps({"session_id": "s", "metadata": {"x": "y" * size}}).encode()
    refused = agent.post("sessions", raw=raw)
    assert (refused.status, refused.code) == (413, "TOO_LARGE")
    assert not Session.objects.filter(session_id="s").exists()


@pytest.mark.parametrize(("kib", "code"), [(250, ""), (300, "INVALID_JSON")])
def test_arguments_of_more_than_256_kib_are_recorded_as_such(world: World, agent: Door, kib: int, code: str) -> None:
    """F-74."""
    with a_tool() as tool:
        body = {"calls": [{"tool_call_id": "c", "tool": tool.name, "arguments": {"name": "x" * (kib * 1024)}}]}
        (call,) = agent.post(calls_of(world), body).body["calls"]
    assert call["code"] == code


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/html"]
)
def test_only_json_is_taken(world: World, agent: Door, kind: str) -> None:
    """F-83."""
    refused = agent.post(calls_of(world), raw=json.dumps({"calls": [GOOD]}).encode(), content_type=kind)
    assert (refused.status, refused.code) == (415, "UNSUPPORTED_MEDIA_TYPE")
    assert not Call.objects.exists()


@pytest.mark.parametrize("path", ["close", "cancel"])
def test_a_route_without_a_body_takes_none(world: World, agent: Door, path: str) -> None:
    address = f"sessions/{world.session.session_id}/{path}"
    assert agent.post(address, {"force": True}).status == 400
    assert Session.objects.get(pk=world.session.pk).status == "open"
    assert agent.post(address, {}).status == 200
