"""How much memory this process may still take: the machine's, and its container's.

Decision: the smaller of both. A container's limit (cgroup) is often far below the machine's memory, and whoever exceeds
it is killed by the kernel. Page cache that the kernel gives back counts as free in both.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 for "no limit"
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping or being killed; None where the machine does not say."""
    free = machine_bytes()
    room = cgroup_bytes()
    return None if free is None else int(min(free, room))


def machine_bytes() -> int | None:
    """MemAvailable of the machine in bytes; None where there is no /proc/meminfo."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", MEMINFO.read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def cgroup_bytes() -> float:
    """Bytes left under the limits of this process's cgroup and of those above it; infinite without a limit."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return math.inf
    left = math.inf
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = CGROUPS / "memory" if controllers else CGROUPS
        folder = top / path.lstrip("/")
        # In a container the path is often the host's, and its own limit is at the top.
        for place in (folder, *folder.parents):
            left = min(left, _left(place, _V1 if controllers else _V2))
            if place == top:
                break
    return left


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
