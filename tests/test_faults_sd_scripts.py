"""Faults in runs of the real sd-scripts end as on the embedded trainer: completed, with the undisturbed run's steps, LR, names.

Where there is no checkout they are skipped, with the reason. Two are played every time, all of them with `-m long`.
"""

import pytest
import tiny_sd_scripts
from faults_sd_scripts import STEPS, SdScripts

from benchmarks import faults

DONE = {"state": "completed", "code": 0, "restarts": 1, "lora": "any"}


def row(name, fault, step=(23, 28), cause=(), **more):
    """A row like those of benchmarks/faults.toml."""
    expect = {**DONE, "incidents": [[c] for c in cause], **more.pop("expect", {})}
    return {
        "name": f"sd_{name}",
        "fault": name,
        "inject": {"fault": fault, "step": list(step), **more},
        "expect": expect,
    }


ROWS = {
    r["fault"]: r
    for r in (
        row("step asleep", "step_sleeps", cause=["stuck"]),
        row("SIGSTOP trainer", "sigstop", cause=["trainer_stopped"]),
        row("SIGSTOP worker", "worker_stopped", cause=["worker_stuck"]),
        row("SIGKILL", "sigkill", cause=["killed"]),
        row("exit hang", "exit_hangs", cause=["exit"], expect={"restarts": 0, "detect_s": 30}),
        row("kill in mid-save", "kill_in_save", (0, 0), cause=["killed"], phase="save", every=True, arg="10:6"),
        row("corrupt cache", "corrupt_npz", (8, 10), cause=["npz_corrupt"]),
    )
}
QUICK = ("SIGSTOP worker", "kill in mid-save")
SLACK_S = 120.0  # how soon is for the benchmarks to say


def play(name):
    tiny_sd_scripts.need()
    result = faults.run(ROWS[name], kind=SdScripts, slack_s=SLACK_S)
    assert result["ok"], faults.tell(ROWS[name], result)
    assert result["seen"]["step"] == STEPS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", QUICK)
def test_sd_scripts_comes_back_from(name):
    play(name)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [n for n in ROWS if n not in QUICK])
def test_sd_scripts_comes_back_from_each(name):
    play(name)
