"""The page's events: a skipped output costs nothing."""

import asyncio

import gradio as gr
import pytest
from fastapi import FastAPI

from ui.api import server
from ui.page import Page

WAIT_S = 60  # only stops what hangs


def test_a_skipped_output_makes_no_component_anew(monkeypatch):
    with Page(analytics_enabled=False) as page:
        first, second, state = gr.Textbox(), gr.Button("Start"), gr.State("")
        first.submit(lambda text: text, first, [first, second, state])
    server.mount(FastAPI(), page, "/", 1)
    assert page.state_holder.capacity < 1000, "visits whose state is kept"
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
    assert shown[0] == skipped and shown[1]["value"] == "Stop" and made


def test_an_error_is_shown_as_text():
    def press() -> None:
        raise ValueError("<img src=x>")

    with Page(analytics_enabled=False) as page:
        gr.Button("Start").click(press)
    event = next(iter(page.default_config.fns.values()))
    with pytest.raises(gr.Error) as error:
        asyncio.run(asyncio.wait_for(page.process_api(event, []), WAIT_S))
    assert error.value.message == "&lt;img src=x&gt;"
