"""Small causes of large hangs, removed before anything starts.

Forking a process that has used CUDA: torch's loader workers do it on Linux and are safe as long as they stay off the GPU;
a child that touches it is refused by name, and so is any other fork by multiprocessing (a data set's `map`). Tokenizers'
own threads do not survive a fork. Output is unbuffered and UTF-8, so that the log shows the last line before a hang and
no prompt can end a run in an encoding error. git, asked for a revision, gets ten seconds. The GPU's cache is emptied every
N steps only when asked: it costs a synchronization.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

from guards import deadline
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

UTIL = "library.train_util"
CUDA = "torch.cuda"
FORK = "multiprocessing.popen_fork"
ADVICE = "use --max_data_loader_n_workers 0, or the spawn start method"


def prepare(worker: bool) -> None:
    """The process-wide settings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("PYTHONUTF8", "1")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    if not worker:
        every = timeouts.count("empty_cache_steps")
        if every > 0:
            session.at_step.append(lambda step: empty_cache(step, every))


def empty_cache(step: int, every: int) -> None:
    """Give the GPU's free memory back every `every` steps."""
    import torch

    if step % every == 0 and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def apply_to_cuda(module: ModuleType) -> None:
    """A forked child that reaches for the GPU is told what it did; torch's own message names no way out of ours."""

    def make(original: Callable) -> Callable:
        def _lazy_init():
            if module._is_in_bad_fork():
                raise RuntimeError(
                    f"fork after CUDA: process {os.getpid()} was forked from {os.getppid()}, which had used the GPU, and "
                    f"now uses it too; {ADVICE}"
                )
            return original()

        return _lazy_init

    wrap(module, "_lazy_init", make)


def apply_to_fork(module: ModuleType) -> None:
    """multiprocessing may fork a process that has used CUDA only for torch's loader workers."""

    def make(original: Callable) -> Callable:
        def _launch(self, process_obj):
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized() and not _is_loader_worker(process_obj):
                raise RuntimeError(
                    f"fork after CUDA refused: {process_obj.name} would be forked from a process that has used the GPU; {ADVICE}"
                )
            return original(self, process_obj)

        return _launch

    wrap(module, "Popen._launch", make)


def apply_to_util(module: ModuleType) -> None:
    """git has an end."""

    def make(original: Callable) -> Callable:
        def get_git_revision_hash():
            limit = timeouts.seconds("git_timeout_s")
            try:
                return deadline.call(original, seconds=limit, what="git rev-parse") if limit else original()
            except TimeoutError as error:
                session.say(f"{error}; the revision of sd-scripts is not recorded")
                return "(unknown)"

        return get_git_revision_hash

    wrap(module, "get_git_revision_hash", make)


def _is_loader_worker(process_obj: object) -> bool:
    return getattr(getattr(process_obj, "_target", None), "__name__", "") == "_worker_loop"


PATCH = Patch(
    name="hygiene",
    why="fork after CUDA, tokenizer threads, buffered or broken output, git without an end",
    targets=(
        Target(UTIL, "get_git_revision_hash", params=()),
        Target(CUDA, "_lazy_init", params=()),
        Target(CUDA, "_is_in_bad_fork"),
        Target(FORK, "Popen._launch", params=("self", "process_obj")),
    ),
    apply={UTIL: apply_to_util, CUDA: apply_to_cuda, FORK: apply_to_fork},
    prepare=prepare,
)
