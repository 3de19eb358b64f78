"""Run one blocking call within a time limit; `TimeoutError` is raised where the call was made.

On the main thread of a Unix process SIGALRM interrupts the call in place, which costs two system calls and no thread.
Everywhere else (pool threads, Windows) the call runs in a helper thread, which is abandoned when it does not return.
SIGALRM has two limits. It does not wake a read in uninterruptible sleep (a dead NFS mount, a stalled FUSE), so a
deadline on another thread kills the process `alarm_backstop_s` later. And other code may have set an alarm before:
that one keeps its time and its handler.

Always the builtin `TimeoutError`: a DataLoader worker pickles its exception for the parent, and the parent waited for
ever for one of a class that it could not import (measured).
"""

from __future__ import annotations

import signal
import threading
import time
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
    with Deadline(seconds + limits.seconds("alarm_backstop_s"), f"{what} (not interruptible)"), alarm(seconds, what):
        return function()


@contextmanager
def alarm(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`. ValueError outside the main thread (a rule of `signal`).

    An alarm that was set before is restored with its remaining time. It fires in the body if it is due first.
    """
    outer = signal.getsignal(signal.SIGALRM)
    outer_left, outer_every = signal.setitimer(signal.ITIMER_REAL, 0)
    began = time.monotonic()
    finished = False

    def expired(number: int, frame: FrameType | None) -> None:
        nonlocal outer_left, began, seconds
        passed = time.monotonic() - began
        if outer_left and outer_left <= passed + 1e-3 and passed + 1e-3 < seconds:
            # The outer alarm is due, not ours. If its handler returns, our remaining time still counts.
            outer_left, began, seconds = outer_every, time.monotonic(), seconds - passed
            signal.setitimer(signal.ITIMER_REAL, min(seconds, outer_left) if outer_left else seconds)
            _run_handler(outer, number, frame)
        elif not finished:
            raise TimeoutError(f"waited {seconds:g} s for {what}")

    try:
        try:
            signal.signal(signal.SIGALRM, expired)
            signal.setitimer(signal.ITIMER_REAL, min(seconds, outer_left) if outer_left else seconds)
            yield
        finally:
            finished = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer if outer is not None else signal.SIG_DFL)
        if outer_left:
            left = outer_left - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), outer_every)


def _can_alarm() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _run_handler(handler: object, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
