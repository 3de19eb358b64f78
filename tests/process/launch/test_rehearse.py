"""The rehearsal: the real trainers on tiny models; what fails in each stage, and that nothing of it is left."""

import argparse
import json
import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace as Made
from unittest.mock import Mock

import pytest
from launch_helpers import a_run
from monitor_evidence import beat, crash, hang
from runs_helpers import contents, picture, pictures, spec
from short_run_helpers import launched, nothing_runs, states, tiny_run

import runs
from guards import checkpoint
from launch import rehearse
from launch.common import LaunchError
from launch.rehearse import CANCELLED, DONE, FAILED, LOST, PASSED, RUNNING, SKIPPED, WAITING, Rehearsal, Stage, Trial
from monitor.diagnose import causes
from monitor.process import spawned
from monitor.process.platform import Lock
from monitor.state import Observation, State, Transition
from runs import job
from ui.run import run_page


@pytest.mark.slow
def test_a_rehearsal_measures_the_run_and_leaves_nothing(data, one_cpu):
    folder = tiny_run(data, epochs=10, repeats=4, price_per_hour=3.6)
    before = contents(data)
    code, found, said = launched("rehearse", folder)
    assert code == 0, said[-5000:]
    assert found["state"] == PASSED and set(states(found).values()) == {DONE}
    measured, predicted = found["measured"], found["forecast"]
    for key in ("load_s", "cache_s", "step_s", "sample_s", "save_s", "state_bytes", "lora_bytes", "host_bytes"):
        assert measured[key] > 0, key
    assert measured["images"] == 2 and predicted["steps"] == 3 * 4 * 10
    assert predicted["ends_s"] == pytest.approx(time.time() + predicted["seconds"], abs=120)
    assert predicted["cost"] == pytest.approx(predicted["seconds"] / 1000, abs=0.02)
    assert "120 steps take about" in said and "the run ends on" in said
    left = contents(data)
    left.pop(f"outputs/{folder.name}/rehearsal.json")
    left.pop(rehearse.LOCK)
    assert {name: content for name, content in left.items() if not name.startswith("models/")} == before
    assert nothing_runs(data)
    assert rehearse.read(folder).state == PASSED and rehearse.objection(folder, runs.load(folder)) == ""


def test_a_missing_model_is_said_at_once_and_start_asks_once(data, monkeypatch):
    picture(data / "pictures" / "a.png")
    folder = runs.create(spec(name="big", tier="16G"), data / "pictures")
    code, found, said = launched("rehearse", folder, HF_HUB_OFFLINE="1", HF_HOME=str(data / "hf"))
    assert code == 1 and (states(found)["check"], states(found)["load"]) == (FAILED, SKIPPED), said
    assert "flux" in found["problem"]["text"].lower()
    assert "Failed at “Check the settings and files”" in said

    made = runs.load(folder)
    text = rehearse.objection(folder, made)
    assert text.startswith("The rehearsal failed at “Check the settings and files”: ")
    assert rehearse.objection(folder, made.changed(rank=7)) == ""  # other settings were not rehearsed
    started = []
    monkeypatch.setattr("ui.run.actions.start", started.append)
    asked = run_page.start(folder.name, None)
    assert "Press the button again to start anyway" in asked and "Check the settings" in asked and started == []
    run_page.start(folder.name, None)
    assert started == [folder]


def test_the_digest_follows_what_decides_whether_it_trains():
    made = spec(name="a")
    same = [{"name": "b"}, {"epochs": 99}, {"max_train_steps": 7}, {"price_per_hour": 1.0}, {"seed": 1}, {"repeats": 3}]
    other = [{"rank": 3}, {"resolution": 640}, {"batch_size": 4}, {"workers": 3}, {"sample_every_n_steps": 50}]
    assert {rehearse.digest(made.changed(**one)) for one in same} == {rehearse.digest(made)}
    assert rehearse.digest(made) not in {rehearse.digest(made.changed(**one)) for one in other}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 3}', '{"stages": [{}]}', '{"stages": 5}'])
def test_a_damaged_result_is_a_lost_one(tmp_path, content):
    (tmp_path / "rehearsal.json").write_text(content)
    assert rehearse.read(tmp_path).state == "lost"
    assert rehearse.objection(tmp_path, spec()) == ""


def test_what_a_killed_one_left_goes_with_what_it_started_and_one_runs_at_a_time(data, spawn):
    run = data / rehearse.SCRATCH / "outputs" / rehearse.NAME
    (run / "cache").mkdir(parents=True)
    left = spawn(**{spawned.RUN: str(run), spawned.TOKEN: "0" * 32})
    environment = dict(os.environ)
    with rehearse.scratch() as scratch:
        assert left.wait(10) < 0, "it was killed"
        assert scratch == run and not (run / "cache").exists()
        assert os.environ["HANGPROOF_DATA"] == str(data / rehearse.SCRATCH)
        os.environ["HANGPROOF_DATA"] = str(data)
        with pytest.raises(LaunchError, match="another run is being rehearsed"), rehearse.scratch():
            pass
    assert [path.name for path in data.iterdir()] == [rehearse.LOCK] and dict(os.environ) == environment


@pytest.fixture
def work(data) -> rehearse.Work:
    """A rehearsal of a run with a data set, about to begin."""
    folder, run = a_run(data), data / "outputs" / rehearse.NAME
    run.mkdir()
    stages = [Stage(key, title) for key, (title, _) in rehearse.STAGES.items()]
    return rehearse.Work(folder, Rehearsal(stages=stages), math.inf, run)


def stage_states(found: Rehearsal) -> list[str]:
    return [stage.state for stage in found.stages]


def ended(at: State, message: str = "", **values) -> Made:
    """A trial that has ended; values: of its loop."""
    plain = {"at": Transition(at, message), "attempt": Mock(), "incident": None, "run_until_final": lambda: None}
    loop = Made(**{**plain, **values})
    return Made(loop=loop, busy="", intervals=(2.0, 0.5), memory={"host_bytes": 7}, image_s=lambda: 0.25)


def failed(evidence: causes.Evidence) -> Made:
    """A trial whose attempt failed: it is killed, and recorded."""
    return ended(State.FAILED, attempt=None, incident=Made(evidence=evidence, cause=causes.match(evidence)))


def test_a_rehearsal_writes_a_job_of_its_own_steps(work, clean, monkeypatch):
    tried = ended(State.COMPLETED)
    monkeypatch.setattr(rehearse, "Trial", lambda run, until_s, on_phase: tried)
    assert work._try(runs.load(work.folder).changed(name=rehearse.NAME, max_train_steps=2)) is tried
    made = job.load(work.run)
    assert made is not None and made.run_spec().max_train_steps == runs.load(work.run).max_train_steps == 2
    assert str(work.run) in (work.run / runs.script_name()).read_text()
    assert tried.loop.attempt.kill.called and tried.loop.attempt.close.called, "nothing of the attempt lives on"
    tried.busy = "in use"
    with pytest.raises(LaunchError, match="in use"):
        work._try(runs.load(work.folder).changed(name=rehearse.NAME))


def test_the_reduced_run_keeps_its_settings_and_trains_two_of_its_images(data):
    images = pictures(data.parent / "photos")
    (images / "1.txt").write_text("a cat")
    picture(data.parent / "control" / "1.jpg"), picture(data.parent / "control" / "x.jpg")
    kept = {"flags": "x", "sample_at_first": True, "huggingface_repo_id": "me/x", "fp8_base": True}
    made = spec(
        rank=7, batch_size=2, gradient_accumulation=3, gpus=2, nodes=4, keep_states=1, trackers="trackio", prompts=["a", "b"],
        control_dir=str(data.parent / "control"), store="s3://x/y", save_dir="/fast", spend_limit=2.0, extra=kept,
    )  # fmt: skip
    found = rehearse._reduced(made, {"vae": "v"}, sorted(images.glob("*.png"))[:2], images)
    assert (found.rank, found.nodes, found.max_train_steps, found.save_every_n_steps) == (7, 1, 2, 2)
    assert (found.store, found.save_dir, found.spend_limit, found.trackers) == ("", "", 0.0, "")
    assert (found.keep_states, found.sample_every_n_steps, found.prompts) == (2, 2, made.prompts[:1])
    assert found.repeats == 3 * 2 * 3 * 2 * 4, "each image fills all batches of all steps"
    assert found.extra == {"vae": "v", "flags": "x", "fp8_base": True}
    copied = data / "datasets" / rehearse.NAME
    assert sorted(path.name for path in copied.iterdir()) == ["0-0.png", "1-1.png", "1-1.txt"]
    assert [path.name for path in Path(found.control_dir).iterdir()] == ["1-1.jpg"]
    assert found.control_dir == str(data / "control")
    weighted = [picture(images / "weight-3" / "x.png")]
    rehearse._reduced(made, {}, weighted, images)
    assert (data / "control" / "0-x.jpg").is_file(), "a repeated image has the control image of the others"
    plain = rehearse._reduced(spec(sample_every_n_steps=0, trackers="wandb", keep_states=5), {}, [], images)
    assert (plain.control_dir, plain.sample_every_n_steps, plain.keep_states, plain.trackers) == ("", 0, 5, "wandb")


def test_a_trial_measures_memory_images_and_steps(data):
    phases = []
    trial = Trial(data / "outputs" / rehearse.NAME, math.inf, lambda phase, at_s: phases.append((phase, at_s)))
    gpus = [[{"memory_used": used, "memory_total": 90, "name": "L4"}] for used in (10, 10, 70, 40, 40, 40)]
    trial.loop.gpus = Made(read=lambda: gpus.pop(0))
    attempt = Made(tree=Made(members={os.getpid(): None}))

    def seen(at_s: float, *beats) -> None:
        trial._measure(attempt, Observation(at_s, 0.0, beats))

    seen(1.0), seen(1.1), seen(2.0, beat(1, phase="load"))
    assert phases == [], "the first rank says it"
    seen(3.0, beat(phase="load", phase_s=2.5))
    for done, at_s in ((1, 5.0), (1, 6.0), (3, 9.0)):
        seen(at_s, beat(phase="cache_latents", phase_s=4.0, done=done, beat_s=at_s))
    seen(9.1, beat(phase="cache_text", phase_s=9.1))
    seen(9.2, beat(phase="step", phase_s=9.2, done=4, intervals=(3.0,)))
    seen(9.4, beat(phase="step", phase_s=9.2, done=9, beat_s=0.0))
    assert phases == [("load", 3.0), ("cache_latents", 4.0), ("cache_text", 9.1), ("step", 9.2)]
    assert trial.image_s() == 2.0 and trial.intervals == (3.0,) and gpus == []
    assert trial.memory.pop("host_bytes") > 1e6
    assert trial.memory == {"gpu_before_bytes": 10, "gpu_bytes": 70, "gpu_total_bytes": 90, "gpu": "L4"}


def test_a_trial_starts_at_once_or_not_at_all_and_ends_in_time(data):
    trial = Trial(data / "outputs" / rehearse.NAME, math.inf, lambda *_: None)
    assert trial._turn(trial.loop).state is State.QUEUED
    said = beat(about={"environment": {"HANGPROOF_BARRIER_TIMEOUT_S": "7300"}})
    trial.loop.on_view = Mock()
    trial.loop.observe(Mock(**{"poll.return_value": Observation(1.0, 0.0, (said,), {})}))
    assert {(phase.floor_s, phase.ceiling_s) for phase in trial.loop.config.phases.values()} == {(20.0, 20.0)}
    trial.loop.queue, trial.loop.at = Made(acquire=lambda: False, message="cat has the GPU"), Transition(State.QUEUED)
    assert trial._turn(trial.loop).state is State.QUEUED and not trial.busy
    trial._began_s -= rehearse.QUEUE_S + 1
    assert trial._turn(trial.loop).state is State.FAILED and trial.busy.startswith("cat has the GPU; try again")
    trial.until_s = time.monotonic()
    assert "its time was over" in trial._turn(trial.loop).message


def test_stages_follow_the_phases_of_the_trainer(work, capsys):
    for phase, at_s in (("import", 1.0), ("cache_text", 3.0), ("load", 4.0), ("step", 6.0), ("unknown", 9.0)):
        work._on_phase(phase, at_s)
    assert stage_states(work.found) == [DONE, RUNNING, DONE, DONE, WAITING, WAITING, WAITING]
    assert [work.found.stage(key).took_s for key in ("load", "cache", "train")] == [4.0, 1.0, 3.0]
    assert "Train two steps …\nTrain two steps: done, 3.0 s\n" in capsys.readouterr().out
    assert rehearse.read(work.folder).stages[2].took_s == 1.0, "the page follows the file"
    work._enter("resume", 10.0), work._on_phase("step", 11.0)
    assert work.now.key == "resume" and stage_states(work.found)[4:] == [DONE, DONE, RUNNING]
    work._fail("sample", "It hung", "Because.", "Lower the rank.")
    assert stage_states(work.found)[4:] == [FAILED, SKIPPED, SKIPPED] and work.now is None
    assert work.found.problem["stage"] == "Draw a sample" and work.found.stage("sample").text == "It hung"


def test_the_first_attempt_is_measured_and_what_it_did_not_leave_is_the_problem(work, data):
    made = runs.load(work.folder).changed(name=rehearse.NAME, sample_every_n_steps=2)
    assert not work._measure(made, ended(State.COMPLETED)) and work.found.problem["title"] == "No checkpoint was saved"
    for step in (1, 2):
        with checkpoint.writing(work.run / f"{rehearse.NAME}-step0000000{step}-state", step, 1) as state:
            (state / "x").write_bytes(b"12345")
    assert not work._measure(made, ended(State.COMPLETED)) and work.found.problem["title"] == "No sample was drawn"
    assert work._measure(made.changed(sample_every_n_steps=0), ended(State.COMPLETED))
    assert work.found.measured["sample_s"] is None and work.found.stage("sample").state == SKIPPED
    for name, size in (("outputs/rehearsal/sample/a.png", 1), ("outputs/rehearsal/rehearsal.safetensors", 20)):
        (data / name).parent.mkdir(exist_ok=True), (data / name).write_bytes(bytes(size))
    picture(data / "datasets/rehearsal/0-a.png"), (data / "datasets/rehearsal/0-a.npz").write_bytes(bytes(30))
    work.found.stage("save").took_s, work.found.stage("sample").state = 8.0, DONE
    assert work._measure(made, ended(State.COMPLETED)) and work.found.stage("sample").state == DONE
    found = work.found.measured
    assert (found["step_s"], found["save_s"], found["image_s"], found["load_s"]) == (0.5, 4.0, 0.25, rehearse.POLL_S)
    assert (found["images"], found["cache_bytes"], found["lora_bytes"], found["host_bytes"]) == (1, 30, 20, 7)
    assert found["state_bytes"] > 5 and work.found.stage("train").text == "0.5 s for the second step"


@pytest.mark.parametrize(
    ("trial", "stage", "title", "change"),
    [
        (ended(State.FAILED, "no torch", attempt=None), "Train two steps", "It cannot be started", "then rehearse again"),
        (ended(State.FAILED, "gone"), "Train two steps", "It ended early", "Read the end of the log"),
        (failed(crash("CUDA out of memory", phase="save")), "Save the LoRA", "GPU", "setting: "),
        (failed(hang(phase="cache_text")), "Encode images", "", ""),
    ],
)  # fmt: skip
def test_a_failure_says_where_why_and_what_to_change(work, trial, stage, title, change):
    (work.run / "training.log").write_text("10%\r\n\n20%\rKilled")
    work._enter("train")
    work._explain(runs.load(work.folder), trial)
    problem = work.found.problem
    assert problem["stage"].startswith(stage) and title in problem["title"] and change in problem["change"], problem
    assert problem["log"] == "10%\n20%\nKilled" and rehearse.read(work.folder).problem == problem


@pytest.mark.parametrize(("last", "failed"), [(3, False), (2, True)])
def test_a_checkpoint_that_is_not_continued_is_a_failure(work, monkeypatch, last, failed):
    resumed = ended(State.COMPLETED, state=Made(resumed_step=2, best_step=last))
    tried, asked = [ended(State.COMPLETED), resumed], []
    monkeypatch.setattr(work, "_try", lambda made: asked.append(made) or tried.pop(0))
    monkeypatch.setattr(work, "_measure", lambda made, trial: True)
    work.rehearse(runs.load(work.folder))
    assert bool(work.found.problem) == failed and (asked[1].max_train_steps, asked[1].prompts) == (3, [])
    assert not failed or "from step 2 to 2" in work.found.problem["text"]


@pytest.mark.parametrize(
    ("end", "state"), [(None, PASSED), ("a problem", FAILED), (SystemExit, CANCELLED), (OSError, FAILED)]
)
def test_the_file_says_how_it_ended(data, monkeypatch, end, state):
    folder = a_run(data, price_per_hour=1.0)
    (data / "models.toml").write_text("")
    now = time.time

    def tried(work, made):
        monkeypatch.setattr(time, "time", lambda: now() + 1e6)  # the system's clock is set
        work.found.measured = {"step_s": 1.0, "load_s": 1.0, "cache_s": 0.0, "image_s": 0.0, "save_s": 0.0}
        work.found.measured |= {"state_bytes": 1, "lora_bytes": 1, "cache_bytes": 1}
        assert (data / rehearse.SCRATCH / "models.toml").is_file() and made.max_train_steps == 2
        if isinstance(end, str):
            work.found.problem = {"stage": "Draw a sample", "title": "It hung.", "text": end, "change": ""}
        elif end:
            raise end("no disk")

    monkeypatch.setattr(rehearse.Work, "rehearse", tried)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = argparse.Namespace(run=folder.name, limit=60.0, json=False)
    if isinstance(end, type):
        with pytest.raises(end):
            rehearse.run(args)
    else:
        assert rehearse.run(args) == (1 if end else 0)
    found = rehearse.read(folder)
    assert (found.state, set(stage_states(found))) == (state, {SKIPPED}) and 0 <= found.took_s < 60
    assert bool(found.forecast.get("cost")) == (end is None or isinstance(end, str))
    assert bool(rehearse.objection(folder, runs.load(folder))) is False, "no stage of it failed"
    assert end is not OSError or found.problem["text"] == "no disk"
    for limit in (0.0, float("nan")):
        with pytest.raises(LaunchError, match="--limit"):
            rehearse.run(argparse.Namespace(run=folder.name, limit=limit))


def test_a_result_goes_with_the_run_of_its_settings_and_one_without_a_process_is_lost(data):
    folder, made = a_run(data), spec(name="draft")
    source = data / "draft"
    source.mkdir()
    assert rehearse.read(source) is None
    for state, digest, kept in ((RUNNING, "", False), (PASSED, "0", False), (PASSED, "", True), (FAILED, "", True)):
        digest = digest or rehearse.digest(runs.load(folder))
        rehearse._write(source, Rehearsal(state, digest, stages=[Stage("check", "Check")]))
        rehearse.hand_on(source, folder)
        assert (folder / rehearse.FILE).exists() == kept, (state, digest)
    rehearse._write(source, Rehearsal(RUNNING))
    assert rehearse.read(source).state == LOST
    lock = Lock(data / rehearse.LOCK)
    assert lock.acquire() and rehearse.read(source).state == RUNNING
    lock.release()
    assert json.loads((folder / rehearse.FILE).read_text())["state"] == FAILED and made.slug == "draft"
    for image in (data / "datasets" / folder.name).iterdir():
        image.unlink()
    with pytest.raises(LaunchError, match="has no images"):
        rehearse.rehearse(folder)
