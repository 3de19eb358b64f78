"""Reads a file although the system lacks a descriptor or memory for a moment, or one that cannot be read as empty; and
what is said in others' files and variables: a commit, a rank, this boot, the bytes that a process moved, free memory.

A scan of /proc or of a folder of checkpoints opens hundreds of files: if one error in fifty opens ended it, it would
never end well. A shortage that lasts is the caller's error, as ever. Windows refuses a file that is being replaced.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, *[errno.EACCES] * (os.name == "nt"))
TRIES_COUNT = 3
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 for "no limit"
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
MOVED = ("rchar", "wchar", "read_bytes", "write_bytes")
"""Bytes passed through read and write calls, and those of a disk again, which move within a long call."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file. Raises OSError; after three tries where it is a shortage."""
    tries_left = TRIES_COUNT
    while True:
        tries_left -= 1
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            if not tries_left or error.errno not in SHORTAGES:
                raise


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, "" where it cannot be read; what is not UTF-8 is replaced."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """A JSON object from a file; None when the file is missing, incomplete or something else."""
    try:
        return json_object(read_bytes(path))
    except OSError:
        return None


def json_object(text: bytes | str) -> dict[str, Any] | None:
    """The JSON object in a text; None when it is incomplete or something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(name: str, default: int, environ: Mapping[str, str] = os.environ) -> int:
    """A variable that a launcher sets to a whole number; `default` where it is not set, or empty."""
    return int(environ.get(name) or default)


def moved_bytes(process: str, counters: tuple[str, ...] = MOVED) -> int | None:
    """The sum of these counters of /proc/PROCESS/io (`self`, `self/task/12`); None where they are not counted."""
    try:
        lines = [line.split(": ") for line in read_bytes(f"/proc/{process}/io").decode().splitlines()]
    except OSError:
        return None
    return sum(int(number) for name, number in lines if name in counters)


def boot_id() -> str:
    """A name for this boot, "" off Linux: then callers compare processes by (pid, start) alone.

    A boot time is no such name: it is computed from the wall clock, which moves.
    """
    try:
        return read_bytes("/proc/sys/kernel/random/boot_id").decode().strip()
    except OSError:
        return ""


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping or being killed; None where the machine does not say.

    The smaller of the machine's and its container's: the limit of a container (cgroup) is often far below the machine's
    memory, and the kernel kills whoever exceeds it. Page cache that the kernel gives back counts as free in both.
    """
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
        names = [name for name in path.split("/") if name]
        for base in (CGROUPS / controllers, CGROUPS / controller) if controllers else (CGROUPS, CGROUPS / "unified"):
            found += [base.joinpath(*names[:count]) for count in range(len(names), -1, -1)]
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


def commit(checkout: Path) -> str:
    """The commit that a git checkout is at, from git's own files; "" where it is none, or cannot be read."""
    folder = checkout / (read_text(checkout / ".git").partition("gitdir:")[2].strip() or ".git")
    head = read_text(folder / "HEAD").strip()
    if not head.startswith("ref: "):
        return head
    name, shared = head.removeprefix("ref: "), folder / read_text(folder / "commondir").strip()
    packed = re.search(rf"^([0-9a-f]{{40,64}}) {re.escape(name)}$", read_text(shared / "packed-refs"), re.MULTILINE)
    return read_text(shared / name).strip() or (packed[1] if packed else "")
