"""A stand-in for the NVIDIA management library, first on the PYTHONPATH of the monitor's GPU helper.

FAULTS_NVML=fails: every call raises, as with a lost GPU. FAULTS_NVML=hangs: the first query never returns. Otherwise there is
one idle GPU with FAULTS_NVML_GIB (24) GiB. It leaves the file FAULTS_NVML_USED, which shows that it was called.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's."""


def nvmlInit() -> None:
    if used := os.environ.get("FAULTS_NVML_USED"):
        Path(used).touch()
    if os.environ.get("FAULTS_NVML") == "fails":
        raise NVMLError("GPU is lost")


def nvmlDeviceGetCount() -> int:
    if os.environ.get("FAULTS_NVML") == "hangs":
        time.sleep(24 * 3600)
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetMemoryInfo(_: int) -> SimpleNamespace:
    return SimpleNamespace(used=1 << 30, total=int(os.environ.get("FAULTS_NVML_GIB", "24")) << 30)


def nvmlDeviceGetName(_: int) -> str:
    return "Stand-in"


def nvmlDeviceGetUtilizationRates(_: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=50)


def nvmlDeviceGetTemperature(_handle: int, _sensor: int) -> int:
    return 60


def nvmlDeviceGetPowerUsage(_: int) -> int:
    return 200_000


def nvmlDeviceGetCurrentClocksThrottleReasons(_: int) -> int:
    return 0


def nvmlDeviceGetComputeRunningProcesses(_: int) -> list[SimpleNamespace]:
    return []
