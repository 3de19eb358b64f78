"""Every wait has an end: a deadline that names what it waited for and ends the process.

Decision: expiry ends the process with `os._exit(75)`, it does not raise. The wait it guards sits in C code (a queue, a
socket, a CUDA call), where no exception can reach it; and an error raised beside it would be followed by an interpreter
exit that joins the stuck thread for ever. The monitor restarts the run from its last checkpoint.

One daemon thread serves all deadlines of a process. Where a wait can be given up alone, `call` raises
the builtin TimeoutError instead: builtin, because an exception class that a parent process cannot unpickle hangs it.
"""

from __future__ import annotations

import faulthandler
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from guards import crash
from guards.heartbeat import Heartbeat

T = TypeVar("T")

LAST_WORDS_S = 5.0
"""What saying why may take: standard error may be a pipe that nobody reads any more."""
_heartbeat: Heartbeat | None = None


def use_heartbeat(heartbeat: Heartbeat | None) -> None:
    """Give deadlines a place for their last words."""
    global _heartbeat
    _heartbeat = heartbeat


def expire(seconds: float, what: str) -> None:
    """Say what was waited for, write every thread's stack, end the process with code 75."""
    crash.leave_within(LAST_WORDS_S, crash.EXIT_DEADLINE)
    message = f"waited {seconds:g} s for {what}"
    if _heartbeat is not None:
        _heartbeat.end("deadline", message)
    sys.stderr.write(f"\nhangproof: {message}; ending this process so that the run can go on\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    crash.leave(crash.EXIT_DEADLINE)


class _Watch:
    """The thread that waits for the earliest deadline. Made anew in a forked child, where threads do not survive."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.due: list[tuple[float, int, Deadline]] = []
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def add(self, deadline: Deadline) -> None:
        with self.changed:
            heapq.heappush(self.due, (deadline.at, next(_order), deadline))
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="hangproof-deadline", daemon=True)
                self.thread.start()
            elif self.due[0][2] is deadline:
                self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                while self.due and self.due[0][2].at != self.due[0][0]:
                    heapq.heappop(self.due)  # left or moved: its live entry, if any, stands elsewhere in the heap
                wait_s = self.due[0][0] - time.monotonic() if self.due else None
                if wait_s is None or wait_s > 0:
                    self.changed.wait(wait_s)
                    continue
                deadline = heapq.heappop(self.due)[2]
            deadline.action(deadline.seconds, deadline.what)
            deadline.at = None


_order = itertools.count()
_watch: _Watch | None = None


def _the_watch() -> _Watch:
    global _watch
    if _watch is None or _watch.pid != os.getpid():
        _watch = _Watch()
    return _watch


class Deadline:
    """`with Deadline(30, "the swap of block 7"): …` – leave in time, or the process ends with code 75.

    seconds: the budget; None or <= 0 means no deadline. what: a noun phrase for people. action: instead of ending the
    process, a function (seconds, what), run on the watching thread.
    """

    def __init__(self, seconds: float | None, what: str, action: Callable[[float, str], Any] | None = None):
        self.seconds = seconds if seconds and seconds > 0 else 0.0
        self.what = what
        self.action = action or expire
        self.at: float | None = None

    def __enter__(self) -> Deadline:
        if self.seconds:
            self.at = time.monotonic() + self.seconds
            _the_watch().add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.at = None

    def extend(self, seconds: float | None = None) -> None:
        """Progress was made: the budget starts again (`seconds`: a new one)."""
        if seconds is not None:
            self.seconds = seconds
        if self.at is not None:
            self.at = time.monotonic() + self.seconds
            _the_watch().add(self)


def call(function: Callable[..., T], *args: Any, seconds: float, what: str, **kwargs: Any) -> T:
    """function(*args, **kwargs) on a daemon thread: its result or its error, or TimeoutError after `seconds`.

    The thread of a call that timed out is abandoned (a daemon, so it holds no exit); use it for waits that hold no lock.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, function(*args, **kwargs)))
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            outcome.append((False, error))

    thread = threading.Thread(target=run, name=f"hangproof-call {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"waited {seconds:g} s for {what}")
    good, value = outcome[0]
    if not good:
        raise value
    return value
