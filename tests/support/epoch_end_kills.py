"""Ends a training right after a step whose state it has left: an injector for all three trainers.

`HANGPROOF_INJECT=epoch_end_kills:fire`, and TEST_KILL says what leaves the state of step N, and when the process dies:

`step N`, `epoch N`     its flags save it; SIGKILL when step N + 1 is computed and the save is complete
`snapshot N`            a snapshot in memory is taken at step N, and at no other; SIGKILL as before
`pause N`               a stop is requested at step N, as the monitor does: the process saves it and exits
`never`                 it is left alone
"""

import os
import signal
import time

from guards import heartbeat as records
from guards.snapshots import Snapshots
from guards.state_saves import StateSaves

_waiting: list = []  # each waits for what one writer has begun


def fire(phase: str, step: int, heartbeat) -> None:
    kind, _, number = os.environ["TEST_KILL"].partition(" ")
    if phase == "import":
        watch_writers(lambda: kind == "snapshot" and heartbeat.record.step == int(number))
    if kind == "never":
        return
    if kind == "pause" and step == int(number):
        records.set_request(heartbeat.path, records.REQUEST_STOP)
    elif kind != "pause" and step > int(number):
        for wait in _waiting:
            wait()
        os.kill(os.getpid(), signal.SIGKILL)


def watch_writers(due) -> None:
    """due(): whether a snapshot is taken at this step."""

    def saved(saves: StateSaves) -> None:
        while saves.busy:
            time.sleep(0.01)

    def writes(kind: type, wait) -> None:
        init = kind.__init__

        def __init__(self, *args, **kwargs) -> None:
            init(self, *args, **kwargs)
            _waiting.append(lambda: wait(self))

        kind.__init__ = __init__

    writes(Snapshots, Snapshots.wait)
    writes(StateSaves, saved)
    Snapshots.due = lambda self: self.active and due()
