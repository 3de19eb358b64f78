"""Experiment trackers (wandb, tensorboard…) run beside training, on rank 0, and cannot stop it.

Starting them has a deadline; when it is spent, wandb is tried once more offline, and if that hangs too the run goes on
without. What is logged goes through a queue to one thread of its own, in order: a tracker that hangs in mid-run fills the
queue and loses lines, and the trainer never waits. Finishing has a deadline too. The stuck threads are daemons.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from guards import deadline
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

UTIL = "library.train_util"
QUEUE = 1000


class Outbox:
    """Calls made in order on a thread of their own; `put` never waits."""

    def __init__(self, name: str) -> None:
        self.name, self.lost = name, 0
        self.calls: queue.Queue[tuple[Callable, tuple, dict]] = queue.Queue(QUEUE)
        threading.Thread(target=self._run, name=f"hangproof-tracker {name}", daemon=True).start()

    def put(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        """Have function(*args, **kwargs) called; dropped, and counted, when the queue is full."""
        try:
            self.calls.put_nowait((function, args, kwargs))
        except queue.Full:
            self.lost += 1
            if self.lost == 1:
                session.say(f"tracker {self.name} takes nothing any more; the run goes on, its lines are dropped")

    def drain(self, seconds: float) -> bool:
        """Wait until all calls are made; False where `seconds` did not suffice."""
        limit = time.monotonic() + seconds
        while self.calls.unfinished_tasks and time.monotonic() < limit:
            time.sleep(0.02)
        return not self.calls.unfinished_tasks

    def _run(self) -> None:
        while True:
            function, args, kwargs = self.calls.get()
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a tracker's failure is said, and is not the run's
                session.say(f"tracker {self.name}: {type(error).__name__}: {error}")
            finally:
                self.calls.task_done()


def apply(module: ModuleType) -> None:
    """Bound the start; put every tracker behind its outbox."""
    wrap(module, "prepare_accelerator", _login)
    wrap(module, "init_trackers", _start)


def _login(original: Callable) -> Callable:
    def prepare_accelerator(args):
        if int(os.environ.get("RANK", "0")) != 0:
            args.log_with = None  # only rank 0 tracks; today every rank logs in to wandb
            args.logging_dir = None
        elif getattr(args, "wandb_api_key", None) is not None:
            # wandb.login() talks to the server here, with no end; wandb.init() reads the key by itself, in time.
            os.environ["WANDB_API_KEY"] = args.wandb_api_key
            args.wandb_api_key = None
        return original(args)

    return prepare_accelerator


def _start(original: Callable) -> Callable:
    def init_trackers(accelerator, args, default_tracker_name):
        names = ", ".join(str(tracker) for tracker in accelerator.log_with)
        if not names or not accelerator.is_main_process:
            return original(accelerator, args, default_tracker_name)
        limit = timeouts.seconds("tracker_timeout_s")
        tries = ["", "offline"] if "wandb" in names and os.environ.get("WANDB_MODE") != "offline" else [""]
        for mode in tries:
            if mode:
                os.environ["WANDB_MODE"] = mode
            try:
                what = f"trackers to start ({names}{', ' + mode if mode else ''})"
                start(original, accelerator, args, default_tracker_name, seconds=limit, what=what)
                break
            except Exception as error:  # noqa: BLE001 - no tracker is worth the run
                session.say(f"{type(error).__name__}: {error}; the run goes on offline")
                accelerator.trackers = []
        for tracker in accelerator.trackers:
            protect(tracker)

    return init_trackers


def start(function: Callable, *args: Any, seconds: float, what: str) -> None:
    """Call within a limit; without one where it is 0."""
    if seconds > 0:
        deadline.call(function, *args, seconds=seconds, what=what)
    else:
        function(*args)


def protect(tracker: Any) -> None:
    """Let this tracker's `log` go through an outbox, and bound its `finish`."""
    outbox = Outbox(tracker.name)
    log, finish = tracker.log, tracker.finish

    def queued(values, *args, **kwargs):
        outbox.put(log, dict(values), *args, **kwargs)

    def finished():
        limit = timeouts.seconds("tracker_timeout_s")
        if not outbox.drain(limit or float("inf")):
            session.say(f"waited {limit:g} s for tracker {tracker.name} to take what was logged; left behind")
            return
        try:
            start(finish, seconds=limit, what=f"tracker {tracker.name} to finish")
        except Exception as error:  # noqa: BLE001 - the training is over: nothing of it may be lost to a tracker
            session.say(f"{type(error).__name__}: {error}; left behind")

    tracker.log, tracker.finish = queued, finished


PATCH = Patch(
    name="trackers",
    why="all ranks stop at the W&B login; a tracker that hangs holds the run",
    targets=(
        Target(UTIL, "prepare_accelerator", params=("args",)),
        Target(UTIL, "init_trackers", params=("accelerator", "args", "default_tracker_name")),
    ),
    apply={UTIL: apply},
)
