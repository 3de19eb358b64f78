"""Edits of many captions, filters, tags and subsets: what they change, what they refuse, and that each is one step."""

import time

import pytest
from draft_helpers import captions, drop, filled, item_of, note, photo, run_of, set_caption, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runs
from runs import dataset
from runs.files import RunError
from ui.dataset import bulk, draft, draft_store, selection, subsets
from ui.dataset.draft_store import applied, difference, placed
from ui.dataset.selection import Query


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A regular expression that needs long is given up soon."""
    monkeypatch.setattr(bulk, "PATTERN_S", 0.3)


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        ({"kind": "prefix", "text": "tok, "}, ["a cat", "", "tok, b"], ["tok, a cat", "tok", "tok, b"]),
        ({"kind": "suffix", "text": ", grain"}, ["a", "", "b, grain"], ["a, grain", "grain", "b, grain"]),
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
        assert texts(mine) == before and draft.redo(mine) and texts(mine) == after
        bulk.apply(mine, ids[:1], {"kind": "prefix", "text": "only this "})
        assert texts(mine)[1:] == after[1:]


def test_tags_are_shuffled_as_the_preview_showed_and_the_first_stay(mine):
    ids = filled(mine, *["tok, " + ", ".join(f"t{n}" for n in range(12))] * 5)
    edit = {"kind": "shuffle", "keep": 1, "seed": 77}
    seen = bulk.preview(mine, None, edit)["examples"]
    assert bulk.apply(mine, ids, edit) == 5
    found = texts(mine)
    assert [one["after"] for one in seen] == found[:4] and len(set(found)) == 5
    assert all(
        text.startswith("tok, ") and sorted(bulk.tags_of(text)) == sorted(bulk.tags_of(found[0])) for text in found
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"kind": "replace", "find": "(a|aa)+$", "with": "", "pattern": True}, "simplify it. Nested repetitions"),
        (
            {"kind": "replace", "find": r"(?s)(?=(.*)).", "with": r"\1" * 600, "pattern": True},
            "more than 20000 characters",
        ),
        ({"kind": "replace", "find": "(?:a{3000}){3000}", "with": "", "pattern": True}, "multiply to more than 10000"),
        ({"kind": "replace", "find": "(", "with": "", "pattern": True}, "not a valid regular expression"),
        ({"kind": "replace", "find": "a", "with": r"\7", "pattern": True}, "Replace with: "),
        ({"kind": "replace", "find": "a", "with": "b" * 1990}, "00000.png: the caption would have"),
        ({"kind": "replace", "find": "", "with": "b"}, "Type the text to find"),
        ({"kind": "remove_tags", "tags": ", ,"}, "Type a tag to remove"),
        ({"kind": "shuffle", "keep": -1}, "whole number from 0 to 1000"),
        ({"kind": "prefix", "text": "x" * 3000}, "shorten it to 2000"),
        ({"kind": "rm -rf"}, "There is no edit"),
    ],
)
def test_an_edit_that_cannot_be_done_says_why_and_changes_nothing(mine, edit, message):
    filled(mine, "a" * 60 + "!", "b")
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


KEYS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@settings(max_examples=50)
@given(before=KEYS, after=KEYS, changed=st.sets(st.sampled_from("abcdefgh")))
def test_a_step_leads_from_each_state_to_the_other_in_its_order(before, after, changed):
    old = {"images": placed({key: {"caption": key} for key in before}), "texts": {}}
    table = {key: {**old["images"].get(key, {}), "caption": key.upper() if key in changed else key} for key in after}
    new = {"images": placed(table), "texts": {}}
    for start, end in ((new, old), (old, new)):
        found = applied(start, difference(end, start))
        assert found == end and list(found["images"]) == list(end["images"])


def test_images_are_found_by_caption_tag_and_subset(mine):
    ids = filled(mine, "1girl, red hair, solo", "a girl with Red Hair", "", "solo")
    subsets.move(mine, ids[3:], "extra", 5)
    items = draft.items(mine)

    def found(**query):
        return [ids.index(item.id) for item in Query(**query).found(items)]

    assert found() == [0, 1, 2, 3] and found(kind="no_caption") == [2]
    assert found(text="RED hair") == [0, 1] and found(how="lacks", text="red") == [2, 3]
    assert found(how="tag", text=" Red  hair ") == [0] and found(how="no_tag", text="red hair") == [1, 2, 3]
    assert found(folder="5_extra") == [3] and found(folder="", text="solo") == [0] and found(kind="model") == []
    assert selection.ids(mine, Query(text="o"), (ids[3], ids[0])) == [ids[0], ids[3]]
    with pytest.raises(RunError, match="no longer shown"):
        selection.ids(mine, Query(text="solo"), (ids[1], ids[3]))
    assert selection.tags(mine) == {
        "tags": [["solo", 2], ["1girl", 1], ["a girl with Red Hair", 1], ["red hair", 1]],
        "total": 4,
    }


def test_subsets_with_their_repeats_reach_the_data_set(mine, tmp_path):
    drop(mine, *(photo(tmp_path / f"{n}.png", n) for n in range(4)), note(tmp_path / "0.txt", "zero"))
    ids = [item.id for item in draft.items(mine)]
    assert subsets.move(mine, ids[:2], "my cat", 10) == 2 and subsets.move(mine, ids[2:3], "dogs") == 1
    found = [(one["name"], one["repeats"], one["images"]) for one in subsets.overview(mine)]
    assert found == [("my cat", 10, 2), ("dogs", None, 1), ("", None, 1)]
    assert subsets.move(mine, ids[3:], "my cat") == 1, "into the existing subset, whatever its repeats"
    assert subsets.rename(mine, "dogs", "wolves", 3) == 1 and subsets.rename(mine, "10_my cat", "my cat", 7) == 3
    run_of(mine)
    assert dataset.counts(runs.datasets_dir() / "my-lora") == draft.counts(mine) == {"7_my-cat": 3, "3_wolves": 1}
    while draft.undo(mine):
        assert len(draft.items(mine)) in (0, 4)
    assert draft.items(mine) == []
    while draft.redo(mine):
        assert len(draft.items(mine)) == 4
    assert draft.counts(mine) == {"7_my-cat": 3, "3_wolves": 1} and captions(mine)["7_my cat/0.png"] == "zero"


def test_a_moved_image_keeps_its_identity_when_its_file_is_dropped_again(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", 1), photo(tmp_path / "b.png", 2))
    key = item_of(mine, "a.png").id
    subsets.move(mine, [key], "cat")
    set_caption(mine, "cat/a.png", "typed")
    assert drop(mine, (tmp_path / "a.png", "cat/a.png"))[0] == 0, "it is in that folder already"
    assert captions(mine) == {"cat/a.png": "typed", "b.png": ""}
    with pytest.raises(RunError, match="the same image is in that subset"):
        drop(mine, (tmp_path / "b.png", "cat/b.png"))
        subsets.move(mine, [item_of(mine, "b.png").id], "cat")


@pytest.mark.parametrize(
    ("name", "repeats", "message"),
    [
        ("../x", None, r"without \.\."),
        ("/etc", None, "without a slash at its start"),
        (".hidden", None, "starts with a dot"),
        ("x" * 101, None, "shorten it to 100"),
        ("", 3, "name the subset first"),
        ("x", 0, "from 1 to 9999"),
        ("x", "3", "from 1 to 9999"),
    ],
)
def test_a_subset_that_cannot_be_is_refused(mine, name, repeats, message):
    ids = filled(mine, "a", "b")
    with pytest.raises(RunError, match=message):
        subsets.move(mine, ids, name, repeats)
    assert [one["folder"] for one in subsets.overview(mine)] == [""]


def test_subset_names_do_not_collide(mine):
    ids = filled(mine, "a", "b", "c")
    subsets.move(mine, ids[:1], "cat", 10), subsets.move(mine, ids[1:2], "dog")
    for old, wanted, message in (
        ("dog", "cat", "There is a subset 'cat' already"),
        ("horse", "x", "no images any more"),
    ):
        with pytest.raises(RunError, match=message):
            subsets.rename(mine, old, wanted)
    assert subsets.rename(mine, "", "rest", 2) == 1 and subsets.parts_of("set/10_cat/x") == ("set/cat/x", 10)


def test_values_of_images_are_stored_and_undone_as_one_step(mine):
    ids = filled(mine, "a", "b")
    assert draft.change_images(mine, ids, lambda *_: {"weight": 3, "crop": [0, 0.25, 1, 0.75]}, "crop of {}") == 2
    assert draft.change_images(mine, [*ids, "gone"], lambda *_: {"weight": 3}, "weight") == 0
    (item, _) = draft.items(mine)
    assert (item.crop, item.weight, item.mask) == ((0, 0.25, 1, 0.75), 3, None)
    assert draft.sources(mine)[0].crop == (0, 0.25, 1, 0.75) and draft.sources(mine)[0].weight == 3
    assert draft.undo(mine) == "Undone: crop of 2 images." and draft.items(mine)[0].crop is None
    with pytest.raises(RunError, match="was removed"):
        draft.change_images(mine, [ids[0], "gone"], lambda *_: {"weight": 2}, "x", needed=True)
    assert draft.items(mine)[0].weight == 1, "all or none"


def test_the_wait_for_another_process_is_not_the_patterns(monkeypatch):
    monkeypatch.setattr(bulk, "PATTERN_S", 0.2)
    fields = {"kind": "replace", "find": "a+", "with": "b", "pattern": True}
    edit = bulk.KINDS["replace"].make(fields)
    time.sleep(0.3)
    assert edit("aa c", "") == "b c"
