"""A rehearsal starts a job of its own."""

import math
from unittest.mock import Mock

from launch_helpers import a_run

import runs
from launch import rehearse
from runs import job


def test_a_rehearsal_writes_a_job_of_its_own_steps(data, clean, monkeypatch):
    folder, run = a_run(data), data / "outputs" / rehearse.NAME
    stages = [rehearse.Stage(key, title) for key, (title, _) in rehearse.STAGES.items()]
    tried = Mock(busy="")
    tried.loop.at.state = rehearse.State.COMPLETED
    monkeypatch.setattr(rehearse, "Trial", lambda run, until_s, on_phase: tried)
    run.mkdir()
    work = rehearse.Work(folder, rehearse.Rehearsal(stages=stages), math.inf, run)
    assert work._try(runs.load(folder).changed(name=rehearse.NAME, max_train_steps=2)) is tried
    made = job.load(run)
    assert made is not None and made.run_spec().max_train_steps == 2
    assert str(run) in (run / runs.script_name()).read_text()
