"""A file is replaced as a whole, and is on the disk before it has its name."""

import errno
import os

import pytest

import runs
from runs.files import REASONS, atomic_write, explained


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
    with pytest.raises(runs.RunError, match="Input/output error"), explained("write"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/x")
