"""Every wait has a limit: a deadline that names what the process waits for, and kills the process when it expires.

Decision: an expired deadline kills the process with `os._exit(75)`; it does not raise. The guarded wait sits in C code (a
queue, a socket, a CUDA call), where no exception reaches it, and an error raised on another thread is followed by an
interpreter exit that joins the stuck thread for ever. The monitor restarts the run from its last checkpoint.

One daemon thread serves all deadlines of a process. It needs the GIL, and C code that holds the GIL for ever stops it. So
there is a backstop that needs no GIL:

1. On Linux a kernel timer fires `gil_grace_s` after the earliest open deadline.
2. It must not kill a process that met its deadlines and then holds the GIL for long (a compiler) or is suspended (Ctrl-Z),
   but to set and clear it with each deadline would cost two system calls, more than everything else here.
3. So the timer stays set, and what it does is decided when it fires: the C library calls `system` with a command line in
   this process's memory, `#kill -s VTALRM PID`.
4. The shell ignores it as a comment; a deadline that opens overwrites the "#" with a space, the last that closes restores it.
5. A system call moves the timer only where it would fire too early, or more than a quarter of the grace late.

The signal makes faulthandler's C handler write the stacks, then the process dies (crash.enable_stacks). Windows has no such
timer, but `faulthandler.dump_traceback_later`, which starts and joins a thread each time (12 us). macOS has no such timer
either, and a fork while that thread runs is not safe: no backstop there.

Where a wait can be abandoned, `call` raises the builtin TimeoutError instead. Builtin, because an exception class that a
parent process cannot unpickle makes the parent hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from guards import crash, limits
from guards.heartbeat import Heartbeat

T = TypeVar("T")
POLL_S = 0.5  # between two calls of `waiting`

_heartbeat: Heartbeat | None = None
_backstop_on = False


def install(heartbeat: Heartbeat | None) -> None:
    """From now on an expired deadline writes its message to `heartbeat` (None: nowhere), and the GIL backstop is on.

    For a process of its own, after `crash.install`. Without this call deadlines work, without message and backstop.
    """
    global _heartbeat, _backstop_on, _watch
    _heartbeat = heartbeat
    if not _backstop_on:
        _backstop_on = True
        _watch = None  # a watch that was made before has no backstop; its thread still serves its own deadlines


def expire(seconds: float, what: str) -> None:
    """Report what the process waited for, write the stack of every thread, kill the process with exit code 75."""
    # Standard error may be a full pipe that nobody reads: the report has a limit, too.
    crash.exit_within(limits.seconds("expire_s"), crash.EXIT_DEADLINE)
    message = f"waited {seconds:g} s for {what}"
    if _heartbeat is not None:
        _heartbeat.end("deadline", message)
    sys.stderr.write(f"\nhangproof: {message}. The process exits so that the run can restart.\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    crash.exit_now(crash.EXIT_DEADLINE)


class _Timer(Protocol):
    def open(self, at_s: float) -> None:
        """The earliest open deadline expires at `at_s` (time.monotonic()): kill this process `gil_grace_s` later."""

    def close(self) -> None:
        """No deadline is open: kill nobody."""

    def idle(self) -> None:
        """No deadline has been open for a while. Called now and then, after `close`."""


class _SigEvent(ctypes.Structure):
    """struct sigevent of Linux, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * (64 - 8 - 2 * ctypes.sizeof(ctypes.c_void_p))),
    )


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: interval, then value."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns"))


class _KernelTimer:
    """A POSIX timer on CLOCK_MONOTONIC. Not inherited by a forked child, so each process makes its own."""

    _MONOTONIC = 1  # linux/time.h
    _ABSOLUTE = 1  # TIMER_ABSTIME
    _THREAD = 2  # SIGEV_THREAD: the C library calls `function(value)` on a thread of its own

    def __init__(self) -> None:
        """Raises OSError or AttributeError where the C library has no such timer."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._library, _ = libc, libc.timer_settime
        except AttributeError:  # glibc before 2.34
            self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        self._library.timer_settime.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._system = ctypes.cast(libc.system, ctypes.c_void_p)
        self._grace_s = limits.seconds("gil_grace_s")
        self._late_s = self._grace_s / 4
        self._fires_s = math.inf  # inf: it is not set
        self._from_s = self._to_s = math.inf  # a deadline that expires between these two needs no other time
        self._kept: list[object] = []  # the C library may still read the command of a timer that fired
        self._create()

    def _create(self) -> None:
        self._command = bytearray(f"#kill -s {signal.Signals(crash.BACKSTOP_SIGNAL).name[3:]} {os.getpid()}\0".encode())
        in_memory = (ctypes.c_char * len(self._command)).from_buffer(self._command)
        self._kept.append(in_memory)
        self._id = ctypes.c_void_p()
        event = _SigEvent(value=ctypes.addressof(in_memory), notify=self._THREAD, function=self._system)
        if self._library.timer_create(self._MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def open(self, at_s: float) -> None:
        if not self._from_s <= at_s <= self._to_s:
            self._from_s, self._to_s = at_s, at_s + self._late_s
            self._set(self._to_s + self._grace_s)
        self._command[0] = 32  # a space; this runs with every deadline, so it is short

    def close(self) -> None:
        self._command[0] = 35  # "#"

    def idle(self) -> None:
        self._from_s = self._to_s = math.inf
        self._set(math.inf)

    def _set(self, at_s: float) -> None:
        before_s, self._fires_s = self._fires_s, at_s
        self._settime(at_s)
        if time.monotonic() >= before_s:
            # It may have fired just before, as after Ctrl-Z and fg: its thread must not find the next deadline's command.
            self.close()
            self._library.timer_delete(self._id)
            with contextlib.suppress(OSError):  # the next deadline tries again
                self._create()
            self._settime(at_s)

    def _settime(self, at_s: float) -> None:
        if not self._id:
            self._from_s = self._to_s = math.inf
            return
        spec = _TimerSpec()  # all zero: never
        if at_s != math.inf:
            spec.value_s, spec.value_ns = int(at_s), int(at_s % 1 * 1e9)
        self._library.timer_settime(self._id, self._ABSOLUTE, ctypes.byref(spec), None)


class _FaulthandlerTimer:
    """faulthandler's thread, which does not need the GIL. Not safe in a child that is forked while it is set."""

    def __init__(self) -> None:
        self._grace_s = limits.seconds("gil_grace_s")
        self._at_s: float | None = None

    def open(self, at_s: float) -> None:
        if at_s != self._at_s:
            self._at_s = at_s
            faulthandler.dump_traceback_later(max(at_s + self._grace_s - time.monotonic(), 0.001), exit=True)

    def close(self) -> None:
        self._at_s = None
        faulthandler.cancel_dump_traceback_later()

    def idle(self) -> None:
        pass


def _make_timer() -> _Timer | None:
    if not _backstop_on:
        return None
    if sys.platform == "linux":
        try:
            return _KernelTimer()
        except (OSError, AttributeError) as error:
            sys.stderr.write(f"hangproof: no timer for the GIL backstop: {error}\n")
            return None
    return None if hasattr(os, "fork") else _FaulthandlerTimer()


class _Watch:
    """The thread that waits for the earliest deadline. A forked child makes its own, because threads do not survive."""

    def __init__(self) -> None:
        self.open: dict[Deadline, float] = {}  # -> when it expires
        self.lock = threading.RLock()  # a signal handler may enter a deadline while its thread holds it
        self.changed = threading.Condition(self.lock)
        self.thread: threading.Thread | None = None
        self.wakes_s = math.inf  # when the thread looks again by itself
        self.timer = _make_timer()
        self.forks = _forks  # a child that is forked has a copy that nobody serves

    def add(self, deadline: Deadline, at: float) -> None:
        with self.lock:
            self.open[deadline] = at
            if self.timer is not None:
                self.timer.open(min(self.open.values()) if len(self.open) > 1 else at)
            if at < self.wakes_s:
                self.wakes_s = at
                self.changed.notify()
                if self.thread is None:
                    self.thread = threading.Thread(target=self.run, name="hangproof-deadline", daemon=True)
                    self.thread.start()

    def remove(self, deadline: Deadline) -> None:
        with self.lock:
            if self.open.pop(deadline, None) is not None and self.timer is not None:
                if self.open:
                    self.timer.open(min(self.open.values()))
                else:
                    self.timer.close()

    def run(self) -> None:
        while True:
            with self.changed:
                deadline = min(self.open, key=self.open.__getitem__, default=None)
                now_s = time.monotonic()
                if deadline is not None:
                    self.wakes_s = self.open[deadline]
                elif now_s >= self.wakes_s:  # not at once: the next deadline would have to wake this thread
                    self.wakes_s = math.inf
                    if self.timer is not None:
                        self.timer.idle()
                if deadline is None or now_s < self.wakes_s:
                    self.changed.wait(None if self.wakes_s == math.inf else self.wakes_s - now_s)
                    continue
            deadline.action(deadline.seconds, deadline.what)
            self.remove(deadline)


_watch: _Watch | None = None
_forks = 0  # between the first process and this one


def _new_watch() -> _Watch:
    global _watch
    _watch = _Watch()
    return _watch


def _after_fork() -> None:
    global _watch, _forks
    _watch, _forks = None, _forks + 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Deadline:
    """`with Deadline(30, "the swap of block 7"): …`: the block ends in time, or the process exits with code 75.

    seconds: the limit; None or <= 0 means none. what: a noun phrase for people. action: called on the watching thread with
    (seconds, what) instead of killing the process.
    """

    __slots__ = ("_watch", "action", "seconds", "what")

    def __init__(self, seconds: float | None, what: str, action: Callable[[float, str], object] | None = None):
        self.seconds = seconds if seconds and seconds > 0 else 0.0
        self.what = what
        self.action = action or expire
        self._watch: _Watch | None = None

    def __enter__(self) -> Deadline:
        if self.seconds:
            self._watch = _watch or _new_watch()
            self._watch.add(self, time.monotonic() + self.seconds)
        return self

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and watch.forks == _forks:  # a child that was forked in the block has no such deadline
            watch.remove(self)

    def extend(self, seconds: float | None = None) -> None:
        """Restart the limit, with `seconds` as the new one if it is not None: there was progress."""
        if seconds is not None:
            self.seconds = seconds
        if self._watch is not None and self._watch.forks == _forks:
            self._watch.add(self, time.monotonic() + self.seconds)


def call(
    function: Callable[..., T],
    *args: object,
    seconds: float,
    what: str,
    waiting: Callable[[], object] | None = None,
    **kwargs: object,
) -> T:
    """The result or the error of function(*args, **kwargs), run on a daemon thread. TimeoutError after `seconds` (0: none).

    The thread of a call that timed out is abandoned (a daemon thread, so it does not block the exit). For waits that hold no
    lock. waiting: called about twice a second meanwhile; an error of it abandons the call, too.
    """
    if seconds <= 0:
        return function(*args, **kwargs)
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            failure.append(error)

    thread = threading.Thread(target=run, name=f"hangproof-call {what}", daemon=True)
    thread.start()
    end_s = time.monotonic() + seconds
    while thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
        thread.join(min(left_s, threading.TIMEOUT_MAX) if waiting is None else min(left_s, POLL_S))
        if waiting is not None:
            waiting()
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"waited {seconds:g} s for {what}")
    return outcome[0]
