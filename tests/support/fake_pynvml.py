"""A stand-in for `pynvml`, copied as pynvml.py into a folder whose files say how the driver behaves: `fails`, `hangs`, `lost`, `mig`, `pids`."""

import time
from pathlib import Path


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


here = Path(__file__).parent


def nvmlInit():
    if (here / "absent").exists():
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    if (here / "fails").exists():
        raise NVMLError("Driver/library version mismatch")


def nvmlDeviceGetCount():
    while (here / "hangs").exists():
        time.sleep(0.05)
    if (here / "lost").exists():
        raise NVMLError("GPU is lost")
    return 1


def nvmlDeviceGetHandleByIndex(i):
    return i


class Values:
    used, total, gpu = 3, 24, 97


CONSTANTS = {
    "nvmlDeviceGetMemoryInfo": Values,
    "nvmlDeviceGetName": "Fake 4090",
    "nvmlDeviceGetUtilizationRates": Values,
    "nvmlDeviceGetPowerUsage": 250500,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x20 | 0x40,
    "nvmlDeviceGetMaxMigDeviceCount": 7,
}


def __getattr__(name):
    if name not in CONSTANTS:
        raise AttributeError(name)
    return lambda *_: CONSTANTS[name]


def nvmlDeviceGetTemperature(h, which):
    raise NVMLError("not supported")


def nvmlDeviceGetUUID(h):
    return f"GPU-{h}" if isinstance(h, int) else h


def nvmlDeviceGetMigMode(h):
    if not (here / "mig").exists():
        raise NVMLError("not supported")
    return [1, 1]


def nvmlDeviceGetMigDeviceHandleByIndex(h, i):
    if i > 1:
        raise NVMLError("not found")
    return f"MIG-{i}"


class Process:
    def __init__(self, pid):
        self.pid = int(pid)


def nvmlDeviceGetComputeRunningProcesses(h):
    pids = here / "pids"
    return [Process(pid) for pid in pids.read_text().split()] if pids.exists() else []
