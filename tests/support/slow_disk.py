"""A disk on which every fsync takes long, or is a process's last act: a fault injector for trainers.

`HANGPROOF_INJECT=slow_disk:fire`, and `TEST_DISK` says what happens, from the training's first step on: `FSYNC_S`, or
`FSYNC_S WHAT@N`, where WHAT, `kill` or `term`, happens at the Nth fsync.
TEST_TRACE: a file with a line for each fsync and step: `fsync BEGIN END THREAD` or `step NUMBER TIME`, monotonic.
"""

import os
import signal
import threading
import time

REAL = os.fsync
_count = 0


def trace(*words: object) -> None:
    with open(os.environ.get("TEST_TRACE", os.devnull), "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


def fsync(descriptor: int) -> None:
    global _count
    _count += 1
    takes_s, _, what = os.environ["TEST_DISK"].partition(" ")
    what, _, number = what.partition("@")
    began = time.monotonic()
    time.sleep(float(takes_s))
    if what and _count == int(number):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[what])
    REAL(descriptor)
    trace("fsync", began, time.monotonic(), threading.current_thread().name)


def fire(phase: str, step: int, heartbeat) -> None:
    if phase == "step" and step >= 1 and heartbeat.record.done == 0:
        os.fsync = fsync
        trace("step", step, time.monotonic())
