"""One run a GPU, without a dispatcher: locks that die with their holders.

A run that waits tries again and again; which of several goes first, the queue decides (jobs/queue.py), where people see
and change it. The training's shell inherits the lock, so a GPU stays taken while a killed monitor's training lives.
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
from monitor.process.locks import Lock

NAME_BYTES = 200  # of the run that has a GPU; another account may have written anything


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

    A device is an index, a UUID or the beginning of one, as in `CUDA_VISIBLE_DEVICES`.

    Args:
        gpus: the driver's list (nvml.take), in its order.
    """
    uuids = {str(index): str(gpu["uuid"]) for index, gpu in enumerate(gpus) if "uuid" in gpu}
    found: dict[str, str] = {}
    for device in devices:
        begins = [uuid for uuid in uuids.values() if uuid.startswith(device)]
        found.setdefault(uuids.get(device) or (begins[0] if len(begins) == 1 else device), device)
    return found


class GpuQueue:
    """The GPUs of a run, from the first attempt to get them."""

    def __init__(
        self, name: str, spec: dict[str, Any], listed: Callable[[], Sequence[Mapping[str, Any]] | None] = tuple
    ):
        """listed: the driver's list of GPUs; None: it has not answered yet."""
        self.name = name
        self._listed = listed
        self._paths: dict[str, Path] = {}  # device -> its lock
        self.devices = sorted(devices(spec))
        self.message = ""
        self._locks: list[Lock] = []

    @property
    def held(self) -> bool:
        return not self.devices or bool(self._locks)

    def acquire(self) -> bool:
        """Take all GPUs, or none yet; then `message` says what the run waits for. Call it again until it is True."""
        if not self.held:
            try:
                self.message = self._take()
            except OSError as error:
                why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
                self.message = f"waiting for GPU {', '.join(self.devices)}: its lock is not usable: {why}"
        return self.held

    def _take(self) -> str:
        """Take the locks; what the run waits for, "" when it has them. OSError: a file cannot be made."""
        if not self._paths:
            gpus = self._listed()
            if gpus is None:
                return f"waiting for GPU {', '.join(self.devices)}: the driver has not listed its GPUs yet"
            for name, device in sorted(lock_names(self.devices, gpus).items()):
                file_name = f"hangproof-gpu.{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.lock"
                self._paths[device] = shared_folder() / file_name
        with contextlib.ExitStack() as taken:
            locks = {name: Lock(path, shared=True) for name, path in self._paths.items()}
            for name, lock in locks.items():
                if not lock.acquire():
                    return f"waiting for GPU {name}: {_holder(lock.path)} uses it"
                taken.callback(lock.release)
                lock.write(self.name)
            taken.pop_all()
            self._locks = list(locks.values())
        return ""

    def handles(self) -> tuple[int, ...]:
        """Descriptors that the training inherits, so that the GPU stays taken while it lives."""
        return () if platform.WINDOWS else tuple(lock.handle for lock in self._locks)

    def release(self) -> None:
        """Give the GPUs back."""
        for lock in self._locks:
            lock.release()
        self._locks = []


def _holder(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return f"the run {file.read(NAME_BYTES).decode()!r}"
    except (OSError, UnicodeDecodeError):
        return "another run"
