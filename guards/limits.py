"""Every time limit inside the training process, in one table, with the limits of the monitor that must be longer.

Why one table: two limits in two programs contradict each other sooner or later. The monitor once gave a finished
process 15 s to exit, while the process took 60 s for its uploads and 15 s more for its threads. Now each row names the
keys of `monitor/config.toml` that enclose it, and the monitor raises these keys to `minimums()`: outer limit >= inner
limit + grace. Which limits a training has set, its heartbeat says (guards/startup.py).

Which key encloses a limit follows from what happens when the limit fires. Where the run continues afterwards (an upload
is given up, a cache file is written again), a monitor that acts first kills a healthy run, so the *floor* of the phase
encloses it. Where the process is killed, the *ceiling* encloses it: the budget that the monitor learns is a second,
faster detector, and both come to the same result.

Rows with `user` can be changed by a flag of the launcher (`--hangproof_npz_timeout_s=60`) or by the environment
(`HANGPROOF_NPZ_TIMEOUT_S=60`); 0 means no limit. The other rows are constants.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

_EXPIRE_S = 5.0
_FLUSH_S = 5.0
_ALARM_BACKSTOP_S = 5.0
_SHUTDOWN_S = 5.0
_SAMPLE_GRACE_S = 300.0


@dataclass(frozen=True)
class Limit:
    """One limit. All times in seconds."""

    default_s: float
    what: str  # what the process waits for
    grace_s: float = 0.0  # from the moment the limit fires until the wait, or the process, is gone
    outer: tuple[str, ...] = ()  # keys of monitor/config.toml that must be at least limit + grace
    user: bool = True  # users can set it; 0 means no limit


def _constant(seconds: float, what: str, grace_s: float = 0.0, outer: tuple[str, ...] = ()) -> Limit:
    return Limit(seconds, what, grace_s, outer, user=False)


def _phase(name: str, seconds: float) -> dict[str, Limit]:
    """The row for the time between two beats of a phase. When it fires, the process is killed."""
    outer = (f"phases.{name}.ceiling_s",)
    return {f"phase_{name}_s": Limit(seconds, f"any progress in phase {name}", _EXPIRE_S, outer)}


_STEPS = ("phases.first_step.ceiling_s", "phases.step.ceiling_s", "phases.validate.ceiling_s")
_LOADS = ("phases.import.ceiling_s", "phases.load.ceiling_s")
_CACHES = ("phases.cache_latents.floor_s", "phases.cache_text.floor_s")

TABLE: dict[str, Limit] = {
    # Waits of a step.
    "dataloader_timeout_s": Limit(60, "one batch from the loader's workers", _EXPIRE_S, _STEPS),
    "dataloader_first_batch_s": Limit(
        300, "the first batch of each iterator, and every batch where there are no workers", _EXPIRE_S, _STEPS
    ),
    "block_swap_timeout_s": Limit(
        30, "one block of the model to arrive (block swap)", _EXPIRE_S, (*_STEPS, "phases.sample.ceiling_s")
    ),
    # Reads: SIGALRM raises TimeoutError; where it cannot interrupt the read, a deadline kills the process.
    "npz_timeout_s": Limit(30, "one read of a cache file (.npz)", _ALARM_BACKSTOP_S + _EXPIRE_S, (*_CACHES, *_STEPS)),
    "image_timeout_s": Limit(30, "one image file to be read", _ALARM_BACKSTOP_S + _EXPIRE_S, (*_CACHES, *_STEPS)),
    # Samples and saves.
    "sample_budget_s": Limit(
        300,
        "one sample image, checked between denoising steps; sample_grace_s later the process is killed",
        _SAMPLE_GRACE_S + _EXPIRE_S,
        ("phases.sample.ceiling_s",),
    ),
    "upload_timeout_s": Limit(600, "one attempt at an upload to the model hub", 0.0, ("phases.save.ceiling_s",)),
    # The start.
    "tracker_timeout_s": Limit(
        60,
        "experiment trackers (wandb, tensorboard…) to start, to finish",
        0.0,
        ("phases.load.floor_s", "phases.end.floor_s"),
    ),
    "hub_reach_s": Limit(60, "an answer of the model hub to a small request, retries included", 5.0, _LOADS),
    "hub_timeout_s": Limit(300, "any progress of a download from the model hub", _EXPIRE_S, _LOADS),
    # Of a download: a connection that stalls is replaced; without progress in all it fails with the reason.
    "download_read_s": Limit(30, "64 KiB on one connection of a download, or an answer", 0.0, _LOADS),
    "download_stall_s": Limit(120, "any progress of a download, retries included", 30.0, _LOADS),
    "git_timeout_s": Limit(10, "git to report the revision of sd-scripts", 0.0, ("phases.load.floor_s",)),
    # One rank may cache or sample for long while the others wait, with progress of its own: no phase encloses this.
    "barrier_timeout_s": Limit(1800, "all ranks to arrive at a barrier", _EXPIRE_S, ("watch.between_steps_s",)),
    "group_s": Limit(600, "all processes of a run to join their group", _EXPIRE_S, _LOADS),
    "collective_s": Limit(
        3600,
        "one collective of several processes, where --ddp_timeout sets none",
        _EXPIRE_S,
        ("watch.between_steps_s",),
    ),
    # The end. Uploads finish in phase "end", before the outcome "done"; the exit grace begins after it.
    "upload_exit_s": Limit(60, "uploads still in progress when training has finished", 0.0, ("phases.end.floor_s",)),
    "trackers_end_s": Limit(
        30, "trackers to finish after the last save, where one process trains", 0.0, ("phases.end.floor_s",)
    ),
    "end_training_s": Limit(
        300, "trackers and other ranks to end the training, after the last save", 0.0, ("phases.end.floor_s",)
    ),
    "exit_grace_s": Limit(
        15, "threads, workers and exit handlers once the script has ended", _SHUTDOWN_S + _FLUSH_S, ("watch.exit_s",)
    ),
    # Between two beats of a phase, for waits that no row above covers (guards/phase_limit.py).
    **_phase("import", 880),
    **_phase("load", 1780),
    **_phase("cache_latents", 580),
    **_phase("cache_text", 580),
    **_phase("hash", 880),
    **_phase("first_step", 880),
    **_phase("step", 580),
    **_phase("validate", 880),
    **_phase("sample", 880),
    **_phase("save", 880),
    **_phase("end", 580),
    # Constants of the guards.
    "expire_s": _constant(_EXPIRE_S, "the message and the stacks of an expired deadline, then os._exit"),
    "flush_s": _constant(
        _FLUSH_S, "log and output streams to be flushed at exit, then os._exit", 0.0, ("watch.exit_s",)
    ),
    "alarm_backstop_s": _constant(
        _ALARM_BACKSTOP_S, "SIGALRM to interrupt a read; then a deadline kills the process", _EXPIRE_S, _CACHES
    ),
    "worker_term_s": _constant(3.0, "a loader worker to exit on SIGTERM, then SIGKILL", 0.0, ("watch.exit_s",)),
    "shutdown_s": _constant(_SHUTDOWN_S, "the workers of one iterator to exit together", _EXPIRE_S, ("watch.exit_s",)),
    "loader_margin_s": _constant(_EXPIRE_S, "torch's own loader timeout, after the deadline that names the batch"),
    "sample_grace_s": _constant(
        _SAMPLE_GRACE_S, "a sample image beyond its budget (one step hangs)", _EXPIRE_S, ("phases.sample.ceiling_s",)
    ),
    # Constants of the built-in trainer.
    "sample_least_s": _constant(120.0, "the least budget of a sample image", 0.0, ("phases.sample.ceiling_s",)),
    "save_s": _constant(900.0, "a state or a LoRA to be written", _EXPIRE_S, ("phases.save.ceiling_s",)),
    "snapshot_s": _constant(60.0, "a snapshot in memory to be completed", 0.0, ("phases.step.ceiling_s",)),
    "end_workers_s": _constant(20.0, "the loader's workers to exit after training", 0.0, ("phases.end.floor_s",)),
}
"""Name of the limit to the limit. The order is the order of the help text."""


class LimitError(ValueError):
    """An environment variable that sets a limit and holds no number of seconds; the message says which."""


def variable(name: str) -> str:
    """The environment variable that sets the limit `name`."""
    return f"HANGPROOF_{name.upper()}"


def seconds(name: str, environ: Mapping[str, str] | None = None) -> float:
    """The limit `name` in seconds; 0 where a user switched it off.

    Raises LimitError where its environment variable is not a number >= 0, KeyError for an unknown name.
    """
    limit = TABLE[name]
    text = (os.environ if environ is None else environ).get(variable(name), "") if limit.user else ""
    if not text:
        return limit.default_s
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise LimitError(f"{variable(name)}={text!r}: expected seconds, 0 for no limit")
    return number


def minimums(environ: Mapping[str, str] | None = None) -> dict[str, float]:
    """Key of monitor/config.toml -> the least seconds it must have: the largest limit + grace that it encloses.

    environ: the variables that the training process has (default: this process's). A limit that is switched off, or
    that the training process refuses because it is no number, encloses nothing.
    """
    least: dict[str, float] = {}
    for name, limit in TABLE.items():
        try:
            inner_s = seconds(name, environ)
        except LimitError:
            continue
        if inner_s > 0:
            for key in limit.outer:
                least[key] = max(least.get(key, 0.0), inner_s + limit.grace_s)
    return least
