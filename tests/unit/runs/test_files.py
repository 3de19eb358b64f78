"""A file is replaced as a whole, and is on the disk before it has its name."""

import errno
import os
from unittest.mock import DEFAULT, Mock

import pytest

import runs
from guards import checkpoint
from runs import files
from runs.files import REASONS, atomic_write, building, checksum, explained, private_folder


def test_the_content_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    path, done = tmp_path / "run.toml", []
    path.write_text("old")
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(("fsync", path.read_text())), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (done.append(("replace", path.read_text())), replace(*names))[1])
    atomic_write(path, "new")
    assert path.read_text() == "new" and done[:2] == [("fsync", "old"), ("replace", "old")]
    assert done[2:] == [("fsync", "new")], "the folder, with the new name"


def test_every_known_error_says_what_to_do():
    assert errno.EACCES in REASONS
    for code in REASONS:
        with pytest.raises(runs.RunError, match="^cannot write .*;"), explained("write"):
            raise OSError(code, os.strerror(code), "/x")
    with pytest.raises(runs.RunError, match=r"^cannot copy \(/to\): the disk is full"), explained("copy"):
        raise OSError(errno.ENOSPC, "No space left on device", "/from", None, "/to")
    with pytest.raises(runs.RunError, match="No child processes"), explained("write"):
        raise OSError(errno.ECHILD, os.strerror(errno.ECHILD), "/x")


def mode(path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_is_for_those_that_it_is_meant_for_and_one_that_cannot_be_replaced_leaves_nothing(tmp_path):
    path, before = tmp_path / "a", os.umask(0o022)
    try:
        for options, wanted in (({}, 0o644), ({"executable": True}, 0o755), ({"private": True}, 0o600)):
            atomic_write(path, "é\udcff", **options)
            assert (mode(path), path.read_bytes()) == (wanted, "é".encode() + b"\xff")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        atomic_write(tmp_path / "folder", "x")
    assert sorted(os.listdir(tmp_path)) == ["a", "folder"] and checksum(b"abc") == "352441c2-3"


def test_a_private_folder_is_this_users_alone_and_no_link(tmp_path):
    folder = private_folder(tmp_path / "mine")
    folder.chmod(0o755)
    assert private_folder(folder) == folder == tmp_path / "mine" and mode(folder) == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError, match="is a link, or belongs to another user"):
        private_folder(tmp_path / "link")


def test_a_folder_that_is_built_is_whole_or_not_there(tmp_path, monkeypatch):
    final = tmp_path / "in" / "run"
    with building(final) as work:
        (work / "a").touch()
        assert not final.exists() and work.parent == final.parent
    assert os.listdir(final) == ["a"] and mode(final) == 0o755
    with pytest.raises(runs.RunError, match="exists already; choose another name"), building(final):
        pass
    with pytest.raises(KeyError), building(tmp_path / "in" / "other"):
        raise KeyError
    assert os.listdir(final.parent) == ["run"] and os.listdir(final) == ["a"]
    monkeypatch.setattr(os, "chmod", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with building(tmp_path / "share"):  # that root has mounted: everybody writes there, and nobody changes a mode
        pass
    assert (tmp_path / "share").is_dir()


def test_a_folder_that_is_built_is_on_the_disk_or_not_there(tmp_path, monkeypatch):
    synced, sync = [], Mock(side_effect=lambda path: synced.append(path.name))
    monkeypatch.setattr(files, "fsync_path", sync)
    with building(tmp_path / "data") as work:
        (work / "10_cat").mkdir()
        (work / "10_cat" / "a.png").touch()
    assert synced == ["a.png", tmp_path.name], "a power cut leaves no empty images in it"
    sync.side_effect = [None, OSError(errno.EIO, "Input/output error")]
    with pytest.raises(OSError, match="Input/output"), building(tmp_path / "run") as work:
        (work / "a").touch()
    assert os.listdir(tmp_path) == ["data"], "its name is free for the next try"


def test_on_windows_a_folder_of_which_a_virus_scanner_reads_a_file_is_renamed_a_moment_later(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.sys, "platform", "win32")
    replace = Mock(side_effect=[PermissionError, DEFAULT], wraps=os.replace)
    monkeypatch.setattr(os, "replace", replace)
    with building(tmp_path / "run"):
        pass
    assert (tmp_path / "run").is_dir() and replace.call_count == 2
