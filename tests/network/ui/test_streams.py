"""The page's events: no answer is lost when the stream of answers ends, and a skipped output costs nothing."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator

import gradio as gr
import pytest
import uvicorn
from fastapi import FastAPI
from ui_helpers import free_port
from ui_page import until

from ui import streams

WAIT_S = 60  # only stops what hangs


@pytest.fixture
def page() -> Iterator[gr.Blocks]:
    """A small Gradio page behind `Streams`, served at its `port`."""
    with gr.Blocks(analytics_enabled=False) as blocks:
        box = gr.Textbox()
        box.submit(lambda text: text, box, box)
    app = gr.mount_gradio_app(FastAPI(), blocks, "/", ssr_mode=False)
    blocks.port = free_port()
    config = uvicorn.Config(streams.Streams(app), "127.0.0.1", blocks.port, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "the server is up", WAIT_S)
    yield blocks
    server.should_exit = server.force_exit = True
    thread.join(WAIT_S)


def asked(page: gr.Blocks, method: str, path: str, body: dict | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=WAIT_S)
    connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse()


def join(page: gr.Blocks, session: str) -> str:
    """Join an event; returns its id."""
    body = {"data": ["text"], "fn_index": 0, "session_hash": session}
    return json.loads(asked(page, "POST", streams.JOIN, body).read())["event_id"]


def stream_of(page: gr.Blocks, session: str) -> Iterator[dict]:
    """The answers of a session, message by message; {"msg": "end"} at the end."""
    reply = asked(page, "GET", f"{streams.DATA}?session_hash={session}")
    while line := reply.readline():
        if line.startswith(b"data:"):
            yield json.loads(line[5:])
    yield {"msg": "end"}


def next_of(stream: Iterator[dict], *kinds: str) -> dict:
    """The next message of one of these kinds, or the end."""
    return next(message for message in stream if message["msg"] in (*kinds, "end"))


def test_an_event_joined_while_the_stream_ends_is_answered_in_it(page):
    """Gradio alone loses this answer: the stream is over, and the page was told of no other one."""
    join(page, "one")
    stream = stream_of(page, "one")
    next_of(stream, "process_completed")  # for the page, the stream is open until it reads that it is closed
    join(page, "one")
    ends = [next_of(stream, "process_completed", "close_stream")["msg"] for _ in range(3)]
    assert ends == ["process_completed", "close_stream", "end"]
    assert join(page, "one") == next_of(stream_of(page, "one"), "process_completed")["event_id"]


def test_an_event_joined_just_after_the_end_is_answered_after_it(monkeypatch):
    """The page must read the end of its stream before the answer to its join: only then it opens another stream."""
    monkeypatch.setattr(streams, "LINGER_S", 0.05)
    sent: list[tuple[str, float]] = []

    async def gradio(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b'data: {"msg":"close_stream","event_id":null}\n\n' if scope["path"] == streams.DATA else b"{}"
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def visit() -> None:
        app = streams.Streams(gradio)
        loop = asyncio.get_running_loop()

        async def call(method: str, path: str, body: bytes = b"") -> None:
            waiting = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if waiting:
                    return waiting.pop()
                await asyncio.Event().wait()

            async def send(message):
                if message["type"] == "http.response.start" or message.get("body"):
                    sent.append((f"{path} {message['type'][14:]}", loop.time()))

            scope = {"type": "http", "method": method, "path": path, "query_string": b"session_hash=abc"}
            await app(scope, receive, send)

        await call("GET", streams.DATA)
        await call("POST", streams.JOIN, b'{"session_hash": "abc"}')
        await call("POST", streams.JOIN, b'{"session_hash": "another"}')

    asyncio.run(asyncio.wait_for(visit(), WAIT_S))
    times = dict(sent)
    assert [name for name, _ in sent][:2] == [f"{streams.DATA} start", f"{streams.DATA} body"]
    joins = [at for name, at in sent if name == f"{streams.JOIN} start"]
    assert joins[0] - times[f"{streams.DATA} body"] >= streams.HOLD_S * 0.9
    assert len(joins) == 2


def test_a_skipped_output_makes_no_component_anew(monkeypatch):
    from ui.page import Page

    with Page(analytics_enabled=False) as page:
        first, second, state = gr.Textbox(), gr.Button("Start"), gr.State("")
        first.submit(lambda text: text, first, [first, second, state])
    event = next(iter(page.default_config.fns.values()))
    made: list[int] = []
    real = gr.Button.__init__
    monkeypatch.setattr(gr.Button, "__init__", lambda self, *a, **k: (made.append(1), real(self, *a, **k))[1])

    def sent(*values) -> list:
        return asyncio.run(asyncio.wait_for(page.postprocess_data(event, values, None), WAIT_S))

    skipped = {"__type__": "update"}
    assert sent(gr.skip(), gr.skip(), gr.skip()) == [skipped, skipped, None] and made == []
    assert sent("text", gr.skip(), "kept") == ["text", skipped, None] and made == []
    shown = sent(gr.skip(), gr.update(value="Stop", interactive=False), gr.skip())
    assert shown[0] == skipped and shown[1]["value"] == "Stop" and shown[1]["interactive"] is False and made
    assert sent("text", gr.update(visible=False), "all")[0] == "text"
