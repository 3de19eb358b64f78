"""Which checkpoint a restart resumes from, and what is never lost."""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from monitor_evidence import saved_state

from guards import checkpoint
from guards.checkpoint import VerifyResult
from monitor.resume import checkpoints


def fifo_in(path: Path, sha256: str) -> Path:
    """A file of the state whose content comes through a fifo, as from a disk that is slow or dead."""
    os.mkfifo(path / "slow.bin")
    guard = json.loads((path / checkpoint.GUARD).read_text())
    guard["files"]["slow.bin"] = {"size": 0, "sha256": sha256}
    (path / checkpoint.GUARD).write_text(json.dumps(guard))
    return path / "slow.bin"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a fifo stands in for a dead disk")
def test_a_state_that_cannot_be_checked_in_time_is_kept_where_it_is(tmp_path):
    path = saved_state(tmp_path, 10)
    fifo_in(path, "")
    chosen = checkpoints.choose([tmp_path], 1.0)
    ((unsure, reason),) = chosen.unsure
    assert unsure == path and "timed out after 1 s" in reason
    assert chosen.path is None and chosen.bad == () and path.is_dir()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the bytes of a process")
def test_a_state_on_a_slow_disk_is_verified_however_long_that_takes(tmp_path):
    path, piece = saved_state(tmp_path, 10), b"x" * 1000
    slow = fifo_in(path, hashlib.sha256(30 * piece).hexdigest())

    def disk():
        with open(slow, "wb", buffering=0) as file:
            for _ in range(30):
                file.write(piece)
                time.sleep(0.1)

    thread = threading.Thread(target=disk, daemon=True)
    thread.start()
    began_s = time.monotonic()
    assert checkpoints.verify(path, 2.5, time.sleep) == VerifyResult() and time.monotonic() - began_s > 2.5
    thread.join()


def test_a_start_needs_room_for_two_checkpoints(tmp_path):
    assert checkpoints.room_missing([tmp_path], floor_bytes=0) == ""
    missing = checkpoints.room_missing([tmp_path], floor_bytes=1 << 60)
    assert "two checkpoints need" in missing and str(tmp_path) in missing


def test_a_check_that_fails_falls_back_to_hashes_and_is_never_a_verdict(tmp_path, monkeypatch):
    """A broken torch in the monitor's environment, or no memory for the deep check, made every checkpoint "bad"."""
    path = saved_state(tmp_path, 10, "optimizer.bin")  # which the deep check loads with torch
    (tmp_path / "broken").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    for broken, reason in (
        ("import os; os._exit(9)", "exit status 9"),
        ("1 / 0", "torch does not load: division by zero"),
    ):
        (tmp_path / "broken" / "torch.py").write_text(broken)
        said = list[str]()
        point = checkpoints.choose([tmp_path], 60, log=said.append)
        assert point.path == path and not point.bad
        assert len(said) == 1 and "only its hashes are checked" in said[0] and reason in said[0]
