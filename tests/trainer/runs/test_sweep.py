"""A sweep through the queue, on the built-in trainer."""

import json

import pytest
from monitor_helpers import wait_for
from runs_helpers import pictures, python
from sweep_helpers import FIELDS

import runs
from jobs import queue
from monitor.process.platform import LOCK, is_held
from runs import sweep

pytestmark = pytest.mark.slow


def test_a_sweep_is_one_entry_of_the_queue_and_encodes_the_images_once(data, monkeypatch):
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    runs.create(runs.make({"name": "cat", **FIELDS}), pictures(data / "in", 2))
    done = python("-m", "runs", "sweep", "cat", "--set", "rank=2,4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["sweep"] == "cat-sweep"
    folders = [runs.outputs_dir() / name for name in ("cat-r2", "cat-r4")]

    def ended(folder):
        return json.loads((folder / "status.json").read_text())["state"] == "completed" and not is_held(folder / LOCK)

    wait_for(lambda: all(map(ended, folders)), timeout_s=300, what="two trainings")
    logs = [(folder / "training.log").read_text(encoding="utf-8") for folder in folders]
    assert "caching latents" in logs[0].lower() and "caching latents" not in logs[1].lower(), logs[1][:3000]
    table = sweep.table(sweep.find("cat-sweep"))
    assert [row["state"] for row in table] == ["completed"] * 2
    assert all(row["lora"] and row["final_loss"] for row in table) and not queue.read().entries
