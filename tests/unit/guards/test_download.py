"""Room, hashes and the cache of the hub's library, without a request."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from guards import download
from guards.hub import DownloadError, Remote

REPO = "me/model"


def test_the_room_that_is_needed_is_what_is_not_received_yet_and_compared_with_the_disk(tmp_path):
    target, remote = tmp_path / "x.bin", Remote(REPO, "c0ffee", "x.bin", 10, "ab" * 32)
    assert download.missing_bytes(target, remote) == 10
    for have, missing in ((3, 7), (12, 0)):
        download.part_of(target, remote).write_bytes(bytes(have))
        assert download.missing_bytes(target, remote) == missing
    download.part_of(target, remote).unlink()
    target.touch()
    assert download.missing_bytes(target, remote) == 0
    download.check_space(0, tmp_path / "a/b", "x.bin")
    with pytest.raises(DownloadError, match=rf"^x.bin needs 1000000.0 GB more, but {tmp_path} has .* GB free") as error:
        download.check_space(10**15, tmp_path / "a/b", "x.bin")
    assert error.value.kind == "space"


def test_a_repository_in_the_cache_is_found_by_its_branch_and_used_again_when_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    home = download.repository(REPO)
    assert home == tmp_path / "models--me--model" and download.cached_repository(REPO) is None
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("c0ffee\n")
    assert download.cached_repository(REPO) is None, "only a name"
    found = home / "snapshots/c0ffee"
    found.mkdir(parents=True)
    assert download.cached_repository(REPO) == found
    (home / ".hangproof.json").write_text(json.dumps({"main": {"commit": "c0ffee", "files": ["a", "b"]}}))
    (found / "a").touch()
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set, so me/model is not downloaded"):
        download.snapshot(REPO, list, print)
    (found / "b").touch()
    assert download.snapshot(REPO, list, print) == found


def test_where_links_are_not_possible_a_file_of_the_cache_is_a_second_name_or_a_copy(tmp_path, monkeypatch):
    """Windows gives few users links, and a copy of 24 GB takes time and as much room again."""
    (blob := tmp_path / "blob").write_bytes(b"x")
    for name, owner, makes in (("link", Path, "symlink_to"), ("name", os, "link"), ("copy", os, "link")):
        for _ in range(2):
            download._link(tmp_path / "snapshots" / name, blob)
        assert (tmp_path / "snapshots" / name).read_bytes() == b"x"
        monkeypatch.setattr(owner, makes, Mock(side_effect=NotImplementedError if owner is Path else OSError))
    link, second, copy = (tmp_path / "snapshots" / name for name in ("link", "name", "copy"))
    assert link.is_symlink() and not second.is_symlink() and second.samefile(blob) and not copy.samefile(blob)
