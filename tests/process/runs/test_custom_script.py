"""A script that a person edited, under a real monitor."""

import json

import pytest
from ladder_runs import CRASHES, FORK

import runs
from presets.training import trainings
from runs import custom_script, pin

pytestmark = pytest.mark.slow


def spec() -> runs.RunSpec:
    fields = {"name": "Ladder 1", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 40}
    return runs.make({**fields, "save_every_n_steps": 10, "sample_every_n_steps": 0})


def place():
    return runs.outputs_dir() / spec().slug


def test_the_monitor_restarts_an_edited_script_from_its_checkpoint_with_its_mitigation(run, tmp_path):
    text = runs.script(spec(), place()).replace("set -eu\n", f"set -eu\necho x >> {tmp_path}/mine\n")
    folder, code = run(FORK, **pin.adopt(spec(), text, place()).model_dump())
    assert code == 0
    attempts = sorted(folder.glob("train.attempt-*.sh"))
    assert attempts and len((tmp_path / "mine").read_text().split()) == 1 + len(attempts), "each attempt ran my line"
    last = custom_script.flags(trainings(attempts[-1].read_text())[0])
    assert last["max_data_loader_n_workers"] == ["0"] and "-state" in last["resume"][0]
    assert (folder / "train.sh").read_text() == text, "the script itself stays as written"


def test_the_monitor_says_which_mitigation_the_edited_script_prevents(run):
    text = runs.script(spec(), place()).replace("set -eu\n", 'set -eu\nworkers="--max_data_loader_n_workers 2"\n')
    text = text.replace("--max_data_loader_n_workers 2 \\", "$workers \\")
    limits = CRASHES.replace("[restart]\n", "[restart]\nwithout_progress_count = 2\n")
    folder, code = run(FORK, limits, **pin.adopt(spec(), text, place()).model_dump())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (said,) = {one["message"] for one in events if one["kind"] == "not_mitigated"}
    assert code == 4 and said.startswith("workers 0: ") and "--max_data_loader_n_workers is not written" in said
