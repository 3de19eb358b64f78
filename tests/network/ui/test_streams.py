"""The page's events: an idle queue sleeps, a joined event wakes it, and no answer is lost when the stream of answers ends."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator

import gradio as gr
import pytest
import uvicorn
from fastapi import FastAPI
from ui_helpers import free_port

from ui import queue_wakes, streams

WAIT_S = 60  # only stops what hangs


class Page:
    """A small Gradio page behind `Streams`, with one event that answers after the seconds that it gets."""

    def __init__(self, port: int):
        self.port = port
        with gr.Blocks(analytics_enabled=False) as blocks:
            box = gr.Textbox()
            box.submit(self.answer, box, box)
        self.blocks = blocks
        app = gr.mount_gradio_app(FastAPI(), blocks, "/", ssr_mode=False)
        self.installed = queue_wakes.install(blocks)
        self.server = uvicorn.Server(
            uvicorn.Config(streams.Streams(app), "127.0.0.1", port, log_level="warning", ws="none")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @staticmethod
    def answer(text: str) -> str:
        """Sleep for so many seconds."""
        time.sleep(float(text))
        return f"after {text}"

    def join(self, session: str, seconds: float) -> str:
        """Join an event; returns its id."""
        body = {"data": [str(seconds)], "fn_index": 0, "session_hash": session}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("POST", streams.JOIN, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        found = json.loads(reply.read())["event_id"]
        connection.close()
        return found


class Stream:
    """The stream of answers of a session, read message by message."""

    def __init__(self, page: Page, session: str):
        self.connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=WAIT_S)
        self.connection.request("GET", f"{streams.DATA}?session_hash={session}")
        self.reply = self.connection.getresponse()

    def next(self) -> dict:
        """The next message; {"msg": "end"} at the end."""
        while line := self.reply.readline():
            if line.startswith(b"data:"):
                return json.loads(line[5:])
        return {"msg": "end"}

    def until(self, *kinds: str) -> dict:
        """The next message of one of these kinds."""
        while (message := self.next())["msg"] not in (*kinds, "end"):
            pass
        return message


@pytest.fixture
def page(monkeypatch) -> Iterator[Page]:
    """A served page."""
    monkeypatch.setattr(queue_wakes, "IDLE_S", 600.0)  # so that only a wake, never the clock, starts an event
    found = Page(free_port())
    found.thread.start()
    end = time.monotonic() + WAIT_S
    while not found.server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield found
    found.server.should_exit = found.server.force_exit = True
    found.thread.join(WAIT_S)


def test_the_queue_of_this_gradio_can_be_woken(page):
    # A new version of Gradio that fails here needs another `queue_wakes`: until then its queue polls, and answers all the same.
    assert page.installed
    for name in queue_wakes.LOOPS:
        assert "asyncio" in getattr(page.blocks._queue, name).__func__.__globals__


def test_a_queue_that_sleeps_is_woken_by_each_event_and_answers_those_that_wait_for_others(page):
    """The clock would wake it after ten minutes."""
    for number in range(5):
        event = page.join(f"s{number}", 0)
        assert Stream(page, f"s{number}").until("process_completed")["event_id"] == event
    events = [page.join("one", 0.05) for _ in range(6)]
    stream = Stream(page, "one")
    assert {stream.until("process_completed")["event_id"] for _ in events} == set(events)


def test_an_event_joined_while_the_stream_ends_is_answered_in_it(page):
    """Gradio alone loses this answer: the stream is over, and the page was told of no other one."""
    stream = Stream(page, "one") if page.join("one", 0) else None
    stream.until("process_completed")  # for the page, the stream is open until it reads that it is closed
    page.join("one", 0)
    assert stream.until("process_completed", "close_stream")["msg"] == "process_completed"
    assert stream.until("process_completed", "close_stream")["msg"] == "close_stream"
    assert stream.next()["msg"] == "end"
    assert page.join("one", 0) == Stream(page, "one").until("process_completed")["event_id"]


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
