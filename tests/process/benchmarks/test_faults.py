"""The fault matrix covers every required fault and reports each difference from the table; a quick part of it is run here.

All of it is in tests/campaigns/test_faults.py (`pytest -m long tests/campaigns/test_faults.py`), 22 minutes on two free cores.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
from patches_helpers import ahead, asks

from benchmarks import faults, faults_reference, faults_report, injector, injector_files, injector_writer
from benchmarks.faults_actions import ACTIONS
from benchmarks.faults_reference import Reference, sha256
from benchmarks.faults_scenario import FINAL, SHIMS, fault_step
from guards import checkpoint
from guards.heartbeat import PHASES
from monitor.process import platform
from monitor.resume import snapshots
from runs.paths import ROOT

ROWS = faults.table()
REQUIRED = {
    "step sleeps": "step_sleeps",
    "deadlock holding the GIL": "gil_deadlock",
    "busy loop with a live heartbeat thread": "busy_loop",
    "SIGSTOP trainer": "sigstop_trainer",
    "SIGSTOP worker": "sigstop_worker",
    "SIGKILL": "sigkill",
    "SEGV": "segv",
    "ABRT": "abort",
    "exception once": "exception_once",
    "the same exception always": "exception_always",
    "exit hang": "exit_hang",
    "worker asleep": "worker_asleep",
    "worker killed": "worker_killed",
    "child ignoring TERM": "child_ignores_term",
    "setsid grandchild": "setsid_grandchild",
    "orphan": "orphan",
    "D state, vfork": "d_state_vfork",
    "D state, fsfreeze": "d_state_disk",
    "PID reuse": "pid_reuse",
    "zombie": "zombie",
    "wall clock + 1 h": "clock_forward",
    "wall clock - 1 h": "clock_back",
    "suspend": "suspend",
    "undrained stderr": "undrained_stderr",
    "slow cache": "slow_cache",
    "slow save": "slow_save",
    "slow sample": "slow_sample",
    "slow compile": "slow_compile",
    "one step 20x slower": "one_slow_step",
    "kill in mid-save at 20 offsets": "kill_in_save",
    "truncated checkpoint": "truncated_checkpoint",
    "zeroed checkpoint": "zeroed_checkpoint",
    "NaN checkpoint": "nan_checkpoint",
    "corrupt npz": "corrupt_npz",
    "ENOSPC": "disk_full",
    "second monitor": "second_monitor",
    "SIGKILL monitor": "sigkill_monitor",
    "NVML failing": "nvml_failing",
    "py-spy missing": "py_spy_missing",
    "py-spy denied": "py_spy_denied",
    "py-spy hung": "py_spy_hung",
    "SIGTERM machine": "sigterm_machine",
    "no checkpoint yet": "no_checkpoint_yet",
    "all checkpoints bad": "all_checkpoints_bad",
    "exit 0": "exit_zero",
    "user stop in backoff": "stop_in_backoff",
    "two runs, one GPU": "two_runs_one_gpu",
    "script of two stages": "two_stage_script",
    "LoRA copied slowly in the EXIT trap": "slow_copy_at_exit",
    "tqdm restarts in caching": "tqdm_restarts",
    "user stop followed by SIGTERM": "stop_then_sigterm",
    "three SIGTERMs": "three_sigterms",
    "SIGKILL monitor, its keeper alive": "sigkill_below_keeper",
    "SIGKILL monitor in a recovery": "sigkill_in_recovery",
    "torn record": "record_torn",
    "a record's bit": "record_damaged",
    "wrong run's record": "record_of_another_run",
    "no records": "records_gone",
    "records and checkpoints bad": "all_states_bad",
    "/dev/shm of 64 MB": "shm_small",
    "/dev/shm full": "shm_full",
    "/dev/shm fills": "shm_fills",
    "standby killed": "standby_killed",
    "standby hung at the gate": "standby_hung",
    "monitor killed while the standby starts": "standby_and_monitor_killed",
    "memory short": "memory_short",
    "two runs on one machine": "two_runs_one_machine",
    "clock jump with a standby": "clock_jump",
    "a mitigation while the standby waits": "mitigation",
}
# Each kind of recovery once: a hang in C, a file that is damaged, no state that is left, a mitigation with its cold start, the
# monitor killed. The command line's test runs a crash; the monitor's tests have most other kinds, with a loop that needs no torch.
QUICK = ("gil_deadlock", "corrupt_npz", "all_states_bad", "mitigation", "sigkill_below_keeper")
QUICK_OFF = ("truncated_checkpoint",)  # with snapshots in memory and the standby attempt turned off
PLAYED = {name: ROWS[name] for name in QUICK} | {f"{n}-off": faults.without_recovery(ROWS[n]) for n in QUICK_OFF}
SLACK_S = 120.0  # the benchmark measures how fast; here a loaded machine may be slow


def command(*words: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks", "faults", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=500, check=False
    )


def test_every_required_fault_is_in_the_table():
    assert len(REQUIRED) >= 69
    assert set(REQUIRED.values()) <= set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_only_what_exists(name):
    row = ROWS[name]
    known = {
        "name",
        "fault",
        "inject",
        "action",
        "script",
        "shim",
        "slow",
        "spec",
        "limits",
        "env",
        "cold",
        "needs",
        "shm",
        "expect",
        "without",
        "patience_s",
        "tmpfs",
        "frozen",
    }
    assert set(row) <= known
    assert row.get("action", "watch") in ACTIONS
    assert row.get("inject") or row.get("action") or row.get("script"), "nothing is done to the run"
    if "inject" in row:
        assert row["inject"]["fault"] in injector.FAULTS
        assert row["inject"].get("phase", "step") in PHASES
        assert row["inject"]["step"][0] <= row["inject"]["step"][1]
    if "slow" in row:
        assert set(row["slow"]) == {"from", "s"} and row["action"] != "watch", "only an action can end it"
    if "shim" in row:
        assert (SHIMS / row["shim"]).is_dir()
    assert row["expect"]["state"] in FINAL
    assert row["expect"]["lora"] in ("same", "none")
    assert (row["expect"]["state"] == "completed") == (row["expect"]["lora"] == "same"), (
        "what finishes equals the undisturbed"
    )


def test_the_causes_that_rows_expect_are_in_the_monitors_table():
    import tomllib

    causes = {
        c["name"]
        for c in tomllib.loads((ROOT / "monitor" / "diagnose" / "causes.toml").read_text(encoding="utf-8"))["cause"]
    }
    for row in ROWS.values():
        incidents = row["expect"].get("incidents", [])
        for names in incidents if isinstance(incidents, list) else []:
            assert set(names) <= causes, row["name"]


def test_a_seed_decides_at_which_step_a_fault_occurs():
    injected = [row for row in ROWS.values() if row.get("inject", {}).get("step", [0, 0])[1] > 0]
    assert len(injected) > 25
    for row in injected:
        low, high = row["inject"]["step"]
        assert fault_step(row, 7) == fault_step(row, 7)
        assert low <= fault_step(row, 7) <= high
    assert len({tuple(fault_step(row, seed) for row in injected) for seed in range(5)}) == 5


def test_the_list_ends_with_the_names_as_json():
    done = command("--list", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == list(ROWS)
    assert "a busy loop with a live heartbeat thread" in done.stdout
    assert "→ failed (exit code 4); 2 restarts; 3 incidents: exception, exception, exception; no LoRA" in done.stdout


def test_an_unknown_fault_is_a_usage_error_that_lists_those_there_are():
    done = command("--run", "step_sleep")
    assert done.returncode == 2
    assert "no fault 'step_sleep'" in done.stderr and "step_sleeps" in done.stderr


def test_a_row_that_the_machine_cannot_run_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(faults, "is_root", lambda: False)
    assert faults.missing({"needs": ["root"]}) == "only root may mount a file system"
    assert faults.missing({"needs": ["no-such-program"]}) == "no-such-program is not installed"
    assert faults.missing({"needs": []}) == ""
    result = faults.run({"name": "x", "fault": "y", "needs": ["no-such-program"]})
    assert result["ok"] and "no-such-program" in result["skipped"]


def as_required(folder, **changed):
    """A scenario that went as its row requires, except for what is changed."""
    (folder / "fault.safetensors").write_bytes(b"weights")
    incident = {
        "id": "0001",
        "cause": "stuck",
        "kind": "hang",
        "title": "It is stuck",
        "detect_s": 1.5,
        "evidence": {"budget_s": 1.2},
    }
    want = {"state": "completed", "code": 0, "restarts": 1, "incidents": [["stuck"]], "lora": "same", "detect_s": 4}
    (folder / "training.log").write_text(changed.pop("injected", injector.INJECTED))
    facts = {
        "state": "completed",
        "codes": [0],
        "restarts": 1,
        "incidents": [incident],
        "reports": ["# It is stuck\n"],
        "left": {},
        "steps": range(1, 6),
        "sha": sha256(folder / "fault.safetensors"),
        "attempts": {},
        "began": [],
        "recovery": True,
        "want": {},
        **changed,
    }
    return SimpleNamespace(
        row={"name": "x", "expect": want | facts["want"], "inject": {}, "recovery": facts["recovery"]},
        slack_s=0.5,
        folder=folder,
        codes=facts["codes"],
        reference=Reference(folder, facts["sha"], 5),
        status=lambda: {"state": facts["state"], "restarts": facts["restarts"]},
        incidents=lambda: facts["incidents"],
        reports=lambda: facts["reports"],
        events=lambda kind=None: [{"message": text} for text in facts["began"]] if kind == "restarted" else [],
        steps=lambda: [{"step": step, "attempt": 1 + facts["attempts"].get(step, 0)} for step in facts["steps"]],
        writers=folder / "writers",
        environment={snapshots.PLACE: str(folder / "shm")},
        ours=lambda: facts["left"],
    )


START, DISK = "attempt 1 from the start, pid 7", "attempt 2 from step 20 (x-state), pid 8"
SNAPSHOT = "attempt 2 from step 23 (a snapshot in memory), pid 8"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"state": "failed"}, "state: 'failed', expected 'completed'"),
        ({"codes": [4]}, "exit code: 4, expected 0"),
        ({"restarts": 2}, "restarts: 2, expected 1"),
        ({"incidents": []}, "incidents: [], expected"),
        ({"reports": ["nothing"]}, "does not contain 'It is stuck'"),
        ({"reports": []}, "1 incidents, but 0 reports"),
        ({"left": {7: "sleep"}}, "left running: {7: 'sleep'}"),
        ({"steps": [1, 2, 3, 5]}, "steps trained: 4 of 5"),
        ({"injected": ""}, "the fault was never injected"),
        ({"sha": "another"}, "differs from that of the undisturbed run"),
        ({"attempts": {2: 1}}, "two writers"),
        ({"began": [START, DISK], "want": {"memory": False}}, ""),
        ({"began": [START, DISK], "want": {"memory": True}}, "expected all with 'a snapshot in memory'"),
        ({"began": [START, SNAPSHOT], "want": {"memory": False}}, "expected none with 'a snapshot in memory'"),
        ({"began": [START, SNAPSHOT], "recovery": False}, "expected none with 'a snapshot in memory'"),
        ({"began": [START, DISK], "want": {"early": True}}, "expected all with 'which had been started early'"),
    ],
)
def test_a_difference_is_reported_with_what_was_expected_and_seen(tmp_path, changed, problem):
    wrong = faults.compare(as_required(tmp_path, **changed))
    assert bool(wrong) == bool(problem) and (not problem or any(problem in text for text in wrong)), wrong


def test_without_recovery_a_row_turns_both_off_and_keeps_its_own_limits():
    row = faults.without_recovery(ROWS["stop_in_backoff"])
    assert row["limits"] == {"restart": {"backoff_first_s": 60, "snapshots_bytes": 0}, "standby": {"tries_count": 0}}
    assert "limits" in ROWS["stop_in_backoff"] and "snapshots_bytes" not in ROWS["stop_in_backoff"]["limits"]["restart"]
    bad = faults.without_recovery(ROWS["truncated_checkpoint"])
    assert bad["expect"]["set_aside"] == ["truncated"] and "set_aside" not in ROWS["truncated_checkpoint"]["expect"]
    assert "turned off" in faults.missing(faults.without_recovery(ROWS["record_torn"]))


HELD = "from benchmarks import injector_writer as w; w.claim(); print('held', flush=True); input()"


def test_a_second_writer_is_reported_and_one_that_has_died_is_none(tmp_path):
    """What each row of the matrix is checked for; forked workers and the next attempt are no second writer."""
    env = {**os.environ, injector_writer.VARIABLE: str(tmp_path), "HANGPROOF_RUN": "/a", "HANGPROOF_ATTEMPT": "1"}
    code, pipes = [sys.executable, "-c", HELD], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}

    def started_with(**more: str) -> subprocess.Popen:
        popen = subprocess.Popen(code, env={**env, **more}, **pipes)
        assert popen.stdout.readline() == b"held\n"
        return popen

    def end(popen: subprocess.Popen) -> None:
        popen.kill()
        popen.communicate()

    first, other = started_with(), started_with(HANGPROOF_RUN="/b")
    assert injector_writer.doubled(tmp_path) == []
    end(first)
    next_one = started_with(HANGPROOF_ATTEMPT="2")
    assert injector_writer.doubled(tmp_path) == []
    second = started_with(HANGPROOF_ATTEMPT="3")
    (report,) = injector_writer.doubled(tmp_path)
    assert f"process {second.pid} (attempt 3) trains while process {next_one.pid} (attempt 2) trains /a" in report
    for popen in (other, next_one, second):
        end(popen)


def test_slow_steps_last_until_the_action_has_done_its_part(tmp_path, monkeypatch):
    go = tmp_path / "a:b" / "go"
    monkeypatch.setenv("HANGPROOF_PACE_S", "0.05")
    monkeypatch.setenv("HANGPROOF_SLOW", f"8:0.7:{go}")
    assert [injector.pace_s(step) for step in (7, 8, 30)] == [0.05, 0.7, 0.7]
    go.parent.mkdir()
    go.touch()
    assert injector.pace_s(30) == 0.05
    monkeypatch.delenv("HANGPROOF_SLOW")
    assert injector.pace_s(30) == 0.05


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_expects_reads_well(name):
    text = faults_report.expected(ROWS[name])
    assert text.startswith(f"{ROWS[name]['expect']['state']} (exit code ")
    assert ("the LoRA of an undisturbed run, bit for bit" in text) == (ROWS[name]["expect"]["lora"] == "same")
    assert "[" not in text and "None" not in text


def test_the_result_names_what_was_expected_and_observed():
    incident = {"cause": "stuck", "step": 25, "detect_s": 1.44, "recover_s": 3.96, "steps_repeated": 5}
    seen = {"state": "completed", "step": 36, "restarts": 1, "codes": [0], "incidents": [incident], "lora": "a LoRA"}
    result = {"name": "step_sleeps", "ok": True, "skipped": "", "problems": [], "seen": seen, "seconds": 12.3}
    assert faults.describe(ROWS["step_sleeps"], result).splitlines() == [
        "step_sleeps: a step sleeps",
        "  expected: completed (exit code 0); 1 restart; 1 incident: stuck; the LoRA of an undisturbed run, bit for bit",
        "  observed: completed (exit code 0) at step 36; 1 restart; 1 incident: stuck at step 25 (detected after 1.4 s, a new step "
        "after 4.0 s, 5 steps repeated); a LoRA",
        "  as expected, after 12 s",
    ]
    wrong = {**result, "ok": False, "problems": ["restarts: 1, expected 0"], "monitor_log": "the last line"}
    text = faults.describe(ROWS["step_sleeps"], wrong)
    assert "NOT as expected" in text and "restarts: 1, expected 0" in text and "the last line" in text


def test_an_undisturbed_run_that_was_not_used_for_a_month_is_deleted(tmp_path):
    for name, days in (("old", 31), ("used", 29)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete.json").touch()
        then = time.time() - days * 86400
        os.utime(tmp_path / name / "complete.json", (then, then))
    faults_reference._tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_a_report_of_the_writers_and_what_is_left_in_memory_is_wrong(tmp_path):
    scenario = as_required(tmp_path)
    left = tmp_path / "shm" / "hangproof-0" / "x"
    for folder in (scenario.writers, left):
        folder.mkdir(parents=True)
    (scenario.writers / "doubled-7.txt").write_text("process 7 trains while another one trains")
    (left / snapshots.OWNER).write_text(str(tmp_path))
    wrong = faults.compare(scenario)
    assert wrong == ["two writers: process 7 trains while another one trains", f"snapshots are left in memory: {left}"]


def test_another_cause_or_a_late_detection_is_wrong(tmp_path):
    scenario = as_required(tmp_path)
    scenario.incidents()[0].update(cause="killed", detect_s=9.0)
    wrong = faults.compare(scenario)
    assert len(wrong) == 2
    assert "['killed'], expected [['stuck']]" in wrong[0]
    assert "declared after 9.0 s, expected within 4.0" in wrong[1]


@pytest.mark.parametrize(
    ("damage", "deep", "problem"),
    [
        (injector_files.cut, False, "truncated"),
        (injector_files.zero, False, "has changed since"),
        (injector_files.poison, True, "NaN"),
    ],
)
def test_the_injector_damages_a_checkpoint_as_documented(tmp_path, damage, deep, problem):
    header = json.dumps({"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    with checkpoint.writing(tmp_path / "x-step00000010-state", 10, 1) as folder:
        data = len(header).to_bytes(8, "little") + header + b"\x00\x00\x80\x3f" * 64
        (folder / "model.safetensors").write_bytes(data)
    state = tmp_path / "x-step00000010-state"
    assert checkpoint.problems(state, deep=True) == []
    damage(state)
    assert not checkpoint.problems(state) if deep else True, "this damage passes the hashes"
    assert problem in " ".join(checkpoint.problems(state, deep=deep))


@pytest.fixture(scope="module")
def started(request):
    jobs = {name: partial(faults.run, row, slack_s=SLACK_S) for name, row in PLAYED.items()}
    with ahead(request, "result", jobs) as futures:
        yield futures


@pytest.fixture
def result(request, started):
    """The result of the row of that name."""
    return started[request.param].result()


@asks("result", *PLAYED)
def test_a_fault_ends_as_the_table_requires(result):
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["ok"], faults.describe(ROWS[result["name"]], result)


def test_the_command_line_leaves_only_what_is_to_be_kept(tmp_path):
    """The command as a user types it; its temporary files are in a folder of the test's own."""
    (tmp_path / "tmp").mkdir()
    done = command("--run", "exit_zero", "--keep", str(tmp_path / "kept"), "--json", TMPDIR=str(tmp_path / "tmp"))
    result = json.loads(done.stdout.splitlines()[-1])
    # A busy machine may need longer than the row allows; the command then reports that and ends with 1.
    late = [problem for problem in result["problems"] if "declared after" in problem]
    assert done.returncode == (1 if late else 0) and result["problems"] == late, done.stderr
    assert "expected: completed (exit code 0); 1 restart; 1 incident: exited_unexpectedly;" in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    (kept,) = (tmp_path / "kept").iterdir()
    assert result["kept"] == str(kept) and f"kept: {kept}" in done.stderr
    assert (kept / "monitor-1.txt").is_file()
    assert (kept / "data" / "outputs" / "fault" / "incidents" / "0001" / "report.md").is_file()


def test_a_killed_player_leaves_nothing_either(tmp_path):
    faults_reference.reference(0, {})  # made before, so that what is found below belongs to the scenario
    scratch = tmp_path / "tmp"
    scratch.mkdir()

    def ours() -> dict[int, str]:
        needle = f"\0TMPDIR={scratch}/".encode()
        found = [pid for pid, process in platform.scan().items() if not process.dead]
        return {pid: platform.command_of(pid) for pid in found if needle in b"\0" + platform.environ_of(pid)}

    def until(what, met):
        end = time.monotonic() + 300
        while not met():
            assert time.monotonic() < end, f"not within 300 s: {what}; {ours()}, {list(scratch.iterdir())}"
            time.sleep(0.1)

    command = [sys.executable, "-m", "benchmarks", "faults", "--run", "step_sleeps"]
    player = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL)
    try:
        until("a trainer at work", lambda: any("trainer" in line for line in ours().values()))
    finally:
        player.kill()
        player.wait()
    until("the end of all that it started", lambda: not ours() and not list(scratch.iterdir()))
