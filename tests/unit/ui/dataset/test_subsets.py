"""Subsets: their names, their repeats, and the images that move into them."""

import pytest
from draft_helpers import captions, drop, filled, item_of, note, photo, run_of, set_caption

import runs
from runs import dataset
from runs.files import RunError
from ui.dataset import draft, subsets


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
    assert captions(mine)["7_my cat/0.png"] == "zero"


def test_a_moved_image_keeps_its_identity_when_its_file_is_dropped_again(mine, tmp_path):
    drop(mine, photo(tmp_path / "a.png", 1), photo(tmp_path / "b.png", 2))
    key = item_of(mine, "a.png").id
    subsets.move(mine, [key], "cat")
    set_caption(mine, "cat/a.png", "typed")
    assert drop(mine, (tmp_path / "a.png", "cat/a.png"))[0] == 0, "it is in that folder already"
    assert captions(mine) == {"cat/a.png": "typed", "b.png": ""}
    with pytest.raises(RunError, match="the same image is there"):
        drop(mine, (tmp_path / "b.png", "cat/b.png"))
        subsets.move(mine, [item_of(mine, "b.png").id], "cat")


def test_a_subset_that_cannot_be_is_refused_and_names_do_not_collide(mine):
    ids = filled(mine, "a", "b", "c")
    for name, repeats, message in (
        ("../x", None, r"without \.\."),
        ("/etc", None, "without a slash at its start"),
        (".hidden", None, "starts with a dot"),
        ("x" * 101, None, "shorten it to 100"),
        ("", 3, "name the subset first"),
        ("x", 0, "from 1 to 9999"),
        ("x", "3", "from 1 to 9999"),
    ):
        with pytest.raises(RunError, match=message):
            subsets.move(mine, ids, name, repeats)
        assert [one["folder"] for one in subsets.overview(mine)] == [""]
    subsets.move(mine, ids[:1], "cat", 10), subsets.move(mine, ids[1:2], "dog")
    for old, wanted, message in (("dog", "cat", "There is a subset 'cat' already"), ("horse", "x", "no images")):
        with pytest.raises(RunError, match=message):
            subsets.rename(mine, old, wanted)
    subsets.move(mine, ids[1:2], "cat", 20)
    assert [one["folder"] for one in subsets.overview(mine)] == ["10_cat", "20_cat", ""]
    with pytest.raises(RunError, match="There is a subset 'cat' already"):
        subsets.rename(mine, "20_cat", "cat", 10)
    assert subsets.rename(mine, "20_cat", "cat", 30) == 1 and subsets.rename(mine, "30_cat", "") == 1
    subsets.move(mine, ids[1:2], "dog")
    assert subsets.rename(mine, "", "rest", 2) == 1 and subsets.parts_of("set/10_cat/x") == ("set/cat/x", 10)
