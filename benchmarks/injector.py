"""Injects faults into a training process from inside, at a known step: `HANGPROOF_INJECT=benchmarks.injector:fire`.

Decision: the trainers know nothing of faults. The heartbeat calls the injector that the environment names, and the
injector makes the process fail as real ones do, so the code under test is the code that ships. The log does not name
the fault: a monitor that reads logs for causes must not find the answer there.

    HANGPROOF_FAULT       one of FAULTS, or nothing
    HANGPROOF_FAULT_STEP  the completed step at which it occurs (default 1)
    HANGPROOF_FAULT_PHASE in this phase instead ("save", "sample", "load"…), or at a check point ("check point loader")
    HANGPROOF_FAULT_RANK  only in this rank
    HANGPROOF_FAULT_EVERY 1: on every attempt (default: only on attempt 1)
    HANGPROOF_FAULT_ARG   the fault's argument: seconds, a path, a list
    HANGPROOF_FAULT_MARK  a file that is made when it occurs
    HANGPROOF_WRITERS     the folder of locks and reports that show whether a run ever has two writers; unset: none
    HANGPROOF_PACE_S      a step takes at least this many seconds, so that tiny models last as long as real ones
    HANGPROOF_SLOW        STEP:SECONDS:FILE: from that step on, a step takes this long until FILE exists; an action from
                          outside then has time, however loaded the machine
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import injector_files
from guards.heartbeat import REQUEST_STOP, Heartbeat, set_request

INJECTED = "a fault is injected here"
FOREVER_S = 24 * 3600.0
_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000  # linux/sched.h


def step_sleeps(_: Heartbeat) -> None:
    """The main thread sleeps forever, as in a wait for a worker that never answers."""
    time.sleep(FOREVER_S)


def gil_held(_: Heartbeat) -> None:
    """C code that locks a mutex twice while it holds the GIL: no Python thread or handler runs again."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)  # PyDLL keeps the GIL; zeros are unlocked
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def busy_loop(heartbeat: Heartbeat) -> None:
    """A loop that burns CPU while another thread keeps beating: liveness without progress."""

    def beat() -> None:
        while True:
            heartbeat.item(0)
            time.sleep(0.05)

    heartbeat._inject = lambda *_: None
    threading.Thread(target=beat, daemon=True).start()
    while True:
        pass


def lock_deadlock(_: Heartbeat) -> None:
    """Two threads and two locks; each thread waits for the lock that the other holds."""
    first, second = threading.Lock(), threading.Lock()
    first.acquire()

    def other() -> None:
        with second, first:
            pass

    threading.Thread(target=other, daemon=True).start()
    time.sleep(0.1)
    second.acquire()


def raises(_: Heartbeat) -> None:
    """An ordinary exception in the training loop."""
    raise RuntimeError("injected: the step failed")


def shared_memory(_: Heartbeat) -> None:
    """What torch raises when the loader's workers find /dev/shm full: the run goes on without workers, at once."""
    if loader_workers():
        raise RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")


def exit_zero(_: Heartbeat) -> None:
    """The process exits in the middle of the run with exit code 0 and no message."""
    os._exit(0)


def exit_hangs(_: Heartbeat) -> None:
    """From now on the process trains to its end, reports that it is done, and then does not exit."""
    from guards import crash

    def exit_now(code: int, grace_s: float = 0.0) -> None:
        time.sleep(FOREVER_S)

    crash.exit_now = exit_now  # type: ignore[assignment]  # it returns late instead of never


def stop_requested(heartbeat: Heartbeat) -> None:
    """The monitor's request to stop."""
    assert heartbeat.path is not None
    set_request(heartbeat.path, REQUEST_STOP)


def slow(_: Heartbeat) -> None:
    """Each beat of the phase takes this many seconds longer (`HANGPROOF_FAULT_ARG`)."""
    time.sleep(float(os.environ["HANGPROOF_FAULT_ARG"]))


def vfork(_: Heartbeat) -> None:
    """The main thread waits in the kernel, state D, for a child made by vfork that never execs."""
    libc = ctypes.CDLL(None, use_errno=True)
    stack = mmap.mmap(-1, 1 << 16)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 16)
    # The child runs libc's pause() on a stack of its own: no Python in it, nothing of ours is touched.
    flags = _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD
    libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(top - 64), flags, None)


def deaf_child(_: Heartbeat) -> None:
    """A child that ignores SIGTERM is left running, and the main thread sleeps."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(86400)"
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(FOREVER_S)


def session_grandchild(_: Heartbeat) -> None:
    """A grandchild in a session of its own, whose parent is gone, and the main thread sleeps."""
    subprocess.run(["sh", "-c", "setsid sleep 86400 >/dev/null 2>&1 </dev/null &"], check=True)
    time.sleep(FOREVER_S)


def orphaned(_: Heartbeat) -> None:
    """The launcher is killed; this process continues to train without a parent."""
    os.kill(os.getppid(), signal.SIGKILL)


def zombie(heartbeat: Heartbeat) -> None:
    """The launcher is stopped, then this process is killed: nothing reaps it."""
    os.kill(os.getppid(), signal.SIGSTOP)
    signal_self("SIGKILL", heartbeat)


def shouts(_: Heartbeat) -> None:
    """8 MB on standard error at once: far more than any pipe holds."""
    for number in range(80_000):
        print(f"a warning that nobody reads, number {number:06d}, long enough to fill a line of a log", file=sys.stderr)
    sys.stderr.flush()


def tqdm_restarts(heartbeat: Heartbeat) -> None:
    """The phase counts its items several times from 1, like new tqdms. `HANGPROOF_FAULT_ARG` = `ITEMS:SECONDS,…`."""
    phase, total, inject = heartbeat.current_phase, heartbeat.record.total, heartbeat._inject
    words = (loop.split(":") for loop in os.environ["HANGPROOF_FAULT_ARG"].split(","))
    loops = [(int(items), float(seconds)) for items, seconds in words]
    heartbeat._inject = lambda *_: None
    heartbeat.phase(phase, max(items for items, _ in loops))
    for items, seconds in loops:
        for done in range(1, items + 1):
            time.sleep(seconds)
            heartbeat.item(done)
    heartbeat.phase(phase, total)
    heartbeat._inject = inject


_workers_sleep: mmap.mmap | None = None


def prepare_worker_sleeps(_: Heartbeat) -> None:
    """Before the workers are forked: a flag that they share and check at each read of a cache file."""
    global _workers_sleep
    from guards import npz

    flag, main, load = mmap.mmap(-1, 1), os.getpid(), npz.load

    def sleepy(*args: Any, **kwargs: Any) -> Any:
        if flag[0] and os.getpid() != main:
            time.sleep(FOREVER_S)
        return load(*args, **kwargs)

    npz.load, _workers_sleep = sleepy, flag  # for the workers


def worker_sleeps(_: Heartbeat) -> None:
    """The workers of the data loader sleep forever in the middle of a read."""
    assert _workers_sleep is not None, "prepare_worker_sleeps was not called"
    _workers_sleep[0] = 1


def loader_workers() -> list[int]:
    """The DataLoader's processes: our children that run this very program."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children", encoding="ascii") as file:
        children = [int(pid) for pid in file.read().split()]
    mine = os.readlink("/proc/self/exe")
    return [pid for pid in children if os.readlink(f"/proc/{pid}/exe") == mine]


def signal_worker(name: str, _: Heartbeat) -> None:
    """A worker of the data loader gets the signal."""
    for pid in loader_workers()[:1]:  # none: the run was changed to do without workers
        os.kill(pid, signal.Signals[name])


def signal_self(name: str, _: Heartbeat) -> None:
    """This process gets the signal."""
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(1)


_BY_NAME = (
    *(step_sleeps, gil_held, busy_loop, lock_deadlock, vfork, worker_sleeps, slow, shouts, tqdm_restarts),
    *(raises, shared_memory, exit_zero, exit_hangs, stop_requested),
    *(deaf_child, session_grandchild, orphaned, zombie),
)
FAULTS: dict[str, Callable[[Heartbeat], None]] = {
    **{fault.__name__: fault for fault in _BY_NAME},
    "slow_once": slow,
    "sigstop": partial(signal_self, "SIGSTOP"),
    "sigkill": partial(signal_self, "SIGKILL"),
    "segv": partial(signal_self, "SIGSEGV"),
    "abort": partial(signal_self, "SIGABRT"),
    "worker_stopped": partial(signal_worker, "SIGSTOP"),
    "worker_killed": partial(signal_worker, "SIGKILL"),
    **injector_files.FAULTS,
}
PREPARE = {"worker_sleeps": prepare_worker_sleeps, "kill_in_save": injector_files.prepare_kill_in_save}
"""What must be in place before the first step, because the loader's workers are forked then."""
REPEATING = ("slow",)

_last_step = [0.0, -1]  # when the last step ended (monotonic seconds), its number
_state = {"prepared": False, "injected": False}
_held: list[Any] = []  # the lock of this process's run

WRITERS = "HANGPROOF_WRITERS"
REPORT = "doubled-{pid}.txt"


def claim() -> None:
    """Take the lock of this process's run once, and keep it. Another process that holds it is reported.

    A POSIX record lock: the kernel releases it when the process dies, however it dies, and a forked worker does not
    inherit it. One that finds it taken goes on, so the row that is played ends as it would, and then fails.
    """
    folder, run = os.environ.get(WRITERS, ""), os.environ.get("HANGPROOF_RUN", "")
    if _held or not folder:
        return
    import fcntl  # Windows, which has none, has only the drill

    path = Path(folder) / f"{hashlib.sha256(run.encode()).hexdigest()[:16]}.lock"
    lock = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    _held.append(lock)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        attempt, other = os.environ.get("HANGPROOF_ATTEMPT", "1"), lock.read().split("\n")[-2:][0]
        text = f"process {os.getpid()} (attempt {attempt}) trains while {other or 'another one'} trains {run}"
        (Path(folder) / REPORT.format(pid=os.getpid())).write_text(text, encoding="utf-8")
    else:
        lock.write(f"process {os.getpid()} (attempt {os.environ.get('HANGPROOF_ATTEMPT', '1')})\n")
        lock.flush()


def doubled(folder: Path) -> list[str]:
    """The reports in this folder: one sentence for each process that trained beside another one of its run."""
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob(REPORT.format(pid="*")))]


def pace_s(step: int) -> float:
    """The least duration of this step, seconds."""
    start, seconds, file = os.environ.get("HANGPROOF_SLOW", "::").split(":", 2)
    if file and step >= int(start) and not os.path.exists(file):
        return float(seconds)
    return float(os.environ.get("HANGPROOF_PACE_S", "0"))


def fire(phase: str, step: int, heartbeat: Heartbeat) -> None:
    """Called at each beat: pace the steps, and inject the fault when its moment has come."""
    claim()
    if phase == "step" and step != _last_step[1]:
        wait_s = _last_step[0] + pace_s(step) - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        _last_step[:] = time.monotonic(), step
    name = os.environ.get("HANGPROOF_FAULT")
    if not name or (_state["injected"] and name not in REPEATING):
        return
    if os.environ.get("HANGPROOF_ATTEMPT", "1") != "1" and os.environ.get("HANGPROOF_FAULT_EVERY") != "1":
        return
    if phase == "first_step" and name in PREPARE and not _state["prepared"]:
        _state["prepared"] = True
        PREPARE[name](heartbeat)
    in_phase = os.environ.get("HANGPROOF_FAULT_PHASE", "step")
    if phase != in_phase or step < int(os.environ.get("HANGPROOF_FAULT_STEP", "1")):
        return
    if os.environ.get("HANGPROOF_FAULT_RANK", str(heartbeat.rank)) != str(heartbeat.rank):
        return
    if not _state["injected"]:
        _state["injected"] = True
        print(f"{INJECTED} (phase {phase}, step {step})", file=sys.stderr, flush=True)
        if "HANGPROOF_FAULT_MARK" in os.environ:
            Path(os.environ["HANGPROOF_FAULT_MARK"]).touch()
    FAULTS[name](heartbeat)
