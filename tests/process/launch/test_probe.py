"""The probe: real processes of the tiny model, one of which hangs; and what the rungs say."""

import os
import subprocess
import sys

import pytest
from short_run_helpers import hang_at, nothing_runs, settled, tiny_run

from launch import probe, short_run
from launch.common import LaunchError
from launch.probe import Rung, judge, rungs_of
from launch.short_run import FAILS, HANGS, SLOW, TRAINS
from runs.paths import ROOT

LIMIT_S = 500


def rung(outcome=TRAINS, processes=1, workers=0) -> Rung:
    name = next(r.name for r in (*rungs_of(1), *rungs_of(2)) if (r.processes, r.workers) == (processes, workers))
    return Rung(name, processes, workers, outcome, "It says so.", report={"verdict": {"advice": "Do this."}})


def test_the_rungs_are_one_process_and_all():
    assert [(one.processes, one.workers) for one in rungs_of(4)] == [(1, 0), (4, 0), (4, 1)]
    assert [(one.processes, one.workers) for one in rungs_of(1)] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("rungs", "kind", "text", "advice"),
    [
        ([(), (TRAINS, 2), (TRAINS, 2, 1)], "fine", "2 processes, 1 loader worker: all train.", "The run can start."),
        ([(), (HANGS, 2), ("skipped", 2, 1)], "basic",
         "1 process, 0 loader workers: trains. 2 processes, 0 loader workers: stop. It says so.", "Do this."),
        ([(), (TRAINS, 2), (HANGS, 2, 1)], "basic", "1 loader worker: stop.", "Use 0 data loader workers. Do this."),
        ([(FAILS,), ("skipped", 2)], "basic", "1 process, 0 loader workers: failed. It says so.", "Fix this, then probe again."),
        ([(SLOW,), (TRAINS, 2)], "slow", "1 process, 0 loader workers: It says so.", "--limit 600"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_first_rung_that_does_not_train(rungs, kind, text, advice):
    found = judge([rung(*one) for one in rungs])
    assert found[0] == kind and text in found[1] and advice in found[2], found


@pytest.mark.slow
def test_a_process_that_hangs_is_found_with_its_check_point_and_nothing_is_left(data, one_cpu, monkeypatch):
    hang_at(monkeypatch, "check point network")
    monkeypatch.setattr(short_run, "QUIET_S", 2.0)
    lines: list[str] = []
    answer = probe.probe(None, 1, progress=lines.append)
    first, second = answer["stages"]
    assert not answer["ok"] and "stopped at check point 5 (LoRA network)" in answer["verdict"], answer["verdict"]
    assert "memory" in answer["advice"]
    said = first["report"]["verdict"]
    assert (first["outcome"], said["point"], said["rank"]) == (HANGS, "network", 0)
    assert "step_sleeps (injector.py" in said["text"] and any("step_sleeps (" in line for line in first["lines"])
    assert second["outcome"] == probe.SKIPPED and "Not tried" in second["text"]
    assert lines[0] == "1 of 2: 1 process, 0 loader workers …" and lines[1].startswith(f"{lines[0][:-2]}: hangs, ")
    assert os.environ["HANGPROOF_DATA"] == str(data)
    assert nothing_runs(data) and not (data / short_run.SCRATCH).exists()


def test_a_run_without_images_or_without_its_model_cannot_be_probed(data):
    folder = tiny_run(data, model="flux-dev")
    with pytest.raises(LaunchError, match=r"cannot be started: .*"):
        probe.probe(folder, 1)
    for image in (data / "datasets" / folder.name).glob("*.png"):
        image.unlink()
    with pytest.raises(LaunchError, match="has no images"):
        probe.probe(folder, 1)
    assert not (data / short_run.SCRATCH).exists()


@pytest.mark.slow
def test_wrong_usage_and_unknown_runs_are_refused(data):
    def launch(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "launch", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert launch("probe", "--gpus", "-1").returncode == 1
    assert launch("probe", "--steps", "6").returncode == 2
    unknown = launch("probe", "no-such-run")
    assert unknown.returncode == 1 and "no run 'no-such-run'" in unknown.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGTERM is Linux's and macOS's")
def test_a_probe_that_is_cancelled_leaves_nothing(data, monkeypatch, tmp_path):
    hang_at(monkeypatch, "check point arguments", FAULT_MARK=str(tmp_path / "mark"))
    command = [sys.executable, "-m", "launch", "probe", "--gpus", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    settled((tmp_path / "mark").exists, "the hang")
    process.terminate()
    assert process.wait(LIMIT_S) != 0
    assert nothing_runs(data) and not (data / short_run.SCRATCH).exists()
