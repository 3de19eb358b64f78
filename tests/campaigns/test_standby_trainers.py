"""The three real trainers at the gate: a killed training goes on in the standby attempt, with the losses of the undisturbed one.

How much sooner than without it is in `python -m benchmarks goodput`.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import faults_sd_scripts
import machines
import musubi_helpers
import pytest
import tiny_musubi
import tiny_sd_scripts
from monitor_helpers import events, wait_for
from run_facts import members, status
from runs_helpers import PROJECT

from benchmarks import trial
from benchmarks.trial import Job, read_end
from monitor.process import platform

pytestmark = [pytest.mark.skipif(not platform.LINUX, reason="the standby attempt needs Linux")]
STEPS, EVERY = 24, 3
LIMIT_S = 900
PACE = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_GPUS": ""}
SLOW_S = 20  # from the fifth step on, until the standby waits, however long that takes on a busy machine
SLOW_FROM = 5  # after the checkpoint of step 3; the monitor does not know yet how long a step takes
FIELDS = {"max_train_steps": STEPS, "save_every_n_steps": EVERY, "sample_every_n_steps": 0, "resolution": 64}


def built_in(data: Path, name: str) -> tuple[Path, dict[str, str]]:
    tiny = machines.tiny(STEPS, EVERY)
    folder = tiny.create(data, {"name": name})
    return folder, tiny.environment(data)


def sd_scripts(data: Path, name: str) -> tuple[Path, dict[str, str]]:
    tiny_sd_scripts.need()
    return faults_sd_scripts.create(data, {**FIELDS, "name": name}), faults_sd_scripts.environment(data)


def musubi(data: Path, name: str) -> tuple[Path, dict[str, str]]:
    work = musubi_helpers.add_toy_z(data)
    return musubi_helpers.run_of(work, name, **FIELDS), tiny_musubi.environment(work)


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@contextlib.contextmanager
def monitored(folder: Path, env: dict[str, str], data: Path, limits: str) -> Iterator[Path]:
    """The run under a monitor. Yields the file that ends its slow steps; on leaving, waits for the run's end, which is success."""
    (data / "limits.toml").write_text(limits)
    hurry = data / f"{folder.name}.hurry"
    slow = {"HANGPROOF_SLOW": f"{SLOW_FROM}:{SLOW_S}:{hurry}", "HANGPROOF_LIMITS": str(data / "limits.toml")}
    command, log = [sys.executable, "-m", "monitor", "run", str(folder)], data / f"{folder.name}.log"
    job = Job(command, log, folder, {**env, **PACE, **slow, "HANGPROOF_DATA": str(data)}, PROJECT)
    with trial.started(job, {}) as process:
        yield hurry
        code = process.wait(LIMIT_S)
    assert code == 0, read_end(log)


def trained(folder: Path, env: dict[str, str], data: Path, killed: bool) -> None:
    with monitored(folder, env, data, "" if killed else "standby = false\n") as hurry:
        if killed:
            ready = lambda: (folder / "status.json").exists() and status(folder)["standby"]["state"] == "ready"  # noqa: E731
            wait_for(ready, LIMIT_S, "a standby")
            found = status(folder)
            print(f"{folder.name}: the standby waits with {found['standby']['memory_bytes'] / 1e6:.0f} MB")
            assert found["step"] < STEPS - 2
            os.kill(found["trainer_pids"][0], signal.SIGKILL)
        hurry.touch()
    assert not members(folder)


@pytest.mark.parametrize("trainer", [built_in, sd_scripts, musubi])
def test_the_losses_are_the_undisturbed_ones(tmp_path, monkeypatch, trainer):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    if trainer is musubi:
        monkeypatch.setenv("MUSUBI_DIR", str(tiny_musubi.checkout()))
    folders = {}
    for name, killed in (("killed", True), ("calm", False)):
        folders[name], env = trainer(tmp_path, name)
        trained(folders[name], env, tmp_path, killed)
    assert losses(folders["killed"]) == losses(folders["calm"]) and len(losses(folders["calm"])) == STEPS
    (restarted,) = events(folders["killed"], "restarted")
    assert "which had been started early" in restarted["message"]
    (incident,) = sorted(folders["killed"].glob("incidents/*/incident.json"))
    recover_s = json.loads(incident.read_text())["recover_s"]
    print(f"{trainer.__name__}: recovered in {recover_s:.1f} s")
