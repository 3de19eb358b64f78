"""Saves without a pause: steps go on while a thread writes, and what is on the disk is what it would be without the thread."""

import contextlib
import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from monitor_helpers import wait_for
from trainer_helpers import attempt_of, good, sha

from guards import checkpoint, memory, snapshot_files, snapshots, state_saves
from guards.heartbeat import Heartbeat, read
from guards.snapshot_files import File
from guards.snapshots import Snapshots
from guards.state_saves import StateSaves


@pytest.fixture
def saves(ring, tmp_path):
    return StateSaves(Snapshots(ring, str(tmp_path), "spec"), Heartbeat(None))


def tensor_file(value):
    import torch

    return File("a.pt", "torch", {"a": torch.full((4,), float(value)), "n": [value]})


def values(files):
    return files[0].content["a"].tolist(), files[0].content["n"]


def test_the_thread_writes_what_the_tensors_were_when_the_save_was_due(saves):
    file, go, seen = tensor_file(1), threading.Event(), []
    saves.begin(1)
    note = lambda files: seen.append((values(files), threading.current_thread().name))  # noqa: E731
    saves.save("a", 1, 0, [file], lambda files: (go.wait(10), note(files)))
    saves.then("old", lambda: seen.append("old files are gone"))
    file.content["a"].fill_(7)
    file.content["n"][0] = 7
    assert saves.busy and seen == []
    go.set()
    saves.wait()
    assert seen == [(([1.0] * 4, [1]), "hangproof-saves"), "old files are gone"] and not saves.busy
    saves.then("nothing is under way", lambda: seen.append(threading.current_thread()))
    assert seen[-1] is threading.main_thread()


def test_the_next_step_that_saves_waits_and_says_so_once(saves, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(state_saves, "SLOW_AGE_S", 0.1)
    monkeypatch.setattr(state_saves, "BEAT_POLL_S", 0.05)
    done = []

    def slow(files):
        time.sleep(0.5)
        done.append(files[0].content["n"])

    for step in (1, 2, 3):
        saves.begin(step)
        assert len(done) == step - 1, "one step's saves at a time"
        saves.save(f"state-{step}", step, 0, [tensor_file(step)], slow)
        saves.begin(step)  # the same step has more to save: no wait
    with saves:
        pass
    assert done == [[1], [2], [3]]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["slow_save"] and "state-1, of step 1" in events[0]["message"]
    assert capfd.readouterr().out.count("is still being written") == 1


def test_a_save_that_stands_still_beats_no_more_and_one_on_a_slow_disk_does(ring, tmp_path, monkeypatch):
    """The disk is a pipe: a write that finds it full blocks, until somebody reads."""
    monkeypatch.setattr(state_saves, "BEAT_POLL_S", 0.05)
    record, (disk, end) = tmp_path / "rank-0.hb", os.pipe()
    saves = StateSaves(Snapshots(ring, str(tmp_path), "spec"), Heartbeat(record))
    saves.save("a", 1, 0, [tensor_file(1)], lambda files: [os.write(end, bytes(1 << 16)) for _ in range(20)])
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
        os.read(disk, 1 << 16)
        wait_for(lambda before=before: read(record).done > before)
    wait_for(silent, 15)
    os.set_blocking(disk, False)  # the last bytes may be read before the save has ended
    while saves.busy:
        with contextlib.suppress(BlockingIOError):
            os.read(disk, 1 << 16)
    waiting.join()
    os.close(disk)
    os.close(end)


def test_the_sync_of_a_large_file_shows_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1 << 16)
    (tmp_path / "large").write_bytes(os.urandom(10 << 16))
    checkpoint.fsync_path(tmp_path / "large")  # its imports read files
    with ThreadPoolExecutor(1) as disk:
        thread = disk.submit(threading.get_native_id).result()
        before = state_saves._moved_bytes(thread)
        disk.submit(checkpoint.fsync_path, tmp_path / "large").result()
        assert state_saves._moved_bytes(thread) - before == 10, "a byte for each piece"


def test_an_error_stops_the_training_and_what_would_have_followed(saves):
    def full(files):
        raise OSError(errno.ENOSPC, "No space left on device", "/x/state")

    later = []
    with pytest.raises(OSError, match=r"No space left on device: '/x/state'"), saves:
        saves.save("a", 1, 0, [tensor_file(1)], full)
        saves.then("old", lambda: later.append(1))
        saves._wait()
        saves.check()
    with pytest.raises(OSError, match="No space left"):
        saves.begin(2)
    assert later == []


def test_what_a_killed_process_was_saving_is_written_by_the_next_one_that_goes_on_from_there(ring, capfd):
    """Killed in the save of step 6; others were of a step that comes again, of other settings, and damaged."""
    killed = [StateSaves(Snapshots(ring, "/runs/a", spec), Heartbeat(None)) for spec in ("spec", "other")]
    for number, (step, ours) in enumerate([(6, 0), (6, 0), (6, 0), (9, 0), (6, 1)], 1):
        copy = killed[ours]._copy(f"state-{number}", step, 2, [tensor_file(number)], {"seed": 1})
        assert copy == ring / f"save-{number}"
    with open(ring / "save-3" / snapshot_files.TENSORS, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"!")
    saves, seen = StateSaves(Snapshots(ring, "/runs/a", "spec", 2), Heartbeat(None)), []
    with saves:
        saves.redo(7, lambda guard, files: seen.append((guard["name"], guard["belongs"], values(files))))
    assert seen == [(f"state-{n}", {"seed": 1}, ([float(n)] * 4, [n])) for n in (1, 2)]
    assert list(ring.iterdir()) == [] and "state-3 was being saved" in capfd.readouterr().out


def test_after_an_error_in_the_training_the_save_is_completed(saves, capfd):
    done = []
    with pytest.raises(ValueError, match="of the training"), saves:
        saves.save("a", 1, 0, [tensor_file(1)], lambda files: (time.sleep(0.2), done.append(1)))
        raise ValueError("of the training")
    assert done == [1]


@pytest.mark.parametrize("why", ["short of memory", "snapshots are off", "no folder"])
def test_without_room_for_a_copy_the_training_writes_itself(ring, monkeypatch, capfd, why):
    monkeypatch.setattr(memory, "available_bytes", lambda: 40 if why == "short of memory" else 1 << 40)
    ours = Snapshots(None if why == "no folder" else ring, off="too small" if why == "snapshots are off" else "")
    saves, seen = StateSaves(ours, Heartbeat(None)), []
    for step in (1, 2):
        saves.begin(step)
        saves.save("a", step, 0, [tensor_file(step)], lambda files: seen.append(threading.current_thread()))
    assert seen == [threading.main_thread()] * 2
    said = capfd.readouterr().out.count("saves wait for the disk: a copy of the state has")
    assert said == (why == "short of memory")


# The built-in trainer, on a disk whose every fsync takes long.


def train(work, name, disk="0", ring=None, number=1, **changed):
    """One attempt on such a disk, without a record from the newest state."""
    output = work["folder"] / name
    more = {"HANGPROOF_INJECT": "slow_disk:fire", "TEST_DISK": disk, "TEST_TRACE": str(output / "trace")}
    settings = {"max_train_steps": 12, "save_every_n_steps": 4, "save_state": True, "save_last_n_steps": 4, **changed}
    return attempt_of(work, name, number, ring, checkpoint.newest_valid(output), more, **settings)


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
    losses = [json.loads(line) for line in (work["folder"] / "term/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in losses if line["kind"] == "step"] == list(range(1, 13)), "no step was repeated"
    assert sha(work["folder"] / "term/tiny.safetensors") == sha(plain / "tiny.safetensors")


def test_kills_in_the_middle_of_a_save_leave_a_state_or_a_snapshot(work, ring):
    output, settings = work["folder"] / "kills", {"max_train_steps": 12, "save_every_n_steps": 2}
    for number in (1, 2):
        done = train(work, output.name, f"0.01 kill@{number + 1}", ring, number, **settings)
        assert done.returncode == -9, done.stderr[-2000:]
        assert snapshots.headers(ring) or checkpoint.newest_valid(output)
        for state in checkpoint.states(output):
            assert checkpoint.problems(state, deep=True) == []
    good(train(work, output.name, ring=ring, number=3, **settings))
    good(train(work, "whole", **settings))
    assert files_of(output) == files_of(work["folder"] / "whole")
