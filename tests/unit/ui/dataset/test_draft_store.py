"""A draft's file: what was stored is there after a kill, and two processes lose nothing."""

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import time

import pytest
from draft_helpers import filled, texts
from hypothesis import given, settings, strategies as st

from ui.dataset import bulk, doctor, draft, draft_store
from ui.new import new_lora

WRITER = """
import sys
from ui.dataset import bulk, draft, draft_store
draft_id, key, name = sys.argv[1:]
for n in range(100_000):
    draft.set_caption(draft_id, key, f"{name} {n}")
    if n % 3 == 0:
        bulk.apply(draft_id, None, {"kind": "replace", "find": "bulk", "with": "bulk"[::-1] if n % 2 else "bulk"})
    print(n, flush=True)
"""


@pytest.mark.slow
def test_two_writers_that_are_killed_lose_no_caption_that_was_stored(mine):
    ids = filled(mine, *["bulk"] * 300)
    draw = random.Random(7)
    for turn in range(2):
        commands = [[sys.executable, "-c", WRITER, mine, ids[n], f"writer{n} turn{turn}"] for n in range(2)]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        first = [int(one.stdout.readline()) for one in both]  # both write now
        time.sleep(draw.uniform(0.05, 0.4))
        for one in both:
            one.kill()
        last = [max([first[n], *map(int, one.stdout.read().split())]) for n, one in enumerate(both)]
        for one in both:
            one.wait(60)
            one.stdout.close()
        for n in range(2):
            found = texts(mine)[n]
            assert found.startswith(f"writer{n} turn{turn} "), "the other process did not overwrite it"
            assert int(found.rpartition(" ")[2]) in (last[n], last[n] + 1), "the last one printed, or the one after it"
        assert len({text for text in texts(mine)[2:]}) == 1, "a bulk edit is stored as a whole"
    assert draft.undo(mine) and draft.undo(mine, back=False)


def test_a_change_of_another_process_is_seen_and_can_be_undone_here(mine):
    ids = filled(mine, "a", "b", "c")
    assert texts(mine) == ["a", "b", "c"]
    code = (
        f"from ui.dataset import draft; draft.set_caption({mine!r}, {ids[0]!r}, 'other'); "
        f"draft.remove({mine!r}, [{ids[1]!r}])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert texts(mine) == ["other", "c"]
    for wanted in (["other", "b", "c"], ["a", "b", "c"]):
        draft.undo(mine)
        assert texts(mine) == wanted


@pytest.mark.slow
def test_ten_thousand_images_are_changed_in_a_moment(mine):
    """Processor time, because the tests run on busy machines."""
    filled(mine, *[f"old tag, tag {n}" for n in range(10_000)])
    draft.items(mine)
    ids = list(draft_store.read(mine)["images"])
    for act, words, limit_s in (
        (bulk.apply, (None, {"kind": "replace", "find": "old", "with": "new"}), 1.5),
        (draft.undo, (), 1.5),
        (doctor.examine, (), 5.0),
        (draft.set_caption, (ids[0], "typed"), 0.3),
        (draft.remove, (ids[:1],), 1.5),
    ):
        began = time.process_time()
        act(mine, *words)
        assert time.process_time() - began < limit_s, act
    assert len(draft.items(mine)) == 9999


@pytest.mark.parametrize("version", [1, 2, 99])
def test_a_draft_of_another_version_is_refused_with_the_folder_of_its_images_and_stays(mine, version):
    filled(mine, "a")
    path, image = draft.folder(mine) / draft_store.NAME, draft_store.images_dir(mine) / "a.png"
    draft_store.close(path)
    image.parent.mkdir()
    image.touch()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute(f"PRAGMA user_version = {version}")
    os.utime(path, (0, 0))
    note = new_lora.load(mine)[2]
    assert f"its Export (ZIP) keeps the captions); its images are in {image.parent}." in note
    draft.delete_expired()
    assert image.exists() and path.exists(), "it expires 60 days after the refusal"


def test_a_draft_on_a_network_drive_has_no_mapped_file_once_nobody_else_has_it_open(mine, monkeypatch):
    """A drive that fails kills a process that reads a map of its file (SIGBUS)."""
    ids, path = filled(mine, "a", "b"), draft.folder(mine) / draft_store.NAME
    draft_store.close(path)
    with contextlib.closing(sqlite3.connect(path)) as older:  # an earlier version has it open
        assert older.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert older.execute("SELECT count(*) FROM content").fetchone() >= (2,)
        monkeypatch.setattr(draft_store.lint, "file_system", lambda _: ("nfs4", "/nas"))
        draft.set_caption(mine, ids[0], "while it is open")
        draft_store.close(path)
    assert texts(mine) == ["while it is open", "b"]
    draft.set_caption(mine, ids[0], "now")
    assert not [*path.parent.glob("*-shm")] and texts(mine) == ["now", "b"]


def test_a_full_disk_stores_nothing_and_says_so(mine, monkeypatch):
    ids = filled(mine, "a", "b")
    file = draft_store._file(mine)
    pages = file.db.execute("PRAGMA page_count").fetchone()[0]
    file.db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(draft.RunError, match="the disk is full; free some space"):
        for n in range(50):
            text = f"{n}" + "x" * 15_000
            draft.change_images(mine, ids[:1], lambda _, entry, text=text: draft.captioned(entry, text), "long")
    file.db.execute("PRAGMA max_page_count = 1000000")
    now = texts(mine)
    draft_store.close(file.path)
    assert texts(mine) == now and now[1] == "b", "what it shows is what is on disk"
    draft.set_caption(mine, ids[1], "again")
    assert texts(mine)[1] == "again"


KEYS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@settings(max_examples=50)
@given(before=KEYS, after=KEYS, changed=st.sets(st.sampled_from("abcdefgh")))
def test_a_step_leads_from_each_state_to_the_other_in_its_order(before, after, changed):
    old = {"images": draft_store.placed({key: {"caption": key} for key in before}), "texts": {}}
    table = {key: {**old["images"].get(key, {}), "caption": key.upper() if key in changed else key} for key in after}
    new = {"images": draft_store.placed(table), "texts": {}}
    for start, end in ((new, old), (old, new)):
        found = draft_store.applied(start, draft_store.difference(end, start))
        assert found == end and list(found["images"]) == list(end["images"])


def test_changes_that_become_one_step_write_their_own_rows_and_undo_brings_back_what_was_before_all(mine):
    """Else a drop of 5,000 images, which arrives in hundreds of parts, writes the rows of all earlier parts with each."""
    draw, written = random.Random(1), []
    filled(mine, "first")
    file = draft_store._file(mine)
    for part in range(6):
        before = file.db.total_changes
        with draft_store.change(mine, merge="drop") as edit:
            edit.label = lambda number: f"{number} images"
            edit.state["images"] |= {f"{part}-{n}": {"caption": ""} for n in range(20)}
        written.append(file.db.total_changes - before)
    assert len(set(written[1:])) == 1 and draft.history(mine) == ("120 images", "")
    assert draft.undo(mine) == "Undone: 120 images." and texts(mine) == ["first"]
    for number in range(60):
        start, said = file.state["images"], draft.history(mine)[0]
        for _ in range(draw.randint(1, 5)):
            with draft_store.change(mine, merge=f"step {number}") as edit:
                edit.label, images = f"step {number}", edit.state["images"]
                for key in draw.sample("abcd", 2):
                    row = images.pop(key, {"caption": "", "turn": 0})
                    if draw.random() < 0.7:
                        images[key] = {**row, draw.choice(["caption", "turn"]): draw.randint(0, 1)}
        end = file.state["images"]
        assert draft.history(mine)[0] == (said if end == start else f"step {number}")
        if end != start:
            draft.undo(mine)
            assert [*file.state["images"].items()] == [*start.items()]
            draft.undo(mine, back=False)
            assert [*file.state["images"].items()] == [*end.items()]
