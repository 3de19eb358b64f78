"""Faults of files: damaged checkpoints, caches and snapshots in memory, full or frozen disks, kills in mid-save.

Each leaves the disk as a power cut, a full volume or a bad sector leaves it.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from guards import checkpoint, snapshot_files, state_saves
from guards.heartbeat import Heartbeat

WEIGHTS = "model.safetensors"


def _run() -> Path:
    return Path(os.environ["HANGPROOF_RUN"])


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)


def cut(state: Path) -> None:
    """The weights end in the middle."""
    path = state / WEIGHTS
    os.truncate(path, path.stat().st_size // 2)


def zero(state: Path) -> None:
    """The weights have their size, and only zeros after the header: blocks that never reached the disk."""
    path = state / WEIGHTS
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:header] + bytes(len(data) - header))


def poison(state: Path) -> None:
    """One weight is NaN, and the guard file agrees: the training itself wrote it so."""
    path = state / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # float32 NaN, little-endian
    path.write_bytes(data)
    guard = json.loads((state / checkpoint.GUARD).read_text(encoding="utf-8"))
    guard["files"][WEIGHTS]["sha256"] = hashlib.sha256(data).hexdigest()
    checkpoint.atomic_write(state / checkpoint.GUARD, json.dumps(guard))


def _damage(how: Callable[[Path], None], every: bool = False) -> Callable[[Heartbeat], None]:
    def fault(_: Heartbeat) -> None:
        states = list(checkpoint.states(_run()))
        if len(states) < 2:
            raise AssertionError(f"this fault needs two states in {_run()}, found {len(states)}")
        for state in states if every else states[:1]:
            how(state)
        _die()

    fault.__doc__ = f"Newest checkpoint: {how.__doc__} Then SIGKILL."
    return fault


def corrupt_npz(_: Heartbeat) -> None:
    """Some bytes in the middle of a cached latent differ from what was written; either trainer's cache."""
    images = _run().parent.parent / "datasets" / _run().name
    caches = sorted((images / ".hangproof-cache").glob("latents-*.npz")) or sorted(images.glob("*_flux.npz"))
    path = random.Random(os.environ.get("HANGPROOF_FAULT_ARG", "0")).choice(caches)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 16] = bytes(255 - b for b in data[middle : middle + 16])
    path.write_bytes(data)


def fill(folder: Path) -> None:
    """Fill a file system to the last block with the file `ballast`."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def disk_fills(_: Heartbeat) -> None:
    """Another program fills the disk of the run, to the last block."""
    fill(_run().parent.parent)


def disk_freezes(_: Heartbeat) -> None:
    """A file system (`HANGPROOF_FAULT_ARG`) takes no more writes, and the main thread writes to it: uninterruptible."""
    frozen = os.environ["HANGPROOF_FAULT_ARG"]
    subprocess.run(["fsfreeze", "--freeze", frozen], check=True)
    with open(Path(frozen) / "log", "w", encoding="utf-8") as file:
        file.write("never written")


def prepare_kill_in_save(heartbeat: Heartbeat) -> None:
    """Count what a save does to the disk from now on, and kill the process at a given operation."""
    every, _, offsets = os.environ["HANGPROOF_FAULT_ARG"].partition(":")
    attempt, listed = int(os.environ.get("HANGPROOF_ATTEMPT", "1")), [int(n) for n in offsets.split(",")]
    if attempt > len(listed):
        return
    # One save further with each attempt: the killed save may not count, and the run must still make progress.
    from_step, fsync, operations = int(every) * (attempt + 1), os.fsync, itertools.count(1)

    def count() -> None:
        # With snapshots in memory, a thread writes to the disk while the training is in another phase.
        saves = heartbeat.current_phase == "save" or threading.current_thread().name == state_saves.THREAD
        if saves and heartbeat.record.step >= from_step and next(operations) == listed[attempt - 1]:
            _die()

    def on_event(event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            count()

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)

    sys.addaudithook(on_event)
    os.fsync = counted  # type: ignore[assignment]  # of this process: the next save goes through it


def kill_in_save(_: Heartbeat) -> None:
    """SIGKILL at the n-th file operation of a save; `HANGPROOF_FAULT_ARG` = `EVERY:n,n,…`, one n for each attempt."""


def _records() -> list[Path]:
    found = list(checkpoint.guards(Path(os.environ[snapshot_files.RING])))
    if not found:
        raise AssertionError("this fault needs a snapshot, and there is none yet")
    return found


def record_torn(_: Heartbeat) -> None:
    """Killed while the guard files of both snapshots were written."""
    for path in _records():
        os.truncate(path / checkpoint.GUARD, 40)
    _die()


def record_damaged(_: Heartbeat) -> None:
    """A bit of a file of both snapshots is another one."""
    _damage_records()
    _die()


def all_states_bad(_: Heartbeat) -> None:
    """The same, and the weights of all checkpoints are cut."""
    _damage_records()
    for state in checkpoint.states(_run()):
        cut(state)
    _die()


def _damage_records() -> None:
    for path in _records():
        with open(path / snapshot_files.FILES, "r+b") as file:
            file.seek(10)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def record_of_another_run(_: Heartbeat) -> None:
    """Both snapshots belong to another run, and say that they are further."""
    for path in _records():
        guard = checkpoint.guard_of(path)
        assert guard is not None
        changed = {**guard, "run": "/elsewhere/run", "step": guard["step"] + 50}
        checkpoint.atomic_write(path / checkpoint.GUARD, json.dumps(changed))
    _die()


def records_gone(_: Heartbeat) -> None:
    """Something else has emptied /dev/shm."""
    for path in _records():
        shutil.rmtree(path)
    _die()


_BY_NAME = (
    *(corrupt_npz, disk_fills, disk_freezes, kill_in_save),
    *(record_torn, record_damaged, all_states_bad, record_of_another_run, records_gone),
)
FAULTS: dict[str, Callable[[Heartbeat], None]] = {
    **{fault.__name__: fault for fault in _BY_NAME},
    "truncated_checkpoint": _damage(cut),
    "zeroed_checkpoint": _damage(zero),
    "nan_checkpoint": _damage(poison),
    "all_checkpoints_bad": _damage(cut, every=True),
}
