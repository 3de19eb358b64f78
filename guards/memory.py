"""How much memory this process may still take: the machine's, and its container's.

Decision: the smaller of both. A container's limit (cgroup) is often far below the machine's memory, and whoever exceeds
it is killed by the kernel. Page cache that the kernel gives back counts as free in both.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from guards.reading import read_text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 for "no limit"
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


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
