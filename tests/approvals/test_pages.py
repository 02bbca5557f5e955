"""The operators' desk as a browser meets it: what it shows, what it refuses, and what a click does."""

import re
import time
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.template.loader import get_template
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from approvals import text
from tests.worlds import Script, World, a_tool, a_world
from toolcalls import directory, masking
from toolcalls.effects import Effect
from toolcalls.models import Call, Membership, new_id
from toolcalls.tools import InDoubt, Result, Tool

CHANGES = ("decide", "cancel", "settle", "run_again")
HIDDEN = "https://safe.example/\u202e\u2066moc.live\u2069"


@pytest.fixture
def tool() -> Iterator[Tool]:
    """Give a tool that waits for a person."""
    with a_tool() as made:
        yield made


@pytest.fixture
def ana(world: World) -> Client:
    """Give the browser of a person who may do everything in the team."""
    return signed_in(world.ana)


def signed_in(user: User) -> Client:
    browser = Client()
    browser.force_login(user)
    return browser


def page(browser: Client, call: Call) -> str:
    answer = browser.get(reverse("call", args=[call.pk]))
    assert answer.status_code == 200
    return answer.content.decode()


def decide(browser: Client, call: Call, decision: str = "approve", **form: Any) -> Any:
    sent = {"decision": decision, "arguments_hash": masking.hash_of(call), "reason": "", **form}
    return browser.post(reverse("decide", args=[call.pk]), sent)


def unknown_call(world: World, tool: Tool, **arguments: Any) -> Call:
    call = world.propose(tool, arguments)
    world.approve(call)
    world.run()
    call = world.now(call)
    assert call.status == "outcome_unknown"
    return call


# -- who may come in


@pytest.mark.parametrize("name", ["queue", "unknown", "call"])
def test_whoever_is_not_signed_in_is_asked_to_sign_in(world: World, tool: Tool, name: str) -> None:
    address = reverse(name, args=[world.propose(tool).pk] if name == "call" else [])
    answer = Client().get(address)
    assert (answer.status_code, answer.headers["Location"]) == (302, f"/accounts/login/?next={address}")


def test_a_click_without_a_session_changes_nothing_and_leads_back_to_the_call(world: World, tool: Tool) -> None:
    call = world.propose(tool)
    answer = decide(Client(), call)
    assert answer.headers["Location"] == f"/accounts/login/?next={reverse('call', args=[call.pk])}"
    assert world.now(call).status == "awaiting_approval"


def test_signing_in_through_the_form_leads_to_the_queue(world: World) -> None:
    directory.create_operator("carla", team=world.team, may=["decide"], password="a long enough one", by="test")
    browser = Client()
    assert browser.post("/accounts/login/", {"username": "carla", "password": "wrong"}).status_code == 200
    answer = browser.post("/accounts/login/", {"username": "carla", "password": "a long enough one"})
    assert (answer.status_code, answer.headers["Location"]) == (302, "/")


def test_an_agents_key_opens_no_page(world: World, tool: Tool) -> None:
    call = world.propose(tool)
    bearer = Client(headers={"Authorization": f"Bearer {world.key}", "X-Approved-By": "admin"})
    assert decide(bearer, call).status_code == 302
    assert world.now(call).status == "awaiting_approval"


def test_an_outsider_gets_for_every_address_of_a_call_what_a_random_id_gets(world: World, tool: Tool) -> None:
    call = world.propose(tool)
    outsider = signed_in(a_world().ana)
    for method, name in [("get", "call"), *(("post", name) for name in CHANGES)]:
        foreign, random = (
            getattr(outsider, method)(reverse(name, args=[pk]), {"decision": "approve"}) for pk in (call.pk, new_id())
        )
        assert foreign.status_code == random.status_code == 404, name
        assert without_tokens(foreign) == without_tokens(random)
    assert world.now(call).status == "awaiting_approval"
    assert str(call.pk) not in outsider.get("/").content.decode()


def without_tokens(answer: Any) -> str:
    return re.sub(r'(?<=csrfmiddlewaretoken" value=")[^"]+', "", answer.content.decode())


def test_who_is_in_no_team_sees_an_empty_queue_and_why(world: World, tool: Tool) -> None:
    world.propose(tool)
    shown = signed_in(User.objects.create_user("nobody")).get("/").content.decode()
    assert "You are not a member of any team yet" in shown
    assert tool.name not in shown


def test_only_staff_is_shown_the_way_to_the_admin(world: World, ana: Client) -> None:
    assert 'href="/admin/"' not in ana.get("/").content.decode()
    User.objects.filter(pk=world.ana.pk).update(is_staff=True)
    assert 'href="/admin/"' in ana.get("/").content.decode()


@pytest.mark.parametrize("name", ["400.html", "403.html", "403_csrf.html", "404.html", "500.html"])
def test_a_page_of_an_error_needs_nothing_of_the_request(name: str) -> None:
    assert "To the queue" in get_template(name).render()


# -- deciding


def test_approving_leads_back_to_the_call_and_says_what_happened(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool, {"amount": 3})
    answer = decide(ana, call, reason="Seen the photo.")
    assert (answer.status_code, answer.headers["Location"]) == (303, reverse("call", args=[call.pk]))
    shown = page(ana, call)
    assert "Approved. The call runs as soon as a worker takes it." in shown
    assert "Seen the photo." in shown
    world.run()
    assert world.moves(call) == ["proposed", "awaiting_approval", "approved", "executing", "succeeded"]


def test_rejecting_tells_the_agent_the_reason(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    decide(ana, call, "reject", reason="Ask the customer first.")
    call = world.now(call)
    assert (call.status, call.code) == ("rejected", "APPROVAL_REJECTED")
    assert "Ask the customer first." in call.message


def test_of_three_calls_alone_the_one_that_was_clicked_runs(world: World, ana: Client) -> None:
    script = Script()
    with a_tool(script) as tool:
        calls = [world.propose(tool, {"amount": amount}) for amount in (1, 2, 3)]
        decide(ana, calls[1])
        world.run()
    assert [entry.arguments.amount for entry in script.entries] == [2]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"decision": ""},
        {"decision": "yes"},
        {"decision": "APPROVE"},
        {"decision": "null"},
        {"decision": ["reject", "approve"]},
        {"decision": "approve", "decided_by": "ceo"},
        {"decision": "approve", "arguments_hash": ""},
    ],
    ids=str,
)
def test_anything_but_one_of_the_two_words_is_a_400_and_decides_nothing(
    world: World, tool: Tool, ana: Client, form: dict[str, Any]
) -> None:
    call = world.propose(tool)
    sent = {"arguments_hash": call.arguments_hash, "reason": "typed", **form}
    answer = ana.post(reverse("decide", args=[call.pk]), sent)
    assert answer.status_code == 400
    assert "typed</textarea>" in answer.content.decode()
    assert world.now(call).status == "awaiting_approval"
    assert len(world.journal(call)) == len(world.journal(world.propose(tool, {"amount": 9})))


@pytest.mark.parametrize("name", CHANGES)
def test_a_get_on_the_address_of_a_change_changes_nothing(world: World, tool: Tool, ana: Client, name: str) -> None:
    call = world.propose(tool)
    answer = ana.get(reverse(name, args=[call.pk]), {"decision": "approve", "arguments_hash": call.arguments_hash})
    assert answer.status_code == 405
    assert world.now(call).moves == call.moves


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_without_a_csrf_token_is_refused(world: World, tool: Tool, name: str) -> None:
    call = world.propose(tool)
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(world.ana)
    answer = browser.post(reverse(name, args=[call.pk]), {"decision": "approve", "arguments_hash": call.arguments_hash})
    assert answer.status_code == 403
    assert "Nothing was changed" in answer.content.decode()
    assert world.now(call).status == "awaiting_approval"


def test_signing_out_is_a_post_too(ana: Client) -> None:
    assert ana.get("/accounts/logout/").status_code == 405
    assert ana.get("/").status_code == 200
    ana.post("/accounts/logout/")
    assert ana.get("/").status_code == 302


def test_stale_arguments_are_a_409_that_keeps_the_reason_typed(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    answer = decide(ana, call, arguments_hash="0" * 64, reason="Fine <b>by me</b>")
    shown = answer.content.decode()
    assert answer.status_code == 409
    assert "These are not the arguments of this call" in shown
    assert "Fine &lt;b&gt;by me&lt;/b&gt;</textarea>" in shown
    assert call.arguments_hash in shown
    assert world.now(call).status == "awaiting_approval"


def test_who_clicks_second_learns_who_was_first_and_keeps_the_words(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    decide(ana, call)
    answer = decide(signed_in(world.bob), call, "reject", reason="Too much!")
    shown = answer.content.decode()
    assert answer.status_code == 409
    assert f"{world.ana.username} decided approve at " in shown
    assert "You had written:" in shown
    assert "Too much!" in shown
    assert world.now(call).status == "approved"


def test_the_same_click_again_is_no_conflict_and_no_second_decision(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    assert [decide(ana, call).status_code for _ in range(2)] == [303, 303]
    assert call.decisions.count() == 1
    assert decide(ana, call, "reject").status_code == 409


def test_a_click_in_a_stale_tab_on_a_cancelled_call_is_a_409(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    assert ana.post(reverse("cancel", args=[call.pk])).status_code == 303
    answer = decide(ana, call)
    assert answer.status_code == 409
    assert "The call was cancelled at " in answer.content.decode()
    assert world.now(call).code == "CANCELLED"


def test_a_click_after_the_deadline_loses_without_any_sweep(world: World, ana: Client) -> None:
    with a_tool(deadline=1) as tool:
        call = world.propose(tool)
        time.sleep(1.1)
        answer = decide(ana, call)
        assert answer.status_code == 409
        assert "The deadline passed at " in answer.content.decode()
        world.run()
    call = world.now(call)
    assert (call.status, call.code) == ("rejected", "APPROVAL_EXPIRED")


def test_too_long_a_reason_is_a_400_that_loses_no_word(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    reason = "0123456789" * 1000 + "!"
    answer = decide(ana, call, reason=reason)
    assert answer.status_code == 400
    assert f"{reason}</textarea>" in answer.content.decode()
    assert world.now(call).status == "awaiting_approval"
    assert decide(ana, call, reason=reason[:-1]).status_code == 303


def test_a_reason_with_a_null_character_is_a_fault_of_the_form(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    answer = decide(ana, call, reason="ok\0")
    assert answer.status_code == 400
    assert "Null characters are not allowed." in answer.content.decode()


@pytest.mark.parametrize("reason", ["", "\U0001f44d fine", "<b>bold</b>", "\n\n two lines \n"])
def test_a_reason_is_kept_as_it_was_typed(world: World, tool: Tool, ana: Client, reason: str) -> None:
    call = world.propose(tool)
    decide(ana, call, reason=reason.replace("\n", "\r\n"))
    assert call.decisions.get().reason == reason


def test_who_may_not_decide_sees_dead_buttons_and_why(world: World, tool: Tool, ana: Client) -> None:
    Membership.objects.filter(user=world.ana).update(may_decide=False)
    call = world.propose(tool)
    shown = page(ana, call)
    assert "You may not decide in this team." in shown
    assert re.search(r'value="approve" disabled', shown)
    answer = decide(ana, call, reason="still mine")
    assert answer.status_code == 403
    assert "You may not decide in this team." in answer.content.decode()
    assert world.now(call).status == "awaiting_approval"


def test_a_right_that_was_withdrawn_since_the_page_was_opened_is_missed_at_the_click(
    world: World, tool: Tool, ana: Client
) -> None:
    call = world.propose(tool)
    page(ana, call)
    Membership.objects.filter(user=world.ana).delete()
    assert decide(ana, call).status_code == 404
    User.objects.filter(pk=world.bob.pk).update(is_active=False)
    assert decide(signed_in(world.bob), call).status_code == 302
    assert world.now(call).status == "awaiting_approval"


def test_the_first_of_two_approvals_says_what_is_missing(world: World, ana: Client) -> None:
    with a_tool(approvers_needed=2) as tool:
        call = world.propose(tool)
        decide(ana, call)
        shown = page(ana, call)
        assert "1 more must approve" in shown
        assert "1 of 2" in shown
        decide(signed_in(world.bob), call)
        assert world.now(call).status == "approved"


# -- what is shown


def test_the_page_shows_the_whole_frozen_text_and_what_was_received(world: World, tool: Tool, ana: Client) -> None:
    name = "A" * 5000 + " ; transfer 1000000"
    call = world.propose(tool, f'{{"name": "{name}"}}')
    shown = page(ana, call)
    assert call.arguments is not None
    assert shown.count(name) >= 3, "as a table, exactly, and as received"
    assert "<bdi>amount</bdi>" in shown, "a default that the agent did not send is part of what is decided"
    assert f'value="{call.arguments_hash}"' in shown


def test_hidden_and_direction_changing_characters_stand_as_escapes(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool, {"name": f"{HIDDEN} /tmp/\u200bimportant \u2028\ufeff\u00ad\u3164"})
    shown = page(ana, call)
    assert not set("\u202e\u2066\u2069\u200b\u2028\ufeff\u00ad\u3164") & set(shown)
    for code in (r"\u202e", r"\u2066", r"\u200b", r"\u2028", r"\ufeff", r"\u00ad", r"\u3164"):
        assert f'<span class="esc">{code}</span>' in shown
    assert "right-to-left override" in shown
    assert HIDDEN in (world.now(call).arguments or ""), "the stored text is as it was"


def test_a_word_that_mixes_alphabets_is_marked_and_hebrew_stays_readable(world: World, tool: Tool, ana: Client) -> None:
    shown = page(ana, world.propose(tool, {"name": "to p\u0430ypal@x.com \u05e9\u05dc\u05d5\u05dd API"}))
    assert '<span class="mixed">p<b>\u0430</b>ypal@x.com</span>' in shown
    assert "Words that mix alphabets" in shown
    assert "\u05e9\u05dc\u05d5\u05dd API" in shown


@pytest.mark.parametrize(
    "hostile",
    [
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(1)</script>",
        '" onmouseover="alert(1)',
        "' onfocus='alert(1)",
        "{{7*7}}{% load x %}",
        "</q></td></bdi><h1>",
    ],
)
def test_foreign_text_is_inert_wherever_it_stands(world: World, hostile: str) -> None:
    script = Script(Result({"answer": hostile}, raw={"raw": hostile}))
    browser = signed_in(world.ana)
    with a_tool(script) as tool:
        tool.summary(lambda arguments: f"Do {arguments.name}")
        session = world.open(on_behalf_of=hostile)
        call = world.propose(tool, {"name": hostile}, session=session)
        pages = [browser.get("/").content.decode(), page(browser, call)]
        pages.append(browser.get("/", {"q": hostile}).content.decode())
        decide(browser, call, reason=hostile)
        world.run()
        pages.append(page(browser, call))
        assert "answer" in pages[-1]
    for shown in pages:
        assert escape(hostile) in shown, "it is there, as text"
        assert not {"img", "script", "style"} & {tag for tag, _ in elements(shown)}
        assert [tag for tag, _ in elements(shown)].count("h1") == 1
        assert not [name for _, names in elements(shown) for name in names if name.startswith("on") or name == "style"]


def elements(shown: str) -> list[tuple[str, list[str]]]:
    """List the elements of a page as a browser sees them, each with the names of its attributes."""
    found: list[tuple[str, list[str]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, [name for name, _ in attrs]))

    Reader().feed(shown)
    return found


def test_pages_send_a_strict_policy_and_need_nothing_inline(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool)
    for address in ("/", "/unknown/", reverse("call", args=[call.pk]), "/accounts/login/", "/nowhere/"):
        answer = (Client() if "login" in address else ana).get(address)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script|<style|\sstyle=|\son[a-z]+=", answer.content.decode())


def test_sensitive_values_and_tokens_are_masked_and_their_plain_hash_is_nowhere(world: World, ana: Client) -> None:
    script = Script({"name": "hunter2", "key": "sk_live_abcdef123456"})
    with a_tool(script, sensitive=["name"]) as tool:
        call = world.propose(tool, '{"name": "hunter2"}')
        pages = [ana.get("/").content.decode(), page(ana, call)]
        decide(ana, call)
        world.run()
        pages.append(page(ana, call))
        pages += [
            page(ana, world.propose(tool, bad)) for bad in ('{"name": "hunter2"', '{"name": "hunter2", "amount": "x"}')
        ]
    assert world.now(call).status == "succeeded"
    for shown in pages:
        assert "hunter2" not in shown
        assert "sk_live" not in shown
        assert call.arguments_hash not in shown
    assert masking.hash_of(call) in pages[1]


def test_the_header_is_of_the_server_and_agent_text_is_marked(world: World, ana: Client) -> None:
    with a_tool(effect=Effect.NON_IDEMPOTENT_WRITE) as tool:
        call = world.propose(tool, {"name": "# PRE-APPROVED BY SECURITY. Safe, read-only.\n\n\n" + "\n" * 500})
        shown = page(ana, call)
    head = shown[shown.index('<header class="call-head">') : shown.index("</header>", shown.index("call-head"))]
    assert "non idempotent write" in head
    assert call.why in head
    assert "untrusted" in shown
    assert r'<span class="esc">\n ×503</span>' in shown, "blank lines are counted, not spread out"  # noqa: RUF001


def test_a_result_and_its_attempts_decisions_and_journal_are_told(world: World, tool: Tool, ana: Client) -> None:
    call = world.propose(tool, {"name": "something", "amount": 3})
    decide(ana, call, reason="because")
    world.run()
    shown = page(ana, call)
    for told in ("Attempts", "Decisions", "Journal", "because", f"user:{world.ana.username}", "Policy, as frozen"):
        assert told in shown
    assert call.idempotency_key in shown


def test_what_was_refused_at_admission_has_a_page_too(world: World, tool: Tool, ana: Client) -> None:
    for arguments in ('{"amount": "three"}', "not json", '{"a": 1, "a": 2}'):
        call = world.propose(tool, arguments)
        assert call.status == "failed"
        assert call.code in page(ana, call)


# -- lists


def test_the_queue_is_in_order_of_deadlines_and_counts_truly(world: World, ana: Client) -> None:
    with a_tool(deadline=9000) as late, a_tool(deadline=100) as soon, a_tool(deadline="none") as never:
        for tool in (never, late, soon):
            world.propose(tool)
        shown = ana.get("/").content.decode()
    places = [shown.index(f'<span class="mono"><bdi>{tool.name}</bdi>') for tool in (soon, late, never)]
    assert places == sorted(places)
    assert '<span class="count">3</span>' in shown


def test_the_queue_pages_by_key_and_stays_cheap(world: World, tool: Tool, ana: Client) -> None:
    ids = {str(world.propose(tool, {"amount": number}, turn=f"turn-{number % 7}").pk) for number in range(60)}
    with CaptureQueriesContext(
        connection,
    ) as asked:
        first = ana.get("/").content.decode()
    assert len(asked) <= 10
    assert not any(f'"{body}"' in query["sql"] for query in asked for body in ("received", "raw_result", "result"))
    cursor = re.search(r'rel="next" href="\?(cursor=[^"]+)"', first)
    assert cursor
    second = ana.get("/?" + cursor[1]).content.decode()
    pages = [set(re.findall(r'row-title"><a href="/calls/([0-9a-f-]+)/', shown)) for shown in (first, second)]
    assert [len(each) for each in pages] == [50, 10]
    assert pages[0] | pages[1] == ids
    assert "60" in first


@pytest.mark.parametrize("cursor", ["x", "bnVsbA", "WyIyMDI2LTEzLTAxIiwieCJd", "%00"])
def test_a_cursor_that_was_not_made_here_is_a_400(ana: Client, cursor: str) -> None:
    assert ana.get(f"/?cursor={cursor}").status_code == 400
    assert ana.get(f"/unknown/?cursor={cursor}").status_code == 400


def test_the_queue_narrows_by_tool_agent_session_and_text(world: World, ana: Client) -> None:
    with a_tool() as one, a_tool() as other:
        one.summary(lambda arguments: f"Do {arguments.name}")
        call, rest = world.propose(one, {"name": "lamps"}), world.propose(other, session=world.open())
        for asked in ({"tool": one.name}, {"session": world.session.session_id}, {"q": "lamps"}):
            shown = ana.get("/", asked).content.decode()
            assert (str(call.pk) in shown, str(rest.pk) in shown) == (True, False), asked
        assert "No waiting call matches" in ana.get("/", {"agent": "nobody"}).content.decode()
        assert ana.get("/", {"q": "\0"}).status_code == 400


def test_amounts_stand_with_their_exact_number(world: World, ana: Client) -> None:
    with a_tool(measures={"amount_cents": lambda a: a.amount}) as tool:
        world.propose(tool, {"amount": 123456})
        shown = ana.get("/").content.decode()
    assert "1,234.56" in shown
    assert "(123456)" in shown


# -- unknown outcomes


@pytest.fixture
def doubtful() -> Iterator[Tool]:
    """Give a single-attempt tool whose answer is lost the first time."""
    with a_tool(Script(InDoubt("The line broke."), {"done": True}), effect=Effect.NON_IDEMPOTENT_WRITE) as made:
        yield made


def test_open_unknown_outcomes_are_listed_with_what_it_takes_to_look_them_up(
    world: World, doubtful: Tool, ana: Client
) -> None:
    call = unknown_call(world, doubtful, amount=7)
    shown = ana.get("/unknown/").content.decode()
    for told in (call.idempotency_key, doubtful.name, "CONNECTION_LOST", "1 attempt,", "0 late results"):
        assert told in shown
    assert '<span class="count alarm">1<' in ana.get("/").content.decode()
    assert str(call.pk) not in signed_in(a_world().ana).get("/unknown/").content.decode()


def test_an_outcome_is_settled_with_evidence_and_a_result(world: World, doubtful: Tool, ana: Client) -> None:
    call = unknown_call(world, doubtful)
    address = reverse("settle", args=[call.pk])
    for form in ({}, {"verdict": "took_effect", "evidence": "  "}, {"verdict": "maybe", "evidence": "e"}):
        assert ana.post(address, form).status_code == 400
    assert world.now(call).status == "outcome_unknown"
    form = {"verdict": "took_effect", "evidence": "Receipt 12.", "result": '{"receipt": 12}'}
    assert ana.post(address, form).status_code == 303
    call = world.now(call)
    assert (call.status, call.code, call.result) == ("succeeded", "CONFIRMED_DONE", '{"receipt":12}')
    shown = page(ana, call)
    assert "Settled: it took effect." in shown
    assert "Receipt 12." in shown


@pytest.mark.parametrize("result", ['{"a": 1, "a": 2}', "NaN", "{", '"\\u0000"'])
def test_a_result_that_is_no_strict_json_is_refused_and_kept_in_the_form(
    world: World, doubtful: Tool, ana: Client, result: str
) -> None:
    call = unknown_call(world, doubtful)
    form = {"verdict": "took_effect", "evidence": "Receipt 12.", "result": result}
    answer = ana.post(reverse("settle", args=[call.pk]), form)
    assert answer.status_code == 400
    assert "Receipt 12.</textarea>" in answer.content.decode()
    assert world.now(call).status == "outcome_unknown"


def test_what_did_not_take_effect_has_no_result(world: World, doubtful: Tool, ana: Client) -> None:
    call = unknown_call(world, doubtful)
    form = {"verdict": "did_not_take_effect", "evidence": "Not there.", "result": "{}"}
    assert ana.post(reverse("settle", args=[call.pk]), form).status_code == 400
    assert ana.post(reverse("settle", args=[call.pk]), {**form, "result": ""}).status_code == 303
    assert world.now(call).code == "CONFIRMED_NOT_DONE"


def test_a_note_leaves_the_outcome_unknown(world: World, doubtful: Tool, ana: Client) -> None:
    call = unknown_call(world, doubtful)
    ana.post(reverse("settle", args=[call.pk]), {"verdict": "still_unknown", "evidence": "Asked the bank."})
    shown = page(ana, call)
    assert "The outcome stays unknown." in shown
    assert "Asked the bank." in shown


def test_another_run_takes_the_right_and_a_reason(world: World, doubtful: Tool, ana: Client) -> None:
    call = unknown_call(world, doubtful)
    address = reverse("run_again", args=[call.pk])
    Membership.objects.filter(user=world.bob).update(may_run_again=False)
    assert signed_in(world.bob).post(address, {"evidence": "why not"}).status_code == 403
    assert ana.post(address, {"evidence": ""}).status_code == 400
    assert world.now(call).status == "outcome_unknown"
    assert ana.post(address, {"evidence": "The bank says no."}).status_code == 303
    world.run()
    assert world.now(call).status == "succeeded"
    assert signed_in(world.bob).post(reverse("settle", args=[call.pk]), {
        "verdict": "took_effect", "evidence": "too late"
    }).status_code == 409  # fmt: skip


# -- the text itself


def test_a_text_without_anything_odd_stays_as_it_is() -> None:
    assert (
        text.visible("Refund 25.90, please: ação, 日本語, עברית")
        == "<bdi>Refund 25.90, please: ação, 日本語, עברית</bdi>"
    )
    assert not text.oddities("Refund 25.90, please: ação, 日本語, עברית, Tシャツ")


def test_every_string_of_an_exact_text_is_isolated() -> None:
    assert text.exact('{"a":"<b>","c":[1]}') == '{"<bdi>a</bdi>":"<bdi>&lt;b&gt;</bdi>","<bdi>c</bdi>":[1]}'
    assert text.exact('{"a\\"b":1') == '{"<bdi>a\\&quot;b</bdi>":1'
    assert text.exact('{"open') == '{"<bdi>open</bdi>'


def test_a_text_of_a_megabyte_of_hidden_characters_is_shown_in_a_moment() -> None:
    began = time.monotonic()
    shown = text.exact('"' + "\u200b" * 300_000 + "a\u202e" * 100_000 + '"' * 100_000)
    assert "\u202e" not in shown
    assert time.monotonic() - began < 5


def test_a_tree_shows_every_key_at_every_depth() -> None:
    value: Any = "the end"
    for depth in range(30):
        value = {f"key{depth}": value, "empty": [], "list": [1, None, "x"]}
    shown = text.tree(value)
    assert all(f"key{depth}<" in shown for depth in range(30))
    assert "the end" in shown
    assert "null" in shown
