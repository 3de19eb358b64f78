"""Rehearsals and drills that train for real, on the tiny model, in all the ways in which they end.

python -m pytest tests/campaigns/test_short_runs.py          10 minutes
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import musubi_helpers
import pytest
import tiny_musubi
import tiny_runs
from monitor_helpers import wait_for
from queue_helpers import processes
from runs_helpers import contents
from short_run_helpers import launched, nothing_runs, states, tiny_run

from launch import rehearse
from launch.rehearse import DONE, FAILED, PASSED, SKIPPED
from runs.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_cpu")
HANGS = {  # stage of a rehearsal: the phase and the step
    "load": ("load", "0"),
    "cache": ("cache_latents", "0"),
    "train": ("step", "1"),
    "sample": ("sample", "2"),
    "save": ("save", "2"),
    "resume": ("step", "3"),
}


def hang_at(monkeypatch: pytest.MonkeyPatch, phase: str, step: str = "0", **more: str) -> None:
    """The trainings from now on hang there. `more`: other variables of benchmarks/injector.py."""
    values = {"INJECT": "benchmarks.injector:fire", "FAULT": "step_sleeps", "FAULT_PHASE": phase, "FAULT_STEP": step}
    for name, value in (values | more).items():
        monkeypatch.setenv(f"HANGPROOF_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("stage", HANGS)
def test_a_hang_in_each_stage_is_found(stage, data, monkeypatch):
    """The rehearsal fails there, says so, and leaves nothing."""
    hang_at(monkeypatch, *HANGS[stage], FAULT_EVERY="1" if stage == "resume" else "0")
    monkeypatch.setattr(rehearse, "STALLED_S", 3.0)
    found = asdict(rehearse.rehearse(tiny_run(data)))
    assert (found["state"], states(found)[stage]) == (FAILED, FAILED), found
    order = list(states(found))
    assert {states(found)[later] for later in order[order.index(stage) + 1 :]} <= {SKIPPED}
    assert found["problem"]["stage"] == rehearse.STAGES[stage][0] and "step_sleeps" in found["problem"]["text"], found
    assert nothing_runs(data) and not (data / rehearse.SCRATCH).exists()


def test_too_little_memory_is_a_failure_with_its_reason(data):
    """A limit on the address space stands for a machine whose memory is too small."""
    folder = tiny_run(data)
    python = [sys.executable, "-m", "launch", "rehearse", str(folder)]
    limited = ["bash", "-c", 'ulimit -v 900000; exec "$@"', "-", *python]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, timeout=500)
    found = rehearse.read(folder)
    assert done.returncode == 1 and found is not None and found.state == FAILED
    assert found.problem["title"] and "emory" in json.dumps(found.problem), found.problem


def test_a_cancelled_one_leaves_no_process(data, monkeypatch):
    folder = tiny_run(data)
    hang_at(monkeypatch, "load")
    command = [sys.executable, "-m", "launch", "rehearse", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: processes(data, "trainer"), what="the trainer starts")
    process.terminate()
    process.wait(60)
    assert rehearse.read(folder).state == "cancelled"
    assert nothing_runs(data) and not (data / rehearse.SCRATCH).exists()


def test_the_drill_freezes_recovers_finishes_and_leaves_nothing_but_its_run(data):
    code, found, said = launched("drill", "--json")
    assert code == 0, said[-5000:]
    shown = [said.index(f"\n{word}: ") for word in ("Detected", "Killed", "Restarted", "Trains on")]
    assert found["state"] == "completed" and shown == sorted(shown) and found["recover_s"] > found["detect_s"] > 0
    assert (found["restarts"], found["steps"], found["loads_in_diffusers"]) == (1, found["planned_steps"], True)
    incident = json.loads(Path(found["folder"], "incidents", "0001", "incident.json").read_text())
    assert incident["cause"] == "worker_stuck" and nothing_runs(data)


def test_a_rank_that_stops_is_named(data, monkeypatch):
    """Real gloo processes of accelerate. The whole rehearsal changes nothing but its result."""
    folder = tiny_run(data, gpus=2)
    before = contents(data)
    hang_at(monkeypatch, "check point loader", FAULT="lock_deadlock", FAULT_RANK="1")
    code, found, said = launched("rehearse", folder)
    assert code == 1 and "Rank 1 stopped at check point 9" in found["problem"]["text"], said
    kept = {name: content for name, content in contents(data).items() if not name.startswith("models/")}
    assert kept.pop(f"outputs/{folder.name}/{rehearse.FILE}") and kept.pop(rehearse.LOCK) == b"" and kept == before
    assert nothing_runs(data) and not (data / rehearse.SCRATCH).exists()


def test_sd_scripts_are_rehearsed_with_their_own_script(data):
    folder = tiny_runs.sd_scripts(data, name="of sd-scripts", max_train_steps=100)
    _, found, said = launched("rehearse", folder, **tiny_runs.sd_scripts_environment(data))
    assert found["state"] == PASSED, said[-5000:]
    assert found["measured"]["step_s"] > 0 and found["forecast"]["steps"] == 100


def test_musubi_tuner_is_rehearsed_with_its_three_commands(toy_z, data):
    samples = {"prompts": ["a thing"], "sample_every_n_steps": 10, "sample_steps": 1}
    folder = musubi_helpers.run_of(toy_z, "of musubi", max_train_steps=50, **samples)
    _, found, said = launched("rehearse", folder, **tiny_musubi.environment(toy_z, HANGPROOF_DATA=str(data)))
    assert found["state"] == PASSED, said[-5000:]
    assert found["measured"]["cache_bytes"] > 0 and states(found)["sample"] == DONE
