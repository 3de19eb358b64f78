"""Gradio's stream of answers, which ends without losing one.

The page gets the answers of its events from one stream (`queue/data`). Gradio's server ends the stream as soon as no
event is pending, with the message `close_stream` (gradio/routes.py, sse_stream). An event that the page joins at that
moment is lost: the page gets the answer to its `queue/join` while its stream still seems open, so it opens no other
one, and then reads `close_stream`. The answer stays on the server until some later event opens a stream.

This class sits between the page's guard and Gradio. It keeps the stream open for LINGER_S after the last answer, and
lets Gradio continue in it when an event is joined meanwhile. Then it ends the stream, and an event that is joined
within HOLD_S gets its answer to `queue/join` after that time: so the page reads the end first, and opens a new stream.
It reads only Gradio's
protocol: addresses, `session_hash` and `close_stream`.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOIN, DATA = "/gradio_api/queue/join", "/gradio_api/queue/data"
CLOSE = b'data: {"msg":"close_stream"'
COMPLETED = b'data: {"msg":"process_completed"'
EVENT = re.compile(rb'"event_id"\s*:\s*"([A-Za-z0-9_-]{1,64})"')
SESSION = re.compile(rb'"session_hash"\s*:\s*"([A-Za-z0-9_-]{1,64})"')
TAIL_BYTES = 200  # of a chunk, in case the session's name continues in the next one
# Not longer: a browser opens six connections to a server, for all its tabs together.
LINGER_S = 1.0
HOLD_S = 0.25
JOIN_S = 60.0  # for the answer to a join
MOST_SESSIONS = 10_000


@dataclass
class _Session:
    """What is known of one page: joins without an answer yet, events without one, and when its stream was ended.

    joined: set when a join begins. answered: set when a join has its answer. early: events that were completed before that.
    """

    joining: int = 0
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    pending: set[bytes] = field(default_factory=set)
    early: set[bytes] = field(default_factory=set)
    held_until_s: float = 0.0
    streams: int = 0


class Streams:
    """ASGI application in front of Gradio's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._sessions: dict[str, _Session] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == JOIN and scope["method"] == "POST":
            await self._join(scope, receive, send)
        elif path == DATA and scope["method"] == "GET":
            await self._data(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _session(self, name: str) -> _Session:
        if len(self._sessions) > MOST_SESSIONS:
            now_s = asyncio.get_running_loop().time()
            for known, one in list(self._sessions.items()):
                if not one.joining and not one.streams and one.held_until_s < now_s:
                    del self._sessions[known]
        return self._sessions.setdefault(name, _Session())

    async def _join(self, scope: Scope, receive: Receive, send: Send) -> None:
        session: _Session | None = None
        tail = b""

        async def listen() -> Message:
            nonlocal session, tail
            message = await receive()
            if message["type"] == "http.request":
                found = SESSION.findall(tail + message.get("body", b""))
                tail = message.get("body", b"")[-TAIL_BYTES:]
                if found and session is None:
                    session = self._session(found[-1].decode())
                    session.joining += 1
                    session.joined.set()
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and session is not None:
                await asyncio.sleep(max(0.0, session.held_until_s - asyncio.get_running_loop().time()))
            elif session is not None and (event := EVENT.search(message.get("body", b""))):
                if event[1] in session.early:
                    session.early.discard(event[1])
                else:
                    session.pending.add(event[1])
            await send(message)

        try:
            await self.app(scope, listen, answer)
        finally:
            if session is not None:
                session.joining -= 1
                session.answered.set()

    async def _data(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_hash", [""])
        session = self._session(names[0][:64])
        session.streams += 1
        started = False
        try:
            while True:
                ended: list[Message] = []  # Gradio's message `close_stream`
                await self.app(dict(scope), receive, _until_close(send, ended, started, session))
                if not ended:
                    return
                started = True
                # A join under way may be pushed after Gradio looked for pending events.
                while session.joining and not session.pending:
                    session.answered.clear()
                    if not await _first(session.answered, receive, JOIN_S):
                        return
                session.early.clear()
                if not session.pending:
                    session.joined.clear()
                    if not await _first(session.joined, receive, LINGER_S):
                        break
            session.held_until_s = asyncio.get_running_loop().time() + HOLD_S
            await send({**ended[0], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            session.streams -= 1


def _until_close(send: Send, ended: list[Message], started: bool, session: _Session) -> Callable[[Message], object]:
    """Notes which events are completed, and sends what Gradio sends, without `close_stream` and what follows; of a continued answer also without its head."""

    async def forward(message: Message) -> None:
        if ended or (started and message["type"] == "http.response.start"):
            return
        body = message.get("body", b"")
        if body.startswith(CLOSE):
            ended.append(message)
            return
        if body.startswith(COMPLETED) and (event := EVENT.search(body)):
            if event[1] in session.pending:
                session.pending.discard(event[1])
            else:
                session.early.add(event[1])
        await send(message)

    return forward


async def _first(joined: asyncio.Event, receive: Receive, seconds: float) -> bool:
    """Whether an event is joined within so many seconds, while the page is there."""
    waits = [asyncio.ensure_future(joined.wait()), asyncio.ensure_future(_gone(receive))]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return joined.is_set()  # also when it was set in this turn of the loop
    finally:
        for one in waits:
            one.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
