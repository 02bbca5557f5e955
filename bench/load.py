"""The agents: a program of its own, of the standard library alone, so that the product is measured and not its client.

It reads what to do as JSON on standard input and writes what came of it as JSON. Each session is a conversation over
one connection: it posts, reads the final result, and posts the next.
"""

import json
import re
import resource
import selectors
import socket
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

WAIT = 30
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_STATUS = re.compile(rb'"status": ?"(\w+)", ?"code": ?"(\w*)"')
_ID = re.compile(rb'"id": ?"([0-9a-f-]{36})"')
_HASH = re.compile(rb'"arguments_hash": ?"(\w+)"')

Conversation = Generator[bytes, bytes, None]


@dataclass
class Load:
    """Count what became of the calls, and how long each took from its POST to its final result."""

    until: float
    calls: int = 0
    milliseconds: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)

    def count(self, answer: bytes, *, expected: int, begun: float) -> None:
        """Take the answer that should hold `expected` succeeded calls, first asked for at `begun`."""
        found = [b" ".join(words).decode() for words in _STATUS.findall(answer)]
        for status in found or [answer[:100].decode(errors="replace")]:
            if status != "succeeded OK":
                self.faults[status] = self.faults.get(status, 0) + 1
        self.calls += min(found.count("succeeded OK"), expected)
        self.milliseconds.append((time.perf_counter() - begun) * 1000)


def numbered() -> Iterator[str]:
    """Names that no other turn of the session has."""
    return (f"{n:06d}" for n in count(1))


def posting(load: Load, session: str, key: str, *, calls: int) -> Conversation:
    """Post `calls` calls a request and read their results from the answer to it."""
    for turn in numbered():
        if time.perf_counter() >= load.until:
            return
        proposed = [_proposed(f"{turn}-{n}", "note") for n in range(calls)]
        begun = time.perf_counter()
        answer = yield _post(f"sessions/{session}/turns/{turn}/calls", key, {"calls": proposed}, wait=WAIT)
        load.count(answer, expected=calls, begun=begun)


def approving(load: Load, session: str, key: str, token: str) -> Conversation:
    """Propose a call, approve it as an operator, and read its result as the agent."""
    for turn in numbered():
        if time.perf_counter() >= load.until:
            return
        begun = time.perf_counter()
        path = f"sessions/{session}/turns/{turn}/calls"
        waiting = yield _post(path, key, {"calls": [_proposed(turn, "approved_note")]})
        call, shown = _ID.search(waiting), _HASH.search(waiting)
        if not call or not shown:
            load.count(waiting, expected=1, begun=begun)
            return
        name = call[1].decode()
        yield _post(f"approvals/{name}/approve", token, {"arguments_hash": shown[1].decode()})
        answer = yield _head("GET", f"calls/{name}?wait={WAIT}", key) + b"\r\n"
        load.count(answer, expected=1, begun=begun)


def _proposed(name: str, tool: str) -> dict[str, Any]:
    return {"tool_call_id": name, "tool": tool, "arguments": {"text": name}}


def _post(path: str, secret: str, body: dict[str, Any], *, wait: int = 0) -> bytes:
    payload = json.dumps(body).encode()
    prefer = f"Prefer: wait={wait}\r\n" if wait else ""
    more = f"{prefer}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return _head("POST", path, secret) + more.encode() + payload


def _head(method: str, path: str, secret: str) -> bytes:
    return f"{method} /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n".encode()


class Line:
    """One session's connection: it sends what the conversation says, and hands it each whole answer."""

    def __init__(self, port: int, conversation: Conversation) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._conversation = conversation
        self._received = b""
        self.socket.sendall(next(conversation))

    def go_on(self) -> None:
        """Read what has arrived and, once the answer is whole, go on; raises StopIteration at the end."""
        arrived = self.socket.recv(262_144)
        if not arrived:
            raise ConnectionError("the server closed the connection")
        self._received += arrived
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n") if separator else None
        if not separator or (length and len(body) < int(length[1])):
            return
        self._received = b""
        self.socket.sendall(self._conversation.send(body))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Load the server for the seconds that were asked; conversations end with the call they are in."""
    before, begun = _cpu(), time.perf_counter()
    load = Load(until=begun + asked["seconds"])
    with selectors.DefaultSelector() as selector:
        for session in asked["sessions"]:
            if asked["token"]:
                conversation = approving(load, session, asked["key"], asked["token"])
            else:
                conversation = posting(load, session, asked["key"], calls=asked["calls"])
            line = Line(asked["port"], conversation)
            selector.register(line.socket, selectors.EVENT_READ, line)
        while selector.get_map():
            for ready, _ in selector.select():
                try:
                    ready.data.go_on()
                except StopIteration:
                    selector.unregister(ready.fileobj)
    return {
        "calls": load.calls,
        "seconds": time.perf_counter() - begun,
        "milliseconds": load.milliseconds,
        "faults": load.faults,
        "cpu": _cpu() - before,
    }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)
