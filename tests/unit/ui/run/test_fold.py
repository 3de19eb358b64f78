"""Parts that are made when they are opened."""

from unittest.mock import Mock

import gradio as gr
from draft_helpers import drawn

from runs.files import RunError
from ui.run import fold


def test_a_look_that_fails_says_why_once():
    """A draft or a folder can become unreadable while its fold is open."""
    look = Mock(side_effect=RunError("draft.sqlite cannot be read"))
    run, _ = drawn(lambda: fold.job(gr.Button("Go"), lambda: None, look, lambda: None, "work"))
    _, _, shown, known, _ = run["on_tick"]((True, "Working"))
    assert "draft.sqlite cannot be read" in shown
    assert run["on_tick"](known) == [gr.skip()] * 5
