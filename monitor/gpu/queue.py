"""One run a GPU, first come first served, without a dispatcher: tickets and locks that die with their holders.

A run that waits holds a ticket, a locked file named by the time it was queued. The holder of the oldest ticket may take
the GPU's lock. The training's shell inherits that lock, so a GPU stays taken while a killed monitor's training lives.
`HANGPROOF_GPUS` names the GPUs to lock ("" for none); else `CUDA_VISIBLE_DEVICES`; else the first, where there is one.

The files are in one folder for all accounts of the machine, whatever TMPDIR says, and have the GPU's UUID in their
names: "0" and its UUID are one GPU. An index counts as NVML and nvidia-smi do, by PCI bus. The folder is one that
everybody may write to and nobody else's files may be removed from, so each file is opened as what somebody else may
have put there (locks.py).
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monitor.gpu import nvml
from monitor.process import platform
from monitor.process.locks import Lock, remove_unheld

NAME_BYTES = 200  # of the run that has a GPU; another account may have written anything
PATIENCE_S = 2.0  # for a ticket: another run may be about to remove the file as a dead one's


def devices(spec: dict[str, Any]) -> list[str]:
    """The GPUs that a run uses, by name; [] without a GPU."""
    named = os.environ.get("HANGPROOF_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpu_count = int(spec.get("gpus", 1))
    if named is None:
        return [str(i) for i in range(gpu_count)] if nvml.present() else []
    visible = [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return visible if "HANGPROOF_GPUS" in os.environ else visible[:gpu_count]


def shared_folder() -> Path:
    """The folder for the locks, the same for every account; `HANGPROOF_LOCKS` names another one."""
    if named := os.environ.get("HANGPROOF_LOCKS"):
        return Path(named)
    if platform.WINDOWS:
        return Path(os.environ.get("PUBLIC", r"C:\Users\Public"))
    with contextlib.suppress(OSError):
        mode = os.stat("/run/lock").st_mode  # by its mode, not by what this account may do: all must choose the same
        if mode & stat.S_ISVTX and mode & stat.S_IWOTH:
            return Path("/run/lock")
    return Path("/tmp")


def lock_names(devices: Sequence[str], gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The names of the devices' locks, each with its device: the UUID where the driver lists it, else the device's own name.

    A device is an index, a UUID or the beginning of one, as in `CUDA_VISIBLE_DEVICES`. A GPU that is divided (MIG)
    stands for the first of its parts, which is all that CUDA uses of it.

    Args:
        gpus: the driver's list (nvml.take), in its order.
    """
    known: dict[str, str] = {}  # what a device may be called -> the name of its lock
    for index, gpu in enumerate(gpus):
        parts = gpu.get("mig") or [gpu["uuid"]] if "uuid" in gpu else []
        known |= {str(uuid): str(uuid) for uuid in parts}
        known |= {str(name): str(parts[0]) for name in (gpu.get("uuid"), index) if parts}
    found: dict[str, str] = {}
    for device in devices:
        begins = {name for uuid, name in known.items() if uuid.startswith(device) and not device.isdigit()}
        found.setdefault(known.get(device) or (begins.pop() if len(begins) == 1 else device), device)
    return found


class GpuQueue:
    """A run's place in the queues of its GPUs."""

    def __init__(
        self, name: str, spec: dict[str, Any], listed: Callable[[], Sequence[Mapping[str, Any]] | None] = tuple
    ):
        """listed: the driver's list of GPUs; None: it has not answered yet."""
        self.name = name
        self._listed = listed
        self._paths: dict[str, Path] = {}  # device -> its lock, without the ending
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
        return not self.devices or bool(self._locks)

    def acquire(self) -> bool:
        """Take all GPUs, or none yet; then `message` says what the run waits for. Call it again until it is True."""
        if self.held:
            return True
        try:
            self.message = self._take()
        except OSError as error:
            why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            self.message = f"waiting for GPU {', '.join(self.devices)}: its queue is not usable: {why}"
        return self.held

    def _take(self) -> str:
        """Take the locks; what the run waits for, "" when it has them. OSError: a file cannot be made."""
        if not self._paths:
            gpus = self._listed()
            if gpus is None:
                return f"waiting for GPU {', '.join(self.devices)}: the driver has not listed its GPUs yet"
            for name, device in sorted(lock_names(self.devices, gpus).items()):
                self._paths[device] = shared_folder() / f"hangproof-gpu.{re.sub(r'[^A-Za-z0-9_-]', '_', name)}"
        for name, path in self._paths.items():
            place = path.with_name(f"{path.name}.{self.queued_at_s:020.6f}-{os.getpid()}.ticket")
            if not self._tickets.setdefault(name, Lock(place, shared=True)).acquire(PATIENCE_S):
                return f"waiting for GPU {name}: its queue is busy"
        for name, path in self._paths.items():
            others = path.parent.glob(f"{path.name}.*.ticket")
            earlier = [other for other in others if other.name < self._tickets[name].path.name]
            waiting = sum(not remove_unheld(other, shared=True) for other in earlier)
            if waiting:
                return f"waiting for GPU {name}: {waiting} {'run' if waiting == 1 else 'runs'} queued before"
        with contextlib.ExitStack() as taken:
            locks = [Lock(path.with_name(f"{path.name}.lock"), shared=True) for path in self._paths.values()]
            for name, lock in zip(self._paths, locks, strict=True):
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
        with open(path, "rb") as file:
            return f"the run {file.read(NAME_BYTES).decode()!r}"
    except (OSError, UnicodeDecodeError):
        return "another run"
