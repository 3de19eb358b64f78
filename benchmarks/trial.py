"""A training under a supervisor, from outside: the toy's run, its environment, its processes, and what its files say.

Decision: every process of a trial carries a token in its environment. At the end that shows whether anything is left,
whichever process started it and in whatever session.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from guards import gate
from monitor.process import platform, spawned
from monitor.process.platform import ProcessInfo
from runs.paths import ROOT

TOKEN = "HANGPROOF_SCENARIO"
SPEC: dict[str, Any] = {"trigger": "d1sc", "model": "tiny-flux", "backend": "diffusers", "tier": "16G"}
SPEC |= {"repeats": 1, "save_every_n_epochs": 0, "workers": 0}
STEP_S = 0.05


@dataclass
class Job:
    """A supervisor's command, its log, its extra environment, and where it starts (default: beside its output)."""

    command: list[str]
    log: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None


_environment = threading.RLock()


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without our variables and those of trials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TOY_", "TINY_", "PYTHONPATH"))}
    return {**kept, **more}


@contextlib.contextmanager
def data_root(data: Path) -> Iterator[None]:
    """`runs` uses this data root inside the block; one at a time, because the environment belongs to the process."""
    with _environment, mock.patch.dict(os.environ, HANGPROOF_DATA=str(data)):
        yield


def photos(folder: Path, number: int = 6, size: int = 64) -> Path:
    """Small pictures with captions, the same on every machine. size: of the first one, in pixels."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for i in range(number):
        height, width = ((size, size), (size * 3 // 2, size), (size, size * 3 // 2))[i % 3]
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"d1sc, number {i}\n", encoding="utf-8")
    return folder


def create(data: Path, number: int = 6, size: int = 64, **fields: Any) -> Path:
    """A run made as a user makes one, in data root `data`; its folder. number, size: of its pictures."""
    import runs

    with data_root(data), tempfile.TemporaryDirectory() as pictures:
        return runs.create(runs.make({**SPEC, **fields}), photos(Path(pictures), number, size))


def make_toy(data: Path, steps: int, every: int, size: int = 64, **fields: Any) -> Path:
    """A run named toy, of one picture; its folder."""
    lengths = {"max_train_steps": steps, "save_every_n_steps": every}
    return create(data, 1, size, **{"name": "toy", **lengths, **fields})


def toy_launcher(folder: Path) -> str:
    """The program that runs the toy in place of the trainer, for `$TRAINER_PYTHON`."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = folder / "accelerate"
    loop = ROOT / "benchmarks" / "toy_loop.py"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{loop}" "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    return str(launcher)


def ours(work: Path, steps: int, every: int, limits: str = "") -> Job:
    """The toy's run under our monitor. limits: the text of a limits file."""
    folder = make_toy(work, steps, every)
    environment = {"TRAINER_PYTHON": toy_launcher(work), "HANGPROOF_DATA": str(work)}
    if limits:
        (work / "limits.toml").write_text(limits, encoding="utf-8")
        environment["HANGPROOF_LIMITS"] = str(work / "limits.toml")
    return Job([sys.executable, "-m", "monitor", "run", str(folder)], work / "log", folder, environment, ROOT)


def toy_environment(work: Path, faults: str = "", step_s: float = STEP_S) -> dict[str, str]:
    """The variables of `toy_loop.py`, and a folder for temporary files (sockets, locks) of this run alone."""
    for name in ("tmp", "injected"):
        (work / name).mkdir()
    return {
        "TOY_LEDGER": str(work / "ledger.jsonl"),
        "TOY_FAULTS": faults,
        "TOY_FAULTS_DONE": str(work / "injected"),
        "TOY_STEP_S": str(step_s),
        "TMPDIR": str(work / "tmp"),
    }


@contextlib.contextmanager
def started(job: Job, environment: dict[str, str], token: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """The job's process, in a session of its own; its output goes to the job's log. Afterwards nothing of it lives."""
    job.folder.mkdir(parents=True, exist_ok=True)
    token = token or secrets.token_hex(8)
    fixed = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", TOKEN: token}
    env = clean_environment(**{**fixed, **environment, **job.environment})
    with open(job.log, "ab") as log:
        process = subprocess.Popen(
            job.command, cwd=job.cwd or job.folder.parent, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        kill_all(token)


def living(token: str) -> dict[int, str]:
    """Living processes with this token: pid -> command line."""
    return {one.pid: platform.command_of(one.pid) for one in spawned.with_environment(TOKEN, token)}


def waits(pid: int) -> bool:
    """Whether it is a standby attempt before its gate, so no trainer yet; or just ends: its environment is empty."""
    found = platform.environ_of(pid)
    folder = Path(found.get(gate.FOLDER, ""))
    return not found or (gate.VARIABLE in found and not (folder / gate.PASSED).exists())


def kill_all(token: str, meanwhile: Callable[[], None] = lambda: None, timeout_s: float = 20.0) -> list[ProcessInfo]:
    """Kill every process with this token; those that did not die. meanwhile: lets them die, called after each kill."""
    until_s = time.monotonic() + timeout_s
    while True:
        left = spawned.with_environment(TOKEN, token)
        for one in left:
            with contextlib.suppress(OSError):
                platform.send(one.pid, one.start, signal.SIGKILL)
        meanwhile()
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.05)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, [] without one; a last line that is still being written is left out."""
    if not path.exists():
        return []
    found = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in found if line.endswith("\n")]


def read_end(path: Path, characters: int = 3000) -> str:
    """The last characters of a text file; "" without one."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")[-characters:]
    return ""


def limits_toml(table: dict[str, Any], within: str = "") -> str:
    """A limits file. `table`: sections, one within another, whose leaves are numbers."""
    return "".join(
        limits_toml(value, f"{within}{name}.") if isinstance(value, dict) else f"{within}{name} = {value}\n"
        for name, value in table.items()
    )
