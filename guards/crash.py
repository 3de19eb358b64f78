"""A process that failed exits, and can report the stack of every thread.

Decision: once an uncaught error is printed, `os._exit` ends the process. The interpreter's own exit joins every pool
thread and every loader worker, and joins a stuck one for ever (measured with sd-scripts: a traceback on the screen, and
the process still alive the next morning). Stacks come from faulthandler on a signal: its handler is C code, which runs
while other code holds the GIL. A Python handler does not.

A machine that shuts down sends SIGTERM to all processes at once (systemd to the cgroup, Slurm to the job step), so the
training cannot rely on the monitor. A watched training process treats the first SIGTERM as a request to save a state at
the next step boundary. At the second one, or where no step is complete, it dies as any process does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import IO, Any, NoReturn

from guards import limits
from guards.heartbeat import Heartbeat, stacks_path

EXIT_FAILED = 1
EXIT_STOPPED = 3
EXIT_DEADLINE = 75  # EX_TEMPFAIL of sysexits.h: try again

_stacks_file: IO[str] | None = None  # faulthandler keeps its descriptor, so the object lives as long as the process


def _enable_stacks() -> None:
    """Write the stack of every thread on SIGUSR2 and on a fatal signal, into a file of this process (mode 0600).

    Without a folder, `$HANGPROOF_HEARTBEAT`, fatal signals write to standard error; SIGUSR2 is not handled. After a
    fork the child gets its own file. Raises OSError.
    """
    global _stacks_file
    folder = os.environ.get("HANGPROOF_HEARTBEAT")
    if not folder:
        return faulthandler.enable()
    path = stacks_path(folder, os.getpid())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = partial(os.open, mode=0o600)
    file = open(path, "a", encoding="utf-8", opener=private)  # noqa: SIM115 - see _stacks_file
    faulthandler.enable(file=file)
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _stacks_file = file


def exit_now(code: int) -> NoReturn:
    """Flush the log and the output within the limit `flush_s`, then end this process with `code`.

    Threads, workers and exit handlers that still run do not delay it.
    """

    def flush() -> None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or its disk is full: nowhere to report it
            if "logging" in sys.modules:  # not in the monitor, which imports this file, too
                sys.modules["logging"].shutdown()
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()

    flushing = threading.Thread(target=flush, name="hangproof-flush", daemon=True)
    flushing.start()
    flushing.join(limits.seconds("flush_s"))
    os._exit(code)


def exit_within(seconds: float, code: int) -> None:
    """This process exits with `code` in `seconds` at the latest, even if what it still writes blocks on a full pipe."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _or_lose(call: Callable[..., Any], *text: str) -> Any:
    """A log whose disk is full, or fails for a moment, costs lines, never a step: tqdm writes one at each."""
    with contextlib.suppress(OSError):
        return call(*text)


def install(heartbeat: Heartbeat) -> None:
    """Write stacks on a signal, and exit after an uncaught error on the main thread. Raises OSError.

    What the log's disk does not take is lost, without an error. An uncaught error is printed and recorded in the
    heartbeat; then the process exits with code 1 within `flush_s`, even when another thread is stuck.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.write, stream.flush = partial(_or_lose, stream.write), partial(_or_lose, stream.flush)
    _enable_stacks()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_enable_in_child)
    if heartbeat.path is not None:
        _save_at_term(heartbeat)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ignore_child_deaths()
        previous(kind, error, trace)
        code = 130 if issubclass(kind, KeyboardInterrupt) else EXIT_FAILED
        heartbeat.end("failed", "".join(traceback.format_exception_only(kind, error)).strip())
        exit_now(code)

    sys.excepthook = hook


def ignore_child_deaths() -> None:
    """From now on the death of a child process raises nothing here. For a process that is about to exit.

    torch's SIGCHLD handler raises for a dead loader worker wherever the main thread is. Raised while a traceback is
    printed, it replaces that traceback (measured: in 8 of 300 runs whose worker was killed).
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    while signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        with contextlib.suppress(RuntimeError):  # a signal that is pending raises once more
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _save_at_term(heartbeat: Heartbeat) -> None:
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        return  # Windows has neither; Python handlers belong to the main thread

    first, owner = True, os.getpid()

    def term(number: int, _: object) -> None:
        nonlocal first
        if first and os.getpid() == owner and heartbeat.request_stop():
            first = False
            # The loader's workers got the signal too, and torch's handler would raise for them in mid-step.
            ignore_child_deaths()
            with contextlib.suppress(OSError):
                os.write(2, b"hangproof: SIGTERM: saving a state at the next step boundary\n")  # print is not reentrant
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def child() -> None:
        if signal.getsignal(signal.SIGTERM) is term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, term)
        # Python loses a signal that it has noted when it forks a child, and its sender would wait for ever.
        change = partial(signal.pthread_sigmask, mask=[signal.SIGTERM])
        release = partial(change, signal.SIG_UNBLOCK)
        os.register_at_fork(before=partial(change, signal.SIG_BLOCK), after_in_parent=release, after_in_child=child)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent when a terminal closes; the monitor decides


def _enable_in_child() -> None:
    try:
        _enable_stacks()
    except OSError as error:  # the folder is gone: the child works without a file for its stacks
        print(f"hangproof: cannot write the stacks of this worker: {error}", file=sys.stderr)
