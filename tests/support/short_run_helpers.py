"""Shared by the tests of rehearsal and drill: a tiny run, what is on the disk, what still runs."""

import json
from pathlib import Path

import pytest
from monitor_helpers import wait_for
from queue_helpers import processes
from runs_helpers import PROJECT, picture, python

import runs

TINY = {
    "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "mixed_precision": "no", "workers": 0,
    "trigger": "ohwx", "prompts": ["ohwx, a ball"], "sample_steps": 1, "rank": 4,
    "sample_every_n_steps": None,
}  # fmt: skip


@pytest.fixture
def one_cpu(monkeypatch):
    """No GPU, and one thread: a tiny model is slower with several."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def tiny_run(data: Path, images: int = 3, **fields) -> Path:
    """A run of the tiny model with so many images; its folder."""
    pictures = data.parent / "pictures"
    for number in range(images):
        picture(pictures / f"photo{number:03d}.png", (96, 64 if number % 2 else 96))
    return runs.create(runs.make({"name": "tiny", **TINY, **fields}), pictures)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def nothing_runs(data: Path) -> bool:
    """Whether no process of this data folder is alive, within some seconds."""
    return bool(wait_for(lambda: not processes(data), 15, "the end of its processes"))


def launched(tool: str, folder: Path | str, *words: str, **environment: str) -> tuple[int, dict, str]:
    """`python -m launch TOOL FOLDER --json WORDS`: the exit code, what its last line says, and all of its output."""
    done = python("-m", "launch", tool, str(folder), "--json", *words, timeout=500, **environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def states(found: dict) -> dict[str, str]:
    """The stages of a rehearsal, and how far each came."""
    return {stage["key"]: stage["state"] for stage in found["stages"]}


HANGS = {  # stage of a rehearsal: the phase and the step
    "load": ("load", "0"),
    "cache": ("cache_latents", "0"),
    "train": ("step", "1"),
    "sample": ("sample", "2"),
    "save": ("save", "2"),
    "resume": ("step", "3"),
}


def hang_at(monkeypatch: pytest.MonkeyPatch, phase: str, step: str = "0", **more: str) -> None:
    """The trainings from now on hang there. `more`: other variables of benchmarks/injector.py."""
    values = {"INJECT": "benchmarks.injector:fire", "FAULT": "step_sleeps", "FAULT_PHASE": phase, "FAULT_STEP": step}
    for name, value in (values | more).items():
        monkeypatch.setenv(f"HANGPROOF_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))


def hang_in(stage: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearse a run that hangs in this stage: it fails there, says so, and leaves nothing."""
    from dataclasses import asdict

    from launch import rehearse

    hang_at(monkeypatch, *HANGS[stage], FAULT_EVERY="1" if stage == "resume" else "0")
    monkeypatch.setattr(rehearse, "STALLED_S", 3.0)
    found = asdict(rehearse.rehearse(tiny_run(data)))
    assert (found["state"], states(found)[stage]) == (rehearse.FAILED, rehearse.FAILED), found
    order = list(states(found))
    assert {states(found)[later] for later in order[order.index(stage) + 1 :]} <= {rehearse.SKIPPED}
    assert found["problem"]["stage"] == rehearse.STAGES[stage][0] and "step_sleeps" in found["problem"]["text"], found
    assert nothing_runs(data) and not (data / rehearse.SCRATCH).exists()


def drilled(data: Path) -> None:
    """A drill freezes, recovers, finishes, and leaves nothing but its run."""
    code, found, said = launched("drill", "--json")
    assert code == 0, said[-5000:]
    shown = [said.index(f"\n{word}: ") for word in ("Detected", "Killed", "Restarted", "Trains on")]
    assert found["state"] == "completed" and shown == sorted(shown) and found["recover_s"] > found["detect_s"] > 0
    assert (found["restarts"], found["steps"], found["loads_in_diffusers"]) == (1, found["planned_steps"], True)
    incident = json.loads(Path(found["folder"], "incidents", "0001", "incident.json").read_text())
    assert incident["cause"] == "worker_stuck" and nothing_runs(data)
