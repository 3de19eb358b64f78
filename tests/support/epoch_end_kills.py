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

_writers: list = []


def fire(phase: str, step: int, heartbeat) -> None:
    kind, _, number = os.environ["TEST_KILL"].partition(" ")
    if phase == "import":
        Snapshots.__init__, StateSaves.__init__ = noted(Snapshots.__init__), noted(StateSaves.__init__)
        Snapshots.due = lambda self: self.active and kind == "snapshot" and heartbeat.record.step == int(number)
    if kind == "never":
        return
    if kind == "pause" and step == int(number):
        records.set_request(heartbeat.path, records.REQUEST_STOP)
    elif kind != "pause" and step > int(number):
        for writer in _writers:
            while isinstance(writer, StateSaves) and writer.busy:
                time.sleep(0.01)
            if isinstance(writer, Snapshots):
                writer.wait()
        os.kill(os.getpid(), signal.SIGKILL)


def noted(init):
    """Note who writes states: it is waited for."""

    def __init__(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        _writers.append(self)

    return __init__
