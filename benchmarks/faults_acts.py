"""What is done to a run from outside, by name of the row's `act`: mostly, to be its monitor and wait.

Each act takes the scene through to the end of its last monitor; what the row promises is compared afterwards. What only an
act can see on the way (who else was running, how long something took) it checks itself: `Wrong` says what was seen.
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

from benchmarks.faults_guard import thaw
from benchmarks.faults_reference import NAME, sha256
from benchmarks.faults_scene import Scene, Wrong
from monitor import system

PREEMPTED_WITHIN_S = 25.0
ANSWER_S = 120.0  # a command of the monitor's, on a loaded machine


def watch(scene: Scene) -> None:
    """One monitor, to its end."""
    scene.finish(scene.monitor())


# ---- clocks ----


def _clock(scene: Scene, **offsets: float) -> None:
    path = Path(scene.environment["HANGPROOF_CLOCK"])
    path.with_suffix(".new").write_text(json.dumps(offsets), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def _told_time(scene: Scene, moved_s: float) -> None:
    """Wrong, unless the monitor's own events say that the wall clock moved by that much: else nothing was tested."""
    times = [datetime.fromisoformat(event["t"]).timestamp() for event in scene.events()]
    passed = times[-1] - times[0]
    if abs(passed - moved_s) > 1800:
        raise Wrong(f"the clock was moved by {moved_s:.0f} s, and the monitor's events span {passed:.0f} s")


def clock_forward(scene: Scene) -> None:
    """In the middle of the run it is an hour later."""
    monitor = scene.monitor()
    scene.until_step(14)
    _clock(scene, wall=3600.0)
    scene.go()
    scene.finish(monitor)
    _told_time(scene, 3600.0)


def clock_back(scene: Scene) -> None:
    """In the middle of the run it is an hour earlier."""
    monitor = scene.monitor()
    scene.until_step(14)
    _clock(scene, wall=-3600.0)
    scene.go()
    scene.finish(monitor)
    _told_time(scene, -3600.0)


def suspend(scene: Scene) -> None:
    """Everything stops for four seconds, in which the boot clock goes on for an hour."""
    monitor = scene.monitor()
    scene.until_step(20)
    everyone = list(scene.ours())
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    _clock(scene, boot=3600.0, wall=3600.0)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    scene.go()
    scene.finish(monitor)
    _told_time(scene, 3600.0)
    if "the machine was suspended for" not in (scene.folder / "monitor.log").read_text(encoding="utf-8"):
        raise Wrong("the monitor does not say that the machine was suspended")


# ---- the monitor's own surroundings ----


def full_pipe(scene: Scene) -> None:
    """Nobody reads what the monitor says, and the pipe is full before it says anything."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    try:
        scene.finish(scene.monitor("run", stderr=writer, stdout=writer))
    finally:
        os.close(reader)
        os.close(writer)


def _python_beside(scene: Scene, py_spy: str | None) -> str:
    """An interpreter of an environment that is ours in all but py-spy: none, or this script in its place."""
    real, fake = Path(sys.prefix), scene.root / "python"
    (fake / "bin").mkdir(parents=True)
    for name in ("lib", "lib64", "pyvenv.cfg"):
        if (real / name).exists():
            (fake / name).symlink_to(real / name)
    (fake / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    if py_spy is not None:
        path = fake / "bin" / "py-spy"
        path.write_text(f"#!/bin/sh\ntouch '{scene.root}/py-spy-asked'\n{py_spy}\n", encoding="utf-8")
        path.chmod(0o755)
    places = [p for p in scene.environment["PATH"].split(os.pathsep) if not (Path(p) / "py-spy").exists()]
    scene.environment["PATH"] = os.pathsep.join(places)
    return str(fake / "bin" / "python")


def py_spy_missing(scene: Scene) -> None:
    """There is no py-spy."""
    scene.finish(scene.monitor(python=_python_beside(scene, None)))


def py_spy_denied(scene: Scene) -> None:
    """py-spy ends at once with the error that containers without ptrace give."""
    words = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"
    scene.finish(scene.monitor(python=_python_beside(scene, words)))


def py_spy_hung(scene: Scene) -> None:
    """py-spy starts and never ends."""
    scene.finish(scene.monitor(python=_python_beside(scene, "exec sleep 86400")))


# ---- monitors that come and go ----


def second_monitor(scene: Scene) -> None:
    """While one watches, another is started, in the foreground and detached."""
    first = scene.monitor()
    scene.until_step(6)
    for word in ("run", "start"):
        said = _word(scene, word)
        if word == "run" and said == 0:
            raise Wrong(f"`monitor {word}` beside a living monitor ended with code {said}")
        if first.poll() is not None:
            raise Wrong(f"the first monitor was gone before `monitor {word}` beside it had answered")
        if len(scene.trainers()) != 1:
            raise Wrong(f"expected the one trainer, and there are: {scene.ours()}")
    scene.go()
    scene.finish(first)


def _word(scene: Scene, word: str) -> int:
    """`python -m monitor WORD` on the run; its exit code."""
    asked = scene.monitor(word)
    try:
        return asked.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        raise Wrong(f"`monitor {word}` had not answered after {ANSWER_S:.0f} s") from None


def sigkill_monitor(scene: Scene) -> None:
    """The monitor is killed; the training goes on; a second monitor takes it over and starts nothing."""
    first = scene.monitor()
    scene.until_step(8)
    before = scene.trainers()
    first.kill()
    first.wait()
    scene.until_step(scene.steps()[-1]["step"] + 2)
    second = scene.monitor()
    scene.until(
        "the new monitor to take it up", lambda: any("took up" in e["message"] for e in scene.events("started"))
    )
    if not before or scene.trainers() != before:
        raise Wrong(f"the trainer was {before}, and after the new monitor came it is {scene.trainers()}")
    scene.go()
    scene.finish(second)
    if {step["attempt"] for step in scene.steps()} != {1}:
        raise Wrong("the new monitor began another attempt though the training was alive")


def sigkill_both(scene: Scene) -> None:
    """The monitor is killed, later the trainer too: nobody saw how it ended."""
    first = scene.monitor()
    scene.until_step(8)
    first.kill()
    first.wait()
    scene.go()
    scene.until("the end of the trainer", lambda: not scene.trainers())
    watch(scene)


def pid_reuse(scene: Scene) -> None:
    """Monitor and training are killed, and their numbers are given to innocent processes before a new monitor comes."""
    first = scene.monitor()
    scene.until_step(12)
    numbers = [first.pid, *scene.ours()]
    for pid in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first.wait()
    scene.go()
    scene.until("the end of all processes", lambda: not scene.ours())
    innocent = _reuse(numbers, scene)
    try:
        watch(scene)
        ended = [popen.pid for popen in innocent if popen.poll() is not None]
        if ended:
            raise Wrong(f"innocent processes were ended: {ended}")
    finally:
        for popen in innocent:
            popen.kill()
            popen.wait(10)


def _reuse(numbers: list[int], scene: Scene) -> list[subprocess.Popen]:
    """Sleeping processes that have these numbers (root may choose them), or whose numbers the monitor's book now names."""
    innocent = []
    for number in numbers:
        for _ in range(100):
            try:
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
            except OSError:
                break
            popen = subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL)
            if popen.pid == number:
                innocent.append(popen)
                break
            popen.kill()
            popen.wait(10)
    if not innocent:  # not root: the monitor's own notes are made to name a living stranger
        popen = subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL)
        path = scene.folder / "monitor.json"
        book = json.loads(path.read_text(encoding="utf-8"))
        book["attempt_under_way"]["root"][0] = popen.pid
        path.write_text(json.dumps(book), encoding="utf-8")
        innocent.append(popen)
    return innocent


# ---- disks ----


def frozen_disk(scene: Scene) -> None:
    """Until the disk thaws, the run is not started again."""
    monitor = scene.monitor()
    _until_unkillable(scene)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        begun = {pid for pid in scene.trainers() if (p := system.proc(pid)) and p.state != "D"}
        if scene.status()["attempt"] > 1 or begun:
            raise Wrong(f"a second writer was started while the first could not be ended: {scene.ours()}")
        time.sleep(0.1)
    thaw(scene.root / "frozen")
    scene.finish(monitor)


def frozen_for_good(scene: Scene) -> None:
    """The disk never thaws: the monitor gives up and says why."""
    monitor = scene.monitor()
    _until_unkillable(scene)
    scene.finish(monitor)
    thaw(scene.root / "frozen")


def _until_unkillable(scene: Scene) -> None:
    scene.until(
        "the word that it cannot be ended", lambda: any("cannot be ended" in e["message"] for e in scene.events())
    )


def disk_full(scene: Scene) -> None:
    """Once the failure is noticed, space comes back."""
    monitor = scene.monitor()
    scene.until("the crash", lambda: scene.events("crash"))
    time.sleep(1.0)
    (scene.data / "ballast").unlink()
    scene.finish(monitor)


# ---- the machine and the user ----


def sigterm_machine(scene: Scene) -> None:
    """Pre-emption: the monitor gets SIGTERM; later the run is taken up again."""
    first = scene.monitor()
    scene.until_step(14)
    asked = time.monotonic()
    first.send_signal(signal.SIGTERM)
    code = scene.finish(first)
    took_s = time.monotonic() - asked
    if code != 5 or took_s > PREEMPTED_WITHIN_S + scene.slack_s:
        raise Wrong(f"SIGTERM: code {code} after {took_s:.1f} s, expected 5 within {PREEMPTED_WITHIN_S:.0f} s")
    if scene.status().get("state") != "preempted":
        raise Wrong(f"SIGTERM: state {scene.status().get('state')}, expected preempted")
    if scene.ours():
        raise Wrong(f"SIGTERM: still running: {scene.ours()}")
    last = scene.steps()[-1]["step"]
    scene.go()
    watch(scene)
    repeated = [step["step"] for step in scene.steps() if step["attempt"] > 1 and step["step"] <= last]
    if repeated:
        raise Wrong(f"the checkpoint at the stop was not used: steps {repeated} were trained again")


def stop_in_backoff(scene: Scene) -> None:
    """`monitor stop` while the run waits for its restart."""
    first = scene.monitor()
    scene.until("the second failure's backoff", lambda: scene.events("backoff"))
    if (code := _word(scene, "stop")) != 0:
        raise Wrong(f"`monitor stop` ended with code {code}")
    scene.finish(first)


def two_runs(scene: Scene) -> None:
    """Two runs that want the same GPU are started together."""
    scene.environment["HANGPROOF_GPUS"] = f"scene-{scene.token}"
    other = scene.root / "other"
    second_folder = scene.new_run(other)
    environment = {**scene.environment, "HANGPROOF_DATA": str(other)}
    first = scene.monitor()
    scene.until("the first run's trainer", scene.trainers)
    second = scene.monitor("run", folder=second_folder, env=environment)

    def status() -> dict:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((second_folder / "status.json").read_text(encoding="utf-8"))
        return {}

    scene.until("the second run to be queued", lambda: status().get("state") == "queued")
    scene.go()
    while first.poll() is None:
        if status().get("state") != "queued":
            if first.poll() is None and scene.status().get("state") != "completed":
                raise Wrong(f"the second run is {status().get('state')} while the first trains")
            break
        time.sleep(0.1)
    scene.finish(first)
    scene.finish(second)
    if status().get("state") != "completed":
        raise Wrong(f"the second run ended as {status().get('state')}: {status().get('message')}")
    if sha256(second_folder / f"{NAME}.safetensors") != scene.reference.sha256:
        raise Wrong("the second run's LoRA is not that of an undisturbed run")


ACTS: dict[str, Callable[[Scene], None]] = {
    act.__name__: act
    for act in (
        watch,
        clock_forward,
        clock_back,
        suspend,
        full_pipe,
        py_spy_missing,
        py_spy_denied,
        py_spy_hung,
        second_monitor,
        sigkill_monitor,
        sigkill_both,
        pid_reuse,
        frozen_disk,
        frozen_for_good,
        disk_full,
        sigterm_machine,
        stop_in_backoff,
        two_runs,
    )
}
