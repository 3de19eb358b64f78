"""Parts that are made when they are opened."""

import ast

import gradio as gr
from draft_helpers import drawn

from runs.files import RunError
from runs.paths import ROOT
from ui.run import fold


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
