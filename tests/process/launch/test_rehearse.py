"""The rehearsal: the real trainers on tiny models; what fails in each stage, and that nothing of it is left."""

# ruff: noqa: F401, F811 - fixtures
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tiny_musubi
import tiny_sd_scripts
from faults_sd_scripts import environment as sd_scripts_environment
from runs_helpers import data, picture, spec
from short_run_helpers import listing, nothing_runs, one_cpu, settled, tiny_run

import runs
from launch import forecast, rehearse, short_run
from launch.rehearse import DONE, FAILED, PASSED, SKIPPED
from runs.paths import ROOT

LIMIT_S = 500


def command(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "launch", "rehearse", str(folder), "--json", *words], cwd=ROOT, capture_output=True,
        text=True, timeout=LIMIT_S, env={**os.environ, **environment},
    )  # fmt: skip


def states(found: rehearse.Rehearsal) -> dict[str, str]:
    return {stage.key: stage.state for stage in found.stages}


def answer(done: subprocess.CompletedProcess) -> rehearse.Rehearsal:
    values = json.loads(done.stdout.splitlines()[-1])
    return rehearse.Rehearsal(**{**values, "stages": [rehearse.Stage(**one) for one in values["stages"]]})


def test_a_rehearsal_measures_the_run_and_leaves_nothing(data, one_cpu):
    folder = tiny_run(data, epochs=10, repeats=4, price_per_hour=3.6)
    before = listing(data)
    done = command(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = answer(done)
    assert found.state == PASSED and set(states(found).values()) == {DONE}
    measured, predicted = found.measured, found.forecast
    for key in ("load_s", "cache_s", "step_s", "sample_s", "save_s", "state_bytes", "lora_bytes", "host_bytes"):
        assert measured[key] > 0, key
    assert measured["images"] == 2 and predicted["steps"] == 3 * 4 * 10
    assert predicted["ends_s"] == pytest.approx(time.time() + predicted["seconds"], abs=120)
    assert predicted["cost"] == pytest.approx(predicted["seconds"] / 1000, abs=0.02)
    assert "120 steps take about" in done.stdout and "the run ends on" in done.stdout
    left = listing(data)
    left.pop(f"outputs/{folder.name}/rehearsal.json")
    assert {name: left.get(name) for name in before} == before and not any(".scratch" in name for name in left)
    assert {name for name in left.keys() - before.keys() if not name.startswith("models/")} == set()
    assert nothing_runs(data)
    again = rehearse.read(folder)
    assert again is not None and again.state == PASSED and rehearse.objection(folder, runs.load(folder)) == ""


HANGS = {  # stage: what the injector is told
    "load": {"PHASE": "load", "STEP": "0"},
    "cache": {"PHASE": "cache_latents", "STEP": "0"},
    "train": {"PHASE": "step", "STEP": "1"},
    "sample": {"PHASE": "sample", "STEP": "2"},
    "save": {"PHASE": "save", "STEP": "2"},
    "resume": {"PHASE": "step", "STEP": "3", "EVERY": "1"},
}


def hang_in(stage: str, data: Path, monkeypatch) -> rehearse.Rehearsal:
    for name, value in HANGS[stage].items():
        monkeypatch.setenv(f"HANGPROOF_FAULT_{name}", value)
    monkeypatch.setenv("HANGPROOF_INJECT", "benchmarks.injector:fire")
    monkeypatch.setenv("HANGPROOF_FAULT", "step_sleeps")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(short_run, "QUIET_S", 3.0)
    folder = tiny_run(data)
    found = rehearse.rehearse(folder)
    assert (found.state, states(found)[stage]) == (FAILED, FAILED), (states(found), found.problem)
    order = list(states(found))
    assert {states(found)[later] for later in order[order.index(stage) + 1 :]} <= {SKIPPED}
    assert found.problem["stage"] == rehearse.STAGES[stage][0]
    assert "step_sleeps" in found.problem["text"], found.problem
    assert nothing_runs(data) and not (data / short_run.SCRATCH).exists()
    return found


def test_a_hang_is_explained_with_its_stage_and_start_asks_once(data, one_cpu, monkeypatch):
    hang_in("train", data, monkeypatch)
    (folder,) = runs.list_runs()
    made = runs.load(folder)
    text = rehearse.objection(folder, made)
    assert text.startswith("The rehearsal failed at “Train two steps”: ")
    assert rehearse.objection(folder, made.changed(epochs=3, name="other")) == text
    assert rehearse.objection(folder, made.changed(rank=7)) == ""  # other settings were not rehearsed
    started = []
    monkeypatch.setattr("ui.run.control.start", started.append)
    from ui.run import run_page

    asked = run_page.start(folder.name, None)
    assert "Press the button again to start anyway" in asked and "Train two steps" in asked and started == []
    run_page.start(folder.name, None)
    assert started == [folder] and rehearse.ask_once(folder, made) == ""


@pytest.mark.long
@pytest.mark.parametrize("stage", [stage for stage in HANGS if stage != "train"])
def test_a_hang_in_each_stage_is_found(stage, data, one_cpu, monkeypatch):
    hang_in(stage, data, monkeypatch)


def test_a_missing_model_is_said_at_once(data):
    folder = runs.create(spec(name="big", tier="16G"), one_picture(data))
    done = command(folder, HF_HUB_OFFLINE="1", HF_HOME=str(data / "hf"))
    assert done.returncode == 1, done.stdout
    found = rehearse.read(folder)
    assert found is not None and states(found)["check"] == FAILED and states(found)["load"] == SKIPPED
    assert "FLUX.1-dev" in found.problem["text"] or "flux" in found.problem["text"].lower()
    assert "Failed at “Check the settings and files”" in done.stdout


def one_picture(data: Path) -> Path:
    picture(data / "pictures" / "a.png")
    return data / "pictures"


@pytest.mark.long
def test_a_broken_image_is_named(data, one_cpu):
    folder = tiny_run(data)
    broken = min((data / "datasets" / folder.name).glob("*.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    done = command(folder)
    found = answer(done)
    assert done.returncode == 1 and FAILED in (states(found)["load"], states(found)["cache"]), found.problem
    assert "0-photo000.png: the image cannot be read" in found.problem["text"], found.problem


@pytest.mark.long
def test_too_little_memory_is_a_failure_with_its_reason(data, one_cpu):
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


@pytest.mark.long
def test_a_cancelled_one_and_a_killed_one_leave_no_process(data, one_cpu):
    folder = tiny_run(data)
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", "rehearse", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL,
            env={**os.environ, "HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_FAULT": "step_sleeps",
                 "HANGPROOF_FAULT_PHASE": "load", "HANGPROOF_FAULT_STEP": "0", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
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


@pytest.mark.long
@pytest.mark.skipif(bool(tiny_sd_scripts.why_not()), reason=tiny_sd_scripts.why_not() or "-")
def test_sd_scripts_are_rehearsed_with_their_own_script(data):
    from faults_sd_scripts import create

    folder = create(data, {"name": "of sd-scripts", "max_train_steps": 100})
    done = command(folder, **sd_scripts_environment(data))
    found = answer(done)
    assert found.state == PASSED, (found.problem, done.stderr[-2000:])
    assert found.measured["step_s"] > 0 and found.forecast["steps"] == 100


@pytest.mark.long
@pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")
def test_musubi_tuner_is_rehearsed_with_its_three_commands(data):
    from tests.upstream.test_runs_musubi import MODEL

    work = tiny_musubi.workdir()
    (data / "models.toml").write_text(MODEL.format(weights=(work / "dit.safetensors").as_posix()))
    fields = {"model": "toy-z", "backend": "musubi", "tier": "20G", "resolution": 64, "max_train_steps": 50, "rank": 4}
    made = runs.make({
        "name": "of musubi", "trigger": "ohwx", "workers": 0, "sample_steps": 1, "extra": {"optimizer_type": "AdamW"},
        "prompts": ["a thing"], "sample_every_n_steps": 10, **fields,
    })  # fmt: skip
    folder = runs.create(made, work / "images")
    done = command(folder, **tiny_musubi.environment(work, HANGPROOF_DATA=str(data)))
    found = answer(done)
    assert found.state == PASSED, (found.problem, done.stderr[-2000:])
    assert found.measured["cache_bytes"] > 0 and states(found)["sample"] == DONE


# Pure functions -------------------------------------------------------------------------------------------------------------


MEASURED = {
    "load_s": 60.0, "cache_s": 20.0, "image_s": 0.5, "step_s": 2.0, "sample_s": 10.0, "save_s": 3.0, "images": 2,
    "state_bytes": 400_000_000, "lora_bytes": 100_000_000, "cache_bytes": 4_000_000, "host_bytes": 8_000_000_000,
    "gpu_bytes": 15_700_000_000, "gpu_total_bytes": 16_000_000_000, "gpu_before_bytes": 0,
}  # fmt: skip


def test_the_forecast_counts_all_parts(data):
    made = spec(
        max_train_steps=1000, save_every_n_steps=100, sample_every_n_steps=250, prompts=["a", "b"], keep_states=2,
        save_every_n_epochs=0, price_per_hour=2.0, spend_limit=0.5,
    )  # fmt: skip
    found = forecast.of(MEASURED, made, {"": 22}, now_s=1_000_000.0)
    parts = {"loading": 60.0, "encoding": 30.0, "training": 2000.0, "samples": 80.0, "checkpoints": 33.0}
    assert found["parts_s"] == parts and found["seconds"] == sum(parts.values())
    assert found["ends_s"] == 1_000_000 + 2203 and found["cost"] == pytest.approx(2203 / 3600 * 2, abs=0.01)
    assert found["disk_bytes"] == 3 * 400_000_000 + 3 * 100_000_000 + 22 * 2_000_000
    said = " ".join(found["warnings"])
    assert "nearly full: 15.7 GB of 16.0 GB" in said and "more than the spend limit of 0.5" in said
    assert forecast.of({}, made, {"": 22}) == {} and forecast.lines({}) == []


def test_the_digest_follows_what_decides_whether_it_trains():
    made = spec(name="a")
    same = [{"name": "b"}, {"epochs": 99}, {"max_train_steps": 7}, {"price_per_hour": 1.0}, {"seed": 1}, {"repeats": 3}]
    other = [{"rank": 3}, {"resolution": 640}, {"batch_size": 4}, {"workers": 3}, {"sample_every_n_steps": 50}]
    assert {rehearse.digest(made.changed(**one)) for one in same} == {rehearse.digest(made)}
    assert rehearse.digest(made) not in {rehearse.digest(made.changed(**one)) for one in other}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 3}', '{"stages": [{}]}', '{"stages": 5}'])
def test_a_damaged_result_is_a_lost_one(tmp_path, content):
    (tmp_path / "rehearsal.json").write_text(content)
    found = rehearse.read(tmp_path)
    assert found is not None and found.state == "lost"
    assert rehearse.ask_once(tmp_path, spec()) == ""
