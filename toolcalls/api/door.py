"""One port for requests and waits: an ASGI application around Django's WSGI handler.

Requests run in threads, where sync views are several times faster than under Django's ASGI handler. An answer that should be
held carries a ``Waiting``: then no thread and no connection is held until the calls were answered, the time is over, or
the client has gone. One listener per process wakes all who wait.
"""

import asyncio
import io
import json
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from a2wsgi.wsgi import build_environ
from django.conf import settings
from django.core import signals
from django.core.handlers.exception import convert_exception_to_response
from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.utils.module_loading import import_string

from toolcalls import sql
from toolcalls.api.bodies import BODY_LIMIT
from toolcalls.api.problems import MEDIA_TYPE, body
from toolcalls.notices import CHANNEL
from toolcalls.states import ANSWERED

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

THREADS = 16
READ_AGAIN_SECONDS = 1.0
"""A notice may be lost with its connection or its sender: whoever waits is looked up this often in any case."""

HOLDS = "dexsite.holds_answers"
"""Set in the environment of requests: a view that waits need not make an answer for now."""

LATELY = 10_000
"""How many of the latest notices are kept."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Waiting:
    """Hold the answer until these calls are answered or the seconds are over; then ``again`` gives its JSON."""

    calls: frozenset[UUID]
    seconds: float
    again: Callable[[], dict[str, Any]]


class Listener:
    """Wakes whoever waits for calls. Holds one connection for the whole process, and none per waiter."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._waiting: dict[UUID, list[tuple[asyncio.Event, set[UUID]]]] = defaultdict(list)
        self._lately: OrderedDict[UUID, None] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []

    async def wait(self, calls: Iterable[UUID], seconds: float, wake: asyncio.Event) -> None:
        """Return once all calls are answered, the seconds are over, or somebody else sets ``wake``.

        What was answered between its admission and now sent its notice already: it is among the latest ones.
        """
        left = {call for call in calls if call not in self._lately}
        if not left:
            return
        waiter = (wake, left)
        asked = tuple(left)
        for call in asked:
            self._waiting[call].append(waiter)
        try:
            await asyncio.wait_for(wake.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            for call in asked:
                self._waiting[call].remove(waiter)
                if not self._waiting[call]:
                    del self._waiting[call]

    def _answered(self, calls: Iterable[UUID]) -> None:
        for call in calls:
            self._lately[call] = None
            if len(self._lately) > LATELY:
                self._lately.popitem(last=False)
            for wake, left in self._waiting.get(call, ()):
                left.discard(call)
                if not left:
                    wake.set()

    async def _look(self, calls: Iterable[UUID]) -> None:
        asked = list(calls)
        answered = await asyncio.get_running_loop().run_in_executor(self._threads, _answered_among, asked)
        self._answered(answered)

    def start(self) -> None:
        """Listen from now on: before the first call is admitted through this process."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._read_again())]

    async def _listen(self) -> None:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    **_connection_parameters(), autocommit=True
                ) as listening:
                    await listening.execute(f"LISTEN {CHANNEL}")
                    async for notice in listening.notifies():
                        self._answered(UUID(each) for each in notice.payload.split(","))
            except (psycopg.Error, OSError) as error:
                logger.warning("the listener lost its connection", extra={"error": type(error).__name__})
                await asyncio.sleep(0.5)

    async def _read_again(self) -> None:
        while True:
            await asyncio.sleep(READ_AGAIN_SECONDS)
            if self._waiting:
                try:
                    await self._look(list(self._waiting))
                except Exception as error:  # noqa: BLE001 - the database is away; the next look may find it back
                    logger.warning("waiting calls could not be read", extra={"error": type(error).__name__})

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


def _answered_among(calls: list[UUID]) -> list[UUID]:
    try:
        statement = "SELECT id FROM toolcalls_call WHERE id = ANY(%s) AND status = ANY(%s)"
        return [row[0] for row in sql.run(statement, [calls, list(ANSWERED)])]
    finally:
        connection.close_if_unusable_or_obsolete()


def _connection_parameters() -> dict[str, Any]:
    parameters = dict(connection.get_connection_params())
    for of_django in ("context", "cursor_factory", "prepare_threshold"):
        parameters.pop(of_django, None)
    return parameters


class KeyHandler(WSGIHandler):
    """Answers requests that carry a key or a token: what serves browsers (sessions, messages, forms) is left out."""

    def load_middleware(self, is_async: bool = False) -> None:
        this: Any = self
        handler = convert_exception_to_response(this._get_response)
        for path in reversed(settings.MIDDLEWARE_FOR_KEYS):
            handler = convert_exception_to_response(import_string(path)(handler))
        this._view_middleware = this._template_response_middleware = this._exception_middleware = ()
        this._middleware_chain = handler


def _handler_for(environ: Mapping[str, Any], browsers: WSGIHandler, keys: WSGIHandler) -> WSGIHandler:
    has_key = environ.get("HTTP_AUTHORIZATION", "")[:7].lower() == "bearer "
    return keys if has_key and environ["PATH_INFO"].startswith("/api/") else browsers


class Door:
    """The ASGI application."""

    def __init__(self) -> None:
        self._handler, self._key_handler = WSGIHandler(), KeyHandler()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="request")
        self._listener = Listener(self._threads)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._listener.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return
            self._listener.start()
            await send({"type": "lifespan.startup.complete"})

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        raw = await _read(receive)
        if raw is None:
            return
        if len(raw) > BODY_LIMIT:
            await _send_json(send, 413, body(413, "TOO_LARGE", f"A body may have at most {BODY_LIMIT:,} bytes."))
            return
        try:
            environ = build_environ(scope, io.BytesIO(raw))  # type: ignore[arg-type]
        except UnicodeDecodeError:
            await _send_json(send, 400, body(400, "MALFORMED", "The address holds bytes that are not ASCII."))
            return
        environ["CONTENT_LENGTH"] = str(len(raw))
        environ[HOLDS] = True  # type: ignore[literal-required]
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._answer, environ)
        if answer.waiting is None:
            await _send(send, answer.status, answer.headers, answer.body)
            return
        wake = asyncio.Event()
        watch = asyncio.create_task(_watch(receive, wake))
        try:
            await self._listener.wait(answer.waiting.calls, answer.waiting.seconds, wake)
        finally:
            gone = watch.done()
            watch.cancel()
        if not gone:
            payload = await loop.run_in_executor(self._threads, _render, answer.waiting)
            headers = [(name, value) for name, value in answer.headers if name.lower() != b"content-length"]
            await _send(send, answer.status, [*headers, (b"content-length", str(len(payload)).encode())], payload)

    def _answer(self, environ: Any) -> "_Answer":
        """Answer one request as Django's WSGI handler does, but keep the response object."""
        signals.request_started.send(sender=WSGIHandler, environ=environ)
        request = WSGIRequest(environ)
        response = _handler_for(environ, self._handler, self._key_handler).get_response(request)
        try:
            return _plain(request, response)
        finally:
            response.close()


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    waiting: Waiting | None


def _plain(request: HttpRequest, response: Any) -> _Answer:
    # Static files stream; nothing else does.
    content = b"".join(response.streaming_content) if response.streaming else response.content
    headers = [(name.encode("latin1"), value.encode("latin1")) for name, value in response.items()]
    headers += [(b"Set-Cookie", morsel.OutputString().encode("latin1")) for morsel in response.cookies.values()]
    if isinstance(response, HttpResponse) and "Content-Length" not in response:
        headers.append((b"Content-Length", str(len(content)).encode()))
    return _Answer(
        response.status_code, headers, b"" if request.method == "HEAD" else content, getattr(response, "waiting", None)
    )


def _render(waiting: Waiting) -> bytes:
    signals.request_started.send(sender=WSGIHandler)
    try:
        return json.dumps(waiting.again(), ensure_ascii=False).encode()
    finally:
        signals.request_finished.send(sender=WSGIHandler)


async def _read(receive: Receive) -> bytes | None:
    """Read a body, no further than past the limit. None where the client went away meanwhile."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        # Too large a body is read to its end, so that the client reads the answer, but not kept.
        chunks.append(chunk[: max(0, BODY_LIMIT + 1 - size)])
        size += len(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()  # and this task is done, which says that the client left


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], payload: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})


async def _send_json(send: Send, status: int, problem: dict[str, Any]) -> None:
    payload = json.dumps(problem).encode()
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(payload)).encode())]
    await _send(send, status, headers, payload)
