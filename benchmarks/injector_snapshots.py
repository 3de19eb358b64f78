"""Faults in the snapshots of a run (guards/snapshots.py), followed by the death of the training: what a restart must not believe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import injector_files
from guards import checkpoint, snapshot_record, snapshots
from guards.heartbeat import Heartbeat


def _records() -> list[Path]:
    found = list(snapshots.headers(Path(os.environ[snapshots.FOLDER])))
    if not found:
        raise AssertionError("this fault needs a snapshot, and there is none yet")
    return found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def record_torn(_: Heartbeat) -> None:
    """Killed while the headers of both records were written."""
    for path in _records():
        with open(path, "r+b") as file:
            file.seek(20)
            file.write(bytes(40))
    _die()


def record_damaged(_: Heartbeat) -> None:
    """A bit of the body of both records is another one."""
    _damage()
    _die()


def all_states_bad(_: Heartbeat) -> None:
    """The same, and the weights of all checkpoints are cut."""
    _damage()
    for state in checkpoint.states(Path(os.environ["HANGPROOF_RUN"])):
        injector_files.cut(state)
    _die()


def _damage() -> None:
    for path in _records():
        with open(path, "r+b") as file:
            file.seek(snapshot_record.BODY + 10)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def record_of_another_run(_: Heartbeat) -> None:
    """Both records belong to another run, and say that they are further."""
    for path in _records():
        header = snapshot_record.read_header(path)
        assert header is not None
        with open(path, "r+b") as file:
            page = bytearray(snapshot_record.BODY)
            snapshot_record.seal(page, replace(header, run="/elsewhere/run", step=header.step + 50))
            file.write(page)
    _die()


def records_gone(_: Heartbeat) -> None:
    """Something else has emptied /dev/shm."""
    for path in _records():
        path.unlink()
    _die()


FAULTS: dict[str, Callable[[Heartbeat], None]] = {
    "record_torn": record_torn,
    "record_damaged": record_damaged,
    "all_states_bad": all_states_bad,
    "record_of_another_run": record_of_another_run,
    "records_gone": records_gone,
}
