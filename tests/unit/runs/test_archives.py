"""A ZIP is unpacked within its limits, whatever its directory says."""

import random
import struct
import zipfile

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


def test_a_directory_that_is_larger_than_its_entries_allow_is_not_read_into_memory(tmp_path, monkeypatch):
    path = packed(tmp_path / "large.zip", {f"{'x' * 60_000}{n}.png": b"1" for n in range(8)})  # 480 kB
    (tmp_path / "into").mkdir()
    limits(monkeypatch, max_zip_entries=2000)
    assert len(archives.unpack(path, tmp_path / "into")[0]) == 8
    limits(monkeypatch, max_zip_entries=1000)
    with pytest.raises(RunError, match=r"large\.zip: the ZIP has more than 1000 entries; split it"):
        archives.unpack(path, tmp_path / "into")
