"""Which checkpoint or snapshot a restart resumes from, and what is never lost."""

import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from machines import StandbyRun
from monitor_evidence import saved_state
from monitor_helpers import wait_for
from run_facts import status

from benchmarks import toy_loop
from guards import checkpoint, snapshot_files
from guards.checkpoint import VerifyResult
from guards.snapshots import Snapshots
from monitor.process import platform
from monitor.resume import checkpoints
from monitor.state import History, ResumePoint


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
    program = "import os; os._exit(9)"
    for broken, reason in ((program, "exit status 9"), ("1 / 0", "torch does not load: division by zero")):
        (tmp_path / "broken" / "torch.py").write_text(broken)
        said = list[str]()
        point = checkpoints.choose([tmp_path], 60, log=said.append)
        assert point.path == path and not point.bad
        assert len(said) == 1 and "only its hashes are checked" in said[0] and reason in said[0]


@pytest.fixture
def toy(tmp_path):
    """A run whose only checkpoints on the disk are those that something other than its schedule makes."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    (tmp_path / "hurry").touch()
    one_failure = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.5\n"
    return StandbyRun(tmp_path, steps=60, every=10_000, limits=one_failure)


def steps(toy: StandbyRun) -> list[int]:
    return toy.toy.trained(toy.data)


@pytest.mark.slow
def test_a_stop_at_once_has_the_newest_steps_on_the_disk(toy):
    process = toy.start()
    wait_for(lambda: len(steps(toy)) >= 20)
    (toy.folder / "stop.request").write_text('{"now": true}', encoding="utf-8")
    toy.finish(process, code=3)
    state, step = next(iter(checkpoint.states(toy.folder).items()))
    weights = functools.reduce(toy_loop.advance, range(1, step + 1), b"")
    assert step >= len(steps(toy)) - 10 and (state / "weights.bin").read_bytes() == weights
    assert status(toy.folder)["state"] == "stopped" and state.name in status(toy.folder)["reason"]


@pytest.mark.slow
def test_steps_that_the_disk_refuses_stay_in_memory_and_the_next_start_goes_on_from_them(toy, tmp_path):
    """The interpreter that writes them fails: as on a full disk, nothing is written and nothing is freed."""
    (tmp_path / "broken").mkdir()
    shim = "import sys\nif 'guards.snapshot_files' in sys.orig_argv:\n    sys.exit('No space left on device')\n"
    (tmp_path / "broken" / "sitecustomize.py").write_text(shim, encoding="utf-8")
    toy.finish(toy.start(TOY_FAULTS="raises@40", PYTHONPATH=str(tmp_path / "broken")), code=4)
    now = status(toy.folder)
    assert now["state"] == "failed" and "stay in memory" in now["reason"] and not checkpoint.states(toy.folder)
    toy.finish(toy.start())
    assert steps(toy).count(30) == 1  # no step before the fault is trained twice
    toy.check_complete(restarts=0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder; the folders of snapshots are in a place of the test's own."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    place = Path(tempfile.mkdtemp(prefix="hangproof-test-", dir="/dev/shm"))
    monkeypatch.setenv(checkpoints.PLACE, str(place))
    folder = tmp_path / "outputs" / "my run \udce9"  # a name that is not UTF-8
    folder.mkdir(parents=True)
    (folder / "job.json").write_text('{"digest": "spec"}')
    yield folder
    shutil.rmtree(place)


def ring_of(run, *steps, spec="spec", of=None):
    ring, why = checkpoints.memory_folder(run, "")
    assert not why
    writer = Snapshots(Path(ring), str(of or run), spec)
    for step in steps:
        writer.due()
        writer.take(f"a-step{step:08d}-state", step, 1, [snapshot_files.File("weights.bin", "raw", b"%d" % step)])
    return ring


def run_of(folder, ring, failures=1, damages=False, limit=1 << 30, log=str):
    """A run with these snapshots after a failure at step 7."""
    run = Mock(several=False, keeps_snapshots=limit > 0, pause=time.sleep)
    run.folder.folder, run.folder.log = folder, log
    run.state.history, run.state.snapshots = History(failures={"x": failures}), ring
    run.incident.cause.damages_memory, run.incident.evidence.step = damages, 7
    run.config.restart.snapshots_bytes, run.config.check.verify_s = limit, 60.0
    return run


def chosen(run, ring, **more):
    return checkpoints.resume_point(run_of(run, ring, **more), [run])


def newest(ring, run):
    refused = list[str]()
    records = checkpoints.usable_snapshots(run_of(run, ring, log=refused.append))
    point = checkpoints.choose([], 60.0, time.sleep, records, refused.append)
    return point if point.record else None, refused


def test_the_newest_snapshot_is_taken_and_becomes_the_state_to_resume_from(run):
    ring = ring_of(run, 4, 5)
    record, refused = newest(ring, run)
    assert (record.step, refused) == (5, [])
    variables = checkpoints.memory_variables(run_of(run, ring, limit=1000))
    snapshot_files.restore(record.path, variables)
    assert (record.path / "weights.bin").read_bytes() == b"5" and checkpoint.problems(record.path) == []
    assert Snapshots.from_env(variables).limit_bytes == 1000
    (next(iter(checkpoint.guards(Path(ring)))) / snapshot_files.FILES).write_bytes(b"?")
    record, refused = newest(ring, run)
    assert record.step == 4 and "truncated" in refused[0], "the other one, where the newest is damaged"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"of": "/other"}, "it belongs to /other"),
        ({"spec": "older"}, "the run was made again since"),
        ({}, "before the machine was started"),
    ],
)
def test_a_snapshot_of_another_run_of_other_settings_or_of_another_boot_is_refused(run, monkeypatch, other, reason):
    ring = ring_of(run, 3, **other)
    if not other:
        monkeypatch.setattr(checkpoints, "boot_id", lambda: "another")
    record, (refused,) = newest(ring, run)
    assert record is None and refused.startswith("the snapshot of step 3 is not used: ") and reason in refused


def test_a_snapshot_whose_state_has_no_room_beside_it_is_refused(run, monkeypatch):
    ring = ring_of(run, 6)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    record, (refused,) = newest(ring, run)
    assert record is None and "is full" in refused
    monkeypatch.undo()
    assert newest(ring, run)[0].step == 6
    monkeypatch.setattr("guards.checkpoint.writing", Mock(side_effect=OSError(28, "No space left on device")))
    path = next(iter(checkpoint.guards(Path(ring))))
    with pytest.raises(snapshot_files.SnapshotError, match="the next attempt resumes elsewhere") as raised:
        snapshot_files.restore(Path(ring) / snapshot_files.RESUMED / path.name, {snapshot_files.RING: ring})
    assert not path.exists() and "No space" not in str(raised.value)


def test_only_a_snapshot_that_is_large_or_was_not_read_waits_for_a_subprocess(run, monkeypatch):
    ring, asked = ring_of(run, 6), list[Path]()
    monkeypatch.setattr(checkpoints, "verify", lambda state, *_: asked.append(state) or VerifyResult())
    assert newest(ring, run)[0].step == 6 and asked == []
    with monkeypatch.context() as failing:
        failing.setattr(checkpoint, "verify", lambda *_, **__: VerifyResult(error="no descriptor left"))
        assert newest(ring, run)[0].step == 6 and len(asked) == 1
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 1)
    assert newest(ring, run)[0].step == 6 and len(asked) == 2


def test_bad_states_are_set_aside_and_what_cannot_be_verified_stays(tmp_path, monkeypatch):
    good, unsure, bad = (saved_state(tmp_path, step) for step in (0, 20, 30))
    torn, unreadable = tmp_path / "toy-step00000040-state", tmp_path / "toy-step00000050-state"
    torn.mkdir()
    (unreadable / checkpoint.GUARD).mkdir(parents=True)
    results = {good: VerifyResult(), unsure: VerifyResult(error="no answer"), bad: VerifyResult(("empty",))}
    monkeypatch.setattr(checkpoints, "verify", lambda state, *_: results.get(state, VerifyResult()))
    in_memory = checkpoints.choose([tmp_path], 60.0, snapshots=[ResumePoint(tmp_path / "x", 60, record=tmp_path / "x")])
    assert in_memory.step == 60 and not in_memory.bad and torn.is_dir(), "it says nothing about the disk"
    point = checkpoints.choose([tmp_path], 60.0)
    assert (point.path, point.step, point.record) == (good, 0, None)
    reasons = [(path.name, reason) for path, reason in point.bad]
    assert reasons == [(f"{bad.name}.bad", "empty"), (f"{torn.name}.bad", checkpoints.UNGUARDED)] and not torn.exists()
    assert [path for path, _ in point.unsure] == [unsure, unreadable] and unsure.is_dir() and unreadable.is_dir()


def test_memory_or_disk_the_newer_one_counts(run):
    ring = ring_of(run, 6, 7)
    saved_state(run, 5)
    point = chosen(run, ring)
    assert (point.step, point.path.parent.parent, point.record.parent) == (7, Path(ring), Path(ring))
    assert chosen(run, ring, damages=True).step == 6
    for known in (dict(failures=2), dict(damages=True, failures=2), dict(limit=0)):
        disk = chosen(run, ring, **known)
        assert (disk.step, disk.path.parent, disk.record) == (5, run, None)
    saved_state(run, 8)
    assert (chosen(run, ring).step, chosen(run, ring).record) == (8, None)


def test_a_run_that_ends_or_is_gone_leaves_nothing_in_memory(run):
    ring = Path(ring_of(run, 1))
    assert checkpoints.memory_folder(run, str(ring)) == (str(ring), "")
    other = run.with_name("gone")
    checkpoints.sweep_memory()  # no monitor watches this run, and its monitor.json names no folder
    assert not ring.exists()
    ring = Path(ring_of(run, 1))
    (run / "monitor.json").write_text(f'{{"snapshots": "{ring}"}}')
    lost = Path(ring_of(other, 1))
    checkpoints.sweep_memory()
    assert ring.exists() and not lost.exists()


def test_the_snapshots_of_another_container_that_shares_the_memory_stay(run):
    """Its run's folder does not exist here. Only long silence of its monitor says that it is gone."""
    ring = Path(ring_of(run.with_name("elsewhere"), 1))
    (ring / checkpoints.OWNER).write_text("/data/outputs/elsewhere\nmnt:[1]")
    checkpoints.touch_memory(str(ring))
    checkpoints.sweep_memory()
    assert checkpoint.guards(ring)
    os.utime(ring / checkpoints.OWNER, (time.monotonic() - 2 * checkpoints.SILENT_S,) * 2)
    checkpoints.sweep_memory()
    assert not ring.exists()


@pytest.mark.parametrize("linux", [True, False])
def test_without_a_file_system_in_memory_the_reason_is_in_the_status(run, tmp_path, monkeypatch, linux):
    """Off Linux there is none, whatever folder the variable names."""
    monkeypatch.setattr(platform, "LINUX", linux)
    monkeypatch.setenv(checkpoints.PLACE, place := str(tmp_path / "nowhere" if linux else tmp_path))
    folder, why = checkpoints.memory_folder(run, "")
    assert folder == "" and f"no file system in memory ({place})" in why and os.listdir(tmp_path) == ["outputs"]
    assert checkpoints.memory_summary("", why)["off"] == why and checkpoints.memory_summary("", "") is None


def test_the_newest_snapshot_is_written_to_the_disk_before_its_memory_is_freed(make_loop, monkeypatch, tmp_path):
    run, asked = make_loop(), []
    pause = lambda seconds: None  # noqa: E731
    assert checkpoints.keep_newest(run, pause) == "" and run.unkept is None
    run.state.snapshots = str(tmp_path)
    saved_state(run.folder.folder, 10)
    monkeypatch.setattr(
        checkpoints, "usable_snapshots", lambda run, after_step, room: asked.append((after_step, room)) or []
    )
    point = ResumePoint(None)
    monkeypatch.setattr(checkpoints, "choose", lambda *_: point)
    assert checkpoints.keep_newest(run, pause) == "" and asked == [(10, False)]
    for code, said in ((0, ""), (1, "the newest steps, to step 25, could not be written to the disk")):
        run.unkept, point = None, ResumePoint(None, 25, record=tmp_path / "record", python=str(tmp_path / "python"))
        (tmp_path / "python").write_text(f"#!/bin/sh\n[ {code} = 1 ] || echo '{{}}'\nexit {code}\n")
        (tmp_path / "python").chmod(0o755)
        assert checkpoints.keep_newest(run, pause).startswith(said)
        assert checkpoints.keep_newest(run, pause) == run.unkept
        assert bool(run.unkept) is bool(code)
    assert "the snapshot of step 25 was written to the disk" in (run.folder.folder / "monitor.log").read_text()
