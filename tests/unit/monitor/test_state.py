"""What is kept between two monitors, and what a status says about its age."""

import errno
import json
import shutil
import tempfile
import time
from copy import deepcopy
from unittest import mock

import pytest

from monitor import config, state as states
from monitor.cli.commands import line
from monitor.diagnose import slow
from monitor.process import platform
from monitor.run_folder import MonitorError, RunFolder
from monitor.state import AttemptRecord, ExitStatus, History, RunState, Shutdown, State
from runs.files import checksum

RESTART = config.load().restart
CHANGE = {"name": "workers_0", "sentence": "no workers"}


def test_a_copy_of_a_run_goes_on_by_itself_and_leaves_the_training_of_the_other_one_alone(tmp_path):
    folder, copy = tmp_path / "cat", tmp_path / "dog"
    record = AttemptRecord("boot", 3, "token", "/tmp/x", 10, 1.5, (7, 8.0), {"/proc/vmstat": 2})
    folder.mkdir()
    more = {"shutdown": Shutdown("stopped"), "snapshots": "/dev/shm/x", "best_step": 9, "failing": True}
    saved = RunState(State.RUNNING, 3, current=record, **more)
    assert saved.save(RunFolder(folder)) and RunState.load(RunFolder(folder)) == saved
    shutil.copytree(folder, copy)
    found = RunState.load(RunFolder(copy))
    assert (found.current, found.shutdown, found.snapshots, found.best_step) == (None, None, "", 9)
    (tmp_path / "link").symlink_to(folder)
    assert RunState.load(RunFolder(tmp_path / "link")).current == record
    shutil.rmtree(folder)
    assert RunState.load(RunFolder(copy)).current == record, "it was moved, and its training with it"


@pytest.mark.parametrize("left", [b"", bytes(4096)])
def test_a_run_whose_status_a_power_cut_left_empty_is_still_interrupted(tmp_path, left):
    RunState(State.RUNNING, 2, best_step=30, planned=100).save(RunFolder(tmp_path))
    assert states.read_status(tmp_path) is None, "it was never started here"
    (tmp_path / "status.json").write_bytes(left)
    found = states.read_status(tmp_path)
    assert states.is_abandoned(found) and (found["step"], found["planned_steps"]) == (30, 100)
    assert "running (not watched; start it again), step 30 of 100" in line(tmp_path, found)


def test_old_figures_are_called_old(tmp_path, monkeypatch):
    now_s = time.monotonic()
    known = {"state": "running", "alive": True, "boot": platform.boot_id()[:8], "updated_at": platform.utc(time.time())}
    fresh = states.with_age({**known, "updated_mono_s": now_s})
    assert fresh["stale"] == "" and fresh["age_s"] < 25
    old = states.with_age({**known, "updated_mono_s": now_s - 95})
    assert old["stale"].endswith("s old: the monitor does not respond") and 94 <= old["age_s"] < 130
    assert states.with_age({**known, "alive": False, "updated_mono_s": now_s - 95})["stale"] == ""
    rebooted = {**known, "boot": "another", "updated_at": "2026-01-01T00:00:00Z", "updated_mono_s": now_s}
    assert states.with_age(rebooted)["stale"]
    here = {**known, "updated_mono_s": now_s - 95, "folder": str(tmp_path)}
    assert states.with_age(here)["stale"].endswith("the monitor does not respond")
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))  # of blocks, or of inodes
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert f"s old: cannot write to {tmp_path}: the disk is full; free some space" in states.with_age(here)["stale"]


@pytest.mark.parametrize(
    ("code", "outcome", "trained", "done", "own_done", "killed_done", "text"),
    [  # of a rendered script, of the user's own, and after the monitor killed it
        (0, "", False, True, True, False, "exit code 0"),
        (0, "done", False, True, True, False, "exit code 0, final record: done (n)"),
        (1, "done", False, False, False, False, "exit code 1, final record: done (n)"),
        (1, "done", True, True, False, True, "exit code 1, final record: done (n)"),
        (None, "done", True, True, True, True, "gone without an exit code, final record: done (n)"),
        (0, "failed", True, False, False, False, "exit code 0, final record: failed (n)"),
        (0, "running", True, False, False, False, "exit code 0"),
        (None, "", False, False, False, False, "gone without an exit code"),
    ],
)
def test_whether_an_attempt_has_completed_the_training(code, outcome, trained, done, own_done, killed_done, text):
    status = ExitStatus(code, None, outcome, "n", trained)
    asked = [(False, False), (True, False), (False, True)]
    assert [status.done(foreign, killed) for foreign, killed in asked] == [done, own_done, killed_done]
    assert str(status) == text
    assert str(ExitStatus(137, 9, outcome, "n", trained)) == "killed by SIGKILL"


def test_a_state_that_cannot_be_read_is_no_new_run_and_one_of_another_version_is(tmp_path):
    (tmp_path / "monitor.json").write_text('{"version": 1, "attempt": 7}')
    assert RunState.load(RunFolder(tmp_path)) == RunState() and not RunState.load(RunFolder(tmp_path)).problem
    wrong = ('"state": "thawing"', '"history": []', '"current": {"pid": 7}', '"shutdown": {"how": "gently"}',
             '"planned": {}', '"save_dir": 1e999', '"attempt": true', '"durations": {"step": 5}', '"changes": [{"name": "x"}]',
             '"changes_at_save": "x"', '"failing": 1', f'"best_step": {10**30}')  # fmt: skip
    for text in ("[1]", "{", "[" * 9999, "", *(f'{{"version": 2, {one}}}' for one in wrong)):
        (tmp_path / "monitor.json").write_text(text)
        found = RunState.load(RunFolder(tmp_path))
        assert found == RunState() and found.problem.startswith("monitor.json is damaged"), text
    (tmp_path / "monitor.json").unlink()
    (tmp_path / "monitor.json").mkdir()
    state = RunState(attempt=7)
    with pytest.raises(MonitorError, match="cannot be read"):
        RunState.load(RunFolder(tmp_path))
    assert not state.save(RunFolder(tmp_path))
    (tmp_path / "monitor.json").rmdir()
    state.attempt = 8
    assert state.save_again(RunFolder(tmp_path)) and RunState.load(RunFolder(tmp_path)).attempt == 7, "as it was then"


def test_what_earlier_runs_or_a_rehearsal_took_is_not_used_where_it_is_damaged(tmp_path):
    key = states.learned_key({})
    for known, found in (({"step": {"n": 3}}, {"step": {"n": 3.0}}), (None, {}), ({"step": {"n": "x"}}, {})):
        (tmp_path / ".learned.json").write_text(json.dumps({key: known}))
        assert states.load_learned(tmp_path / "run", {}) == found
    for text, step_s in (('{"step_s": 2}', 2.0), ('{"step_s": NaN}', 0.0), ("5", 0.0), ("{}", 0.0)):
        (tmp_path / "run.toml").touch()
        (tmp_path / "rehearsal.json").write_text(f'{{"measured": {text}}}')
        assert slow._rehearsed_s(tmp_path) == step_s


def test_a_completed_run_has_work_to_do_once_it_was_made_again(tmp_path):
    assert states.spec_hash(tmp_path) == "" and not states.spec_edited(tmp_path)
    (tmp_path / "run.toml").write_text("x = 1\n")
    known = checksum(b"x = 1\n")
    assert states.spec_hash(tmp_path) == known and not states.spec_edited(tmp_path)
    state = RunState(State.COMPLETED, best_step=40, spec_hash=known, cause_counts={"oom": 1}, changes=[CHANGE])
    state.save(RunFolder(tmp_path))
    assert states.nothing_left(tmp_path) == ""
    (tmp_path / f"{tmp_path.name}.safetensors").touch()
    assert states.nothing_left(tmp_path).startswith("already completed (40 steps). To train longer")
    (tmp_path / "job.json").write_text(json.dumps({"digest": "new", "run_toml": known}))
    assert states.nothing_left(tmp_path) == ""
    assert states.spec_hash(tmp_path) == "new" and not states.spec_edited(tmp_path)
    (tmp_path / "run.toml").write_text("x = 2\n")
    assert states.spec_edited(tmp_path)
    state.renew(known)
    assert state.changes and state.cause_counts
    state.planned = 900
    state.renew("new")
    assert (state.changes, state.cause_counts, state.planned, state.spec_hash) == ([], {}, 0, "new")


@pytest.mark.parametrize(("state", "abandoned"), [("running", True), ("preempted", True), ("stopped", False)])
def test_a_run_without_its_monitor_is_to_be_continued(state, abandoned):
    assert states.is_abandoned({"state": state, "alive": False}) is abandoned
    assert not states.is_abandoned({"state": state, "alive": True}) and not states.is_abandoned(None)


@pytest.mark.parametrize(
    ("failures", "waits_s", "stop"),
    [  # each failure: (mark, new steps, changes)
        ([("step/9/stuck", n == 0, False) for n in range(3)], [0, 10], "3 times without a new step"),
        ([(f"step/{n}/stuck", True, False) for n in range(11)], [0] * 10, "all 10 restarts are used up"),
        ([(f"load/0/cause-{n}", False, False) for n in range(5)], [0, 10, 20, 40], "5 failures in a row"),
        ([("load/0/oom", False, True)] * 11, [0, 10, 20, 40, 80, 160, *[300] * 4], "all 10 restarts are used up"),
    ],
)
def test_failures_are_answered_at_once_then_after_longer_and_the_last_ends_the_run(failures, waits_s, stop):
    history = History()
    for failure, wait_s in zip(failures, [*waits_s, None], strict=True):
        mark, new_steps, changes = failure
        history = history.after_progress(1.0, RESTART)[0] if new_steps else history
        before, copied = history, deepcopy(history)
        history, reason, waited_s = history.after_failure(mark, changes, RESTART)
        assert (reason, waited_s) == ("", wait_s) if wait_s is not None else stop in reason
        assert before == copied, "an error in the middle of recover() must not count a failure twice"
    assert History().after_failure("x", False, RESTART, least_wait_s=30)[2] == 30, "the cause needs time"


def test_the_state_of_another_machine_is_continued_without_what_depends_on_that_machine(make_loop):
    there = make_loop()
    folder = there.folder.folder
    before = RunState(
        State.FAILED, attempt=3, restarts=2, best_step=40, changes=[CHANGE], changes_at_save=["batch_1"], failing=True,
        spec_hash=states.spec_hash(folder), durations={"step": {"n": 3}}, cause_counts={"oom": 1},
    )  # fmt: skip
    before.ledger.steps, before.ledger.price_per_hour = 40, 9.0

    def adopted(**changed):
        for name, value in changed.items():
            setattr(before, name, value)
        (folder / "monitor.json").unlink(missing_ok=True)
        here = make_loop()
        before.save(here.folder)
        return here.state.adopt_restored(here.folder), here.state

    reason, state = adopted()
    assert reason == "" and (state.attempt, state.restarts, state.best_step) == (3, 2, 40)
    assert state.changes == [CHANGE] and state.cause_counts == {"oom": 1}
    assert state.ledger.steps == 40 and state.ledger.price_per_hour == 0.0, "the price is that of this machine"
    assert not state.durations and not state.failing
    (folder / "toy.safetensors").write_bytes(b"x")
    assert adopted()[0] == ""
    assert adopted(state=State.COMPLETED)[0] == "already completed on another machine (40 steps); LoRA: toy.safetensors"
    assert RunState.load(there.folder).best_step == 40, "saved"
    assert adopted(spec_hash="another")[0] == ""
    for wrong in ({"best_step": "x"}, {"best_step": 40, "changes_at_save": ["$(rm)"]}):
        reason, state = adopted(**wrong)
        assert reason == "" and state.best_step == 0
    assert "monitor.json is damaged, and what it had is not used" in (folder / "monitor.log").read_text()
