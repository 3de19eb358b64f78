"""Every wait has a limit: a deadline that names what the process waits for, and kills the process when it expires.

Decision: an expired deadline kills the process with `os._exit(75)`; it does not raise. The guarded wait sits in C code
(a queue, a socket, a CUDA call), where no exception reaches it, and an error raised on another thread is followed by an
interpreter exit that joins the stuck thread for ever. The monitor restarts the run from its last checkpoint.

One daemon thread serves all deadlines of a process. It needs the GIL: C code that holds it for ever stops this thread
as well as the heartbeat, and then the monitor ends the process.

Where a wait can be abandoned (`call`) or interrupted (`bounded`), TimeoutError is raised instead. Always the builtin
one: a DataLoader worker pickles its exception for the parent, which waits for ever for a class that it cannot import.

What stands between the waits that are known (an import on a dead mount, a driver that does not answer, a lock in a
library) shows only as a heartbeat that stops: `watch_phases` limits the time between two beats.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from guards import crash, limits
from guards.heartbeat import PHASES, Heartbeat, read_all
from guards.reading import moved_bytes

T = TypeVar("T")
POLL_S = 0.5  # between two calls of `waiting`
WATCH_POLL_S = 0.1  # between two looks at all deadlines, at most
LEAST_PAUSE_S = 5.0  # a look that comes so much later: the process was stopped, as by Slurm's suspend or docker pause
READS = ("import", "load", "hash")  # phases that are silent while they read large files
READ = ("rchar", "read_bytes")  # by calls, and from the disk: only the latter counts what is read through a mapping
LEAST_READ_BYTES = 1 << 20  # read between two looks: fewer are no progress

record_in: Heartbeat | None = None
"""Where an expired deadline writes its message."""


def expire(seconds: float, what: str) -> None:
    """Report what the process waited for, write the stack of every thread, kill the process with exit code 75."""
    # Standard error may be a full pipe that nobody reads: the report has a limit, too.
    crash.exit_within(limits.seconds("expire_s"), crash.EXIT_DEADLINE)
    message = f"waited {seconds:g} s for {what}"
    if record_in is not None:
        record_in.end("deadline", message)
    print(f"\nhangproof: {message}. The process exits so that the run can restart.", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    crash.exit_now(crash.EXIT_DEADLINE)


_open: dict[Deadline, float] = {}  # of this process → when it expires, not counting `_stopped_s`
_stopped_s = 0.0  # for which this process was stopped
_thread: threading.Thread | None = None


def _watch() -> None:
    """The thread that looks for deadlines that have expired."""
    global _stopped_s
    while True:
        began_s = time.monotonic()
        left_s = min(list(_open.values()), default=math.inf) + _stopped_s - began_s
        time.sleep(min(max(left_s, 0.0), WATCH_POLL_S))  # to the moment: torch's own limits may be the same
        took_s = time.monotonic() - began_s
        _stopped_s += took_s if took_s > LEAST_PAUSE_S else 0.0
        now_s = time.monotonic() - _stopped_s
        for deadline, expires_s in list(_open.items()):
            if expires_s <= now_s and _open.pop(deadline, None) is not None:
                deadline.action(deadline.seconds, deadline.what)


def _after_fork() -> None:
    """A forked child has neither the thread nor the deadlines of its parent."""
    global _thread
    _thread = None
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Deadline:
    """`with Deadline(30, "the swap of block 7"): …`: the block ends in time, or the process exits with code 75.

    seconds: the limit; None or <= 0 means none. what: a noun phrase for people. action: called on the watching thread
    with (seconds, what) instead of killing the process.
    """

    def __init__(self, seconds: float | None, what: str, action: Callable[[float, str], object] | None = None):
        self.seconds, self.what, self.action = max(seconds or 0.0, 0.0), what, action or expire

    def __enter__(self) -> Deadline:
        global _thread
        if self.seconds:
            _open[self] = time.monotonic() - _stopped_s + self.seconds
            if _thread is None:
                _thread = threading.Thread(target=_watch, name="hangproof-deadline", daemon=True)
                _thread.start()
        return self

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        _open.pop(self, None)


def call(
    function: Callable[..., T],
    *args: object,
    seconds: float,
    what: str,
    waiting: Callable[[], object] | None = None,
    **kwargs: object,
) -> T:
    """The result or error of function(*args, **kwargs), run on a daemon thread. TimeoutError after `seconds` (0: none).

    The thread of a call that timed out is abandoned (a daemon thread, so it does not block the exit). For waits that
    hold no lock. waiting: called about twice a second meanwhile; an error of it abandons the call, too.
    """
    if seconds <= 0:
        return function(*args, **kwargs)
    outcome, failure = list[T](), list[BaseException]()

    def run() -> None:
        try:
            outcome.append(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            failure.append(error)

    thread = threading.Thread(target=run, name=f"hangproof-call {what}", daemon=True)
    thread.start()
    end_s = time.monotonic() + seconds
    while thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
        thread.join(min(left_s, POLL_S))
        if waiting is not None and thread.is_alive():
            waiting()
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"waited {seconds:g} s for {what}")
    return outcome[0]


def bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """The result of `function()`. TimeoutError after `seconds` (0: no limit), raised where the call is made.

    On the main thread of a Unix process SIGALRM interrupts the call in place, which costs no thread. Elsewhere (pool
    threads, Windows, code that has an alarm of its own under way) the call is abandoned. SIGALRM does not wake a read
    in uninterruptible sleep (a dead NFS mount, a stalled FUSE): `alarm_backstop_s` later a deadline kills the process.
    """
    on_main = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds <= 0 or not on_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        return call(function, seconds=seconds, what=what)
    finished = False

    def expired(*_: object) -> None:
        if not finished:
            raise TimeoutError(f"waited {seconds:g} s for {what}")

    with Deadline(seconds + limits.seconds("alarm_backstop_s"), f"{what} (not interruptible)"):
        before = signal.signal(signal.SIGALRM, expired)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return function()
        finally:
            finished = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


def watch_phases(heartbeat: Heartbeat, interval_s: float = 5.0) -> None:
    """Start the thread that ends this process when the time since the last beat exceeds the limit of its phase.

    The monitor sees that, too; this works without one, and before it. A process that reads from a disk in a phase that
    reads (loading 24 GB from a slow one sends no beat) gets more time. One of several processes may wait in any phase for
    what another one does, such as ten sample images: the progress of one is that of all on this machine.
    """

    def watch() -> None:
        table = {phase: limits.seconds(f"phase_{phase}_s") for phase in PHASES}
        read, progress_s = moved_bytes("self", READ) or 0, time.monotonic()
        while True:
            before_s, before = time.monotonic(), read
            time.sleep(interval_s)
            now_s, read = time.monotonic(), moved_bytes("self", READ) or 0
            phase = heartbeat.current_phase
            slept = now_s - before_s > 2 * interval_s  # this process was stopped, or the machine slept
            if slept or (phase in READS and read - before > LEAST_READ_BYTES):
                progress_s = now_s
            group = read_all(heartbeat.path.parent) if heartbeat.path and heartbeat.record.world > 1 else []
            silent_s = now_s - max(progress_s, heartbeat.record.beat_s, *(beat.beat_s for beat in group))
            if table[phase] and silent_s > table[phase]:
                expire(table[phase], f"any progress in phase {phase}")

    threading.Thread(target=watch, name="hangproof-phase-limit", daemon=True).start()
