"""Everything that is known at the moment a run is found stuck or dead, gathered without waiting on what is stuck.

Only /proc, files of our own and the kernel's counters are read here; the stacks come from `monitor.stacks`, which has its
deadlines. What could not be had is said, not left out.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from guards.heartbeat import Beat
from monitor import stacks, system

COLLECTIVES = ("distributed_c10d.py:*", "*:wait_for_everyone", "*:barrier", "*:all_reduce", "*:all_gather*")
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")


@dataclass
class Evidence:
    """What was found. `kind` is hang or crash; seconds everywhere."""

    kind: str
    phase: str = "import"
    step: int = 0
    planned: int = 0
    rank: int = 0
    quiet_s: float = 0.0
    budget_s: float = 0.0
    why: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    outcome: str = ""
    note: str = ""
    ended: str = ""
    ranks: list[dict] = field(default_factory=list)
    processes: list[dict] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    log_tail: str = ""
    gpu: list[dict] = field(default_factory=list)
    gpu_note: str = ""
    host: dict = field(default_factory=dict)
    kernel: list[str] = field(default_factory=list)

    def where(self) -> str:
        """Where the training stands: the innermost frame of the main thread of the rank in question, "" when not known.

        A loader worker or a launcher stands somewhere too, and always waits there; only a script without ranks is judged by
        whatever stack there is.
        """
        return next((found for found in map(stacks.where, self.rank_stacks()) if found), "")

    def rank_stacks(self) -> list[str]:
        """The stacks of the ranks, that of the rank in question first; of a script without ranks, whatever there is."""
        pids = [r["pid"] for r in sorted(self.ranks, key=lambda r: r["rank"] != self.rank)]
        return [self.stacks[pid] for pid in pids if pid in self.stacks] if pids else list(self.stacks.values())

    def worker(self) -> str:
        """Where a loader worker stands, as a sentence; "" when none could be seen."""
        ranks = {r["pid"] for r in self.ranks}
        workers = [p["pid"] for p in self.processes if p["ppid"] in ranks and p["pid"] in self.stacks]
        seen = [(pid, place) for pid in workers if (place := stacks.where(self.stacks[pid]))]
        return f" Worker {seen[0][0]} stands in {seen[0][1]}." if seen else ""

    def to_json(self) -> dict:
        """Plain values; the log tail and the stacks are files of their own."""
        values = asdict(self)
        del values["log_tail"], values["stacks"]
        return values


def rank_words(beats: list[Beat], now_s: float) -> list[dict]:
    """The last words of every rank."""
    return [
        {
            "rank": b.rank,
            "pid": b.pid,
            "phase": b.phase,
            "step": b.step,
            "done": b.done,
            "total": b.total,
            "note": b.note,
            "outcome": b.outcome,
            "silent_s": round(now_s - b.beat_s, 2),
        }
        for b in beats
    ]


def late_rank(ranks: list[dict], dumps: dict[int, str] | None = None) -> dict | None:
    """The rank that the others wait for, None where it cannot be told.

    Behind in steps; or, all at one step, the one in another phase; the one that does not stand in a collective operation
    while the others do (`dumps`: stacks by process); the one that is silent longest.
    """
    if len(ranks) < 2:
        return None
    behind = min(ranks, key=lambda r: r["step"])
    if behind["step"] < max(r["step"] for r in ranks):
        return behind
    phases = [r["phase"] for r in ranks]
    odd = [r for r in ranks if phases.count(r["phase"]) == 1]
    if len(odd) == 1 and len(ranks) > 2:
        return odd[0]
    standing = {r["rank"]: _in_collective(dumps[r["pid"]]) for r in ranks if r["pid"] in (dumps or {})}
    elsewhere = [r for r in ranks if standing.get(r["rank"]) is False]
    if len(standing) == len(ranks) and len(elsewhere) == 1:
        return elsewhere[0]
    earliest = max(ranks, key=lambda r: r["silent_s"])
    others = [r["silent_s"] for r in ranks if r is not earliest]
    return earliest if others and earliest["silent_s"] - max(others) > 0.5 else None


def _in_collective(dump: str) -> bool:
    frames = stacks.names(stacks.main_thread(dump))
    return any(fnmatch.filter(frames, pattern) for pattern in COLLECTIVES)


def processes(members: dict[int, system.Proc], ranks: list[int]) -> list[dict]:
    """The run's processes with their state ("" for gone), what they wait for in the kernel, and their command."""
    found = []
    for pid, process in sorted(members.items()):
        fresh = system.proc(pid)
        gone = fresh is None or fresh.start != process.start
        fresh = process if gone else fresh
        found.append(
            {
                "pid": pid,
                "ppid": fresh.ppid,
                "name": fresh.name,
                "state": "" if gone else fresh.state,
                "wchan": "" if gone else _wchan(pid),
                "cpu_s": round(fresh.cpu_s, 2),
                "trainer": pid in ranks,
                "command": "" if gone else system.command_of(pid)[:300],
            }
        )
    return found


def _wchan(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def memory() -> dict:
    """The machine's memory in bytes: total and available, the cgroup's limit and use; keys that are not known are left out."""
    found = {}
    if system.LINUX:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree"):
                    found[name] = int(value.split()[0]) * 1024
    else:
        import psutil

        memory = psutil.virtual_memory()
        found = {"MemTotal": memory.total, "MemAvailable": memory.available}
    for base in _CGROUPS:
        for name, key in (("memory.max", "cgroup_limit"), ("memory.current", "cgroup_used")):
            with contextlib.suppress(OSError, ValueError):  # no such controller, or "max"
                found.setdefault(key, int(Path(base, name).read_text()))
    return found


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: the cgroup's counter and the machine's (`oom_kill`)."""
    count = 0
    try:
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                count = int(line.split()[1])
    except OSError:
        return 0
    for base in _CGROUPS:
        for name in ("memory.events", "memory.oom_control"):
            try:
                for line in Path(base, name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        count = max(count, int(line.split()[1]))
            except (OSError, ValueError):
                pass
    return count


def disk(folder: Path) -> dict:
    """Free and total bytes of the run's disk."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return {"disk_error": error.strerror}
    return {"disk_free": usage.free, "disk_total": usage.total}


def kernel_lines(
    since_boot_s: float, words: tuple[str, ...] = ("Xid", "Out of memory", "oom-kill", "I/O error")
) -> list[str]:
    """Lines of the kernel's log since `since_boot_s` seconds after boot that name a GPU, memory or disk fault.

    [] where it may not be read (it is root's on most systems).
    """
    found = []
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        for _ in range(20000):
            try:
                record = os.read(handle, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten while we read: the next one is there
            head, _, text = record.partition(";")
            fields = head.split(",")
            if len(fields) > 2 and int(fields[2]) / 1e6 >= since_boot_s and any(w in text for w in words):
                found.append(text.splitlines()[0])
    except OSError:
        pass
    finally:
        os.close(handle)
    return found[-20:]
