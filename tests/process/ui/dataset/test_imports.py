"""Folders on the server and large ZIPs: imported by a process of their own, which a kill stops for a moment only."""

import errno
import json
import os
import shutil
import time
from unittest.mock import Mock

import psutil
import pytest
from draft_helpers import captions, note, packed, photo, photo_folder, png, upload
from ui_page import until

from runs import archives
from runs.files import REASONS, RunError
from ui import jobs
from ui.dataset import draft, images, imports, subsets

pytestmark = pytest.mark.slow


def until_done(draft_id: str) -> list[dict]:
    """The results of all imports."""
    until(lambda: not imports.status(draft_id)["waiting"], "the imports have ended")
    return imports.status(draft_id)["finished"]


def zip_of(path, number: int):
    return upload(packed(path, {f"{n}.png": png(n) for n in range(number)}))


def test_a_folder_on_the_server_is_imported_with_its_captions_and_stays_as_it_is(mine, tmp_path):
    root = tmp_path / "set"
    for n in range(12):
        photo(root / ("10_cat" if n % 2 else "") / f"img{n}.png", n)
    note(root / "10_cat/img11.txt", "eleven"), note(root / "img2.txt", "two"), note(root / "lone.txt", "waits")
    photo(root / ".hidden" / "x.png", 90), note(root / "script.py", "print()")
    (root / "broken.png").write_text("not an image")
    photo(tmp_path / "outside.png", 91)
    (root / "escape.png").symlink_to(tmp_path / "outside.png")
    (root / "escape.txt").symlink_to("/etc/passwd")
    (root / "inside.png").symlink_to(root / "img0.png")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.png")
    before = {path: path.lstat() for path in root.rglob("*")}
    imports.start_folder(mine, f" {root} ")
    (result,) = until_done(mine)
    assert (result["state"], result["added"], result["name"]) == ("done", 12, str(root))
    found = captions(mine)
    assert list(found)[:4] == ["set/img0.png", "set/img2.png", "set/img4.png", "set/img6.png"], "as people count"
    assert found["set/10_cat/img11.png"] == "eleven" and found["set/img2.png"] == "two" and len(found) == 12
    assert {one["repeats"] for one in subsets.overview(mine) if one["folder"] == "set/10_cat"} == {10}
    said = "\n".join(result["messages"])
    for part in ("3 files were not added: links", "set/broken.png: Not a readable", "lone.txt: no image has this"):
        assert part in said, said
    assert {path: path.lstat() for path in root.rglob("*")}.keys() == before.keys()
    assert all(path.lstat().st_mtime_ns == known.st_mtime_ns for path, known in before.items())
    stored = draft.original(mine, draft.items(mine)[0].id)
    assert stored.stat().st_ino == (root / "img0.png").stat().st_ino, "a hard link takes no disk space"
    (root / "img0.png").unlink()
    assert stored.is_file() and draft.undo(mine) == "Undone: addition of 12 images." and draft.undo(mine, back=False)
    assert len(draft.items(mine)) == 12
    assert imports.start_folder(mine, str(tmp_path / "set"))["finished"] == [], "a result stays until the next import"


def test_an_import_that_is_killed_continues_where_it_stopped_and_adds_nothing_twice(mine, tmp_path):
    root = photo_folder(tmp_path / "many", 60)
    imports.start_folder(mine, str(root))
    until(lambda: draft.items(mine), "the first image is added")
    process = psutil.Process(json.loads((draft.folder(mine) / jobs.FOLDER / f"{imports.JOB}.json").read_text())["pid"])
    family = [process, *process.children(recursive=True)]  # all that it started, as a machine that goes down does
    for one in family:
        one.kill()
    psutil.wait_procs(family, 10)
    assert 0 < len(draft.items(mine)) < 60 and imports.waiting(mine), "it was killed in the middle"
    draft.set_caption(mine, draft.items(mine)[0].id, "typed meanwhile")
    (result,) = until_done(mine)
    found = captions(mine)
    assert result["state"] == "done" and len(found) == 60 and result["messages"] == []
    assert sorted(found.values()) == sorted(["typed meanwhile", *(f"number {n}" for n in range(1, 60))])
    assert not imports.waiting(mine)


def test_a_cancelled_import_keeps_what_it_added_and_does_not_continue(mine, tmp_path):
    root = photo_folder(tmp_path / "many", 80)
    imports.start_folder(mine, str(root)), imports.start_folder(mine, str(root))
    until(lambda: draft.items(mine), "the first image is added")
    answer = imports.cancel(mine)
    assert answer["waiting"] == 0 and not images.listing(mine)["importing"]
    states = [one["state"] for one in answer["finished"]]
    number = len(draft.items(mine))
    assert states == ["cancelled", "cancelled"] and 0 < number < 80
    until(lambda: not jobs.running(draft.folder(mine), imports.JOB), "its process has ended")
    assert len(draft.items(mine)) == number and not list(draft.folder(mine).glob(".new-*"))
    assert draft.undo(mine) and draft.items(mine) == []


def test_a_large_zip_is_imported_in_the_background(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "LARGE_ZIP_BYTES", 1000)
    files = {f"3_cat/{n}.png": png(n) for n in range(5)} | {f"3_cat/{n}.txt": f"cat {n}".encode() for n in range(5)}
    path = packed(tmp_path / "set.zip", {**files, "../escape.png": b"x"})
    sent = {"path": str(upload(path)), "name": "set.zip"}
    answer = images.image_action({"draft": mine, "action": "add_images", "uploads": [sent], "drop": "one"})
    assert answer["ok"] and answer["list"]["importing"]
    (result,) = until_done(mine)
    assert (result["state"], result["added"], result["name"]) == ("done", 5, "set.zip")
    assert "the path leads outside the folder" in "\n".join(result["messages"])
    assert captions(mine) == {f"3_cat/{n}.png": f"cat {n}" for n in range(5)}
    assert not list(draft.uploads_dir().glob("zip-*"))


def test_a_zip_that_the_disk_does_not_take_unpacked_says_so_and_one_that_it_takes_is_unpacked_once(
    mine, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "start", lambda *_: None)
        imports.start_uploads(mine, [(zip_of(tmp_path / "set.zip", 4), "set.zip")], "one")
        patch.setattr(imports.signal, "signal", Mock())
        patch.setattr(archives, "unpack", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert imports.main([mine]) == 1
        assert imports.status(mine)["finished"][0]["messages"] == [f"cannot import set.zip: {REASONS[errno.ENOSPC]}"]
        imports.start_uploads(mine, [(zip_of(tmp_path / "set.zip", 4), "set.zip")], "one")
    copied = Mock(wraps=shutil.copyfile)
    monkeypatch.setattr(shutil, "copyfile", copied)
    monkeypatch.setattr(imports.signal, "signal", Mock())
    assert imports.main([mine]) == 0 and len(draft.items(mine)) == 4 and not copied.called


@pytest.mark.parametrize("cleaner", ["ours, after a day", "Gradio's, when the server stops"])
def test_an_import_that_waits_keeps_its_upload(mine, tmp_path, monkeypatch, cleaner):
    sent = zip_of(tmp_path / "set.zip", 4)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "start", lambda *_: None)  # the machine goes down before the import begins
        imports.start_uploads(mine, [(sent, "set.zip")], "one")
    assert len(imports.waiting(mine)) == 1
    if cleaner.startswith("ours"):
        for path in (sent, sent.parent):
            os.utime(path, (time.time() - 2 * draft.UPLOAD_EXPIRES_S,) * 2)
        draft.delete_expired()
    else:
        sent.unlink()
    assert not sent.exists()
    (result,) = until_done(mine)
    assert (result["state"], result["added"], result["messages"]) == ("done", 4, [])
    until(lambda: [path.suffix for path in imports.place(mine).iterdir()] == [".json"], "nothing of the upload is left")


def test_an_import_whose_upload_is_gone_has_failed_and_says_what_to_do(mine, tmp_path):
    sent = zip_of(tmp_path / "set.zip", 1)
    sent.unlink()
    with pytest.raises(RunError, match="set.zip: the file is gone; drop it again"):
        imports.start_uploads(mine, [(sent, "set.zip")], "one")
    assert not imports.waiting(mine) and not list(imports.place(mine).iterdir())
    spec = {"kind": "uploads", "files": [[str(sent), "set.zip"]], "name": "set.zip", "drop": "d", "attempts": 0}
    (imports.place(mine) / "1.json").write_text(json.dumps(spec))  # of an earlier version
    (result,) = until_done(mine)
    assert result["state"] == "failed" and result["messages"] == ["set.zip: the file is gone; drop it again"]


def test_a_folder_without_images_and_an_import_whose_process_always_dies_end_with_a_message(mine, tmp_path):
    note(tmp_path / "empty/readme.txt", "x")
    imports.start_folder(mine, str(tmp_path / "empty"))
    (result,) = until_done(mine)
    assert result["state"] == "failed" and "no images in this folder" in result["messages"][0]
    root = photo(tmp_path / "x/a.png").parent
    spec = {"kind": "folder", "path": str(root), "name": "x", "drop": "d", "attempts": 3}
    (imports.place(mine) / "1.json").write_text(json.dumps(spec))
    assert imports.main([mine]) == 1
    result = imports.status(mine)["finished"][0]
    assert result["state"] == "failed" and "ended 3 times without a result" in result["messages"][0]
    (imports.place(mine) / "2.json").write_text("{")
    assert imports.main([mine]) == 1 and not imports.waiting(mine)
