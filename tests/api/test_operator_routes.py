"""The operators' routes (interfaces, REST; behaviour, sections 7 and 9)."""

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User

from approvals.models import Decision, Reconciliation
from tests.doors import Door, signed_in, with_token
from tests.worlds import Script, World, a_tool, let_pass
from toolcalls import lifecycle
from toolcalls.models import Call, Membership
from toolcalls.tools import InDoubt


def waiting(world: World, tool: Any, amount: int = 0) -> tuple[Call, dict[str, Any]]:
    call = world.propose(tool, {"amount": amount})
    return call, {"arguments_hash": call.arguments_hash}


# -- who gets in


@pytest.mark.parametrize("word", ["approve", "reject", "amend"])
def test_an_agents_key_can_never_decide(world: World, agent: Door, word: str) -> None:
    """F-34: whatever else it sends."""
    with a_tool(amend=True) as tool:
        call, body = waiting(world, tool)
        for headers in ({}, {"x-approved-by": "admin"}):
            refused = agent.post(f"approvals/{call.pk}/{word}", body, **headers)
            assert (refused.status, refused.code) == (403, "FORBIDDEN")
        assert agent.post("approvals/decide", {"decisions": []}).status == 403
        assert agent.get("approvals").status == 403
        assert agent.get("unknown-outcomes").status == 403
    assert world.now(call).status == "awaiting_approval"


def test_without_a_key_nothing_is_told(world: World) -> None:
    with a_tool() as tool:
        call, body = waiting(world, tool)
    for method, path in (("POST", f"approvals/{call.pk}/approve"), ("GET", "approvals"), ("GET", f"calls/{call.pk}")):
        refused = Door()(method, path, body if method == "POST" else None)
        assert (refused.status, refused.code) == (401, "NOT_AUTHENTICATED")


def test_a_signed_in_person_needs_the_csrf_token_and_a_personal_token_does_not(world: World) -> None:
    """F-83."""
    with a_tool() as tool:
        call, body = waiting(world, tool)
        browser = signed_in(world.ana)
        assert browser.get("approvals").status == 200
        refused = browser.post(f"approvals/{call.pk}/approve", body)
        assert (refused.status, refused.code) == (403, "FORBIDDEN")
        foreign = browser.post(f"approvals/{call.pk}/approve", body, content_type="text/plain")
        assert foreign.status in (403, 415)
        assert world.now(call).status == "awaiting_approval"
        browser.client.get("/accounts/logout/")
        browser.client.cookies["csrftoken"] = "a" * 32
        done = browser.post(f"approvals/{call.pk}/approve", body, **{"x-csrftoken": "a" * 32})
        assert (done.status, done.body["status"]) == (200, "approved")
        assert Decision.objects.get().channel == "rest"
        other, body = waiting(world, tool, 1)
        assert with_token(world.ana).post(f"approvals/{other.pk}/approve", body).status == 200
    assert Decision.objects.get(call=other).channel == "token"


def test_a_person_is_no_agent(world: World, ana: Door) -> None:
    for method, path in (("POST", "sessions"), ("GET", "tools"), ("GET", f"sessions/{world.session.session_id}")):
        refused = ana(method, path)
        assert (refused.status, refused.code) == (403, "FORBIDDEN")


def test_rights_are_those_at_the_click(world: World, ana: Door) -> None:
    """F-86: a right withdrawn, an account closed; staff without the right are nobody here."""
    with a_tool() as tool:
        call, body = waiting(world, tool)
        staff = User.objects.create_user("boss", is_staff=True)
        staff.user_permissions.set(Permission.objects.all())
        assert with_token(staff).post(f"approvals/{call.pk}/approve", body).status == 404
        Membership.objects.filter(user=world.ana).update(may_decide=False)
        refused = ana.post(f"approvals/{call.pk}/approve", body)
        assert (refused.status, refused.code) == (403, "FORBIDDEN")
        User.objects.filter(pk=world.ana.pk).update(is_active=False)
        assert ana.post(f"approvals/{call.pk}/approve", body).status == 401
    assert world.now(call).status == "awaiting_approval"


# -- deciding


def test_an_approval_answers_with_the_call_and_it_runs_once(world: World, ana: Door, bob: Door) -> None:
    """S-B01, S-B05, F-01."""
    tried = Script()
    with a_tool(tried) as tool:
        call, body = waiting(world, tool)
        first = ana.post(f"approvals/{call.pk}/approve", body)
        assert (first.status, first.body["id"], first.body["status"]) == (200, str(call.pk), "approved")
        again = ana.post(f"approvals/{call.pk}/approve", body)
        assert (again.status, again.body) == (200, first.body)
        for door, word in ((bob, "approve"), (bob, "reject"), (ana, "reject")):
            refused = door.post(f"approvals/{call.pk}/{word}", body)
            assert (refused.status, refused.code) == (409, "ALREADY_DECIDED")
            assert world.ana.username in refused.body["detail"]
        world.run()
    assert tried.applied == 1


@pytest.mark.parametrize(
    ("happens", "code"),
    [("stale", "STALE"), ("expired", "EXPIRED"), ("cancelled", "CANCELLED"), ("changed", "TOOL_CHANGED")],
)
def test_what_is_too_late_or_stale_is_a_409_that_says_what_happened(
    world: World, ana: Door, happens: str, code: str
) -> None:
    """F-07, F-08, F-32, F-35."""
    tried = Script()
    with a_tool(tried, amend=True) as tool:
        call, body = waiting(world, tool)
        match happens:
            case "stale":
                body = {"arguments_hash": "0" * 64}
            case "expired":
                let_pass(90_000, call)
            case "cancelled":
                lifecycle.cancel_call(call.pk, by="test")
            case "changed":
                tool.version = "2+other"
        for word, more in (("approve", {}), ("amend", {"arguments": {"amount": 5}})):
            refused = ana.post(f"approvals/{call.pk}/{word}", {**body, **more})
            assert (refused.status, refused.code) == (409, code)
        world.run()
    assert tried.applied == 0
    assert Call.objects.count() == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"arguments_hash": None},
        {"arguments_hash": ""},
        {"arguments_hash": 5},
        {"arguments_hash": "x" * 65},
        {"decision": "approve"},
        {"reason": "because"},
    ],
    ids=repr,
)
def test_a_decision_without_the_hash_that_was_seen_is_malformed(world: World, ana: Door, body: dict[str, Any]) -> None:
    with a_tool() as tool:
        call, _ = waiting(world, tool)
        for word in ("approve", "reject", "amend"):
            assert ana.post(f"approvals/{call.pk}/{word}", body).status == 400
    assert world.now(call).status == "awaiting_approval"


@pytest.mark.parametrize(
    "more",
    [
        {"decided_by": "ceo"},
        {"decided_at": "2020-01-01T00:00:00Z"},
        {"actor": "x"},
        {"channel": "desk"},
        {"edited_tool": "delete_customer"},
        {"approved": True},
        {"arguments": {}},
    ],
    ids=repr,
)
def test_who_and_when_come_from_the_server_alone(world: World, ana: Door, more: dict[str, Any]) -> None:
    """F-86, F-26."""
    with a_tool() as tool:
        call, body = waiting(world, tool)
        refused = ana.post(f"approvals/{call.pk}/approve", {**body, **more})
        assert (refused.status, refused.code) == (400, "MALFORMED")
    assert world.now(call).status == "awaiting_approval"


@pytest.mark.parametrize("word", ["approve", "reject"])
@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("", 200),
        ("\n look \n", 200),
        ("<b>🙂", 200),
        ("x" * 10_000, 200),
        ("x" * 10_001, 400),
        ("ok\u0000", 400),
        (5, 400),
        (None, 400),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_reason_is_kept_exactly_or_refused(
    world: World, agent: Door, ana: Door, word: str, reason: object, status: int
) -> None:
    """F-93, F-66."""
    with a_tool() as tool:
        call, body = waiting(world, tool)
        assert ana.post(f"approvals/{call.pk}/{word}", {**body, "reason": reason}).status == status
        shown = agent.get(f"calls/{call.pk}").body
    if status == 400:
        assert shown["status"] == "awaiting_approval"
        return
    assert [each["reason"] for each in shown["approval"]["decisions"]] == [reason]
    assert Decision.objects.get().reason == reason


def test_a_sensitive_argument_is_decided_by_a_hash_that_gives_nothing_away(
    world: World, agent: Door, ana: Door
) -> None:
    """F-28: the plain hash is shown to nobody, and is not taken."""
    tried = Script()
    with a_tool(tried, sensitive=["name"]) as tool:
        call = world.propose(tool, {"name": "hunter2"})
        shown = ana.get(f"calls/{call.pk}").body
        assert "hunter2" not in str(shown)
        assert shown["arguments_hash"] != call.arguments_hash
        assert shown["arguments_hash"] == agent.get(f"calls/{call.pk}").body["arguments_hash"]
        assert ana.post(f"approvals/{call.pk}/approve", {"arguments_hash": call.arguments_hash}).code == "STALE"
        assert ana.post(f"approvals/{call.pk}/approve", {"arguments_hash": shown["arguments_hash"]}).status == 200
        world.run()
    assert [each.arguments.name for each in tried.entries] == ["hunter2"], "the tool gets the true value"


# -- amending


def test_an_amendment_answers_with_the_new_call_and_the_old_one_points_to_it(
    world: World, agent: Door, ana: Door
) -> None:
    """F-25."""
    tried = Script()
    with a_tool(tried, amend=True) as tool:
        call, body = waiting(world, tool, 100)
        answer = ana.post(f"approvals/{call.pk}/amend", {**body, "arguments": {"amount": 50}, "reason": "half"})
        world.run()
        old, new = agent.get(f"calls/{call.pk}").body, agent.get(f"calls/{answer.body['id']}").body
    assert answer.status == 200
    assert (old["status"], old["code"], old["amended_to"], old["retry"]) == (
        "rejected",
        "AMENDED",
        new["id"],
        "do_not_retry",
    )
    assert (new["amends"], new["status"], new["arguments"]["amount"]) == (old["id"], "succeeded", 50)
    assert [each["reason"] for each in new["approval"]["decisions"]] == ["half"]
    assert [each.arguments.amount for each in tried.entries] == [50]


@pytest.mark.parametrize(
    "arguments", [{"amount": "25.90"}, {"amount": 5, "more": 1}, {"amount": 1001}, "{", [], {"amount": 100}], ids=repr
)
def test_a_refused_amendment_is_a_422_and_changes_nothing(world: World, ana: Door, arguments: object) -> None:
    """F-27."""
    with a_tool(amend=True, limits=[{"measure": "amount", "per": "call", "max": 1000}]) as tool:
        call, body = waiting(world, tool, 100)
        refused = ana.post(f"approvals/{call.pk}/amend", {**body, "arguments": arguments})
        assert (refused.status, refused.code in ("INVALID_ARGUMENTS", "INVALID_JSON", "POLICY_LIMIT")) == (422, True)
    assert world.now(call).status == "awaiting_approval"
    assert Call.objects.count() == 1


# -- several at once


def test_a_list_is_decided_item_by_item(world: World, ana: Door) -> None:
    """F-84."""
    with a_tool() as tool:
        calls = [waiting(world, tool, n)[0] for n in range(4)]
        lifecycle.cancel_call(calls[2].pk, by="test")
        words = ["approve", "reject", "approve"]
        items = [
            {"id": str(each.pk), "arguments_hash": each.arguments_hash, "decision": word}
            for each, word in zip(calls, words, strict=False)
        ]
        answer = ana.post("approvals/decide", {"decisions": items})
    assert answer.status == 200
    assert [(each["id"], each["ok"], each["code"]) for each in answer.body["decisions"]] == [
        (str(calls[0].pk), True, "OK"),
        (str(calls[1].pk), True, "OK"),
        (str(calls[2].pk), False, "CANCELLED"),
    ]
    assert [world.now(each).status for each in calls] == ["approved", "rejected", "rejected", "awaiting_approval"]


@pytest.mark.parametrize(
    "change",
    [
        {"decision": None},
        {"decision": "yes"},
        {"decision": "Approve"},
        {"decision": True},
        {"decision": ""},
        {"approved": "false"},
        {"approved": 0},
        {"id": "7"},
        {"id": None},
        {"arguments_hash": None},
        {"reason": "x" * 10_001},
    ],
    ids=lambda value: repr(value)[:30],
)
def test_one_malformed_item_refuses_the_whole_list(world: World, ana: Door, change: dict[str, Any]) -> None:
    """F-15: anything but the two words is a 400; all still pending."""
    with a_tool() as tool:
        calls = [waiting(world, tool, n)[0] for n in range(2)]
        items = [{"id": str(each.pk), "arguments_hash": each.arguments_hash, "decision": "approve"} for each in calls]
        refused = ana.post("approvals/decide", {"decisions": [items[0], {**items[1], **change}]})
        assert (refused.status, refused.code) == (400, "MALFORMED")
    assert {world.now(each).status for each in calls} == {"awaiting_approval"}
    assert ana.post("approvals/decide", {"decisions": []}).status == 400
    assert ana.post("approvals/decide", {}).status == 400


# -- lists


def test_what_waits_is_listed_oldest_deadline_first_and_paged_by_key(world: World, ana: Door) -> None:
    with (
        a_tool(deadline="none") as never,
        a_tool(deadline=100) as soon,
        a_tool(deadline=200) as later,
        a_tool(effect="read") as runs,
    ):
        order = [world.propose(each) for each in (never, later, soon, runs)]
        never_, later_, soon_, _ = (str(each.pk) for each in order)
        shown, query = [], "approvals?limit=1"
        while query:
            page = ana.get(query).body
            shown += [each["id"] for each in page["calls"]]
            query = page["next"] and f"approvals?limit=1&cursor={page['next']}"
        assert shown == [soon_, later_, never_]
        assert [each["id"] for each in ana.get(f"approvals?tool={later.name}").body["calls"]] == [later_]
        assert ana.get("approvals?limit=201").status == 400
        assert ana.get("approvals?since=2026-01-01T00:00:00").status == 400


def test_open_unknown_outcomes_are_listed_with_filters(world: World, ana: Door) -> None:
    """S-E01: over all sessions."""
    with a_tool(Script(InDoubt("cut")), requires_approval=False) as tool, a_tool(effect="read") as fine:
        calls = [world.propose(tool, {"amount": n}, session=world.open()) for n in range(3)]
        world.propose(fine)
        world.run()
        assert [each["id"] for each in ana.get("unknown-outcomes").body["calls"]] == [str(each.pk) for each in calls]
        first = ana.get("unknown-outcomes?limit=2").body
        rest = ana.get(f"unknown-outcomes?limit=2&cursor={first['next']}").body
        assert [len(first["calls"]), len(rest["calls"]), rest["next"]] == [2, 1, None]
        assert ana.get(f"unknown-outcomes?tool={fine.name}").body["calls"] == []


# -- reconciling


def unknown(world: World, tool: Any) -> Call:
    call = world.propose(tool)
    world.run()
    assert world.now(call).status == "outcome_unknown"
    return call


def test_settling_and_running_again_by_the_api(world: World, ana: Door, bob: Door) -> None:
    """S-E03, S-E11."""
    with a_tool(Script(InDoubt("cut"), InDoubt("cut"), {"done": 1}), requires_approval=False) as tool:
        call = unknown(world, tool)
        path = f"unknown-outcomes/{call.pk}"
        assert (
            ana.post(f"{path}/settle", {"verdict": "still_unknown", "evidence": "asked"}).body["status"]
            == "outcome_unknown"
        )
        assert ana.post(f"{path}/run-again", {"evidence": "not there"}).body["status"] == "approved"
        world.run()
        done = ana.post(f"{path}/settle", {"verdict": "took_effect", "evidence": "seen", "result": {"id": 7}})
        assert (done.status, done.body["code"], done.body["result"]) == (200, "CONFIRMED_DONE", {"id": 7})
        assert done.body["settled"]["verdict"] == "took_effect"
        assert ana.post(f"{path}/settle", {"verdict": "took_effect", "evidence": "seen"}).status == 200
        refused = bob.post(f"{path}/settle", {"verdict": "did_not_take_effect", "evidence": "no"})
        assert (refused.status, refused.code) == (409, "ALREADY_DECIDED")
        assert bob.post(f"{path}/run-again", {"evidence": "no"}).status == 409


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"verdict": "took_effect"},
        {"verdict": "took_effect", "evidence": ""},
        {"verdict": "maybe", "evidence": "e"},
        {"verdict": None, "evidence": "e"},
        {"verdict": "took_effect", "evidence": "e", "by": "ceo"},
        {"verdict": "took_effect", "evidence": "x" * 10_001},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_settlement_needs_a_verdict_and_evidence(world: World, ana: Door, body: dict[str, Any]) -> None:
    with a_tool(Script(InDoubt("cut")), requires_approval=False) as tool:
        call = unknown(world, tool)
        refused = ana.post(f"unknown-outcomes/{call.pk}/settle", body)
        assert (refused.status, refused.code) == (400, "MALFORMED")
    assert world.now(call).status == "outcome_unknown"
    assert not Reconciliation.objects.exists()
