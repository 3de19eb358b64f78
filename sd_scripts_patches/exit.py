"""A process that has finished or failed exits with its own exit code, whatever still runs.

At exit the interpreter joins every pool thread (`concurrent.futures`) and every child of multiprocessing without a
limit: a thread that is stuck on a CUDA stream, or a loader worker that ignores SIGTERM, keeps a finished run alive for
ever (both measured on sd-scripts). So the exit is ours. The outcome is recorded once nothing that the run needs is
pending: after a successful run the uploads come first, in phase "end". Then workers are stopped (SIGTERM,
`worker_term_s`, SIGKILL), threads and exit handlers get `exit_grace_s`, and `os._exit` ends the process with the
script's exit code. What did not finish is named in the log.

When the trainer itself is killed, its workers must not outlive it: each asks Linux for a SIGKILL at its parent's death.
Linux sends that signal when the *thread* that started the worker exits, so only workers of a main thread ask for it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.process
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from guards import crash, limits, loader
from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, around, function

LOADER = "torch.utils.data.dataloader"
WORKER = "torch.utils.data._utils.worker"
MAIN_THREAD_KEY = "hangproof_started_by_main_thread"
before_exit: list[Callable[[float], None]] = []
"""Called with `limit_s` once the script has ended; each must return within so many seconds."""


def exit_process(code: int, outcome: str, note: str = "") -> NoReturn:
    """End this process with `code`. `outcome` and `note` go into the heartbeat (see heartbeat.OUTCOMES).

    A run that is done finishes its uploads before it says so: from the outcome on, the monitor allows `exit_grace_s`
    and little more. A run that failed or was stopped reports that at once; its uploads get half of the exit grace.
    """
    grace_s = limits.seconds("exit_grace_s")
    if outcome == "done":
        _finish(float("inf"))
    session.heartbeat().end(outcome, note or "; ".join(session.end_notes if outcome == "done" else ()))
    watchdog = threading.Timer(grace_s, _grace_expired, (code, grace_s))
    watchdog.daemon = True
    if grace_s > 0:
        watchdog.start()
    if outcome != "done":
        _finish(grace_s / 2 if grace_s > 0 else float("inf"))
    stop_workers()
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, pool threads included
    atexit._run_exitfuncs()
    crash.exit_now(code)


def report_error(error: BaseException) -> tuple[int, str]:
    """Print an error that ended the script as Python does; return the exit code and the note for the heartbeat."""
    crash.ignore_child_deaths()
    traceback.print_exception(type(error), error, error.__traceback__)
    code = 130 if isinstance(error, KeyboardInterrupt) else crash.EXIT_FAILED
    return code, "".join(traceback.format_exception_only(type(error), error)).strip()


def stop_workers() -> None:
    """Stop the daemonic children of multiprocessing (loader workers): SIGTERM, `worker_term_s` together, SIGKILL."""
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if not children:
        return
    crash.ignore_child_deaths()  # torch's handler raises for a worker that is stopped on purpose
    for child in children:
        child.terminate()
    term_s = limits.seconds("worker_term_s")
    end_s = time.monotonic() + term_s
    for child in children:
        child.join(max(0.0, end_s - time.monotonic()))
        if child.is_alive():
            session.log(f"worker {child.name} (pid {child.pid}) did not exit on SIGTERM; killed")
            child.kill()
            child.join(term_s)


def _finish(limit_s: float) -> None:
    for finish in before_exit:
        finish(limit_s)


def _grace_expired(code: int, grace_s: float) -> None:
    crash.exit_within(limits.seconds("shutdown_s"), code)
    this = threading.current_thread()
    pending = [t.name for t in threading.enumerate() if t not in (this, threading.main_thread()) and not t.daemon]
    pending += [f"{child.name} (pid {child.pid})" for child in multiprocessing.active_children()]
    what = ", ".join(pending) or "an exit handler"
    session.log(f"waited {grace_s:g} s at exit for {what}; exiting with code {code}")
    for child in multiprocessing.active_children():
        child.kill()
    crash.exit_now(code)


@around
def _die_with_parent(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Make loader workers die with their parent."""
    if _inherited().get(MAIN_THREAD_KEY, False):
        loader.die_with_parent()
    return original(*args, **kwargs)


@around
def _tell_workers(original: Callable, self: Any, loader: Any) -> None:
    """Tell the workers which kind of thread starts them."""
    _inherited()[MAIN_THREAD_KEY] = threading.current_thread() is threading.main_thread()
    original(self, loader)


def _inherited() -> dict[str, Any]:
    """Return the settings that a process of multiprocessing copies from its parent, whatever its start method.

    A module variable reaches forked workers only: a spawned one, or one of a fork server, imports this module anew.
    """
    return multiprocessing.process.current_process()._config  # type: ignore[attr-defined]


@around
def _shutdown_within_limit(original: Callable, self: Any) -> None:
    """Give the workers of an iterator `shutdown_s` together. torch gives each 5 s in turn, and delays an error so long."""
    expired = threading.Event()

    def kill(seconds: float, what: str) -> None:
        from torch.utils.data._utils import signal_handling

        expired.set()
        if self._worker_pids_set:  # or torch reports the kill as a failure; it removes them itself when it is set
            self._worker_pids_set = False
            signal_handling._remove_worker_pids(id(self))
        for worker in self._workers:
            if worker.is_alive():
                session.log(f"waited {seconds:g} s for {what}: {worker.name} (pid {worker.pid}) killed")
                worker.kill()

    with session.Deadline(limits.seconds("shutdown_s"), "data loader workers to exit", action=kill):
        try:
            original(self)
        except ValueError:  # both threads removed the process ids at the same time
            if not expired.is_set():
                raise


PATCH = Patch(
    name="exit",
    why="stuck pool threads and workers that ignore SIGTERM keep a finished process alive for ever",
    targets=(
        function(WORKER, "_worker_loop(dataset_kind, dataset)", _die_with_parent),
        function(LOADER, "_MultiProcessingDataLoaderIter.__init__(self, loader)", _tell_workers),
        function(LOADER, "_MultiProcessingDataLoaderIter._shutdown_workers(self)", _shutdown_within_limit),
    ),
)
