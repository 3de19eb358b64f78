"""Every change of a draft can be undone and redone, in any order: every file that this can reach is there."""

import base64
import contextlib
import hashlib
import shutil
import sqlite3
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from draft_helpers import captions, drop, item_of, note, photo, set_caption
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from PIL import Image

import runs
from runs import masks
from ui.dataset import draft, draft_store, image_edit, subsets

HISTORY = 4  # steps of undo that the walk has: files leave the history early and often
FILES = 6  # different pictures that are dropped
EDITS = {  # what changes one image: the function, and its values
    draft.set_caption: st.tuples(st.text(max_size=12)),
    image_edit.crop: st.tuples(st.sampled_from([None, [0, 0, 0.5, 1], [0.25, 0.25, 1, 1]])),
    image_edit.rotate: st.just((1,)),
    image_edit.mask: st.integers(1, 254).map(
        lambda level: (base64.b64encode(masks.png(Image.new("L", (64, 64), level))).decode(),)
    ),
    subsets.move: st.tuples(st.sampled_from(["10_cat", "dog"]), st.none()),
    draft.remove: st.just(()),
}


@pytest.fixture
def no_merging(monkeypatch):
    monkeypatch.setattr(draft, "MERGE_S", 0)


def test_typing_is_one_step_and_one_drop_is_one_step(mine, tmp_path):
    for n in range(3):
        drop(mine, photo(tmp_path / f"{n}.png", n), drop="one", more=n < 2)
    for end in range(1, 6):
        set_caption(mine, "0.png", "a cat"[:end])
    assert draft.undo(mine) == "Undone: caption of 0.png." and captions(mine)["0.png"] == ""
    assert draft.history(mine) == ("addition of 3 images", "caption of 0.png")
    assert draft.undo(mine) == "Undone: addition of 3 images." and captions(mine) == {}
    draft.undo(mine, back=False), draft.undo(mine, back=False)
    assert captions(mine) == {"0.png": "a cat", "1.png": "", "2.png": ""}
    draft.undo(mine)
    set_caption(mine, "1.png", "a dog")
    assert draft.history(mine) == ("caption of 1.png", ""), "a new change ends what can be redone"


def test_a_history_that_was_damaged_is_an_error_and_loses_nothing(mine, tmp_path):
    drop(mine, photo(tmp_path / "0.png", 0))
    with contextlib.closing(sqlite3.connect(draft.folder(mine) / "draft.sqlite")) as db, db:
        db.execute("UPDATE undo SET value = 'AA=='")
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
    image_edit.rotate(mine, ids[0])
    with ThreadPoolExecutor(8) as pool:  # pages that ask for one new thumbnail
        shown = set(pool.map(lambda _: draft.thumb(mine, draft.item(mine, ids[0])), range(32)))
    assert [path.is_file() for path in shown] == [True]


def reachable(draft_id: str) -> list[dict]:
    """The contents that undo and redo can reach, with that of now."""
    with draft_store.locked(draft_id) as file:
        found, done = [file.state], file.state["done"]
        for numbers in (range(done, 0, -1), range(done + 1, done + HISTORY + 1)):
            state = file.state
            for number in numbers:
                state = draft_store.applied(state, file.step(number))
                found.append(state)
    return found


def check_files(draft_id: str) -> None:
    """Every file that a reachable content names is there, and is what the content says."""
    for state in reachable(draft_id):
        for entry in state["images"].values():
            files = {draft.images_dir(draft_id) / entry["stored"]: entry["sha256"]}
            if entry["mask"]:
                files[draft.masks_dir(draft_id) / entry["mask"]] = entry["mask"][:24]
            for path, digest in files.items():
                assert path.is_file(), f"{entry['file']}: {path} is gone"
                assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest), path


def test_a_picture_that_is_dropped_again_while_it_is_deleted_stays(mine, tmp_path, monkeypatch, no_merging):
    """Two threads: one opens the draft anew, which deletes what left the history, the other drops the picture again."""
    monkeypatch.setattr(draft_store, "HISTORY_STEPS", 1)
    pictures = [photo(tmp_path / f"{n}.png", n) for n in range(2)]
    drop(mine, *pictures)
    keep = item_of(mine, "0.png").id
    ended = threading.Event()

    def edit() -> None:
        n = 0
        while not ended.is_set():
            n += 1
            draft.set_caption(mine, keep, f"{n}")
            draft_store.close(draft.folder(mine) / draft_store.NAME)

    thread = threading.Thread(target=edit)
    thread.start()
    try:
        for _ in range(15):
            draft.remove(mine, [item.id for item in draft.items(mine) if item.id != keep])
            drop(mine, pictures[1])
            assert all(draft.original(mine, item.id).is_file() for item in draft.items(mine))
    finally:
        ended.set()
        thread.join()
    check_files(mine)


class Walk(RuleBasedStateMachine):
    """Every change of a draft, in any order, with undo and redo: each of these leads to exactly the state before it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("HANGPROOF_DATA", str(self.place / "data"))
        self.patch.setattr(draft_store, "HISTORY_STEPS", HISTORY)
        self.patch.setattr(draft, "MERGE_S", 0)
        self.mine = draft.new_id()
        draft.save_fields(self.mine, {"trigger": "tok"})
        self.past: list = []
        self.future: list = []
        self.files = [photo(self.place / f"{n}.png", n, size=(64, 64)) for n in range(FILES)]
        self.numbers = {hashlib.sha256(path.read_bytes()).hexdigest(): n for n, path in enumerate(self.files)}

    def state(self) -> tuple:
        return draft.items(self.mine), draft.waiting(self.mine)

    def change(self, act, *given) -> None:
        before = self.state()
        act(self.mine, *given)
        if self.state() != before:
            self.past, self.future = [*self.past, before][-HISTORY:], []

    def one(self, which: int) -> draft.Item:
        items = draft.items(self.mine)
        return items[which % len(items)]

    @rule(chosen=st.lists(st.integers(0, FILES - 1), min_size=1, max_size=3, unique=True), captioned=st.booleans())
    def drop(self, chosen: list[int], captioned: bool) -> None:
        texts = [note(self.place / f"{n}.txt", f"of {n}") for n in chosen if captioned]
        self.change(drop, *texts, *(self.files[n] for n in chosen))
        for item in draft.items(self.mine):
            if item.caption_by == "file":
                assert item.caption.endswith(f"of {self.numbers[item.sha256]}")

    @precondition(lambda self: draft.items(self.mine))
    @rule(which=st.integers(0, 99), data=st.data(), act=st.sampled_from(list(EDITS)))
    def edit(self, which: int, data: st.DataObject, act) -> None:
        item, given = self.one(which), data.draw(EDITS[act])
        before = {one.id: one.caption for one in draft.items(self.mine)}
        if act is image_edit.mask:
            given = (*given, item.turn)
        self.change(act, [item.id] if act in (subsets.move, draft.remove) else item.id, *given)
        if act is draft.set_caption:
            after = {one.id: one.caption for one in draft.items(self.mine)}
            assert after == {**before, item.id: draft.plain_text(*given)}

    @rule()
    def clear(self) -> None:
        self.change(draft.clear)

    @rule()
    def trigger(self) -> None:
        self.change(draft.insert_trigger)

    @rule(back=st.integers(0, HISTORY), forth=st.integers(0, HISTORY))
    def undo_and_redo(self, back: int, forth: int) -> None:
        for act, times, there, here in (
            (draft.undo, back, self.past, self.future),
            (lambda mine: draft.undo(mine, back=False), forth, self.future, self.past),
        ):
            for _ in range(times):
                before = self.state()
                assert (act(self.mine) is not None) == bool(there)
                if there:
                    here.append(before)
                    assert self.state() == there.pop()

    @rule()
    def reopen(self) -> None:
        draft_store.close(draft.folder(self.mine) / "draft.sqlite")  # as another process does
        draft.items(self.mine)
        tables = [state["images"] for state in reachable(self.mine)]
        named = {entry[field] for table in tables for entry in table.values() for field in ("stored", "mask")}
        found = {path.name for kind in (draft.images_dir, draft.masks_dir) for path in kind(self.mine).glob("*")}
        assert found <= named, "a file that no reachable content names"
        thumbs = {path.name[:24] for path in draft.folder(self.mine).glob("thumbs/*")}
        assert thumbs <= {key for table in tables for key in table}

    @invariant()
    def every_reachable_file_is_there(self) -> None:
        check_files(self.mine)
        assert draft.form(self.mine) == {"trigger": "tok"}
        assert all(draft.thumb(self.mine, item).is_file() for item in draft.items(self.mine))

    def teardown(self) -> None:
        draft_store.close(draft.folder(self.mine) / "draft.sqlite")
        self.patch.undo()
        shutil.rmtree(self.place)


@pytest.mark.slow
def test_every_reachable_file_is_there_whatever_is_done():
    options = settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Walk, settings=options)
