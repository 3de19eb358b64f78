"""One row of the fault matrix, ready to run: its data root, its run, its monitor, and what both show from outside.

Every process of a scenario carries `HANGPROOF_SCENARIO=<token>` in its environment. At the end that shows whether anything
is left, whichever process started it and in whatever session.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import checkout, injector_writer
from benchmarks import faults_reference as ref
from benchmarks.faults_cleanup import DONE, SCENARIO, kill_all, living, run, unmount
from benchmarks.faults_cleanup import start as start_cleanup
from guards import gate
from monitor.process import platform
from runs.paths import ROOT

PACE_S = 0.05
FINAL = ("completed", "failed", "stopped", "preempted", "unkillable")
SHIMS = ROOT / "benchmarks" / "shims"

Row = dict[str, Any]


class Mismatch(AssertionError):
    """The scenario did not go as its row requires; the message says what was seen."""


class Scenario:
    """Made by `prepare`. `row` is the fault's row of the table, `codes` the exit codes of the monitors that have ended."""

    slack_s = 0.0  # what a busy machine may add to the seconds that the row requires

    @classmethod
    def undisturbed(cls, row: Row, seed: int) -> ref.Reference:
        """The run that this one must equal."""
        return ref.reference(seed, row.get("spec", {}))

    def __init__(
        self,
        row: Row,
        seed: int,
        made: ref.Reference,
        token: str,
        root: Path,
        scratch: Path,
        disk: Path | None = None,
    ):
        self.row, self.seed, self.root, self.reference = row, seed, root, made
        self.scratch = scratch  # for temporary files of all its processes
        self.data = disk or root / "data"
        self.token = token
        self.codes: list[int] = []
        self.monitors: list[subprocess.Popen[bytes]] = []
        self.writers = root / "writers"  # what injector_writer.py keeps
        self.writers.mkdir()
        self.folder = self.new_run(self.data)
        self.environment = self.prepare_environment()

    def new_run(self, data: Path) -> Path:
        """A run as the row describes it, in data root `data`; its folder."""
        data.mkdir(exist_ok=True)
        spec = {key: self._filled(value) for key, value in self.row.get("spec", {}).items()}
        folder = ref.create(data, self.seed, spec)
        ref.copy_caches(data, self.reference, cached=not self.row.get("cold", False))
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
            SCENARIO: self.token,
            "TMPDIR": str(self.scratch),
            "HANGPROOF_INJECT": "benchmarks.injector:fire",
            injector_writer.VARIABLE: str(self.writers),
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
            path.write_text(checkout.limits_toml(dict(_sections(self.row["limits"]))), encoding="utf-8")
            more["HANGPROOF_LIMITS"] = str(path)
        environment = ref.environment(self.data, **more)
        if "shm" in self.row:
            environment["HANGPROOF_SHM"] = str(self.root / "shm")
        if "shim" in self.row:
            environment["PYTHONPATH"] = f"{SHIMS / self.row['shim']}{os.pathsep}{environment['PYTHONPATH']}"
        return environment

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
        """SIGKILL the keeper and the monitor below it, in this order: nothing is left that could replace the monitor."""
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
        """Wait until `met()` is true; its value. `what` completes the sentence "waited for". Mismatch: the run ended first."""
        deadline = time.monotonic() + patience_s
        while True:
            ended = self.status().get("state") in FINAL  # read first: the condition may come true with the end
            if value := met():
                return value
            if ended or time.monotonic() > deadline:
                now = self.status()
                raise Mismatch(f"waited for {what}, and the run is {now.get('state')}: {now.get('message')!r}")
            time.sleep(0.05)

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
        return _json(self.folder / "status.json") or {}

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = _lines(self.folder / "events.jsonl")
        return [event for event in found if kind in (None, event["kind"])]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in _lines(self.folder / "metrics.jsonl") if line["kind"] == "step"]

    def incidents(self) -> list[dict[str, Any]]:
        return [i for p in sorted(self.folder.glob("incidents/*/incident.json")) if (i := _json(p)) is not None]

    def reports(self) -> list[str]:
        return [p.read_text(encoding="utf-8") for p in sorted(self.folder.glob("incidents/*/report.md"))]

    def ours(self) -> dict[int, str]:
        """Living processes of this scenario: pid -> command line."""
        return living(self.token)

    def used(self, stand_in: str) -> bool:
        """Whether this stand-in (of NVML, of py-spy) was called. It leaves a file."""
        return (self.root / f"{stand_in}-used").exists()

    def trainers(self) -> list[int]:
        """Living training processes, without the launcher: `python -m trainer` and what it forked. Not those at the gate."""
        return [pid for pid in self._trainers() if not _waits(pid)]

    def standbys(self) -> list[int]:
        """Processes like those that wait at the gate, or are on their way to it."""
        return [pid for pid in self._trainers() if _waits(pid)]

    def _trainers(self) -> list[int]:
        return [pid for pid, line in self.ours().items() if " trainer " in f"{line} " and "launch" not in line]


def _waits(pid: int) -> bool:
    """Whether this process was started early and has not been released."""
    found = dict(word.partition(b"=")[::2] for word in platform.environ_of(pid).split(b"\0"))
    folder = Path(os.fsdecode(found.get(gate.FOLDER.encode(), b"")))
    return gate.VARIABLE.encode() in found and not (folder / gate.PASSED).exists()


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


def _sections(table: dict[str, Any], prefix: str = "") -> list[tuple[str, dict[str, float]]]:
    """Sections of a nested table whose leaves are numbers."""
    out, leaves = [], {k: v for k, v in table.items() if not isinstance(v, dict)}
    if leaves:
        out.append((prefix, leaves))
    for name, value in table.items():
        if isinstance(value, dict):
            out += _sections(value, f"{prefix}.{name}" if prefix else name)
    return out


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]


@contextlib.contextmanager
def prepare(row: Row, seed: int, keep: Path | None = None, kind: type[Scenario] = Scenario) -> Iterator[Scenario]:
    """A scenario for this row. Afterwards its processes are dead, and its folder is deleted unless it is in `keep`.

    OSError: `keep` cannot be written.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        keep = keep.resolve()
    made, token = kind.undisturbed(row, seed), secrets.token_hex(8)
    with contextlib.ExitStack() as after:  # what is put on it last is undone first
        root = Path(tempfile.mkdtemp(prefix=f"{row['name']}-" if keep else f"fault-{row['name']}-", dir=keep))
        # Short and of its own: the loader's workers make sockets there, and a socket's path has at most 107 bytes.
        scratch = Path(tempfile.mkdtemp(prefix="fault-"))
        folders = [scratch] if keep else [scratch, root]
        after.callback(start_cleanup(token, root, folders).communicate, DONE)
        for folder in folders:
            after.callback(shutil.rmtree, folder, True)
        disk, frozen = None, root / "frozen" if row.get("frozen") else None
        if "shm" in row:
            _mounted(root / "shm", ["-t", "tmpfs", "-o", f"size={row['shm']}", "tmpfs"], after)
        if "tmpfs" in row:
            disk = _mounted(root / "disk", ["-t", "tmpfs", "-o", f"size={row['tmpfs']}", "tmpfs"], after)
            if keep is not None:
                after.callback(shutil.copytree, disk / "outputs", root / "data" / "outputs")
        if frozen:
            image = root / "image"
            with open(image, "wb") as file:
                file.truncate(16 << 20)
            run("mkfs.ext4", "-q", str(image))
            _mounted(frozen, ["-o", "loop", str(image)], after)
        after.callback(kill_all, token, frozen)
        yield kind(row, seed, made, token, root, scratch, disk)


def _mounted(at: Path, what: list[str], after: contextlib.ExitStack) -> Path:
    at.mkdir()
    run("mount", *what, str(at))
    after.callback(unmount, at)
    return at


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
