"""A stand-in for the NVIDIA management library, first on the PYTHONPATH of the monitor's GPU helper.

FAULTS_NVML=fails: every call raises, as with a lost GPU. FAULTS_NVML=hangs: the first query never returns. Otherwise
there is one idle GPU with FAULTS_NVML_GIB (24) GiB. It leaves the file FAULTS_NVML_USED, which shows that it was
called. FAULTS_NVML_VALUES: a JSON file with recorded values that replace those below: used_gib, utilization, power_w,
limit_w. FAULTS_NVML_WSL=1: the driver is that of Windows, in WSL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


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


def _value(name: str, usual: Any) -> Any:
    path = os.environ.get("FAULTS_NVML_VALUES")
    return json.loads(Path(path).read_text(encoding="utf-8")).get(name, usual) if path else usual


def nvmlDeviceGetMemoryInfo(_: int) -> SimpleNamespace:
    used = int(_value("used_gib", 1) * (1 << 30))
    return SimpleNamespace(used=used, total=int(os.environ.get("FAULTS_NVML_GIB", "24")) << 30)


def nvmlDeviceGetName(_: int) -> str:
    return "Stand-in"


def nvmlDeviceGetUtilizationRates(_: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=_value("utilization", 50))


def nvmlDeviceGetTemperature(_handle: int, _sensor: int) -> int:
    return 60


def nvmlDeviceGetPowerUsage(_: int) -> int:
    return int(_value("power_w", 200) * 1000)


def nvmlDeviceGetEnforcedPowerLimit(_: int) -> int:
    return int(_value("limit_w", 300) * 1000)


def nvmlDeviceGetCurrentClocksThrottleReasons(_: int) -> int:
    return 0


def nvmlDeviceGetComputeRunningProcesses(_: int) -> list[SimpleNamespace]:
    return []


def nvmlDeviceGetProcessUtilization(_handle: int, _since: int) -> list[SimpleNamespace]:
    return []


if os.environ.get("FAULTS_NVML_WSL"):
    sys.modules["__main__"].DRIVER_FILES = (Path(__file__), Path(__file__))  # the helper that imports this file
