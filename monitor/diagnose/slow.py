"""Why the training is slow: from what the machine did during its steps to a row of `slow.toml`.

Decision: a cause is what changed. The same amounts are added up over the slow steps and over those at the usual pace, and a
row asks for both: a quota that always throttles a container, or a power limit that the GPU always reaches, explains nothing. Only
time inside steps counts: what a sample, a save or a validation does to the machine is no evidence.
"""

from __future__ import annotations

import contextlib
import math
import os
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from guards import memory
from guards.reading import read_text
from monitor.detect.probe import Missing, ProcessSample, Sample, growths, take
from monitor.process import platform
from monitor.process.platform import ProcessInfo
from monitor.process.tree import Tree

TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("slow.toml").read_text(encoding="utf-8"))["cause"]
UNKNOWN = "unknown"
# Kernel functions: waits for a file of a network or FUSE file system in any state, and uninterruptible waits for no file at all
NETWORK_WAITS = ("nfs", "rpc_", "cifs", "smb", "fuse", "request_wait_answer", "netfs", "ceph")
OTHER_WAITS = ("nv", "os_", "rm_", "uvm", "rwsem", "futex", "kernel_clone", "wait_for_vfork", "do_coredump", "ptrace")
HOT, BRAKED = ("too hot", "hardware slowdown"), ("power brake",)
WORKS = 10  # percent of a GPU
Amounts = dict[str, tuple[float, float]]  # name -> (amount, seconds in which it came together)


@dataclass(frozen=True)
class Reading(Sample):
    """A sample with more counters at that moment, all of them only growing."""

    quotas: dict[str, tuple[int, int]] = field(default_factory=dict)  # cgroup -> (periods, of them throttled)
    busy_s: float = 0.0  # of all cores together
    waited_s: float = 0.0  # for the data loader


def read(tree: Tree, pid: int, waited_s: float, gpus: Iterable[dict[str, Any]]) -> Reading:
    """A reading now. pid: the training's process, whose cgroups count. Never raises, and waits for nothing."""
    sample = take(tree.keys(), Missing(), tuple(gpus))
    return Reading(**vars(sample), quotas=quotas(pid), busy_s=_busy_s(), waited_s=waited_s)


def quotas(pid: int) -> dict[str, tuple[int, int]]:
    """(periods, throttled periods) of each cgroup above the process that has a processor quota; {} off Linux."""
    folders = memory.cgroups(str(pid), "cpu")
    return {str(folder): counts for folder in folders if (counts := _throttled(folder / "cpu.stat"))[0]}


def _throttled(path: Path) -> tuple[int, int]:
    values = dict(line.split(None, 1) for line in read_text(path).splitlines() if " " in line)
    return int(values.get("nr_periods", 0)), int(values.get("nr_throttled", 0))


def quota_cores(pid: int) -> float:
    """The smallest processor quota of the process's cgroups, in cores; 0.0 without one."""
    found = []
    for folder in memory.cgroups(str(pid), "cpu"):
        words = read_text(folder / "cpu.max").split() or [
            read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max": no quota, and -1 likewise
            found += [cores] if (cores := int(words[0]) / int(words[1])) > 0 else []
    return min(found, default=0.0)


def _busy_s() -> float:
    """Processor seconds of the whole machine that were not idle; 0.0 where they cannot be read."""
    words = read_text(Path("/proc/stat")).partition("\n")[0].split()
    if not words:
        return 0.0
    used = [int(word) for word in words[1:9]]  # proc(5): user nice system idle iowait irq softirq steal
    return (sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK")


def between(first: Reading, second: Reading, ours: Collection[int]) -> Amounts:
    """What happened between two readings of the same steps. ours: the pids of the run."""
    seconds, cpu_s = second.at_s - first.at_s, sum(growths(first, second, "cpu_s"))
    changes = [(b[0] - a[0], b[1] - a[1]) for path, b in second.quotas.items() if (a := first.quotas.get(path))]
    found = {
        "starved": max(growths(first, second, "starved_s"), default=0.0),
        "faults": float(sum(growths(first, second, "major_faults"))),
        "read_mb_s": sum(growths(first, second, "disk_bytes")) / 1e6,
        "blocked": seconds * any(map(_for_files, second.processes.values())),
        "swap": float(second.swapped_pages - first.swapped_pages),
        "loader": second.waited_s - first.waited_s,
        "others": max(0.0, second.busy_s - first.busy_s - cpu_s) / (os.cpu_count() or 1),
        "quota": seconds * max((throttled / periods for periods, throttled in changes if periods), default=0.0),
    }
    gpus = [_gpu(gpu, ours) for gpu in second.gpu]
    worst = max(gpus, key=lambda g: (g["hot"], g["foreign"], g["memory_share"]), default={})
    found |= {name: value * seconds for name, value in worst.items()}
    return {name: (value, seconds) for name, value in found.items()}


def _for_files(process: ProcessSample) -> bool:
    """Whether the process waits for a disk, a network file system or FUSE."""
    waits = process.wchan.lstrip("_")
    return waits.startswith(NETWORK_WAITS) or (process.state == "D" and not waits.startswith(OTHER_WAITS))


def _gpu(gpu: Mapping[str, Any], ours: Collection[int]) -> dict[str, float]:
    throttle, used = str(gpu.get("throttle", "")), int(gpu.get("memory_used") or 0)
    pids = set(gpu.get("pids", ()))
    others = pids - set(ours) if pids & set(ours) else set()  # a container sees numbers of the host: they say nothing
    found = {
        "spills": float(bool(gpu.get("spill"))),
        "hot": float(any(reason in throttle for reason in HOT)),
        "braked": float(any(reason in throttle for reason in BRAKED)),
        "memory_share": used / (gpu.get("memory_total") or 1),
        "foreign": float(len(others)),
        "foreign_use": float(max((gpu.get("use", {}).get(str(pid), 0) for pid in others), default=0)),
    }
    names = {"utilization": "gpu_use", "power_w": "power_w", "limit_w": "limit_w", "temperature": "temperature"}
    found |= {name: float(gpu[key]) for key, name in names.items() if isinstance(gpu.get(key), int | float)}
    if found.get("limit_w") and "power_w" in found:
        found["power_share"] = found["power_w"] / found["limit_w"]
    return found | ({"shared_gb": gpu["shared"] / 1e9} if isinstance(gpu.get("shared"), int) else {})


def add(amounts: Iterable[Amounts], weight: float = 1.0) -> Amounts:
    """Their sum, times `weight`."""
    total: Amounts = {}
    for one in amounts:
        for name, (value, seconds) in one.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = old[0] + weight * value, old[1] + weight * seconds
    return total


def figures(slow: Amounts, usual: Amounts) -> dict[str, float]:
    """Shares and rates over the slow time, and `more_X`, `power_fell`, `limit_fell` compared with the usual time.

    Without a usual time `more_X` is X, and nothing has fallen.
    """
    now, before = (
        {name: value / seconds for name, (value, seconds) in total.items() if seconds} for total in (slow, usual)
    )
    found = {**now, **{f"more_{name}": value - before.get(name, 0.0) for name, value in now.items()}}
    for name, fell in (("power_w", "power_fell"), ("limit_w", "limit_fell")):
        if before.get(name) and name in now:
            found[fell] = now[name] / before[name]
    if before:  # a program that was there at the usual pace is not what changed, unless it has begun to work
        found["foreign"] = max(found.get("more_foreign", 0.0), float(found.get("more_foreign_use", 0.0) >= WORKS))
    return found


def match(found: Mapping[str, float], alone: bool = False) -> dict[str, Any] | None:
    """The first row that holds; the last one holds always. alone: of those that need no usual pace, None for none of them."""
    for row in TABLE:
        above = all(found.get(name, -math.inf) > limit for name, limit in row.get("above", {}).items())
        below = all(found.get(name, math.inf) < limit for name, limit in row.get("below", {}).items())
        if above and below and (row.get("alone") or not alone):
            return row
    return None


class _Filled(string.Formatter):
    """Fills in texts; a value that is not known reads "?"."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key), "?")

    def format_field(self, value: Any, format_spec: str) -> str:
        return value if isinstance(value, str) else format(value, format_spec)


def sentences(row: Mapping[str, Any], found: Mapping[str, float], names: Mapping[str, str]) -> dict[str, str]:
    """{"title", "explanation", "advice"} of a row with its figures."""
    filled = _Filled()
    return {key: filled.vformat(row[key], (), {**found, **names}) for key in ("title", "explanation", "advice")}


def scan() -> dict[int, ProcessInfo]:
    """Every process of this machine; {} where they cannot be read."""
    with contextlib.suppress(OSError):
        return platform.scan()
    return {}


def busiest(before: Mapping[int, ProcessInfo], ours: Collection[int]) -> str:
    """The program that has used most processor time since `before` and is not of the run, as "name (pid 7)"."""
    now = {pid: p for pid, p in scan().items() if pid not in ours and pid != os.getpid()}
    used = {
        pid: p.cpu_s - before[pid].cpu_s for pid, p in now.items() if pid in before and before[pid].start == p.start
    }
    most = max(used, key=lambda pid: used[pid], default=None)
    return program(most) if most is not None and used[most] > 0 else "short-lived programs"


def foreign(gpus: Iterable[Mapping[str, Any]], ours: Collection[int]) -> str:
    """The programs on these GPUs that are not of the run, by name, that with most use first."""
    use = {pid: gpu.get("use", {}).get(str(pid), 0) for gpu in gpus for pid in gpu.get("pids", ()) if pid not in ours}
    return " and ".join(program(pid) for pid in sorted(use, key=lambda pid: -use[pid])[:3]) or "another program"


def program(pid: int) -> str:
    """`blender (pid 7)`; `pid 7` where its name cannot be read."""
    with contextlib.suppress(OSError):
        if (found := platform.process_info(pid)) is not None:
            command = os.path.basename(platform.command_of(pid).split(" ")[0]) or found.name
            return f"{command[:60]} (pid {pid})"
    return f"pid {pid}"
