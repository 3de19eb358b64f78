"""A run that becomes slow: is the cause named, is it the right one, and how soon? And is an ordinary run ever called slow?

Every run is watched by the real monitor with its default limits; only its trainer is a loop (`slow_loop.py`). The processor's quota,
the disk's limit and the memory's limit are the kernel's own, by cgroup, and the swap space is a real one, so that part needs root on
Linux; the other programs are real processes. The GPU is not here: its readings are series as users reported them (docs/slow.md).
The first event `slowdown` after the fault counts. A cause that cannot be made on this machine is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Report, say
from runs.paths import ROOT

LOOP, SHIMS = ROOT / "benchmarks" / "slow_loop.py", ROOT / "benchmarks" / "shims"
WARM_S = 50.0  # at the usual pace, before the fault
START_S = 300.0  # until the first step; 8 runs start at once
LIMIT_S = 120.0  # from the fault to the event
CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
SWAP = "swap.bin"
JOIN = 'for f in %s; do echo $$ > "$f/cgroup.procs"; done 2>/dev/null\n'
# A 12 GB card as in ostris/ai-toolkit issues 595, 829 and 1007; powershell.exe gives the counter of shared memory
GPU: dict[str, Any] = {
    "used_gib": 11.0,
    "utilization": 98,
    "power_w": 160,
    "limit_w": 170,
    "temperature": 68,
    "shared": 3e8,
}
SPILL = {"used_gib": 11.8, "utilization": 100, "power_w": 55, "shared": 6.2e9}


class Skipped(Exception):
    """This cause cannot be made here; the message says why."""


@dataclass(frozen=True)
class Case:
    """A run. work: of slow_loop.py; slow: what replaces some of it; gpu: readings that change; act: anything else that happens.

    cause: what is to be named, "" for an ordinary run. alone: the machine's processor or disk is needed.
    """

    name: str
    cause: str
    work: dict[str, Any]
    slow: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] | None = None
    act: Callable[[Box], None] | None = None
    wsl: bool = False
    at_start: bool = False
    alone: bool = False


@dataclass
class Box:
    """A running case: its files, its cgroups, and what has to be undone."""

    folder: Path
    work: Path
    gpu: Path
    clock: Path
    groups: dict[str, Path]
    undo: contextlib.ExitStack

    def trainer(self) -> psutil.Process:
        status = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
        return psutil.Process(status["trainer_pids"][0])

    def limit(self, controller: str, old: tuple[str, str], new: tuple[str, str]) -> None:
        """Write a limit of the run's cgroup: (file, value) of version 1 or of version 2."""
        folder = self.groups.get(controller)
        if folder is None:
            raise Skipped(f"no {controller} cgroup can be made here")
        name, value = old if (folder / old[0]).exists() else new
        until_s = time.monotonic() + LIMIT_S
        while True:
            try:
                (folder / name).write_text(value)
                return
            except OSError as error:  # EBUSY: the kernel has not yet taken enough memory back
                if error.errno != errno.EBUSY or time.monotonic() > until_s:
                    raise Skipped(f"{name}: {error.strerror}") from error
                time.sleep(0.1)


def quota(box: Box) -> None:
    box.limit("cpu", ("cpu.cfs_quota_us", "10000"), ("cpu.max", "10000 100000"))


def throttled_disk(box: Box) -> None:
    rate = 2 * MIB
    number = os.stat(box.folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    box.limit("blkio", ("blkio.throttle.read_bps_device", f"{device} {rate}"), ("io.max", f"{device} rbps={rate}"))


def swap(box: Box) -> None:
    file = box.folder.parent / SWAP
    with open(file, "wb") as out:
        for _ in range(512):
            out.write(bytes(MIB))
    file.chmod(0o600)
    for command in (["mkswap", str(file)], ["swapon", str(file)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skipped(f"{command[0]}: {done.stderr.strip()}")
    less_memory(box)


def less_memory(box: Box) -> None:
    box.limit("memory", ("memory.limit_in_bytes", str(120 * MIB)), ("memory.max", str(120 * MIB)))


def hogs(box: Box) -> None:
    code = "import sys\nwhile True: pass"
    for _ in range(4 * (os.cpu_count() or 1)):
        process = subprocess.Popen([sys.executable, "-c", code])
        if group := box.groups.get("cpu"):
            (group / "cgroup.procs").write_text(str(process.pid))
        box.undo.callback(process.wait)
        box.undo.callback(process.kill)


def sleeps(box: Box) -> None:
    """A laptop that sleeps: nothing of the run moves, and the boot clock is ahead afterwards."""
    for number in range(1, 4):
        processes = [box.trainer(), *box.trainer().children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(7)  # less than what the monitor allows a stopped process
        box.clock.write_text(json.dumps({"boot": 3600.0 * number}))
        for process in processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(25)


STEP = {"sleep_s": 0.4}
SLOWER = {"sleep_s": 3.0}
CASES = [
    Case("cpu quota", "cpu_quota", {"cpu": 240, "sleep_s": 0.1}, act=quota, alone=True),
    Case("other programs on the cpu", "cpu_contended", {"cpu": 120, "sleep_s": 0.1}, act=hogs, alone=True),
    Case("swapping", "swapping", {"touch_mb": 200, "sleep_s": 0.2}, act=swap, alone=True),
    Case("memory limit", "memory_pressure", {"map_mb": 160, "sleep_s": 0.2}, act=less_memory, alone=True),
    Case("throttled disk", "disk_slow", {"read_mb": 8, "sleep_s": 0.3}, act=throttled_disk, alone=True),
    Case("slow data loader", "loader_slow", {"load_s": 0.02, "sleep_s": 0.3}, {"load_s": 2.0}, alone=True),
    Case("spill, with counters", "vram_spill", STEP, SLOWER, SPILL, wsl=True),
    Case("spill, no counters", "vram_spill", STEP, SLOWER, {**SPILL, "shared": None}, wsl=True),
    Case("spill from the first step", "vram_spill", SLOWER, gpu=SPILL, wsl=True, at_start=True),
    Case("another program on the gpu", "gpu_shared", STEP, SLOWER, {"foreign_use": 55, "power_w": 165}),
    Case("hot gpu", "gpu_hot", STEP, SLOWER, {"throttle": 0x40, "temperature": 92, "power_w": 90}),
    Case("power brake", "gpu_power", STEP, SLOWER, {"throttle": 0x80, "power_w": 60}),
    Case("lower power limit", "gpu_power", STEP, SLOWER, {"limit_w": 60, "power_w": 59}),
    Case("full use at low power", "gpu_low_power", STEP, SLOWER, {"utilization": 100, "power_w": 60}),
    Case("nothing to be seen", "unknown", STEP, SLOWER),
    Case("sampling", "", {"sleep_s": 0.5, "sample": 25, "sample_s": 15}),
    Case("saving", "", {"sleep_s": 0.5, "save": 10, "save_s": 5}),
    Case("validation", "", {"sleep_s": 0.5, "validate": 12, "validate_s": 8}),
    Case("epochs", "", {"sleep_s": 0.4, "epoch": 8, "epoch_s": 4.0}),
    Case("images of two sizes", "", {"sleep_s": 0.3, "sizes": [1, 1, 1, 4]}),
    Case("few large images", "", {"sleep_s": 0.3, "sizes": [1] * 11 + [6]}),
    Case("a full gpu at full power", "", STEP, gpu={"used_gib": 11.9, "shared": 2e9}, wsl=True),
    Case("a laptop that sleeps", "", STEP, act=sleeps),
    Case("all of it", "", {"sleep_s": 0.4, "sample": 40, "sample_s": 9, "save": 25, "save_s": 4, "validate": 30,
                           "validate_s": 5, "epoch": 10, "epoch_s": 3.0, "sizes": [1, 1, 3]}, act=sleeps),
]  # fmt: skip


def events(folder: Path) -> list[dict[str, Any]]:
    """The events `slowdown` and `slowdown_over`."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"].startswith("slowdown")]


def make_groups(token: str) -> dict[str, Path]:
    """Cgroups of the run by controller, of version 1 or 2; those that can be made."""
    found = {}
    for controller in ("cpu", "blkio", "memory"):
        folder = CGROUPS / controller if (CGROUPS / controller).is_dir() else CGROUPS
        with contextlib.suppress(OSError):
            if folder == CGROUPS:
                (folder / "cgroup.subtree_control").write_text(f"+{controller.replace('blkio', 'io')}")
            (folder / token).mkdir(exist_ok=True)
            found[controller] = folder / token
    return found


def set_gpu(box: Box, case: Case, changed: bool) -> None:
    """Write the readings of the GPU, and the counter that a stand-in for PowerShell prints."""
    if case.gpu is None:
        return
    values = {**GPU, **(case.gpu if changed else {})}
    pids = [box.trainer().pid] if (box.folder / "status.json").exists() else []
    use = {str(pid): 90 for pid in pids}
    if values.pop("foreign_use", None):
        pids, use = [*pids, os.getpid()], {**use, str(os.getpid()): 55}
    shared = values.pop("shared")
    temporary = box.gpu.with_suffix(".new")
    temporary.write_text(json.dumps({**values, "pids": pids, "use": use}))
    os.replace(temporary, box.gpu)
    answer = [{"DedicatedUsage": 1, "SharedUsage": 2}, {"DedicatedUsage": 10**10, "SharedUsage": int(shared or 0)}]
    script = box.gpu.with_name("powershell.exe")
    script.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n" if shared is not None else "#!/bin/sh\nexit 1\n")
    script.chmod(0o755)


def environment(box: Box, case: Case) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HANGPROOF_")}
    env |= {"HANGPROOF_DATA": str(box.folder.parent), "HANGPROOF_GPUS": "", "SLOW_WORK": str(box.work)}
    env |= {"FAULTS_CLOCK": str(box.clock), "PYTHONPATH": str(SHIMS / "clock"), "TMPDIR": str(box.folder.parent)}
    if case.gpu is not None:
        env |= {"HANGPROOF_LOCKS": str(box.gpu.parent)}  # each case has a GPU of its own: none waits for another's
        env |= {"HANGPROOF_GPUS": "0", "FAULTS_NVML_VALUES": str(box.gpu), "FAULTS_NVML_GIB": "12"}
        env |= {"PYTHONPATH": f"{SHIMS / 'clock'}:{SHIMS / 'nvml'}", "PATH": f"{box.gpu.parent}:{os.environ['PATH']}"}
        env |= {"FAULTS_NVML_WSL": "1"} if case.wsl else {}
    return env


def run(case: Case, root: Path, ordinary_s: float) -> dict[str, Any]:
    """Run one case: {"name", "cause", "named", "seconds", "false_alarms", "over": named the end; or "skipped": why}."""
    place = root / case.name.replace(" ", "-").replace(",", "")
    folder = place / "run"
    folder.mkdir(parents=True)
    token = f"hangproof-slow-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as undo:
        undo.callback(_swapoff, place / SWAP)  # the last thing to be undone: by then nothing uses it
        groups = make_groups(token) if case.alone else {}
        box = Box(folder, place / "work.json", place / "gpu.json", place / "clock.json", groups, undo)
        for group in groups.values():
            undo.callback(_remove, group)
        if "cpu" in groups:  # what else this machine does must not matter
            box.limit("cpu", ("cpu.shares", "262144"), ("cpu.weight", "10000"))
        box.work.write_text(json.dumps({**case.work, **(case.slow if case.at_start else {})}))
        if size := max(case.work.get("read_mb", 0), case.work.get("map_mb", 0)):
            with open(place / "data.bin", "wb") as data:
                data.write(os.urandom(size * MIB))
                os.fsync(data.fileno())  # and out of the page cache: what reads it first is whose memory it counts as
                os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        set_gpu(box, case, changed=case.at_start)
        join = JOIN % " ".join(f"'{group}'" for group in groups.values()) if groups else ""
        (folder / "train.sh").write_text(f"{join}exec '{sys.executable}' '{LOOP}'\n", encoding="utf-8")
        command = [sys.executable, "-m", "monitor", "run", str(folder)]
        log = undo.enter_context(open(place / "monitor.out", "wb"))
        process = subprocess.Popen(command, cwd=ROOT, env=environment(box, case), stdout=log, stderr=log)
        undo.callback(_stop, process, folder)
        return watch(case, box, process, ordinary_s)


def watch(case: Case, box: Box, process: subprocess.Popen[bytes], ordinary_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"name": case.name, "cause": case.cause or None}
    _until(lambda: bool(_trains(box.folder)), START_S)
    if not _trains(box.folder):
        log = (box.folder / "training.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{case.name}: no step within {START_S:.0f} s: {log[-2000:]}")
    began_s = time.monotonic()
    if not case.cause:
        set_gpu(box, case, changed=True)
        if case.act is not None:
            thread = threading.Thread(target=case.act, args=(box,), daemon=True)
            threading.Timer(20.0, thread.start).start()
        _until(lambda: process.poll() is not None, ordinary_s)
        alarms = events(box.folder)
        return found | {"seconds": round(time.monotonic() - began_s), "false_alarms": len(alarms), "events": alarms}
    set_gpu(box, case, changed=case.at_start)
    if not case.at_start:
        _until(lambda: process.poll() is not None, WARM_S)
    before = events(box.folder)
    box.work.write_text(json.dumps({**case.work, **case.slow}))
    set_gpu(box, case, changed=True)
    began_s = time.monotonic() if not case.at_start else began_s
    try:
        if case.act is not None:
            case.act(box)
    except Skipped as reason:
        return found | {"skipped": str(reason)}
    began_s = time.monotonic() if case.act is not None else began_s
    _until(lambda: len(events(box.folder)) > len(before), LIMIT_S)
    named = events(box.folder)[len(before) :]
    first = named[0] if named else {}
    found |= {"named": first.get("cause"), "seconds": round(time.monotonic() - began_s, 1), "false_alarms": len(before)}
    return found | {"right": first.get("cause") == case.cause, "message": first.get("message"), "before": before}


def _trains(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        return int(status["step"]) if status["trainer_pids"] else 0
    return 0


def _until(done: Callable[[], bool], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and not done():
        time.sleep(0.2)


def _remove(group: Path) -> None:
    with contextlib.suppress(OSError):
        _until(lambda: not (group / "cgroup.procs").read_text().strip(), 10.0)
        group.rmdir()


def _swapoff(file: Path) -> None:
    if file.exists():
        subprocess.run(["swapoff", str(file)], check=False)


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the monitor and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        for child in [psutil.Process(process.pid), *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--only", default="", help="cases whose name or cause contains this")
    parser.add_argument("--seconds", type=float, default=180.0, help="of an ordinary run (180)")


def measure(args: argparse.Namespace) -> Report:
    """Each case; a cause that is not named right, and an ordinary run that is called slow, exceed the limit."""
    cases = [case for case in CASES if args.only in case.name or (args.only and args.only in case.cause)]
    root = Path(tempfile.mkdtemp(prefix="slowdown-", dir=os.environ.get("TMPDIR", "/var/tmp")))

    def one(case: Case) -> dict[str, Any]:
        result = run(case, root, args.seconds)
        said = result.get("skipped") or result.get("named") or result.get("false_alarms")
        say(f"{case.name}: {said}, {result.get('seconds')} s")
        return result

    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(one, [case for case in cases if not case.alone]))
        results += [one(case) for case in cases if case.alone]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    made = [r for r in results if r["cause"] and "skipped" not in r]
    ordinary = [r for r in results if not r["cause"]]
    wrong = [f"{r['name']}: named {r.get('named')}, expected {r['cause']}" for r in made if not r["right"]]
    alarms = [f"{r['name']}: {r['false_alarms']} false alarms" for r in ordinary if r.get("false_alarms")]
    figures = {
        "causes": len(made),
        "named_right": len(made) - len(wrong),
        "slowest_s": max((r["seconds"] for r in made), default=None),
        "skipped": [r["name"] for r in results if "skipped" in r],
        "ordinary_runs": len(ordinary),
        "ordinary_s": sum(r["seconds"] for r in ordinary),
        "cases": results,
    }
    return Report(figures, wrong + alarms)
