"""A script that a person edited, under a real monitor."""

import json

import pytest
from ladder_runs import FORK

import runs
from presets.training import trainings
from runs import adopt_script, custom_script

pytestmark = pytest.mark.slow


def edited_run(change) -> dict:
    """The fields of a run of the tiny model with an edited script."""
    fields = {"name": "Ladder 1", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 40}
    spec = runs.make({**fields, "save_every_n_steps": 10, "sample_every_n_steps": 0})
    folder = runs.outputs_dir() / spec.slug
    return adopt_script.adopt(spec, change(runs.script(spec, folder)), folder).model_dump()


def test_the_monitor_restarts_an_edited_script_from_its_checkpoint_with_its_mitigation(run, tmp_path):
    fields = edited_run(lambda text: text.replace("set -eu\n", f"set -eu\necho x >> {tmp_path}/mine\n"))
    folder, code = run(FORK, **fields)
    assert code == 0
    attempts = sorted(folder.glob("train.attempt-*.sh"))
    assert attempts and len((tmp_path / "mine").read_text().split()) == 1 + len(attempts), "each attempt ran my line"
    last = custom_script.flags(trainings(attempts[-1].read_text())[0])
    assert last["max_data_loader_n_workers"] == ["0"] and "-state" in last["resume"][0]
    assert (folder / "train.sh").read_text() == fields["edited"]["script"], "the script itself stays as written"


def test_the_monitor_says_which_mitigation_the_edited_script_prevents(run, tmp_path):
    def change(text):
        text = text.replace("set -eu\n", 'set -eu\nworkers="--max_data_loader_n_workers 2"\n')
        return text.replace("--max_data_loader_n_workers 2 \\", "$workers \\")

    folder, code = run(FORK, **edited_run(change))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (said,) = {one["message"] for one in events if one["kind"] == "not_mitigated"}
    assert code == 4 and said.startswith("workers 0: ") and "--max_data_loader_n_workers is not written" in said
