"""Images and captions are copied completely, or refused by name."""

import errno
import os
import re
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from draft_helpers import camera_exif, limits
from PIL import Image
from runs_helpers import made, picture, pictures, sources

import runs
from runs import dataset


def take(tmp_path: Path, images, trigger="") -> tuple[Path, list[str]]:
    """Copy images into a data set; returns its folder and the notes."""
    folder = made(tmp_path / "taken")
    notes: list[str] = []
    images = images if isinstance(images, Path) else sources(images)
    dataset.ingest(dataset.gather(images, trigger), folder, notes.append)
    return folder, notes


def refused(images) -> str:
    """The message that a set of images is refused with."""
    with pytest.raises(runs.RunError) as caught, tempfile.TemporaryDirectory() as folder:
        images = images if isinstance(images, Path) else sources(images)
        dataset.ingest(dataset.gather(images), Path(folder))
    return str(caught.value)


def test_images_are_decoded_at_the_same_time_and_messages_and_names_keep_their_order(tmp_path, monkeypatch):
    """300 photos of 24 megapixels took minutes after Start, on one core of many."""
    meet = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(dataset, "workers", lambda: 3)
    decoded = lambda *given, known=dataset.decoded: (meet.wait(), known(*given))[1]  # noqa: E731
    monkeypatch.setattr(dataset, "decoded", decoded)
    photos = [picture(tmp_path / f"{n}" / "写真 a.jpg", exif=camera_exif(6)) for n in range(6)]
    folder, notes = take(tmp_path, [*photos])
    names = ["Xie-Zhen-a", *(f"Xie-Zhen-a-{n}" for n in range(2, 7))]
    assert sorted(path.stem for path in folder.glob("*.jpg")) == names
    assert len(notes) == 12 and [note.partition(": ")[2][:7] for note in notes[:2]] == ["rotated", "no capt"]


def test_all_bad_files_are_named_at_once(tmp_path):
    good, cut, text = (tmp_path / name for name in ("good.png", "cut.jpg", "notes.png"))
    picture(good), picture(cut, size=(200, 200)), text.write_text("these are words")
    cut.write_bytes(cut.read_bytes()[:900])
    words, damaged = refused([text, good, cut]).splitlines()
    assert words == "notes.png: Not a readable image. Export it as JPEG or PNG."
    assert damaged.startswith("cut.jpg: the image is damaged")


def test_transparency_is_white_an_animation_gives_its_first_frame_and_a_plain_picture_keeps_its_bytes(tmp_path):
    image = Image.new("RGBA", (40, 40), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 20, 40))
    image.save(tmp_path / "clear.png")
    frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "lime")]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    plain = picture(tmp_path / "photo.png", format="JPEG")
    photos = [picture(tmp_path / f"{n}.jpg", exif=camera_exif(n)) for n in (1, 6)]
    names = ("clear.png", "moving.webp")
    folder, notes = take(tmp_path, [*(tmp_path / name for name in names), plain, *photos], trigger="x")
    flat = Image.open(folder / "clear.png")
    assert flat.mode == "RGB" and flat.getpixel((5, 5)) == (0, 0, 255) and flat.getpixel((35, 5)) == (255, 255, 255)
    assert Image.open(folder / "moving.png").convert("RGB").getpixel((3, 3)) == (255, 0, 0)
    changes = {"clear.png": "transparency replaced by white", "moving.webp": "only the first frame is used"}
    changes["6.jpg"] = "rotated upright"  # a camera's JPEG stays one; tests/unit/ui/dataset/test_draft_images.py
    assert notes == [f"{name}: {change}" for name, change in changes.items()] and (folder / "6.jpg").is_file()
    assert (folder / "photo.jpg").read_bytes() == plain.read_bytes(), "with a suffix that is true"


@pytest.mark.timeout(200)
def test_no_images_is_an_error_and_one_is_a_note_and_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert "no images" in refused(tmp_path)
    empty = made(tmp_path / "empty")
    (empty / "readme.md").write_text("hello")
    assert f"no images in {empty};" in refused(empty) and "no images in the selected files;" in refused([])
    assert "is not a folder" in refused(tmp_path / "nowhere")
    _, notes = take(tmp_path, [picture(tmp_path / "in/one.png")], trigger="x")
    assert any("only one image" in note for note in notes)


def test_a_folder_among_the_images_that_cannot_be_read_is_named_and_not_left_out(tmp_path, monkeypatch):
    folder, listed = picture(tmp_path / "in" / "10_cat" / "a.png").parent, os.scandir
    picture(tmp_path / "in" / "b.png")
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", str(folder)))
    monkeypatch.setattr(os, "scandir", lambda path: denied() if path == str(folder) else listed(path))
    assert f"cannot read the images in {tmp_path / 'in'} ({folder}): no permission there" in refused(tmp_path / "in")


def test_captions_come_from_the_image_or_the_text_file_then_the_trigger_then_the_folder(tmp_path):
    images = pictures(tmp_path / "in", 3)
    (images / "0.txt").write_text("from the file\n", encoding="utf-8")
    (images / "0.caption").write_text("from the other file\n", encoding="utf-8")
    (images / "1.caption").write_bytes("\ufeffzwölf\r\nBoxkämpfer 🥊".encode())
    folder, _ = take(tmp_path, images, trigger="ohwx")
    read = {t.stem: t.read_text(encoding="utf-8") for t in folder.glob("*.txt")}
    assert read == {"0": "from the file\n", "1": "zwölf Boxkämpfer 🥊\n", "2": "ohwx\n"}
    (images / "0.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert refused(images) == "0.txt: the caption is not UTF-8 (byte 3); save the file as UTF-8"
    in_a_folder = dataset.Source(images / "1.png", "a.png", "", "5_dog")
    given = [*sources([images / "2.png"], {"2.png": "of\nthe image"}), in_a_folder]
    assert [one.caption for one in dataset.gather(given)] == ["of the image", "dog"]
    (tmp_path / "taken").rename(tmp_path / "before")  # sd-scripts stops at an empty file: library/train_util.py
    folder, notes = take(tmp_path, [images / "2.png"])
    assert (folder / "2.txt").read_bytes() == b"\n" and sum("empty caption" in note for note in notes) == 1


def test_hostile_names_become_harmless_and_stay_apart(tmp_path):
    stems = ["a b", "a-b", "A B", "$(id)", "-rf", "日本", "🦊", "con", "x" * 200]
    names = [f"{stem}.png" for stem in stems]
    files = [picture(tmp_path / "in" / name) for name in names]
    files += [picture(tmp_path / part / "same.png") for part in ("one", "two")]  # of one name, from two folders
    folder = made(tmp_path / "taken")
    dataset.ingest([dataset.Source(path, path.name, f"caption of {i}") for i, path in enumerate(files)], folder)
    taken = dataset.images_in(folder)
    assert len({p.name.casefold() for p in taken}) == len(files)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,90}", p.stem) for p in taken)
    assert not {p.stem.upper() for p in taken} & {"CON", "NUL"} and not any(p.name.startswith("-") for p in taken)
    captions = {(folder / p.name).with_suffix(".txt").read_text(encoding="utf-8").strip() for p in taken}
    assert captions == {f"caption of {i}" for i in range(len(files))}


def test_a_caption_is_text_in_utf8_or_utf16_of_a_captions_size(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    for content in ("\ufeffü\0 x\n".encode(), "ü\n x".encode("utf-16"), b"\xfe\xff" + "ü x".encode("utf-16-be")):
        path.write_bytes(content)
        assert dataset.read_caption(path) == "ü x"
    refused = r"^a\.txt: the caption is not UTF-(8|16) \(byte \d\); save the file"
    for encoding in ("utf-16-le", "utf-16-be", "utf-32", "utf-32-le"):
        path.write_bytes("a cat".encode(encoding))
        with pytest.raises(runs.RunError, match=refused):
            dataset.read_caption(path)
    limits(monkeypatch, max_caption_kb=1)
    path.write_text("x" * 1000)
    assert len(dataset.read_caption(path)) == 1000
    path.write_text("x" * 1001)
    with pytest.raises(runs.RunError, match=r"^mine\.txt: the caption is larger than 1 kB; shorten it"):
        dataset.read_caption(path, "mine.txt")


def test_dropped_folders_become_subfolders_of_one_level_that_stay_apart():
    named = {
        "": "", "dogs": "dogs", "Dogs": "Dogs-2", "10_cat": "10_cat", "a/10_cat/b?": "10_a-b-cat", "a/b": "a-b",
        "5_a/5_a": "5_a", "weight-2": "folder-weight-2", "3_": "3_", "...": "folder-", "con": "image-con",
    }  # fmt: skip
    assert dataset.folder_names((name, 1) for name in (*named, "dogs")) == [*named.values(), "dogs"]
    with pytest.raises(runs.RunError, match="^2024_summer: 2024 repeats × weight 5 is more than 9999; lower one"):
        dataset.ingest([dataset.Source(Path("a.png"), "a.png", "", "2024_summer", weight=5)], Path("none"))


def test_the_images_of_a_data_set_are_those_that_a_trainer_reads(tmp_path):
    shown = ["b.png", "c.JPEG", "10_cat/a.webp", "dogs/b.bmp"]
    for name in (*shown, ".x.png", "a.gif", ".masks/a.png", "dogs/.b.png", "dogs/deep/c.png", "other/x.txt"):
        picture(tmp_path / "in" / name, format="PNG")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "in" / "dogs")
    found = dataset.images_in(tmp_path / "in")
    assert [path.relative_to(tmp_path / "in").as_posix() for path in found] == shown
    assert dataset.counts(tmp_path / "in") == {"": 2, "10_cat": 1, "dogs": 1} and dataset.counts(tmp_path / "no") == {}
