"""A dropped ZIP is a folder; a hostile one costs only itself."""

import io
import re
import shutil
import struct
import warnings
import zipfile
from functools import partial

import pytest
from draft_helpers import captions, drop, item_of, limits, note, packed, photo, png
from PIL import Image

from runs.files import RunError
from ui.dataset import draft, draft_drop, imports


def test_a_zip_is_a_folder_with_images_and_captions(mine, tmp_path):
    files = {"10_cat/1.png": png(1), "10_cat/1.txt": b"a cat", "3_dog\\1.png": png(2), "3_dog\\1.txt": b"a dog"}
    path = packed(tmp_path / "set.zip", {**files, "__MACOSX/1.png": b"junk", ".DS_Store": b"junk"})
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings(action="ignore"):
        for number in (4, 3):
            archive.writestr("1.png", png(number))
    assert drop(mine, path) == (3, ["set.zip: 1.png: the ZIP has this file twice; the last one is used"])
    assert captions(mine) == {"10_cat/1.png": "a cat", "3_dog/1.png": "a dog", "1.png": ""}
    assert not list(draft.uploads_dir().glob("zip-*")), "what was unpacked is deleted"


def test_two_zips_with_the_same_names_are_not_mixed(mine, tmp_path):
    zips = [packed(tmp_path / f"{n}.zip", {"1.png": png(n), "1.txt": f"zip {n}".encode()}) for n in range(2)]
    assert drop(mine, *zips) == (2, [])
    assert captions(mine) == {"1.png": "zip 0", "1-2.png": "zip 1"}
    with Image.open(io.BytesIO(png(1))) as image:
        assert Image.open(draft.original(mine, item_of(mine, "1-2.png").id)).tobytes() == image.tobytes()


def test_a_bad_entry_costs_only_itself_and_nothing_leaves_the_folders(data, mine, tmp_path):
    link = zipfile.ZipInfo("link.png")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    pipe = zipfile.ZipInfo("pipe.png")
    pipe.create_system, pipe.external_attr = 3, 0o010644 << 16
    outside = ["../up.png", "a/../../up.png", "/etc/abs.png", "C:\\drive.png", "\\\\host\\share.png"]
    bad = {**dict.fromkeys(outside, png(1)), link: b"/etc/passwd", pipe: b"", "inner.zip": b"PK\5\6" + bytes(18)}
    bad |= {"program.exe": b"MZ", "bomb.png": bytes(30_000_000), "words.png": b"I am a text"}
    packed(tmp_path / "bad.zip", {**bad, "con.png": png(7), "good/1.png": png(2)})
    before = {path for path in tmp_path.rglob("*") if draft.folder(mine) not in path.parents}
    added, messages = drop(mine, tmp_path / "bad.zip")
    assert added == 2 and sorted(captions(mine)) == ["good/1.png", "image-con.png"]
    assert len(messages) == len(bad), messages
    text = "\n".join(messages)
    for word in ("outside the folder", "a link or a special file", "an archive inside the ZIP", "200 times its size"):
        assert word in text
    after = {path for path in tmp_path.rglob("*") if draft.folder(mine) not in path.parents}
    own = {data / "datasets", data / "datasets/.uploads", data / "datasets/.drafts", draft.folder(mine)}
    assert {path for path in after - before if draft.uploads_dir() not in path.parents} <= own


def test_a_zip_with_too_many_entries_is_refused_before_they_are_read(mine, tmp_path, monkeypatch):
    limits(monkeypatch, max_zip_entries=5)
    path = packed(tmp_path / "many.zip", {f"{n}.txt": b"" for n in range(6)})
    _, messages = drop(mine, path)
    assert messages == ["many.zip: the ZIP has more than 5 entries; split it"]
    of_macos = {name: b"" for n in range(5) for name in (f"{n}.txt", f"__MACOSX/._{n}.txt")}
    assert "5 entries" not in str(drop(mine, packed(tmp_path / "mac.zip", of_macos)))
    end = bytearray(packed(tmp_path / "x.zip", {}).read_bytes())
    struct.pack_into("<L", end, 12, 3000)  # the directory is all that is before
    (tmp_path / "x.zip").write_bytes(bytes(3000) + end)
    assert drop(mine, tmp_path / "x.zip")[1] == ["x.zip: the ZIP has more than 5 entries; split it"]


def encrypted(content: bytearray) -> None:
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.find(mark) + place] |= 1


def offsets(content: bytearray) -> None:
    """The directory starts later than it says: the first file would begin before the ZIP does."""
    at = content.rfind(b"PK\5\6") + 16
    struct.pack_into("<L", content, at, struct.unpack_from("<L", content, at)[0] + 10)


def beyond(content: bytearray, place: int) -> None:
    """The directory is beyond the end of any disk."""
    end = content.rfind(b"PK\5\6")
    struct.pack_into("<L", content, end + 12, 0xFFFFFFFF)  # the size is in another record, which the locator names
    content[end:end] = struct.pack("<LLQL", 0x07064B50, 0, place, 1)


def long_name(content: bytearray) -> None:
    struct.pack_into("<H", content, 26, 65_000)  # the length of the name before the file's content


def cut(content: bytearray, length: int) -> None:
    del content[length:]


UNREADABLE = "x.zip: Not a readable ZIP file.*"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *[(partial(cut, length=length), UNREADABLE) for length in (0, 3, 100, 400)],
        (encrypted, "x.zip: 1.png: encrypted with a password; unpack the ZIP, then drop its folder"),
        (offsets, r"x.zip: 1.png: the file is damaged \(.*; pack the ZIP again"),
        (long_name, r"x.zip: 1.png: the file is damaged \(.{1,300}; pack the ZIP again"),
        *[(partial(beyond, place=place), UNREADABLE) for place in (2**62, 2**63, 2**64 - 1)],
    ],
)
def test_a_damaged_zip_costs_only_itself_and_is_explained(mine, tmp_path, damage, message):
    path = packed(tmp_path / "x.zip", {"1.png": bytes(70_000)}, zipfile.ZIP_STORED)
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    added, messages = drop(mine, path, photo(tmp_path / "y.png"))
    assert added == 1 and len(messages) == 1 and re.fullmatch(message, messages[0]), messages


@pytest.mark.parametrize(("links", "words"), [(1, "1 file was not added"), (2, "2 files were not added")])
def test_links_out_of_a_folder_are_counted_and_not_followed(tmp_path, links, words):
    photo(tmp_path / "set/own.png")
    photo(tmp_path / "elsewhere.png", 2)
    for number in range(links):
        (tmp_path / f"set/link{number}.png").symlink_to(tmp_path / "elsewhere.png")
    found, messages = imports.files_of(tmp_path / "set", "")
    assert [one.name for one in found] == ["own.png"] and len(messages) == 1 and messages[0].startswith(words)


@pytest.mark.parametrize(
    ("folder", "mode", "said"), [("10_cat", "RGB", 0), ("10_cat", "RGBA", 1), ("30_weight-3-cat", "RGB", 1)]
)
def test_the_folder_of_a_runs_data_set_is_imported_and_its_masks_are_said_to_be_elsewhere(data, folder, mode, said):
    path = photo(data / f"datasets/cat/{folder}/own.png")
    Image.open(path).convert(mode).save(path)
    found, messages = imports.files_of(data / "datasets/cat", "")
    assert [one.name for one in found] == ["own.png"] and len(messages) == said
    assert all("'New LoRA from this run' on a run's page" in message for message in messages)


def test_what_is_written_just_now_is_no_import_that_waits(mine):
    imports.place(mine).mkdir(parents=True)
    for name in (".2.json.tmp", ".1.json", "2.json", "1.json"):
        (imports.place(mine) / name).touch()
    assert [one.path.name for one in imports.waiting(mine)] == ["1.json", "2.json"]


def test_a_limit_that_is_reached_in_each_chunk_is_said_once(mine):
    imports.place(mine).mkdir(parents=True)
    one = imports.Import(imports.place(mine) / "1.json")
    one.end("done", ["too many", "a.png: damaged", "too many"])
    assert one.values["messages"] == ["too many", "a.png: damaged"]


def test_a_folder_that_cannot_be_imported_is_explained_at_once(mine, tmp_path):
    assert imports.given_folder(f"{tmp_path}/../{tmp_path.name}") == tmp_path
    for path, message in (
        ("", "^Type the full path"),
        ("photos", "^Type the full path"),
        ("/no/such/folder", "No such file or directory; name a folder on the server"),
        ("/\0", "no path|No such file"),
        ("\ud83d", "^Type the full path"),
    ):
        with pytest.raises(RunError, match=message):
            imports.start_folder(mine, path)
        assert not imports.waiting(mine)


def test_a_folder_that_changes_while_it_is_read_costs_only_the_file(mine, tmp_path):
    root = photo(tmp_path / "x/a.png", 1).parent
    photo(root / "b.png", 2), photo(root / "c.png", 3)
    files, _ = imports.files_of(root, "drop")
    (root / "a.png").unlink()
    (root / "b.png").unlink(), (root / "b.png").symlink_to("/etc/passwd")
    added, said = draft_drop.take(mine, files, "drop", more=False, link=True)
    assert added == 1 and "x/a.png: the file is gone" in said[0] and "x/b.png: a link; use the file itself" in said[1]


def test_a_file_that_cannot_be_read_costs_only_itself(mine, tmp_path, monkeypatch):
    root = photo(tmp_path / "x/a.png", 1).parent
    photo(root / "b.png", 2), note(root / "b.txt", "b"), note(root / "a.txt", "a")
    files, _ = imports.files_of(root, "drop")
    copy, read = shutil.copyfile, draft_drop.read_caption

    def refuse(path):
        if path.name in ("b.png", "a.txt"):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "copyfile", lambda path, to: refuse(path) or copy(path, to))
    monkeypatch.setattr(draft_drop, "read_caption", lambda path, name: refuse(path) or read(path, name))
    added, said = draft_drop.take(mine, files, "drop", more=False)
    unreadable = [f"x/{name}: the file cannot be read; allow this user to read it" for name in ("a.txt", "b.png")]
    assert added == 1 and sorted(said)[:2] == unreadable
    monkeypatch.setattr(shutil, "copyfile", lambda path, to: refuse(root / "b.png"))
    with pytest.raises(RunError, match="cannot store the files .*: no permission there"):
        draft_drop.take(mine, files, "again", more=False)


def test_the_import_that_runs_and_the_ends_of_others_are_shown_as_text():
    now = {"done": 1000, "total": 2000, "phase": "adding", "name": "<far>"}
    ended = {"state": "failed", "name": "old.zip", "added": 1, "messages": ["a.png: <b>"]}
    text = imports.shown({"now": now, "waiting": 2, "finished": [ended]})
    assert "Adding images: 1,000 of 2,000 files · &lt;far&gt; · 1 import after it" in text
    assert 'max="2000" value="1000"' in text and "<far>" not in text and "<b>" not in text
    assert "old.zip: not imported completely; 1 image added." in text and "a.png: &lt;b&gt;" in text
