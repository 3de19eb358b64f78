"""A ZIP is unpacked within its limits, whatever its directory says."""

import random
import struct
import zipfile
from contextlib import nullcontext

import pytest
from draft_helpers import limits, packed

from runs import archives
from runs.files import RunError


def test_sizes_are_counted_and_not_taken_from_the_header(tmp_path, monkeypatch):
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


def test_a_directory_that_is_larger_than_all_entries_can_be_is_not_read(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.zip", {f"{n}{'x' * 200}.png": b"1" for n in range(9)})
    monkeypatch.setattr(archives, "DIRECTORY_BYTES_PER_ENTRY", 200)
    for count, refused in ((9, True), (20, False)):
        limits(monkeypatch, max_zip_entries=count)
        with pytest.raises(RunError, match="more than 9 entries; split it") if refused else nullcontext():
            assert len(archives.unpack(path, tmp_path)[0]) == 9


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_would_be_unpacked_in_one_piece_is_refused(tmp_path, method):
    found, messages = archives.unpack(packed(tmp_path / "a.zip", {"a.png": bytes(9000)}, method), tmp_path)
    assert found == [] and messages == ["a.zip: a.png: not packed with Deflate; unpack the ZIP, then drop its folder"]
