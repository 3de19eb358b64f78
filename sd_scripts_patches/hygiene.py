"""Removes small causes of large hangs before anything starts.

Fork after CUDA: torch's loader workers are forked from a process that has used CUDA, which is safe as long as they do
not use the GPU. A child that does gets an error that names it, and so does every other fork by multiprocessing (a data
set's `map`). Threads of the tokenizers library do not survive a fork, so they are off. Output is unbuffered and UTF-8:
the log shows the last line before a hang, and no caption can end a run with an encoding error. git gets `git_timeout_s`
to report the revision. cuDNN's attention is off: since PyTorch 2.11 it is the default on an H100 and H200, where its
gradients can be NaN (pytorch/pytorch#196678).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from guards import deadline, limits
from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, Target, around, function

UTIL = "library.train_util"
CUDA = "torch.cuda"
FORK = "multiprocessing.popen_fork"
ADVICE = "use --max_data_loader_n_workers 0, or the spawn start method"


def prepare(worker: bool) -> None:
    """Change the process-wide settings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("PYTHONUTF8", "1")
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


@around
def _first_use(original: Callable) -> None:
    """Explain the error when a forked child uses the GPU: torch's own message does not name a way to avoid it.

    Before the first use of the GPU, cuDNN's attention is turned off.
    """
    torch = sys.modules["torch"]
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            f"fork after CUDA: process {os.getpid()} was forked from {os.getppid()}, which had used the GPU, and "
            f"now uses it too; {ADVICE}"
        )
    if not torch.cuda.is_initialized() and hasattr(torch.backends.cuda, "enable_cudnn_sdp"):  # since 2.5
        torch.backends.cuda.enable_cudnn_sdp(False)
    return original()


@around
def _refuse_fork(original: Callable, self: Any, process_obj: Any) -> None:
    """Allow multiprocessing to fork a process that has used CUDA only for torch's loader workers."""
    torch = sys.modules.get("torch")
    target = getattr(getattr(process_obj, "_target", None), "__name__", "")
    if torch is not None and torch.cuda.is_initialized() and target != "_worker_loop":
        raise RuntimeError(
            f"fork after CUDA refused: {process_obj.name} would be forked from a process that has used the GPU; {ADVICE}"
        )
    return original(self, process_obj)


@around
def _limit_git(original: Callable) -> str:
    """Put a limit on git."""
    try:
        return deadline.call(original, seconds=limits.seconds("git_timeout_s"), what="git rev-parse")
    except TimeoutError as error:
        session.log(f"{error}; the revision of sd-scripts is not recorded")
        return "(unknown)"


PATCH = Patch(
    name="hygiene",
    why="fork after CUDA, cuDNN's attention, tokenizer threads, buffered or badly encoded output, git without a limit",
    targets=(
        function(UTIL, "get_git_revision_hash()", _limit_git, wait="git, which reports the revision"),
        function(CUDA, "_lazy_init()", _first_use),
        Target(CUDA, "_is_in_bad_fork"),
        function(FORK, "Popen._launch(self, process_obj)", _refuse_fork),
    ),
    prepare=prepare,
)
