"""A run that is renamed between two trainings goes on from its checkpoint; no step is repeated."""

import pytest
from monitor_helpers import events, finish, monitor, status, step_of, stop, wait_for
from standby_helpers import Run

from benchmarks import toy_loop
from monitor.process.tree import idle
from runs import manage

pytestmark = pytest.mark.slow


def test_a_renamed_run_is_resumed_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    run = Run(tmp_path, limits="[standby]\ntries_count = 0\n", max_train_steps=20)
    process = run.start()
    wait_for(lambda: step_of(run.folder) >= 4, what="step 4")
    stop(run.folder, **run.env)
    assert finish(process)[0] == 3
    stopped = status(run.folder)
    assert stopped["state"] == "stopped" and 4 <= stopped["step"] < 20
    folder = manage.rename("toy", "after", idle)
    run.finish(monitor(folder, **run.env))
    assert [line["step"] for line in run.ledger() if line["what"] == "step"] == list(range(1, 21))
    assert f"from step {stopped['step']}" in events(folder, "started")[1]["message"]
    assert (folder / "after.safetensors").read_bytes() == toy_loop.expected(20)
    assert "toy" not in (folder / "train.sh").read_text()
