"""The three real trainers at the gate: a killed training goes on in the standby attempt, with the losses of the undisturbed one,
and sooner than a run without standby attempt and snapshots."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machines
import musubi_helpers
import pytest
import tiny_musubi
import tiny_sd_scripts
from monitor_helpers import events, members, status, wait_for
from runs_helpers import PROJECT, pictures, spec

import runs
from monitor.process import platform

pytestmark = [pytest.mark.skipif(not platform.LINUX, reason="the standby attempt needs Linux")]
STEPS, EVERY = 24, 3
LIMIT_S = 900
PACE = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_GPUS": ""}
SLOW_S = 20  # from the fifth step on, until the standby waits, however long that takes on a busy machine
SLOW_FROM = 5  # after the checkpoint of step 3; the monitor does not know yet how long a step takes
WITHOUT_BOTH = "standby = false\n[restart]\nsnapshots_bytes = 0\n"
SHARE = 0.35  # of the seconds without both
FIELDS = {"max_train_steps": STEPS, "save_every_n_steps": EVERY, "sample_every_n_steps": 0, "resolution": 64}


def built_in(data: Path, name: str) -> tuple[Path, dict[str, str]]:
    tiny = machines.tiny(STEPS, EVERY)
    folder = tiny.create(data, {"name": name})
    return folder, tiny.environment(data)


def sd_scripts(data: Path, name: str) -> tuple[Path, dict[str, str]]:
    tiny_sd_scripts.need()
    work = tiny_sd_scripts.workdir()
    (data / "in").mkdir(exist_ok=True, parents=True)
    names = (("pretrained_model_name_or_path", "flux"), ("clip_l", "clip_l"), ("t5xxl", "t5xxl"), ("ae", "ae"))
    paths = {flag: str(work / f"{file}.safetensors") for flag, file in names}
    extra = {**paths, "tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": 32}
    wanted = spec(name=name, backend="sd-scripts", tier="16G", extra=extra, **FIELDS)
    return runs.create(wanted, pictures(data / "in", 2)), tiny_sd_scripts.environment(work)


def musubi(data: Path, name: str) -> tuple[Path, dict[str, str]]:
    if tiny_musubi.why_not():
        pytest.skip(tiny_musubi.why_not())
    work = tiny_musubi.workdir()
    data.mkdir(exist_ok=True, parents=True)
    (data / "models.toml").write_text(musubi_helpers.MODELS_TOML.format(weights=(work / "dit.safetensors").as_posix()))
    fields = {**FIELDS, "name": name, "trigger": "ohwx", "model": "toy-z", "tier": "20G", "repeats": 1, "rank": 4}
    fields |= {"save_every_n_epochs": 0, "workers": 0, "extra": {"optimizer_type": "AdamW"}}
    return runs.create(runs.make(fields), work / "images"), tiny_musubi.environment(work)


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@contextlib.contextmanager
def monitored(folder: Path, env: dict[str, str], data: Path, limits: str) -> Iterator[Path]:
    """The run under a monitor. Yields the file that ends its slow steps; on leaving, waits for the run's end, which is success."""
    (data / "limits.toml").write_text(limits)
    hurry = data / f"{folder.name}.hurry"
    slow = {"HANGPROOF_SLOW": f"{SLOW_FROM}:{SLOW_S}:{hurry}", "HANGPROOF_LIMITS": str(data / "limits.toml")}
    text = data / f"{folder.name}.log"
    with open(text, "wb") as log:
        command = [sys.executable, "-m", "monitor", "run", str(folder)]
        env = {**env, **PACE, **slow, "HANGPROOF_DATA": str(data)}
        process = subprocess.Popen(command, env=env, cwd=PROJECT, stdout=log, stderr=log)
        try:
            yield hurry
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    assert code == 0, text.read_text(errors="replace")[-4000:]


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


def step_rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "step"]


def to_new_step_s(folder: Path, env: dict[str, str], data: Path, limits: str) -> float:
    """Seconds from a SIGKILL of the training to the end of the first step that is new."""

    def steady() -> bool:
        found = status(folder) if (folder / "status.json").exists() else {}
        ready = limits == WITHOUT_BOTH or found.get("standby", {}).get("state") == "ready"
        return ready and found.get("step", 0) >= SLOW_FROM - 1

    with monitored(folder, env, data, limits) as hurry:
        wait_for(steady, LIMIT_S, "a steady training")
        killed_s = time.monotonic()
        os.kill(status(folder)["trainer_pids"][0], signal.SIGKILL)
        hurry.touch()
    rows = step_rows(folder)
    best = max(row["step"] for row in rows if row["attempt"] == 1)
    found_s = min(row["mono_s"] for row in rows if row["attempt"] == 2 and row["step"] > best) - killed_s
    print(f"{folder.name}: {found_s:.2f} s, {len(rows) - STEPS} steps repeated")
    return found_s


@pytest.mark.parametrize("trainer", [built_in, sd_scripts, musubi])
def test_a_killed_training_is_back_sooner_than_without(tmp_path, monkeypatch, trainer):
    """In one run, one after the other, because how long it takes depends on the machine."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    if trainer is musubi:
        monkeypatch.setenv("MUSUBI_DIR", str(tiny_musubi.checkout()))
    took_s = {}
    for name, limits in (("with", ""), ("without", WITHOUT_BOTH)):
        folder, env = trainer(tmp_path, name)
        took_s[name] = to_new_step_s(folder, env, tmp_path, limits)
    share = took_s["with"] / took_s["without"]
    print(
        f"{trainer.__name__}: SIGKILL to a new step {took_s['with']:.2f} s, {took_s['without']:.2f} s without, {share:.2f} x"
    )
    assert share <= SHARE
