"""A process that has finished or failed leaves, with its own exit code.

At exit the interpreter joins every pool thread (`concurrent.futures`) and every child of multiprocessing, without limit: a
thread stuck on a CUDA stream, or a loader worker that ignores SIGTERM, keeps a finished run alive for ever (both
measured on sd-scripts). So the exit is ours: workers are ended first (SIGTERM, a moment, SIGKILL), then threads and
exit handlers get their grace, then `os._exit` with the code that the script ended with. What did not come back is named.

The other half: when the trainer itself is killed, its workers must not outlive it. Each asks Linux for a SIGKILL at its
parent's death. That signal is sent when the *thread* that started the worker exits, so only workers started by a
main thread ask for it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from guards import crash, loader
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

LOADER = "torch.utils.data.dataloader"
WORKER = "torch.utils.data._utils.worker"
WORKER_TERM_S = 3.0
SHUTDOWN_S = 5.0
_started_by_main_thread = True
_before_leaving: list[Callable[[], None]] = []


def before_leaving(function: Callable[[], None]) -> None:
    """Have `function` called once the script has ended, before anything is torn down. It must bound its own time."""
    _before_leaving.append(function)


def leave_with(code: int) -> NoReturn:
    """End this process with `code` after an orderly exit of at most `exit_grace_s`. Does not return."""
    for function in _before_leaving:
        function()
    grace_s = timeouts.seconds("exit_grace_s")
    watch = threading.Timer(grace_s, _give_up, (code, grace_s))
    watch.daemon = True
    if grace_s > 0:
        watch.start()
    end_workers()
    threading._shutdown()  # joins threads, pool threads too
    atexit._run_exitfuncs()
    crash.leave(code)


def failed(error: BaseException) -> int:
    """Print an error that ended the script as python would, put it in the record, return the exit code."""
    crash.forget_children()
    traceback.print_exception(type(error), error, error.__traceback__)
    code = 130 if isinstance(error, KeyboardInterrupt) else crash.EXIT_FAILED
    session.heartbeat().end("failed", "".join(traceback.format_exception_only(type(error), error)).strip())
    return code


def end_workers() -> None:
    """End the daemonic children of multiprocessing (loader workers): SIGTERM, WORKER_TERM_S, SIGKILL."""
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if not children:
        return
    crash.forget_children()  # torch's handler would raise for a worker that we end
    for child in children:
        child.terminate()
    limit = time.monotonic() + WORKER_TERM_S
    for child in children:
        child.join(max(0.0, limit - time.monotonic()))
        if child.is_alive():
            session.say(f"worker {child.name} (pid {child.pid}) did not end on SIGTERM; killed")
            child.kill()
            child.join(WORKER_TERM_S)


def _give_up(code: int, grace_s: float) -> None:
    crash.leave_within(SHUTDOWN_S, code)
    me = threading.current_thread()
    left = [t.name for t in threading.enumerate() if t not in (me, threading.main_thread()) and not t.daemon]
    left += [f"{child.name} (pid {child.pid})" for child in multiprocessing.active_children()]
    what = ", ".join(left) or "an exit handler"
    session.say(f"waited {grace_s:g} s at exit for {what}; leaving with code {code}")
    for child in multiprocessing.active_children():
        child.kill()
    crash.leave(code)


def apply_to_worker(module: ModuleType) -> None:
    """Loader workers die with their parent."""

    def make(original: Callable) -> Callable:
        def _worker_loop(*args, **kwargs):
            if _started_by_main_thread:
                loader.die_with_parent()
            return original(*args, **kwargs)

        return _worker_loop

    wrap(module, "_worker_loop", make)


def apply_to_loader(module: ModuleType) -> None:
    """Remember, for the workers about to be forked, which thread starts them."""

    def make(original: Callable) -> Callable:
        def __init__(self, loader):
            global _started_by_main_thread
            _started_by_main_thread = threading.current_thread() is threading.main_thread()
            original(self, loader)

        return __init__

    wrap(module, "_MultiProcessingDataLoaderIter.__init__", make)
    wrap(module, "_MultiProcessingDataLoaderIter._shutdown_workers", _shut_down)


def _shut_down(original: Callable) -> Callable:
    """Workers of an iterator get SHUTDOWN_S together; torch gives each 5 s in turn, and an error is not even printed until then."""

    def _shutdown_workers(self):
        def kill(seconds: float, what: str) -> None:
            from torch.utils.data._utils import signal_handling

            signal_handling._remove_worker_pids(id(self))  # so that torch does not take the kill for a failure
            for worker in self._workers:
                if worker.is_alive():
                    session.say(f"waited {seconds:g} s for {what}: {worker.name} (pid {worker.pid}) killed")
                    worker.kill()

        with session.Deadline(SHUTDOWN_S, "data loader workers to end", action=kill):
            return original(self)

    return _shutdown_workers


PATCH = Patch(
    name="exit",
    why="stuck pool threads and workers that ignore SIGTERM hold a finished process for ever",
    targets=(
        Target(WORKER, "_worker_loop", params=("dataset_kind", "dataset")),
        Target(LOADER, "_MultiProcessingDataLoaderIter.__init__", params=("self", "loader")),
        Target(LOADER, "_MultiProcessingDataLoaderIter._shutdown_workers", params=("self",)),
    ),
    apply={WORKER: apply_to_worker, LOADER: apply_to_loader},
)
