"""Run one blocking call within a time limit; `TimeoutError` is raised where the call was made.

On the main thread of a Unix process SIGALRM interrupts the call in place, which costs a few system calls and no thread.
Elsewhere (pool threads, Windows, code that has an alarm of its own under way) the call runs in a helper thread, which
is abandoned when it does not return. SIGALRM does not wake a read in uninterruptible sleep (a dead NFS mount, a stalled
FUSE), so a deadline on another thread kills the process `alarm_backstop_s` later.

Always the builtin `TimeoutError`: a DataLoader worker pickles its exception for the parent, and the parent waited for
ever for one of a class that it could not import (measured).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from guards import limits
from guards.deadline import Deadline, call

T = TypeVar("T")


def bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """The result of `function()`, within `seconds` (0: no limit). The TimeoutError names what the process waited for."""
    if seconds <= 0:
        return function()
    if not _can_alarm():
        return call(function, seconds=seconds, what=what)
    with Deadline(seconds + limits.seconds("alarm_backstop_s"), f"{what} (not interruptible)"), _alarm(seconds, what):
        return function()


@contextmanager
def _alarm(seconds: float, what: str) -> Iterator[None]:
    finished = False

    def expired(_number: int, _frame: FrameType | None) -> None:
        if not finished:
            raise TimeoutError(f"waited {seconds:g} s for {what}")

    before = signal.signal(signal.SIGALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        finished = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


def _can_alarm() -> bool:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getitimer(signal.ITIMER_REAL)[0] == 0  # the alarm of other code keeps its time and its handler
