"""Sample images and checkpoints on request, between two steps of each trainer: the training stays the same."""

import re
import subprocess
import sys

import psutil
import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts
from monitor_helpers import (
    ROOT,
    environment,
    events,
    finish,
    members,
    monitor,
    status,
    toy_run,
    undisturbed,
    wait_for,
    weight,
)
from musubi_helpers import train as train_musubi
from trainer_helpers import flags, fork, good, make_config, make_images, sha

from guards import checkpoint, step_requests
from monitor.cli import requests
from monitor.extra_saves import ExtraSaves, boundary
from monitor.run_folder import MonitorError, RunFolder
from trainer import tiny_flux

ASKED = "sample@2,state@4,save@7"  # the step after which each is requested
sd_scripts = pytest.mark.skipif(bool(tiny_sd_scripts.why_not()), reason=tiny_sd_scripts.why_not() or "-")
musubi = pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")


def asking(folder, asked=ASKED):
    """The environment of a training in which the requests are made."""
    return {
        "HANGPROOF_RUN": str(folder),
        "HANGPROOF_HEARTBEAT": str(folder / "beats"),
        "HANGPROOF_INJECT": "tests.request_injectors:ask",
        "REQUESTS": asked,
    }


def answers(folder):
    """{kind: event} of the requests; each has one answer, and none waits."""
    found = [event for event in events(folder, step_requests.EVENT)]
    assert len({event["id"] for event in found}) == len(found) and not step_requests.waiting(folder)
    return {event["request"]: event for event in found}


# ---- the built-in trainer ----


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    (folder / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 5\n" * 2, encoding="utf-8")
    config = make_config(folder / "dataset.toml", make_images(folder / "images"))
    return {"model": tiny_flux.ensure(folder / "tiny-flux"), "config": config, "prompts": folder / "prompts.txt"}


def built_in(work, output, **changed):
    """The command line of a run with dropout, which draws random numbers, and samples that are never due by themselves."""
    given = {"sample_prompts": work["prompts"], "sample_every_n_steps": 1000, "network_dropout": 0.2} | changed
    return flags(
        work["model"], work["config"], output, max_train_steps=40, save_state=True, save_every_n_steps=25, **given
    )


def test_requests_leave_the_lora_of_the_built_in_trainer_the_same(work, tmp_path):
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    asked.mkdir()
    good(fork(built_in(work, plain)))
    good(fork(built_in(work, asked, save_last_n_steps=0), **asking(asked)))
    assert sha(plain / "tiny.safetensors") == sha(asked / "tiny.safetensors")
    found = answers(asked)
    assert all(event["done"] for event in found.values()), found
    sampled, kept, saved = (found[kind]["step"] for kind in ("sample", "state", "save"))
    assert sampled >= 2 and kept >= 4 and saved >= 7
    images = [path.name for path in (asked / "sample").iterdir()]
    assert len(images) == 2 and all(f"_{sampled:06d}_" in name for name in images)
    assert found["sample"]["message"] == f"2 of 2 sample images of step {sampled}, as requested"
    if kept != saved:
        assert not (asked / f"tiny-step{kept:08d}.safetensors").exists()  # a checkpoint alone
    assert (asked / f"tiny-step{saved:08d}.safetensors").is_file()
    # Old ones go as usual: with save_last_n_steps 0 each save deletes the states before it.
    assert sorted(p.name for p in asked.glob("*-step*-state")) == ["tiny-step00000025-state"]


@pytest.mark.long
def test_a_requested_checkpoint_is_complete_and_resumes_exactly(work, tmp_path):
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    asked.mkdir()
    good(fork(built_in(work, plain)))
    good(fork(built_in(work, asked), **asking(asked, "state@3")))
    state = asked / f"tiny-step{answers(asked)['state']['step']:08d}-state"
    assert checkpoint.verify(state).usable
    (asked / "tiny.safetensors").unlink()
    good(fork([*built_in(work, asked), "--resume", str(state)]))
    assert sha(plain / "tiny.safetensors") == sha(asked / "tiny.safetensors")


def test_a_run_without_prompts_says_so(work, tmp_path):
    argv = built_in(work, tmp_path, sample_prompts=None, sample_every_n_steps=None)
    good(fork(argv, **asking(tmp_path, "sample@1")))
    found = answers(tmp_path)["sample"]
    assert not found["done"] and "the run has no prompts for sample images" in found["message"]


# ---- kohya's trainers ----

SAVES = ["--save_state", "--save_every_n_steps", "12", "--save_last_n_steps", "0"]


def compare(plain, asked, log):
    """The two runs have the same losses and LoRA, and all that was requested was done."""
    assert tiny_sd_scripts.losses(plain / "losses") == tiny_sd_scripts.losses(asked / "losses")
    one, other = (resume_helpers.tensors(folder / "made/tiny.safetensors") for folder in (plain, asked))
    assert one == other
    found = answers(asked)
    assert [found[kind]["done"] for kind in ("sample", "state", "save")] == [True] * 3, (found, log[-3000:])
    made = asked / "made"
    number = found["sample"]["step"]
    images = [path for path in (made / "sample").glob("*.png") if f"_{number:06d}_" in path.name]
    assert images and found["sample"]["message"].startswith(f"{len(images)} sample image")
    saved = found["save"]["step"]
    assert (made / f"tiny-step{saved:08d}.safetensors").is_file()
    states = {path.name for path in made.glob("*-step*-state")}
    assert {f"tiny-step{found['state']['step']:08d}-state", f"tiny-step{saved:08d}-state"}.isdisjoint(states), states
    return found


@sd_scripts
@pytest.mark.long
@pytest.mark.timeout(900)
def test_requests_leave_the_lora_of_sd_scripts_the_same(tmp_path):
    folder = tiny_sd_scripts.workdir()
    more = ["--sample_prompts", str(folder / "prompts.txt"), "--sample_every_n_epochs", "100", "--flip_aug", *SAVES]
    plain = resume_helpers.train(folder, tmp_path / "plain", *more, max_train_steps="26")
    assert plain.code == 0, plain.log[-3000:]
    asked = tmp_path / "asked"
    asked.mkdir()
    done = resume_helpers.train(folder, asked, *more, max_train_steps="26", env=asking(asked))
    assert done.code == 0, done.log[-3000:]
    compare(tmp_path / "plain", asked, done.log)


@musubi
@pytest.mark.long
@pytest.mark.timeout(900)
def test_requests_leave_the_lora_of_musubi_tuner_the_same(tmp_path):
    work = tiny_musubi.workdir()
    more = ["--sample_prompts", str(work / "prompts.txt"), "--sample_every_n_epochs", "100", *SAVES]
    more += ["--max_train_steps", "26"]
    for name in ("plain", "asked"):
        folder = tmp_path / name
        folder.mkdir()
        tiny_musubi.cached(work, folder)
        done = train_musubi(folder, *more, env=asking(folder) if name == "asked" else {})
        assert done.code == 0, done.log[-3000:]
    compare(tmp_path / "plain", tmp_path / "asked", done.log)


# ---- the monitor: pause, resume, and requests that come too late ----


def resume_all(folder):
    """The exit code of `monitor resume-all` for the data root of this run."""
    command = [sys.executable, "-m", "monitor", "resume-all"]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), timeout=60).returncode


def test_a_paused_run_frees_its_processes_and_goes_on_exactly(tmp_path):
    folder = toy_run(tmp_path / "toy", steps=80)
    process = monitor(folder)
    wait_for(lambda: status(folder).get("step", 0) >= 5, what="five steps")
    assert finish(monitor(folder, "pause", "--wait", "60"))[0] == 0
    assert finish(process)[0] == 3
    now = status(folder)
    assert now["state"] == "paused" and re.search(r"paused at step \d+; checkpoint: toy-step", now["reason"])
    assert not members(folder)
    assert resume_all(folder) == 0 and status(folder)["state"] == "paused"
    assert finish(monitor(folder, "resume"))[0] == 0
    wait_for(lambda: status(folder)["state"] == "completed", what="the end")
    assert weight(folder) == undisturbed(80)
    assert [event["kind"] for event in events(folder) if event["kind"] in ("paused", "completed")] == [
        "paused",
        "completed",
    ]


def test_a_pause_survives_a_killed_monitor(tmp_path):
    folder = toy_run(tmp_path / "toy", steps=400, pace=0.1)
    process = monitor(folder)
    wait_for(lambda: status(folder).get("step", 0) >= 3, what="three steps")
    requests.pause(folder)
    psutil.Process(status(folder)["monitor_pid"]).kill()  # its keeper starts the next one
    assert finish(process)[0] == 3
    assert status(folder)["state"] == "paused" and not members(folder)


def test_a_request_that_cannot_be_done_says_why(tmp_path):
    folder = toy_run(tmp_path / "toy", steps=30)
    with pytest.raises(MonitorError, match="toy: sample images can be made while it trains, but it is never started"):
        requests.request(folder, "sample")
    process = monitor(folder)
    wait_for(lambda: status(folder).get("step", 0) >= 2, what="two steps")
    name = requests.request(folder, "save")
    assert name == requests.request(folder, "save")  # two requests of one kind are one
    assert finish(process)[0] == 0
    found = requests.outcome(folder, name)
    assert found and not found["done"] and found["message"] == "a checkpoint not made: the run is completed"
    with pytest.raises(MonitorError, match="it is completed"):
        requests.request(folder, "save")


def test_a_request_that_the_training_dies_at_is_refused_in_the_end(tmp_path):
    name = step_requests.ask(tmp_path, "save")
    for _ in range(step_requests.TRIES):
        assert step_requests.StepRequests(tmp_path).pending(5) == ("save",)  # and then the process is killed
    assert step_requests.StepRequests(tmp_path).pending(6) == ()
    (found,) = events(tmp_path)
    assert found["id"] == name and not found["done"] and "ended 2 times" in found["message"]


def test_a_damaged_request_is_a_request(tmp_path):
    step_requests.path_of(tmp_path, "sample").write_bytes(b"\xff{")
    reader = step_requests.StepRequests(tmp_path)
    assert reader.pending(1) == ("sample",)
    reader.done("sample", 1, "1 sample image")
    assert not step_requests.waiting(tmp_path)


def test_only_rank_0_reads_requests(tmp_path):
    step_requests.ask(tmp_path, "state")
    assert step_requests.StepRequests.from_env({"HANGPROOF_RUN": str(tmp_path), "RANK": "1"}).pending(1) == ()
    assert step_requests.StepRequests.from_env({"HANGPROOF_RUN": str(tmp_path), "RANK": "0"}).pending(1) == ("state",)
    assert step_requests.StepRequests.from_env({}).pending(1) == ()


# ---- extra checkpoints for the store ----


@pytest.mark.parametrize(
    ("every", "count", "expected"),
    [
        (40, 1, {20: 20, 29: 20, 60: 60}),  # half-way, and until the next regular save is nearer than a quarter
        (10, 2, {4: 3, 7: 7, 8: 7, 14: 13}),
        (3, 1, {}),  # too short
        (40, 0, {}),
        (0, 1, {}),
    ],
)
def test_extra_saves_are_due_between_two_regular_ones(every, count, expected):
    found = {step: at for step in range(70) if (at := boundary(step, every, count)) is not None}
    assert expected.items() <= found.items() and bool(found) is bool(expected)
    assert all(step % every > 0 and at <= step for step, at in found.items())


def test_an_extra_save_is_requested_once_and_not_while_one_is_copied_or_saving_is_slow(tmp_path):
    (tmp_path / "run.toml").write_text("save_every_n_steps = 40\n", encoding="utf-8")
    saves = ExtraSaves(RunFolder(tmp_path), 1)
    assert not saves.tick(21, copying=True, step_s=1.0, save_s=0.1)
    assert not saves.tick(21, copying=False, step_s=1.0, save_s=0.9)  # 2 % of an interval are 0.8 s
    assert saves.tick(22, copying=False, step_s=1.0, save_s=0.1)
    assert not saves.tick(23, copying=False, step_s=1.0, save_s=0.1)
    assert step_requests.waiting(tmp_path) == ("state",)
    assert saves.tick(60, copying=False, step_s=1.0, save_s=0.0)  # too short to be seen
