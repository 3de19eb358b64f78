"""A loader worker that falls asleep in the middle of a real training: a guard ends the process and names what it waited for."""

import re

import musubi_helpers
import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts

from guards import heartbeat

pytestmark = pytest.mark.journey
SLEEPS = """
import os, time
original, read = module.{owner}.__getitem__, [0]
def __getitem__(self, index):
    read[0] += 1
    if read[0] == 4:
        os.write(1, f"HANG pid {{os.getpid()}}\\n".encode())
        time.sleep(3600)
    return original(self, index)
module.{owner}.__getitem__ = __getitem__
"""


def fell_asleep(out, train, module: str, owner: str) -> None:
    """Train with a worker that sleeps over its fourth batch, and judge how it ends. TMPDIR is too long for its sockets.

    train(faults, env): one process.
    """
    temporary = out / ("x" * 120)
    temporary.mkdir()
    (out / "fault.py").write_text(SLEEPS.format(owner=owner))
    env = {"HANGPROOF_DATALOADER_TIMEOUT_S": "4", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60"}
    env |= {"HANGPROOF_HEARTBEAT": str(out / "hb"), "TMPDIR": str(temporary)}
    result = train(f"{module}={out / 'fault.py'}", env)
    assert f"hangproof: TMPDIR ({temporary}) is too long" in result.log
    assert "HANG " in result.log, result.log[-3000:]
    waited = r"hangproof: (waited 4 s for batch \d+ of the data loader from worker \d \(pid (\d+)\))"
    found = re.search(waited, result.log)
    assert found and f"pid {found[2]}" in result.log.split("HANG ")[1].splitlines()[0], (
        "the worker that sleeps is named"
    )
    (beat,) = heartbeat.read_all(out / "hb")
    assert beat.outcome == "deadline" and beat.note == found[1] and beat.phase in ("first_step", "step")


def test_a_worker_of_sd_scripts_that_sleeps(work, tmp_path):
    def train(faults, env):
        changed = {"max_train_epochs": "1", "max_data_loader_n_workers": "1"}
        return resume_helpers.train(work, tmp_path, faults=faults, env=env, code=75, **changed)

    fell_asleep(tmp_path, train, tiny_sd_scripts.home("BaseDataset"), "BaseDataset")


def test_a_worker_of_musubi_tuner_that_sleeps(musubi, tmp_path):
    def train(faults, env):
        changed = {"max_train_epochs": "1", "max_data_loader_n_workers": "1"}
        return musubi_helpers.train(tmp_path, env={**env, "TINY_FAULTS": faults}, code=75, **changed)

    tiny_musubi.cached(tiny_musubi.workdir(), tmp_path)
    fell_asleep(tmp_path, train, "musubi_tuner.dataset.bucket", "BucketBatchManager")
