"""The GPUs' state, by a helper that alone talks to the driver: NVML calls block for ever when a GPU is lost.

The helper writes readings to a file; the monitor reads the file and never waits. `python -m monitor.gpu FILE` is the
helper: it takes a reading every ten seconds and whenever a line comes on its standard input, and leaves at its end.
`HANGPROOF_NVML` names a module to use in place of pynvml (tests: a driver that fails).
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PERIOD_S = 10.0
FRESH_S = 30.0
# nvml.h, nvmlClocksEventReasons: what slows a GPU down from outside
THROTTLE = {0x4: "power limit", 0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def present() -> bool:
    """Is there an NVIDIA driver to ask (or a stand-in for it)? Looks at files only."""
    return bool(os.environ.get("HANGPROOF_NVML")) or Path("/proc/driver/nvidia/version").exists() or os.name == "nt"


def model() -> str:
    """The first GPU's model as the driver's files name it, "" without one; asks no driver."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "gpu" if present() else ""


class Gpus:
    """The monitor's side."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen | None = None
        self._folder: Path | None = None
        self._asked_s = 0.0
        if present():
            self._begin()

    def _begin(self) -> None:
        from monitor.folder import private_folder
        from monitor.helpers import ROOT, environment

        self._folder = private_folder("gpu")
        command = [sys.executable, "-m", "monitor.gpu", str(self._folder / "gpu.json")]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
        )
        self._asked_s = time.monotonic()

    def _reading(self) -> dict:
        from monitor.folder import read_json

        return (read_json(self._folder / "gpu.json") or {}) if self._folder else {}

    def ask(self) -> None:
        """Have a reading taken now; it is there a little later."""
        if self._popen is not None and self._popen.poll() is None:
            try:
                os.write(self._popen.stdin.fileno(), b"\n")
                self._asked_s = time.monotonic()
            except OSError:
                pass  # it is going: `note` says so

    def read(self) -> tuple[dict, ...]:
        """The newest readings, one a GPU; () where there are none or they are old. Asks for the next."""
        reading = self._reading()
        self.ask()
        fresh = time.monotonic() - reading.get("at_s", -1e9) < FRESH_S
        return tuple(reading.get("gpus", ())) if fresh else ()

    @property
    def note(self) -> str:
        """Why there are no readings, "" when there are some or there is no GPU."""
        if self._popen is None:
            return ""
        reading = self._reading()
        if reading.get("error"):
            return reading["error"]
        age = time.monotonic() - reading.get("at_s", self._asked_s - FRESH_S)
        return f"the NVIDIA driver has not answered for {age:.0f} s" if age > FRESH_S else ""

    def wait_free(self, pids: set[int], timeout_s: float) -> set[int]:
        """Wait until the driver says that none of `pids` holds GPU memory; those that still do after `timeout_s`."""
        began = time.monotonic()
        left: set[int] = set()
        while self._popen is not None and time.monotonic() - began < timeout_s:
            asked = time.monotonic()
            self.ask()
            while time.monotonic() - asked < 2.0 and self._reading().get("at_s", 0.0) < asked:
                time.sleep(0.02)
            reading = self._reading()
            if reading.get("at_s", 0.0) < asked or reading.get("error"):
                return set()  # nobody can tell
            left = {pid for gpu in reading["gpus"] for pid in gpu.get("pids", ()) if pid in pids}
            if not left:
                break
            time.sleep(0.2)
        return left

    def close(self) -> None:
        if self._popen is not None:
            from monitor.folder import drop_private

            self._popen.stdin.close()
            try:
                self._popen.wait(1.0)
            except subprocess.TimeoutExpired:
                self._popen.kill()  # stuck in the driver: the kernel collects it when the call returns
            drop_private(self._folder)
            self._popen = None


def take(nvml) -> list[dict]:
    """One reading of every GPU. What a GPU does not support is left out."""
    found = []
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu = {"memory_used": memory.used, "memory_total": memory.total, "spill": os.name == "nt"}
        for key, read in (
            ("name", lambda h=handle: _text(nvml.nvmlDeviceGetName(h))),
            ("utilization", lambda h=handle: nvml.nvmlDeviceGetUtilizationRates(h).gpu),
            ("temperature", lambda h=handle: nvml.nvmlDeviceGetTemperature(h, 0)),
            ("power_w", lambda h=handle: nvml.nvmlDeviceGetPowerUsage(h) / 1000),
            ("throttle", lambda h=handle: _throttle(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(h))),
            ("pids", lambda h=handle: [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(h)]),
        ):
            try:
                gpu[key] = read()
            except nvml.NVMLError:
                continue
        found.append(gpu)
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _throttle(reasons: int) -> str:
    return ", ".join(dict.fromkeys(word for bit, word in THROTTLE.items() if reasons & bit))


def _write(path: Path, values: dict) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(file.name, path)


def main(path: Path) -> int:
    """The helper."""
    try:
        nvml = importlib.import_module(os.environ.get("HANGPROOF_NVML") or "pynvml")
        nvml.nvmlInit()
    except ImportError as error:
        _write(path, {"at_s": time.monotonic(), "gpus": [], "error": f"no NVML: {error}"})
        return 1
    except nvml.NVMLError as error:
        _write(path, {"at_s": time.monotonic(), "gpus": [], "error": f"the NVIDIA driver fails: {error}"})
        return 1
    while True:
        try:
            _write(path, {"at_s": time.monotonic(), "gpus": take(nvml), "error": ""})
        except nvml.NVMLError as error:
            _write(path, {"at_s": time.monotonic(), "gpus": [], "error": f"the NVIDIA driver fails: {error}"})
        if os.name == "nt":
            time.sleep(PERIOD_S)  # a pipe cannot be selected there; the monitor's end closes it
            continue
        ready, _, _ = select.select([sys.stdin], [], [], PERIOD_S)
        if ready and not os.read(sys.stdin.fileno(), 512):
            return 0  # the monitor is gone


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
