"""Every change of a draft can be undone and redone, and no change is lost."""

import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from draft_helpers import captions, drop, photo, set_caption

import runs
from ui.dataset import draft


@pytest.fixture
def no_merging(monkeypatch):
    monkeypatch.setattr(draft, "MERGE_S", 0)


def test_the_history_says_what_it_will_do(mine, tmp_path, no_merging):
    drop(mine, photo(tmp_path / "cat.png", 1), photo(tmp_path / "dog.png", 2))
    set_caption(mine, "cat.png", "a cat")
    draft.insert_trigger(mine, "tok")
    assert draft.history(mine) == ("trigger word in 2 captions", "")
    assert draft.undo(mine) == "Undone: trigger word in 2 captions."
    assert draft.history(mine) == ("caption of cat.png", "trigger word in 2 captions")
    draft.undo(mine)
    set_caption(mine, "dog.png", "a dog")
    assert draft.history(mine) == ("caption of dog.png", ""), "a new change ends what can be redone"


def test_typing_is_one_step_and_one_drop_is_one_step(mine, tmp_path):
    for n in range(3):
        drop(mine, photo(tmp_path / f"{n}.png", n), drop="one", more=n < 2)
    for end in range(1, 6):
        set_caption(mine, "0.png", "a cat"[:end])
    assert draft.undo(mine) == "Undone: caption of 0.png." and captions(mine)["0.png"] == ""
    assert draft.undo(mine) == "Undone: adding of 3 images." and captions(mine) == {}
    draft.redo(mine), draft.redo(mine)
    assert captions(mine) == {"0.png": "a cat", "1.png": "", "2.png": ""}


def test_a_history_that_was_damaged_is_an_error_and_loses_nothing(mine, tmp_path):
    drop(mine, photo(tmp_path / "0.png", 0))
    with contextlib.closing(sqlite3.connect(draft.folder(mine) / "draft.sqlite")) as db, db:
        db.execute("UPDATE steps SET step = x'00'")
    with pytest.raises(runs.RunError, match="cannot be undone"):
        draft.undo(mine)
    set_caption(mine, "0.png", "still here")
    assert captions(mine) == {"0.png": "still here"}


def test_half_a_character_from_a_browser_is_stored_as_text_that_can_be_sent_back(mine, tmp_path):
    drop(mine, (photo(tmp_path / "x.png"), "\ud83d/\udc31\ud83d.png"))
    (item,) = draft.items(mine)
    draft.set_caption(mine, item.id, "a \ud83d cat \ud83d\ude00")
    draft.save_fields(mine, {"prompts": "\udc31"})
    (item,) = draft.items(mine)
    assert item.caption == "a � cat 😀" and f"{item}{draft.form(mine)}".encode()


def test_two_threads_lose_no_change(mine, tmp_path):
    drop(mine, *(photo(tmp_path / f"{n}.png", n) for n in range(4)))
    ids = [item.id for item in draft.items(mine)]

    def work(key):
        for n in range(8):
            draft.set_caption(mine, key, f"{key} {n}")

    more = [photo(tmp_path / f"t{n}.png", 50 + n) for n in range(2)]
    with ThreadPoolExecutor(6) as pool:
        work_done = [*(pool.submit(work, key) for key in ids), *(pool.submit(drop, mine, path) for path in more)]
    assert [one.exception() for one in work_done] == [None] * 6
    found = {item.id: item.caption for item in draft.items(mine)}
    assert len(found) == 6 and all(found[key] == f"{key} 7" for key in ids)
