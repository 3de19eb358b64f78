"""A loader worker that falls asleep in the middle of a real training: a guard ends the process and names what it waited for."""

import re

import patches_helpers as helpers
import pytest
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


def fell_asleep(out, tiny, command, env, module: str, owner: str) -> None:
    """Train with a worker that sleeps over its fourth batch, and judge how it ends. TMPDIR is too long for its sockets."""
    temporary = out / ("x" * 120)
    temporary.mkdir()
    (out / "fault.py").write_text(SLEEPS.format(owner=owner))
    limits = {"HANGPROOF_DATALOADER_TIMEOUT_S": "4", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60"}
    faults = {"TINY_FAULTS": f"{module}={out / 'fault.py'}", "HANGPROOF_HEARTBEAT": str(out / "hb")}
    result = helpers.watch(command, {**env, **limits, **faults, "TMPDIR": str(temporary)}, tiny.checkout(), 120)
    assert f"hangproof: TMPDIR ({temporary}) is too long" in result.log
    assert result.code == 75 and "HANG " in result.log, result.log[-3000:]
    found = re.search(
        r"hangproof: (waited 4 s for batch \d+ of the data loader from worker \d \(pid (\d+)\))", result.log
    )
    assert found and f"pid {found[2]}" in result.log.split("HANG ")[1].splitlines()[0], (
        "the worker that sleeps is named"
    )
    (beat,) = heartbeat.read_all(out / "hb")
    assert beat.outcome == "deadline" and beat.note == found[1] and beat.phase in ("first_step", "step")


def test_a_worker_of_sd_scripts_that_sleeps(newest, tmp_path):
    work = tiny_sd_scripts.workdir()
    line = tiny_sd_scripts.arguments(work, tmp_path, max_train_epochs="1", max_data_loader_n_workers="1")
    env = tiny_sd_scripts.environment(work)
    home = tiny_sd_scripts.home("BaseDataset")
    fell_asleep(tmp_path, tiny_sd_scripts, tiny_sd_scripts.command(*line), env, home, "BaseDataset")


def test_a_worker_of_musubi_tuner_that_sleeps(musubi, tmp_path):
    work = tiny_musubi.workdir()
    config = tiny_musubi.cached(work, tmp_path)
    more = ["--max_train_epochs", "1"]
    line = tiny_musubi.arguments(work, config, tmp_path / "made", *more, max_data_loader_n_workers="1")
    command = tiny_musubi.command(tiny_musubi.trainer(), *line)
    module = "musubi_tuner.dataset.bucket"
    fell_asleep(tmp_path, tiny_musubi, command, tiny_musubi.environment(work), module, "BucketBatchManager")
