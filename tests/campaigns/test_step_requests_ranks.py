"""Requests of a run with two processes: both act at the same step, and the training stays the same."""

import os

import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts
import world_trainings
from monitor_helpers import events
from trainer_helpers import sha

from guards import heartbeat, step_requests

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name == "nt", reason="gloo under torchrun is not set up for Windows here"),
]
ASKED = {"HANGPROOF_INJECT": "request_injectors:ask", "REQUESTS": "sample@2,state@3,save@5"}


def all_done(folder, beats):
    found = {event["request"]: event for event in events(folder, step_requests.EVENT)}
    assert {kind: event["done"] for kind, event in found.items()} == dict.fromkeys(step_requests.KINDS, True), found
    assert [beat.outcome for beat in heartbeat.read_all(beats)] == ["done", "done"]
    return found


def test_two_processes_of_the_built_in_trainer(work, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a thing --w 64 --h 64 --s 2 --d 5\n", encoding="utf-8")
    more = {"max_train_steps": 40, "sample_prompts": prompts, "sample_every_n_steps": 1000, "network_dropout": 0.2}
    for name, env in (("plain", {}), ("asked", ASKED)):
        done = world_trainings.together(work, tmp_path / name, 2, env=env, **more)
        assert done.returncode == 0, done.stdout[-3000:]
    all_done(tmp_path / "asked" / "run", tmp_path / "asked" / "beats")
    assert sha(tmp_path / "plain/made/tiny.safetensors") == sha(tmp_path / "asked/made/tiny.safetensors")


@pytest.mark.parametrize("backend", ["sd-scripts", "musubi"])
def test_two_processes_of_kohyas_trainers(backend, tmp_path):
    folder = tiny_musubi.workdir() if backend == "musubi" else tiny_sd_scripts.workdir()
    more = ["--sample_prompts", str(folder / "prompts.txt"), "--sample_every_n_epochs", "100"]
    more += ["--save_state", "--save_every_n_steps", "100"]
    steps = {"max_train_steps": "16"} if backend == "sd-scripts" else {}
    more += [] if steps else ["--max_train_steps", "16"]
    for name, env in (("plain", {}), ("asked", ASKED)):
        done = world_trainings.train(backend, tmp_path / name, 2, *more, env=env, **steps)
        assert done.returncode == 0, done.stdout[-3000:]
    found = all_done(tmp_path / "asked", tmp_path / "asked" / "beats")
    images = list((tmp_path / "asked/made/sample").glob(f"*_{found['sample']['step']:06d}_*"))
    prompts = [line for line in (folder / "prompts.txt").read_text().splitlines() if line.strip() and line[0] != "#"]
    assert len(images) == len(prompts)  # each rank makes its share, at the same step
    one, other = (resume_helpers.tensors(tmp_path / name / "made/tiny.safetensors") for name in ("plain", "asked"))
    assert one == other


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return world_trainings.images_and_model(tmp_path_factory.mktemp("world"))
