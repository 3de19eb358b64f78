"""One fault's stage: a data root of its own, a run in it, its monitor, and what can be seen of both from outside.

Everything that a scene starts carries `HANGPROOF_SCENE=<token>` in its environment, so that at the end it can be told
whether anything was left behind, by whoever and in whatever session.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import faults_reference as ref
from benchmarks.faults_guard import DONE, SCENE, living, run, set_up, strike, unmount
from runs.paths import ROOT

PACE_S = 0.05
FINAL = ("completed", "failed", "stopped", "preempted", "unkillable")


class Wrong(AssertionError):
    """The scene did not go as its row says; the message tells what was seen."""


class Scene:
    """Made by `stage`. `row` is the fault's row of the table, `codes` the exit codes of the monitors that have ended."""

    slack_s = 0.0  # what a busy machine may add to the seconds that the row promises

    @classmethod
    def undisturbed(cls, row: dict, seed: int) -> ref.Reference:
        """The run that this one must equal."""
        return ref.reference(seed, row.get("spec", {}))

    def __init__(
        self,
        row: dict,
        seed: int,
        made: ref.Reference,
        token: str,
        root: Path,
        scratch: Path,
        disk: Path | None = None,
    ):
        self.row, self.seed, self.root, self.reference = row, seed, root, made
        self.scratch = scratch  # for temporary files of everything it starts
        self.data = disk or root / "data"
        self.token = token
        self.codes: list[int] = []
        self.monitors: list[subprocess.Popen] = []
        self.folder = self.new_run(self.data)
        self.environment = self.prepare_environment()

    def new_run(self, data: Path) -> Path:
        """A run as the row wants it, in data root `data`; its folder."""
        data.mkdir(exist_ok=True)
        folder = ref.create(data, self.seed, self.row.get("spec", {}))
        ref.furnish(data, self.reference, cached=not self.row.get("cold", False))
        return folder

    def prepare_environment(self) -> dict[str, str]:
        """What the monitor is started with: the injector, what it is to do, tighter limits where the row has some."""
        more = {
            SCENE: self.token,
            "TMPDIR": str(self.scratch),
            "HANGPROOF_INJECT": "benchmarks.injector:fire",
            "HANGPROOF_PACE_S": str(PACE_S),
            **{name: str(value).replace("{root}", str(self.root)) for name, value in self.row.get("env", {}).items()},
        }
        inject = self.row.get("inject", {})
        if inject:
            more["HANGPROOF_FAULT"] = inject["fault"]
            more["HANGPROOF_FAULT_STEP"] = str(strikes_at(self.row, self.seed))
            more["HANGPROOF_FAULT_PHASE"] = inject.get("phase", "step")
            more["HANGPROOF_FAULT_EVERY"] = "1" if inject.get("every") else "0"
            more["HANGPROOF_FAULT_ARG"] = str(inject.get("arg", self.seed)).replace("{root}", str(self.root))
        if "slow" in self.row:
            more["HANGPROOF_SLOW"] = f"{self.row['slow']['from']}:{self.row['slow']['s']}:{self.root / 'go'}"
        if "limits" in self.row:
            path = self.root / "limits.toml"
            lines = [
                f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in values.items())
                for section, values in _flat(self.row["limits"])
            ]
            path.write_text("\n".join(lines), encoding="utf-8")
            more["HANGPROOF_LIMITS"] = str(path)
        return ref.environment(self.data, **more)

    # ---- doing ----

    def monitor(
        self, *words: str, folder: Path | None = None, python: str = sys.executable, **more
    ) -> subprocess.Popen:
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

    def finish(self, popen: subprocess.Popen, patience_s: float | None = None) -> int:
        """Wait for a monitor to end by itself; its exit code."""
        patience_s = patience_s or self.row.get("patience_s", 400.0)
        try:
            code = popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            status = self.status()
            raise Wrong(
                f"the monitor was not done after {patience_s:.0f} s: state {status.get('state')}, step {status.get('step')}, "
                f"{status.get('message')!r}"
            ) from None
        self.codes.append(code)
        return code

    def until(self, what: str, met: Callable[[], object], patience_s: float = 240.0) -> object:
        """Wait until `met()` is true; its value. `what` completes the sentence "waited for". Wrong: the run ended before."""
        deadline = time.monotonic() + patience_s
        while True:
            ended = self.status().get("state") in FINAL  # asked first: what it waits for may come with the end
            if value := met():
                return value
            if ended or time.monotonic() > deadline:
                now = self.status()
                raise Wrong(f"waited for {what}, and the run is {now.get('state')}: {now.get('message')!r}")
            time.sleep(0.05)

    def go(self) -> None:
        """What was to be done while the row's `slow` steps lasted is done."""
        (self.root / "go").touch()

    def until_step(self, step: int) -> None:
        """Wait until that step is complete (in metrics.jsonl, which the trainer itself writes)."""
        self.until(f"step {step}", lambda: self.steps() and self.steps()[-1]["step"] >= step)

    # ---- seeing ----

    def compare(self) -> list[str]:
        """What else of this kind of scene is not as it should be."""
        return []

    def status(self) -> dict:
        return _json(self.folder / "status.json") or {}

    def events(self, kind: str | None = None) -> list[dict]:
        found = _lines(self.folder / "events.jsonl")
        return [event for event in found if kind in (None, event["kind"])]

    def steps(self) -> list[dict]:
        return [line for line in _lines(self.folder / "metrics.jsonl") if line["kind"] == "step"]

    def incidents(self) -> list[dict]:
        return [i for p in sorted(self.folder.glob("incidents/*/incident.json")) if (i := _json(p)) is not None]

    def reports(self) -> list[str]:
        return [p.read_text(encoding="utf-8") for p in sorted(self.folder.glob("incidents/*/report.md"))]

    def ours(self) -> dict[int, str]:
        """Living processes of this scene: number → command line."""
        return living(self.token)

    def asked(self, stand_in: str) -> bool:
        """Was this stand-in (of NVML, of py-spy) asked? It leaves a file."""
        return (self.root / f"{stand_in}-asked").exists()

    def trainers(self) -> list[int]:
        """Living training processes, launcher left out: `python -m trainer` and what it forked."""
        return [pid for pid, line in self.ours().items() if " trainer " in f"{line} " and "launch" not in line]


def strikes_at(row: dict, seed: int) -> int:
    """The step at which the row's fault strikes, drawn from the row's range by its name and the seed."""
    return random.Random(f"{row['name']}/{seed}").randint(*row["inject"]["step"])


def _flat(table: dict, prefix: str = "") -> list[tuple[str, dict]]:
    """Sections of a nested table whose leaves are numbers, as TOML writes them."""
    out, leaves = [], {k: v for k, v in table.items() if not isinstance(v, dict)}
    if leaves:
        out.append((prefix, leaves))
    for name, value in table.items():
        if isinstance(value, dict):
            out += _flat(value, f"{prefix}.{name}" if prefix else name)
    return out


def _json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]


@contextlib.contextmanager
def stage(row: dict, seed: int, keep: Path | None = None, kind: type[Scene] = Scene):
    """A scene for this row; afterwards everything it started is ended, and its folder is gone unless it is in `keep`.

    OSError: `keep` cannot be written.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        keep = keep.resolve()
    made, token = kind.undisturbed(row, seed), secrets.token_hex(8)
    with contextlib.ExitStack() as after:  # what is put on it last is undone first
        root = Path(tempfile.mkdtemp(prefix=f"{row['name']}-" if keep else f"fault-{row['name']}-", dir=keep))
        # Short and of its own: sockets of the loader's workers are made there, and a path of theirs has 107 bytes.
        scratch = Path(tempfile.mkdtemp(prefix="fault-"))
        passing = [scratch] if keep else [scratch, root]
        after.callback(set_up(token, root, passing).communicate, DONE)
        for folder in passing:
            after.callback(shutil.rmtree, folder, True)
        disk, frozen = None, root / "frozen" if row.get("frozen") else None
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
        after.callback(strike, token, frozen)
        yield kind(row, seed, made, token, root, scratch, disk)


def _mounted(at: Path, what: list[str], after: contextlib.ExitStack) -> Path:
    at.mkdir()
    run("mount", *what, str(at))
    after.callback(unmount, at)
    return at


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
