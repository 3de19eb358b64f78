"""Whether a run ever has two writers: each training process takes its run's lock at its first heartbeat and keeps it.

Decision: a POSIX record lock. The kernel releases it when the process dies, however it dies, and a forked worker does
not inherit it: who holds it is the process that trains. One that finds it taken leaves a report and goes on, so that
the row that is played ends as it would have ended, and then fails.

    HANGPROOF_WRITERS  the folder of locks and reports; unset: nothing is done
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

VARIABLE = "HANGPROOF_WRITERS"
REPORT = "doubled-{pid}.txt"

_held: list[Any] = []


def claim() -> None:
    """Take the lock of this process's run, once. Another process that holds it is reported."""
    folder, run = os.environ.get(VARIABLE, ""), os.environ.get("HANGPROOF_RUN", "")
    if _held or not folder:
        return
    lock = open(Path(folder) / f"{hashlib.sha256(run.encode()).hexdigest()[:16]}.lock", "a+", encoding="utf-8")  # noqa: SIM115
    _held.append(lock)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        attempt, other = os.environ.get("HANGPROOF_ATTEMPT", "1"), lock.read().split("\n")[-2:][0]
        text = f"process {os.getpid()} (attempt {attempt}) trains while {other or 'another one'} trains {run}"
        (Path(folder) / REPORT.format(pid=os.getpid())).write_text(text, encoding="utf-8")
    else:
        lock.write(f"process {os.getpid()} (attempt {os.environ.get('HANGPROOF_ATTEMPT', '1')})\n")
        lock.flush()


def doubled(folder: Path) -> list[str]:
    """The reports in this folder: one sentence for each process that trained beside another one of its run."""
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob(REPORT.format(pid="*")))]
