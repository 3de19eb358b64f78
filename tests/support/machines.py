"""A run that moves between machines: each is an empty data root and its processes, and they share only the store.

Decision: a machine is made by the commands that a user types (`python -m launch store restore STORE RUN`, `python -m
monitor run RUN`) and dies by SIGKILL of every process with its token. The training is the toy loop, whose undisturbed
LoRA is known.
"""

import hashlib
import json
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_runs
from monitor_helpers import finish, monitor, wait_for
from run_facts import members, status

from benchmarks import toy_loop
from benchmarks.trial import TOKEN, kill_all, limits_toml, make_toy, read_lines, toy_launcher
from guards import checkpoint
from guards.reading import read_json
from runs.paths import ROOT

PATIENCE_S = 120.0
# A store as in production, in a tenth of the time; a copy lasts a while, so that a kill can meet it.
LIMITS = {"lease_s": 3, "connect_s": 60, "copy_s": 1, "status_s": 1, "flush_s": 60, "restart_s": 0.5}
LIMITS["bandwidth_bytes"] = 160_000


@dataclass(frozen=True)
class Toy:
    """The toy loop in place of the trainer, by `$TRAINER_PYTHON`: an interpreter, and short steps."""

    steps: int
    every: int  # steps between two checkpoints
    step_s: float = 0.05

    def create(self, data: Path, fields: dict[str, Any]) -> Path:
        return make_toy(data, self.steps, self.every, **fields)

    def environment(self, data: Path) -> dict[str, str]:
        """The variables of its processes; its launcher is in the data root."""
        more = {"TOY_LEDGER": str(data / "ledger.jsonl"), "TOY_STEP_S": str(self.step_s)}
        return tiny_runs.environment(data, TRAINER_PYTHON=toy_launcher(data), **more)

    def trained(self, data: Path) -> list[int]:
        """The steps that were trained in this data root, in order."""
        return [line["step"] for line in read_lines(data / "ledger.jsonl") if line["what"] == "step"]

    def expected(self) -> str:
        """The SHA-256 of its undisturbed LoRA."""
        return hashlib.sha256(toy_loop.expected(self.steps)).hexdigest()


def enter_processes() -> tuple[str, ...]:
    """The words that give a machine process numbers of its own: no other one sees whether it is dead; else ()."""
    words = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    there = shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode
    return words if there else ()


@dataclass
class Machine:
    """One machine: its data root, its processes, its network. `enter`: words before a command (`ip netns exec …`)."""

    training: Toy
    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    enter: tuple[str, ...] = ()
    limits: dict[str, float] = field(default_factory=dict)  # of [store] in the monitor's configuration
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    process: subprocess.Popen[bytes] | None = None
    restored: dict[str, Any] = field(default_factory=dict)  # what `restore` printed

    def __post_init__(self) -> None:
        self.data, limits = self.root / "data", self.root / "limits.toml"
        self.folder = self.data / "outputs" / "toy"
        made = self.training.environment(self.data)
        (self.root / "tmp").mkdir(parents=True, exist_ok=True)
        limits.write_text(limits_toml({"store": {**LIMITS, **self.limits}}), encoding="utf-8")
        more = {"HANGPROOF_LIMITS": str(limits), "TMPDIR": str(self.root / "tmp"), "HANGPROOF_GPUS": ""}
        self.environment = {**made, **more, **self.environment, TOKEN: self.token}

    def status(self) -> dict[str, Any]:
        return read_json(self.folder / "status.json") or {}

    def copying(self) -> bool:
        """The agent copies a checkpoint at this moment."""
        now = read_json(self.folder / "store.json") or {}
        return bool(now.get("pending_bytes")) and "checkpoint" in now.get("pending", "")

    def newest_checkpoint(self) -> int:
        """The step of the newest complete checkpoint on this machine's disk, 0 without one."""
        guards = [checkpoint.guard_of(path) for path in checkpoint.states(self.folder)]
        return max((guard["step"] for guard in guards if guard), default=0)

    def popen(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `python -m WORDS` on this machine; its output is added to output.txt."""
        with open(self.root / "output.txt", "ab") as out:
            where = {"cwd": ROOT, "env": self.environment, "start_new_session": True}
            command, streams = [*self.enter, sys.executable, "-m", *words], {"stdout": out, "stderr": out}
            return subprocess.Popen(command, **where, **streams, stdin=subprocess.DEVNULL)

    def restore(self, address: str, kill_after_s: float | None = None) -> bool:
        """Fetch the run from the store; False when it was killed meanwhile."""
        self.process = self.popen("launch", "store", "restore", address, "toy", "--json")
        try:
            code = self.process.wait(kill_after_s or PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            assert kill_after_s, f"restore did not end: {self.output()}"
            return False
        assert code == 0, f"restore: exit code {code}\n{self.output()}"
        self.restored = json.loads(self.output().strip().splitlines()[-1])
        return True

    def run(self) -> None:
        self.process = self.popen("monitor", "run", "toy")

    def wait(self, timeout_s: float) -> int:
        """The exit code of the command under way. AssertionError, with its output: it did not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.status()}\n{self.output()[-3000:]}") from None

    def until(self, met, what: str, timeout_s: float = PATIENCE_S) -> Any:
        return wait_for(met, timeout_s, what)

    def output(self) -> str:
        return (self.root / "output.txt").read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        assert not kill_all(self.token), "processes cannot be killed"
        if self.process is not None:
            self.process.wait(10)

    def lora(self) -> str:
        """The SHA-256 of the finished LoRA, "" without one."""
        path = self.folder / "toy.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


class StandbyRun:
    """A toy run with snapshots in memory and a standby attempt, and what must hold when it has ended."""

    def __init__(self, data: Path, steps: int = 90, every: int = 10, limits: str = ""):
        self.data = data
        self.toy = Toy(steps, every)
        self.env = self.toy.environment(data)
        self.folder = self.toy.create(data, {})
        (data / "limits.toml").write_text("allow_below_guards = true\n" + limits)
        (data / "done").mkdir()
        self.env |= {"HANGPROOF_LIMITS": str(data / "limits.toml"), "TOY_FAULTS_DONE": str(data / "done")}
        self.env |= {"HANGPROOF_GPUS": "", "TMPDIR": str(data / "tmp"), "HANGPROOF_SHM": str(data / "tmp")}
        (data / "tmp").mkdir()
        # From step 4 on a step takes a second until `hurry` is called, however long a standby needs on a busy machine.
        self.env |= {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_SLOW": f"4:1:{data / 'hurry'}"}

    def start(self, **more: str):
        return monitor(self.folder, **{**self.env, **more})

    def finish(self, process, code: int = 0) -> None:
        """Waits for the end of the run, whose steps are short from now on."""
        (self.data / "hurry").touch()
        assert finish(process)[0] == code

    def until_ready(self) -> int:
        """Waits for the standby; the process number of its shell."""
        now = lambda: status(self.folder)["standby"]  # noqa: E731
        return wait_for(lambda: now()["state"] == "ready" and now()["pid"], 120, "a standby")

    def check_complete(self, restarts: int) -> None:
        found = status(self.folder)
        assert (found["state"], found["restarts"]) == ("completed", restarts), found["reason"]
        lora = (self.folder / f"{self.folder.name}.safetensors").read_bytes()
        assert hashlib.sha256(lora).hexdigest() == self.toy.expected()
        assert not members(self.folder), "nothing is left behind"
        # The steps of a process are never between those of another one.
        pids = [line["pid"] for line in read_lines(self.data / "ledger.jsonl") if line["what"] == "step"]
        runs = [pid for i, pid in enumerate(pids) if i == 0 or pids[i - 1] != pid]
        assert len(runs) == len(set(runs)), "two processes trained at the same time"
