"""The run's snapshots in memory, seen from the monitor: their folder under /dev/shm, and the one to resume from.

The monitor makes the folder before the first attempt, notes it in the RunState, and removes it when the run has ended
and its newest snapshot is on the disk. Folders of runs that are gone are removed when the next run makes its own. After a
reboot there is none, and the disk decides. Containers may share this memory without seeing each other's files, so a
folder of another mount namespace counts as in use until its monitor has been silent for `SILENT_S`.

A snapshot is verified like a checkpoint, and must be of this run, its settings and this boot. A fault that may have
damaged memory makes the snapshots since then suspect, and after repeated failures without a new step only the disk is
trusted.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from guards import snapshot_files, snapshots
from monitor.process import platform
from monitor.process.locks import LOCK, is_held
from monitor.run_folder import read_json
from monitor.state import ResumePoint

PLACE = "HANGPROOF_SHM"  # another file system in memory than /dev/shm
OWNER = "run"  # the file in a folder of snapshots that names its run
STATE = "monitor.json"
SILENT_S = 3600.0  # a monitor writes more often than this, unless it is gone
ROOM = 1 << 20  # bytes that a state needs beside those of its snapshot: headers of its files
FAILED_COUNT = 2  # failures in a row without a new step, from which on only the disk is trusted


def place() -> Path:
    """The file system in memory that holds the folders of all runs."""
    return Path(os.environ.get(PLACE) or "/dev/shm")


def folder_of(run: Path, known: str) -> tuple[str, str]:
    """(the folder for the snapshots of `run`, "") or ("", why there is none). known: the one that is noted already."""
    if known and Path(known).is_dir():
        return known, ""
    if not place().is_dir():
        return "", f"this system has no file system in memory ({place()}); a restart resumes from the disk"
    try:
        sweep()
        name = re.sub(r"[^A-Za-z0-9_-]", "_", run.name)
        folder = platform.private_folder(name, place())
        (folder / OWNER).write_text(f"{run}\n{_namespace()}", encoding="utf-8")
        touch(str(folder))
    except OSError as error:
        return "", f"no folder for them can be made: {error.strerror or error}"
    return str(folder), ""


def drop(folder: str) -> None:
    """Remove the snapshots of a run that has ended."""
    if folder:
        platform.drop_private(Path(folder))


def touch(folder: str) -> None:
    """Say that the run of this folder has a monitor. The time is monotonic: all containers share it, and nobody sets it."""
    if folder:
        with contextlib.suppress(OSError):  # the folder has been removed
            os.utime(Path(folder) / OWNER, (time.monotonic(),) * 2)


def _namespace() -> str:
    """The mount namespace of this process: a path of another one says nothing here. "" where there are none."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def sweep() -> None:
    """Remove the folders of runs that are gone: deleted, or with another folder, or none, in their monitor.json. OSError."""
    for folder in platform.private_folders(place()):
        try:
            name, _, namespace = (folder / OWNER).read_text(encoding="utf-8").partition("\n")
            silent_s = time.monotonic() - os.stat(folder / OWNER).st_mtime
        except OSError:
            continue  # it is being made
        run = Path(name)
        if namespace not in ("", _namespace()):
            gone = silent_s > SILENT_S
        else:
            gone = not is_held(run / LOCK) and (read_json(run / STATE) or {}).get("snapshots") != str(folder)
        if gone:
            drop(str(folder))


def environment(folder: str, spec_hash: str, limit_bytes: int) -> dict[str, str]:
    """The variables of an attempt; {} without a folder."""
    if not folder:
        return {}
    return {snapshot_files.RING: folder, snapshots.SPEC: spec_hash, snapshots.LIMIT: str(limit_bytes)}


def usable(
    folder: str, run: Path, spec_hash: str, before_step: float = math.inf, after_step: int = -1, room: bool = True
) -> tuple[list[ResumePoint], list[str]]:
    """(the snapshots that can be resumed from once they verify, why others cannot).

    before_step, after_step: only snapshots of steps between these. room: its state will be made beside it.
    """
    found, refused = list[ResumePoint](), list[str]()
    for path, guard in snapshots.headers(Path(folder)).items() if folder else ():
        reason = ""
        if guard["step"] <= after_step:
            continue
        if guard["run"] != str(run):
            reason = f"it belongs to {guard['run']}"
        elif guard["spec"] != spec_hash:
            reason = "the run was made again since"
        elif guard["boot"] != snapshots.boot_id():
            reason = "it was written before the machine was started"
        elif guard["step"] >= before_step:
            reason = "the failure may have damaged the memory that it holds"
        elif room and shutil.disk_usage(folder).free < snapshots.bytes_of(guard) + ROOM:
            reason = f"{place()} is full, and the state that is made from it has no room there"
        if reason:
            refused.append(f"the snapshot of step {guard['step']} is not used: {reason}")
        else:
            state = Path(folder) / snapshot_files.RESUMED / path.name
            found.append(ResumePoint(state, guard["step"], record=path, python=guard["python"]))
    return found, refused


def summary(folder: str, off: str) -> dict[str, Any] | None:
    """For status.json: {"step", "bytes", "every", "off"}; None for a run without snapshots. off: why there is no folder."""
    if not folder:
        return {"step": None, "bytes": 0, "every": 0, "off": off} if off else None
    return snapshots.status(Path(folder))


def clear(folder: str) -> None:
    """Forget all snapshots: the run starts over."""
    if folder:
        for path in [*Path(folder).glob("*-state"), Path(folder) / snapshot_files.RESUMED]:
            shutil.rmtree(path, ignore_errors=True)
