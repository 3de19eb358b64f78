"""What is done to a run from outside, by the name in the row's `action`.

The run's monitor is started before its action, but for those in `STARTS_IT`, and the moment that the row's `wait` names
is waited for. Then the row's slow steps end, and `faults.play` waits for the end of the last monitor that was started.
An action gets the row's `faults.Scenario`, and asserts what only it can see on the way: which processes lived, how long
something took.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from monitor_helpers import events, kill_monitor
from run_facts import status
from runs_helpers import executable

from benchmarks.injector_files import fill
from monitor.cli.commands import line
from monitor.process import platform
from runs.files import atomic_write

PREEMPTED_WITHIN_S = 40.0  # 25 on a machine that has nothing else to do
COMMAND_S = 120.0  # for a command of the monitor, on a loaded machine
STARTS_IT = ("py_spy", "two_runs", "shm_full")
LITTLE_KB = 100_000  # of memory: less than snapshots and a standby leave to others


def clock(scenario, boot_s: float = 0.0) -> None:
    """The wall clock jumps by the row's `jump_s`: in the middle of the run, or while a standby waits."""
    offsets_s = {"wall": scenario.row["jump_s"], "boot": boot_s}
    atomic_write(Path(scenario.environment["FAULTS_CLOCK"]), json.dumps(offsets_s))


def suspend(scenario) -> None:
    """Every process stops for four seconds, in which the boot clock advances by an hour."""
    everyone = list(scenario.ours())
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    clock(scenario, boot_s=scenario.row["jump_s"])
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)


# ---- what the monitor runs with ----


def py_spy(scenario) -> None:
    """The monitor's interpreter is of a copy of our environment, whose py-spy is the row's script, or missing."""
    real, programs = Path(sys.prefix), scenario.root / "python" / "bin"
    programs.mkdir(parents=True)
    for name in ("lib", "lib64", "pyvenv.cfg"):
        if (real / name).exists():
            (programs.parent / name).symlink_to(real / name)
    scenario.python = str(programs / "python")
    os.symlink(os.path.realpath(sys.executable), scenario.python)
    if "py_spy" in scenario.row:
        executable(programs / "py-spy", f"#!/bin/sh\ntouch '{scenario.root}/py-spy-used'\n{scenario.row['py_spy']}\n")
    folders = [p for p in scenario.environment["PATH"].split(os.pathsep) if not (Path(p) / "py-spy").exists()]
    scenario.environment["PATH"] = os.pathsep.join(folders)
    scenario.monitor()


# ---- monitors that are killed, replaced or doubled ----


def second_monitor(scenario) -> None:
    """While one monitor watches, another is started, in the foreground and detached."""
    (first,) = scenario.monitors
    assert scenario.command("run").wait(COMMAND_S) != 0, "`monitor run` beside a living monitor ended with code 0"
    scenario.command("start").wait(COMMAND_S)
    assert first.poll() is None, "the first monitor ended before the one beside it did"
    assert len(scenario.trainers()) == 1, f"expected one trainer, found: {scenario.ours()}"


def sigkill_monitor(scenario) -> None:
    """The monitor and its keeper are killed; the training continues; a second monitor adopts it and starts nothing."""
    before = scenario.trainers()
    kill_monitor(scenario.monitors[-1], scenario.folder)
    scenario.until_step(scenario.steps()[-1]["step"] + 2)
    scenario.monitor()
    scenario.until("a second `started` event", lambda: len(events(scenario.folder, "started")) > 1)
    finish_same_attempt(scenario, before)


def sigkill_below_keeper(scenario) -> None:
    """The monitor is killed; its keeper replaces it, and the new one starts nothing."""
    before = scenario.trainers()
    replaced_monitor(scenario)
    finish_same_attempt(scenario, before)


def replaced_monitor(scenario) -> None:
    """SIGKILL to the monitor; wait for the one that its keeper starts."""
    killed = status(scenario.folder)["monitor_pid"]
    os.kill(killed, signal.SIGKILL)
    scenario.until("another monitor", lambda: status(scenario.folder)["monitor_pid"] != killed)


def finish_same_attempt(scenario, before: list[int]) -> None:
    now = scenario.trainers()
    assert before and now == before, f"the trainer was {before}, and under the new monitor it is {now}"
    scenario.go()
    scenario.finish()
    assert {step["attempt"] for step in scenario.steps()} == {1}, "another attempt was started beside a living training"


def sigkill_in_recovery(scenario) -> None:
    """The monitor is killed while it recovers from a hang; its keeper replaces it."""
    scenario.until("the recovery", lambda: status(scenario.folder)["state"] == "recovering")
    os.kill(status(scenario.folder)["monitor_pid"], signal.SIGKILL)


def sigkill_both(scenario) -> None:
    """The monitor is killed, later the trainer too: nobody saw how it ended."""
    kill_monitor(scenario.monitors[-1], scenario.folder)
    scenario.go()
    scenario.until("the end of the trainer", lambda: not scenario.trainers())
    scenario.monitor()


def pid_reuse(scenario) -> None:
    """Monitor and training are killed, and innocent processes get their pids before a new monitor starts."""
    (first,) = scenario.monitors
    pids = [first.pid, *scenario.ours()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first.wait()
    scenario.go()
    scenario.until("the end of all processes", lambda: not scenario.ours())
    innocent = with_pids(pids)
    try:
        scenario.monitor()
        scenario.finish()
        ended = [popen.pid for popen in innocent if popen.poll() is not None]
        assert innocent and not ended, f"innocent processes were killed: {ended} of {len(innocent)}"
    finally:
        for popen in innocent:
            popen.kill()
            popen.wait(10)


def with_pids(pids: list[int]) -> list[subprocess.Popen[bytes]]:
    """Innocent processes that sleep, with these pids of dead ones. Only root may choose."""
    innocent = []
    for pid in pids:
        for _ in range(100):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            popen = subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL)
            if popen.pid == pid:
                innocent.append(popen)
                break
            popen.kill()
            popen.wait(10)
    return innocent


# ---- disks ----


def unfreeze(frozen: Path) -> None:
    """Let a frozen file system take writes again; does nothing when it is not frozen."""
    if frozen.is_dir():
        subprocess.run(["fsfreeze", "--unfreeze", str(frozen)], check=False, capture_output=True, timeout=60)


def frozen_disk(scenario) -> None:
    """Until the disk is unfrozen the run is not restarted; where it stays frozen, the monitor gives up."""

    def reported() -> bool:
        texts = [status(scenario.folder).get("message") or "", *(e["message"] for e in events(scenario.folder))]
        return any("cannot be killed" in text for text in texts)

    scenario.until("the message that it cannot be killed", reported)
    if scenario.row["expect"]["state"] == "unkillable":
        scenario.finish()
    deadline = time.monotonic() + (0.0 if scenario.code >= 0 else 3.0)
    while time.monotonic() < deadline:
        begun = {pid for pid in scenario.trainers() if (p := platform.process_info(pid)) and p.state != "D"}
        alone = status(scenario.folder)["attempt"] == 1 and not begun
        assert alone, f"a second writer was started while the first could not be killed: {scenario.ours()}"
        time.sleep(0.1)
    unfreeze(scenario.root / "frozen")


def disk_full(scenario) -> None:
    """Once the failure is noticed, space is freed."""
    time.sleep(1.0)
    (scenario.data / "ballast").unlink()


# ---- the machine and the user ----


def sigterm_machine(scenario) -> None:
    """Pre-emption: the monitor gets SIGTERM, and leaves preempted in time; later the run is resumed."""
    begun_s = time.monotonic()
    scenario.monitors[-1].send_signal(signal.SIGTERM)
    scenario.finish()
    took_s = time.monotonic() - begun_s
    assert scenario.code == 5 and took_s < PREEMPTED_WITHIN_S, f"SIGTERM: code {scenario.code} after {took_s:.1f} s"
    assert status(scenario.folder)["state"] == "preempted"
    assert not scenario.ours(), f"SIGTERM: still running: {scenario.ours()}"
    last = scenario.steps()[-1]["step"]
    scenario.go()
    scenario.monitor()
    scenario.finish()
    repeated = [step["step"] for step in scenario.steps() if step["attempt"] > 1 and step["step"] <= last]
    assert not repeated, f"the checkpoint at the stop was not used: steps {repeated} were trained again"


def stop(scenario) -> None:
    assert scenario.command("stop").wait(COMMAND_S) == 0, "`monitor stop` failed"


def second_run(scenario) -> tuple[Path, dict[str, str]]:
    """Another run of the scenario's name, in a data root of its own: its folder, and the variables of its monitor."""
    other = scenario.root / "other"
    return scenario.new_run(other), {**scenario.environment, "HANGPROOF_DATA": str(other)}


def completes(scenario, folder: Path, monitor: subprocess.Popen[bytes], restarts: int) -> None:
    monitor.wait(240)
    found = status(folder)
    assert (found["state"], found["restarts"]) == ("completed", restarts), f"the second run: {found}"
    assert scenario.trainer.outcome(folder) == scenario.undisturbed.outcome


def two_runs(scenario) -> None:
    scenario.environment["HANGPROOF_GPUS"] = f"scenario-{scenario.token}"
    folder, env = second_run(scenario)
    first = scenario.monitor()
    scenario.until("the first run's trainer", scenario.trainers)
    second = scenario.command("run", folder=folder, env=env)
    scenario.until("the second run to be queued", lambda: status(folder)["state"] == "queued")
    scenario.go()
    while first.poll() is None and status(folder)["state"] == "queued":
        time.sleep(0.1)
    early = first.poll() is None and status(scenario.folder)["state"] != "completed"
    assert not early, f"the second run is {status(folder)['state']} while the first trains"
    scenario.finish()
    completes(scenario, folder, second, restarts=0)


def two_runs_one_machine(scenario) -> None:
    """Two runs of one name train at the same time, and the fault occurs in both."""
    folder, env = second_run(scenario)
    second = scenario.command("run", folder=folder, env=env)
    scenario.until_ready()
    scenario.until("the standby of the other run", lambda: (status(folder)["standby"] or {})["state"] == "ready")
    scenario.go()
    completes(scenario, folder, second, restarts=1)


# ---- snapshots in memory and the standby attempt ----


def standby_killed(scenario) -> None:
    """The standby gets SIGKILL while it waits; the training never notices, and the next one stands in at the fault."""
    first = int(scenario.standby()["pid"])
    for pid in scenario.trainers(at_gate=True):
        os.kill(pid, signal.SIGKILL)
    scenario.until_ready(but=first)


def standby_hung(scenario) -> None:
    """The standby is stopped at its gate, so it does not answer when it is needed."""
    waiting = scenario.trainers(at_gate=True)
    assert waiting, "no process waited at the gate, so nothing was tested"
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)


def monitor_killed_while_standby_starts(scenario) -> None:
    """SIGKILL to the monitor as soon as a standby is under way; its keeper replaces it, and another standby waits."""
    started, left = scenario.standby()["pid"], scenario.trainers(at_gate=True)
    training = [pid for pid in scenario.trainers() if pid not in left]
    replaced_monitor(scenario)
    scenario.until("the end of the dead monitor's standby", lambda: not set(left) & set(scenario.ours()))
    scenario.until_ready(but=started)
    now = scenario.trainers()
    assert training and set(training) <= set(now), f"the trainer was {training}, and under the new monitor it is {now}"


def until_snapshot(scenario, key: str = "step") -> None:
    """Wait until there is one (`step`), or the sentence why there are none (`off`)."""
    scenario.until(f"snapshots: {key}", lambda: (status(scenario.folder).get("snapshots") or {})[key])


def memory_short(scenario) -> None:
    """Memory becomes short: the standby and the snapshots give theirs back, and say so; then the training is killed."""
    until_snapshot(scenario)
    path = Path(scenario.environment["FAULTS_MEMINFO"])
    atomic_write(path, f"MemTotal: 999999 kB\nMemAvailable: {LITTLE_KB} kB\n")
    scenario.until("the standby's end", lambda: "memory is short" in scenario.standby()["reason"])
    off = lambda: "MB of memory left" in status(scenario.folder)["snapshots"]["off"]  # noqa: E731
    scenario.until("the snapshots' end", off)
    waiting = scenario.trainers(at_gate=True)
    assert not waiting, f"the standby is off and still lives: {waiting}"


def shm_full(scenario) -> None:
    """Another program fills the file system of the snapshots, to the last block, before the training starts."""
    fill(Path(scenario.environment["HANGPROOF_SHM"]))
    scenario.monitor()
    until_snapshot(scenario, "off")
    scenario.until_ready()


def shm_fills(scenario) -> None:
    """Another program fills the file system of the snapshots, to the last block, while the training writes them."""
    until_snapshot(scenario)
    fill(Path(scenario.environment["HANGPROOF_SHM"]))


def standby_is_killed_first(scenario) -> None:
    """The kernel's score of a standby is the highest; what it uses is said; the training's is everybody's."""
    scores = {pid: Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in scenario.ours()}
    waiting, training = scenario.trainers(at_gate=True), scenario.trainers()
    assert waiting and {scores[pid] for pid in waiting} == {"1000"}, scores
    assert training and "1000" not in {scores[pid] for pid in training}, scores
    found = status(scenario.folder)
    assert found["standby"]["memory_bytes"] > 20e6, "torch is in it"
    assert "next attempt ready (" in line(scenario.folder, {**found, "alive": True})
