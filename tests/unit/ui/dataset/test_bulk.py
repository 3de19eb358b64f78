"""Edits of many captions, filters, tags and subsets: what they change, what they refuse, and that each is one step."""

import time
from unittest.mock import Mock

import gradio as gr
import pytest
from draft_helpers import drawn, filled, texts
from hypothesis import HealthCheck, given, settings, strategies as st

from runs.files import RunError
from ui.dataset import bulk, draft, draft_store


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A regular expression that needs long is given up soon."""
    monkeypatch.setattr(bulk, "PATTERN_S", 0.3)


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        ({"kind": "prefix", "text": "tok, "}, ["a cat", "", "tok, b"], ["tok, a cat", "tok", "tok, b"]),
        ({"kind": "suffix", "text": ", grain"}, ["a", "", "b, grain"], ["a, grain", "grain", "b, grain"]),
        ({"kind": "prefix", "text": "cat, "}, ["cats", "cat", "cat. b"], ["cat, cats", "cat", "cat. b"]),
        ({"kind": "suffix", "text": ", at"}, ["a cat", "at", "a.at"], ["a cat, at", "at", "a.at"]),
        ({"kind": "prefix", "text": "super"}, ["man", "superman", ""], ["superman", "superman", "super"]),
        ({"kind": "replace", "find": "cat", "with": "dog"}, ["cat, Cat, cat", "x"], ["dog, Cat, dog", "x"]),
        ({"kind": "replace", "find": "cat", "with": r"\1", "any_case": True}, ["cat, Cat"], [r"\1, \1"]),
        ({"kind": "replace", "find": r"(\w+) hair", "with": r"hair: \1", "pattern": True}, ["red hair"], ["hair: red"]),
        ({"kind": "replace", "find": "a.c", "with": ""}, ["abc a.c"], ["abc "]),
        ({"kind": "remove_tags", "tags": "Solo, 1girl"}, ["1girl, solo, smile", "soloist"], ["smile", "soloist"]),
    ],
)
def test_an_edit_changes_captions_as_one_step(mine, edit, before, after):
    ids = filled(mine, *before)
    seen = bulk.preview(mine, None, edit)
    assert texts(mine) == before and seen["of"] == len(before)
    changed = bulk.apply(mine, None, edit)
    assert changed == seen["changed"] == sum(a != b for a, b in zip(before, after, strict=True))
    assert [one["after"] for one in seen["examples"]] == [b for a, b in zip(before, after, strict=True) if a != b][:4]
    assert texts(mine) == after
    written = [item.caption_by for item in draft.items(mine)]
    assert written == ["person" if b != a else "file" if a else "" for a, b in zip(before, after, strict=True)]
    if changed:
        draft.undo(mine)
        assert texts(mine) == before and draft.undo(mine, back=False) and texts(mine) == after
        bulk.apply(mine, ids[:1], {"kind": "prefix", "text": "only this "})
        assert texts(mine)[1:] == after[1:]


def test_tags_are_shuffled_as_the_preview_showed_and_the_first_stay(mine):
    ids = filled(mine, *["tok, " + ", ".join(f"t{n}" for n in range(12))] * 5)
    edit = {"kind": "shuffle", "keep": 1, "seed": 77}
    seen = bulk.preview(mine, None, edit)["examples"]
    assert bulk.apply(mine, ids, edit) == 5
    found = texts(mine)
    assert [one["after"] for one in seen] == found[:4] and len(set(found)) == 5
    assert {text.partition(", ")[0] for text in found} == {"tok"}
    assert len({tuple(sorted(bulk.tags_of(text))) for text in found}) == 1


def test_an_edit_that_cannot_be_done_says_why_and_changes_nothing(mine):
    filled(mine, "a" * 60 + "!", "b")
    for edit, message in (
        ({"kind": "replace", "find": "(a|aa)+$", "with": "", "pattern": True}, "simplify it. Nested repetitions"),
        ({"kind": "replace", "find": r"(?s)(?=(.*)).", "with": r"\1" * 600, "pattern": True}, "more than 20000"),
        ({"kind": "replace", "find": "(?:a{3000}){3000}", "with": "", "pattern": True}, "multiply to more than 10000"),
        ({"kind": "replace", "find": "(", "with": "", "pattern": True}, "not a valid regular expression"),
        ({"kind": "replace", "find": "(?:a|(?R))*", "with": "", "pattern": True}, "cannot contain itself"),
        ({"kind": "replace", "find": "a", "with": r"\7", "pattern": True}, "Replace with: "),
        ({"kind": "replace", "find": "a", "with": "b" * 1990}, "00000.png: the caption would have"),
        ({"kind": "replace", "find": "", "with": "b"}, "Type the text to find"),
        ({"kind": "remove_tags", "tags": ", ,"}, "Type a tag to remove"),
        ({"kind": "shuffle", "keep": -1}, "whole number from 0 to 1000"),
        ({"kind": "prefix", "text": "x" * 3000}, "shorten it to 2000"),
        ({"kind": "rm -rf"}, "There is no edit"),
    ):
        for call in (bulk.preview, bulk.apply):
            with pytest.raises(RunError, match=message):
                call(mine, None, edit)
        assert texts(mine) == ["a" * 60 + "!", "b"]


HOSTILE, CHECKED = st.text(st.sampled_from("ab(){}[]*+?|^$\\.,<>&\n\0é\ud83d💥 1"), max_size=12), st.booleans()


EDITS = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("replace"), "find": HOSTILE, "with": HOSTILE, "pattern": CHECKED, "any_case": CHECKED}),
    st.fixed_dictionaries({"kind": st.sampled_from(["prefix", "suffix"]), "text": HOSTILE}),
    st.fixed_dictionaries({"kind": st.just("remove_tags"), "tags": HOSTILE}),
    st.fixed_dictionaries(
        {"kind": st.just("shuffle"), "keep": st.integers(-2, 4) | st.text(max_size=2), "seed": st.integers() | st.none()}),
    st.dictionaries(st.sampled_from(["kind", "find", "text"]), st.none() | st.integers() | HOSTILE),
)  # fmt: skip


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edit=EDITS, before=st.lists(HOSTILE, min_size=1, max_size=5), chosen=st.sets(st.integers(0, 6)))
def test_any_edit_of_any_captions_is_an_error_or_one_step(mine, edit, before, chosen):
    ids = filled(mine, *map(draft.plain_text, before))
    own = [ids[n] if n < len(ids) else "gone" for n in chosen]
    old = texts(mine)
    try:
        changed = bulk.apply(mine, own, edit)
    except RunError as error:
        assert texts(mine) == old and str(error)
        return
    now = texts(mine)
    assert changed == sum(a != b for a, b in zip(old, now, strict=True))
    assert all(a == b for n, (a, b) in enumerate(zip(old, now, strict=True)) if ids[n] not in own)
    assert all(text.encode() is not None and len(text) <= draft_store.MAX_CAPTION for text in now)
    if changed:
        draft.undo(mine)
        assert texts(mine) == old


def test_the_wait_for_another_process_is_not_the_patterns(monkeypatch):
    monkeypatch.setattr(bulk, "PATTERN_S", 0.2)
    edit = bulk.KINDS["replace"].make({"kind": "replace", "find": "a+", "with": "b", "pattern": True})
    time.sleep(0.3)
    assert edit("aa c", "") == "b c"


def bulk_fields(kind: str = "replace", find: str = "", put: str = "", **more) -> list:
    given = {"pattern": False, "any_case": False, "keep": 1, "seed": 5, "some": True}
    return [kind, find, put, *{**given, "ids": [], **more}.values()]


def test_the_preview_of_the_fold_is_text_and_an_error_a_sentence(mine):
    """tests/browser changes many captions and moves images."""
    ids = filled(mine, "a cat", "", "<b> cat")
    run, parts = drawn(bulk.draw, mine, Mock())
    assert [name for name, part in parts.items() if part.get("interactive") is False] == ["Change captions"]
    look = lambda *given, **more: run["look"](*bulk_fields(*given, **more))  # noqa: E731
    assert look() == ["", gr.update(value="Change captions", interactive=False)]
    effect, button = look("replace", "cat", "dog")
    assert "2 of 3 captions change." in effect and "<del>&lt;b&gt; cat</del><ins>&lt;b&gt; dog</ins>" in effect
    assert button == gr.update(value="Change 2 captions", interactive=True)
    assert "2 of 2 captions change." in look("prefix", "x ", ids=ids[:2])[0]
    assert "3 of 3" in look("prefix", "x ", ids=ids[:2], some=False)[0]
    effect, button = look("replace", "(", pattern=True)
    assert "not a valid regular expression" in effect and not button["interactive"]
    said, seed = run["on_apply"](*bulk_fields("remove_tags", "a cat", ids=ids))
    assert "1 caption changed." in said and seed == 6 and texts(mine) == ["", "", "<b> cat"]
    assert [one["visible"] for one in run["on_kind"]("shuffle")] == [False, False, True]
    assert "Select images on their cards first" in run["on_move"]("cat", 10, [])
    assert "2 images moved." in run["on_move"]("cat", 10, ids[:2])
    assert run["lists"]("gone", 3)[0]["value"] is None and run["lists"]("10_cat", 4)[0]["value"] == "10_cat"
    assert run["on_subset"]("10_cat") == ["cat", 10]
    assert "the subset has 2 images." in run["on_save"]("10_cat", "dog", None)
    assert {item.folder for item in draft.items(mine)} == {"dog", ""}
