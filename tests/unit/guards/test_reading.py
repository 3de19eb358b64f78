"""A read that lacks a descriptor or memory is tried again at once: a scan of hundreds of files must not fail."""

import builtins
import errno
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from guards import reading


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_shortage_is_tried_again_and_another_error_is_not(tmp_path, monkeypatch, number):
    tries = 1 if number == errno.EIO else reading.TRIES_COUNT
    (tmp_path / "stat").write_bytes(b"7 (python) S")
    for fails, outcome in ((tries - 1, nullcontext()), (tries, pytest.raises(OSError))):
        opened = Mock(side_effect=[*[OSError(number, "no")] * fails, DEFAULT], wraps=open)
        with monkeypatch.context() as patch, outcome:
            patch.setattr(builtins, "open", opened)
            assert reading.read_bytes(tmp_path / "stat") == b"7 (python) S"


def test_what_cannot_be_read_is_empty_and_what_is_no_object_is_none(tmp_path):
    file = tmp_path / "x.json"
    assert (reading.read_text(file), reading.read_json(file)) == ("", None)
    for text, value in (("[1]", None), ("[" * 9999, None), ('{"a"', None), ('{"a": 1}', {"a": 1})):
        file.write_text(text)
        assert (reading.read_text(file), reading.read_json(file)) == (text, value)
    file.write_bytes(b"a\xff")
    assert reading.read_text(file) == "a\ufffd" and reading.read_json(file) is None


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count bytes")
def test_the_bytes_that_a_process_moves_are_counted_and_a_boot_has_a_name(tmp_path):
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    before = [reading.moved_bytes("self", ("rchar",)), reading.moved_bytes("self")]
    (tmp_path / "x").read_bytes()
    after = [reading.moved_bytes("self", ("rchar",)), reading.moved_bytes("self")]
    assert all(1 << 20 <= now - then < 2 << 20 for then, now in zip(before, after, strict=True))
    assert reading.moved_bytes("no-such-process") is None
    assert reading.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_memory_of_a_container_is_the_smaller_one(tmp_path, monkeypatch):
    group = tmp_path / "cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000")
    (group / "memory.current").write_text("700000")
    (group / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/box\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 5000 kB\n")
    monkeypatch.setattr(reading, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(reading, "PROC", tmp_path)
    assert reading.available_bytes() == 500_000
    (group / "memory.max").write_text("max")
    assert reading.available_bytes() == 5_120_000
