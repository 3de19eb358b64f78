"""One row of the fault matrix, ready to run: its data root, its run, its monitor, and what both show from outside.

Decision: the undisturbed run that a disturbed one must equal, bit for bit, is made by the command that a user would
run (`bash train.sh`), with no monitor, no injector and no pace, once a process for each seed and length. Its caches
and its model are copied into each scenario, so that a disturbed run starts in five seconds instead of eight; rows
that test the caching start without them.

Everything of a scenario is removed even when the process that plays it is killed: another process, in its own
session, reads its standard input to the end, which comes with the scenario's or the player's. Then it unfreezes the
file system, kills every process that carries the token, unmounts and deletes. A file system that stays frozen would
hang `sync` for all.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import trial
from benchmarks.injector import WRITERS
from benchmarks.trial import (
    FINAL,
    TOKEN,
    Job,
    clean_environment,
    kill_all,
    limits_toml,
    living,
    read_end,
    read_lines,
    read_object,
    started,
    waits,
)
from runs.paths import ROOT

PACE_S = 0.05
SHIMS = ROOT / "tests/support/shims"
NAME = "fault"
RUN_S = 900.0
SPEC: dict[str, Any] = {
    **trial.SPEC,
    "name": NAME,
    "resolution": 64,
    "mixed_precision": "no",
    "max_train_steps": 36,
    "save_every_n_steps": 10,
    "keep_states": 4,
}
# Settings that do not change a bit of the LoRA: a row that changes them needs no reference of its own.
BITLESS = {
    "save_dir",
    "workers",
    "save_every_n_steps",
    "keep_states",
    "prompts",
    "sample_every_n_steps",
    "sample_steps",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """`data` is the data root of the undisturbed run; `sha256` that of its LoRA."""

    data: Path
    sha256: str
    steps: int


def environment(data: Path, **more: str) -> dict[str, str]:
    """The environment of a process of the matrix: its own data root, the CPU, none of our variables inherited."""
    fixed = {
        "HANGPROOF_DATA": str(data),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return clean_environment(**{**fixed, "PYTHONPATH": str(ROOT), **more})


def create(data: Path, seed: int, changed: dict[str, Any]) -> Path:
    """Make the run in data root `data`; its folder."""
    return trial.create(data, **{**SPEC, "seed": seed, **changed})


_making = threading.Lock()


def reference(seed: int, changed: dict[str, Any]) -> Reference:
    """The undisturbed run of this seed, made when it is needed first. RuntimeError with its log when it fails."""
    with _making:
        return _undisturbed(seed, tuple(sorted((k, v) for k, v in changed.items() if k not in BITLESS)))


@functools.cache
def _undisturbed(seed: int, changed: tuple[tuple[str, Any], ...]) -> Reference:
    data = Path(tempfile.mkdtemp(prefix="undisturbed-"))
    atexit.register(shutil.rmtree, data, ignore_errors=True)
    run = create(data, seed, dict(changed))
    (data / "tmp").mkdir()
    job = Job(["bash", str(run / "train.sh")], data / "log", run, environment(data, TMPDIR=str(data / "tmp")))
    code = -1
    with started(job, {}) as process, contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(RUN_S)
    lora = run / f"{NAME}.safetensors"
    if code or not lora.exists():
        why = f"exit code {code}; -1: not over after {RUN_S:.0f} s"
        raise RuntimeError(f"the undisturbed run failed ({why}):\n{read_end(data / 'log')}")
    return Reference(data, sha256(lora), {**SPEC, **dict(changed)}["max_train_steps"])


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def copy_caches(data: Path, made: Reference, cached: bool) -> None:
    """Copy the reference's model, and with `cached` its data set's caches, into a new data root."""
    shutil.copytree(made.data / "models", data / "models")
    if cached:
        for source in made.data.glob(f"datasets/{NAME}/.*-cache"):
            shutil.copytree(source, data / "datasets" / NAME / source.name)


class Mismatch(AssertionError):
    """The scenario did not go as its row requires; the message says what was seen."""


class Scenario:
    """Made by `prepare`. `row` is the fault's row of the table, `codes` has the exit codes of the monitors."""

    slack_s = 0.0  # what a busy machine may add to the seconds that the row requires

    @classmethod
    def undisturbed(cls, row: Row, seed: int) -> Reference:
        """The run that this one must equal."""
        return reference(seed, row.get("spec", {}))

    def __init__(
        self, row: Row, seed: int, made: Reference, token: str, root: Path, scratch: Path, disk: Path | None = None
    ):
        self.row, self.seed, self.root, self.reference = row, seed, root, made
        self.scratch = scratch  # for temporary files of all its processes
        self.data = disk or root / "data"
        self.token = token
        self.codes: list[int] = []
        self.monitors: list[subprocess.Popen[bytes]] = []
        self.writers = root / "writers"  # what injector.claim keeps
        self.writers.mkdir()
        self.folder = self.new_run(self.data)
        self.environment = self.prepare_environment()

    def new_run(self, data: Path) -> Path:
        """A run as the row describes it, in data root `data`; its folder."""
        data.mkdir(exist_ok=True)
        spec = {key: self._filled(value) for key, value in self.row.get("spec", {}).items()}
        folder = create(data, self.seed, spec)
        copy_caches(data, self.reference, cached=not self.row.get("cold", False))
        if "script" in self.row:
            _edit(folder / "train.sh", self._filled(self.row["script"]))
        return folder

    def _filled(self, value: Any) -> Any:
        return (
            value.replace("{root}", str(self.root)).replace("{python}", sys.executable)
            if isinstance(value, str)
            else value
        )

    def prepare_environment(self) -> dict[str, str]:
        """The monitor's environment: the injector and its fault, shims, tighter limits where the row has some."""
        more = {
            TOKEN: self.token,
            "TMPDIR": str(self.scratch),
            "HANGPROOF_INJECT": "benchmarks.injector:fire",
            WRITERS: str(self.writers),
            "HANGPROOF_PACE_S": str(PACE_S),
            **{name: self._filled(str(value)) for name, value in self.row.get("env", {}).items()},
        }
        inject = self.row.get("inject", {})
        if inject:
            more["HANGPROOF_FAULT"] = inject["fault"]
            more["HANGPROOF_FAULT_STEP"] = str(fault_step(self.row, self.seed))
            more["HANGPROOF_FAULT_PHASE"] = inject.get("phase", "step")
            more["HANGPROOF_FAULT_EVERY"] = "1" if inject.get("every") else "0"
            more["HANGPROOF_FAULT_ARG"] = self._filled(str(inject.get("arg", self.seed)))
        if "slow" in self.row:
            more["HANGPROOF_SLOW"] = f"{self.row['slow']['from']}:{self.row['slow']['s']}:{self.root / 'go'}"
        if "limits" in self.row:
            path = self.root / "limits.toml"
            path.write_text(limits_toml(self.row["limits"]), encoding="utf-8")
            more["HANGPROOF_LIMITS"] = str(path)
        made = environment(self.data, **more)
        if "shm" in self.row:
            made["HANGPROOF_SHM"] = str(self.root / "shm")
        if "shim" in self.row:
            made["PYTHONPATH"] = f"{SHIMS / self.row['shim']}{os.pathsep}{made['PYTHONPATH']}"
        return made

    # ---- doing ----

    def monitor(
        self, *words: str, folder: Path | None = None, python: str = sys.executable, **more: Any
    ) -> subprocess.Popen[bytes]:
        """Start `python -m monitor WORDS FOLDER`; its output goes to monitor-N.txt. `more` is for Popen."""
        command = [python, "-m", "monitor", *(words or ("run",)), str(folder or self.folder)]
        environment = more.pop("env", self.environment)
        with open(self.root / f"monitor-{len(self.monitors) + 1}.txt", "wb") as out:
            more = {"stdout": out, "stderr": out, **more}
            popen = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **more
            )
        self.monitors.append(popen)
        return popen

    def kill_monitor(self, popen: subprocess.Popen[bytes]) -> None:
        """SIGKILL the keeper and the monitor below it, in this order: nothing is left that replaces the monitor."""
        below = self.status().get("monitor_pid")
        popen.kill()
        popen.wait()
        if below != popen.pid and below in self.ours():
            os.kill(below, signal.SIGKILL)
            self.until("the end of the killed monitor", lambda: below not in self.ours())

    def finish(self, popen: subprocess.Popen[bytes], patience_s: float | None = None) -> int:
        """Wait for a monitor to end by itself; its exit code."""
        patience_s = patience_s or self.row.get("patience_s", 400.0)
        try:
            code = popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            status = self.status()
            raise Mismatch(
                f"the monitor had not ended after {patience_s:.0f} s: state {status.get('state')}, "
                f"step {status.get('step')}, {status.get('message')!r}"
            ) from None
        self.codes.append(code)
        return code

    def until(self, what: str, met: Callable[[], Any], patience_s: float = 240.0) -> Any:
        """Wait until `met()` is true; its value. `what` completes "waited for". Mismatch: the run ended first."""
        deadline = time.monotonic() + patience_s
        while True:
            ended = self.status().get("state") in FINAL  # read first: the condition may come true with the end
            if value := met():
                return value
            if ended or time.monotonic() > deadline:
                now = self.status()
                raise Mismatch(f"waited for {what}, and the run is {now.get('state')}: {now.get('message')!r}")
            time.sleep(0.05)

    def until_ready(self, but: int = 0) -> int:
        """Wait until a standby waits at its gate, another one than process `but`; its shell's process number."""

        def ready() -> int:
            standby = self.status().get("standby") or {}
            return int(standby["pid"]) if standby.get("state") == "ready" and standby.get("pid") != but else 0

        return int(self.until("a standby attempt that is ready", ready))

    def go(self) -> None:
        """The action has done its part: the row's `slow` steps end."""
        (self.root / "go").touch()

    def until_step(self, step: int) -> None:
        """Wait until that step is complete (in metrics.jsonl, which the trainer itself writes)."""
        self.until(f"step {step}", lambda: self.steps() and self.steps()[-1]["step"] >= step)

    # ---- seeing ----

    def compare(self) -> list[str]:
        """What else of this kind of scenario is not as it should be."""
        return []

    def status(self) -> dict[str, Any]:
        return read_object(self.folder / "status.json")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = read_lines(self.folder / "events.jsonl")
        return [event for event in found if kind in (None, event["kind"])]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / "metrics.jsonl") if line["kind"] == "step"]

    def incidents(self) -> list[dict[str, Any]]:
        return [i for p in sorted(self.folder.glob("incidents/*/incident.json")) if (i := read_object(p))]

    def reports(self) -> list[str]:
        return [p.read_text(encoding="utf-8") for p in sorted(self.folder.glob("incidents/*/report.md"))]

    def ours(self) -> dict[int, str]:
        """Living processes of this scenario: pid -> command line."""
        return living(self.token)

    def used(self, stand_in: str) -> bool:
        """Whether this stand-in (of NVML, of py-spy) was called. It leaves a file."""
        return (self.root / f"{stand_in}-used").exists()

    def trainers(self) -> list[int]:
        """Living training processes: `python -m trainer` and what it forked, no launcher, none at the gate."""
        return [pid for pid in self._trainers() if not waits(pid)]

    def standbys(self) -> list[int]:
        """Processes like those that wait at the gate, or are on their way to it."""
        return [pid for pid in self._trainers() if waits(pid)]

    def _trainers(self) -> list[int]:
        return [pid for pid, line in self.ours().items() if " trainer " in f"{line} " and "launch" not in line]


def fault_step(row: Row, seed: int) -> int:
    """The step at which the row's fault occurs, drawn from the row's range by its name and the seed."""
    return random.Random(f"{row['name']}/{seed}").randint(*row["inject"]["step"])


def _edit(script: Path, added: str) -> None:
    """Put these lines before the script's launch of the trainer."""
    lines = script.read_text(encoding="utf-8").splitlines()
    starts = ('"$python" ', '"$launcher" ')  # the last of them trains; others before it encode images and captions
    found = [i for i, line in enumerate(lines) if line.removeprefix("exec ").startswith(starts)]
    if not found:
        raise AssertionError(f"{script} has no line that launches the trainer")
    at = found[-1]
    script.write_text("\n".join([*lines[:at], *added.splitlines(), *lines[at:]]) + "\n", encoding="utf-8")


@contextlib.contextmanager
def prepare(row: Row, seed: int, keep: Path | None = None, kind: type[Scenario] = Scenario) -> Iterator[Scenario]:
    """A scenario for this row. Afterwards its processes are dead, and its folder is deleted unless it is in `keep`.

    OSError: `keep` cannot be written.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        keep = keep.resolve()
    made, token = kind.undisturbed(row, seed), secrets.token_hex(8)
    root = Path(tempfile.mkdtemp(prefix=f"{row['name']}-" if keep else f"fault-{row['name']}-", dir=keep))
    # Short and of its own: the loader's workers make sockets there, and a socket's path has at most 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="fault-"))
    command = [
        sys.executable,
        "-m",
        "benchmarks.scenario",
        token,
        str(root),
        str(scratch),
        *([] if keep else [str(root)]),
    ]
    cleanup = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    disk = None
    try:
        if "shm" in row:
            mount(root / "shm", "-t", "tmpfs", "-o", f"size={row['shm']}", "tmpfs")
        if "tmpfs" in row:
            disk = mount(root / "disk", "-t", "tmpfs", "-o", f"size={row['tmpfs']}", "tmpfs")
        if row.get("frozen"):
            loop_disk(root / "frozen", 16 << 20)
        yield kind(row, seed, made, token, root, scratch, disk)
    finally:
        if keep and disk:
            kill_all(token)
            shutil.copytree(disk / "outputs", root / "data" / "outputs")
        cleanup.communicate()


def mount(at: Path, *what: str) -> Path:
    at.mkdir()
    run("mount", *what, str(at))
    return at


def loop_disk(at: Path, size_bytes: int) -> Path:
    """A disk of its own, mounted there: an ext4 in a sparse file."""
    image = at.with_suffix(".image")
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    run("mkfs.ext4", "-q", str(image))
    return mount(at, "-o", "loop", str(image))


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def unfreeze(frozen: Path) -> None:
    """Let a frozen file system take writes again; does nothing when it is not frozen."""
    run("fsfreeze", "--unfreeze", str(frozen), check=False)


def run(*command: str, check: bool = True) -> None:
    """Run a short command without its output. subprocess.CalledProcessError where `check` is set and it fails."""
    subprocess.run(command, check=check, capture_output=True, timeout=60)


def main(token: str, root: str, *folders: str) -> None:
    """Wait for the end of the scenario, or of the process that plays it, and remove what is left."""
    sys.stdin.buffer.read()
    frozen = Path(root) / "frozen"
    kill_all(token, functools.partial(unfreeze, frozen) if frozen.is_dir() else lambda: None)
    for at in (frozen, Path(root) / "disk", Path(root) / "shm"):
        if at.is_mount():
            run("umount", "--lazy", str(at), check=False)  # it goes away as soon as nobody uses it
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
