"""One run a GPU, first come first served, without a dispatcher: tickets and locks that die with their holders.

A run that waits holds a ticket, a locked file named by the time it asked. Who has the oldest living ticket may take the
GPU's lock. The training's own shell inherits that lock, so that a GPU stays taken while a killed monitor's training lives.
`HANGPROOF_GPUS` names the GPUs to be locked ("" for none); else `CUDA_VISIBLE_DEVICES`; else the first, where there is one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from monitor import gpu, system
from monitor.folder import RunFiles
from monitor.locks import Lock, is_held
from monitor.report import count


def devices(spec: dict) -> list[str]:
    """The GPUs that a run is going to use, by name; [] without a GPU."""
    named = os.environ.get("HANGPROOF_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if named is None:
        named = "0" if gpu.present() else ""
    count = spec.get("gpus", 1)
    visible = [name.strip() for name in named.split(",") if name.strip()] if named != "-1" else []
    if not visible or "HANGPROOF_GPUS" in os.environ:
        return visible
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [str(i) for i in range(count)]
    return visible[:count]


def base() -> Path:
    """Where the locks are: this user's, this machine's."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"hangproof-{user}" / "gpus"


class GpuQueue:
    """A run's place in the queues of its GPUs."""

    def __init__(self, files: RunFiles):
        self.files = files
        self.devices = sorted(devices(files.spec))
        self.asked_at = 0.0
        self.message = ""
        self._tickets: list[Lock] = []
        self._locks: list[Lock] = []

    def ask(self, asked_at: float | None) -> None:
        """Take a ticket for each GPU; `asked_at` (seconds since boot) keeps an old place after a monitor was killed."""
        now = system.boot_seconds()
        self.asked_at = asked_at if asked_at is not None and asked_at <= now else now
        if self._tickets:
            return
        for name in self.devices:
            ticket = Lock(_queue(name) / f"{self.asked_at:020.6f}-{os.getpid()}.ticket")
            ticket.acquire()
            ticket.write(self.files.name)
            self._tickets.append(ticket)

    @property
    def held(self) -> bool:
        return len(self._locks) == len(self.devices)

    def acquire(self) -> bool:
        """All GPUs, or none yet; `message` says for what it waits."""
        if self.held:
            return True
        for name, ticket in zip(self.devices, self._tickets, strict=True):
            before = [path for path in _waiting(name) if path.name < ticket.path.name]
            if before:
                self.message = f"waiting for GPU {name}: {count(len(before), 'run')} asked before"
                return False
        taken = []
        for name in self.devices:
            lock = Lock(base() / f"{_safe(name)}.lock")
            if not lock.acquire():
                for other in taken:
                    other.release()
                self.message = f"waiting for GPU {name}: {_holder(lock.path)} uses it"
                return False
            lock.write(self.files.name)
            taken.append(lock)
        self._locks = taken
        self._drop_tickets()
        return True

    def handles(self) -> tuple[int, ...]:
        """Descriptors that the training inherits, so that the GPU stays taken while it lives."""
        return tuple(lock.handle for lock in self._locks) if not system.WINDOWS else ()

    def release(self) -> None:
        """Give the GPUs and the places back."""
        for lock in self._locks:
            lock.release()
        self._locks = []
        self._drop_tickets()

    def _drop_tickets(self) -> None:
        for ticket in self._tickets:
            ticket.path.unlink(missing_ok=True)
            ticket.release()
        self._tickets = []


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def _queue(name: str) -> Path:
    return base() / _safe(name)


def _waiting(name: str) -> list[Path]:
    """The tickets of living waiters, oldest first; those of dead ones are removed."""
    found = []
    for path in sorted(_queue(name).glob("*.ticket")):
        if is_held(path):
            found.append(path)
        else:
            path.unlink(missing_ok=True)
    return found


def _holder(path: Path) -> str:
    try:
        return f"the run {path.read_text(encoding='utf-8')!r}"
    except (OSError, UnicodeDecodeError):
        return "another run"
