"""The agents' routes (interfaces, REST; behaviour, section 10)."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from tests.doors import Door
from tests.worlds import Held, Script, World, a_tool, a_world, let_pass
from toolcalls import directory
from toolcalls.api.bodies import CallAnswer, SessionAnswer
from toolcalls.models import AgentKey, Call, Session
from toolcalls.tools import InDoubt, ToolRejected


def calls_of(world: World, turn: str = "turn-1") -> str:
    return f"sessions/{world.session.session_id}/turns/{turn}/calls"


def one(tool: Any, arguments: object = None, *, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    named = {"tool_call_id": call_id, "tool": tool if isinstance(tool, str) else tool.name}
    return {"calls": [{**named, **({} if arguments is None else {"arguments": arguments}), **more}]}


# -- sessions


def test_a_session_is_opened_once_by_its_name(agent: Door) -> None:
    """S-G07."""
    body = {"session_id": "s-1", "metadata": {"a": [1, 0.5]}, "budgets": {"calls": 3}, "on_behalf_of": "joe"}
    first, again = agent.post("sessions", body), agent.post("sessions", body)
    assert (first.status, again.status) == (201, 200)
    assert first.body["id"] == again.body["id"]
    assert set(first.body) == set(SessionAnswer.model_fields)
    assert first.body["metadata"] == {"a": [1, 0.5]}
    assert first.body["budgets"]["calls"] == {"limit": 3, "used": 0}
    other = agent.post("sessions", {**body, "budgets": {"calls": 4}})
    assert (other.status, other.code) == (409, "SESSION_MISMATCH")
    assert Session.objects.filter(session_id="s-1").count() == 1


def test_a_session_without_a_name_gets_one_and_is_always_new(agent: Door) -> None:
    one_, other = agent.post("sessions", {}), agent.post("sessions")
    assert (one_.status, other.status) == (201, 201)
    assert one_.body["session_id"] != other.body["session_id"]


@pytest.mark.parametrize(
    "wider",
    [
        {"default_effect": "read"},
        {"default_effect": "idempotent_write"},
        {"allowed_tools": ["refund_order"]},
        {"allowed_tools": ["*"]},
        {"allowed_tools": ["get_order", "get*"]},
        {"budgets": {"calls": 11}},
        {"budgets": {"spend": 11}},
    ],
    ids=repr,
)
def test_a_session_that_would_widen_what_the_agent_may_do_is_refused(
    world: World, agent: Door, wider: dict[str, Any]
) -> None:
    """Section 3: anything wider is a 403."""
    world.agent.tools, world.agent.default_effect = ["get_*"], "non_idempotent_write"
    world.agent.budgets = {"calls": 10, "spend": 10}
    world.agent.save()
    refused = agent.post("sessions", {"session_id": "s-1", **wider})
    assert (refused.status, refused.code) == (403, "WIDER_THAN_ALLOWED")
    assert not Session.objects.filter(session_id="s-1").exists()


@pytest.mark.parametrize(
    "narrower",
    [
        {"default_effect": "non_idempotent_write"},
        {"default_effect": "unclassified"},
        {"allowed_tools": []},
        {"allowed_tools": ["get_order"]},
        {"allowed_tools": ["get_*"]},
        {"allowed_tools": ["get_o*", "get_?rder"]},
        {"budgets": {"calls": 10, "turns": 5}},
    ],
    ids=repr,
)
def test_a_session_may_tighten(world: World, agent: Door, narrower: dict[str, Any]) -> None:
    world.agent.tools, world.agent.default_effect = ["get_*"], "non_idempotent_write"
    world.agent.budgets = {"calls": 10}
    world.agent.save()
    assert agent.post("sessions", {"session_id": "s-1", **narrower}).status == 201
    assert Session.objects.get(session_id="s-1").calls_limit == 10, "what it leaves unsaid is the agent's"


def test_a_stricter_default_of_a_session_makes_its_calls_wait(world: World, agent: Door) -> None:
    world.agent.default_effect = "read"
    world.agent.save()
    agent.post("sessions", {"session_id": "strict", "default_effect": "unclassified"})
    with a_tool() as tool:
        assert agent.post(calls_of(world), one(tool)).body["calls"][0]["status"] == "approved"
        assert agent.post("sessions/strict/turns/t/calls", one(tool)).body["calls"][0]["status"] == "awaiting_approval"


def test_a_snapshot_shows_budgets_turns_calls_and_what_waits(world: World, agent: Door) -> None:
    """S-B20: right after the answer the snapshot has the pending call."""
    with a_tool() as waits, a_tool(effect="read") as runs:
        proposed = agent.post(
            calls_of(world), {"calls": [*one(waits)["calls"], *one(runs, call_id="c2")["calls"]]}
        ).body["calls"]
        snapshot = agent.get(f"sessions/{world.session.session_id}").body
    assert [each["id"] for each in snapshot["calls"]] == [each["id"] for each in proposed]
    assert snapshot["waiting"] == [proposed[0]["id"]]
    assert snapshot["budgets"]["calls"]["used"] == 2
    assert snapshot["budgets"]["turns"]["used"] == 1
    assert [each["turn_id"] for each in snapshot["turns"]] == ["turn-1"]


def test_a_settlement_reaches_the_snapshot_as_the_applications_note(world: World, agent: Door, ana: Door) -> None:
    """S-E05: never as a user's words; repeating it adds nothing."""
    with a_tool(Script(InDoubt("cut")), requires_approval=False) as tool:
        call = world.propose(tool)
        world.run()
    for _ in range(2):
        assert (
            ana.post(f"unknown-outcomes/{call.pk}/settle", {"verdict": "took_effect", "evidence": "seen"}).status == 200
        )
    (note,) = agent.get(f"sessions/{world.session.session_id}").body["notes"]
    assert (note["from"], note["call"], note["code"]) == ("application", str(call.pk), "CONFIRMED_DONE")


def test_closing_and_cancelling_a_session(world: World, agent: Door) -> None:
    """S-G05: what has ended is told with its real status, not with a fake success."""
    name = world.session.session_id
    with a_tool() as tool:
        call = world.propose(tool)
        assert agent.post(f"sessions/{name}/close").body["status"] == "closed"
        assert agent.post(f"sessions/{name}/close").status == 200
        assert world.now(call).status == "awaiting_approval"
        became = agent.post(f"sessions/{name}/cancel")
        assert became.body["calls"] == [{"id": str(call.pk), "tool_call_id": call.tool_call_id, "became": "rejected"}]
        again = agent.post(f"sessions/{name}/cancel")
    assert (again.status, again.code) == (409, "WRONG_STATE")
    assert "cancelled" in again.body["detail"]
    assert agent.post(f"sessions/{name}/close").status == 409
    assert world.now(call).code == "CANCELLED"


# -- calls


def test_a_call_has_every_field_of_the_interface(world: World, agent: Door, ana: Door) -> None:
    with a_tool(Script({"receipt": 1}), approvers_needed=2) as tool:
        answer = agent.post(
            calls_of(world), one(tool, {"amount": 3}, operation_id="op"), traceparent=f"00-{'a' * 32}-{'b' * 16}-01"
        )
        (call,) = answer.body["calls"]
        assert set(call) == set(CallAnswer.model_fields)
        assert answer.status == 200
        assert (call["status"], call["retry"], call["code"]) == ("awaiting_approval", "wait", "")
        assert "person" in call["message"], "F-41"
        assert (call["operation_id"], call["trace_id"]) == ("op", "a" * 32)
        assert call["idempotency_key"] == f"{world.session.pk}/turn-1/c1"
        assert call["approval"]["needed"] == 2
        assert call["approval"]["decisions"] == []
        assert call["policy"]["why"]
        assert call["policy"]["sources"]["effect"] == "nothing is known"
        assert call["policy"]["measures"] == {"amount": 3, "name": "x"}
        assert call["arguments"] == {"amount": 3, "name": "x"}
        ana.post(f"approvals/{call['id']}/approve", {"arguments_hash": call["arguments_hash"], "reason": "fine"})
        shown = agent.get(f"calls/{call['id']}").body
    (decision,) = shown["approval"]["decisions"]
    assert (decision["decision"], decision["reason"]) == ("approve", "fine"), "F-93: the reason reaches the agent"
    for name in ("proposed_at", "approval"):
        text = shown[name] if name == "proposed_at" else shown[name]["deadline"]
        assert datetime.fromisoformat(text).utcoffset() is not None


def test_a_finished_call_shows_its_result_and_attempts_by_either_address(world: World, agent: Door) -> None:
    with a_tool(Script({"receipt": 1}), effect="read") as tool:
        agent.post(calls_of(world), one(tool))
        world.run()
    by_name = agent.get(f"{calls_of(world)}/c1").body
    assert agent.get(f"calls/{by_name['id']}").body == by_name
    assert (by_name["status"], by_name["code"], by_name["result"]) == ("succeeded", "OK", {"receipt": 1})
    (attempt,) = by_name["attempts"]
    assert (attempt["number"], attempt["state"], attempt["late"]) == (1, "succeeded", None)
    assert by_name["retry"] == "do_not_retry"


def test_many_calls_are_answered_in_the_order_asked(world: World, agent: Door) -> None:
    with a_tool(effect="read") as tool:
        agent.post(calls_of(world), one(tool, {"amount": 0}, call_id="c7"))
        asked = [one(tool, {"amount": n}, call_id=f"c{n}")["calls"][0] for n in range(9, -1, -1)]
        answered = agent.post(calls_of(world), {"calls": asked}).body["calls"]
    assert [each["tool_call_id"] for each in answered] == [f"c{n}" for n in range(9, -1, -1)]
    (mismatch,) = [each for each in answered if "status" in each and each["status"] == 422]
    assert (mismatch["tool_call_id"], mismatch["code"]) == ("c7", "CALL_MISMATCH"), "in its place"
    assert [each["status"] for each in answered if each is not mismatch] == ["approved"] * 9


def test_the_same_request_again_answers_the_same_and_says_that_it_was_replayed(world: World, agent: Door) -> None:
    """F-101, F-02, F-57."""
    failing = Script(ToolRejected("NO", "Not today."))
    with a_tool(failing, effect="read") as bad, a_tool(Script({"x": "y" * 2_000_000}), effect="read") as big:
        body = {"calls": [*one(bad)["calls"], *one(big, call_id="c2")["calls"]]}
        first = agent.post(calls_of(world), body).body["calls"]
        assert [each["replayed"] for each in first] == [False, False]
        world.run()
        again = agent.post(calls_of(world), body).body["calls"]
    stored = [agent.get(f"calls/{each['id']}").body for each in first]
    assert [{**each, "replayed": True} for each in stored] == again
    assert [each["code"] for each in again] == ["NO", "OK_WITH_WARNING"] or again[1]["status"] == "failed"
    assert failing.applied == 1


def test_a_replayed_operation_is_linked_and_shows_the_stored_result(world: World, agent: Door) -> None:
    tried = Script({"receipt": 1})
    with a_tool(tried, effect="idempotent_write") as tool:
        (first,) = agent.post(calls_of(world), one(tool)).body["calls"]
        world.run()
        (again,) = agent.post(calls_of(world, "turn-2"), one(tool, call_id="c9")).body["calls"]
    assert (again["status"], again["replayed"], again["replay_of"]) == ("succeeded", True, first["id"])
    assert again["result"] == {"receipt": 1}
    assert agent.get(f"calls/{again['id']}").body == again
    assert tried.applied == 1


@pytest.mark.parametrize(
    "spelled", ['{"amount":100,"name":"é"}', '{"name":"\\u00e9","amount":1e2}', '{ "amount": 100.0, "name": "é" }']
)
def test_the_same_arguments_spelled_otherwise_are_the_same_request(world: World, agent: Door, spelled: str) -> None:
    """F-30: 200, never 422; NFC and NFD differ."""
    with a_tool(effect="read") as tool:
        agent.post(calls_of(world), one(tool, {"amount": 100, "name": "é"}))
        raw = '{"calls":[{"tool_call_id":"c1","tool":"%s","arguments":%s}]}' % (tool.name, spelled)  # noqa: UP031
        assert agent.post(calls_of(world), raw=raw.encode()).body["calls"][0]["replayed"]
        assert agent.post(calls_of(world), one(tool, {"amount": 100, "name": "e\u0301"})).status == 422


@pytest.mark.parametrize(
    "again", [{"arguments": {"amount": 2}}, {"tool": "get_order"}, {"operation_id": "op"}], ids=repr
)
def test_the_same_id_with_anything_different_is_a_422_and_the_first_stands(
    world: World, agent: Door, again: dict[str, Any]
) -> None:
    """F-56, F-65: problem details that name the mismatch; nothing executed."""
    tried = Script()
    with a_tool(tried, effect="read") as tool:
        body = one(tool, {"amount": 1})
        agent.post(calls_of(world), body)
        refused = agent.post(calls_of(world), {"calls": [{**body["calls"][0], **again}]})
        assert (refused.status, refused.code) == (422, "CALL_MISMATCH")
        assert [each["tool_call_id"] for each in refused.body["errors"]] == ["c1"]
        assert agent.post(calls_of(world), body).body["calls"][0]["replayed"]
        world.run()
    assert Call.objects.count() == 1
    assert [each.arguments.amount for each in tried.entries] == [1]


def test_model_mistakes_are_recorded_calls_and_no_http_errors(world: World, agent: Door) -> None:
    with a_tool(effect="read") as tool:
        asked = [
            one("no_such_tool")["calls"][0],
            one(tool, "{", call_id="c2")["calls"][0],
            one(tool, {"amount": "5"}, call_id="c3")["calls"][0],
        ]
        answer = agent.post(calls_of(world), {"calls": asked})
    assert answer.status == 200
    assert [(each["code"], each["retry"]) for each in answer.body["calls"]] == [
        ("UNKNOWN_TOOL", "do_not_retry"),
        ("INVALID_JSON", "correct_and_call"),
        ("INVALID_ARGUMENTS", "correct_and_call"),
    ]
    assert Call.objects.count() == 3


def test_a_wait_that_ends_changes_nothing(world: World, agent: Door, ana: Door) -> None:
    """F-40."""
    with a_tool() as tool:
        (call,) = agent.post(calls_of(world), one(tool), prefer="wait=1").body["calls"]
        waited = agent.get(f"calls/{call['id']}?wait=1")
        assert (waited.status, waited.body["status"]) == (200, "awaiting_approval")
        approved = ana.post(f"approvals/{call['id']}/approve", {"arguments_hash": call["arguments_hash"]})
    assert (approved.status, approved.body["status"]) == (200, "approved")


@pytest.mark.parametrize("wait", ["x", "-1", "1.5", "", "99999999999999999999", "\u0661"])
def test_a_wait_that_is_no_whole_number_is_malformed(world: World, agent: Door, wait: str) -> None:
    with a_tool() as tool:
        call = world.propose(tool)
    refused = agent.get(f"calls/{call.pk}?wait={wait}")
    assert (refused.status, refused.code) == (400, "MALFORMED")


# -- cancel and acknowledge


def test_a_call_that_has_not_started_is_cancelled(world: World, agent: Door) -> None:
    with a_tool() as tool:
        call = world.propose(tool)
        cancelled = agent.post(f"calls/{call.pk}/cancel")
        assert (cancelled.status, cancelled.body["status"], cancelled.body["code"]) == (200, "rejected", "CANCELLED")
        assert cancelled.body["retry"] == "new_call_ok"
        again = agent.post(f"calls/{call.pk}/cancel")
    assert (again.status, again.code) == (409, "WRONG_STATE")
    assert "rejected" in again.body["detail"]


def test_a_running_call_is_asked_to_stop_and_what_it_did_is_recorded(world: World, agent: Door) -> None:
    """S-G02."""
    held = Held({"done": 1})
    with a_tool(Script(held), requires_approval=False) as tool:
        call = world.propose(tool)
        with world.running():
            assert held.entered.wait(30)
            became = agent.post(f"{calls_of(world).removesuffix('/calls')}/cancel")
            assert became.body["calls"][0]["became"] == "cancelling"
            held.let_go()
    assert world.now(call).status == "succeeded"


def test_an_acknowledgement_dates_what_was_answered_once(world: World, agent: Door) -> None:
    with a_tool(effect="read") as done, a_tool() as waits:
        first, second = world.propose(done, call_id="a"), world.propose(waits, call_id="b")
        world.run()
        path = f"{calls_of(world).removesuffix('/calls')}/acknowledge"
        answer = agent.post(path, {"tool_call_ids": ["a", "b"]})
        assert [bool(each["reported_at"]) for each in answer.body["calls"]] == [True, False], (
            "nothing was answered about the second"
        )
        reported = world.now(first).reported_at
        agent.post(path, {"tool_call_ids": ["a"]})
        assert world.now(first).reported_at == reported
        assert agent.post(path, {"tool_call_ids": ["a", "nobody"]}).status == 404
        for body in ({"tool_call_ids": []}, {}, {"tool_call_ids": ["a"], "x": 1}, {"tool_call_ids": "a"}):
            assert agent.post(path, body).status == 400
    assert world.now(second).reported_at is None


# -- tools


def test_tools_are_those_that_the_agent_may_use(world: World, agent: Door) -> None:
    with a_tool(effect="read") as mine, a_tool(effect="read") as other:
        world.agent.tools = [mine.name]
        world.agent.save()
        (shown,) = agent.get("tools").body["tools"]
    assert other.name != mine.name
    assert (shown["name"], shown["effect"], shown["input_schema"]["additionalProperties"]) == (mine.name, "read", False)
    assert shown["description"] == "Do a thing."


def test_a_shape_that_does_not_exist_is_malformed(agent: Door) -> None:
    assert agent.get("tools?format=neutral").status == 200
    refused = agent.get("tools?format=soap")
    assert (refused.status, refused.code) == (400, "MALFORMED")


# -- search


def test_an_agent_searches_its_own_calls_by_everything_that_names_them(world: World, agent: Door) -> None:
    other = a_world()
    with a_tool(effect="read") as tool, a_tool() as waits:
        call = world.now(world.propose(tool, {"amount": 5}, call_id="needle"))
        rest = world.propose(waits, session=world.open())
        other.propose(tool)
        world.run()
        later = (call.proposed_at + timedelta(seconds=1)).isoformat().replace("+", "%2B")
        found = {
            "": [rest, call],
            f"tool={tool.name}": [call],
            "status=awaiting_approval": [rest],
            "status=awaiting_approval&status=succeeded": [rest, call],
            "code=OK": [call],
            f"session={world.session.session_id}": [call],
            f"agent={world.agent.name}": [rest, call],
            f"agent={other.agent.name}": [],
            f"hash={call.arguments_hash}": [call],
            f"key={call.idempotency_key}": [call],
            f"key={world.session.pk}/turn-1": [],
            "key=nonsense": [],
            "q=needl": [call],
            f"until={later}": [rest, call],
            f"since={later}": [],
        }
        for query, expected in found.items():
            answer = agent.get(f"calls?{query}")
            assert [each["id"] for each in answer.body["calls"]] == [str(each.pk) for each in expected], query


def test_pages_go_by_key_and_stay_right_while_rows_arrive(world: World, agent: Door) -> None:
    with a_tool(effect="read") as tool:
        ids = [str(world.propose(tool, {"amount": n}).pk) for n in range(5)][::-1]
        first = agent.get("calls?limit=2").body
        world.propose(tool, {"amount": 9})
        second = agent.get(f"calls?limit=2&cursor={first['next']}").body
        third = agent.get(f"calls?limit=2&cursor={second['next']}").body
    shown = [each["id"] for page in (first, second, third) for each in page["calls"]]
    assert (shown, third["next"]) == (ids, None)


# -- keys


@pytest.mark.parametrize("change", ["revoked", "expired", "disabled", "wrong", "empty", "basic", "token of nobody"])
def test_a_key_that_is_no_good_opens_nothing(world: World, change: str) -> None:
    secret = world.key
    headers: dict[str, str] = {}
    match change:
        case "revoked":
            AgentKey.objects.update(revoked_at=timezone.now())
        case "expired":
            AgentKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        case "disabled":
            world.agent.enabled = False
            world.agent.save()
        case "wrong":
            secret = secret[:-1] + ("A" if secret[-1] != "A" else "B")
        case "empty":
            secret = ""
        case "basic":
            headers = {"authorization": f"Basic {secret}"}
        case "token of nobody":
            secret = "dxo_" + "x" * 43
    refused = Door(secret)("GET", "calls", **headers)
    assert refused.status == 401
    assert refused.code in ("KEY_REFUSED", "NOT_AUTHENTICATED")
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert secret == "" or secret not in str(refused.body)


def test_an_agent_may_hold_several_keys_and_lose_one(world: World) -> None:
    second = directory.create_key(world.agent, by="test")
    AgentKey.objects.filter(hint=world.key[:10]).update(revoked_at=timezone.now())
    assert Door(world.key).get("tools").status == 401
    assert Door(second).get("tools").status == 200


def test_expired_and_rejected_and_pending_calls_read_differently(world: World, agent: Door, ana: Door) -> None:
    """F-41, S-B03."""
    with a_tool() as tool:
        pending, expired, rejected = (world.propose(tool, {"amount": n}) for n in range(3))
        let_pass(90_000, expired)
        ana.post(f"approvals/{expired.pk}/approve", {"arguments_hash": expired.arguments_hash})
        ana.post(f"approvals/{rejected.pk}/reject", {"arguments_hash": rejected.arguments_hash, "reason": "no"})
        shown = [agent.get(f"calls/{each.pk}").body for each in (pending, expired, rejected)]
    assert [(each["code"], each["retry"]) for each in shown] == [
        ("", "wait"),
        ("APPROVAL_EXPIRED", "new_call_ok"),
        ("APPROVAL_REJECTED", "do_not_retry"),
    ]
    assert len({each["message"] for each in shown}) == 3
    assert "did not run" in shown[1]["message"]
    assert shown[1]["approval"]["decisions"] == [], "F-39: nobody decided"
