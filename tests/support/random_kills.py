"""SIGKILLs at random moments, at random places of a snapshot and of a save: an injector for trainers under test.

`HANGPROOF_INJECT=random_kills:fire`. From the first step that this process completes on, `TEST_KILL` says when it dies:
`time SECONDS` (later), `snapshot N` (in the middle of the Nth snapshot from there), `save N` (at the Nth fsync of a save), `never`.
The pace is that of benchmarks.injector.
"""

import os
import signal
import threading

from benchmarks import injector
from guards import snapshot_record

REAL_FSYNC, REAL_CHECK = os.fsync, snapshot_record.check
_armed = False
_left = 0


def fire(phase: str, step: int, heartbeat) -> None:
    global _armed
    if phase == "step" and heartbeat.record.count == 1 and not _armed:
        _armed = True
        arm(*os.environ["TEST_KILL"].split())
    injector.fire(phase, step, heartbeat)


def arm(what: str, when: str = "0") -> None:
    global _left
    if what == "time":
        threading.Timer(float(when), die).start()
    elif what == "snapshot":
        _left, snapshot_record.check = int(when), check
    elif what == "save":
        _left, os.fsync = int(when), fsync


def check(body: memoryview, *more) -> tuple[bool, int]:
    """Called when a record's tensors are copied, and its header is not written."""
    if threading.current_thread().name == "hangproof-saves" or len(body) < 4096:
        return REAL_CHECK(body, *more)
    return count(REAL_CHECK, body, *more)


def fsync(descriptor: int) -> None:
    if "-state" in os.readlink(f"/proc/self/fd/{descriptor}"):
        count(REAL_FSYNC, descriptor)
    else:
        REAL_FSYNC(descriptor)


def count(function, *arguments):
    global _left
    _left -= 1
    if _left == 0:
        die()
    return function(*arguments)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
