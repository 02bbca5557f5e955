"""The scripted agent of ``make demo``: it speaks REST like any agent, and knows nothing of what is behind it.

``Story`` is what the agent does and what should come of it; ``Agent``, ``Operator`` and ``Shop`` are HTTP
clients of three doors: the agents' API, the operators' (a session with CSRF), the order service itself.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import httpx

Call = dict[str, Any]
Say = Callable[[str], None]

UNFINISHED = frozenset({"awaiting_approval", "approved", "executing"})
WITHIN = 60.0
TOOLS = ("get_order", "refund_order", "cancel_order")
"""What the agent may use; ``notify_customer`` is not among it."""


class DemoError(Exception):
    """A door that answered otherwise than it should; the text says which and what."""


@dataclass(frozen=True)
class Orders:
    """The three orders of one run: new each time, so that runs on the same data do not meet."""

    damaged: str
    regretted: str
    lost: str

    @staticmethod
    def new() -> "Orders":
        """Name three orders after the clock."""
        number = time.time_ns() // 100_000_000
        return Orders(f"ORD-{number}1", f"ORD-{number}2", f"ORD-{number}3")


@dataclass(frozen=True)
class Step:
    """One call the agent proposes, and what should come of it.

    status, code: at the end. decision: a person's answer, with its ``reason``; empty where nobody is asked.
    after: the call that must have ended before; empty: none.
    """

    name: str
    says: str
    tool: str
    arguments: dict[str, Any]
    status: str
    code: str
    decision: Literal["", "approve", "reject"] = ""
    reason: str = ""
    after: str = ""
    replayed: bool = False


@dataclass(frozen=True)
class Effects:
    """What the order service itself must say about one order: refunds (cents), cancellations, requests."""

    order_id: str
    refunds: tuple[int, ...] = ()
    cancellations: int = 0
    refund_requests: int = 0


class Story:
    """The whole plot over three orders."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        damaged, regretted, lost = orders.damaged, orders.regretted, orders.lost
        refund = {"order_id": damaged, "amount_cents": 2590, "currency": "BRL", "reason": "damaged"}
        self.steps = (
            Step("read", "looks the order up", "get_order", {"order_id": damaged}, "succeeded", "OK"),
            Step(
                "slip",
                "asks for a refund of 25.90, where cents are meant",
                "refund_order",
                {**refund, "amount_cents": 25.90},
                "failed",
                "INVALID_ARGUMENTS",
            ),
            Step(
                "refund",
                "corrects itself to 2590",
                "refund_order",
                refund,
                "succeeded",
                "OK",
                decision="approve",
                reason="The photo shows the damage.",
            ),
            Step("twice", "repeats itself", "refund_order", refund, "failed", "DUPLICATE_IN_PROGRESS"),
            Step(
                "invented",
                "asks for an order that does not exist",
                "get_order",
                {"order_id": f"{damaged}00"},
                "failed",
                "ORDER_NOT_FOUND",
            ),
            Step(
                "forbidden",
                "tries a tool it may not use",
                "notify_customer",
                {"customer_id": "CUS-1", "message": "Your refund is on its way."},
                "failed",
                "TOOL_NOT_ALLOWED",
            ),
            Step(
                "currency",
                "asks for a refund in the wrong currency",
                "refund_order",
                {**refund, "currency": "USD"},
                "failed",
                "CURRENCY_MISMATCH",
            ),
            Step(
                "cancel",
                "asks to cancel another order",
                "cancel_order",
                {"order_id": regretted, "reason": "The customer seems unsure."},
                "rejected",
                "APPROVAL_REJECTED",
                decision="reject",
                reason="Ask the customer first.",
            ),
            Step(
                "lost",
                "asks for a full refund, whose answer the order service will lose after committing it",
                "refund_order",
                {"order_id": lost, "amount_cents": 4500, "currency": "USD", "reason": "not_delivered"},
                "succeeded",
                "OK",
                decision="approve",
                reason="The parcel came back.",
            ),
            Step(
                "again",
                "asks once more for the same refund",
                "refund_order",
                refund,
                "succeeded",
                "OK",
                after="refund",
                replayed=True,
            ),
        )
        self.effects = (
            Effects(damaged, refunds=(2590,), refund_requests=1),
            Effects(regretted),
            Effects(lost, refunds=(4500,), refund_requests=2),
        )

    def prepare(self, shop: "Shop") -> None:
        """Add the three orders and script the one lost answer."""
        shop.add_order(self.orders.damaged, "CUS-1", "BRL", 12_000)
        shop.add_order(self.orders.regretted, "CUS-1", "BRL", 8_000)
        shop.add_order(self.orders.lost, "CUS-2", "USD", 4_500)
        shop.lose_one_answer(self.orders.lost)


def _checked(response: httpx.Response) -> Any:
    if not response.is_success:
        request = response.request
        raise DemoError(f"{request.method} {request.url.path} answered {response.status_code}: {response.text[:500]}")
    return response.json()


class Shop:
    """The order service, asked past the product: what did it really do?"""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=10)

    def add_order(self, order_id: str, customer_id: str, currency: str, total_cents: int) -> None:
        """Add an order."""
        order = {"order_id": order_id, "customer_id": customer_id, "currency": currency}
        _checked(self._http.post("/orders", json={**order, "total_cents": total_cents}))

    def lose_one_answer(self, order_id: str) -> None:
        """Make it lose the answer of the next refund of an order, after committing it."""
        _checked(self._http.post("/switches", json={"path": "refunds", "behaviour": "lose_answer", "order": order_id}))

    def effects(self, order_id: str) -> Effects:
        """Count what it did to an order, and how often it was asked for a refund of it."""
        done = _checked(self._http.get("/effects", params={"order": order_id}))
        arrived = _checked(self._http.get("/requests"))["requests"]
        return Effects(
            order_id,
            refunds=tuple(each["amount_cents"] for each in done["effects"] if each["kind"] == "refund"),
            cancellations=done["counts"]["cancellation"],
            refund_requests=sum((each["path"], each["subject"]) == ("refunds", order_id) for each in arrived),
        )

    def close(self) -> None:
        """Hang up."""
        self._http.close()


class Agent:
    """An API client with a key and one session."""

    def __init__(self, url: str, key: str, *, session: str) -> None:
        self.url, self.session = url, session
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=30, headers={"Authorization": f"Bearer {key}"})

    def open(self) -> None:
        """Open the session, with budgets a person would give such a task."""
        body = {
            "session_id": self.session,
            "on_behalf_of": "a customer in the chat",
            "budgets": {"calls": 40, "turns": 40},
        }
        _checked(self._http.post("/api/v1/sessions", json=body))

    def propose(self, step: Step) -> Call:
        """Propose one call in a turn of its own."""
        call = {"tool_call_id": f"call-{step.name}", "tool": step.tool, "arguments": step.arguments}
        path = f"/api/v1/sessions/{self.session}/turns/turn-{step.name}/calls"
        return self._only(_checked(self._http.post(path, json={"calls": [call]})))

    def read(self, call: Call, *, wait: int = 0) -> Call:
        """Read a call again; with ``wait``, up to so many seconds for its end."""
        read: Call = _checked(self._http.get(f"/api/v1/calls/{call['id']}", params={"wait": wait} if wait else {}))
        return read

    def acknowledge(self, call: Call) -> None:
        """Tell the system that the result arrived."""
        path = f"/api/v1/sessions/{self.session}/turns/{call['turn_id']}/acknowledge"
        response = self._http.post(path, json={"tool_call_ids": [call["tool_call_id"]]})
        if not response.is_success:
            _checked(response)

    def close(self) -> None:
        """Hang up; the session stays open."""
        self._http.close()

    @staticmethod
    def _only(answer: Any) -> Call:
        call: Call = answer["calls"][0]
        if "status" not in call or call["status"] == 422:
            raise DemoError(f"the call was not admitted: {call}")
        return call


class Operator:
    """A person's browser, without the person: signs in through the form, decides over HTTP."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=30, headers={"Referer": f"{url}/"})

    def sign_in(self, username: str, password: str) -> None:
        """Fill in the login form."""
        page = self._http.get("/accounts/login/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        if not token:
            raise DemoError(f"the login page answered {page.status_code} without a form")
        form = {"csrfmiddlewaretoken": token[1], "username": username, "password": password}
        answer = self._http.post("/accounts/login/", data=form)
        if answer.status_code != 302 or "sessionid" not in self._http.cookies:
            raise DemoError(f"{username} could not sign in: the form answered {answer.status_code}")

    def waiting(self) -> Iterator[Call]:
        """List the calls that wait for a decision, page after page."""
        page: dict[str, Any] = {"next": ""}
        while page["next"] is not None:
            page = _checked(self._http.get("/api/v1/approvals", params={"cursor": page["next"]}))
            yield from page["calls"]

    def decide(self, call: Call, decision: str, reason: str) -> Call:
        """Approve or reject exactly the arguments that were shown."""
        body = {"arguments_hash": call["arguments_hash"], "reason": reason}
        headers = {"X-CSRFToken": self._http.cookies["csrftoken"]}
        path = f"/api/v1/approvals/{call['id']}/{decision}"
        decided: Call = _checked(self._http.post(path, json=body, headers=headers))
        return decided

    def close(self) -> None:
        """Hang up."""
        self._http.close()


@dataclass
class Run:
    """One performance of the story: what became of each step."""

    story: Story
    agent: Agent
    shop: Shop
    say: Say
    calls: dict[str, Call] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Have the agent propose everything that depends on nothing."""
        self.story.prepare(self.shop)
        self.agent.open()
        self.say(f"The agent opens the session {self.agent.session}.")
        for step in self.story.steps:
            if not step.after:
                self._propose(step)

    def go_on(self) -> bool:
        """Read what is unfinished and propose what may follow; False once nothing is left."""
        for step in self.story.steps:
            call = self.calls.get(step.name)
            if call is None and self.calls[step.after]["status"] not in UNFINISHED:
                self._propose(step)
            elif call and call["status"] in UNFINISHED:
                self.calls[step.name] = self.agent.read(call)
                self._tell(step)
        return len(self.told) < len(self.story.steps)

    def decide_all(self, operator: Operator) -> None:
        """Have the operator find the calls in the queue and answer each as the story says."""
        steps = {self.calls[step.name]["id"]: step for step in self.story.steps if step.decision}
        for waiting in [call for call in operator.waiting() if call["id"] in steps]:
            step = steps.pop(waiting["id"])
            verb = {"approve": "approves", "reject": "rejects"}[step.decision]
            shown = _words(waiting["tool"], waiting["arguments"])
            self.say(f"The operator {verb} {shown}: {step.reason}")
            operator.decide(waiting, step.decision, step.reason)
        if steps:
            raise DemoError(f"not in the operator's queue: {', '.join(step.name for step in steps.values())}")

    def _propose(self, step: Step) -> None:
        self.say(f"The agent {step.says}:")
        call = self.agent.propose(step)
        # What needs nobody is over in a moment; what a person must answer is not waited for.
        until = time.monotonic() + WITHIN
        while call["status"] in UNFINISHED - {"awaiting_approval"} and time.monotonic() < until:
            call = self.agent.read(call, wait=5)
        self.calls[step.name] = call
        self.say(f"    {_words(step.tool, step.arguments)}")
        if call["status"] in UNFINISHED:
            self.say(f"    waits: {call['status']}")
        else:
            self._tell(step)

    def _tell(self, step: Step) -> None:
        call = self.calls[step.name]
        if call["status"] in UNFINISHED:
            return
        self.told.add(step.name)
        if step.decision:
            self.say(f"The agent reads the outcome of {_words(step.tool, step.arguments)}:")
        replayed = ", replayed: the tool did not run" if call["replayed"] else ""
        self.say(f"    {call['status']} / {call['code']}{replayed}")
        for line in _details(call):
            self.say(f"      {line}")
        self.agent.acknowledge(call)

    def faults(self) -> list[str]:
        """Compare every call and every effect with the story; one line per difference."""
        found = []
        for step in self.story.steps:
            call = self.calls.get(step.name)
            if call is None:
                found.append(f"{step.name}: was never proposed")
                continue
            got = (call["status"], call["code"], call["replayed"])
            if got != (step.status, step.code, step.replayed):
                found.append(f"{step.name}: {got} instead of {(step.status, step.code, step.replayed)}")
            if step.code not in ("OK", "ORDER_NOT_FOUND") and call["attempts"]:
                found.append(f"{step.name}: the tool ran, though it must not")
        for expected in self.story.effects:
            got_effects = self.shop.effects(expected.order_id)
            if got_effects != expected:
                found.append(f"{expected.order_id}: {got_effects} instead of {expected}")
        return found

    def table(self, *, judged: bool) -> str:
        """Show each call's end and what the shop did; ``judged``: whether as expected."""
        rows: list[tuple[str, ...]] = [("call", "tool", "status", "code", "attempts", "as expected")]
        for step in self.story.steps:
            call = self.calls.get(step.name)
            if call is None:
                rows.append((step.name, step.tool, "never proposed", "", "", "NO"))
                continue
            as_told = (call["status"], call["code"], call["replayed"]) == (
                step.status,
                step.code,
                step.replayed,
            )
            code = f"{call['code']} (replayed)" if call["replayed"] else call["code"]
            attempts = str(len(call["attempts"]))
            rows.append((step.name, step.tool, call["status"], code, attempts, "yes" if as_told else "NO"))
        counted: list[tuple[str, ...]] = [("order", "refund requests", "refunds made", "cancellations", "as expected")]
        for expected in self.story.effects:
            effects = self.shop.effects(expected.order_id)
            made = ", ".join(f"{cents} cents" for cents in effects.refunds) or "none"
            requests, cancellations = str(effects.refund_requests), str(effects.cancellations)
            met = "yes" if effects == expected else "NO"
            counted.append((expected.order_id, requests, made, cancellations, met))
        if not judged:
            rows, counted = [row[:-1] for row in rows], [row[:-1] for row in counted]
        return f"{_aligned(rows)}\n\nBy the order service's own count:\n\n{_aligned(counted)}"


def _words(tool: str, arguments: dict[str, Any]) -> str:
    return f"{tool}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _details(call: Call) -> Iterator[str]:
    if call["message"]:
        yield str(call["message"])
    if call["status"] == "succeeded" and call["result"] is not None:
        yield f"result: {call['result']}"
    for attempt in call["attempts"] if len(call["attempts"]) > 1 else ():
        yield f"attempt {attempt['number']}: {attempt['state']} {attempt['code'] or ''}".rstrip()
    for decision in (call["approval"] or {}).get("decisions", ()):
        yield f"a person said {decision['decision']}: {decision['reason']}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths).rstrip())
    return "\n".join(lines)


def session_name() -> str:
    """A session's name that no earlier run used."""
    return f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
