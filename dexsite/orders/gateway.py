"""The shop's order service: a real HTTP process with a store of its own.

It stands for any service that an agent's tools act on. Refunds take an idempotency key, cancellations and
notifications take none. What it did is committed, and synced to disk, before it answers, so its count of
effects is true after a kill or a restart. Scripted *switches* make it misbehave in one counted way each, and
tests assert on what it then really did.

Run it with ``python -m dexsite.orders.gateway --port 8001 --data orders.sqlite3``. Port 0 takes a free one;
the first line printed names it. It needs nothing outside the standard library.

=====================================  ===================================================================
``GET /orders/{id}``                   the order, what was refunded of it (cents), and its status
``POST /orders``                       ``{order_id, customer_id, currency, total_cents}``, or a list
``POST /orders/{id}/refunds``          ``{amount_cents, currency}`` under the header ``Idempotency-Key``
``GET /refunds?key=``                  the refund made under a key, or null
``POST /orders/{id}/cancellations``    takes no key: each call is one more effect
``POST /customers/{id}/notifications`` ``{message}``; takes no key: each call is one more effect
``GET /effects``                       counts and a list; filters: kind, order, customer, key; limit
``GET /requests``                      what arrived since the start or the last reset, whatever came of it
``POST``/``GET``/``DELETE /switches``  script a behaviour; see what is left, how often each fired; clear
``POST /reset``                        back to the two seeded orders, without effects and switches
=====================================  ===================================================================

A refusal is ``{code, message}``. The answers 429 and 503 carry ``nothing_done: true`` where the service
promises that it did nothing; a 503 without these words promises nothing.
"""

import argparse
import json
import re
import signal
import socket
import sqlite3
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

Body = dict[str, Any]

BODY_LIMIT = 4 * 1024 * 1024
REQUESTS_KEPT = 20_000
CURRENCIES = ("BRL", "USD", "EUR")
SEEDS = (("ORD-1001", "CUS-1", "BRL", 12_000), ("ORD-1002", "CUS-2", "USD", 4_500))
RECEIPTS = {"refund": "RF", "cancellation": "CN", "notification": "NT"}

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    order_id TEXT PRIMARY KEY, customer_id TEXT NOT NULL, currency TEXT NOT NULL,
    total_cents INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS orders_by_customer ON orders (customer_id);
CREATE TABLE IF NOT EXISTS effects (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, order_id TEXT, customer_id TEXT,
    key TEXT UNIQUE, amount_cents INTEGER, currency TEXT, note TEXT, at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS effects_by_order ON effects (order_id, kind);
"""


class RefusedError(Exception):
    """Answer with a status and a code; nothing was done."""

    def __init__(self, status: int, code: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body: Body = {"code": code, "message": message, **extra}


class Store:
    """Keep orders and effects in one SQLite file, each effect on disk when its verb returns."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(file, timeout=30, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(SCHEMA)
        with self._writing() as db:
            db.executemany("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?)", SEEDS)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._db

    def order(self, order_id: str) -> Body:
        """Show an order with its refunded sum (cents) and its status."""
        with self._reading() as db:
            order = _order(db, order_id)
            cancelled = db.execute(
                "SELECT count(*) FROM effects WHERE order_id = ? AND kind = 'cancellation'", (order_id,)
            ).fetchone()[0]
            refunded = _refunded(db, order_id)
        if cancelled:
            status = "cancelled"
        elif refunded == order["total_cents"]:
            status = "refunded"
        else:
            status = "paid"
        return {**order, "refunded_cents": refunded, "status": status}

    def add_orders(self, orders: list[Body]) -> tuple[int, Body]:
        """Add orders: 201 if any was new, 200 if none; an ID with another body is a 409."""
        rows = [_new_order(order) for order in orders]
        added = 0
        with self._writing() as db:
            for row in rows:
                added += db.execute("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?)", row).rowcount
                if tuple(_order(db, row[0]).values()) != row:
                    raise RefusedError(409, "order_exists", f"Another order has the ID {row[0]}.")
        return (201 if added else 200), {"added": added, "orders": [row[0] for row in rows]}

    def refund(self, order_id: str, *, key: str | None, body: Body) -> tuple[int, Body]:
        """Refund once per key: 201, and from then on 200 with the first answer, ``repeated``."""
        if not key:
            raise RefusedError(400, "key_required", "A refund needs the header Idempotency-Key.")
        amount, currency = _amount(body.get("amount_cents")), body.get("currency")
        with self._writing() as db:
            if first := _refund_under(db, key):
                asked = {"order_id": order_id, "amount_cents": amount, "currency": currency}
                if not asked.items() <= first.items():
                    raise RefusedError(422, "key_reused", "This key was used for another refund.")
                return 200, {**first, "repeated": True}
            order = _order(db, order_id)
            left = order["total_cents"] - _refunded(db, order_id)
            if currency != order["currency"]:
                raise RefusedError(422, "currency_mismatch", f"The order is in {order['currency']}.")
            if left == 0:
                raise RefusedError(409, "already_refunded", "The order is refunded in full already.")
            if amount > left:
                raise RefusedError(409, "exceeds_total", f"Only {left} cents of the order are left to refund.")
            made = {"order_id": order_id, "amount_cents": amount, "currency": currency, "key": key}
            made |= _record(db, "refund", **made)
        return 201, {**made, "repeated": False}

    def find_refund(self, key: str) -> Body:
        """Look a refund up by its key: ``{key, refund}``, the refund null where there is none."""
        with self._reading() as db:
            return {"key": key, "refund": _refund_under(db, key)}

    def cancel(self, order_id: str, *, body: Body) -> tuple[int, Body]:
        """Cancel an order, again if it is cancelled already: the service takes no key for it."""
        with self._writing() as db:
            _order(db, order_id)
            made = _record(db, "cancellation", order_id=order_id, note=_text(body.get("reason", "")))
        return 201, {**made, "order_id": order_id}

    def notify(self, customer_id: str, *, body: Body) -> tuple[int, Body]:
        """Send a customer a message, again if the same was sent already."""
        message = _text(body.get("message"))
        with self._writing() as db:
            if not db.execute("SELECT 1 FROM orders WHERE customer_id = ?", (customer_id,)).fetchone():
                raise RefusedError(404, "customer_not_found", f"There is no customer {customer_id}.")
            made = _record(db, "notification", customer_id=customer_id, note=message)
        return 201, {**made, "customer_id": customer_id}

    def effects(self, *, filters: dict[str, str], limit: int) -> Body:
        """Count effects per kind and list the first of them (``limit``; -1 lists all)."""
        columns = {"kind": "kind", "order": "order_id", "key": "key", "customer": "customer_id"}
        if unknown := set(filters) - set(columns):
            raise RefusedError(400, "unknown_filter", f"Unknown filter: {', '.join(sorted(unknown))}.")
        where = " AND ".join(["1", *(f"{columns[name]} = ?" for name in filters)])
        values = tuple(filters.values())
        with self._reading() as db:
            by_kind = db.execute(f"SELECT kind, count(*) FROM effects WHERE {where} GROUP BY kind", values)
            counts = dict.fromkeys(RECEIPTS, 0) | dict(by_kind.fetchall())
            listing = f"SELECT * FROM effects WHERE {where} ORDER BY id LIMIT ?"
            rows = db.execute(listing, (*values, limit)).fetchall()
        listed = [{**dict(row), "receipt_id": _receipt(row["kind"], row["id"])} for row in rows]
        return {"counts": counts, "total": sum(counts.values()), "effects": listed}

    def reset(self) -> None:
        """Forget every effect and every order but the seeds."""
        with self._writing() as db:
            db.execute("DELETE FROM effects")
            db.execute("DELETE FROM orders")
            db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", SEEDS)


def _order(db: sqlite3.Connection, order_id: str) -> Body:
    row = db.execute("SELECT * FROM orders WHERE order_id = ?", (order_id,)).fetchone()
    if row is None:
        raise RefusedError(404, "order_not_found", f"There is no order {order_id}.")
    return dict(row)


def _refunded(db: sqlite3.Connection, order_id: str) -> int:
    row = db.execute(
        "SELECT sum(amount_cents) FROM effects WHERE order_id = ? AND kind = 'refund'", (order_id,)
    ).fetchone()
    return int(row[0] or 0)


def _refund_under(db: sqlite3.Connection, key: str) -> Body | None:
    row = db.execute(
        "SELECT id, order_id, amount_cents, currency, key, at FROM effects WHERE key = ?", (key,)
    ).fetchone()
    return {"receipt_id": _receipt("refund", row["id"]), **dict(row)} if row else None


def _record(db: sqlite3.Connection, kind: str, **values: Any) -> Body:
    """Write an effect down and give its receipt: ``{receipt_id, id, at}``."""
    values |= {"kind": kind, "at": datetime.now(UTC).isoformat()}
    insert = f"INSERT INTO effects ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
    db.execute(insert, tuple(values.values()))
    effect_id = int(db.execute("SELECT last_insert_rowid()").fetchone()[0])
    return {"receipt_id": _receipt(kind, effect_id), "id": effect_id, "at": values["at"]}


def _receipt(kind: str, effect_id: int) -> str:
    return f"{RECEIPTS[kind]}-{effect_id}"


def _amount(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**53:
        raise RefusedError(422, "invalid_amount", "amount_cents must be a whole number of cents above 0.")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 10_000:
        raise RefusedError(422, "invalid_text", "A text of at most 10,000 characters is needed.")
    return value


def _new_order(order: Body) -> tuple[str, str, str, int]:
    if not isinstance(order, dict) or not {"order_id", "customer_id", "currency", "total_cents"} == set(order):
        raise RefusedError(422, "invalid_order", "An order is {order_id, customer_id, currency, total_cents}.")
    if order["currency"] not in CURRENCIES:
        raise RefusedError(422, "invalid_order", f"The currency must be one of {', '.join(CURRENCIES)}.")
    return (
        _text(order["order_id"]),
        _text(order["customer_id"]),
        order["currency"],
        _amount(order["total_cents"]),
    )


PATHS = ("orders", "refunds", "lookup", "cancellations", "notifications")
BEHAVIOURS = {
    "slow": "waits, then does it and answers",
    "hang": "waits and drops the connection; does nothing",
    "close_before": "drops the connection at once; does nothing",
    "refuse": "409 with `code` (default `refused`); does nothing",
    "busy_503": "503 with the promise that nothing was done, and Retry-After",
    "busy_429": "429 with the promise that nothing was done, and Retry-After",
    "bare_503": "503 without a promise; does nothing",
    "unauthorized_401": "401; does nothing",
    "invalid_422": "422; does nothing",
    "lose_answer": "does it, then resets the connection",
    "commit_then_hang": "does it, waits and drops the connection",
    "error_500_after": "does it, then answers 500",
    "garbled_200": "does it, then answers 200 with a page that is no answer of this API",
}


@dataclass
class Switch:
    """One scripted behaviour: how often, how long (seconds), and for whom.

    It fits a request of its ``path`` whose key contains ``key`` and whose URL names ``order`` (or customer).
    """

    path: str
    behaviour: str
    times: int = 1
    seconds: float = 30.0
    retry_after: float = 1
    code: str = "refused"
    key: str = ""
    order: str = ""
    left: int = 0
    fired: int = 0

    def fits(self, path: str, *, key: str, subject: str) -> bool:
        """Tell whether the switch is meant for this request."""
        return self.left > 0 and path == self.path and self.key in key and self.order in ("", subject)


class Switches:
    """Hand each request at most one scripted behaviour: the oldest that fits and is not used up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._switches: list[Switch] = []

    def add(self, body: Body) -> None:
        """Add a switch; unknown words are a 422."""
        if set(body) - {"path", "behaviour", "times", "seconds", "retry_after", "code", "key", "order"}:
            raise RefusedError(422, "invalid_switch", "Unknown field in a switch.")
        if body.get("path") not in PATHS or body.get("behaviour") not in BEHAVIOURS:
            words = f"path: {', '.join(PATHS)}; behaviour: {', '.join(BEHAVIOURS)}."
            raise RefusedError(422, "invalid_switch", words)
        switch = Switch(**body)
        switch.left = switch.times = _amount(switch.times)
        with self._lock:
            self._switches.append(switch)

    def take(self, path: str, *, key: str, subject: str) -> Switch | None:
        """Use up one turn of the first switch that fits."""
        with self._lock:
            for switch in self._switches:
                if switch.fits(path, key=key, subject=subject):
                    switch.left -= 1
                    switch.fired += 1
                    return switch
        return None

    def show(self) -> Body:
        """List the switches with what is left and how often each fired."""
        with self._lock:
            return {"switches": [asdict(switch) for switch in self._switches]}

    def clear(self) -> None:
        """Forget all switches."""
        with self._lock:
            self._switches.clear()


class Server(ThreadingHTTPServer):
    """Serve the API, one thread per connection."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], store: Store) -> None:
        super().__init__(address, Handler)
        self.store = store
        self.switches = Switches()
        self.requests: deque[Body] = deque(maxlen=REQUESTS_KEPT)

    def server_bind(self) -> None:
        # The base class asks the name server for this host's full name, which can take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def shutdown_request(self, request: Any) -> None:
        # Without the polite shutdown of the base class, so that a dropped connection is seen as a reset.
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class DroppedError(Exception):
    """End the connection without an answer."""

    def __init__(self, *, reset: bool) -> None:
        super().__init__()
        self.reset = reset


class Handler(BaseHTTPRequestHandler):
    """Translate HTTP into one verb of the store, bent by a switch if one fits."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 600
    server: Server

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        pass

    def _serve(self) -> None:
        try:
            status, body, headers = self._handled()
        except DroppedError as dropped:
            self.close_connection = True
            if dropped.reset:
                no_linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            return
        self._answer(status, body, headers)

    def _handled(self) -> tuple[int, Body | str, dict[str, str]]:
        try:
            body = self._body()
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            for method, pattern, name, verb in ROUTES:
                if method == self.command and (match := pattern.fullmatch(url.path)):
                    subject = unquote(match[1]) if match.groups() else ""
                    request = Request(subject, query, body, self.headers.get("Idempotency-Key", ""))
                    return self._bent(name, request, partial(verb, self.server, request))
            raise RefusedError(404, "no_such_route", f"There is no {self.command} {url.path}.")
        except RefusedError as refusal:
            return refusal.status, refusal.body, {}

    def _bent(
        self, name: str, request: "Request", verb: Callable[[], tuple[int, Body]]
    ) -> tuple[int, Body | str, dict[str, str]]:
        if name not in PATHS:
            return *verb(), {}
        key = request.key or request.query.get("key", "")
        switch = self.server.switches.take(name, key=key, subject=request.subject)
        behaviour = switch.behaviour if switch else ""
        arrived = {"path": name, "subject": request.subject, "key": key, "behaviour": behaviour}
        self.server.requests.append({**arrived, "at": datetime.now(UTC).isoformat()})
        if switch is None:
            return *verb(), {}
        promise = {"code": "busy", "message": "Busy; nothing was done.", "nothing_done": True}
        later = {"Retry-After": f"{switch.retry_after:g}"}
        match behaviour:
            case "slow":
                time.sleep(switch.seconds)
                return *verb(), {}
            case "hang":
                time.sleep(switch.seconds)
                raise DroppedError(reset=False)
            case "close_before":
                raise DroppedError(reset=False)
            case "refuse":
                raise RefusedError(409, switch.code, "The order service refuses this.")
            case "busy_503":
                return 503, promise, later
            case "busy_429":
                return 429, promise, later
            case "bare_503":
                return 503, {"code": "unavailable", "message": "Service unavailable."}, {}
            case "unauthorized_401":
                raise RefusedError(401, "unauthorized", "The order service does not know this client.")
            case "invalid_422":
                raise RefusedError(422, "invalid", "The order service cannot process this.")
        # What is to be lost, late or garbled is the answer, whatever it says.
        with suppress(RefusedError):
            verb()
        match behaviour:
            case "lose_answer":
                raise DroppedError(reset=True)
            case "commit_then_hang":
                time.sleep(switch.seconds)
                raise DroppedError(reset=False)
            case "error_500_after":
                return 500, {"code": "internal_error", "message": "Internal error."}, {}
        return 200, "<!doctype html><title>Welcome</title>", {}

    def _body(self) -> Any:
        try:
            length = int(self.headers.get("Content-Length", 0))
        except ValueError:
            length = -1
        if not 0 <= length <= BODY_LIMIT or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise RefusedError(413, "body_too_large", f"A body has a length of at most {BODY_LIMIT} bytes.")
        raw = self.rfile.read(length)
        try:
            return json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            raise RefusedError(400, "invalid_json", "The body is no JSON.") from None

    def _answer(self, status: int, body: Body | str, headers: dict[str, str]) -> None:
        content_type = "text/html" if isinstance(body, str) else "application/json"
        payload = (body if isinstance(body, str) else json.dumps(body)).encode()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(payload)}",
            *(f"{name}: {value}" for name, value in headers.items()),
            *(["Connection: close"] if self.close_connection else []),
        ]
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("ascii") + payload)


@dataclass(frozen=True)
class Request:
    """What a verb needs of an HTTP request."""

    subject: str
    query: dict[str, str]
    body: Any
    key: str

    @property
    def fields(self) -> Body:
        """Give the body as an object; anything else is a 422."""
        if not isinstance(self.body, dict):
            raise RefusedError(422, "invalid_body", "The body must be a JSON object.")
        return self.body


def _order_shown(server: Server, request: Request) -> tuple[int, Body]:
    return 200, server.store.order(request.subject)


def _refund(server: Server, request: Request) -> tuple[int, Body]:
    return server.store.refund(request.subject, key=request.key, body=request.fields)


def _cancel(server: Server, request: Request) -> tuple[int, Body]:
    return server.store.cancel(request.subject, body=request.fields)


def _notify(server: Server, request: Request) -> tuple[int, Body]:
    return server.store.notify(request.subject, body=request.fields)


def _switches(server: Server, _request: Request) -> tuple[int, Body]:
    return 200, server.switches.show()


def _add_orders(server: Server, request: Request) -> tuple[int, Body]:
    return server.store.add_orders(request.body if isinstance(request.body, list) else [request.fields])


def _lookup(server: Server, request: Request) -> tuple[int, Body]:
    if not request.query.get("key"):
        raise RefusedError(400, "key_required", "Ask with ?key=.")
    return 200, server.store.find_refund(request.query["key"])


def _effects(server: Server, request: Request) -> tuple[int, Body]:
    filters = dict(request.query)
    limit = filters.pop("limit", "-1")
    if not re.fullmatch(r"-1|\d{1,9}", limit):
        raise RefusedError(400, "invalid_limit", "limit must be a whole number.")
    return 200, server.store.effects(filters=filters, limit=int(limit))


def _requests(server: Server, _request: Request) -> tuple[int, Body]:
    arrived = list(server.requests)
    counts = dict.fromkeys(PATHS, 0) | Counter(entry["path"] for entry in arrived)
    return 200, {"counts": counts, "requests": arrived}


def _add_switch(server: Server, request: Request) -> tuple[int, Body]:
    server.switches.add(request.fields)
    return 201, server.switches.show()


def _clear_switches(server: Server, _request: Request) -> tuple[int, Body]:
    server.switches.clear()
    return 200, server.switches.show()


def _reset(server: Server, _request: Request) -> tuple[int, Body]:
    server.switches.clear()
    server.requests.clear()
    server.store.reset()
    return 200, {"reset": True}


Verb = Callable[[Server, Request], tuple[int, Body]]


def _route(method: str, path: str, name: str, verb: Verb) -> tuple[str, re.Pattern[str], str, Verb]:
    return method, re.compile(path.replace("{id}", "([^/]+)")), name, verb


ROUTES = (
    _route("GET", "/orders/{id}", "orders", _order_shown),
    _route("POST", "/orders/{id}/refunds", "refunds", _refund),
    _route("GET", "/refunds", "lookup", _lookup),
    _route("POST", "/orders/{id}/cancellations", "cancellations", _cancel),
    _route("POST", "/customers/{id}/notifications", "notifications", _notify),
    _route("POST", "/orders", "", _add_orders),
    _route("GET", "/effects", "", _effects),
    _route("GET", "/requests", "", _requests),
    _route("POST", "/switches", "", _add_switch),
    _route("GET", "/switches", "", _switches),
    _route("DELETE", "/switches", "", _clear_switches),
    _route("POST", "/reset", "", _reset),
)


def main() -> None:
    """Serve until it is told to stop (SIGINT, SIGTERM)."""
    parser = argparse.ArgumentParser(prog="python -m dexsite.orders.gateway", description="The shop's order service.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="0 takes a free one (default 8001)")
    parser.add_argument("--data", type=Path, required=True, help="its SQLite file")
    options = parser.parse_args()
    store = Store(options.data)
    try:
        server = Server((options.host, options.port), store)
    except OSError as error:
        parser.exit(1, f"cannot listen on {options.host}:{options.port}: {error.strerror}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"order service on http://{options.host}:{server.server_port}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
