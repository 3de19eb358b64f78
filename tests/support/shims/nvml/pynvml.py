"""A stand-in for the NVIDIA management library, first on the PYTHONPATH of whoever asks it: one idle GPU.

How it fails is the word in FAULTS_NVML, or a file of that name beside a copy of this one: `absent`, `fails`, `lost`,
`hangs`; a file `pids` names the processes on it. FAULTS_NVML_GIB: its memory, 24.
FAULTS_NVML_USED: a file that is made when it is called. FAULTS_NVML_VALUES: a JSON file of values that replace those
below (used_gib null: it has none of its own). FAULTS_NVML_WSL=1: the driver of WSL.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

here = Path(__file__).parent
USUAL = {"used_gib": 1, "utilization": 50, "power_w": 200, "limit_w": 300, "throttle": 0}


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def _is(word):
    return os.environ.get("FAULTS_NVML") == word or (here / word).exists()


def _values():
    path = os.environ.get("FAULTS_NVML_VALUES")
    return USUAL | (json.loads(Path(path).read_text(encoding="utf-8")) if path else {})


def _memory(used_gib):
    if used_gib is None:
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(used=int(used_gib * (1 << 30)), total=int(os.environ.get("FAULTS_NVML_GIB", "24")) << 30)


def nvmlInit():
    if used := os.environ.get("FAULTS_NVML_USED"):
        Path(used).touch()
    if _is("absent"):
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    if _is("fails"):
        raise NVMLError("Driver/library version mismatch")


def nvmlDeviceGetCount():
    while _is("hangs"):
        time.sleep(0.05)
    if _is("lost"):
        raise NVMLError("GPU is lost")
    return 1


READ = {
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetName": lambda _: "Stand-in",
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(domain=0, bus=0x3B + index, device=0),
    "nvmlDeviceGetMemoryInfo": lambda _: _memory(_values()["used_gib"]),
    "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=_values()["utilization"]),
    "nvmlDeviceGetPowerUsage": lambda _: int(_values()["power_w"] * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda _: int(_values()["limit_w"] * 1000),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: _values()["throttle"],
}


def __getattr__(name):
    if name not in READ:
        raise AttributeError(name)
    return READ[name]


def nvmlDeviceGetComputeRunningProcesses(_):
    pids = here / "pids"
    return [SimpleNamespace(pid=int(pid)) for pid in pids.read_text().split()] if pids.exists() else []


if os.environ.get("FAULTS_NVML_WSL"):
    sys.modules["__main__"].DRIVER_FILES = (Path(__file__), Path(__file__))  # the helper that imports this file
