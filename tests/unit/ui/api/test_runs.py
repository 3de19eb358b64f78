"""Runs in the API: what it says of their samples, and what it refuses."""

import json

import pytest
from runs_helpers import pictures, spec
from ui_helpers import lora_file, watched
from ui_markup import PROMPT

import runs
from jobs import queue
from monitor.run_folder import RunFolder
from monitor.state import RunState, State, spec_hash
from ui.api.runs import list_runs, run_samples, run_status, start_run, stop_run, train_longer
from ui.run import actions, blind_vote


def test_the_api_has_each_saved_step_and_the_last_mark_counts(sampled):
    for step in (8, 16, 24):
        lora_file(sampled / f"my-cat-step{step:08}.safetensors", step)
    lines = [{"kind": "step", "step": step, "epoch": 1, "loss": 0.5} for step in range(1, 25)]
    lines += [{"kind": "validation", "step": step, "epoch": 1, "val_loss": 1 / step} for step in (8, 16)]
    (sampled / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run_samples("my-cat")
    assert (found["run"], found["name"], found["picked"]) == ("my-cat", "my cat", None)
    assert found["best"] == {"step": 16, "val_loss": 0.0625}
    assert [one["prompt"] for one in found["prompts"]] == ["a cat", PROMPT]
    one = found["snapshots"][1]
    assert (one["step"], one["loss"], one["val_loss"]) == (16, 0.5, 0.0625) and one["time"].endswith("+00:00")
    assert one["lora"]["name"] == "my-cat-step00000016.safetensors" and one["lora"]["size"] > 100
    assert (one["samples"][0]["prompt"], one["samples"][0]["seed"]) == ("a cat", 42)

    blind_vote.mark(sampled, 8)
    with (sampled / blind_vote.FILE).open("a") as file:
        file.write('{"kind": "pick", "st')  # a power cut
    assert blind_vote.picked(sampled) == 8
    blind_vote.mark(sampled, 24)
    assert run_samples("my-cat")["picked"] == 24


def test_a_run_under_way_is_not_made_longer_and_one_that_waits_leaves_the_queue(data, tmp_path):
    """Its script has the length that it was started with: it would end there, or go on after a hang."""
    folder = runs.create(spec(epochs=4), pictures(tmp_path / "in"))
    queue.insert(folder)
    stop_run(folder.name)
    assert not queue.read().entries
    (folder / "status.json").write_text('{"state": "running"}')
    with watched(folder), pytest.raises(runs.RunError, match="is under way"):
        train_longer(folder.name, 6)
    assert runs.load(folder).epochs == 4


@pytest.mark.parametrize("look", [lambda name: list_runs()[0], run_status])
def test_a_client_that_looks_at_the_runs_keeps_the_queue_going(data, tmp_path, monkeypatch, look):
    """A monitor that is killed with its keeper does not start the next run."""
    calls = []
    monkeypatch.setattr(queue, "ensure_worker", lambda: calls.append(1))
    monkeypatch.setattr(actions, "_checked_s", -actions.CHECK_S)
    folder = runs.create(spec(epochs=4), pictures(tmp_path / "in"))
    assert look(folder.name)["position"] == 0 and not calls
    queue.insert(folder)
    assert [look(folder.name)["position"] for _ in range(2)] == [1, 1] and calls == [1]


def test_a_run_with_nothing_left_to_train_is_not_said_to_be_started(data, tmp_path):
    folder = runs.create(spec(epochs=4), pictures(tmp_path / "in"))
    RunState(State.COMPLETED, best_step=12, spec_hash=spec_hash(folder)).save(RunFolder(folder))
    lora_file(folder / f"{folder.name}.safetensors", 12)
    for start in (start_run, lambda name: train_longer(name, 4)):
        with pytest.raises(runs.RunError, match=r"is already completed \(12 steps\)"):
            start(folder.name)
