"""Two machines that train one run together, with one folder: a toy, and the built-in trainer in network namespaces."""

import contextlib
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import netns
import psutil
from monitor_helpers import ROOT, environment, toy_run, wait_for
from run_facts import status

from benchmarks.trial import limits_toml

PORT = "29400"
LIMITS = {"allow_below_guards": "true", "watch.stopped_s": 2, "end.grace_s": 1, "phases.step.ceiling_s": 20}
LIMITS |= {"phases.save.floor_s": 20, "phases.save.ceiling_s": 30}
# What starts a machine's part again, in the place of Slurm's job or SkyPilot's: docs/machines.md, "Two PCs at home".
AGAIN = 'code=6; while [ "$code" = 6 ]; do "$0" -m monitor run "$1"; code=$?; done; exit "$code"'

# Rank 0 alone saves. They meet first, and each waits for the other after a step, as in a collective operation.
TOGETHER = """
node = int(os.environ["RANK"])
if node:
    save = lambda step, weight: None
def other():
    try:
        pid = int((run / f"pid-{1 - node}").read_text())
        os.kill(pid, 0)
        return pid
    except (OSError, ValueError):
        return 0
(run / f"pid-{node}").write_text(str(os.getpid()))
while not (peer := other()):
    time.sleep(0.01)
def barrier(step):
    (run / f"at-{node}-{step}").touch()
    while not (run / f"at-{1 - node}-{step}").exists() and not hb.request:
        if other() != peer:
            raise ConnectionError("Connection closed by peer")
        time.sleep(0.01)
fault = barrier
"""


def together(folder: Path, steps: int, pace: float = 0.05, every: int = 10) -> Path:
    """A run whose script is a toy that trains on two machines, one rank on each."""
    toy_run(folder, TOGETHER, steps, pace, every)
    words = f"cd {folder}\nexport RANK=$HANGPROOF_NODE WORLD_SIZE=2\nexec {sys.executable} toy.py\n"
    (folder / "train.sh").write_text(words, encoding="utf-8")
    return folder


@dataclass
class Pair:
    root: Path
    run: Path
    machines: tuple[netns.Machine, ...]
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)

    def start(self, *numbers: int) -> None:
        """Start the loops of these machines, of both without any."""
        for number in numbers or (0, 1):
            temporary, limits = self.root / f"tmp{number}", self.root / "limits.toml"
            temporary.mkdir(exist_ok=True)
            limits.write_text(limits_toml(LIMITS), encoding="utf-8")
            own = {"DATA": self.root, "LIMITS": limits, "SHM": temporary, "NODE": number, "MAIN_PORT": PORT}
            own["MAIN_ADDRESS"] = self.machines[0].address
            env = environment(self.run, TMPDIR=str(temporary), **{f"HANGPROOF_{k}": str(v) for k, v in own.items()})
            words = ["bash", "-c", AGAIN, sys.executable, str(self.run)]
            with open(self.root / f"console-{number}.txt", "ab") as log:
                self.processes[number] = self.machines[number].popen(words, env, cwd=ROOT, stdout=log, stderr=log)

    def trainer(self, number: int) -> int:
        """The process of a machine's rank; its launcher has the same words."""
        found = self.machines[number].find("-m trainer")
        (pid,) = [pid for pid in found if "LOCAL_RANK" in psutil.Process(pid).environ()]
        return pid

    def result(self) -> bytes:
        return (self.run / "pair.safetensors").read_bytes()

    def wait_step(self, step: int) -> None:
        wait_for(lambda: status(self.run)["step"] >= step, 120, f"step {step}")

    def console(self) -> str:
        logs = [*self.root.glob("console-*.txt"), *self.run.rglob("*.log")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-5000:]}" for path in sorted(logs))

    def completed(self) -> dict:
        """Assert that both parts have ended with code 0, and that nothing lives on any machine; the run's status."""
        codes = {number: process.wait(240) for number, process in self.processes.items()}
        assert codes == {0: 0, 1: 0}, f"{codes}\n{self.console()}"
        assert status(self.run)["state"] == "completed", self.console()
        wait_for(lambda: not any(machine.processes() for machine in self.machines), 20, "no process on a machine")
        return status(self.run)


@contextlib.contextmanager
def pair(run: Path, root: Path):
    """Two machines with a copy of the run's data root, both started."""
    shutil.copytree(run.parents[1], root, dirs_exist_ok=True)
    with netns.machines(2) as machines:
        made = Pair(root, root / "outputs" / run.name, machines)
        made.start()
        yield made
