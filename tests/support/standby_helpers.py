"""A toy run with snapshots in memory and a standby attempt, and what must hold when it has ended."""

import hashlib
from pathlib import Path

import machines
from monitor_helpers import finish, monitor
from run_facts import members, status

from benchmarks.trial import read_lines

STEPS, EVERY = 90, 10


class Run:
    def __init__(self, data: Path, step_s: float = 0.05, steps: int = STEPS, every: int = EVERY, limits: str = ""):
        self.data = data
        self.toy = machines.Toy(steps, every, step_s)
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
