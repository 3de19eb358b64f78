"""The fault matrix reports each difference from its table. Its rows are played by tests/campaigns/test_faults.py."""

import json
from types import SimpleNamespace

import children
import pytest
import tomllib
from runs_helpers import call

from benchmarks import faults, injector
from benchmarks.faults_actions import ACTIONS
from benchmarks.scenario import FINAL, SHIMS, Reference, fault_step, sha256
from guards.heartbeat import PHASES
from monitor.resume import snapshots
from runs.paths import ROOT

ROWS = faults.table()


def test_each_row_names_what_exists():
    text = (ROOT / "monitor" / "diagnose" / "causes.toml").read_text(encoding="utf-8")
    causes = {cause["name"] for cause in tomllib.loads(text)["cause"]}
    for name, row in ROWS.items():
        incidents = row["expect"].get("incidents", [])
        assert not isinstance(incidents, list) or {cause for names in incidents for cause in names} <= causes, name
        assert row.get("action", "watch") in ACTIONS and (
            row.get("inject") or row.get("action") or row.get("script")
        ), name
        if "inject" in row:
            assert row["inject"]["fault"] in injector.FAULTS and row["inject"].get("phase", "step") in PHASES, name
        assert "shim" not in row or (SHIMS / row["shim"]).is_dir(), name
        assert row["expect"]["state"] in FINAL, name
        same = row["expect"]["lora"] == "same"
        assert (row["expect"]["state"] == "completed") == same, f"{name}: what finishes equals the undisturbed"


def test_a_seed_decides_at_which_step_a_fault_occurs():
    injected = [row for row in ROWS.values() if row.get("inject", {}).get("step", [0, 0])[1] > 0]
    assert len(injected) > 25
    for row in injected:
        low, high = row["inject"]["step"]
        assert fault_step(row, 7) == fault_step(row, 7)
        assert low <= fault_step(row, 7) <= high
    assert len({tuple(fault_step(row, seed) for row in injected) for seed in range(5)}) == 5


def test_the_list_has_each_fault_with_what_is_expected_of_it():
    unknown = call("benchmarks", "faults", "--run", "step_sleep")
    assert unknown.returncode == 2 and "no fault 'step_sleep'" in unknown.stderr and "step_sleeps" in unknown.stderr
    listed = json.loads(call("benchmarks", "faults", "--list", "--json").stdout)
    assert set(ROWS) <= set(listed)
    assert listed["step_sleeps"]["fault"] and listed["step_sleeps"]["expect"]["state"] == "completed"


def test_a_row_that_the_machine_cannot_run_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(faults, "is_root", lambda: False)
    assert faults.missing({"needs": ["root"]}) == "only root may mount a file system"
    assert faults.missing({"needs": ["no-such-program"]}) == "no-such-program is not installed"
    assert faults.missing({"needs": []}) == ""
    result = faults.run({"name": "x", "fault": "y", "needs": ["no-such-program"]})
    assert result["ok"] and "no-such-program" in result["skipped"]


START, DISK = "attempt 1 from the start, pid 7", "attempt 2 from step 20 (x-state), pid 8"
SNAPSHOT = "attempt 2 from step 23 (a snapshot in memory), pid 8"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"cause": "killed"}, "['killed'], expected [['stuck']]"),
        ({"detect_s": 9.0}, "declared after 9.0 s, expected within 4.0"),
        ({"doubled": "process 7 trains"}, "two writers: process 7 trains"),
        ({"state": "failed"}, "state: 'failed', expected 'completed'"),
        ({"code": 4}, "exit code: 4, expected 0"),
        ({"report": "nothing"}, "does not contain 'It is stuck'"),
        ({"left": {7: "sleep"}}, "left running: {7: 'sleep'}"),
        ({"steps": [1, 2, 3, 5]}, "steps trained: 4 of 5"),
        ({"injected": ""}, "the fault was never injected"),
        ({"sha": "another"}, "differs from that of the undisturbed run"),
        ({"repeated": 2}, "two writers"),
        ({"began": [START, DISK], "want": {"memory": True}}, "expected all with 'a snapshot in memory'"),
        ({"began": [START, SNAPSHOT], "want": {"memory": False}}, "expected none with 'a snapshot in memory'"),
        ({"began": [START, DISK], "want": {"early": True}}, "expected all with 'which had been started early'"),
    ],
)
def test_a_difference_is_reported_with_what_was_expected_and_seen(tmp_path, changed, problem):
    """A scenario that went as its row requires, except for what is changed."""
    (tmp_path / "fault.safetensors").write_bytes(b"weights")
    (tmp_path / "training.log").write_text(changed.get("injected", injector.INJECTED))
    (tmp_path / "writers").mkdir()
    if "doubled" in changed:
        (tmp_path / "writers" / "doubled-7.txt").write_text(changed["doubled"])
    incident = {"id": "0001", "cause": changed.get("cause", "stuck"), "kind": "hang", "title": "It is stuck"}
    incident |= {"detect_s": changed.get("detect_s", 1.5), "evidence": {"budget_s": 1.2}}
    want = {"state": "completed", "code": 0, "restarts": 1, "incidents": [["stuck"]], "lora": "same", "detect_s": 4}
    began, repeated = changed.get("began", []), changed.get("repeated")
    scenario = SimpleNamespace(
        row={"name": "x", "expect": want | changed.get("want", {}), "inject": {}, "recovery": True},
        slack_s=0.5,
        folder=tmp_path,
        codes=[changed.get("code", 0)],
        reference=Reference(tmp_path, changed.get("sha", sha256(tmp_path / "fault.safetensors")), 5),
        status=lambda: {"state": changed.get("state", "completed"), "restarts": 1},
        incidents=lambda: [incident],
        reports=lambda: [changed.get("report", "# It is stuck\n")],
        events=lambda kind=None: [{"message": text} for text in began] if kind == "restarted" else [],
        steps=lambda: [{"step": n, "attempt": 1 + (n == repeated)} for n in changed.get("steps", range(1, 6))],
        writers=tmp_path / "writers",
        environment={snapshots.PLACE: str(tmp_path / "shm")},
        ours=lambda: changed.get("left", {}),
    )
    wrong = faults.compare(scenario)
    assert bool(wrong) == bool(problem) and (not problem or any(problem in text for text in wrong)), wrong


def test_without_recovery_a_row_turns_both_off_and_keeps_its_own_limits():
    row = faults.without_recovery(ROWS["stop_in_backoff"])
    assert row["limits"] == {"restart": {"backoff_first_s": 60, "snapshots_bytes": 0}, "standby": {"tries_count": 0}}
    assert "limits" in ROWS["stop_in_backoff"] and "snapshots_bytes" not in ROWS["stop_in_backoff"]["limits"]["restart"]
    bad = faults.without_recovery(ROWS["truncated_checkpoint"])
    assert bad["expect"]["set_aside"] == ["truncated"] and "set_aside" not in ROWS["truncated_checkpoint"]["expect"]
    assert "turned off" in faults.missing(faults.without_recovery(ROWS["record_torn"]))


HELD = "import time; from benchmarks import injector; injector.claim(); print('held', flush=True); time.sleep(600)"


def test_a_second_writer_is_reported_and_one_that_has_died_is_none(tmp_path):
    """What each row of the matrix is checked for; forked workers and the next attempt are no second writer."""
    made = []

    def held(attempt: int, run: str = "/a"):
        where = {injector.WRITERS: tmp_path, "HANGPROOF_RUN": run, "HANGPROOF_ATTEMPT": attempt}
        made.append(children.start(HELD, **where))
        assert made[-1].stdout.readline() == "held\n"
        return made[-1]

    try:
        first, _ = held(1), held(1, "/b")
        assert injector.doubled(tmp_path) == []
        first.kill()
        first.wait()
        second = held(2)
        assert injector.doubled(tmp_path) == []
        third = held(3)
        (report,) = injector.doubled(tmp_path)
        assert f"process {third.pid} (attempt 3) trains while process {second.pid} (attempt 2) trains /a" in report
    finally:
        for one in made:
            one.kill()
            one.communicate()
