"""The second opinion on a run that has been silent: samples of its processes, and what two of them say together.

CPU at 0 % or GPU at 100 % prove nothing alone (rule 1 of the design), so they never start a verdict; they only confirm
a silence that already lasts (`stuck`), or show that the run is moving slowly (`slow`) and should be left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from monitor import system
from monitor.decide import Signals

IDLE_CPU = 0.05  # of one core, all processes of the run together
MOVING_BYTES_S = 64 * 1024  # bytes a second to or from a disk
COPYING_BYTES_S = 1 << 20  # the same through the page cache, pipes included
COMPUTES = 0.5  # of one core, all processes of the run together
STARVED = 0.3  # of the time, runnable without a core
PAGES_S = 100  # swapped in or out, the whole machine
FAULTS_S = 10  # major faults of the run
BUSY_DISK = 0.5  # of the time a disk was at work, and completed something
# Kernel functions that wait for a local disk; a freeze, a dead mount or a driver waits elsewhere.
_DISK_WAITS = ("io_schedule", "folio_wait", "wait_on_page", "wait_on_buffer", "jbd2", "rq_qos", "blk_", "balance_dirty",
               "xfs_", "btrfs_", "ext4_", "do_get_write_access")  # fmt: skip
_PAGE_IO = ("pswpin", "pswpout")


@dataclass(frozen=True)
class One:
    """One process in a sample."""

    state: str
    name: str
    cpu_s: float
    faults: int
    disk_bytes: int = 0
    copied_bytes: int = 0
    starved_s: float = 0.0
    wchan: str = ""


@dataclass(frozen=True)
class Sample:
    """The run's processes, by (pid, start), the machine's swapping and the GPU, at one moment (monotonic seconds)."""

    at_s: float
    processes: dict[tuple[int, float], One] = field(default_factory=dict)
    swapped_pages: int = 0
    disks: dict[str, tuple[int, float]] = field(default_factory=dict)  # name -> (sectors moved, seconds at work)
    gpu: tuple[dict, ...] = ()  # one a device: {"utilization","memory_used","memory_total","throttle"}
    stacks: str = ""  # the trainer's stacks as one text without addresses, "" when there are none


def take(processes: Iterable[tuple[int, float]], gpu: tuple[dict, ...] = (), stacks: str = "") -> Sample:
    """Sample these processes now. Reads /proc only: nothing of it can block on the sampled process."""
    found = {}
    for pid, start in processes:
        one = system.proc(pid)
        if one is None or one.start != start:
            continue
        disk, copied = _io(pid)
        found[pid, start] = One(
            one.state, one.name, one.cpu_s, one.major_faults, disk, copied, _starved(pid), _word(pid, "wchan")
        )
    return Sample(time.monotonic(), found, _swapped(), _disks(), gpu, stacks)


def compare(first: Sample, second: Sample, trainers: Iterable[int], enough_cpu: bool = False) -> Signals:
    """What two samples say about the run. `trainers` are the process numbers of the ranks.

    enough_cpu: since its last progress it had the CPU time of many steps, so a busy machine is no excuse.
    """
    elapsed = second.at_s - first.at_s
    both = [key for key in second.processes if key in first.processes]
    trainers = set(trainers)
    if elapsed <= 0 or not both:
        return Signals()
    stuck, slow = [], []
    for key, one in second.processes.items():
        if one.state in "Tt" and first.processes.get(key, one).state in "Tt":
            stuck.append(f"{one.name} (pid {key[0]}) is stopped by a signal")

    def total(attribute: str) -> float:
        return sum(getattr(second.processes[k], attribute) - getattr(first.processes[k], attribute) for k in both)

    cpu = total("cpu_s") / elapsed
    disk = total("disk_bytes") / elapsed
    copied = total("copied_bytes") / elapsed
    moving = disk >= MOVING_BYTES_S or copied >= COPYING_BYTES_S
    same = bool(first.stacks) and first.stacks == second.stacks
    waits = [k for k in both if k[0] in trainers and second.processes[k].state == first.processes[k].state == "D"]
    crowded = _busy_disk(first, second, elapsed)
    if crowded and waits and all(second.processes[k].wchan.startswith(_DISK_WAITS) for k in waits):
        slow.append(f"waits for a busy disk: {crowded}")
    elif waits and not moving:
        names = ", ".join(f"pid {k[0]} in {second.processes[k].wchan or 'the kernel'}" for k in waits)
        stuck.append(f"in uninterruptible sleep, with nothing read or written ({names})")
    busy_gpu = any((g.get("utilization") or 0) >= 50 for g in second.gpu)  # proves nothing, but the wait may be for it
    if cpu < IDLE_CPU and not moving and not busy_gpu:
        if same:
            stuck.append(f"asleep: the same stack twice within {elapsed:.1f} s, and no CPU time used")
        elif not first.stacks or not second.stacks:
            stuck.append("asleep: no CPU time used, nothing read or written")
        if first.gpu and second.gpu and not any(g.get("utilization") for g in (*first.gpu, *second.gpu)):
            stuck.append("the GPU is idle")
    if moving:
        slow.append(f"reading and writing files at {max(disk, copied) / 1e6:.1f} MB/s")
    pages = (second.swapped_pages - first.swapped_pages) / elapsed
    if pages >= PAGES_S and total("faults") / elapsed >= FAULTS_S:
        slow.append("the machine is swapping: its memory is full")
    late = max((_delta(first, second, k, "starved_s") for k in both if k[0] in trainers), default=0.0) / elapsed
    if late >= STARVED and not enough_cpu:
        slow.append(f"other programs keep the processor busy: {late:.0%} of the time it waited for a core")
    slow += _gpu_slow(second)
    busy = [f"it computes: {cpu:.1f} processor cores in use"] if cpu >= COMPUTES else []
    if busy_gpu:
        busy.append("a GPU is at work")
    return Signals(tuple(stuck), tuple(slow), tuple(busy))


def cpu_of(first: Sample, second: Sample, trainers: Iterable[int]) -> float:
    """Seconds of CPU time that the ranks used between two samples, the most of any."""
    trainers = set(trainers)
    keys = [k for k in second.processes if k in first.processes and k[0] in trainers]
    return max((_delta(first, second, k, "cpu_s") for k in keys), default=0.0)


def _delta(first: Sample, second: Sample, key: tuple[int, float], attribute: str) -> float:
    return getattr(second.processes[key], attribute) - getattr(first.processes[key], attribute)


def _busy_disk(first: Sample, second: Sample, elapsed: float) -> str:
    """The disk that was at work most of the time and got something done, in words; "" for none. One that is dead does not."""
    for name, (sectors, at_work_s) in second.disks.items():
        before = first.disks.get(name)
        if before and sectors > before[0] and (at_work_s - before[1]) / elapsed >= BUSY_DISK:
            return f"{name}, {(sectors - before[0]) * 512 / elapsed / 1e6:.1f} MB/s for all programs together"
    return ""


def _gpu_slow(sample: Sample) -> list[str]:
    found = []
    for i, gpu in enumerate(sample.gpu):
        busy = (gpu.get("utilization") or 0) >= 50
        if busy and gpu.get("throttle"):
            found.append(f"GPU {i} is throttled ({gpu['throttle']})")
        if busy and gpu.get("spill") and (gpu.get("memory_used") or 0) >= 0.98 * (gpu.get("memory_total") or 1):
            found.append(f"GPU {i}'s memory is full and spills to the host's")
    return found


def _io(pid: int) -> tuple[int, int]:
    """Bytes to and from a disk, and bytes passed through read and write calls, since the process began."""
    values = {}
    for line in _word(pid, "io").splitlines():
        name, _, value = line.partition(":")
        values[name] = int(value)
    disk = values.get("read_bytes", 0) + values.get("write_bytes", 0)
    return disk, values.get("rchar", 0) + values.get("wchar", 0)


def _starved(pid: int) -> float:
    """Seconds the main thread was runnable and had no core."""
    fields = _word(pid, "schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _swapped() -> int:
    if not system.LINUX:
        return 0
    pages = 0
    with open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith(_PAGE_IO):
                pages += int(line.split()[1])
    return pages


def _disks() -> dict[str, tuple[int, float]]:
    if not system.LINUX:
        return {}
    found = {}
    with open("/proc/diskstats", encoding="ascii") as file:
        for line in file:
            # kernel Documentation/admin-guide/iostats.rst: sectors read, written, and milliseconds at work
            _, _, name, _, _, read, _, _, _, written, _, _, at_work, *_ = line.split()
            found[name] = (int(read) + int(written), int(at_work) / 1000)
    return found


def _word(pid: int, name: str) -> str:
    if not system.LINUX:
        return ""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # gone, or not ours to look at
