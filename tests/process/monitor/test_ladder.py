"""Restarts that change something: the real specs and scripts of `runs`, a toy trainer behind `$TRAINER_PYTHON`."""

import json

import pytest
from ladder_runs import FORK, HANGS
from monitor_helpers import cli, events, finish, kill_monitor, monitor, started, stop, toy_run
from run_facts import incidents, report, status, trainers
from toys import STAND

from monitor import state
from monitor.run_folder import RunFolder
from runs import staging
from runs.pin import pinned
from runs.scripts import rendered

pytestmark = pytest.mark.slow


def test_a_certain_cause_is_changed_at_the_first_restart_and_the_spec_stays_the_users(run):
    folder, code = run(FORK, workers=2)
    assert code == 0
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
    assert state.load_learned({"model": "another"}) == {}


# For as long as nothing is changed.
STUCK_SAVE = f"""{STAND}
if str(args.output_dir) == os.environ["HANGPROOF_RUN"]:
    hb.phase("save")
    stand("serialization.py:save_file")
"""


def test_a_run_that_gets_stuck_in_a_save_again_saves_locally(run):
    folder, code = run(STUCK_SAVE, HANGS)
    assert code == 0, status(folder)
    assert [i["cause"] for i in incidents(folder)] == ["save_slow", "save_slow"]
    assert [e["change"] for e in events(folder, "mitigated")] == ["save_local"], "at the second failure"
    assert status(folder)["restarts"] == 2
    assert (folder / f"{folder.name}.safetensors").is_file(), "and the LoRA is in the run's folder"
    assert (folder / "train.attempt-3.sh").is_file()
    assert not staging.place(folder).parent.exists(), "what was saved locally is in the run's folder, and only there"


def test_a_training_that_nobody_watches_is_listed_and_can_be_stopped(tmp_path):
    folder = toy_run(tmp_path / "outputs" / "toy", steps=2000, pace=0.03, every=1000)
    env = {"HANGPROOF_DATA": str(tmp_path)}
    process = started(folder, 10, **env)
    kill_monitor(process, folder)
    shown = cli(folder, "status", **env)
    assert "unwatched" in shown and str(folder) in shown and "not watched; start it again" in shown
    other = toy_run(tmp_path / "outputs" / "other", steps=20, pace=0.01)
    assert finish(monitor(other, **env))[0] == 0
    log = (other / "monitor.log").read_text()
    assert f"of {folder} (" in log and f"python -m monitor stop {folder}" in log, "listed at another's start too"
    stop(folder, "--wait", "60", **env)
    now = status(folder)
    assert now["state"] == "stopped" and now["checkpoint"]["step"] == now["step"]
    assert trainers(folder) == []
