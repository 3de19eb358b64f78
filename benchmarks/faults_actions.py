"""What is done to a run from outside, by the name in the row's `action`. By default the monitor runs to its end.

Each action brings the scenario to the end of its last monitor; the row's requirements are compared afterwards. An action
itself checks what only it can see on the way (which processes lived, how long something took): `Mismatch` says what was seen.
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
from typing import Any

from benchmarks import faults_recovery
from benchmarks.faults_cleanup import unfreeze
from benchmarks.faults_reference import NAME, sha256
from benchmarks.faults_scenario import Mismatch, Scenario
from benchmarks.injector import INJECTED
from monitor.process import platform

PREEMPTED_WITHIN_S = 25.0
COMMAND_S = 120.0  # for a command of the monitor, on a loaded machine


def watch(scenario: Scenario) -> None:
    """One monitor, to its end."""
    scenario.finish(scenario.monitor())


# ---- clocks ----


def _move_clock(scenario: Scenario, **offsets_s: float) -> None:
    path = Path(scenario.environment["FAULTS_CLOCK"])
    path.with_suffix(".new").write_text(json.dumps(offsets_s), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def _check_clock(scenario: Scenario, moved_s: float) -> None:
    """Mismatch, unless the monitor's events show that its wall clock moved by that much: else nothing was tested."""
    times = [datetime.fromisoformat(event["t"]).timestamp() for event in scenario.events()]
    passed_s = times[-1] - times[0]
    if abs(passed_s - moved_s) > 1800:
        raise Mismatch(f"the clock was moved by {moved_s:.0f} s, and the monitor's events span {passed_s:.0f} s")


def clock_forward(scenario: Scenario) -> None:
    """In the middle of the run the wall clock jumps an hour forward."""
    monitor = scenario.monitor()
    scenario.until_step(14)
    _move_clock(scenario, wall=3600.0)
    scenario.go()
    scenario.finish(monitor)
    _check_clock(scenario, 3600.0)


def clock_back(scenario: Scenario) -> None:
    """In the middle of the run the wall clock jumps an hour back."""
    monitor = scenario.monitor()
    scenario.until_step(14)
    _move_clock(scenario, wall=-3600.0)
    scenario.go()
    scenario.finish(monitor)
    _check_clock(scenario, -3600.0)


def clock_jump(scenario: Scenario) -> None:
    """While a standby waits, the wall clock jumps an hour back."""
    monitor = scenario.monitor()
    faults_recovery.until_ready(scenario)
    _move_clock(scenario, wall=-3600.0)
    scenario.go()
    scenario.finish(monitor)
    _check_clock(scenario, -3600.0)


def suspend(scenario: Scenario) -> None:
    """Every process stops for four seconds, in which the boot clock advances by an hour."""
    monitor = scenario.monitor()
    scenario.until_step(20)
    everyone = list(scenario.ours())
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    _move_clock(scenario, boot=3600.0, wall=3600.0)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    scenario.go()
    scenario.finish(monitor)
    _check_clock(scenario, 3600.0)
    if "the machine was suspended for" not in (scenario.folder / "monitor.log").read_text(encoding="utf-8"):
        raise Mismatch("monitor.log does not mention that the machine was suspended")


# ---- what the monitor runs with ----


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


def _python_with_py_spy(scenario: Scenario, py_spy: str | None) -> str:
    """An interpreter of a copy of our environment in which py-spy is missing, or is this shell script."""
    real, fake = Path(sys.prefix), scenario.root / "python"
    (fake / "bin").mkdir(parents=True)
    for name in ("lib", "lib64", "pyvenv.cfg"):
        if (real / name).exists():
            (fake / name).symlink_to(real / name)
    (fake / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    if py_spy is not None:
        path = fake / "bin" / "py-spy"
        path.write_text(f"#!/bin/sh\ntouch '{scenario.root}/py-spy-used'\n{py_spy}\n", encoding="utf-8")
        path.chmod(0o755)
    folders = [p for p in scenario.environment["PATH"].split(os.pathsep) if not (Path(p) / "py-spy").exists()]
    scenario.environment["PATH"] = os.pathsep.join(folders)
    return str(fake / "bin" / "python")


def py_spy_missing(scenario: Scenario) -> None:
    """py-spy is not installed."""
    scenario.finish(scenario.monitor(python=_python_with_py_spy(scenario, None)))


def py_spy_denied(scenario: Scenario) -> None:
    """py-spy ends at once with the error that containers without ptrace give."""
    script = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"
    scenario.finish(scenario.monitor(python=_python_with_py_spy(scenario, script)))


def py_spy_hung(scenario: Scenario) -> None:
    """py-spy starts and never ends."""
    scenario.finish(scenario.monitor(python=_python_with_py_spy(scenario, "exec sleep 86400")))


# ---- monitors that are killed, replaced or doubled ----


def second_monitor(scenario: Scenario) -> None:
    """While one monitor watches, another is started, in the foreground and detached."""
    first = scenario.monitor()
    scenario.until_step(6)
    for command in ("run", "start"):
        code = _command(scenario, command)
        if command == "run" and code == 0:
            raise Mismatch("`monitor run` beside a living monitor ended with code 0")
        if first.poll() is not None:
            raise Mismatch(f"the first monitor ended before `monitor {command}` beside it did")
        if len(scenario.trainers()) != 1:
            raise Mismatch(f"expected one trainer, found: {scenario.ours()}")
    scenario.go()
    scenario.finish(first)


def _command(scenario: Scenario, *words: str) -> int:
    """`python -m monitor WORDS RUN`; its exit code."""
    popen = scenario.monitor(*words)
    try:
        return popen.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        raise Mismatch(f"`monitor {' '.join(words)}` had not ended after {COMMAND_S:.0f} s") from None


def sigkill_monitor(scenario: Scenario) -> None:
    """The monitor and its keeper are killed; the training continues; a second monitor adopts it and starts nothing."""
    first = scenario.monitor()
    scenario.until_step(8)
    before = scenario.trainers()
    scenario.kill_monitor(first)
    scenario.until_step(scenario.steps()[-1]["step"] + 2)
    second = scenario.monitor()
    scenario.until("a second `started` event", lambda: len(scenario.events("started")) > 1)
    if not before or scenario.trainers() != before:
        raise Mismatch(f"the trainer was {before}, and under the new monitor it is {scenario.trainers()}")
    scenario.go()
    scenario.finish(second)
    _one_attempt(scenario)


def sigkill_below_keeper(scenario: Scenario) -> None:
    """The monitor is killed; its keeper replaces it within 10 s, and the new one starts nothing."""
    keeper = scenario.monitor()
    scenario.until_step(8)
    before, killed = scenario.trainers(), scenario.status()["monitor_pid"]
    os.kill(killed, signal.SIGKILL)
    scenario.until("another monitor", lambda: scenario.status()["monitor_pid"] != killed, 10.0 + scenario.slack_s)
    if not before or scenario.trainers() != before:
        raise Mismatch(f"the trainer was {before}, and under the new monitor it is {scenario.trainers()}")
    scenario.go()
    scenario.finish(keeper)
    _one_attempt(scenario)


def _one_attempt(scenario: Scenario) -> None:
    if {step["attempt"] for step in scenario.steps()} != {1}:
        raise Mismatch("another attempt was started although the training was alive")


def sigkill_in_recovery(scenario: Scenario) -> None:
    """The monitor is killed while it recovers from a hang; its keeper replaces it."""
    keeper = scenario.monitor()
    scenario.until("the recovery", lambda: scenario.status().get("state") == "recovering")
    os.kill(scenario.status()["monitor_pid"], signal.SIGKILL)
    scenario.finish(keeper)


def sigkill_both(scenario: Scenario) -> None:
    """The monitor is killed, later the trainer too: nobody saw how it ended."""
    first = scenario.monitor()
    scenario.until_step(8)
    scenario.kill_monitor(first)
    scenario.go()
    scenario.until("the end of the trainer", lambda: not scenario.trainers())
    watch(scenario)


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
    innocent = _reuse(pids, scenario)
    try:
        watch(scenario)
        ended = [popen.pid for popen in innocent if popen.poll() is not None]
        if ended:
            raise Mismatch(f"innocent processes were killed: {ended}")
    finally:
        for popen in innocent:
            popen.kill()
            popen.wait(10)


def _reuse(pids: list[int], scenario: Scenario) -> list[subprocess.Popen[bytes]]:
    """Sleeping processes with these pids (root may choose them), or whose pid monitor.json is made to name."""
    innocent = []
    for pid in pids:
        for _ in range(100):
            try:
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            except OSError:
                break
            popen = subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL)
            if popen.pid == pid:
                innocent.append(popen)
                break
            popen.kill()
            popen.wait(10)
    if not innocent:  # not root: the monitor's own record is made to name a living stranger
        popen = subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL)
        path = scenario.folder / "monitor.json"
        run_state = json.loads(path.read_text(encoding="utf-8"))
        run_state["current"]["root"][0] = popen.pid
        path.write_text(json.dumps(run_state), encoding="utf-8")
        innocent.append(popen)
    return innocent


# ---- disks ----


def frozen_disk(scenario: Scenario) -> None:
    """Until the disk is unfrozen, the run is not restarted."""
    monitor = scenario.monitor()
    _until_unkillable(scenario)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        begun = {pid for pid in scenario.trainers() if (p := platform.process_info(pid)) and p.state != "D"}
        if scenario.status()["attempt"] > 1 or begun:
            raise Mismatch(f"a second writer was started while the first could not be killed: {scenario.ours()}")
        time.sleep(0.1)
    unfreeze(scenario.root / "frozen")
    scenario.finish(monitor)


def frozen_for_good(scenario: Scenario) -> None:
    """The disk stays frozen: the monitor gives up with the reason."""
    monitor = scenario.monitor()
    _until_unkillable(scenario)
    scenario.finish(monitor)
    unfreeze(scenario.root / "frozen")


def _until_unkillable(scenario: Scenario) -> None:
    def reported() -> bool:
        texts = [scenario.status().get("message") or "", *(e["message"] for e in scenario.events())]
        return any("cannot be killed" in text for text in texts)

    scenario.until("the message that it cannot be killed", reported)


def disk_full(scenario: Scenario) -> None:
    """Once the failure is noticed, space is freed."""
    monitor = scenario.monitor()
    scenario.until("the crash", lambda: scenario.events("crash"))
    time.sleep(1.0)
    (scenario.data / "ballast").unlink()
    scenario.finish(monitor)


# ---- the machine and the user ----


def _preempted(scenario: Scenario, monitor: subprocess.Popen[bytes], more_at_s: tuple[float, ...] = ()) -> None:
    """Send SIGTERM now, and again after each of these seconds; Mismatch unless the monitor leaves preempted within 25 s."""
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


def three_sigterms(scenario: Scenario) -> None:
    """SIGTERM three times while a step hangs, so that no checkpoint can be saved: the deadline counts from the first."""
    monitor = scenario.monitor()
    scenario.until("the hang", lambda: scenario.steps() and INJECTED in _training_log(scenario))
    _preempted(scenario, monitor, (4.0, 8.0))


def _training_log(scenario: Scenario) -> str:
    with contextlib.suppress(OSError):
        return (scenario.folder / "training.log").read_text(encoding="utf-8", errors="replace")
    return ""


def stop_then_sigterm(scenario: Scenario) -> None:
    """`monitor stop`, then SIGTERM while the stop is under way: the user's stop is what counts."""
    monitor = scenario.monitor()
    scenario.until_step(14)
    if (code := _command(scenario, "stop")) != 0:
        raise Mismatch(f"`monitor stop` ended with code {code}")
    scenario.until("the stop", lambda: scenario.status().get("state") == "stopping")
    monitor.send_signal(signal.SIGTERM)
    scenario.finish(monitor)
    scenario.go()
    resumed = scenario.monitor("resume-all", folder=Path("--json"))
    if resumed.wait(COMMAND_S) != 0 or scenario.trainers():
        raise Mismatch(f"`monitor resume-all` restarted a run that the user had stopped: {scenario.ours()}")


def stop_in_backoff(scenario: Scenario) -> None:
    """`monitor stop` while the run waits for its restart."""
    first = scenario.monitor()
    scenario.until("the second failure's backoff", lambda: scenario.events("backoff"))
    if (code := _command(scenario, "stop")) != 0:
        raise Mismatch(f"`monitor stop` ended with code {code}")
    scenario.finish(first)


def two_runs(scenario: Scenario) -> None:
    """Two runs on the same GPU are started together."""
    scenario.environment["HANGPROOF_GPUS"] = f"scenario-{scenario.token}"
    other = scenario.root / "other"
    second_folder = scenario.new_run(other)
    environment = {**scenario.environment, "HANGPROOF_DATA": str(other)}
    first = scenario.monitor()
    scenario.until("the first run's trainer", scenario.trainers)
    second = scenario.monitor("run", folder=second_folder, env=environment)

    def status() -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((second_folder / "status.json").read_text(encoding="utf-8")))
        return {}

    scenario.until("the second run to be queued", lambda: status().get("state") == "queued")
    scenario.go()
    while first.poll() is None:
        if status().get("state") != "queued":
            if first.poll() is None and scenario.status().get("state") != "completed":
                raise Mismatch(f"the second run is {status().get('state')} while the first trains")
            break
        time.sleep(0.1)
    scenario.finish(first)
    scenario.finish(second)
    if status().get("state") != "completed":
        raise Mismatch(f"the second run ended as {status().get('state')}: {status().get('message')}")
    if sha256(second_folder / f"{NAME}.safetensors") != scenario.reference.sha256:
        raise Mismatch("the second run's LoRA is not that of an undisturbed run")


ACTIONS: dict[str, Callable[[Scenario], None]] = {
    action.__name__: action
    for action in (
        watch,
        clock_forward,
        clock_back,
        clock_jump,
        suspend,
        full_pipe,
        py_spy_missing,
        py_spy_denied,
        py_spy_hung,
        second_monitor,
        sigkill_monitor,
        sigkill_below_keeper,
        sigkill_in_recovery,
        sigkill_both,
        pid_reuse,
        frozen_disk,
        frozen_for_good,
        disk_full,
        sigterm_machine,
        three_sigterms,
        stop_then_sigterm,
        stop_in_backoff,
        two_runs,
    )
} | faults_recovery.ACTIONS
