"""The auditors' admin: it finds what happened in one's own teams, and changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from approvals import desk
from tests.worlds import Script, World, a_tool, a_world
from toolcalls.effects import Effect
from toolcalls.models import Attempt, Call, JournalLine
from toolcalls.tools import InDoubt

LISTS = (
    "toolcalls_call",
    "toolcalls_attempt",
    "toolcalls_journalline",
    "toolcalls_session",
    "toolcalls_agent",
    "toolcalls_team",
    "approvals_decision",
    "approvals_reconciliation",
)


@pytest.fixture
def auditor(world: World) -> Client:
    """Give the browser of a member of the staff who may view everything of the team."""
    User.objects.filter(pk=world.bob.pk).update(is_staff=True)
    world.bob.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    return signed_in(world.bob)


@pytest.fixture
def settled(world: World) -> Iterator[Call]:
    """Give a call with a decision, an attempt in doubt and a reconciliation."""
    with a_tool(Script(InDoubt("The line broke.")), effect=Effect.NON_IDEMPOTENT_WRITE) as tool:
        call = world.propose(tool, {"name": "<img src=x>", "amount": 3}, operation_id="op-1")
        world.approve(call, reason="Looks right.")
        world.run()
        desk.settle(call.pk, world.ana, verdict="took_effect", evidence="Receipt 12.", result={"n": 1}, channel="desk")
        yield world.now(call)


def signed_in(user: User) -> Client:
    browser = Client()
    browser.force_login(user)
    return browser


def listed(browser: Client, **query: str) -> str:
    answer = browser.get(reverse("admin:toolcalls_call_changelist"), query)
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.mark.parametrize("name", LISTS)
def test_every_list_and_every_page_opens(settled: Call, auditor: Client, name: str) -> None:
    answer = auditor.get(reverse(f"admin:{name}_changelist"))
    assert answer.status_code == 200
    row = answer.context["cl"].result_list[0]
    shown = auditor.get(reverse(f"admin:{name}_change", args=[row.pk]))
    assert shown.status_code == 200
    assert "<img src=x>" not in shown.content.decode()


@pytest.mark.parametrize("name", LISTS)
def test_nothing_can_be_added_changed_or_deleted_not_even_by_a_superuser(
    world: World, settled: Call, name: str
) -> None:
    User.objects.filter(pk=world.ana.pk).update(is_staff=True, is_superuser=True)
    browser = signed_in(world.ana)
    row = browser.get(reverse(f"admin:{name}_changelist")).context["cl"].result_list[0]
    assert browser.get(reverse(f"admin:{name}_add")).status_code == 403
    assert browser.post(reverse(f"admin:{name}_change", args=[row.pk]), {"status": "approved"}).status_code == 403
    assert browser.post(reverse(f"admin:{name}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
    marked: dict[str, Any] = {"action": "delete_selected", "_selected_action": [str(row.pk)], "post": "yes"}
    browser.post(reverse(f"admin:{name}_changelist"), marked)
    assert type(row).objects.filter(pk=row.pk).exists()
    assert world.now(settled).moves == settled.moves


@pytest.mark.parametrize("name", LISTS)
def test_staff_without_the_permission_sees_no_list(world: World, settled: Call, name: str) -> None:
    User.objects.filter(pk=world.bob.pk).update(is_staff=True)
    assert signed_in(world.bob).get(reverse(f"admin:{name}_changelist")).status_code == 403


@pytest.mark.parametrize("name", LISTS)
def test_staff_of_another_team_sees_nothing_of_this_one(world: World, settled: Call, name: str) -> None:
    User.objects.filter(pk=world.ana.pk).update(is_staff=True, is_superuser=True)
    row = signed_in(world.ana).get(reverse(f"admin:{name}_changelist")).context["cl"].queryset.last()
    stranger = a_world().ana
    User.objects.filter(pk=stranger.pk).update(is_staff=True)
    stranger.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    browser = signed_in(stranger)
    seen = browser.get(reverse(f"admin:{name}_changelist")).context["cl"].result_list
    assert row.pk not in [each.pk for each in seen]
    answer = browser.get(reverse(f"admin:{name}_change", args=[row.pk]))
    assert answer.status_code == 302, "as for a row that does not exist"


def test_whoever_is_not_staff_is_sent_to_sign_in(world: World) -> None:
    assert signed_in(world.ana).get("/admin/toolcalls/call/").status_code == 302
    assert Client().get("/admin/toolcalls/call/").status_code == 302


def test_a_call_is_found_by_id_key_hash_and_operation(world: World, settled: Call, auditor: Client) -> None:
    with a_tool() as tool:
        other = world.propose(tool, call_id="another-call")
    for term in (
        settled.tool_call_id,
        settled.idempotency_key,
        settled.arguments_hash,
        settled.operation,
        "op-1",
        str(settled.pk),
    ):
        shown = listed(auditor, q=term)
        assert (str(settled.pk) in shown, str(other.pk) in shown) == (True, False), term
    assert "0 calls" in listed(auditor, q="a/b/c")
    assert "0 calls" in listed(auditor, q=settled.tool_call_id[:-1])


@pytest.mark.parametrize("query", ["q=%00", "status__exact=%00", "tool=%00", "a%00=1", "p=%00", "o=%00"])
def test_a_null_character_in_a_query_is_no_server_error(settled: Call, auditor: Client, query: str) -> None:
    for name in LISTS:
        assert auditor.get(f"{reverse(f'admin:{name}_changelist')}?{query}").status_code == 400


def test_lists_read_no_bodies_and_cost_the_same_for_many_rows(world: World, settled: Call, auditor: Client) -> None:
    def cost() -> int:
        with CaptureQueriesContext(connection) as asked:
            listed(auditor)
        read = " ".join(query["sql"] for query in asked)
        assert not any(f'"{body}"' in read for body in ("arguments", "received", "result", "raw_result"))
        return len(asked)

    before = cost()
    with a_tool() as tool:
        for _ in range(20):
            world.propose(tool)
    assert cost() == before


def test_sensitive_values_are_masked_and_cannot_be_guessed_by_query(world: World, auditor: Client) -> None:
    with a_tool(sensitive=["name"]) as tool:
        call = world.propose(tool, {"name": "hunter2"})
        world.approve(call, reason="ok")
        refused = [world.propose(tool, bad) for bad in ('{"name": "hunter2"', '{"name": "hunter2", "amount": "x"}')]
        for each in refused:
            assert "hunter2" not in auditor.get(reverse("admin:toolcalls_call_change", args=[each.pk])).content.decode()
    lines = JournalLine.objects.filter(call=call)
    pages = [reverse("admin:toolcalls_call_change", args=[call.pk])]
    pages += [reverse("admin:toolcalls_journalline_change", args=[line.pk]) for line in lines]
    pages.append(reverse("admin:approvals_decision_change", args=[call.decisions.get().pk]))
    for address in pages:
        shown = auditor.get(address).content.decode()
        assert "hunter2" not in shown
        assert call.arguments_hash not in shown
    assert "0 calls" in listed(auditor, q=call.arguments_hash)
    assert "0 calls" in listed(auditor, q=call.operation)
    for lookup in ("arguments__contains=hunter2", "arguments_hash=x", "agent__keys__digest__startswith=a", "policy=x"):
        assert auditor.get(f"{reverse('admin:toolcalls_call_changelist')}?{lookup}").status_code == 400


def test_filters_narrow_by_status_tool_code_and_effect(world: World, settled: Call, auditor: Client) -> None:
    with a_tool() as tool:
        waiting = world.propose(tool)
        for query, found in (
            ({"status__exact": "awaiting_approval"}, waiting),
            ({"tool": tool.name}, waiting),
            ({"effect": "unclassified"}, waiting),
            ({"code": "CONFIRMED_DONE"}, settled),
        ):
            shown = listed(auditor, **query)
            other = settled if found is waiting else waiting
            assert (str(found.pk) in shown, str(other.pk) in shown) == (True, False), query


def test_an_attempt_tells_what_its_worker_learned(settled: Call, auditor: Client) -> None:
    attempt = Attempt.objects.get(call=settled)
    shown = auditor.get(reverse("admin:toolcalls_attempt_change", args=[attempt.pk])).content.decode()
    assert "The line broke." in shown
