"""Rehearsals, probes and drills that train for real, on the tiny model, in all the ways in which they end.

python -m pytest tests/campaigns/test_short_runs.py          10 minutes
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from short_run_helpers import HANGS, drilled, hang_at, hang_in, launched, listing, nothing_runs, settled, tiny_run

from launch import drill, probe, rehearse, short_run
from launch.rehearse import FAILED
from launch.short_run import SCRATCH, TRAINS
from monitor.process import tree
from runs.paths import ROOT

LIMIT_S = 500


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty data root; no GPU, and one thread: a tiny model is slower with several."""
    root = tmp_path / "data"
    root.mkdir()
    for name, value in {"HANGPROOF_DATA": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    return root


@pytest.mark.parametrize("stage", HANGS)
def test_a_hang_in_each_stage_is_found(stage, data, monkeypatch):
    hang_in(stage, data, monkeypatch)


def test_too_little_memory_is_a_failure_with_its_reason(data):
    """A limit on the address space stands for a machine whose memory is too small."""
    folder = tiny_run(data)
    limited = ["bash", "-c", 'ulimit -v 900000; exec "$@"', "-"]
    done = subprocess.run(
        [*limited, sys.executable, "-m", "launch", "rehearse", str(folder), "--json"], cwd=ROOT, capture_output=True,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    found = rehearse.read(folder)
    assert done.returncode == 1 and found is not None and found.state == FAILED
    assert found.problem["title"] and "emory" in json.dumps(found.problem), found.problem


def test_a_cancelled_one_and_a_killed_one_leave_no_process(data, monkeypatch):
    folder = tiny_run(data)
    hang_at(monkeypatch, "load")
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = [sys.executable, "-m", "launch", "rehearse", str(folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        settled(lambda: trains(data), "the trainer starts")
        process.send_signal(number)
        process.wait(60)
        found = rehearse.read(folder)
        assert found is not None and found.state == ("cancelled" if number == signal.SIGTERM else "lost")
        if number == signal.SIGTERM:
            assert nothing_runs(data) and not (data / short_run.SCRATCH).exists()
    assert trains(data)  # nobody was left to end it
    assert len(short_run.sweep(data / short_run.SCRATCH)) == 1
    assert nothing_runs(data) and not list((data / short_run.SCRATCH).iterdir())


def trains(data: Path) -> bool:
    """Whether a trainer works in the scratch folder."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "trainer" in words and any(str(data / short_run.SCRATCH) in word for word in words):
            return True
    return False


@pytest.mark.parametrize("kind", drill.FAULTS)
def test_the_drill_freezes_and_finishes(kind, data):
    drilled(kind, data)


@pytest.fixture
def probed(data, tmp_path, monkeypatch):
    """Where a probe has its temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_two_processes_stop_where_one_trains(probed, data, monkeypatch):
    """Real gloo processes of accelerate, and the lines of progress that the page shows."""
    hang_at(monkeypatch, "check point loader", FAULT="lock_deadlock", FAULT_RANK="1")
    code, found, said = launched("probe", "--gpus=2")
    assert code == 1 and not found["ok"], said
    text = "1 process, 0 loader workers: trains. 2 processes, 0 loader workers: stop. Rank 1 stopped at check point 9"
    assert text in found["verdict"]
    assert [stage["outcome"] for stage in found["stages"]] == [TRAINS, probe.HANGS, probe.SKIPPED]
    two = found["stages"][1]["report"]
    assert [r["world"] for r in two["ranks"]] == [2, 2] and two["ranks"][0]["backend"] == "gloo"
    assert "1 of 3: 1 process, 0 loader workers: trains" in said
    assert not tree.with_environment("TMPDIR", str(probed)) and not (data / SCRATCH).exists()


def test_a_run_of_a_user_is_probed_and_nothing_of_it_is_changed(probed, data):
    folder = tiny_run(data, gpus=2)
    before = listing(data)
    code, found, said = launched("probe", folder.name)
    assert code == 0, said
    assert found["ok"] and found["run"] == folder.name and [s["steps"] for s in found["stages"]] == [3, 3, 3]
    assert found["stages"][2]["report"]["ranks"][1]["backend"] == "gloo"
    assert {name: stamp for name, stamp in listing(data).items() if not name.startswith("models/")} == before
    assert not tree.with_environment("TMPDIR", str(probed))
