"""What is done to a run from outside, by the name in the row's `action`. By default the monitor runs to its end.

Each action brings the scenario to the end of its last monitor; the row's requirements are compared afterwards. An
action itself checks what only it can see on the way (which processes lived, how long something took): `Mismatch` says
what was seen. Those of a standby attempt begin alike: steps are slow (the row's `slow`) until one waits at its gate,
however long that takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from benchmarks.injector import INJECTED
from benchmarks.injector_files import fill
from benchmarks.scenario import NAME, Mismatch, Scenario, sha256, unfreeze
from benchmarks.trial import read_end, read_object, with_pids
from monitor.process import platform
from runs.files import atomic_write

PREEMPTED_WITHIN_S = 25.0
COMMAND_S = 120.0  # for a command of the monitor, on a loaded machine
LITTLE_KB = 100_000  # of memory: less than snapshots and a standby leave to others

Action = Callable[[Scenario], None]
Check = Callable[[], None]
ACTIONS: dict[str, Action] = {}


def action(function: Action) -> Action:
    """Add it to ACTIONS."""
    ACTIONS[function.__name__] = function
    return function


def during(function: Callable[[Scenario], Check | None]) -> None:
    """Add an action under one monitor, which then comes to its end. The function may return a check for then."""

    def play(scenario: Scenario) -> None:
        monitor = scenario.monitor()
        check = function(scenario)
        scenario.go()
        scenario.finish(monitor)
        if check is not None:
            check()

    ACTIONS[function.__name__] = play


@action
def watch(scenario: Scenario) -> None:
    """One monitor, to its end."""
    scenario.finish(scenario.monitor())


# ---- clocks ----


def _move_clock(scenario: Scenario, **offsets_s: float) -> None:
    path = Path(scenario.environment["FAULTS_CLOCK"])
    atomic_write(path, json.dumps(offsets_s))


def _check_clock(scenario: Scenario, moved_s: float) -> None:
    """Mismatch, unless the monitor's events show that its wall clock moved by that much: else nothing was tested."""
    times = [datetime.fromisoformat(event["t"]).timestamp() for event in scenario.events()]
    passed_s = times[-1] - times[0]
    if abs(passed_s - moved_s) > 1800:
        raise Mismatch(f"the clock was moved by {moved_s:.0f} s, and the monitor's events span {passed_s:.0f} s")


@during
def clock(scenario: Scenario) -> Check:
    """The wall clock jumps by the row's `jump_s`: in the middle of the run, or while a standby waits."""
    if "recovery" in scenario.row.get("needs", []):
        scenario.until_ready()
    else:
        scenario.until_step(14)
    _move_clock(scenario, wall=scenario.row["jump_s"])
    return lambda: _check_clock(scenario, scenario.row["jump_s"])


@during
def suspend(scenario: Scenario) -> Check:
    """Every process stops for four seconds, in which the boot clock advances by an hour."""
    scenario.until_step(20)
    everyone = list(scenario.ours())
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    _move_clock(scenario, boot=3600.0, wall=3600.0)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)

    def check() -> None:
        _check_clock(scenario, 3600.0)
        if "the machine was suspended for" not in (scenario.folder / "monitor.log").read_text(encoding="utf-8"):
            raise Mismatch("monitor.log does not mention that the machine was suspended")

    return check


# ---- what the monitor runs with ----


@action
def full_pipe(scenario: Scenario) -> None:
    """Nobody reads the monitor's output, and the pipe is full from the start."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    try:
        scenario.finish(scenario.monitor("run", stderr=writer, stdout=writer))
    finally:
        os.close(reader)
        os.close(writer)


@action
def py_spy(scenario: Scenario) -> None:
    """The monitor's interpreter is of a copy of our environment, whose py-spy is the row's script, or missing."""
    real, fake = Path(sys.prefix), scenario.root / "python"
    (fake / "bin").mkdir(parents=True)
    for name in ("lib", "lib64", "pyvenv.cfg"):
        if (real / name).exists():
            (fake / name).symlink_to(real / name)
    (fake / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    if "py_spy" in scenario.row:
        path = fake / "bin" / "py-spy"
        path.write_text(f"#!/bin/sh\ntouch '{scenario.root}/py-spy-used'\n{scenario.row['py_spy']}\n", encoding="utf-8")
        path.chmod(0o755)
    folders = [p for p in scenario.environment["PATH"].split(os.pathsep) if not (Path(p) / "py-spy").exists()]
    scenario.environment["PATH"] = os.pathsep.join(folders)
    scenario.finish(scenario.monitor(python=str(fake / "bin" / "python")))


# ---- monitors that are killed, replaced or doubled ----


@during
def second_monitor(scenario: Scenario) -> None:
    """While one monitor watches, another is started, in the foreground and detached."""
    scenario.until_step(6)
    for command in ("run", "start"):
        code = _command(scenario, command)
        if command == "run" and code == 0:
            raise Mismatch("`monitor run` beside a living monitor ended with code 0")
        if scenario.monitors[0].poll() is not None:
            raise Mismatch(f"the first monitor ended before `monitor {command}` beside it did")
        if len(scenario.trainers()) != 1:
            raise Mismatch(f"expected one trainer, found: {scenario.ours()}")


def _command(scenario: Scenario, *words: str) -> int:
    """`python -m monitor WORDS RUN`; its exit code."""
    popen = scenario.monitor(*words)
    try:
        return popen.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        raise Mismatch(f"`monitor {' '.join(words)}` had not ended after {COMMAND_S:.0f} s") from None


def _stop(scenario: Scenario) -> None:
    """`python -m monitor stop RUN`."""
    if (code := _command(scenario, "stop")) != 0:
        raise Mismatch(f"`monitor stop` ended with code {code}")


@action
def sigkill_monitor(scenario: Scenario) -> None:
    """The monitor and its keeper are killed; the training continues; a second monitor adopts it and starts nothing."""
    first = scenario.monitor()
    scenario.until_step(8)
    before = scenario.trainers()
    scenario.kill_monitor(first)
    scenario.until_step(scenario.steps()[-1]["step"] + 2)
    second = scenario.monitor()
    scenario.until("a second `started` event", lambda: len(scenario.events("started")) > 1)
    _finish_same_attempt(scenario, second, before)


@action
def sigkill_below_keeper(scenario: Scenario) -> None:
    """The monitor is killed; its keeper replaces it within 10 s, and the new one starts nothing."""
    keeper = scenario.monitor()
    scenario.until_step(8)
    before, killed = scenario.trainers(), scenario.status()["monitor_pid"]
    os.kill(killed, signal.SIGKILL)
    scenario.until("another monitor", lambda: scenario.status()["monitor_pid"] != killed, 10.0 + scenario.slack_s)
    _finish_same_attempt(scenario, keeper, before)


def _finish_same_attempt(scenario: Scenario, monitor: subprocess.Popen[bytes], before: list[int]) -> None:
    if not before or scenario.trainers() != before:
        raise Mismatch(f"the trainer was {before}, and under the new monitor it is {scenario.trainers()}")
    scenario.go()
    scenario.finish(monitor)
    if {step["attempt"] for step in scenario.steps()} != {1}:
        raise Mismatch("another attempt was started although the training was alive")


@during
def sigkill_in_recovery(scenario: Scenario) -> None:
    """The monitor is killed while it recovers from a hang; its keeper replaces it."""
    scenario.until("the recovery", lambda: scenario.status().get("state") == "recovering")
    os.kill(scenario.status()["monitor_pid"], signal.SIGKILL)


@action
def sigkill_both(scenario: Scenario) -> None:
    """The monitor is killed, later the trainer too: nobody saw how it ended."""
    first = scenario.monitor()
    scenario.until_step(8)
    scenario.kill_monitor(first)
    scenario.go()
    scenario.until("the end of the trainer", lambda: not scenario.trainers())
    watch(scenario)


@action
def pid_reuse(scenario: Scenario) -> None:
    """Monitor and training are killed, and innocent processes get their pids before a new monitor starts."""
    first = scenario.monitor()
    scenario.until_step(12)
    pids = [first.pid, *scenario.ours()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first.wait()
    scenario.go()
    scenario.until("the end of all processes", lambda: not scenario.ours())
    innocent = with_pids(pids)
    try:
        watch(scenario)
        ended = [popen.pid for popen in innocent if popen.poll() is not None]
        if ended or not innocent:
            raise Mismatch(f"innocent processes were killed: {ended} of {len(innocent)}")
    finally:
        for popen in innocent:
            popen.kill()
            popen.wait(10)


# ---- disks ----


@action
def frozen_disk(scenario: Scenario) -> None:
    """Until the disk is unfrozen the run is not restarted; where it stays frozen, the monitor gives up."""
    monitor = scenario.monitor()

    def reported() -> bool:
        texts = [scenario.status().get("message") or "", *(e["message"] for e in scenario.events())]
        return any("cannot be killed" in text for text in texts)

    scenario.until("the message that it cannot be killed", reported)
    if scenario.row["expect"]["state"] == "unkillable":
        scenario.finish(monitor)
        unfreeze(scenario.root / "frozen")
        return
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        begun = {pid for pid in scenario.trainers() if (p := platform.process_info(pid)) and p.state != "D"}
        if scenario.status()["attempt"] > 1 or begun:
            raise Mismatch(f"a second writer was started while the first could not be killed: {scenario.ours()}")
        time.sleep(0.1)
    unfreeze(scenario.root / "frozen")
    scenario.finish(monitor)


@during
def disk_full(scenario: Scenario) -> None:
    """Once the failure is noticed, space is freed."""
    scenario.until("the crash", lambda: scenario.events("crash"))
    time.sleep(1.0)
    (scenario.data / "ballast").unlink()


# ---- the machine and the user ----


def _preempted(scenario: Scenario, monitor: subprocess.Popen[bytes], more_at_s: tuple[float, ...] = ()) -> None:
    """Send SIGTERM now, and again after these seconds; Mismatch unless the monitor leaves preempted within 25 s."""
    begun_s = time.monotonic()
    monitor.send_signal(signal.SIGTERM)
    for at_s in more_at_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            monitor.wait(max(0.0, begun_s + at_s - time.monotonic()))
        if monitor.poll() is None:
            monitor.send_signal(signal.SIGTERM)
    code = scenario.finish(monitor)
    took_s = time.monotonic() - begun_s
    if code != 5 or took_s > PREEMPTED_WITHIN_S + scenario.slack_s:
        raise Mismatch(f"SIGTERM: code {code} after {took_s:.1f} s, expected 5 within {PREEMPTED_WITHIN_S:.0f} s")
    if scenario.status().get("state") != "preempted":
        raise Mismatch(f"SIGTERM: state {scenario.status().get('state')}, expected preempted")
    if left := scenario.ours():
        raise Mismatch(f"SIGTERM: still running: {left}")


@action
def sigterm_machine(scenario: Scenario) -> None:
    """Pre-emption: the monitor gets SIGTERM; later the run is resumed."""
    first = scenario.monitor()
    scenario.until_step(14)
    _preempted(scenario, first)
    last = scenario.steps()[-1]["step"]
    scenario.go()
    watch(scenario)
    repeated = [step["step"] for step in scenario.steps() if step["attempt"] > 1 and step["step"] <= last]
    if repeated:
        raise Mismatch(f"the checkpoint at the stop was not used: steps {repeated} were trained again")


@action
def three_sigterms(scenario: Scenario) -> None:
    """SIGTERM three times while a step hangs, so no checkpoint can be saved: the deadline counts from the first."""
    monitor = scenario.monitor()
    log = scenario.folder / "training.log"
    scenario.until("the hang", lambda: scenario.steps() and INJECTED in read_end(log, 100_000))
    _preempted(scenario, monitor, (4.0, 8.0))


@action
def stop_then_sigterm(scenario: Scenario) -> None:
    """`monitor stop`, then SIGTERM while the stop is under way: the user's stop is what counts."""
    monitor = scenario.monitor()
    scenario.until_step(14)
    _stop(scenario)
    scenario.until("the stop", lambda: scenario.status().get("state") == "stopping")
    monitor.send_signal(signal.SIGTERM)
    scenario.finish(monitor)
    scenario.go()
    resumed = scenario.monitor("resume-all", folder=Path("--json"))
    if resumed.wait(COMMAND_S) != 0 or scenario.trainers():
        raise Mismatch(f"`monitor resume-all` restarted a run that the user had stopped: {scenario.ours()}")


@during
def stop_in_backoff(scenario: Scenario) -> None:
    """`monitor stop` while the run waits for its restart."""
    scenario.until("the second failure's backoff", lambda: scenario.events("backoff"))
    _stop(scenario)


class Second:
    """Another run of the scenario's name, in a data root of its own."""

    def __init__(self, scenario: Scenario) -> None:
        other = scenario.root / "other"
        self.scenario, self.folder = scenario, scenario.new_run(other)
        self.environment = {**scenario.environment, "HANGPROOF_DATA": str(other)}

    def monitor(self) -> subprocess.Popen[bytes]:
        return self.scenario.monitor("run", folder=self.folder, env=self.environment)

    def state(self) -> object:
        return read_object(self.folder / "status.json").get("state")

    def check(self, restarts: int) -> None:
        """Mismatch, unless it completed after so many restarts with the LoRA of an undisturbed run."""
        found = read_object(self.folder / "status.json")
        if (found.get("state"), found.get("restarts")) != ("completed", restarts):
            seen = f"{found.get('state')} after {found.get('restarts')} restarts: {found.get('message')}"
            raise Mismatch(f"the second run ended as {seen}")
        if sha256(self.folder / f"{NAME}.safetensors") != self.scenario.reference.sha256:
            raise Mismatch("the second run's LoRA is not that of an undisturbed run")


@action
def two_runs(scenario: Scenario) -> None:
    """Two runs on the same GPU are started together."""
    scenario.environment["HANGPROOF_GPUS"] = f"scenario-{scenario.token}"
    other = Second(scenario)
    first = scenario.monitor()
    scenario.until("the first run's trainer", scenario.trainers)
    second = other.monitor()
    scenario.until("the second run to be queued", lambda: other.state() == "queued")
    scenario.go()
    while first.poll() is None and other.state() == "queued":
        time.sleep(0.1)
    if first.poll() is None and scenario.status().get("state") != "completed":
        raise Mismatch(f"the second run is {other.state()} while the first trains")
    scenario.finish(first)
    scenario.finish(second)
    other.check(restarts=0)


@action
def two_runs_one_machine(scenario: Scenario) -> None:
    """Two runs of one name train at the same time, and the fault occurs in both."""
    other = Second(scenario)
    monitors = [scenario.monitor(), other.monitor()]
    scenario.until_ready()
    standby = other.folder / "status.json"
    scenario.until(
        "the standby of the other run", lambda: (read_object(standby).get("standby") or {}).get("state") == "ready"
    )
    scenario.go()
    for monitor in reversed(monitors):
        scenario.finish(monitor)
    other.check(restarts=1)


# ---- snapshots in memory and the standby attempt ----


@during
def standby_waits(scenario: Scenario) -> None:
    """The fault occurs while a standby waits."""
    scenario.until_ready()


@during
def standby_killed(scenario: Scenario) -> None:
    """The standby gets SIGKILL while it waits; the training never notices, and the next one stands in at the fault."""
    first = scenario.until_ready()
    for pid in scenario.standbys():
        os.kill(pid, signal.SIGKILL)
    scenario.until_ready(but=first)


@during
def standby_hung(scenario: Scenario) -> None:
    """The standby is stopped at its gate, so it does not answer when it is needed."""
    scenario.until_ready()
    waiting = scenario.standbys()
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)
    if not waiting:
        raise Mismatch("no process waited at the gate, so nothing was tested")


@during
def monitor_killed_while_standby_starts(scenario: Scenario) -> None:
    """SIGKILL to the monitor as soon as a standby is under way; its keeper replaces it, and another standby waits."""
    started = scenario.until("a standby that starts", lambda: (scenario.status().get("standby") or {}).get("pid"))
    left, killed = scenario.standbys(), scenario.status()["monitor_pid"]
    training = [pid for pid in scenario.trainers() if pid not in left]
    os.kill(killed, signal.SIGKILL)
    scenario.until("another monitor", lambda: scenario.status()["monitor_pid"] != killed)
    scenario.until("the end of the dead monitor's standby", lambda: not set(left) & set(scenario.ours()))
    scenario.until_ready(but=started)
    if not training or not set(training) <= set(scenario.trainers()):
        raise Mismatch(f"the trainer was {training}, and under the new monitor it is {scenario.trainers()}")


@during
def memory_short(scenario: Scenario) -> None:
    """Memory becomes short: the standby and the snapshots give theirs back, and say so; then the training is killed."""
    scenario.until_ready()
    scenario.until("a snapshot", lambda: (scenario.status().get("snapshots") or {}).get("step"))
    path = Path(scenario.environment["FAULTS_MEMINFO"])
    atomic_write(path, f"MemTotal: 999999 kB\nMemAvailable: {LITTLE_KB} kB\n")

    def given_back() -> bool:
        found = scenario.status()
        reasons = (found.get("standby") or {}).get("reason", ""), (found.get("snapshots") or {}).get("off", "")
        return "memory is short" in reasons[0] and "MB of memory left" in reasons[1]

    scenario.until("the sentences that standby and snapshots are off", given_back)
    if waiting := scenario.standbys():
        raise Mismatch(f"the standby is off and still lives: {waiting}")


@action
def shm_full(scenario: Scenario) -> None:
    """Another program fills the file system of the snapshots, to the last block, before the training starts."""
    fill(Path(scenario.environment["HANGPROOF_SHM"]))
    monitor = scenario.monitor()
    scenario.until("the sentence that snapshots are off", lambda: (scenario.status().get("snapshots") or {}).get("off"))
    scenario.until_ready()
    scenario.go()
    scenario.finish(monitor)


@during
def shm_fills(scenario: Scenario) -> None:
    """Another program fills the file system of the snapshots, to the last block, while the training writes them."""
    scenario.until_ready()
    scenario.until("a snapshot", lambda: (scenario.status().get("snapshots") or {}).get("step"))
    fill(Path(scenario.environment["HANGPROOF_SHM"]))
