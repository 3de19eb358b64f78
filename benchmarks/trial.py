"""A training under a supervisor, from outside: the toy's run, its environment, its processes, and what its files say.

Decision: every process of a trial carries a token in its environment. At the end that shows whether anything is left,
whichever process started it and in whatever session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards import gate
from monitor.process import platform
from runs.paths import ROOT

TOKEN = "HANGPROOF_SCENARIO"
TOY: dict[str, Any] = {
    "name": "toy",
    "trigger": "toy",
    "model": "tiny-flux",
    "backend": "diffusers",
    "tier": "16G",
    "repeats": 1,
    "save_every_n_epochs": 0,
    "workers": 0,
}
# In the checkout's own process: one of another commit knows other fields.
MAKE_RUN = """
import json, sys
import runs
from pathlib import Path
print(runs.create(runs.make(json.loads(sys.argv[1])), Path(sys.argv[2])))
"""


@dataclass
class Job:
    """A supervisor's command, its log, its extra environment, and where it starts (default: beside its output)."""

    command: list[str]
    log: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without our variables and those of trials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TOY_", "TINY_", "PYTHONPATH"))}
    return {**kept, **more}


def make_toy(data: Path, steps: int, every: int, root: Path = ROOT, size: int = 64, **fields: Any) -> Path:
    """A run of the toy made as a user makes one, in data root `data`; its folder. root: the checkout that makes it.

    size: of its image, in pixels.
    """
    from PIL import Image

    photos = data / "photos"
    photos.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size)).save(photos / "0.png")
    values = {**TOY, "max_train_steps": steps, "save_every_n_steps": every, **fields}
    command = [sys.executable, "-c", MAKE_RUN, json.dumps(values), str(photos)]
    env = {**os.environ, "HANGPROOF_DATA": str(data)}
    made = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return Path(made.stdout.splitlines()[-1])


def toy_launcher(folder: Path, root: Path = ROOT) -> str:
    """The program that runs the checkout's toy in place of the trainer, for `$TRAINER_PYTHON`."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = folder / "accelerate"
    loop = root / "benchmarks" / "toy_loop.py"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{loop}" "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    return str(launcher)


def ours(work: Path, steps: int, every: int, root: Path = ROOT, limits: str = "") -> Job:
    """The toy's run under our monitor. root: the checkout of both. limits: the text of a limits file."""
    folder, launcher = make_toy(work, steps, every, root), toy_launcher(work, root)
    # An earlier checkout starts it by the second variable.
    environment = {"TRAINER_PYTHON": launcher, "ACCELERATE": launcher, "HANGPROOF_DATA": str(work)}
    if limits:
        (work / "limits.toml").write_text(limits, encoding="utf-8")
        environment["HANGPROOF_LIMITS"] = str(work / "limits.toml")
    return Job([sys.executable, "-m", "monitor", "run", str(folder)], work / "log", folder, environment, root)


def begin(job: Job, environment: dict[str, str], token: str) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; its output goes to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    env = clean_environment(
        PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1", **{TOKEN: token, **environment, **job.environment}
    )
    with open(job.log, "ab") as log:
        return subprocess.Popen(
            job.command, cwd=job.cwd or job.folder.parent, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill what is left of it: its process group, then every process with the token."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    kill_all(token)


def living(token: str) -> dict[int, str]:
    """Living processes with this token: pid -> command line."""
    needle, found = f"{TOKEN}={token}".encode(), {}
    for pid, process in platform.scan().items():
        if not process.dead and needle in platform.environ_of(pid).split(b"\0"):
            found[pid] = platform.command_of(pid)
    return found


def variables_of(pid: int) -> dict[bytes, bytes]:
    """The environment of a process, {} when it is gone."""
    return dict(word.partition(b"=")[::2] for word in platform.environ_of(pid).split(b"\0"))


def waits(pid: int) -> bool:
    """Whether it is a standby attempt that has not passed the gate: it has imported a trainer and is none yet."""
    found = variables_of(pid)
    folder = Path(os.fsdecode(found.get(gate.FOLDER.encode(), b"")))
    return gate.VARIABLE.encode() in found and not (folder / gate.PASSED).exists()


def kill_all(token: str, meanwhile: Callable[[], None] = lambda: None, timeout_s: float = 20.0) -> dict[int, str]:
    """Kill every process with this token; those that did not die. meanwhile: lets them die, called after each kill."""
    until_s = time.monotonic() + timeout_s
    while True:
        left = living(token)
        for pid in left:
            if (found := platform.process_info(pid)) is not None:
                with contextlib.suppress(OSError):
                    platform.send(pid, found.start, signal.SIGKILL)
        meanwhile()
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.05)


def with_pids(pids: list[int]) -> list[subprocess.Popen[bytes]]:
    """Innocent processes that sleep, with these pids of dead ones. Only root may choose."""
    innocent = []
    for pid in pids:
        for _ in range(100):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            popen = subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL)
            if popen.pid == pid:
                innocent.append(popen)
                break
            popen.kill()
            popen.wait(10)
    return innocent


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when the file is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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


def limits_toml(table: dict[str, Any], section: str = "") -> str:
    """A limits file. `table`: sections, one within another, whose leaves are numbers."""
    leaves = "".join(f"{key} = {value}\n" for key, value in table.items() if not isinstance(value, dict))
    text = f"[{section}]\n{leaves}" if leaves and section else leaves
    for name, value in table.items():
        if isinstance(value, dict):
            text += limits_toml(value, f"{section}.{name}" if section else name)
    return text
