"""A ZIP is unpacked within its limits, whatever its directory says."""

import random
import struct
import zipfile

from draft_helpers import limits, packed

from runs import archives


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


def test_the_directory_of_a_zip_has_the_size_that_its_end_record_says(tmp_path):
    path = packed(tmp_path / "a.zip", {f"{n}.png": b"1" for n in range(9)})
    whole = path.read_bytes()
    assert archives._directory_bytes(path) == whole.rfind(b"PK\5\6") - whole.find(b"PK\1\2")
    for content in (whole[:-5], b"no zip"):
        path.write_bytes(content)
        assert archives._directory_bytes(path) == 0
