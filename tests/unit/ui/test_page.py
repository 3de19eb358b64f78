"""The page's events: a skipped output costs nothing; a version that was installed meanwhile is named."""

import asyncio

import gradio as gr
import pytest
from fastapi import FastAPI

from ui import page as pages
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


def test_a_press_after_an_update_says_what_to_do(monkeypatch):
    def press() -> None:
        raise ImportError("cannot import name 'newer'")

    with Page(analytics_enabled=False) as page:
        gr.Button("Start").click(press)
    event = next(iter(page.default_config.fns.values()))
    for version, error in ((pages.VERSION, ImportError), ("another", gr.Error)):
        monkeypatch.setattr(pages.reading, "commit", lambda checkout, version=version: version)
        with pytest.raises(error, match="newer" if error is ImportError else "Restart it: Ctrl-C"):
            asyncio.run(asyncio.wait_for(page.call_function(event, []), WAIT_S))
