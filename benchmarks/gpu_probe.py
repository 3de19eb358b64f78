"""What happens inside a training process on a GPU: a memory limit, its peak memory, and faults that only a GPU has.

`HANGPROOF_INJECT=benchmarks.gpu_probe:fire`; the faults of `benchmarks/injector.py` are there too.

    HANGPROOF_GPU_BYTES   the process may allocate no more, as if the card were smaller
    HANGPROOF_GPU_EXACT   1: deterministic algorithms alone
    HANGPROOF_GPU_RECORD  a file that gets a line of JSON for each phase that ends and each step: its peak memory
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks import injector
from guards.heartbeat import Heartbeat

ENDLESS_CYCLES = 1 << 62
_state: dict[str, Any] = {"ready": False, "phase": ""}


def endless_kernel(_: Heartbeat) -> None:
    """A kernel that never ends; the step waits for it when it reads its loss."""
    import torch

    torch.cuda._sleep(ENDLESS_CYCLES)


def endless_synchronize(heartbeat: Heartbeat) -> None:
    """A kernel that never ends, and `torch.cuda.synchronize` behind it."""
    import torch

    endless_kernel(heartbeat)
    torch.cuda.synchronize()


def stuck_copy(heartbeat: Heartbeat) -> None:
    """A copy from pinned memory on a stream of its own, behind a kernel that never ends; its event is waited for."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        endless_kernel(heartbeat)
        torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    copied.synchronize()


injector.FAULTS.update(
    {"endless_kernel": endless_kernel, "endless_synchronize": endless_synchronize, "stuck_copy": stuck_copy}
)


def fire(phase: str, step: int, heartbeat: Heartbeat) -> None:
    """Called at each beat and check point."""
    if "torch" in sys.modules and not _state["ready"]:
        prepare()
    if _state["ready"] and (phase == "step" or heartbeat.current_phase != _state["phase"]):
        record(phase)
        _state["phase"] = heartbeat.current_phase
    injector.fire(phase, step, heartbeat)


def prepare() -> None:
    """Once torch is imported: the memory limit, and deterministic algorithms, as the environment says."""
    import torch

    if not hasattr(torch, "cuda") or not hasattr(torch, "use_deterministic_algorithms"):
        return  # its import is not over
    _state["ready"] = torch.cuda.is_available()
    limit = int(os.environ.get("HANGPROOF_GPU_BYTES", "0"))
    if limit and _state["ready"]:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    if os.environ.get("HANGPROOF_GPU_EXACT") == "1":
        torch.use_deterministic_algorithms(True)


def record(phase: str) -> None:
    """The peak of the phase that has ended, or of the step; the next begins at what is allocated now."""
    import torch

    file = os.environ.get("HANGPROOF_GPU_RECORD", "")
    if not file or not torch.cuda.is_initialized():
        return
    ended = phase if phase == "step" else _state["phase"]
    line = {"phase": ended, "allocated": torch.cuda.max_memory_allocated()}
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    torch.cuda.reset_peak_memory_stats()
