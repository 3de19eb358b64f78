"""A script that a person edited, under a real monitor."""

import pytest
from ladder_runs import FORK

import runs
from presets.training import trainings
from runs import adopt_script, custom_script

pytestmark = pytest.mark.slow


def test_the_monitor_restarts_an_edited_script_from_its_checkpoint_with_its_mitigation(run, tmp_path):
    fields = {"name": "Ladder 1", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 40}
    spec = runs.make({**fields, "save_every_n_steps": 10, "sample_every_n_steps": 0})
    place = runs.outputs_dir() / spec.slug
    text = runs.script(spec, place).replace("set -eu\n", f"set -eu\necho x >> {tmp_path}/mine\n")
    folder, code = run(FORK, **adopt_script.adopt(spec, text, place).model_dump())
    assert code == 0
    attempts = sorted(folder.glob("train.attempt-*.sh"))
    assert attempts and len((tmp_path / "mine").read_text().split()) == 1 + len(attempts), "each attempt ran my line"
    last = custom_script.flags(trainings(attempts[-1].read_text())[0])
    assert last["max_data_loader_n_workers"] == ["0"] and "-state" in last["resume"][0]
    assert (folder / "train.sh").read_text() == text, "the script itself stays as written"
