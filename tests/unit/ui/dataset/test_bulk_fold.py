"""What the fields and buttons of the folds "Edit many images" and "Write captions" do, without a browser."""

from unittest.mock import Mock

import gradio as gr
import pytest
from draft_helpers import drawn, filled, texts

from ui.dataset import bulk_fold, caption_fold, captioning, draft, subsets


def bulk_fields(kind: str = "replace", find: str = "", put: str = "", **more) -> list:
    given = {"pattern": False, "any_case": False, "add": "", "without": "", "keep": 1, "seed": 5, "some": True}
    return [kind, find, put, *{**given, "ids": [], **more}.values()]


def test_many_captions_are_changed_as_previewed(mine):
    ids = filled(mine, "a cat", "", "<b> cat")
    run, parts = drawn(bulk_fold.draw, mine, Mock())
    hidden = {name for name, part in parts.items() if part.get("visible") is False}
    assert hidden == {"Text", "Tags, separated by commas", "Tags to keep in place at the start"}
    assert [name for name, part in parts.items() if part.get("interactive") is False] == ["Change captions"]
    look = lambda *given, **more: run["look"](*bulk_fields(*given, **more))  # noqa: E731
    assert look() == ["", gr.update(value="Change captions", interactive=False)]
    effect, button = look("replace", "cat", "dog")
    assert "2 of 3 captions change." in effect and "<del>&lt;b&gt; cat</del><ins>&lt;b&gt; dog</ins>" in effect
    assert button == gr.update(value="Change 2 captions", interactive=True)
    effect, button = look("prefix", add="x ", ids=ids[:2])
    assert "2 of 2 captions change." in effect and "<del>(empty)</del>" in effect
    assert "3 of 3" in look("prefix", add="x ", ids=ids[:2], some=False)[0]
    effect, button = look("replace", "dog", "x")
    assert "0 of 3 captions change." in effect and "<ul" not in effect and button["value"] == "Change captions"
    effect, button = look("replace", "(", pattern=True)
    assert "not a valid regular expression" in effect and not button["interactive"]
    said, seed = run["on_apply"](*bulk_fields("remove_tags", without="a cat", ids=ids))
    assert "1 caption changed." in said and seed == 6 and texts(mine) == ["", "", "<b> cat"]
    assert "There is no edit" in run["on_apply"](*bulk_fields("x", add="y"))[0]
    assert [one["visible"] for one in run["on_kind"]("suffix")] == [False, True, False, False]
    assert [one["visible"] for one in run["on_kind"]("shuffle")] == [False, False, False, True]
    assert run["<lambda>"]("cat") == ["remove_tags", "cat", gr.update(selected="captions")]


def test_images_move_between_subsets(mine):
    ids = filled(mine, "a, b", "b", "")
    run, _ = drawn(bulk_fold.draw, mine, Mock())
    assert "Select images on their cards first" in run["on_move"]("cat", 10, [])
    assert "2 images moved." in run["on_move"]("cat", 10, ids[:2]) and "Repeats: use" in run["on_move"]("x", 0, ids)
    subset, tags = run["lists"]("gone")
    assert subset["choices"] == [("cat × 10 (2)", "10_cat"), ("No subset (1)", "")] and subset["value"] is None
    assert tags["choices"] == [("b · 2", "b"), ("a · 1", "a")] and tags["info"] == "2 tags"
    assert run["lists"]("10_cat")[0]["value"] == "10_cat" and run["on_subset"]("10_cat") == ["cat", 10]
    assert "The subset dog is saved." in run["on_save"]("10_cat", "dog", None)
    assert "no images any more" in run["on_save"]("10_cat", "dog", None)
    assert [one["folder"] for one in subsets.overview(mine)] == ["dog", ""]


def test_captions_are_written_for_the_images_and_with_the_options_that_were_chosen(mine, monkeypatch):
    ids, started = filled(mine, "a", "", "c"), []
    draft.save_fields(mine, {"trigger": "ohwx"})
    monkeypatch.setattr(captioning, "start", lambda *given: started.append(given[1:]))
    run, parts = drawn(caption_fold.draw, mine)
    assert "Put the trigger word “ohwx” first" in parts and parts["Continue"]["visible"] is False
    assert not [name for name, part in parts.items() if part.get("interactive") is False]
    choices = ["Images without a caption (1)", "Also captions that a model wrote (1)", "All images (3)"]
    assert [label for label, _ in parts["For"]["choices"]] == choices
    over = run["on_which"]("all")
    assert over["visible"] and "(2)" in over["label"] and not run["on_which"]("empty")["visible"]
    assert [one.get("visible") for one in run["on_engine"]("tagger")] == [None, False, True, False]
    values = ["m", "short", "t", None, 0.9, " solo ", True, "http://x", " q ", "KEY", "do", " pre ", None]
    run["on_go"]("tagger", "all", True, True, True, *values, ids[:1])
    run["on_go"]("florence", "empty", True, True, False, *values, [])
    tagger = {"model": "t", "general": 0, "character": 0.9, "without": "solo", "underscores": True}
    frame = {"prefix": " pre ", "suffix": ""}
    assert started == [
        ({"engine": "tagger", "trigger": "ohwx", **tagger, **frame}, "all", [ids[0]], True),
        ({"engine": "florence", "trigger": "", "model": "m", "task": "short", **frame}, "empty", None, False),
    ]
    captioning.begin(mine, {"engine": "tagger", "model": "/own/folder", "general": 0.5, "trigger": ""})
    _, parts = drawn(caption_fold.draw, mine)
    assert (parts["Threshold"]["value"], parts["Written by"]["value"], parts["Model"]["value"]) == (0.5, "tagger", "")
    assert run["on_new_captions"]("all")[1] == over and not run["on_new_captions"]("all")[2]["visible"]


STATUS = {"state": "running", "done": 10, "total": 40, "seconds": 100, "line": "<x>", "failures": ["<y>"], "error": ""}


@pytest.mark.parametrize(
    ("status", "there", "not_there"),
    [
        ({}, ["10 of 40 captions written, about 5 min left.", 'max="40" value="10"', "1 image has no"], ["<x>", "<y>"]),
        ({"seconds": 1, "line": "", "failures": []}, ["captions written."], ["left", "<p></p>", "<details"]),
        ({"state": "failed", "error": "no GPU"}, ["Stopped. 10 of", "no GPU"], ["<progress", "&lt;x", "left"]),
        ({"done": 0, "total": 0}, ['max="1" value="0"'], ["left"]),
    ],
)  # fmt: skip
def test_how_far_a_captioning_is(status, there, not_there):
    text = caption_fold.shown({**STATUS, **status})
    assert [one for one in there if one not in text] == [one for one in not_there if one in text] == [], text
    assert caption_fold.shown({**STATUS, "state": ""}) == ""
    unfinished = [caption_fold._unfinished({**STATUS, "state": state}) for state in ("failed", "running", "")]
    assert unfinished == [True, False, False] and not caption_fold._unfinished({**STATUS, "state": "done", "done": 40})
