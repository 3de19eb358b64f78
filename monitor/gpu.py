"""The GPUs: their state, and one run a GPU.

A helper process reads their state, because NVML calls block forever when a GPU is lost. It alone talks to the driver
and writes readings to a file; the monitor reads the file and never waits for the driver. `python -m monitor.gpu FILE`
is the helper: it takes a reading every ten seconds and for every byte on its standard input, and exits when that
closes.

One run a GPU needs no dispatcher: locks die with their holders. A run that waits tries again and again; which of
several goes first, the queue decides (jobs/queue.py). The training's shell inherits the lock, so a GPU stays taken
while a killed monitor's training lives. The files are in one folder that every account of the machine may write to,
whatever TMPDIR says, so each is opened as what somebody else may have put there (process/platform.py). They have the
GPU's UUID in their names: "0" and its UUID are one GPU. An index counts as NVML and nvidia-smi do, by PCI bus.
"""

import contextlib
import json
import math
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from guards.reading import read_json, read_text
from monitor.process import platform
from monitor.process.platform import WINDOWS, Lock, drop_private, private_folder, sleep
from monitor.process.spawned import Subjob, python

FILE = "gpu.json"  # in a private folder: the newest reading
PERIOD_S = 10.0
FRESH_S = 30.0
ANSWER_S = 2.0  # how long `wait_free` waits for one reading
RESTART_S = 60.0
COUNT_S = 20.0  # a driver answers the first question after some seconds where no persistence daemon runs
# A container may hide the first; WSL 2 has only the second.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libnvidia-ml.so.1"))
POWERSHELL = "powershell.exe"  # WSL runs the one of its Windows
# By class and not by counter: the counters' names are translated (learn.microsoft.com, Get-Counter).
COUNTERS = ("Get-CimInstance Win32_PerfFormattedData_GPUPerformanceCounters_GPUAdapterMemory | "
            "Select-Object DedicatedUsage,SharedUsage | ConvertTo-Json -Compress")  # fmt: skip
COUNTERS_S, COUNTERS_EVERY_S = 10.0, 20.0
FULL = 0.9  # of the memory: below it nothing is moved to the host's
# nvml.h, nvmlClocksEventReasons: what slows a GPU down from outside
THROTTLE = {0x4: "power limit", 0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def spills() -> bool:
    """Whether this machine's driver moves GPU memory that does not fit to the host's: on Windows, and so in WSL."""
    return WINDOWS or DRIVER_FILES[1].exists()


def own(readings: Sequence[dict[str, Any]], devices: Sequence[str]) -> list[dict[str, Any]]:
    """The readings of the GPUs that a run uses, by index or by UUID; of all where none has such a name (MIG)."""
    uuids = tuple(device for device in devices if not device.isdigit())
    found = [gpu for i, gpu in enumerate(readings) if str(i) in devices or str(gpu.get("uuid", "")).startswith(uuids)]
    return found or (list(readings) if uuids else [])


def shared_bytes(text: str) -> int | None:
    """The host's memory that the GPU with the most memory of its own uses, as COUNTERS says; None: no answer."""
    lines = (line for line in text.splitlines() if line.startswith(("[", "{")))  # others: PowerShell's notices
    try:
        found = json.loads("".join(lines))
        rows = found if isinstance(found, list) else [found]
        most = max(rows, key=lambda row: int(row["DedicatedUsage"]))
        return int(most["SharedUsage"])
    except (ValueError, LookupError, TypeError):
        return None


class SharedMemory:
    """Asks Windows, beside the readings of the driver, how much memory of the host a full GPU uses."""

    def __init__(self) -> None:
        self._bytes: int | None = None
        self._job: Subjob | None = None
        self._next_s = -math.inf

    def poll(self) -> int | None:
        """What it said last. It is asked again, and not again for a while. Called while a GPU is full."""
        if self._job is not None and self._job.done():
            self._bytes, self._job = shared_bytes(self._job.text()), None
        if self._job is None and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + COUNTERS_EVERY_S
            self._job = Subjob([POWERSHELL, "-NoProfile", "-NonInteractive", "-Command", COUNTERS], COUNTERS_S)
        return self._bytes


def present() -> bool:
    """Whether there is an NVIDIA driver, by its files, or HANGPROOF_GPUS names GPUs. Does not call the driver."""
    return WINDOWS or bool(os.environ.get("HANGPROOF_GPUS")) or any(path.exists() for path in DRIVER_FILES)


def model() -> str:
    """The first GPU's model as the driver's files name it, "" without one. Does not call the driver."""
    texts = (read_text(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")))
    models = (match[1] for text in texts if (match := re.search(r"^Model:\s*(.*\S)", text, re.M)))
    return next(models, "gpu" if present() else "")


class Gpus:
    """The monitor's side. Never raises: without a helper there are no readings, and `note` says why."""

    def __init__(self) -> None:
        self._job: Subjob | None = None
        self._folder: Path | None = None
        self._started_s = time.monotonic()
        self._error = ""
        if present():
            self._start()

    def _start(self) -> None:
        self._started_s, self._error = time.monotonic(), ""
        try:
            self._folder = self._folder or private_folder("gpu")
            self._job = Subjob(python("monitor.gpu", str(self._folder / FILE)), math.inf, stdin=None)
        except OSError as error:
            self._error = f"no GPU readings: {error.strerror}"

    def _running(self) -> bool:
        return self._job is not None and not self._job.done()

    def _reading(self) -> dict[str, Any]:
        """The helper's newest: at_s (monotonic), gpus, error. Empty without one."""
        newest = read_json(self._folder / FILE) if self._folder else None
        return {"at_s": -math.inf, "gpus": (), "error": "", **(newest or {})}

    def _request(self) -> None:
        """Have a reading taken now."""
        if self._job is not None:
            self._job.send(b"\n")

    def read(self) -> tuple[dict[str, Any], ...]:
        """The newest readings, one a GPU; () when there are none or they are old. Requests the next."""
        reading, now_s = self._reading(), time.monotonic()
        crashed = not self._running() and present() and not reading["error"]
        if crashed and now_s - self._started_s > RESTART_S:
            self._start()
        self._request()
        return tuple(reading["gpus"]) if now_s - reading["at_s"] < FRESH_S else ()

    def listed(self) -> tuple[dict[str, Any], ...] | None:
        """The driver's list of GPUs, however old; () for none or no answer, None while it may still answer."""
        reading = self._reading()
        if reading["at_s"] > -math.inf or not self._running() or time.monotonic() - self._started_s >= COUNT_S:
            return tuple(reading["gpus"])
        return None

    def count(self, pause: Callable[[float], None]) -> int | None:
        """How many GPUs this machine has; None when the driver fails or does not answer within COUNT_S. A run that locks
        no GPU has not waited for the driver before.

        Args:
            pause: waits so many seconds; what it raises leaves here.
        """
        while self.listed() is None:
            pause(0.05)
        reading = self._reading()
        answered = reading["at_s"] > -math.inf and not reading["error"]
        return len(reading["gpus"]) if answered or not present() else None

    @property
    def note(self) -> str:
        """Why there are no readings; "" when there are some, or no GPU."""
        reading = self._reading()
        if self._job is None or self._error or reading["error"]:
            return self._error or str(reading["error"])
        if self._job.done():
            return f"no GPU readings: {self._job.error or 'the helper exited'}"
        age_s = time.monotonic() - max(reading["at_s"], self._started_s)
        return f"the NVIDIA driver has not answered for {age_s:.0f} s" if age_s > FRESH_S else ""

    def wait_free(self, pids: set[int], timeout_s: float) -> set[int]:
        """Wait until none of `pids` holds GPU memory; those that still do after `timeout_s`. set(): or no answer."""
        now_s = requested_s = time.monotonic()
        until_s, left = now_s + timeout_s, set[int]()
        self._request()
        while self._running() and now_s < until_s:
            reading = self._reading()
            if reading["at_s"] >= requested_s:
                left = {pid for gpu in reading["gpus"] for pid in gpu.get("pids", ()) if pid in pids}
                if not left:
                    break
                requested_s = now_s
                self._request()
            elif now_s - requested_s > ANSWER_S:
                return set()
            sleep(min(0.05, until_s - now_s))
            now_s = time.monotonic()
        return left

    def close(self) -> None:
        """Kill the helper: it has nothing to save, and one stuck in the driver would not exit by itself."""
        if self._job is not None:
            self._job.kill()
        if self._folder is not None:
            drop_private(self._folder)
        self._job = self._folder = None


def take(nvml: ModuleType, shared: SharedMemory | None = None) -> list[dict[str, Any]]:
    """One reading of every GPU. Values that a GPU does not support are left out."""
    values: dict[str, Callable[[Any], object]] = {
        "memory_used": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory_total": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).total,  # none of its own: GB10, Jetson
        "name": nvml.nvmlDeviceGetName,
        "uuid": nvml.nvmlDeviceGetUUID,
        "bus": lambda handle: "{0.domain:04x}:{0.bus:02x}:{0.device:02x}".format(nvml.nvmlDeviceGetPciInfo(handle)),
        "utilization": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "temperature": lambda handle: nvml.nvmlDeviceGetTemperature(handle, 0),
        "power_w": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "limit_w": lambda handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "throttle": lambda handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "pids": lambda handle: [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)],
        # Percent of the multiprocessors by process; NVML has no answer for one that did nothing, and none on Windows.
        "use": lambda handle: {str(s.pid): s.smUtil for s in nvml.nvmlDeviceGetProcessUtilization(handle, 0)},
    }
    found = []
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
        gpu: dict[str, Any] = {"spill": spills()}
        for key, read in values.items():
            with contextlib.suppress(nvml.NVMLError, AttributeError):  # the binding, or the GPU, does not have it
                gpu[key] = read(handle)
        if "throttle" in gpu:
            gpu["throttle"] = ", ".join(dict.fromkeys(text for bit, text in THROTTLE.items() if gpu["throttle"] & bit))
        if shared is not None and gpu.get("memory_used", 0) >= FULL * gpu.get("memory_total", math.inf):
            gpu |= {"shared": known} if (known := shared.poll()) is not None else {}
        found.append(gpu)
    return found


def _write(path: Path, at_s: float, gpus: list[dict[str, Any]], error: str = "") -> None:
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):  # a full disk, or (Windows) the monitor has it open: the next reading is written
        new.write_text(json.dumps({"at_s": at_s, "gpus": gpus, "error": error}), encoding="utf-8")
        os.replace(new, path)


def _serve(requested: threading.Event) -> None:
    """Take requests until the monitor is gone. A thread, because the driver may block the main one."""
    while os.read(sys.stdin.fileno(), 512):
        requested.set()
    os._exit(0)


def main(path: Path) -> int:
    """The helper."""
    requested = threading.Event()
    threading.Thread(target=_serve, args=(requested,), daemon=True).start()
    import pynvml as nvml

    from runs.machine import ABSENT

    shared = SharedMemory() if spills() else None
    while True:
        requested.clear()
        at_s = time.monotonic()  # before the reading: `wait_free` needs one that began after its request
        try:
            nvml.nvmlInit()  # costs nothing after the first time
            _write(path, at_s, take(nvml, shared))
        except nvml.NVMLError as error:
            absent = type(error).__name__ in ABSENT
            _write(path, at_s, [], "" if absent else f"the NVIDIA driver failed: {error}")
        requested.wait(PERIOD_S)


# ---- one run a GPU ----

NAME_BYTES = 200  # of the run that has a GPU; another account may have written anything


def devices(spec: dict[str, Any]) -> list[str]:
    """The GPUs that a run uses, by name; [] without a GPU."""
    named = os.environ.get("HANGPROOF_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpu_count = int(spec.get("gpus", 1))
    if named is None:
        apple = ["MPS"] * (sys.platform == "darwin")  # a Mac's one GPU, which no driver lists
        return [str(i) for i in range(gpu_count)] if present() else apple
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
    """The names of the devices' locks, each with its device: the UUID where the driver lists it, else its own name.

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
        self.devices = sorted(devices(spec))
        self.held = not self.devices
        self.message = ""
        self._listed = listed
        self._locks: dict[str, Lock] = {}  # by device

    def acquire(self) -> bool:
        """Take all GPUs, or none yet; then `message` says what the run waits for. Call it again until it is True."""
        if not self.held:
            try:
                waits = self._take()
            except OSError as error:
                why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or error
                waits = f"{', '.join(self.devices)}: its lock is not usable: {why}"
            if waits:
                self.release()
            self.held, self.message = not waits, waits and f"waiting for GPU {waits}"
        return self.held

    def _take(self) -> str:
        """Take the locks; what the run waits for, "" when it has them. OSError: a file cannot be made."""
        if not self._locks:
            gpus = self._listed()
            if gpus is None:
                return f"{', '.join(self.devices)}: the driver has not listed its GPUs yet"
            for name, device in sorted(lock_names(self.devices, gpus).items()):
                file_name = f"hangproof-gpu.{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.lock"
                self._locks[device] = Lock(shared_folder() / file_name, shared=True)
        for device, lock in self._locks.items():
            if not lock.acquire():
                return f"{device}: {_holder(lock.path)} uses it"
            lock.write(self.name)
        return ""

    def handles(self) -> tuple[int, ...]:
        """Descriptors that the training inherits, so that the GPU stays taken while it lives."""
        return tuple(lock.handle for lock in self._locks.values() if self.held and not platform.WINDOWS)

    def release(self) -> None:
        """Give the GPUs back."""
        for lock in self._locks.values():
            lock.release()
        self.held = not self.devices


def _holder(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return f"the run {file.read(NAME_BYTES).decode()!r}"
    except (OSError, UnicodeDecodeError):
        return "another run"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
