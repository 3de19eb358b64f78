"""What is done from outside to a run's snapshots in memory and to its standby attempt (`ACTIONS` of faults_actions.py).

Most begin alike: steps are slow (the row's `slow`) until a standby waits at its gate, however long that takes on a loaded machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults_reference import NAME, sha256
from benchmarks.faults_scenario import Mismatch, Scenario

LITTLE_KB = 100_000  # of memory: less than snapshots and a standby leave to others
BLOCK = 4096


def until_ready(scenario: Scenario, but: int = 0) -> int:
    """Wait until a standby waits at its gate, another one than process `but`; its shell's process number."""

    def ready() -> int:
        standby = scenario.status().get("standby") or {}
        return int(standby["pid"]) if standby.get("state") == "ready" and standby.get("pid") != but else 0

    return int(scenario.until("a standby attempt that is ready", ready))


def standby_waits(scenario: Scenario) -> None:
    """The fault occurs while a standby waits."""
    monitor = scenario.monitor()
    until_ready(scenario)
    scenario.go()
    scenario.finish(monitor)


def standby_killed(scenario: Scenario) -> None:
    """The standby gets SIGKILL while it waits; the training never notices, and the next standby stands in at the fault."""
    monitor = scenario.monitor()
    first = until_ready(scenario)
    for pid in scenario.standbys():
        os.kill(pid, signal.SIGKILL)
    until_ready(scenario, but=first)
    scenario.go()
    scenario.finish(monitor)


def standby_hung(scenario: Scenario) -> None:
    """The standby is stopped at its gate, so it does not answer when it is needed."""
    monitor = scenario.monitor()
    until_ready(scenario)
    waiting = scenario.standbys()
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)
    scenario.go()
    scenario.finish(monitor)
    if not waiting:
        raise Mismatch("no process waited at the gate, so nothing was tested")


def monitor_killed_while_standby_starts(scenario: Scenario) -> None:
    """SIGKILL to the monitor as soon as a standby is under way; its keeper replaces it, and the next standby waits at the fault."""
    keeper = scenario.monitor()
    started = scenario.until("a standby that starts", lambda: (scenario.status().get("standby") or {}).get("pid"))
    left, killed = scenario.standbys(), scenario.status()["monitor_pid"]
    training = [pid for pid in scenario.trainers() if pid not in left]
    os.kill(killed, signal.SIGKILL)
    scenario.until("another monitor", lambda: scenario.status()["monitor_pid"] != killed)
    scenario.until("the end of the dead monitor's standby", lambda: not set(left) & set(scenario.ours()))
    until_ready(scenario, but=started)
    if not training or not set(training) <= set(scenario.trainers()):
        raise Mismatch(f"the trainer was {training}, and under the new monitor it is {scenario.trainers()}")
    scenario.go()
    scenario.finish(keeper)


def memory_short(scenario: Scenario) -> None:
    """The machine runs out of memory: the standby and the snapshots give theirs back, and say so; then the training is killed."""
    monitor = scenario.monitor()
    until_ready(scenario)
    scenario.until("a snapshot", lambda: (scenario.status().get("snapshots") or {}).get("step"))
    path = Path(scenario.environment["FAULTS_MEMINFO"])
    path.with_suffix(".new").write_text(f"MemTotal: 999999 kB\nMemAvailable: {LITTLE_KB} kB\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)

    def given_back() -> bool:
        found = scenario.status()
        reasons = (found.get("standby") or {}).get("reason", ""), (found.get("snapshots") or {}).get("off", "")
        return "memory is short" in reasons[0] and "MB of memory left" in reasons[1]

    scenario.until("the sentences that standby and snapshots are off", given_back)
    if waiting := scenario.standbys():
        raise Mismatch(f"the standby is off and still lives: {waiting}")
    scenario.go()
    scenario.finish(monitor)


def shm_full(scenario: Scenario) -> None:
    """Another program fills the file system of the snapshots, to the last block, before the training starts."""
    fill(Path(scenario.environment["HANGPROOF_SHM"]))
    monitor = scenario.monitor()
    scenario.until("the sentence that snapshots are off", lambda: (scenario.status().get("snapshots") or {}).get("off"))
    until_ready(scenario)
    scenario.go()
    scenario.finish(monitor)


def shm_fills(scenario: Scenario) -> None:
    """Another program fills the file system of the snapshots, to the last block, while the training writes them."""
    monitor = scenario.monitor()
    until_ready(scenario)
    scenario.until("a snapshot", lambda: (scenario.status().get("snapshots") or {}).get("step"))
    fill(Path(scenario.environment["HANGPROOF_SHM"]))
    scenario.go()
    scenario.finish(monitor)


def fill(folder: Path) -> None:
    """Fill a file system to the last block."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        try:
            for size in (1 << 20, BLOCK):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        if file.write(bytes(size)) < size:
                            break
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def two_runs_one_machine(scenario: Scenario) -> None:
    """Two runs of one name train at the same time, and the fault occurs in both."""
    other = scenario.root / "other"
    folder = scenario.new_run(other)
    environment = {**scenario.environment, "HANGPROOF_DATA": str(other)}
    monitors: list[subprocess.Popen[bytes]] = [scenario.monitor(), scenario.monitor(folder=folder, env=environment)]

    def status() -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((folder / "status.json").read_text(encoding="utf-8")))
        return {}

    until_ready(scenario)
    scenario.until("the standby of the other run", lambda: (status().get("standby") or {}).get("state") == "ready")
    scenario.go()
    for monitor in reversed(monitors):
        scenario.finish(monitor)
    found = status()
    if (found.get("state"), found.get("restarts")) != ("completed", 1):
        raise Mismatch(
            f"the other run ended as {found.get('state')} after {found.get('restarts')} restarts: {found.get('message')}"
        )
    if sha256(folder / f"{NAME}.safetensors") != scenario.reference.sha256:
        raise Mismatch("the other run's LoRA is not that of an undisturbed run")


ACTIONS: dict[str, Callable[[Scenario], None]] = {
    action.__name__: action
    for action in (
        standby_waits,
        standby_killed,
        standby_hung,
        monitor_killed_while_standby_starts,
        memory_short,
        shm_full,
        shm_fills,
        two_runs_one_machine,
    )
}
