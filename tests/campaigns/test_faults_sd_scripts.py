"""Faults in runs of the real sd-scripts end as on the built-in trainer: completed, with the undisturbed run's steps, LR, names.

python -m pytest tests/campaigns/test_faults_sd_scripts.py          20 minutes, with a checkout of sd-scripts
"""

import pytest
import tiny_sd_scripts
from faults_sd_scripts import STEPS, SdScripts

from benchmarks import faults

DONE = {"state": "completed", "code": 0, "restarts": 1, "lora": "any"}


def row(name, fault, step=(23, 28), cause=(), **more):
    """A row like those of benchmarks/faults.toml."""
    expect = {**DONE, "incidents": [[c] for c in cause], **more.pop("expect", {})}
    inject = {"fault": fault, "step": list(step), **more}
    return {"name": f"sd_{name}", "fault": name, "inject": inject, "expect": expect}


ROWS = (
    row("step asleep", "step_sleeps", cause=["stuck"]),
    row("SIGSTOP trainer", "sigstop", cause=["trainer_stopped"]),
    row("SIGSTOP worker", "worker_stopped", cause=["worker_stuck"]),
    row("SIGKILL", "sigkill", cause=["killed"]),
    row("exit hang", "exit_hangs", expect={"restarts": 0}),  # the guard ends it before the monitor's limit
    row("kill in mid-save", "kill_in_save", (0, 0), cause=["killed"], phase="save", every=True, arg="10:6"),
    row("corrupt cache", "corrupt_npz", (8, 10), cause=["npz_corrupt"]),
)
SLACK_S = 120.0  # the benchmarks measure how fast


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", ROWS, ids=[row["fault"] for row in ROWS])
def test_sd_scripts_comes_back_from(row):
    tiny_sd_scripts.need()
    result = faults.run(row, kind=SdScripts, slack_s=SLACK_S)
    assert result["ok"], result["problems"]
    assert result["seen"]["step"] == STEPS
