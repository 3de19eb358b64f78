"""A loader worker that falls asleep in the middle of a real training: a guard ends the process and names what it waited for."""

import re

import pytest
import resume_helpers
import tiny_sd_scripts

from guards import heartbeat

SLEEPS = """
import os, time
original, read = module.BaseDataset.__getitem__, [0]
def __getitem__(self, index):
    read[0] += 1
    if read[0] == 4:
        os.write(1, f"HANG pid {os.getpid()}\\n".encode())
        time.sleep(3600)
    return original(self, index)
module.BaseDataset.__getitem__ = __getitem__
"""


@pytest.mark.journey
def test_a_worker_that_sleeps_over_its_fourth_batch_is_named(work, tmp_path):
    (tmp_path / "fault.py").write_text(SLEEPS)
    env = {"HANGPROOF_DATALOADER_TIMEOUT_S": "4", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60"}
    env["HANGPROOF_HEARTBEAT"] = str(tmp_path / "hb")
    faults = f"{tiny_sd_scripts.home('BaseDataset')}={tmp_path / 'fault.py'}"
    changed = {"max_train_epochs": "1", "max_data_loader_n_workers": "1"}
    result = resume_helpers.train(work, tmp_path, faults=faults, env=env, code=75, **changed)
    waited = r"hangproof: (waited 4 s for batch \d+ of the data loader from worker \d \(pid (\d+)\))"
    found = re.search(waited, result.log)
    assert found and f"HANG pid {found[2]}\n" in result.log, result.log[-3000:]
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert beat.outcome == "deadline" and beat.note == found[1] and beat.phase in ("first_step", "step")
