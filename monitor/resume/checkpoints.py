"""Which state to resume from: the newest that verifies, of the checkpoints on the disk and the snapshots in memory.

The check reads gigabytes and may import torch, so it runs in a subprocess, which ends when it makes no progress; a
small snapshot in memory is read here, because a restart would wait for the start of the subprocess. "Cannot be
verified" is not "bad": a check that fails (no memory, broken torch, a disk that does not answer) is repeated with
hashes alone, and if that fails too the state stays in place and the run does not start over. Bad checkpoints are set
aside by name, the last good one is kept.

The snapshots are in a folder under /dev/shm (monitor/README.md). Folders of runs that are gone are removed when the next
run makes its own. Containers may share this memory without seeing each other's files, so a folder of another mount
namespace counts as in use until its monitor has been silent for `SILENT_S`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guards import checkpoint, snapshot_files
from guards.checkpoint import VerifyResult
from guards.reading import boot_id, read_text
from monitor.process import platform
from monitor.process.platform import LOCK, is_held
from monitor.process.spawned import Subjob, python
from monitor.run_folder import STATE, read_json
from monitor.state import ResumePoint, spec_hash

if TYPE_CHECKING:
    from monitor.recovery import Run

Log = Callable[[str], object]
UNGUARDED = "it has no guard file, so it was not written completely"
PLACE = "HANGPROOF_SHM"  # another file system in memory than /dev/shm
OWNER = "run"  # the file in a folder of snapshots that names its run
SILENT_S = 3600.0  # a monitor writes more often than this, unless it is gone
SMALL_BYTES = 256 << 20  # of a snapshot: read in a sixth of a second
ROOM = 1 << 20  # bytes that a state needs beside those of its snapshot: headers of its files
FAILED_COUNT = 2  # failures in a row without a new step, from which on only the disk is trusted


def verify(state: Path, standstill_s: float, pause: Callable[[float], None], log: Log = str) -> VerifyResult:
    """The result for `state`. `pause(seconds)` is called while there is none yet, and may raise.

    standstill_s: without a byte read, a check has failed; one that reads may take as long as it needs. log: is told
    when only its hashes could be checked, which needs no torch.
    """
    result = _checked(["verify", str(state), "--deep"], math.inf, standstill_s, pause)
    if not result.error:
        return result
    log(f"{state.name}: only its hashes are checked: {result.error}")
    return _checked(["verify", str(state)], math.inf, standstill_s, pause)


def verify_lora(path: Path, standstill_s: float, left_s: float, pause: Callable[[float], None]) -> VerifyResult:
    """Check a finished LoRA: a complete safetensors file with finite weights. left_s: until the machine goes."""
    return _checked(["verify-lora", str(path)], left_s, standstill_s, pause)


def _checked(words: list[str], left_s: float, standstill_s: float, pause: Callable[[float], None]) -> VerifyResult:
    job = Subjob(python("guards.checkpoint", *words, "--json"), left_s, standstill_s=standstill_s)
    job.wait(pause)
    answer = job.answer() if job.code in (0, 1, 3) else None
    if answer is None or not isinstance(answer.get("problems"), list):
        return VerifyResult(error=job.error or "the check gave no result")
    return VerifyResult(tuple(answer["problems"]), answer["error"])


def states(folders: list[Path]) -> dict[Path, int]:
    """Every state of these folders with its step, newest first; those without a readable guard file last, with -1.

    The first is the run's. Another is its `save_dir`, which other runs may share: states there are named by their runs.
    """
    names: list[str | None] = [None, *(folders[0].name for _ in folders[1:])]
    found = [known for place in zip(folders, names, strict=False) for known in checkpoint.states(*place).items()]
    return dict(sorted(found, key=lambda known: -known[1]))


def newest(folders: list[Path]) -> Path | None:
    """The newest state with a guard file, verified or not; None without one, and where they cannot be listed."""
    with contextlib.suppress(OSError):
        return next((path for path, step in states(folders).items() if step >= 0), None)
    return None


def choose(
    folders: list[Path],
    verify_s: float,
    pause: Callable[[float], None] = time.sleep,
    snapshots: Iterable[ResumePoint] = (),
    log: Log = str,
) -> ResumePoint:
    """The newest that verifies, of the states in `folders` and the `snapshots` in memory. `pause` may raise.

    Newer bad states are set aside; older ones are left alone. A state without a guard file was written without our
    guards, or not completely: it is set aside only when a guarded one exists beside it (this trainer does write
    guards), else it is skipped.
    """
    bad: list[tuple[Path, str]] = []
    unsure: list[tuple[Path, str]] = []
    found, chosen = states(folders), ResumePoint(None)
    guarded = [ResumePoint(path, step) for path, step in found.items() if step >= 0]
    for point in sorted([*guarded, *snapshots], key=lambda point: -point.step):
        state = point.record or point.path
        assert state is not None
        result = checkpoint.verify(state, deep=True) if point.small else None
        if result is None or result.error:
            result = verify(state, verify_s, pause, log)
        reason = result.error or "; ".join(result.problems)
        if not reason:
            chosen = point
            break
        if point.record is not None:
            log(f"the snapshot of step {point.step} is not used: {reason}")
        elif result.error:
            unsure.append((state, reason))
        else:
            bad.append((_set_aside(state, reason), reason))
    for state in [path for path, step in found.items() if step < 0 and guarded and chosen.record is None]:
        if error := checkpoint.verify(state).error:
            unsure.append((state, error))  # its guard file cannot be read, which does not mean that there is none
        else:
            bad.append((_set_aside(state, UNGUARDED), UNGUARDED))
    return replace(chosen, bad=tuple(bad), unsure=tuple(unsure))


def _set_aside(state: Path, reason: str) -> Path:
    """Set a bad state aside; on a disk that refuses even that (full, read-only) it stays and is skipped."""
    try:
        return checkpoint.set_aside(state, reason)
    except OSError:
        return state


def room_missing(folders: list[Path], floor_bytes: int = 64 << 20) -> str:
    """ "" when the disk has room for two checkpoints of the newest one's size, else a sentence with what is missing."""
    state, size = newest(folders), 0
    with contextlib.suppress(OSError):  # it is being replaced
        size = sum(p.stat().st_size for p in state.rglob("*")) if state else 0
    need, free = max(2 * size, floor_bytes), shutil.disk_usage(folders[-1]).free
    have = f"the disk of {folders[-1]} has {free / 1e6:.0f} MB free and two checkpoints need {need / 1e6:.0f} MB"
    return "" if free >= need else f"{have}; free {(need - free) / 1e6:.0f} MB"


# ---- snapshots in memory ----


def memory() -> Path:
    """The file system in memory that holds the folders of all runs."""
    return Path(os.environ.get(PLACE) or "/dev/shm")


def memory_folder(run: Path, known: str) -> tuple[str, str]:
    """(the folder for the snapshots of `run`, "") or ("", why there is none). known: the one that is noted already."""
    if known and Path(known).is_dir():
        return known, ""
    if not (platform.LINUX and memory().is_dir()):
        return "", f"this system has no file system in memory ({memory()}); a restart resumes from the disk"
    try:
        sweep_memory()
        name = re.sub(r"[^A-Za-z0-9_-]", "_", run.name)
        folder = platform.private_folder(name, memory())
        (folder / OWNER).write_bytes(os.fsencode(f"{run}\n{platform.namespace('mnt')}"))
        touch_memory(str(folder))
    except OSError as error:
        return "", f"no folder for them can be made: {error.strerror or error}"
    return str(folder), ""


def touch_memory(folder: str) -> None:
    """Say that the run of this folder has a monitor, in monotonic time: all containers share it, nobody sets it."""
    if folder:
        with contextlib.suppress(OSError):  # the folder has been removed
            os.utime(Path(folder) / OWNER, (time.monotonic(),) * 2)


def sweep_memory() -> None:
    """Remove the folders of runs that are gone: deleted, or with another one, or none, in monitor.json. OSError."""
    for folder in platform.private_folders(memory()):
        try:
            name, _, namespace = os.fsdecode((folder / OWNER).read_bytes()).partition("\n")
            silent_s = time.monotonic() - os.stat(folder / OWNER).st_mtime
        except OSError:
            continue  # it is being made
        run = Path(name)
        if namespace not in ("", platform.namespace("mnt")):
            gone = silent_s > SILENT_S
        else:
            gone = not is_held(run / LOCK) and (read_json(run / STATE) or {}).get("snapshots") != str(folder)
        if gone:
            platform.drop_private(folder)


def memory_variables(run: Run) -> dict[str, str]:
    """The variables of an attempt; {} without a folder."""
    folder, limit_bytes = run.state.snapshots, run.config.restart.snapshots_bytes
    if run.several or not folder:
        return {}
    spec = spec_hash(run.folder.folder)
    return {snapshot_files.RING: folder, snapshot_files.SPEC: spec, snapshot_files.LIMIT: str(limit_bytes)}


def usable_snapshots(run: Run, after_step: int = -1, room: bool = True) -> list[ResumePoint]:
    """The snapshots that can be resumed from once they verify; why others cannot is in the log.

    after_step: only those of later steps. room: its state will be made beside it.
    """
    found, folder, incident = list[ResumePoint](), run.state.snapshots, run.incident
    before_step = incident.evidence.step if incident is not None and incident.cause.damages_memory else math.inf
    for path, guard in checkpoint.guards(folder).items() if folder else ():
        reason = ""
        if guard is None or "run" not in guard or guard["step"] <= after_step:
            continue
        if guard["run"] != str(run.folder.folder):
            reason = f"it belongs to {guard['run']}"
        elif guard["spec"] != spec_hash(run.folder.folder):
            reason = "the run was made again since"
        elif guard["boot"] != boot_id():
            reason = "it was written before the machine was started"
        elif guard["step"] >= before_step:
            reason = "the failure may have damaged the memory that it holds"
        elif room and shutil.disk_usage(folder).free < _bytes_of(guard) + ROOM:
            reason = f"{memory()} is full, and the state that is made from it has no room there"
        if reason:
            run.folder.log(f"the snapshot of step {guard['step']} is not used: {reason}")
        else:
            state = Path(folder) / snapshot_files.RESUMED / path.name
            small = _bytes_of(guard) <= SMALL_BYTES
            found.append(ResumePoint(state, guard["step"], record=path, python=guard["python"], small=small))
    return found


def _bytes_of(guard: dict[str, Any]) -> int:
    """The memory that a snapshot takes."""
    return sum(entry["size"] for entry in guard["files"].values())


def memory_summary(folder: str, off: str = "") -> dict[str, Any] | None:
    """For status.json: {"step", "bytes", "every", "off"}, `step` None before the first one; None without snapshots.

    off: why there is no folder.
    """
    if not folder and not off:
        return None
    off = read_text(Path(folder) / snapshot_files.OFF) if folder else off
    guards = () if off else checkpoint.guards(folder).values()
    newest = next((guard for guard in guards if guard and "every" in guard), None)  # not what an earlier version left
    if newest is None:
        return {"step": None, "bytes": 0, "every": 0, "off": off}
    return {"step": newest["step"], "bytes": _bytes_of(newest), "every": newest["every"], "off": ""}


# ---- of a run ----


def resume_point(run: Run, folders: list[Path]) -> ResumePoint:
    """The newest state that can be resumed from, in memory or on the disk; bad ones are reported."""
    trusted = run.keeps_snapshots and sum(run.state.history.failures.values()) < FAILED_COUNT
    found = usable_snapshots(run) if trusted else []
    point = choose(folders, run.config.check.verify_s, run.pause, found, run.folder.log)
    for path, reason in point.bad:
        run.folder.event("checkpoint_bad", f"{path.name}: {reason}", path=str(path))
        if run.incident is not None:
            run.incident.bad_checkpoints.append(f"{path.name} ({reason})")
    for path, reason in point.unsure:
        run.folder.log(f"{path.name} cannot be verified now and is kept: {reason}")
    return point


def keep_newest(run: Run, pause: Callable[[float], None]) -> str:
    """Write the newest snapshot to the run's folder when no checkpoint there is as new, before the memory is freed.

    Returns "", or why its steps are in memory only, which is not freed then. `pause` may raise; call it again then.
    """
    if not run.state.snapshots or run.unkept is not None:
        return run.unkept or ""
    on_disk, unkept = 0, ""
    with contextlib.suppress(OSError):  # they cannot be listed: it is written, where the disk takes that
        on_disk = max(states(run.state_folders()).values(), default=0)
    found = usable_snapshots(run, on_disk, room=False)
    point = choose([], run.config.check.verify_s, pause, found)
    if point.record is not None:
        interpreter = point.python if Path(point.python).is_file() else sys.executable
        command = [interpreter, "-m", "guards.snapshot_files", str(point.record), str(run.folder.folder)]
        job = Subjob(command, min(run.config.end.stop_save_s, run.remaining_s()))
        job.wait(pause)
        if job.answer() is None:
            unkept = f"the newest steps, to step {point.step}, could not be written to the disk ({job.error}); "
            unkept += "they stay in memory until this machine is restarted, and a new start goes on from them"
        else:
            run.folder.log(f"the snapshot of step {point.step} was written to the disk")
    run.unkept = unkept
    return unkept


def start_over(run: Run, point: ResumePoint) -> ResumePoint:
    """The changed run cannot resume its states: they are kept aside, and the training starts at step 0."""
    for state in states(run.state_folders()) if run.leads else ():
        with contextlib.suppress(FileNotFoundError):
            aside = checkpoint.set_aside(state, "saved before a change of the run that is incompatible with it")
            message = f"{state.name} is incompatible with the changed run; kept as {aside.name}"
            run.folder.event("checkpoint_bad", message)
    if folder := run.state.snapshots:
        for path in [*Path(folder).glob("*-state"), Path(folder) / snapshot_files.RESUMED]:
            shutil.rmtree(path, ignore_errors=True)
    if run.incident is not None:
        run.incident.changed.append("the training starts over: its checkpoints are incompatible with this change")
    return ResumePoint(None, 0, point.bad)
