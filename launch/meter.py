"""What a short run takes: seconds of each phase, seconds of a step and of an image, and the most memory it held.

It only looks: at the heartbeat of the first rank, at /proc and at NVML's helper process. `see` is called at each poll.
"""

import time
from collections.abc import Callable
from typing import Any

from monitor.attempt import Attempt, AttemptView
from monitor.gpu.nvml import Gpus
from monitor.process import platform

MEMORY_S = 0.5  # between two readings
ENCODING = ("cache_latents", "cache_text", "hash")


class Meter:
    """The measurements of one attempt or several; `memory` holds host_bytes and, with a GPU, those that begin with gpu."""

    def __init__(self, on_phase: Callable[[str, float], None] = lambda phase, at_s: None):
        """on_phase: called with each phase that the first rank enters, and when (monotonic seconds)."""
        self.memory: dict[str, Any] = {}
        self.intervals: tuple[float, ...] = ()  # seconds of the last steps
        self._on_phase = on_phase
        self._gpus = Gpus()
        self._memory_s = 0.0
        self._entered: tuple[int, str] = (0, "")
        self._items: dict[tuple[int, str], list[tuple[int, float]]] = {}

    def see(self, attempt: Attempt, view: AttemptView) -> str:
        """One observation; "", which lets `short_run.run` go on."""
        now_s = time.monotonic()
        if now_s - self._memory_s >= MEMORY_S:
            self._memory_s = now_s
            self._measure_memory(attempt)
        first = next((beat for beat in view.beats if beat.rank == 0), None)
        if first is None:
            return ""
        items = self._items.setdefault((first.pid, first.phase), [])
        if not items or items[-1][0] != first.done:
            items.append((first.done, first.beat_s))
        self.intervals = first.intervals or self.intervals
        if (first.pid, first.phase) != self._entered:
            same = first.pid == self._entered[0]
            self._entered = (first.pid, first.phase)
            self._on_phase(first.phase, first.phase_s if same else now_s)
        return ""

    def _measure_memory(self, attempt: Attempt) -> None:
        members, memory = attempt.tree.members, self.memory
        memory["host_bytes"] = max(memory.get("host_bytes", 0), sum(map(platform.private_bytes, members)))
        for gpu in self._gpus.read():
            used, total = int(gpu.get("memory_used") or 0), int(gpu.get("memory_total") or 0)
            # In a container the driver names no process, or those of another namespace: then all memory in use counts.
            memory.setdefault("gpu_before_bytes", used)
            if used > memory.get("gpu_bytes", 0):
                memory |= {"gpu_bytes": used, "gpu_total_bytes": total, "gpu": str(gpu.get("name", ""))}

    def image_s(self) -> float:
        """Seconds that each further image costs: from the first item to the last one, in each phase that encodes."""
        total = 0.0
        for (_, phase), items in self._items.items():
            counted = [(done, at_s) for done, at_s in items if done > 0]
            if phase in ENCODING and counted:
                (first, first_s), (last, last_s) = counted[0], counted[-1]
                total += (last_s - first_s) / (last - first) if last > first else 0.0
        return round(total, 4)

    def close(self) -> None:
        """End the helper process."""
        self._gpus.close()
