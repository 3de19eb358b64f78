"""How each contender of the goodput benchmark is started, and when it reported a hang.

Decision: every contender runs `toy_loop.py` by its own public command line, with its own way to a restart. Ours gets no
tuning at all. nvidia-resiliency-ext's ft_launcher, whose defaults detect a hang after 45 minutes, gets timeouts set by hand
for this loop. torchrun has nothing to tune: it only sees processes end.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks import cache, checkout
from runs.paths import ROOT

LOOP = checkout.toy_loop()
NVRX = "nvidia-resiliency-ext==0.4.1"
NVRX_NEEDS = ("defusedxml==0.7.1",)  # its other requirements are in the project's own environment
NVRX_TIMEOUT_S = 2.0
NVRX_CHECK_S = 0.5
RESTARTS = 100
INSTALL_S = 600.0
AGAINST = "against"


class NotMeasured(RuntimeError):
    """A contender that cannot run here; the message says why."""


@dataclass
class Job:
    """A contender's command, its extra environment, its log, and the folder it starts in (default: beside its output)."""

    command: list[str]
    log: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None


@dataclass(frozen=True)
class Contender:
    """`start(work, steps, every)` prepares a run; `noticed(job)` returns the wall-clock times at which hangs were declared."""

    name: str
    tuning: str
    start: Callable[[Path, int, int], Job]
    noticed: Callable[[Job], list[float]]
    version: Callable[[], str]


def _arguments(output: Path, steps: int, every: int) -> list[str]:
    return [
        *("--output_dir", str(output), "--output_name", "toy"),
        *("--max_train_steps", str(steps), "--save_every_n_steps", str(every)),
    ]


# In the checkout's own process: one of another commit knows other fields.
MAKE_RUN = """
import json, sys
import runs
from pathlib import Path
print(runs.create(runs.make(json.loads(sys.argv[1])), Path(sys.argv[2])))
"""


def ours(work: Path, steps: int, every: int, root: Path = ROOT, limits: str = "") -> Job:
    """A run made as a user makes one; only its trainer is the toy, by `$TRAINER_PYTHON`.

    root: the checkout that makes and runs it. limits: the text of a limits file; "" for none.
    """
    from PIL import Image

    photos = work / "photos"
    photos.mkdir()
    Image.new("RGB", (64, 64)).save(photos / "0.png")
    fields = {
        "name": "toy",
        "trigger": "toy",
        "model": "tiny-flux",
        "backend": "diffusers",
        "tier": "16G",
        "repeats": 1,
    }
    fields |= {"max_train_steps": steps, "save_every_n_steps": every, "save_every_n_epochs": 0, "workers": 0}
    made = subprocess.run(
        [sys.executable, "-c", MAKE_RUN, json.dumps(fields), str(photos)],
        cwd=root,
        env={**os.environ, "HANGPROOF_DATA": str(work)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    folder = Path(made.stdout.splitlines()[-1])
    launcher = work / "accelerate"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{checkout.toy_loop(root)}" "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    # An earlier checkout starts it by the second variable.
    environment = {"TRAINER_PYTHON": str(launcher), "ACCELERATE": str(launcher), "HANGPROOF_DATA": str(work)}
    if limits:
        (work / "limits.toml").write_text(limits, encoding="utf-8")
        environment["HANGPROOF_LIMITS"] = str(work / "limits.toml")
    command = [sys.executable, "-m", "monitor", "run", str(folder)]
    return Job(command, work / "contender.log", folder, environment, root)


def _ours_noticed(job: Job) -> list[float]:
    found = []
    for line in (job.folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "hang":
            found.append(datetime.fromisoformat(event["t"]).timestamp())
    return found


def torchrun(work: Path, steps: int, every: int) -> Job:
    """torch's own launcher: exit codes only."""
    command = [sys.executable, "-m", "torch.distributed.run", *_elastic(), str(LOOP)]
    return Job(command + _arguments(work / "output", steps, every), work / "contender.log", work / "output")


def _elastic() -> list[str]:
    return [
        *("--nnodes=1", "--nproc-per-node=1", f"--max-restarts={RESTARTS}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
    ]


def ft_launcher(work: Path, steps: int, every: int) -> Job:
    """nvidia-resiliency-ext, its timeouts set by hand for a loop of 50 ms steps."""
    python = nvrx_python()
    command = [str(python), "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", *_elastic()]
    command += [
        f"--ft-rank-heartbeat-timeout={NVRX_TIMEOUT_S}",
        f"--ft-workload-check-interval={NVRX_CHECK_S}",
        "--ft-initial-rank-heartbeat-timeout=60",
        "--ft-enable-nic-monitor=False",
        "--ignore-missing-fault-tol-cfg",
        str(LOOP),
    ]
    arguments = _arguments(work / "output", steps, every)
    return Job(command + arguments, work / "contender.log", work / "output", {"TOY_CLIENT": "nvrx"})


def _nvrx_noticed(job: Job) -> list[float]:
    found = []
    for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.match(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\].*FT timeout elapsed", line)
        if match:
            found.append(datetime.fromisoformat(match[1]).timestamp() + int(match[2]) / 1000)
    return found


def nvrx_folder() -> Path:
    """The folder of its environment."""
    return cache.folder(f"goodput-{NVRX.replace('==', '-')}-py{sys.version_info[0]}{sys.version_info[1]}")


def nvrx_python() -> Path:
    """The interpreter of its environment, made on first use. It uses the project's torch, so that both run the same one.

    Raises NotMeasured where it cannot be installed (it has wheels for Linux and some Python versions only).
    """
    folder = nvrx_folder()
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        print(f"goodput: installing {NVRX} into {folder} …", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", NVRX, *NVRX_NEEDS])
        (folder / ".complete").touch()
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    site = next(folder.glob("lib/python*/site-packages"))
    # At each use: the folder outlives the environment of the checkout that made it.
    (site / "project.pth").write_text(f"{Path(torch.origin).parent.parent}\n", encoding="utf-8")
    _run([str(python), "-c", "import nvidia_resiliency_ext.fault_tolerance.launcher"])
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(f"{NVRX} could not be installed: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip printed no reason"])[-1]
        raise NotMeasured(f"{NVRX} could not be installed: {last}")


def _torch_version() -> str:
    from importlib.metadata import version

    return f"torch {version('torch')}"


CONTENDERS = {
    c.name: c
    for c in (
        Contender("ours", "none", ours, _ours_noticed, lambda: "this checkout"),
        Contender("torchrun", "none: it sees processes end, not hang", torchrun, lambda _: [], _torch_version),
        Contender(
            "ft_launcher",
            f"by hand: heartbeat timeout {NVRX_TIMEOUT_S:g} s, checked every {NVRX_CHECK_S:g} s (its default: 2,700 s)",
            ft_launcher,
            _nvrx_noticed,
            lambda: NVRX,
        ),
    )
}


NO_STANDBY, NO_SNAPSHOTS = "standby = false\n", "[restart]\nsnapshots_bytes = 0\n"
PARTS = {
    name: Contender(
        name, f"without {what}", functools.partial(ours, limits=limits), _ours_noticed, lambda: "this checkout"
    )
    for name, what, limits in (
        ("no_standby", "the standby attempt", NO_STANDBY),
        ("no_snapshots", "snapshots in memory", NO_SNAPSHOTS),
        ("neither", "the standby attempt and snapshots in memory", NO_STANDBY + NO_SNAPSHOTS),
    )
}
"""Ours with a part of it turned off: what that part is worth."""


def another(root: Path) -> Contender:
    """The monitor of another checkout."""

    def version() -> str:
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        return done.stdout.strip() or str(root)

    return Contender(AGAINST, "none", functools.partial(ours, root=root), _ours_noticed, version)


def begin(job: Job, environment: dict[str, str]) -> subprocess.Popen:
    """Start the contender in a session of its own; its output goes to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TOY_"))}
    with open(job.log, "ab") as log:
        return subprocess.Popen(
            job.command,
            cwd=job.cwd or job.folder.parent,
            env={**clean, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **environment, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def finish(process: subprocess.Popen, token: str) -> None:
    """Kill what is left of a contender: its process group, then every process with the token in its environment."""
    import contextlib
    import signal

    from monitor.process import platform as processes

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    needle = f"TOY_RUN={token}".encode()
    for pid, found in processes.scan().items():
        if pid != os.getpid() and needle in processes.environ_of(pid).split(b"\0"):
            processes.send(pid, found.start, signal.SIGKILL)
    time.sleep(0.1)
