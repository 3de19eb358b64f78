"""Dropped folders: every caption on its own picture, through the whole run. (In any order of arrival: test_hostile.py.)"""

import errno
import itertools
import shutil
from unittest.mock import Mock

import pytest
import tomllib
from draft_helpers import captions, drop, note, photo, run_of, set_caption, tree, upload

import runs
from runs import dataset, pictures
from ui.dataset import draft, draft_drop, images


def test_identical_files_in_two_folders_are_two_images_and_twice_in_one_folder_is_one(mine, tmp_path):
    same = photo(tmp_path / "x.png")
    added, messages = drop(mine, (same, "a/2.png"), (same, "b/2.png"), (same, "b/copy.png"))
    assert added == 2 and messages == ["b/copy.png: already added as b/2.png"]
    assert sorted(captions(mine)) == ["a/2.png", "b/2.png"] and len({item.id for item in draft.items(mine)}) == 2
    set_caption(mine, "a/2.png", "only a")
    assert captions(mine) == {"a/2.png": "only a", "b/2.png": ""}


def test_a_caption_whose_name_macos_has_written_in_the_other_way_belongs_to_its_image(mine, tmp_path):
    """é as one character, as browsers write it, and as e with an accent, as the Finder does."""
    photo(tmp_path / "in" / "caf\u00e9.png")
    note(tmp_path / "in" / "cafe\u0301.txt", "a coffee")
    _, messages = drop(mine, *tree(tmp_path / "in"))
    assert messages == [] and list(captions(mine).values()) == ["a coffee"]
    assert [one.caption for one in dataset.gather(tmp_path / "in")] == ["a coffee"]


def test_two_drops_of_one_file_share_an_upload_and_both_work(data, mine, tmp_path):
    shared, other = upload(photo(tmp_path / "x.png")), draft.new_id()
    assert draft.add(mine, [(shared, "x.png")]) == (1, []) and shared.exists()
    assert draft.add(other, [(shared, "x.png")]) == (1, []) and shared.exists()
    shared.write_bytes(b"Gradio writes the upload again")
    for one in (mine, other):
        pictures.decoded(draft.original(one, draft.items(one)[0].id))[0].close()
    sent = [{"path": str(upload(photo(tmp_path / "y.png", 1))), "name": "y.png"}]
    answer = images.image_action({"action": "add_images", "draft": mine, "uploads": sent, "drop": "one", "more": False})
    assert answer["added"] == 1 and [path.name for path in draft.uploads_dir().rglob("y.png")] == ["y.png"]


def test_captions_of_two_drops_with_the_same_names_are_not_mixed(mine, tmp_path):
    for seed, name in enumerate(("first", "second")):
        photo(tmp_path / name / "1.png", seed)
        note(tmp_path / name / "1.txt", name)
        drop(mine, *tree(tmp_path / name))
    assert captions(mine) == {"1.png": "first", "1-2.png": "second"}
    other = draft.new_id()  # both in one drop, as from a search of the system's
    files = [(path, path.name) for name in ("first", "second") for path, _ in tree(tmp_path / name)]
    _, messages = drop(other, *files)
    assert set(messages) == {"1.txt: several files have this name; type the captions on the cards"}
    assert captions(other) == {"1.png": "", "1-2.png": ""}
    _, messages = drop(mine, note(tmp_path / "1.txt", "whose?"))
    assert messages == ["1.txt: it can belong to 1.png, 1-2.png; type the caption on its card"]
    assert captions(mine) == {"1.png": "first", "1-2.png": "second"}


def test_the_caption_of_an_image_that_was_refused_does_not_go_to_an_older_one(mine, tmp_path):
    drop(mine, photo(tmp_path / "1.png", 1), note(tmp_path / "1.txt", "mine"))
    for more in (True, False):
        broken, text = note(tmp_path / "new/1.png", "no image"), note(tmp_path / "new/1.txt", "theirs")
        drop(mine, broken, *([] if more else [text]), drop="d", more=more)
        drop(mine, *([text] if more else []), drop="d")
        assert captions(mine) == {"1.png": "mine"} and draft.waiting(mine) == ["1.txt"]
    drop(mine, photo(tmp_path / "new/1.png", 2))
    assert captions(mine) == {"1.png": "mine", "1-2.png": "theirs"}


def test_a_folder_that_is_dropped_again_updates_its_captions(mine, tmp_path):
    photo(tmp_path / "f/1.png", 1)
    for text in ("old", "new"):
        note(tmp_path / "f/1.txt", text)
        _, messages = drop(mine, *tree(tmp_path / "f"))
    assert messages == ["1.png: already added as 1.png"] and captions(mine) == {"1.png": "new"}
    drop(mine, note(tmp_path / "1.txt", "of the .txt"), note(tmp_path / "1.caption", "of the other file"))
    assert captions(mine) == {"1.png": "of the .txt"}


def test_a_lone_caption_file_gives_a_message_and_waits_and_a_systems_file_gives_none(mine, tmp_path):
    _, messages = drop(mine, note(tmp_path / "cat.txt", "a cat"))
    assert messages == ["cat.txt: no image has this name; the caption is kept until you add that image"]
    assert draft.waiting(mine) == ["cat.txt"]
    _, messages = drop(mine, *(note(tmp_path / f"{n}.txt", "x") for n in range(8)))
    assert len(messages) == 1 and "4.txt and 3 more: no image has this name" in messages[0]
    drop(mine, photo(tmp_path / "cat.png"))
    assert captions(mine) == {"cat.png": "a cat"} and "cat.txt" not in draft.waiting(mine)
    junk = ["Thumbs.db", ".DS_Store", "a/desktop.ini", "__MACOSX/a/._1.png", ".git/1.png"]
    assert drop(mine, *((note(tmp_path / "junk", "x"), name) for name in junk)) == (0, [])


def kohya(root):
    """A folder in kohya's layout, with identical names everywhere."""
    for seed, folder in enumerate(("10_cat", "3_dog", "plain", ".")):
        photo(root / folder / "1.png", seed, size=(128, 96))
        note(root / folder / "1.txt", f"caption of {folder}")
    return tree(root)


def test_kohyas_folders_become_subsets_with_their_repeats(data, mine, tmp_path):
    assert drop(mine, *kohya(tmp_path / "set")) == (4, [])
    folder, place = run_of(mine, repeats=5, epochs=2), data / "datasets/my-lora"
    texts = {"1.png": "caption of ."} | {f"{name}/1.png": f"caption of {name}" for name in ("10_cat", "3_dog", "plain")}
    assert runs.read_captions("my-lora") == texts
    (one,) = tomllib.loads((folder / "dataset.toml").read_text())["datasets"]
    subsets = {s["image_dir"]: (s["num_repeats"], s["class_tokens"]) for s in one["subsets"]}
    want = {"": 5, "/10_cat": 10, "/3_dog": 3, "/plain": 5}
    assert subsets == {f"{place.as_posix()}{name}": (number, "tok") for name, number in want.items()}
    assert runs.planned_steps(runs.load(folder), draft.counts(mine)) == 2 * (5 + 10 + 3 + 5)
    assert runs.planned_steps(runs.load(folder), {"": 4}) == 2 * 4 * 5


def test_without_a_trigger_word_a_folder_gives_its_subject_as_in_kohyas_trainers(data, mine, tmp_path):
    drop(mine, (photo(tmp_path / "1.png"), "10_sks cat/1.png"))
    folder = run_of(mine, trigger="")
    assert list(runs.read_captions("my-lora").values()) == ["sks cat"]
    assert 'class_tokens = "sks-cat"' in (folder / "dataset.toml").read_text()


def test_the_repeats_of_a_folder():
    repeats = {"10_cat": (10, "cat"), "a/10_cat": (10, "cat"), "10_cat/5_b": (5, "b"), "10_cat/b": (10, "cat")}
    repeats |= {"10_": (10, ""), **dict.fromkeys(["0_cat", "10cat", "-3_cat", "12345_cat", "١٠_cat", ""])}
    assert {name: dataset.repeats_of(name) for name in repeats} == repeats


def test_new_lora_from_this_keeps_folders_captions_and_identical_images(data, mine, tmp_path):
    same, text = photo(tmp_path / "same.png", 9), note(tmp_path / "2.txt", "b2")
    drop(mine, *kohya(tmp_path / "set"), (same, "a/2.png"), (same, "b/2.png"), (text, "b/2.txt"))
    run_of(mine)
    other = draft.new_id()
    assert draft.copy_dataset(other, "my-lora", {"name": "again"}) == []
    assert captions(other) == {**captions(mine), "a/2.png": "tok"}
    assert draft.counts(other) == draft.counts(mine) and draft.images_not_in_a_run(other) == 0
    assert draft.form(other) == {"name": "again"}
    before = {i.id: i.caption for i in draft.items(other)}
    drop(other, photo(tmp_path / "later.png", 77))
    draft.copy_dataset(other, "my-lora")
    assert {i.id: i.caption for i in draft.items(other)} == before
    assert draft.undo(other) == "Undone: copy of 6 images from a run." and len(draft.items(other)) == 7


def test_an_error_while_a_data_set_is_copied_leaves_the_draft_unchanged(data, mine, tmp_path, monkeypatch):
    drop(mine, *kohya(tmp_path / "set"))
    run_of(mine)
    other = draft.new_id()
    drop(other, photo(tmp_path / "own.png", 5))
    set_caption(other, "own.png", "an evening of work")
    draft.save_fields(other, {"name": "mine"})
    before = {path: path.read_bytes() for path in draft.folder(other).rglob("*") if path.is_file()}
    copy, calls = shutil.copyfile, itertools.count()

    def fail(*given, **more):
        if next(calls) == 2:
            raise OSError(28, "No space left on device", "disk")
        return copy(*given, **more)

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(runs.RunError, match="the disk is full"):
        draft.copy_dataset(other, "my-lora", {"name": "theirs"})
    monkeypatch.setattr(draft_drop, "read_captions", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(runs.RunError, match="cannot copy the images: the disk or network drive"):
        draft.copy_dataset(other, "my-lora")
    assert {path: path.read_bytes() for path in draft.folder(other).rglob("*") if path.is_file()} == before


def test_an_image_that_a_power_cut_left_empty_is_whole_once_its_file_is_dropped_again(mine, tmp_path):
    path = photo(tmp_path / "1.png")
    drop(mine, path)
    set_caption(mine, "1.png", "typed")
    (item,) = draft.items(mine)
    for left in (draft.original(mine, item.id), draft.thumb(mine, item)):
        left.write_bytes(b"")
    drop(mine, path)
    assert draft.original(mine, item.id).read_bytes() == path.read_bytes() and captions(mine) == {"1.png": "typed"}
    pictures.decoded(draft.thumb(mine, item))[0].close()
