"""One run a GPU, first come first served, without a dispatcher: tickets and locks that die with their holders.

A run that waits holds a ticket, a locked file named by the time it was queued. The holder of the oldest ticket may take
the GPU's lock. The training's shell inherits that lock, so a GPU stays taken while a killed monitor's training lives.
`HANGPROOF_GPUS` names the GPUs to lock ("" for none); else `CUDA_VISIBLE_DEVICES`; else the first, where there is one.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from monitor.gpu import nvml
from monitor.process import platform
from monitor.process.locks import Lock, remove_unheld

PATIENCE_S = 2.0  # for a ticket: another run may be about to remove the file as a dead one's


def devices(spec: dict[str, Any]) -> list[str]:
    """The GPUs that a run uses, by name; [] without a GPU."""
    named = os.environ.get("HANGPROOF_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpu_count = int(spec.get("gpus", 1))
    if named is None:
        return [str(i) for i in range(gpu_count)] if nvml.present() else []
    visible = [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return visible if "HANGPROOF_GPUS" in os.environ else visible[:gpu_count]


class GpuQueue:
    """A run's place in the queues of its GPUs."""

    def __init__(self, name: str, spec: dict[str, Any]):
        self.name = name
        self.devices = sorted(devices(spec))
        self.queued_at_s = 0.0  # since boot
        self.message = ""
        self._tickets: dict[str, Lock] = {}
        self._locks: list[Lock] = []

    def ask(self, queued_at_s: float | None) -> None:
        """Queue for each GPU; `queued_at_s` (seconds since boot) keeps the place of a monitor that was killed."""
        now_s = platform.now().boot_s
        self.queued_at_s = queued_at_s if queued_at_s is not None and queued_at_s <= now_s else now_s

    @property
    def held(self) -> bool:
        return len(self._locks) == len(self.devices)

    def acquire(self) -> bool:
        """Take all GPUs, or none yet; then `message` says what the run waits for. Call it again until it is True."""
        if self.held:
            return True
        try:
            self.message = self._take()
        except OSError as error:
            self.message = f"waiting for GPU {', '.join(self.devices)}: its queue is not usable: {error.strerror}"
        return self.held

    def _take(self) -> str:
        """Take the locks; what the run waits for, "" when it has them. OSError: a file cannot be made."""
        folder = platform.private_base() / "gpus"
        paths = {name: folder / re.sub(r"[^\w-]", "_", name) for name in self.devices}
        for name, path in paths.items():
            ticket = self._tickets.get(name) or Lock(path / f"{self.queued_at_s:020.6f}-{os.getpid()}.ticket")
            if not ticket.acquire(PATIENCE_S):
                return f"waiting for GPU {name}: its queue is busy"
            self._tickets[name] = ticket
        for name, path in paths.items():
            earlier = [other for other in path.glob("*.ticket") if other.name < self._tickets[name].path.name]
            waiting = sum(not remove_unheld(other) for other in earlier)
            if waiting:
                return f"waiting for GPU {name}: {waiting} {'run' if waiting == 1 else 'runs'} queued before"
        with contextlib.ExitStack() as taken:
            locks = [Lock(path.with_name(f"{path.name}.lock")) for path in paths.values()]
            for name, lock in zip(paths, locks, strict=True):
                if not lock.acquire():
                    return f"waiting for GPU {name}: {_holder(lock.path)} uses it"
                taken.callback(lock.release)
                lock.write(self.name)
            taken.pop_all()
            self._locks = locks
        self._drop_tickets()
        return ""

    def handles(self) -> tuple[int, ...]:
        """Descriptors that the training inherits, so that the GPU stays taken while it lives."""
        return () if platform.WINDOWS else tuple(lock.handle for lock in self._locks)

    def release(self) -> None:
        """Give the GPUs and the places in the queues back."""
        for lock in self._locks:
            lock.release()
        self._locks = []
        self._drop_tickets()

    def _drop_tickets(self) -> None:
        for ticket in self._tickets.values():
            ticket.release(remove=True)
        self._tickets = {}


def _holder(path: Path) -> str:
    try:
        return f"the run {path.read_text(encoding='utf-8')!r}"
    except (OSError, UnicodeDecodeError):
        return "another run"
