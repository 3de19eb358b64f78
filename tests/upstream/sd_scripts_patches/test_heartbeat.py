"""kohya's real FLUX trainer, tiny weights: the same numbers with all patches, and a heartbeat.

All other families: tests/campaigns/test_runs_families.py.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import heartbeat

ON_DISK = ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
EVERYTHING = [*ON_DISK, "--save_state", "--save_every_n_steps", "10", "--sample_every_n_steps", "10"]
EVERYTHING += ["--log_with", "tensorboard", "--validation_split", "0.1", "--persistent_data_loader_workers"]


@pytest.fixture(scope="module")
def runs(each_work, tmp_path_factory):
    """20 steps with all features that the patches change: without the patches, and with all of them."""

    def run(patched):
        out = tmp_path_factory.mktemp("patched" if patched else "plain")
        helpers.train(
            each_work, out, *EVERYTHING, patched=patched, env={"HANGPROOF_ATTEMPT": "2", **helpers.followed(out)},
            train_data_dir=str(tiny.copy_of(each_work, out)), max_train_steps="20", max_data_loader_n_workers="1",
            sample_prompts=str(each_work / "prompts.txt"), logging_dir=str(out / "logs"),
        )  # fmt: skip
        return out

    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(run, (False, True)))


def test_twenty_steps_have_the_same_numbers_and_a_heartbeat_that_describes_them(runs):
    plain, guarded = runs
    phases = helpers.same_training(plain, guarded, 20, 2)
    firsts = ["import", "load", "cache_latents", "cache_text", "hash", "first_step", "step"]
    assert phases[:7] == firsts and sorted(phases[7:]) == ["end", "sample", "save", "validate"] and phases[-1] == "end"
    helpers.same_caches(plain, guarded)
    assert len(list(plain.rglob("*.npz"))) >= 18


def test_the_run_reaches_every_check_point_in_the_order_of_the_trainer(runs):
    assert (runs[1] / "phases.points").read_text().split() == [
        *("arguments", "folders", "tokenizer", "data", "accelerator", "model"),
        *("data", "network", "data", "network"),  # the captions of the training and of the validation set
        *("loader", "ready", "tracker", "ready", "first_step", "finished"),
    ]
    (beat,) = heartbeat.read_all(runs[1] / "hb")
    assert all(beat.reached) and beat.point == "finished"
    assert beat.about["device"] == "cpu"


def test_every_step_has_its_line_of_metrics(runs):
    found = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    recorded = [loss for epoch, _, loss in tiny.losses(runs[1] / "losses") if epoch >= 0]
    lines = [line for line in found if line["kind"] == "step"]
    others = [line for line in found if line not in lines]
    assert [(line["kind"], line["step"]) for line in others] == [("validation", n) for n in (9, 18, 20)]
    assert len({line["val_loss"] for line in others}) == 3 and {line["attempt"] for line in found} == {2}
    assert all(any(abs(line["loss"] - loss) < 1e-9 for loss in recorded) for line in lines)
    assert lines[0]["lr"] == 1e-3 and lines[-1]["lr"] < 1e-4  # a cosine
    assert [line["epoch"] for line in lines] == sorted(line["epoch"] for line in lines)
    assert all(0 < line["step_s"] < 30 for line in lines)


@pytest.mark.parametrize("name", ["sdxl", "lumina"])
def test_a_family_of_sd_scripts_trains_the_same_and_is_followed(newest, name, tmp_path):
    """SDXL samples in a pipeline, Lumina makes several images in one loop of its own."""
    helpers.same_family(name, tmp_path)
