"""A group of toy trainers, one on each machine, that wait for each other at every step; and the monitors that watch it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import netns
from monitor_helpers import ROOT, environment, status, undisturbed, wait_for, weight

TOKEN = "a secret that only the machines of this test know"
PORT = 29400
LIMITS = """
[nodes]
poll_s = 0.25
reply_s = 1
lost_s = 8
return_s = 60
[restart]
backoff_first_s = 1
[end]
grace_s = 1
kill_wait_s = 5
"""

CUT = LIMITS.replace("lost_s = 8", "lost_s = 4")  # for tests that wait until a machine counts as lost

# One rank on each machine. `all_reduce` is what a collective is to the monitor: a rank that fails or hangs holds the others.
TOY = """
import hashlib, json, os, signal, socket, sys, time
from pathlib import Path
node = int(os.environ["HANGPROOF_NODE"])
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(node), "{nodes}"
sys.path.insert(0, {root!r})
from guards import checkpoint, crash
from guards.heartbeat import Heartbeat, REQUEST_STOP

STEPS, PACE, EVERY, NODES = {steps}, {pace}, {every}, {nodes}
run = Path(os.environ["HANGPROOF_RUN"])
attempt = int(os.environ.get("HANGPROOF_ATTEMPT", "1"))
hb = Heartbeat.from_env()
crash.install(hb)

def fault(step):
    pass
{faults}

def join():
    address = (os.environ["HANGPROOF_MAIN_ADDRESS"], int(os.environ["HANGPROOF_MAIN_PORT"]))
    if node == 0:
        server = socket.create_server(address)
        return [server.accept()[0] for _ in range(1, NODES)]
    while True:
        try:
            link = socket.create_connection(address, 5)
            link.settimeout(None)
            return [link]
        except OSError:
            time.sleep(0.05)

def all_reduce(links, value):
    if node:
        links[0].sendall(bytes([value]))
    values = [value] * (node == 0)
    for link in links:
        data = link.recv(1)
        if not data:
            raise ConnectionError("gloo: Connection closed by peer")
        values += data
    if node == 0:
        for link in links:
            link.sendall(bytes([max(values)]))
    return max(values)

def save(step, weight):
    if node == 0:
        hb.phase("save")
        with checkpoint.writing(run / f"toy-step{{step:08d}}-state", step, 1) as folder:
            (folder / "weight.json").write_text(json.dumps(weight))
            (folder / "deep").mkdir()
            (folder / "deep" / "optimizer.txt").write_text(str(step) * 1000)
        for old in checkpoint.states(run)[3:]:
            checkpoint.retire(old)
        hb.phase("step")

def main():
    hb.phase("load")
    weight, step = "seed", 0
    if os.environ.get("HANGPROOF_RESUME"):
        folder = Path(os.environ["HANGPROOF_RESUME"])
        assert checkpoint.verify(folder).usable
        weight, step = json.loads((folder / "weight.json").read_text()), checkpoint.guard_of(folder)["step"]
    hb.plan(STEPS)
    links = join()
    hb.phase("first_step")
    while step < STEPS:
        time.sleep(PACE)
        fault(step + 1)
        stop = all_reduce(links, int(hb.request == REQUEST_STOP))
        step += 1
        weight = hashlib.sha256(f"{{weight}} {{step}}".encode()).hexdigest()
        hb.step(step, 1, 1.0 / step, 1e-4)
        print("step", step, flush=True)
        if step % EVERY == 0 or stop:
            save(step, weight)
        if stop:
            hb.end("stopped")
            crash.exit_now(3)
    hb.phase("end")
    if node == 0:
        checkpoint.atomic_write(run / f"{{run.name}}.safetensors", weight)
    hb.end("done")
    crash.exit_now(0)

try:
    main()
except Exception as error:
    hb.end("failed", f"{{type(error).__name__}}: {{error}}")
    raise
"""


@dataclass
class Group:
    """The machines, each with a data folder of its own unless `shared`."""

    root: Path
    machines: tuple[netns.Machine, ...]
    shared: bool = False
    limits: str = LIMITS
    nodes_name: str = "toy"  # of the run's folder on the machines without a shared disk
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)

    def folder(self, node: int) -> Path:
        """The run's folder on that machine."""
        return (
            self.root / ("m0" if self.shared else f"m{node}") / (self.nodes_name if node and not self.shared else "toy")
        )

    @property
    def run(self) -> Path:
        return self.folder(0)

    def toy(self, faults: str = "", steps: int = 40, pace: float = 0.05, every: int = 10) -> None:
        """Write the script on the first machine."""
        number = len(self.machines)
        text = TOY.format(root=str(ROOT), steps=steps, pace=pace, every=every, faults=faults, nodes=number)
        self.root.mkdir(exist_ok=True)
        (self.root / "toy.py").write_text(text, encoding="utf-8")
        self.run.mkdir(parents=True)
        (self.run / "train.sh").write_text(f"exec {sys.executable} {self.root / 'toy.py'}\n", encoding="utf-8")

    def env(self, node: int, **more: str) -> dict[str, str]:
        base = self.folder(node)
        base.parent.mkdir(parents=True, exist_ok=True)
        limits = self.root / "limits.toml"
        limits.write_text("allow_below_guards = true\n" + self.limits, encoding="utf-8")
        temporary = self.root / f"tmp{node}"
        temporary.mkdir(exist_ok=True)
        found = environment(base) | {"TMPDIR": str(temporary), "HANGPROOF_LIMITS": str(limits)}
        found |= {"HANGPROOF_NODE_TOKEN": TOKEN, "HANGPROOF_LEADER": f"{self.machines[0].address}:{PORT}"}
        return found | {"HANGPROOF_NODES": str(len(self.machines))} | more

    def start(self, *nodes: int, **more: str) -> None:
        """Start the monitors of these machines, of all without any."""
        for node in nodes or range(len(self.machines)):
            words = ["run", str(self.run)] if node == 0 else ["node", str(self.folder(node)), "--rank", str(node)]
            with open(self.root / f"console-{node}.txt", "ab") as log:
                self.processes[node] = self.machines[node].popen(
                    [sys.executable, "-m", "monitor", *words], self.env(node, **more), cwd=ROOT, stdout=log, stderr=log
                )

    def finish(self, timeout_s: float = 240.0) -> list[int]:
        """The exit codes of all monitors, by machine. Fails with their logs when one does not end."""
        codes = []
        for node in sorted(self.processes):
            try:
                codes.append(self.processes[node].wait(timeout_s))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"machine {node} still runs:\n{self.console()}") from None
        return codes

    def console(self) -> str:
        texts = []
        for path in [*sorted(self.root.glob("console-*.txt")), *sorted(self.root.glob("m*/toy/*.log"))]:
            texts.append(f"--- {path.relative_to(self.root)}\n{path.read_text(errors='replace')[-6000:]}")
        return "\n".join(texts)

    def step(self) -> int:
        return status(self.run)["step"]

    def wait_step(self, step: int, timeout_s: float = 60.0) -> None:
        try:
            wait_for(lambda: self.step() >= step, timeout_s, f"step {step}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.console()}") from None

    def trainers(self, node: int) -> list[int]:
        """The toy trainers that live on a machine."""
        return self.machines[node].find("toy.py")

    def monitors(self, node: int) -> list[int]:
        """The monitors (not their keepers) that live on a machine."""
        return self.machines[node].find("monitor run --child")

    def kill(self, pids: list[int]) -> None:
        assert pids, self.console()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def completed(self, steps: int = 40, restarts: int | None = None) -> dict:
        """Assert that the run completed with the result of an undisturbed one, and that nothing lives on any machine."""
        codes = self.finish()
        now = status(self.run)
        assert now["state"] == "completed" and set(codes) == {0}, f"{codes}\n{now}\n{self.console()}"
        assert restarts is None or now["restarts"] == restarts, f"{now}\n{self.console()}"
        assert weight(self.run) == undisturbed(steps), self.console()
        assert self.living() == {}
        return now

    def living(self) -> dict[int, list[int]]:
        """What lives on the machines, by number."""
        return {i: left for i, machine in enumerate(self.machines) if (left := netns.wait_quiet(machine, 10))}

    def attempts(self) -> list[int]:
        """The attempts that the leader has started."""
        lines = (self.run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [
            e["attempt"] for e in map(json.loads, lines) if e["kind"] in ("started", "restarted") and "attempt" in e
        ]


@contextlib.contextmanager
def group(
    root: Path, number: int = 2, shared: bool = False, clocks_s: tuple[int, ...] = (), limits: str = LIMITS
) -> Iterator[Group]:
    """Machines for one test."""
    with netns.machines(number, clocks_s) as machines:
        yield Group(root, machines, shared, limits)
