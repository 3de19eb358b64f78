"""Saves without a pause: steps go on while a thread writes, and the disk has what it would have without the thread.

Kills in the middle of a save: tests/trainer/monitor/resume/test_snapshots.py.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from monitor_helpers import wait_for
from snapshot_helpers import raw
from trainer_helpers import good, metrics, sha, train as start

from guards import checkpoint, reading, snapshot_files, state_saves
from guards.heartbeat import Heartbeat, read
from guards.snapshots import Snapshots


def test_a_save_that_stands_still_beats_no_more_and_one_on_a_slow_disk_does(ring, tmp_path, monkeypatch):
    """The disk writes a piece each time that the test allows it."""
    monkeypatch.setattr(state_saves, "BEAT_POLL_S", 0.05)
    record, allowed = tmp_path / "rank-0.hb", threading.Semaphore(0)
    saves = state_saves.StateSaves(Snapshots(ring, str(tmp_path), "spec"), Heartbeat(record))

    def write(files):
        for _ in range(6):
            allowed.acquire(timeout=120)
            (tmp_path / "piece").write_bytes(bytes(1 << 16))

    saves.save("a", 1, 0, raw(b"x"), write)
    waiting = threading.Thread(target=saves.wait)
    waiting.start()
    wait_for(lambda: read(record).phase == "save")

    def silent():
        before = read(record)
        time.sleep(0.6)
        return (read(record).beat_s, read(record).done) == (before.beat_s, before.done)

    wait_for(silent, 15)
    for _ in range(5):
        before = read(record).done
        allowed.release()
        wait_for(lambda before=before: read(record).done > before)
    wait_for(silent, 15)
    allowed.release()
    waiting.join()


def test_sample_images_that_are_drawn_while_a_state_is_written_are_newer_than_it(ring, tmp_path):
    """So that a process that resumes from it draws none of them again."""
    saves = state_saves.StateSaves(Snapshots(ring, str(tmp_path), "spec"), Heartbeat(None))

    def write(files):
        time.sleep(0.1)
        (tmp_path / "sample.png").touch()
        return snapshot_files.write_state(tmp_path / "x-state", files, 4, 1)

    saves.save("x-state", 4, 1, [snapshot_files.File("a", "raw", b"a")], write)
    saves.wait()
    assert (tmp_path / "x-state" / checkpoint.GUARD).stat().st_mtime < (tmp_path / "sample.png").stat().st_mtime
    assert checkpoint.problems(tmp_path / "x-state") == []


def test_the_sync_of_a_large_file_shows_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1 << 16)
    (tmp_path / "large").write_bytes(os.urandom(10 << 16))
    checkpoint.fsync_path(tmp_path / "large")  # its imports read files
    with ThreadPoolExecutor(1) as disk:
        thread = disk.submit(threading.get_native_id).result()
        before = reading.moved_bytes(f"self/task/{thread}")
        disk.submit(checkpoint.fsync_path, tmp_path / "large").result()
        assert reading.moved_bytes(f"self/task/{thread}") - before == 10, "a byte for each piece"


# The built-in trainer, on a disk whose every fsync takes long.


def train(work, name, disk="0", ring=None, number=1, **changed):
    """One attempt on such a disk, without a record from the newest state."""
    output = work["folder"] / name
    more = {"HANGPROOF_INJECT": "slow_disk:fire", "TEST_DISK": disk, "TEST_TRACE": str(output / "trace")}
    more["HANGPROOF_ATTEMPT"] = str(number)
    settings = {"max_train_steps": 12, "save_every_n_steps": 4, "save_last_n_steps": 4, **changed}
    return start(work, name, ring=ring, env=more, resume=checkpoint.newest_valid(output), **settings)[1]


def files_of(output):
    found = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
    return {name: sha(path) for name, path in found.items() if name.startswith("tiny")}


def lines(output, kind):
    return [line.split()[1:] for line in (output / "trace").read_text().splitlines() if line.startswith(kind)]


@pytest.fixture(scope="module")
def plain(work):
    """The folder of a run on a disk that works."""
    good(train(work, "plain"))
    return work["folder"] / "plain"


def test_steps_go_on_while_a_slow_disk_writes_and_every_file_is_the_same(work, plain, ring):
    good(train(work, "slow", "0.08", ring))
    slow = work["folder"] / "slow"
    assert files_of(slow) == files_of(plain) and len(files_of(plain)) > 8
    guard, weights = (slow / "tiny-state" / name for name in (checkpoint.GUARD, "model.safetensors"))
    assert guard.stat().st_mtime < weights.stat().st_mtime, "the time at which the training asked for it"
    threads = {thread for *_, thread in lines(slow, "fsync")}
    assert "hangproof-saves" in threads and {thread for *_, thread in lines(plain, "fsync")} == {"MainThread"}
    spans = [(float(begin), float(end)) for begin, end, thread in lines(slow, "fsync") if thread == "hangproof-saves"]
    inside = [step for step, at in lines(slow, "step") if any(begin < float(at) < end for begin, end in spans)]
    assert inside, "steps were completed while the disk was busy"
    assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False)), "one write at a time"


def test_a_disk_that_fails_is_reported_as_without_the_thread(work, plain, ring):
    done = train(work, "full", "0.05 full@12", ring)
    assert done.returncode == 1 and "the disk is full" in done.stderr and "Saved states are intact" in done.stderr
    good(train(work, "full", ring=ring, number=2))
    assert files_of(work["folder"] / "full") == files_of(plain)


def test_sigterm_during_a_save_completes_it_and_stops_with_a_state(work, plain, ring):
    done = train(work, "term", "0.1 term@4", ring)
    assert done.returncode == 3, done.stderr[-2000:]
    newest = checkpoint.newest_valid(work["folder"] / "term")
    assert checkpoint.guard_of(newest)["step"] >= 4 and list((work["folder"] / "term").glob(".*")) == []
    good(train(work, "term", number=2))
    trained = [line["step"] for line in metrics(work["folder"] / "term")]
    assert trained == list(range(1, 13)), "no step was repeated"
    assert sha(work["folder"] / "term/tiny.safetensors") == sha(plain / "tiny.safetensors")
