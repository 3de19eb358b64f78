"""What this machine has: its NVIDIA GPU, memory, free disk space, and whether the trainer's torch can use the GPU.

The driver is asked by a helper process (`python -m runs.machine`), because its calls block forever when a GPU is lost.
torch is never imported here: whether it is a CUDA build is read from the `torch/version.py` of the trainer's
environment.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import presets
from runs.paths import ROOT, backend_venv, data_root

GIB = 2**30
DRIVER_TIMEOUT_S = 10.0
FRESH_S = 600.0  # a GPU does not change while the page is open, but a driver can be installed or fail
# What NVML raises where there is no GPU: a container that got none has the driver's kernel module, but not its library.
ABSENT = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded", "NVMLError_NotFound")
FREE_FRESH_S = 60.0  # other programs take and free its memory; each question is a process


@dataclass(frozen=True)
class Machine:
    """This machine.

    gpu_name: the GPU that a run uses ("" without an NVIDIA GPU); vram_gb: its memory in GiB, as on its box;
    vram_free_gb: what no program uses now; cuda: whether the trainer's torch is a CUDA build; note: why the driver gave
    no answer ("" when it did, or there is none).
    """

    gpu_name: str
    vram_gb: float | None
    cuda: bool
    free_disk_gb: float
    note: str = ""
    vram_free_gb: float | None = None


_lock = threading.Lock()
Gpu = dict[str, Any]
NO_GPU: Gpu = {"gpu_name": "", "vram_gb": None, "note": "", "vram_free_gb": None}  # the fields of a Machine about it
_gpu: tuple[float, Gpu] | None = None  # when it was read, and the answer


def this_machine(backend: str = "diffusers") -> Machine:
    """This machine for a backend. The GPU is read again after ten minutes; the free disk space is always current."""
    global _gpu
    with _lock:
        fresh_s = FREE_FRESH_S if _gpu is not None and _gpu[1]["vram_gb"] is not None else FRESH_S
        if _gpu is None or time.monotonic() - _gpu[0] > fresh_s:
            found = ask([sys.executable, "-m", "runs.machine"], DRIVER_TIMEOUT_S)
            if isinstance(found, str):
                found = {**NO_GPU, "note": f"the NVIDIA driver could not be read: {found}; restart the machine"}
            _gpu = (time.monotonic(), found)
        gpu = _gpu[1]
    return Machine(**gpu, cuda=cuda_build(backend), free_disk_gb=free_gb(data_root()))


def free_gb(folder: Path) -> float:
    """Free space in GB (10^9 bytes) on the disk of a folder that may not exist yet."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(place).free / 1e9


def tier_for(machine: Machine, model: str = "", backend: str = "") -> str:
    """The largest VRAM tier that the GPU has the memory for; without one, the smallest that can hold the model.

    Args:
        model, backend: of the run; "" for the default model, and for the model's usual trainer.
    """
    model = model or presets.defaults()["run"]["model"]
    found = presets.tiers_of(model, backend or None)
    by_size = [(name, tier) for name, tier in found.items() if not tier["problem"]]
    # A GPU sold as 16 GB reports a little less than 16 GiB.
    fitting = [name for name, tier in by_size if machine.vram_gb and tier["vram_gb"] <= round(machine.vram_gb)]
    return fitting[-1] if fitting else by_size[0][0]


def ask(command: Sequence[str | Path], limit_s: float, text: str = "", **environment: str) -> dict[str, Any] | str:
    """What a command prints as JSON in its last line, or why there is none. text: its standard input."""
    try:
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", errors="replace", env={**os.environ, **environment},
        )  # fmt: skip
        out, err = process.communicate(text, timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: one in uninterruptible sleep does not die
        return f"it did not answer within {limit_s:.0f} s"
    except OSError as error:
        return f"it cannot be started: {error.strerror or error}"
    try:
        value = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]
    return value if isinstance(value, dict) else "it printed no answer"


def _visible(count: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to a run; all when it is not set or names them by UUID."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or re.search(r"[A-Za-z]", chosen):
        return list(range(count))
    return [int(part) for part in chosen.split(",") if part.strip().isdigit() and int(part) < count]


def _memory(nvml: Any, handle: Any) -> tuple[float, float]:
    """(all, free) GiB of a GPU; the machine's for one that has no memory of its own (GB10, Jetson)."""
    import psutil

    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return found.total / GIB, (found.total - found.used) / GIB
    except nvml.NVMLError_NotSupported:
        machine = psutil.virtual_memory()
        return machine.total / GIB, machine.available / GIB


def read_driver() -> Gpu:
    """The GPU with the most memory, from NVML. May block forever."""
    try:
        import pynvml as nvml
    except ImportError:
        return NO_GPU
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in _visible(nvml.nvmlDeviceGetCount())]
        gpus = [(*_memory(nvml, handle), handle) for handle in handles]
        if not gpus:
            return NO_GPU
        vram_gb, free_gb, handle = max(gpus, key=lambda gpu: gpu[0])
        name = nvml.nvmlDeviceGetName(handle)
        return {**NO_GPU, "gpu_name": name, "vram_gb": round(vram_gb, 1), "vram_free_gb": round(free_gb, 2)}
    except nvml.NVMLError as error:
        absent = type(error).__name__ in ABSENT
        return NO_GPU if absent else {**NO_GPU, "note": f"the NVIDIA driver failed: {error}"}


def cuda_build(backend: str = "diffusers") -> bool:
    """Whether the torch of the backend's environment is a CUDA build. False where torch is not found."""
    venv = backend_venv(backend)  # in which Windows has another layout
    packages = [venv / "Lib/site-packages/torch", *venv.glob("lib/python3*/site-packages/torch")]
    if backend == "diffusers" and (found := importlib.util.find_spec("torch")):  # finds it without importing it
        packages += map(Path, found.submodule_search_locations or ())
    for package in packages:
        try:
            text = (package / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        cuda = re.search(r"^cuda\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
        return cuda is not None and cuda.group(1).strip() not in ("None", "''", '""')
    return False


if __name__ == "__main__":
    print(json.dumps(read_driver()), flush=True)
