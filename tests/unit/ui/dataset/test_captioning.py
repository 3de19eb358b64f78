""" "Write captions" without a browser: what its fields and buttons do, and how far a job is."""

import pytest
from draft_helpers import drawn, filled

from runs.files import RunError
from ui.dataset import captioning, draft


def test_captions_are_written_for_the_images_and_with_the_options_that_were_chosen(mine, monkeypatch):
    ids, started = filled(mine, "a", "", "c"), []
    draft.save_fields(mine, {"trigger": "ohwx"})
    monkeypatch.setattr(captioning, "start", lambda *given: started.append(given[1:]))
    run, parts = drawn(captioning.draw, mine)
    assert not [name for name, part in parts.items() if part.get("interactive") is False]
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
    _, parts = drawn(captioning.draw, mine)
    assert (parts["Threshold"]["value"], parts["Written by"]["value"], parts["Model"]["value"]) == (0.5, "tagger", "")
    assert run["on_new_captions"]("all")[1] == over and not run["on_new_captions"]("all")[2]["visible"]


def test_images_that_were_removed_need_no_caption(mine):
    ids = filled(mine, "", "", "c")
    assert [captioning.begin(mine, {"engine": "tagger"}, only=only) for only in (ids[1:], None)] == [1, 2]
    draft.remove(mine, ids[:1])
    assert captioning.DraftWork(mine).counts() == (1, 2)
    draft.remove(mine, ids[1:2])
    assert captioning.DraftWork(mine).counts() == (2, 2), "there is nothing to continue"
    for only, message in ((ids[:2], "The selected images were removed; select others"), (ids[2:], "to be kept")):
        with pytest.raises(RunError, match=message):
            captioning.begin(mine, {"engine": "tagger"}, only=only)
    draft.clear(mine)
    with pytest.raises(RunError, match="Add images first"):
        captioning.begin(mine, {"engine": "tagger"}, only=ids)


STATUS = {"state": "running", "before": 0, "done": 10, "total": 40, "seconds": 100}
STATUS |= {"line": "<x>", "failed": 1, "failures": ["<y>"], "error": ""}


@pytest.mark.parametrize(
    ("status", "there", "not_there"),
    [
        ({}, ["10 of 40 captions written, about 5 min left.", 'max="40" value="10"', "1 image has no"], ["<x>", "<y>"]),
        ({"seconds": 1, "line": "", "failures": []}, ["captions written."], ["left", "<p></p>", "<details"]),
        ({"state": "failed", "error": "no GPU"}, ["Failed. 10 of", "no GPU"], ["<progress", "&lt;x", "left"]),
        ({"before": 8, "failed": 35}, ["written, about 25 min left.", "35 images have no caption"], []),
    ],
)  # fmt: skip
def test_how_far_a_captioning_is(status, there, not_there):
    text = captioning.shown({**STATUS, **status})
    assert [one for one in there if one not in text] == [one for one in not_there if one in text] == [], text
    assert captioning.shown({**STATUS, "state": ""}) == ""
