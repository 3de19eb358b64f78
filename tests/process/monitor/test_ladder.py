"""Restarts that change something: the real specs and scripts of `runs`, a toy trainer behind `$TRAINER_PYTHON`."""

import json
import sys

import pytest
from monitor_helpers import events, supervise, toy
from run_facts import incidents, report, status
from runs_helpers import executable, pictures
from toys import fault_at

import runs
from monitor import state
from monitor.run_folder import RunFolder
from runs.pin import pinned
from runs.scripts import rendered

pytestmark = pytest.mark.slow
FORK = """
if sys.argv[sys.argv.index("--max_data_loader_n_workers") + 1] != "0":
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use spawn")
"""


def test_a_certain_cause_is_changed_at_the_first_restart_and_the_spec_stays_the_users(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text(toy(fault_at(25, FORK, "True"), steps=40, pace=0.02, every=10))
    # What accelerate would start: it fails as the trainer's flags say it must.
    text = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/trainer.py "$@"\n'
    env = {"HANGPROOF_DATA": str(tmp_path), "TRAINER_PYTHON": str(executable(tmp_path / "accelerate", text))}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    # The toy takes sd-scripts' flags too; which backend has which needs its checkout.
    monkeypatch.setattr("runs.flags.check_extra", lambda spec: None)
    made = {"name": "Ladder 1", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 40}
    folder = runs.create(runs.make({**made, "workers": 2}), pictures(tmp_path / "photos", 1))
    limits = "[restart]\nbackoff_first_s = 0.1\n[phases.step]\nfloor_s = 30\n"
    assert supervise(folder, limits, **env)[0] == 0
    now = status(folder)
    assert (now["state"], now["restarts"], now["name"]) == ("completed", 1, "Ladder 1")
    (incident,) = incidents(folder)
    assert incident["cause"] == "cuda_after_fork" and incident["resumed_from"] == 20
    assert len(incident["changed"]) == 1 and "worker processes" in incident["changed"][0]
    assert now["changes"] == incident["changed"] and events(folder, "mitigated")[0]["change"] == "workers_0"
    assert f"Changed: {incident['changed'][0]}" in report(folder)
    assert "workers = 2" in (folder / "run.toml").read_text(), "the original is kept"
    first, second = (folder / "train.sh").read_text(), (folder / "train.attempt-2.sh").read_text()
    assert "--max_data_loader_n_workers 2" in first and "--max_data_loader_n_workers 0" in second
    assert "step00000020-state" in second and "--resume" not in first
    (mitigated,), (again,) = events(folder, "mitigated"), events(folder, "restarted")
    assert mitigated["patch"]["commands"]["0"]["flags"]["max_data_loader_n_workers"] == 0
    assert "spec" not in mitigated["patch"] and again["changes"] == ["workers_0"]
    (change,) = state.RunState.load(RunFolder(folder)).changes
    job = pinned(folder).patched(change["patch"])
    assert (pinned(folder).spec["workers"], job.spec["workers"]) == (2, 0), "the job itself stays"
    assert rendered(job, folder / "Ladder-1-step00000020-state") == second
    learned = json.loads((folder.parent / ".learned.json").read_text())  # for the next run of this kind
    assert "tiny-flux" in (key := state.learned_key(RunFolder(folder).spec)) and list(learned) == [key]
    assert learned[key]["step"]["n"] >= 30 and 0.01 < learned[key]["step"]["median"] < 1
    assert state.load_learned(folder, {"model": "another"}) == {}
