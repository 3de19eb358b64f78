"""Which checkpoint a restart resumes from, and what is never lost."""

import functools
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from monitor_evidence import saved_state
from monitor_helpers import wait_for
from run_facts import status
from standby_helpers import Run

from benchmarks import toy_loop
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


shared_memory = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")


@pytest.fixture
def run(tmp_path):
    """A run whose only checkpoints on the disk are those that something other than its schedule makes."""
    (tmp_path / "hurry").touch()
    one_failure = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.5\n"
    return Run(tmp_path, steps=60, every=10_000, limits=one_failure)


def steps(run: Run) -> list[int]:
    return run.toy.trained(run.data)


@pytest.mark.slow
@shared_memory
def test_a_stop_at_once_has_the_newest_steps_on_the_disk(run):
    process = run.start()
    wait_for(lambda: len(steps(run)) >= 20)
    (run.folder / "stop.request").write_text('{"now": true}', encoding="utf-8")
    run.finish(process, code=3)
    state, step = next(iter(checkpoint.states(run.folder).items()))
    weights = functools.reduce(toy_loop.advance, range(1, step + 1), b"")
    assert step >= len(steps(run)) - 10 and (state / "weights.bin").read_bytes() == weights
    assert status(run.folder)["state"] == "stopped" and state.name in status(run.folder)["reason"]


@pytest.mark.slow
@shared_memory
def test_steps_that_the_disk_refuses_stay_in_memory_and_the_next_start_goes_on_from_them(run, tmp_path):
    """The interpreter that writes them fails: as on a full disk, nothing is written and nothing is freed."""
    (tmp_path / "broken").mkdir()
    shim = "import sys\nif 'guards.snapshot_files' in sys.orig_argv:\n    sys.exit('No space left on device')\n"
    (tmp_path / "broken" / "sitecustomize.py").write_text(shim, encoding="utf-8")
    run.finish(run.start(TOY_FAULTS="raises@40", PYTHONPATH=str(tmp_path / "broken")), code=4)
    now = status(run.folder)
    assert now["state"] == "failed" and "stay in memory" in now["reason"] and not checkpoint.states(run.folder)
    run.finish(run.start())
    assert steps(run).count(30) == 1  # no step before the fault is trained twice
    run.check_complete(restarts=0)
