"""Run one blocking call for at most so many seconds, then raise `TimeoutError` where it was made.

On a main thread of a Unix process the call is interrupted in place by SIGALRM, which costs two system calls and no
thread. Everywhere else (pool threads, Windows) it runs in a helper thread that is left behind when it does not
return. Two limits of SIGALRM decide the rest: a read in uninterruptible sleep (a dead NFS mount, a stalled FUSE) is
not woken by it, so a second deadline, a little later and from another thread, ends the process; and an outer alarm that
somebody else has set keeps its own time and its own handler.

Always the builtin `TimeoutError`: a DataLoader worker pickles its exception for the parent, and a class that the
parent cannot import left it waiting for ever (measured).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from guards.deadline import Deadline, call

T = TypeVar("T")
BACKSTOP_S = 5.0
"""How much later than the alarm the process is ended where the alarm could not interrupt the call."""


def bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """`function()`, within `seconds` (0: no limit). Raises TimeoutError saying what was waited for."""
    if seconds <= 0:
        return function()
    if not _can_alarm():
        return call(function, seconds=seconds, what=what)
    with Deadline(seconds + BACKSTOP_S, f"{what} (not interruptible)"), alarm(seconds, what):
        return function()


@contextmanager
def alarm(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`. Main thread only (ValueError elsewhere: signal's own rule).

    An alarm that was set before is put back with the time it has left, and fires in the body if it is due first.
    """
    outer = signal.getsignal(signal.SIGALRM)
    outer_left, outer_every = signal.setitimer(signal.ITIMER_REAL, 0)
    begun = time.monotonic()
    over = False

    def expired(number: int, frame: object) -> None:
        nonlocal outer_left, begun, seconds
        passed = time.monotonic() - begun
        if outer_left and outer_left <= passed + 1e-3 and passed + 1e-3 < seconds:
            # The outer alarm is due, not ours. If its handler returns, the rest of our time still counts.
            outer_left, begun, seconds = outer_every, time.monotonic(), seconds - passed
            signal.setitimer(signal.ITIMER_REAL, min(seconds, outer_left) if outer_left else seconds)
            _hand_over(outer, number, frame)
        elif not over:
            raise TimeoutError(f"waited {seconds:g} s for {what}")

    try:
        try:
            signal.signal(signal.SIGALRM, expired)
            signal.setitimer(signal.ITIMER_REAL, min(seconds, outer_left) if outer_left else seconds)
            yield
        finally:
            over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer if outer is not None else signal.SIG_DFL)
        if outer_left:
            left = outer_left - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), outer_every)


def _can_alarm() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _hand_over(handler: object, number: int, frame: object) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
