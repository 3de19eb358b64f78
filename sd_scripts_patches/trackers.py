"""Experiment trackers (wandb, tensorboard…) run beside training, on rank 0, and cannot stop it.

Their start has a limit. When it is exceeded, wandb is started once more offline; if that hangs too, the run continues
without trackers. Log calls go through a queue to a thread of their own, in order: a tracker that hangs during the run
fills the queue and loses entries, and the trainer never waits. The end has a limit too. The stuck threads are daemons.
A resumed run goes on in the folder of logs of the interrupted one: TensorBoard draws one curve for each folder.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from guards import deadline, limits, world
from sd_scripts_patches import session
from sd_scripts_patches.musubi import ACCELERATOR_SETUP
from sd_scripts_patches.patch import Patch, Target, always, around, function, uses

UTIL = "library.train_util"
QUEUE_SIZE = 1000


class CallQueue:
    """Makes calls in order on a thread of its own. `put` never waits."""

    def __init__(self, name: str) -> None:
        self.name, self.dropped = name, 0
        self.calls: queue.Queue[tuple[Callable, tuple, dict]] = queue.Queue(QUEUE_SIZE)
        threading.Thread(target=self._run, name=f"hangproof-tracker {name}", daemon=True).start()

    def put(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        """Queue function(*args, **kwargs). When the queue is full, the call is dropped and counted."""
        try:
            self.calls.put_nowait((function, args, kwargs))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                session.log(f"tracker {self.name} does not respond; the run continues and drops its entries")

    def _run(self) -> None:
        while True:
            function, args, kwargs = self.calls.get()
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - top of the thread: a tracker's error is logged, the run continues
                session.log(f"tracker {self.name}: {type(error).__name__}: {error}")
            finally:
                self.calls.task_done()


@around
def _without_login(original: Callable, args: Any) -> Any:
    if world.rank():
        args.log_with = None  # only rank 0 tracks; sd-scripts logs in to wandb on every rank
        args.logging_dir = None
    elif getattr(args, "wandb_api_key", None) is not None:
        # wandb.login() contacts the server here without a limit; wandb.init() reads the key itself, later.
        os.environ["WANDB_API_KEY"] = args.wandb_api_key
        args.wandb_api_key = None
    return original(args)


@around
def _start_within_limit(original: Callable, accelerator: Any, *args: Any, **kwargs: Any) -> None:
    names = ", ".join(str(tracker) for tracker in accelerator.log_with)
    if not names or not accelerator.is_main_process:
        return original(accelerator, *args, **kwargs)
    if session.run is not None and accelerator.logging_dir:  # kohya's trainers name a new folder at each start
        folder, name = os.path.split(accelerator.logging_dir)
        session.run.logs = session.run.logs or name
        accelerator.project_configuration.logging_dir = os.path.join(folder, session.run.logs)
    limit = limits.seconds("tracker_timeout_s")
    modes = ["", "offline"] if "wandb" in names and os.environ.get("WANDB_MODE") != "offline" else [""]
    for number, mode in enumerate(modes):
        if mode:
            os.environ["WANDB_MODE"] = mode
        what = f"trackers to start ({names}{', ' + mode if mode else ''})"
        session.heartbeat().item(number, note=f"waiting for {what}")  # each attempt has the limit for itself
        aside = copy.copy(accelerator)  # what a tracker adds after its limit is not the run's
        aside.trackers = []
        try:
            deadline.call(original, aside, *args, seconds=limit, what=what, **kwargs)
            accelerator.trackers = aside.trackers
            break
        except Exception as error:  # noqa: BLE001 - an error of any tracker must not end the run
            session.log(f"{type(error).__name__}: {error}; the run continues offline")
            accelerator.trackers = []
    for tracker in accelerator.trackers:
        decouple(tracker)


def give_up(reason: str) -> None:
    """The run is done without the last entries of a tracker, and says so with its outcome."""
    session.log(f"{reason}; continuing without it")
    session.end_notes.append(f"the tracker did not finish: {reason}")


def decouple(tracker: Any) -> None:
    """Send this tracker's `log` calls through a queue, and limit its `finish`."""
    calls = CallQueue(tracker.name)
    log, finish = tracker.log, tracker.finish

    def queued(values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        calls.put(log, dict(values), *args, **kwargs)

    def finish_within_limit() -> None:
        for number, (wait, what) in enumerate([(calls.calls.join, "log its last entries"), (finish, "finish")]):
            what = f"tracker {tracker.name} to {what}"
            session.heartbeat().item(number, note=f"waiting for {what}")
            try:
                deadline.call(wait, seconds=limits.seconds("tracker_timeout_s"), what=what)
            except Exception as error:  # noqa: BLE001 - training is complete; a tracker's error must not fail the run
                return give_up(f"{type(error).__name__}: {error}".removeprefix("TimeoutError: "))

    tracker.log, tracker.finish = queued, finish_within_limit


def _targets(setup: str, module: str, start: str) -> tuple[Target, ...]:
    """setup: the module of `prepare_accelerator`. start: what starts the trackers, in `module`."""
    return (
        function(setup, "prepare_accelerator(args)", _without_login, wait="the login to wandb"),
        function(module, start, _start_within_limit, wait="a tracker to start, to log, to finish"),
    )


PATCH = Patch(
    name="trackers",
    why="all ranks stop at the W&B login; a tracker that hangs stops the run",
    targets=_targets(UTIL, UTIL, "init_trackers(accelerator, args, default_tracker_name)"),
    relevant=uses("--log_with", "--wandb_api_key"),
)
MUSUBI = dataclasses.replace(  # the trainer starts them through accelerate
    PATCH,
    targets=_targets(ACCELERATOR_SETUP, "accelerate.accelerator", "Accelerator.init_trackers(self, project_name)"),
    relevant=always,
)
