"""Dropped folders, ZIPs and photographs: every caption on its own picture, every change can be undone."""

import io
import itertools
import json
import os
import random
import shutil
import struct
import threading
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import tomllib
from PIL import Image
from runs_helpers import data, picture  # noqa: F401
from test_trainer_data import ARGS
from test_ui_draft import captions, drop, item_of, set_caption, upload
from ui_helpers import photos

import presets
import runs
from runs import archives, dataset
from trainer import dataset as trained
from ui import draft, draft_images, images


@pytest.fixture
def mine(data) -> str:  # noqa: F811
    return draft.new_id()


def photo(path: Path, seed: int = 0, size=(96, 64), **save) -> Path:
    """A picture unlike that of any other seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    small = Image.frombytes("RGB", (8, 8), draw.randbytes(192))
    small.resize(size, Image.Resampling.BICUBIC).save(path, **save)
    return path


def note(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def tree(root: Path) -> list[tuple[Path, str]]:
    """The files of a folder as the browser names them: by their path in it."""
    return [(path, path.relative_to(root).as_posix()) for path in sorted(root.rglob("*")) if path.is_file()]


def packed(path: Path, entries: dict[str, bytes], compression=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def png(seed: int = 0, size=(96, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGB", (8, 8), random.Random(seed).randbytes(192)).resize(size).save(buffer, "PNG")
    return buffer.getvalue()


# Folders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_caption_stays_in_its_folder_in_every_order_of_arrival(mine, tmp_path, order):
    files = [
        (photo(tmp_path / "a/1.png", 1), "a/1.png"),
        (note(tmp_path / "a/1.txt", "one of a"), "a/1.txt"),
        (photo(tmp_path / "b/1.png", 2), "b/1.png"),
        (note(tmp_path / "b/1.txt", "one of b"), "b/1.txt"),
    ]
    first, last = [files[n] for n in order[:2]], [files[n] for n in order[2:]]
    drop(mine, *first, drop="d", more=True)
    _, messages = drop(mine, *last, drop="d")
    assert messages == [] and captions(mine) == {"a/1.png": "one of a", "b/1.png": "one of b"}
    by_content = {(upload(path).parent.name): path.parent.name for path, _ in files}
    assert all(by_content[item.sha256] == item.folder for item in draft.items(mine)), "each picture in its own folder"


def test_identical_files_in_two_folders_are_two_images_and_twice_in_one_folder_is_one(mine, tmp_path):
    same = photo(tmp_path / "x.png")
    added, messages = drop(mine, (same, "a/2.png"), (same, "b/2.png"), (same, "b/copy.png"))
    assert added == 2 and messages == ["b/copy.png: already added as b/2.png"]
    assert sorted(captions(mine)) == ["a/2.png", "b/2.png"] and len({item.id for item in draft.items(mine)}) == 2
    set_caption(mine, "a/2.png", "only a")
    assert captions(mine) == {"a/2.png": "only a", "b/2.png": ""}


def test_two_drops_of_one_file_share_an_upload_and_both_work(data, mine, tmp_path):  # noqa: F811
    shared, other = upload(photo(tmp_path / "x.png")), draft.new_id()
    assert draft.add(mine, [(shared, "x.png")]) == (1, []) and shared.exists()
    assert draft.add(other, [(shared, "x.png")]) == (1, []) and shared.exists()
    shared.write_bytes(b"Gradio writes the upload again")
    assert all(dataset.check_image(draft.original(one, draft.items(one)[0].id)) == "" for one in (mine, other))
    sent = [{"path": str(upload(photo(tmp_path / "y.png", 1))), "name": "y.png"}]
    answer = images.add_images({"draft": mine, "uploads": sent, "drop": "one", "more": False})
    assert answer["added"] == 1 and [path.name for path in draft.uploads_dir().rglob("y.png")] == ["y.png"]


def test_an_upload_is_deleted_by_its_age_only(data, mine, tmp_path):  # noqa: F811
    old, new, again = (upload(photo(tmp_path / f"{n}.png", n)) for n in range(3))
    for path in (old, old.parent, again.parent):  # `again` was written a second time, which its folder does not show
        os.utime(path, (time.time() - 2 * draft.UPLOAD_EXPIRES_S,) * 2)
    draft.delete_expired()
    assert [path.exists() for path in (old, new, again)] == [False, True, True]


def test_captions_of_two_drops_with_the_same_names_are_not_mixed(mine, tmp_path):
    for seed, name in enumerate(("first", "second")):
        photo(tmp_path / name / "1.png", seed)
        note(tmp_path / name / "1.txt", name)
        drop(mine, *tree(tmp_path / name))
    assert captions(mine) == {"1.png": "first", "1-2.png": "second"}
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


def test_a_lone_caption_file_gives_a_message_and_waits(mine, tmp_path):
    _, messages = drop(mine, note(tmp_path / "cat.txt", "a cat"))
    assert messages == ["cat.txt: no image has this name; the caption is kept until you add that image"]
    assert draft.waiting(mine) == ["cat.txt"]
    _, messages = drop(mine, *(note(tmp_path / f"{n}.txt", "x") for n in range(8)))
    assert len(messages) == 1 and "8 captions" in messages[0] and "and 3 more" in messages[0]
    drop(mine, photo(tmp_path / "cat.png"))
    assert captions(mine) == {"cat.png": "a cat"} and "cat.txt" not in draft.waiting(mine)


def test_files_of_a_system_are_left_out_in_silence(mine, tmp_path):
    junk = ["Thumbs.db", ".DS_Store", "a/desktop.ini", "__MACOSX/a/._1.png", ".git/1.png"]
    assert drop(mine, *((note(tmp_path / "junk", "x"), name) for name in junk)) == (0, [])


def test_a_path_that_leads_outside_is_refused_and_the_others_are_added(mine, tmp_path):
    good = photo(tmp_path / "x.png")
    bad = ["../x.png", "a/../../x.png", "/etc/x.png", "C:/x.png", "\\\\host\\x.png", "a\0.png", "", "///", "x" * 2000]
    added, messages = drop(mine, (good, "ok/x.png"), *((good, name) for name in bad))
    assert added == 1 and len(messages) == len(bad) and list(captions(mine)) == ["ok/x.png"]


# The data set ----------------------------------------------------------------------------------------------------------


def run_of(draft_id: str, **fields) -> Path:
    spec = runs.make({"name": "my lora", "trigger": "tok", "model": "tiny-flux", "backend": "diffusers", **fields})
    return runs.create(spec, draft.sources(draft_id))


def kohya(root: Path) -> list[tuple[Path, str]]:
    """A folder in kohya's layout, with identical names everywhere."""
    for seed, folder in enumerate(("10_cat", "3_dog", "plain", ".")):
        photo(root / folder / "1.png", seed, size=(128, 96))
        note(root / folder / "1.txt", f"caption of {folder}")
    return tree(root)


def test_kohyas_folders_become_subsets_with_their_repeats(data, mine, tmp_path):  # noqa: F811
    assert drop(mine, *kohya(tmp_path / "set")) == (4, [])
    assert draft.repeats(mine) == {"10_cat": 10, "3_dog": 3}
    folder = run_of(mine, repeats=5, epochs=2)
    place = data / "datasets/my-lora"
    assert runs.read_captions("my-lora") == {
        "1.png": "caption of .",
        "10_cat/1.png": "caption of 10_cat",
        "3_dog/1.png": "caption of 3_dog",
        "plain/1.png": "caption of plain",
    }
    table = tomllib.loads((folder / "dataset.toml").read_text())
    (one,) = table["datasets"]
    subsets = {s["image_dir"]: (s["num_repeats"], s["class_tokens"]) for s in one["subsets"]}
    want = {"": 5, "/10_cat": 10, "/3_dog": 3, "/plain": 5}
    assert subsets == {f"{place.as_posix()}{name}": (number, "tok") for name, number in want.items()}
    assert runs.planned_steps(runs.load(folder), draft.counts(mine)) == 2 * (5 + 10 + 3 + 5)
    assert runs.planned_steps(runs.load(folder), 4) == 2 * 4 * 5
    found = trained.read(folder / "dataset.toml", ARGS)
    assert {(i.path.parent.name, i.repeats, i.caption) for i in found} == {
        ("my-lora", 5, "caption of ."),
        ("10_cat", 10, "caption of 10_cat"),
        ("3_dog", 3, "caption of 3_dog"),
        ("plain", 5, "caption of plain"),
    }


def test_without_a_trigger_word_a_folder_gives_its_subject_as_in_kohyas_trainers(data, mine, tmp_path):  # noqa: F811
    drop(mine, (photo(tmp_path / "1.png"), "10_sks cat/1.png"))
    folder = run_of(mine, trigger="")
    assert list(runs.read_captions("my-lora").values()) == ["sks cat"]
    assert 'class_tokens = "sks-cat"' in (folder / "dataset.toml").read_text()


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("10_cat", (10, "cat")),
        ("a/10_cat", (10, "cat")),
        ("10_cat/5_b", (5, "b")),
        ("10_cat/b", (10, "cat")),
        ("10_", (10, "")),
        ("0_cat", None),
        ("10cat", None),
        ("-3_cat", None),
        ("12345_cat", None),
        ("١٠_cat", None),
        ("", None),
    ],
)
def test_the_repeats_of_a_folder(name, repeats):
    assert dataset.repeats_of(name) == repeats


def test_hostile_folders_become_plain_ones_that_keep_their_repeats(data, mine, tmp_path):  # noqa: F811
    folders = [
        "10_ca't",
        "10_CA T",
        "a/10_cat",
        "b/10_cat",
        "CON",
        "日本",
        "🦊",
        "x" * 300,
        "0_none",
        "１０_wide",
        "$(id)",
    ]
    for seed, folder in enumerate(folders):
        drop(mine, (photo(tmp_path / f"{seed}.png", seed), f"{folder}/1.png"))
    items = draft.items(mine)
    for item in items:
        draft.set_caption(mine, item.id, item.folder)
    counts = draft.counts(mine)
    run_of(mine, repeats=7)
    place = data / "datasets/my-lora"
    assert dataset.shown_per_epoch(counts, 7) == dataset.shown_per_epoch(dataset.counts(place), 7) == 4 * 10 + 7 * 7
    names = [path.name for path in place.iterdir()]
    assert len({name.casefold() for name in names}) == len(folders) and all(name.isascii() for name in names)
    assert sorted(runs.read_captions("my-lora").values()) == sorted(dataset.one_line(name) for name in folders)
    by_bytes = {(place / name).read_bytes(): text for name, text in runs.read_captions("my-lora").items()}
    for item in items:
        assert by_bytes[draft.original(mine, item.id).read_bytes()] == dataset.one_line(item.folder)


def test_new_lora_from_this_keeps_folders_captions_and_identical_images(data, mine, tmp_path):  # noqa: F811
    same = photo(tmp_path / "same.png", 9)
    drop(
        mine,
        *kohya(tmp_path / "set"),
        (same, "a/2.png"),
        (same, "b/2.png"),
        (note(tmp_path / "2.txt", "b2"), "b/2.txt"),
    )
    run_of(mine)
    other = draft.new_id()
    assert draft.copy_dataset(other, "my-lora", {"name": "again"}) == []
    assert captions(other) == {**captions(mine), "a/2.png": "tok"}
    assert draft.repeats(other) == {"10_cat": 10, "3_dog": 3} and draft.images_not_in_a_run(other) == 0
    assert draft.form(other) == {"name": "again"}
    before = {i.id: i.caption for i in draft.items(other)}
    drop(other, photo(tmp_path / "later.png", 77))
    draft.copy_dataset(other, "my-lora")
    assert {i.id: i.caption for i in draft.items(other)} == before
    assert draft.undo(other) == "Undone: copy of 6 images from a run." and len(draft.items(other)) == 7


def test_an_error_while_a_data_set_is_copied_leaves_the_draft_unchanged(data, mine, tmp_path, monkeypatch):  # noqa: F811
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
    assert {path: path.read_bytes() for path in draft.folder(other).rglob("*") if path.is_file()} == before


def test_a_folder_is_read_with_its_subfolders_from_the_command_line(data, tmp_path):  # noqa: F811
    kohya(tmp_path / "set")
    photo(tmp_path / "set/.hidden/1.png", 5)
    runs.create(runs.make({"name": "cli", "trigger": "tok", "model": "tiny-flux"}), tmp_path / "set")
    assert runs.read_captions("cli")["10_cat/1.png"] == "caption of 10_cat" and len(runs.read_captions("cli")) == 4


# Undo and redo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_merging(monkeypatch):
    monkeypatch.setattr(draft, "MERGE_S", 0)


def test_every_change_is_undone_and_redone(mine, tmp_path, no_merging):
    def state():
        return [(i.id, i.caption, i.turn) for i in draft.items(mine)], draft.waiting(mine)

    def ids():
        return [item.id for item in draft.items(mine)]

    draft.save_fields(mine, {"trigger": "tok"})
    changes = [
        lambda: drop(mine, *(photo(tmp_path / f"{n}.png", n) for n in range(5)), note(tmp_path / "1.txt", "one")),
        lambda: draft.set_caption(mine, ids()[0], "typed"),
        lambda: draft.set_caption(mine, ids()[0], "typed again"),
        lambda: draft.insert_trigger(mine, "tok"),
        lambda: draft.move(mine, ids()[4], ids()[1]),
        lambda: draft.move(mine, ids()[0], None),
        lambda: draft.remove(mine, [ids()[2]]),
        lambda: draft.fix(mine, ids()[0], "sideways"),
        lambda: drop(mine, note(tmp_path / "gone.txt", "waits")),
        lambda: draft.remove(mine, ids()[:2]),
        lambda: draft.clear(mine),
        lambda: drop(mine, photo(tmp_path / "9.png", 9)),
        lambda: draft.set_caption(mine, ids()[0], ""),
    ]
    states = [state()]
    for change in changes:
        change()
        if state() != states[-1]:
            states.append(state())
    assert len(states) >= len(changes)
    for _ in range(2):
        for wanted in reversed(states[:-1]):
            assert draft.undo(mine).startswith("Undone: ") and state() == wanted
        assert draft.undo(mine) is None and draft.history(mine)[0] == ""
        for wanted in states[1:]:
            assert draft.redo(mine).startswith("Redone: ") and state() == wanted
            assert all(dataset.check_image(draft.original(mine, key)) == "" for key in ids())
            assert all(draft.thumb(mine, item).is_file() for item in draft.items(mine))
        assert draft.redo(mine) is None


def test_a_text_is_replaced_in_all_captions_as_one_step(mine, tmp_path):
    drop(mine, *(photo(tmp_path / f"{n}.png", n) for n in range(3)))
    set_caption(mine, "0.png", "a cat and a cat")
    set_caption(mine, "1.png", "a dog")
    assert draft.replace(mine, "cat", "fox") == 1 and draft.replace(mine, "", "x") == 0
    assert captions(mine)["0.png"] == "a fox and a fox" and draft.history(mine)[0] == "replacement in 1 caption"
    with pytest.raises(runs.RunError, match=r"0\.png: the caption would have"):
        draft.replace(mine, "a", "x" * 9000)
    draft.undo(mine)
    assert captions(mine) == {"0.png": "a cat and a cat", "1.png": "a dog", "2.png": ""}


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


def test_removed_images_leave_the_disk_when_they_leave_the_history(mine, tmp_path, no_merging, monkeypatch):
    monkeypatch.setattr(draft, "HISTORY_STEPS", 3)
    drop(mine, photo(tmp_path / "0.png", 0), photo(tmp_path / "1.png", 1))
    gone = draft.original(mine, item_of(mine, "0.png").id)
    thumb = draft.thumb(mine, item_of(mine, "0.png"))
    draft.remove(mine, [item_of(mine, "0.png").id])
    for n in range(3):
        assert gone.is_file() and thumb.is_file()
        set_caption(mine, "1.png", str(n))
    assert not gone.exists() and not thumb.exists() and len(list((draft.folder(mine) / "history").iterdir())) == 3
    assert [draft.undo(mine) is not None for _ in range(4)] == [True, True, True, False]
    assert captions(mine) == {"1.png": ""}
    assert draft.original(mine, item_of(mine, "1.png").id).is_file()


def test_a_change_that_ends_a_redo_deletes_what_only_the_redo_needed(mine, tmp_path, no_merging):
    drop(mine, photo(tmp_path / "0.png", 0))
    drop(mine, photo(tmp_path / "1.png", 1))
    lost = draft.original(mine, item_of(mine, "1.png").id)
    draft.undo(mine)
    assert lost.is_file()
    set_caption(mine, "0.png", "x")
    assert not lost.exists() and captions(mine) == {"0.png": "x"}


def test_a_history_that_was_damaged_is_an_error_and_loses_nothing(mine, tmp_path):
    drop(mine, photo(tmp_path / "0.png", 0))
    for path in (draft.folder(mine) / "history").iterdir():
        path.write_text("{")
    with pytest.raises(runs.RunError, match="cannot be undone"):
        draft.undo(mine)
    set_caption(mine, "0.png", "still here")
    assert captions(mine) == {"0.png": "still here"}


def test_a_draft_of_the_page_before_is_read_with_its_captions(data, mine, tmp_path):  # noqa: F811
    """Written by commit 17adc2a, whose images are named by their files."""
    path = photo(tmp_path / "cat.png")
    folder = draft.folder(mine)
    (folder / "images").mkdir(parents=True)
    shutil.copyfile(path, folder / "images/cat.png")
    sha = upload(path).parent.name
    old = {"width": 96, "height": 64, "sha256": sha, "caption": "a cat", "stem": "cat", "by_hand": True}
    state = {"images": {"cat.png": old}, "waiting": {"dog": "a dog"}, "form": {"name": "x"}, "kept": ""}
    (folder / "draft.json").write_text(json.dumps(state))
    assert captions(mine) == {"cat.png": "a cat"} and draft.waiting(mine) == ["dog.txt"]
    assert draft.form(mine) == {"name": "x"} and draft.images_not_in_a_run(mine) == 1
    assert draft.thumb(mine, draft.items(mine)[0]).is_file()
    drop(mine, photo(tmp_path / "dog.png", 2), path)
    set_caption(mine, "cat.png", "the cat")
    assert captions(mine) == {"cat.png": "the cat", "dog.png": "a dog"}
    run_of(mine)
    assert runs.read_captions("my-lora") == {"cat.png": "the cat", "dog.png": "a dog"}


def test_fields_are_stored_one_by_one(mine):
    draft.save_fields(mine, {"name": "a", "epochs": 3})
    draft.save_fields(mine, {"name": "b"})
    assert draft.form(mine) == {"name": "b", "epochs": 3}


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

    threads = [threading.Thread(target=work, args=(key,)) for key in ids]
    threads += [threading.Thread(target=drop, args=(mine, photo(tmp_path / f"t{n}.png", 50 + n))) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    found = {item.id: item.caption for item in draft.items(mine)}
    assert len(found) == 6 and all(found[key] == f"{key} 7" for key in ids)


# Formats and warnings --------------------------------------------------------------------------------------------------


def heic(path: Path, image: Image.Image, **save) -> Path:
    dataset._add_heif()
    image.save(path, **save)
    return path


@pytest.mark.parametrize("suffix", ["heic", "heif", "avif"])
def test_the_photos_of_phones_are_added_and_trained(data, mine, tmp_path, suffix):  # noqa: F811
    with Image.open(picture(tmp_path / "x.png", size=(128, 64))) as image:
        path = heic(tmp_path / f"phone.{suffix}", image.convert("RGB"), quality=95)
    assert drop(mine, path) == (1, [])
    (item,) = draft.items(mine)
    with Image.open(draft.thumb(mine, item)) as thumb, Image.open(draft.large(mine, item.id)) as large:
        assert thumb.size == large.size == (128, 64) and large.getpixel((3, 3))[0] > 200
    notes = []
    runs.create(
        runs.make({"name": "p", "trigger": "t", "model": "tiny-flux"}), draft.sources(mine), on_note=notes.append
    )
    (taken,) = runs.images_in(data / "datasets/p")
    with Image.open(taken) as image:
        assert (image.format, image.size) == ("JPEG", (128, 64)) and image.getpixel((3, 3))[0] > 200
    assert f"phone.{suffix}: {'AVIF' if suffix == 'avif' else 'HEIF'} saved as JPEG" in notes


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "avif", "heic"])
def test_exif_orientation_is_applied_to_size_thumbnail_and_data_set(data, mine, tmp_path, suffix, orientation):  # noqa: F811
    exif = Image.Exif()
    exif[0x0112] = orientation
    with Image.open(picture(tmp_path / "x.png", size=(800, 400))) as image:
        path = heic(tmp_path / f"t.{suffix}", image.convert("RGB"), exif=exif.tobytes())
    assert drop(mine, path) == (1, [])
    (item,) = draft.items(mine)
    size = (800, 400) if orientation < 5 else (400, 800)
    assert (item.width, item.height) == size
    run_of(mine)
    (taken,) = runs.images_in(data / "datasets/my-lora")
    red = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[orientation]
    for file in (draft.thumb(mine, item), taken):
        with Image.open(file) as image:
            width, height = image.size
            assert width / height == size[0] / size[1] and image.getexif().get(0x0112, 1) == 1
            pixel = image.convert("RGB").getpixel((4 + red[0] * (width - 8), 4 + red[1] * (height - 8)))
            assert pixel[0] > 180 and pixel[1] < 80 and pixel[2] < 80, (file, pixel)


def warnings_of(draft_id: str, file: str) -> tuple[str, ...]:
    return item_of(draft_id, file).warnings


def test_a_small_image_is_flagged_and_removed_by_one_click(mine, tmp_path):
    side = presets.defaults()["images"]["small_side"]
    drop(mine, photo(tmp_path / "small.png", 1, (side - 1, 900)), photo(tmp_path / "big.png", 2, (side, 900)))
    assert "small" in warnings_of(mine, "small.png") and "small" not in warnings_of(mine, "big.png")
    draft.fix(mine, item_of(mine, "small.png").id, "small")
    assert list(captions(mine)) == ["big.png"]
    draft.undo(mine)
    assert list(captions(mine)) == ["small.png", "big.png"]


def twice_turned(path: Path, orientation: int, size=(400, 600)) -> Path:
    """A photo whose pixels were rotated upright by a program that kept the orientation of the camera."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif.get_ifd(0x8769).update({0xA002: size[1], 0xA003: size[0]})
    return picture(path, size=size, quality=95, exif=exif)


@pytest.mark.parametrize("orientation", [6, 8])
def test_a_photo_that_is_rotated_twice_is_flagged_and_turned_upright(data, mine, tmp_path, orientation):  # noqa: F811
    drop(mine, twice_turned(tmp_path / "twice.jpg", orientation))
    item = item_of(mine, "twice.jpg")
    assert "sideways" in item.warnings and (item.width, item.height) == (600, 400)
    draft.fix(mine, item.id, "sideways")
    fixed = item_of(mine, "twice.jpg")
    assert fixed.id == item.id and "sideways" not in fixed.warnings and (fixed.width, fixed.height) == (400, 600)
    run_of(mine)
    (taken,) = runs.images_in(data / "datasets/my-lora")
    for file in (draft.thumb(mine, fixed), draft.large(mine, fixed.id), taken):
        with Image.open(file) as image:
            assert image.width < image.height and image.getpixel((4, 4))[0] > 180, "red is top left, as in the camera"
    draft.undo(mine)
    assert "sideways" in warnings_of(mine, "twice.jpg")


def test_an_honest_photo_is_not_called_sideways_and_can_be_rotated(mine, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769).update({0xA002: 600, 0xA003: 400})
    drop(mine, picture(tmp_path / "camera.jpg", size=(600, 400), exif=exif))
    assert "sideways" not in warnings_of(mine, "camera.jpg")
    sizes = []
    for _ in range(4):
        draft.fix(mine, item_of(mine, "camera.jpg").id, "sideways")
        item = item_of(mine, "camera.jpg")
        with Image.open(draft.thumb(mine, item)) as thumb:
            sizes.append((item.width, thumb.size[0] > thumb.size[1]))
    assert sizes == [(600, True), (400, False)] * 2


def test_nearly_identical_images_are_flagged_and_different_ones_are_not(mine, tmp_path):
    coffee, cat = photos("coffee.png", "chelsea.png")
    with Image.open(coffee) as image:
        image = image.convert("RGB")
        image.save(tmp_path / "again.jpg", quality=60)
        image.resize((300, 200)).save(tmp_path / "smaller.png")
    flat = [Image.new("RGB", (300, 300), colour) for colour in ("red", "lime", "blue", "white", "black")]
    for number, image in enumerate(flat):
        image.save(tmp_path / f"flat{number}.png")
    drop(mine, coffee, cat, *(tmp_path / name for name in ("again.jpg", "smaller.png")))
    drop(mine, *(tmp_path / f"flat{number}.png" for number in range(5)))
    first = item_of(mine, "coffee.png").id
    near = {i.file: [code for code in i.warnings if code.startswith("near")] for i in draft.items(mine)}
    assert {file for file, codes in near.items() if codes} == {"again.jpg", "smaller.png"}
    assert near["again.jpg"] == near["smaller.png"] == [f"near:{first}"]
    draft.fix(mine, item_of(mine, "again.jpg").id, f"near:{first}")
    assert "again.jpg" not in captions(mine) and "coffee.png" in captions(mine)


def test_1200_images_are_compared_in_a_moment():
    draw = random.Random(3)
    bases = [(draw.getrandbits(64), draw.randbytes(12)) for _ in range(300)]
    entries = {}
    for n in range(1200):
        bits, tone = bases[n % 300]
        for place in draw.sample(range(64), draw.randrange(8)):
            bits ^= 1 << place
        entries[f"{n}"] = {"hash": f"{bits:016x}{tone.hex()}"}
    began = time.process_time()
    found = draft_images.nearly_identical(entries)
    seconds = time.process_time() - began
    most = presets.defaults()["images"]["near_bits"]

    def bits_of(key):
        return int(entries[key]["hash"][:16], 16)

    for key in entries:
        near = [
            one
            for one in list(entries)[: int(key)]
            if one not in found and (bits_of(one) ^ bits_of(key)).bit_count() <= most
        ]
        assert (key in found) == bool(near), "the same as comparing all with all"
    same = {f"{n}": {"hash": f"{0:016x}{bytes([n % 250] * 12).hex()}"} for n in range(1200)}
    draft_images.nearly_identical(same)
    assert seconds < 2 and time.process_time() - began < 60


def test_an_image_without_a_caption_is_flagged_and_gets_the_trigger_word(mine, tmp_path):
    drop(mine, photo(tmp_path / "x.png"))
    key = item_of(mine, "x.png").id
    assert "no_caption" in warnings_of(mine, "x.png")
    with pytest.raises(runs.RunError, match="Type a trigger word in step 1 first"):
        draft.fix(mine, key, "no_caption")
    draft.save_fields(mine, {"trigger": " tok "})
    draft.fix(mine, key, "no_caption")
    assert captions(mine) == {"x.png": "tok"} and "no_caption" not in warnings_of(mine, "x.png")
    with pytest.raises(runs.RunError, match="out of date"):
        draft.fix(mine, key, "no_such_code")
    with pytest.raises(runs.RunError, match="This image was removed"):
        draft.fix(mine, "0" * 24, "small")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_captions_in_the_encodings_of_editors_are_read(mine, tmp_path, encoding):
    text = tmp_path / "x.txt"
    text.write_bytes("eine Kätzchen, 猫 🐱\r\nzweite".encode(encoding))
    assert drop(mine, photo(tmp_path / "x.png"), text) == (1, [])
    assert captions(mine) == {"x.png": "eine Kätzchen, 猫 🐱 zweite"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", "x.txt: the caption is not UTF-8 text (byte 3); save the file as UTF-8"),
        (b"\xff\xfeabc", "x.txt: the caption is not UTF-16 text (byte 4); save the file as UTF-8"),
        (b"x" * 200_000, "x.txt: the caption is larger than 100 kB; shorten it"),
        (b"x" * 30_000, "x.txt: the caption has 30000 characters; shorten it to 20000"),
    ],
)
def test_other_captions_are_explained_and_the_image_is_added(mine, tmp_path, content, message):
    text = tmp_path / "x.txt"
    text.write_bytes(content)
    assert drop(mine, photo(tmp_path / "x.png"), text) == (1, [message])
    assert captions(mine) == {"x.png": ""}


def limits(monkeypatch, **values):
    table = presets.defaults()
    table["images"] |= values
    monkeypatch.setattr(presets, "defaults", lambda: table)


def test_the_limits_of_a_file_and_a_draft_are_those_of_the_table(mine, tmp_path, monkeypatch):
    files = [photo(tmp_path / f"{n}.png", n) for n in range(4)]
    limits(monkeypatch, max_images=2)
    added, messages = drop(mine, *files)
    assert added == 2 and len(messages) == 1 and "2 images not added: a LoRA can have 2 images or" in messages[0]
    limits(monkeypatch, max_draft_mb=0)
    assert drop(mine, files[2])[0] == 0
    limits(monkeypatch, max_file_mb=0)
    _, (message,) = drop(mine, files[3])
    assert "3.png: 0 MB is too large; export it with at most 0 MB" in message
    assert not list(draft.folder(mine).glob(".new-*"))


def test_only_decoders_of_images_see_a_dropped_file(mine, tmp_path):
    """Pillow's decoder of EPS starts Ghostscript."""
    path = tmp_path / "x.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(/etc/passwd) run\n%%EOF")
    _, messages = drop(mine, path)
    assert messages == ["x.png: Not a readable image. Export it as JPEG or PNG."]


# ZIPs ------------------------------------------------------------------------------------------------------------------


def test_a_zip_is_a_folder_with_images_and_captions(mine, tmp_path):
    path = packed(
        tmp_path / "set.zip",
        {
            "10_cat/1.png": png(1),
            "10_cat/1.txt": b"a cat",
            "3_dog\\1.png": png(2),
            "3_dog\\1.txt": b"a dog",
            "1.png": png(3),
            "__MACOSX/1.png": b"junk",
            ".DS_Store": b"junk",
        },
    )
    assert drop(mine, path) == (3, [])
    assert captions(mine) == {"10_cat/1.png": "a cat", "3_dog/1.png": "a dog", "1.png": ""}
    assert not list(draft.uploads_dir().glob("zip-*")), "what was unpacked is deleted"


def test_two_zips_with_the_same_names_are_not_mixed(mine, tmp_path):
    zips = [packed(tmp_path / f"{n}.zip", {"1.png": png(n), "1.txt": f"zip {n}".encode()}) for n in range(2)]
    assert drop(mine, *zips) == (2, [])
    assert captions(mine) == {"1.png": "zip 0", "1-2.png": "zip 1"}
    with Image.open(io.BytesIO(png(1))) as image:
        assert Image.open(draft.original(mine, item_of(mine, "1-2.png").id)).tobytes() == image.tobytes()


def bad_entries(path: Path) -> list[str]:
    """A ZIP with one good image among what attacks unpackers; the names of the bad ones."""
    link = zipfile.ZipInfo("link.png")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    pipe = zipfile.ZipInfo("pipe.png")
    pipe.create_system, pipe.external_attr = 3, 0o010644 << 16
    names = ["../up.png", "a/../../up.png", "/etc/abs.png", "C:\\drive.png", "\\\\host\\share.png"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, png(1))
        archive.writestr(link, "/etc/passwd")
        archive.writestr(pipe, "")
        archive.writestr("inner.zip", b"PK\5\6" + bytes(18))
        archive.writestr("program.exe", b"MZ")
        archive.writestr("bomb.png", bytes(30_000_000))
        archive.writestr("words.png", b"I am a text")
        archive.writestr("con.png", png(7))
        archive.writestr("good/1.png", png(2))
    return [*names, "link.png", "pipe.png", "inner.zip", "program.exe", "bomb.png", "words.png"]


def test_a_bad_entry_costs_only_itself_and_nothing_leaves_the_folders(data, mine, tmp_path):  # noqa: F811
    bad = bad_entries(tmp_path / "bad.zip")
    before = {path for path in tmp_path.rglob("*") if draft.folder(mine) not in path.parents}
    added, messages = drop(mine, tmp_path / "bad.zip")
    assert added == 2 and sorted(captions(mine)) == ["good/1.png", "image-con.png"]
    assert len(messages) == len(bad), messages
    text = "\n".join(messages)
    for word in ("outside the folder", "a link or a special file", "an archive inside the ZIP", "200 times its size"):
        assert word in text
    after = {path for path in tmp_path.rglob("*") if draft.folder(mine) not in path.parents}
    assert {path for path in after - before if draft.uploads_dir() not in path.parents} <= {
        data / "datasets",
        data / "datasets/.uploads",
        data / "datasets/.drafts",
        draft.folder(mine),
    }


def test_an_encrypted_zip_is_explained(mine, tmp_path):
    path = packed(tmp_path / "secret.zip", {"1.png": png(1), "2.png": png(2)})
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = content.find(mark)
        while at >= 0:
            content[at + place] |= 1
            at = content.find(mark, at + 4)
    path.write_bytes(content)
    added, messages = drop(mine, path, photo(tmp_path / "3.png", 3))
    assert added == 1 and messages == [
        "secret.zip: 2 files are encrypted with a password; unpack the ZIP, then drop its folder"
    ]


def test_sizes_are_counted_and_not_taken_from_the_header(mine, tmp_path, monkeypatch):
    path = packed(tmp_path / "lies.zip", {"big.png": random.Random(1).randbytes(3_000_000)}, zipfile.ZIP_STORED)
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\1\2")
    struct.pack_into("<L", content, at + 24, 10)  # the unpacked size in the directory
    path.write_bytes(content)
    limits(monkeypatch, max_file_mb=1)
    (tmp_path / "into").mkdir()
    found, messages = archives.unpack(path, tmp_path / "into")
    assert found == [] and len(messages) == 1 and not list((tmp_path / "into").iterdir())
    limits(monkeypatch, max_file_mb=200, max_zip_mb=2)
    many = packed(tmp_path / "many.zip", {f"{n}.png": random.Random(n).randbytes(900_000) for n in range(9)})
    found, messages = archives.unpack(many, tmp_path / "into")
    assert len(found) == 2 and "larger than 2 MB together" in messages[0]
    assert sum(path.stat().st_size for path in (tmp_path / "into").iterdir()) <= 2_000_000


def test_a_zip_with_too_many_entries_is_refused_before_they_are_read(mine, tmp_path, monkeypatch):
    limits(monkeypatch, max_zip_entries=5)
    path = packed(tmp_path / "many.zip", {f"{n}.txt": b"" for n in range(6)})
    _, messages = drop(mine, path)
    assert messages == ["many.zip: the ZIP has more than 5 entries; split it"]
    content = bytearray(packed(tmp_path / "x.zip", {"1.txt": b""}).read_bytes())
    struct.pack_into("<L", content, content.rfind(b"PK\5\6") + 12, 4_000_000_000)
    (tmp_path / "x.zip").write_bytes(content)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("zipfile reads the whole directory"))
    assert drop(mine, tmp_path / "x.zip")[1] == ["x.zip: the ZIP has more than 5 entries; split it"]


@pytest.mark.parametrize("cut", [0, 3, 100, 400])
def test_a_damaged_zip_is_explained(mine, tmp_path, cut):
    path = packed(tmp_path / "x.zip", {"1.png": png(1)})
    path.write_bytes(path.read_bytes()[:cut])
    added, messages = drop(mine, path, photo(tmp_path / "y.png"))
    assert added == 1 and len(messages) == 1 and "x.zip: Not a readable ZIP file" in messages[0]


def test_a_file_that_a_zip_has_twice_is_added_once(mine, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, warnings.catch_warnings(action="ignore"):
        for number in range(2):
            archive.writestr("1.png", png(number))
    added, messages = drop(mine, tmp_path / "x.zip")
    assert added == 1 and messages == ["x.zip: 1.png: the ZIP has this file twice; the last one is used"]
