"""Parts that are made when they are opened."""

import ast

import gradio as gr
from draft_helpers import drawn
from gradio.context import LocalContext
from gradio.state_holder import SessionState

from runs.files import RunError
from runs.paths import ROOT
from ui.run import fold


def test_a_part_that_is_drawn_anew_still_knows_the_tick_of_its_old_timer():
    def draw(_: str) -> None:
        fold.job(gr.Button("Go"), lambda: None, lambda: (False, ""), lambda: None, "work")

    with gr.Blocks() as page:
        fold.opened(gr.State(""), "Work", "work-fold", draw)
    (renderable,) = page.renderables
    session = SessionState(page)

    def ticks() -> list[int]:
        renderable.apply("")
        events = session.blocks_config.fns.values()
        return [event._id for event in events if any(name == "tick" for _, name in event.targets)]

    LocalContext.blocks_config.set(session.blocks_config)
    try:
        first = ticks()
        assert len(first) == 1 and ticks() == first
    finally:
        LocalContext.blocks_config.set(None)


def test_a_look_that_fails_says_why_once():
    """A draft or a folder can become unreadable while its fold is open."""

    def look() -> tuple[bool, str]:
        raise RunError("draft.sqlite cannot be read")

    run, _ = drawn(lambda: fold.job(gr.Button("Go"), lambda: None, look, lambda: None, "work"))
    _, _, shown, known, _ = run["on_tick"]((True, "Working"))
    assert "draft.sqlite cannot be read" in shown
    assert run["on_tick"](known) == [gr.skip()] * 5


def test_each_tick_of_such_a_part_has_a_key_of_its_own():
    keys = []
    for path in sorted((ROOT / "ui").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "def draw(" not in source and path.name != "fold.py":
            continue
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "tick":
                keys += [ast.unparse(word.value) for word in call.keywords if word.arg == "key"] or [path.name]
    assert len(keys) == len(set(keys)) > 4 and not [key for key in keys if key.endswith(".py")]
