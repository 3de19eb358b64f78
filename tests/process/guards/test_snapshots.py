"""Snapshots in memory: each is complete or none, holds what was saved to the bit, and never takes what others need."""

import os
import shutil
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from snapshot_helpers import raw, restored, take, writer

from guards import checkpoint, reading, snapshot_files, snapshots
from guards.snapshots import Snapshots
from monitor.resume.checkpoints import memory_summary

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")


def steps(ring):
    return [guard["step"] for guard in checkpoint.guards(ring).values()]


def test_a_snapshot_keeps_the_values_of_its_step(ring):
    """Training changes the tensors in place right after the snapshot; a large one is completed in a thread."""
    tensor = torch.zeros(1 << 20)
    ours = writer(ring)
    ours.due()
    ours.take("toy-step00000001-state", 1, 1, [snapshot_files.File("a.pt", "torch", {"a": tensor, "n": [1.5]})])
    tensor.fill_(7.0)
    ours.wait()
    values = torch.load(restored(ring) / "a.pt")
    assert torch.equal(values["a"], torch.zeros(1 << 20)) and values["n"] == [1.5]


def test_the_thread_waits_for_an_event_before_it_copies_pinned_memory_into_the_snapshot(ring):
    """The event is a stand-in that fills the memory; a copy from a GPU itself needs one."""
    ours, waited = writer(ring), []
    plan = snapshot_files.plan([snapshot_files.File("a.pt", "torch", {"a": torch.arange(700_000), "b": torch.ones(3)})])
    slot, pinned = ours._slots[0], torch.zeros(plan.layout.end + 100, dtype=torch.uint8)
    ours._begin(slot, plan)

    def synchronize():
        waited.append(True)
        snapshot_files.copy(snapshot_files.views(pinned, plan.layout.places), plan.tensors)

    event = SimpleNamespace(synchronize=synchronize, elapsed_time=lambda other: 7.0)
    guard = {"step": 4, "epoch": 1, **ours.about()}
    ours._finish(snapshots._Job(slot, plan, ring / "toy-step00000004-state", guard, staged=(pinned, event, event)))
    assert list(ours._costs) == [0.007] and waited == [True]
    found = torch.load(restored(ring) / "a.pt")
    assert torch.equal(found["a"], torch.arange(700_000)) and torch.equal(found["b"], torch.ones(3))


def test_the_two_newest_are_kept_and_an_attempt_that_resumes_earlier_forgets_the_later_ones(ring):
    ours = writer(ring)
    for step in (1, 2, 7, 8):
        take(ours, step, raw(b"%d" % step))
    assert steps(ring) == [8, 7]
    found = memory_summary(str(ring))
    assert (found["step"], found["off"]) == (8, "") and found["bytes"] > 0 and found["every"] >= 1
    (earlier := ring / "toy-step00000009-state").mkdir()  # an earlier version made the trainer's files here
    (earlier / checkpoint.GUARD).write_text('{"version": 1, "step": 9, "epoch": 1, "belongs": {}, "files": {}}')
    assert memory_summary(str(ring)) == found
    shutil.rmtree(earlier)
    take(writer(ring, attempt=2), 5, raw(b"again"))
    assert [(guard["step"], guard["attempt"]) for guard in checkpoint.guards(ring).values()] == [(5, 2)]
    assert len(list(ring.iterdir())) == 1
    folder = restored(ring)
    assert folder.is_dir()
    take(writer(ring), 6, raw(b"newer"))
    assert not folder.exists(), "a restored state goes when a newer snapshot is there"


@pytest.mark.parametrize("reason", ["a.pt cannot be kept in memory", "105 MB of memory left"])
def test_what_cannot_be_held_turns_it_off_and_gives_the_memory_back(ring, capfd, monkeypatch, reason):
    ours = writer(ring)
    take(ours, 1, raw(b"one"))
    if "left" in reason:
        monkeypatch.setattr(reading, "available_bytes", lambda: 100 << 20)
        monkeypatch.setattr(snapshots, "MEMORY_POLL_S", 0.0)
        assert not ours.due()
    else:
        take(ours, 2, [snapshot_files.File("a.pt", "torch", {"a": lambda: 0})])
    assert reason in ours.off and not ours.active and not ours.due()
    assert list(ring.iterdir()) == [ring / snapshots.OFF]
    assert memory_summary(str(ring))["off"] == ours.off and ours.off in capfd.readouterr().out


@pytest.mark.parametrize("short_of", ["memory", "/dev/shm", None])
def test_a_state_that_does_not_fit_into_memory_turns_it_off(ring, monkeypatch, short_of):
    """Half of 64 MiB may be used, for three copies of 12 MiB. It may be unknown; a container has a small /dev/shm."""
    monkeypatch.setattr(reading, "available_bytes", lambda: 64 << 20 if short_of == "memory" else None)
    if short_of == "/dev/shm":
        monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=64 << 8, f_frsize=4096))
    monkeypatch.setattr(snapshots, "LOW", 0)
    ours = writer(ring)
    take(ours, 1, [snapshot_files.File("a.pt", "torch", torch.zeros(3 << 20))])
    assert ours.active == (short_of is None)
    assert ours.active or ("67 MB free" in ours.off and list(ring.iterdir()) == [ring / snapshots.OFF])
    assert ("the machine or its container has" in ours.off) == (short_of == "memory")


def test_the_frequency_follows_from_the_cost(ring, monkeypatch):
    """A snapshot may cost 0.9 % of the time: one of 5 ms comes every 56 steps of 10 ms, or at each step of 1 s."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s, thread_time=lambda: now_s, time=time.time)
    monkeypatch.setattr(snapshots, "time", clock)
    for step_s, wanted in ((0.01, 56), (1.0, 1)):
        ours, seen = writer(ring), []
        for step in range(1, 12):
            now_s += step_s
            ours._since = 1000
            assert ours.due()
            now_s += 0.005
            ours.take(f"toy-step{step:08d}-state", step, 1, raw(b"x"))
            seen.append(ours.every)
        assert ours.every in (wanted, wanted + 1) and all(b <= 2 * a for a, b in pairwise(seen))
        now_s += step_s
        assert ours.due() == (wanted == 1)


def test_several_processes_have_no_snapshots(ring):
    for rank in ("0", "1"):
        assert not Snapshots.from_env({snapshot_files.RING: str(ring), "RANK": rank, "WORLD_SIZE": "2"}).active
        assert "several processes" in memory_summary(str(ring))["off"]
    for env in ({}, {snapshot_files.RING: str(ring / "gone")}):
        assert not Snapshots.from_env(env).active


def test_while_a_snapshot_is_written_the_other_one_counts_and_it_does_not(ring, monkeypatch):
    """So one of the two is complete, whenever the process is killed."""
    ours, seen, complete = writer(ring), [], snapshot_files.complete

    def completes(*given):
        seen.append(steps(ring))
        complete(*given)
        seen.append(steps(ring))

    monkeypatch.setattr(snapshot_files, "complete", completes)
    for step in (1, 2, 3):
        take(ours, step, [snapshot_files.File("a.pt", "torch", torch.full((9,), step))])
    assert seen == [[], [], [1], [1], [2], [2]] and steps(ring) == [3, 2]
