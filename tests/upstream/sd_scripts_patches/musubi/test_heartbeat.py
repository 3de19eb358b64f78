"""kohya's real musubi-tuner under the patches: the same numbers, a heartbeat that describes it, and its saves."""

import json
from concurrent.futures import ThreadPoolExecutor

import musubi_helpers
import pytest
import resume_helpers
import tiny_musubi as tiny

from guards import checkpoint, heartbeat

pytestmark = pytest.mark.usefixtures("musubi")
POINTS = "arguments folders data accelerator tokenizer model network loader ready tracker ready first_step finished"


@pytest.fixture(scope="module")
def runs(musubi, tmp_path_factory):
    """Three epochs with everything that the patches change: without them, and with all of them. [(folder, result)]"""
    work = tiny.workdir()
    base = tmp_path_factory.mktemp("musubi")

    def run(patched):
        folder = base / ("patched" if patched else "plain")
        tiny.cached(work, folder, batch_size=2)
        result = musubi_helpers.train(
            folder, "--save_state", "--save_every_n_steps", "2", "--max_train_epochs", "3", "--sample_every_n_steps",
            "5", "--persistent_data_loader_workers", "--sample_prompts", str(work / "prompts.txt"), "--log_with",
            "tensorboard", "--logging_dir", str(folder / "logs"), "--save_last_n_steps", "4",
            max_data_loader_n_workers="2", patched=patched,
            env=resume_helpers.followed(folder), where="src/musubi_tuner" if patched else "",
        )  # fmt: skip
        return folder, result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (False, True)))


def test_guarded_training_has_the_same_numbers_and_a_heartbeat_that_describes_it(runs):
    (plain, _), (folder, result) = runs
    phases = resume_helpers.same_training(plain, folder, 12, 2)
    assert phases[:3] == ["import", "load", "first_step"] and phases[-1] == "end"
    assert sorted(phases[3:-1]) == ["sample", "save", "step"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [loss for _, _, loss in tiny.losses(folder / "losses")]
    assert lines[0]["lr"] == 1e-3 and lines[-1]["lr"] < 1e-4  # a cosine
    assert (folder / "phases.points").read_text().split() == POINTS.split()
    (beat,) = heartbeat.read_all(folder / "hb")
    assert all(beat.reached) and beat.point == "finished" and beat.epoch == 3
    assert beat.about["device"] == "cpu"
    assert len(checkpoint.states(folder / "made")) >= 3 and not list((folder / "made").glob(".*"))
    assert "not guarded" not in result.log and "is kept" not in result.log
    assert result.log.index("model saved.") > result.log.index("saving last state.")
