"""A process that has failed leaves, and can say where it stood.

Decision: an uncaught error ends the process with `os._exit` once it has been printed. The interpreter's own exit joins
every pool thread and every loader worker, and a stuck one is joined for ever (sd-scripts, measured: a traceback on the
screen and the process alive all night). Stacks come from faulthandler on a signal: its handler is C code that runs while
the GIL is held elsewhere, when no Python handler would.

A machine that goes down sends SIGTERM to everything at once (systemd to a whole cgroup, Slurm to a whole step), so the
training cannot leave it to the monitor: a watched one takes the signal itself as the wish for a state at the next step
boundary. Where there is nothing to save, or at the second signal, it ends as any process does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from guards.heartbeat import Heartbeat

EXIT_FAILED = 1
EXIT_STOPPED = 3
EXIT_DEADLINE = 75  # EX_TEMPFAIL of sysexits.h: try again

_stacks_file = None  # faulthandler keeps the descriptor, so the file object must live as long as the process


def stacks_path(folder: str | os.PathLike, pid: int) -> Path:
    """Where process `pid` writes its stacks. The file exists once its handler is registered, not before."""
    return Path(folder) / f"stacks-{pid}.txt"


def enable_stacks(folder: str | os.PathLike | None = None) -> Path | None:
    """Write every thread's stack to a file on SIGUSR2, and on a fatal signal.

    folder: default `$HANGPROOF_HEARTBEAT`; without one, or without SIGUSR2 (Windows), only fatal signals are handled.
    Safe to call again: after a fork the child gets its own file.
    """
    global _stacks_file
    folder = folder or os.environ.get("HANGPROOF_HEARTBEAT")
    if not folder:
        faulthandler.enable()
        return None
    path = stacks_path(folder, os.getpid())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - see _stacks_file
    faulthandler.enable(file=file)
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _stacks_file = file
    return path


def leave(code: int, grace_s: float = 5.0) -> None:
    """Flush what can be flushed within `grace_s` seconds and end this process now with `code`, whatever still runs."""
    flushed = threading.Event()

    def flush() -> None:
        try:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except (OSError, ValueError):  # a closed or full stream: nothing more can be said on it
            pass
        flushed.set()

    threading.Thread(target=flush, name="hangproof-flush", daemon=True).start()
    flushed.wait(grace_s)
    os._exit(code)


def leave_within(seconds: float, code: int) -> None:
    """This process ends with `code` in so many seconds at the latest, even if its last words block on a full pipe."""
    watch = threading.Timer(seconds, os._exit, (code,))
    watch.daemon = True
    watch.start()


def install(heartbeat: Heartbeat | None = None, grace_s: float = 5.0) -> None:
    """Stacks on a signal, and an end for a process whose main thread died of an uncaught error.

    The error is printed as ever, the heartbeat gets its last words, and the process ends with code 1 within `grace_s`
    seconds even when another thread is stuck. SystemExit is left alone.
    """
    enable_stacks()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_enable_in_child)
    if heartbeat is not None and heartbeat.path is not None:
        _save_at_term(heartbeat)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        forget_children()
        previous(kind, error, trace)
        code = 130 if issubclass(kind, KeyboardInterrupt) else EXIT_FAILED
        if heartbeat is not None:
            last = "".join(traceback.format_exception_only(kind, error)).strip()
            heartbeat.end("failed", last)
        leave(code, grace_s)

    sys.excepthook = hook


def forget_children() -> None:
    """From now on a child's death raises nothing here; for a process that ends anyway.

    torch's handler for dead loader workers raises wherever the main thread stands: while a traceback is printed, that loses
    the traceback (measured: 8 of 300 runs whose worker was killed).
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    while signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        with contextlib.suppress(RuntimeError):  # it raises once more where its signal has come already
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _save_at_term(heartbeat: Heartbeat) -> None:
    def in_main() -> bool:
        return threading.current_thread() is threading.main_thread()

    if not hasattr(signal, "SIGHUP") or not in_main():
        return  # Windows has neither; Python handlers belong to the main thread

    def term(number: int, _: object) -> None:
        nonlocal first
        if first and os.getpid() == owner and heartbeat.sent_term():
            first = False
            # The loader's workers have had the signal too: torch's handler would raise for them in the middle of the step.
            forget_children()
            os.write(2, b"hangproof: SIGTERM: saving a state at the next step boundary\n")  # print is not reentrant
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def aside() -> None:
        # Python forgets a signal that reaches a child while it is being forked; who sent it would wait for ever.
        if in_main() and signal.getsignal(signal.SIGTERM) is term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def back() -> None:
        if in_main() and first and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, term)

    first, owner = True, os.getpid()
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, term)
        os.register_at_fork(before=aside, after_in_parent=back)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent along when a session ends; the monitor decides


def _enable_in_child() -> None:
    try:
        enable_stacks()
    except OSError as error:  # the folder is gone: the child still works, only without a file for its stacks
        print(f"hangproof: no file for this worker's stacks: {error}", file=sys.stderr)
