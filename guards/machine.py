"""What the machine gives this process: memory, and a processor whose instructions it supports.

Memory: the smaller of the machine's and its container's. A container's limit (cgroup) is often far below the machine's
memory, and whoever exceeds it is killed by the kernel. Page cache that the kernel gives back counts as free in both.

AMX: some virtual machines have the flag `amx_tile` and no CPUID leaf 0x1D, which says how large the tiles are. oneDNN,
the library that computes for torch on the processor, then configures no tile, and the first bfloat16 product ends the
process with SIGILL (github.com/uxlfoundation/oneDNN/issues/5689; seen with torch 2.13.0). Linux shows both; on Windows
Python cannot see the leaf.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from guards.reading import read_text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 for "no limit"
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
BELOW_AMX = "AVX512_CORE_BF16"


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping or being killed; None where the machine does not say."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(PROC / "meminfo"), re.M)
    room = (_left(folder, names) for folder in cgroups("self", "memory") for names in (_V1, _V2))
    return int(min([int(found[1]) * 1024, *room])) if found else None


def cgroups(process: str, controller: str) -> list[Path]:
    """The cgroups of a process that can hold a limit of `controller`, inner ones first. [] off Linux.

    In a container the path is often the host's, and its own limit is at the root of the mount.
    """
    found: list[Path] = []
    for line in read_text(PROC / process / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        for base in (CGROUPS / controllers, CGROUPS / controller) if controllers else (CGROUPS, CGROUPS / "unified"):
            folder = base / path.lstrip("/")
            found += [one for one in (folder, *folder.parents) if one == base or base in one.parents]
    return list(dict.fromkeys(found))


def _left(folder: Path, names: tuple[str, str, str]) -> float:
    limit_name, used_name, cache_name = names
    try:
        limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
        if limit == "max" or int(limit) >= _UNLIMITED:
            return math.inf
        cache = re.search(rf"^{cache_name} (\d+)$", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):
        return math.inf
    return max(0, int(limit) - used + (int(cache[1]) if cache else 0))


def has_broken_amx(cpuinfo: str) -> bool:
    """Whether a processor, described as in /proc/cpuinfo, announces AMX and has no leaf for its tiles."""
    level = re.search(r"^cpuid level\s*: (\d+)", cpuinfo, re.MULTILINE)
    return (
        level is not None
        and int(level[1]) < 0x1D
        and re.search(r"^flags\s*:.*\bamx_tile\b", cpuinfo, re.MULTILINE) is not None
    )


def avoid_amx() -> str:
    """Limit oneDNN in this process and its children, before torch computes. A line for the log, "" for no change.

    A limit that the user has set stays.
    """
    if ISA_LIMIT in os.environ or not has_broken_amx(read_text(PROC / "cpuinfo")):
        return ""
    os.environ[ISA_LIMIT] = BELOW_AMX
    return f"this virtual machine announces AMX but does not support it: {ISA_LIMIT}={BELOW_AMX}"
