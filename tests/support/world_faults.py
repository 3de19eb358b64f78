"""Faults inside one rank of a run, for HANGPROOF_INJECT=world_faults:inject. Light: it runs in the trainer's interpreter."""

import os
import signal


def inject(phase: str, step: int, heartbeat) -> None:
    """Called at each beat. WORLD_FAULT = `kill@STEP:RANKS` or `stop@STEP:RANKS` or `request@STEP:RANKS`: when that step
    is complete, these ranks (`0`, `1`, `01`) kill themselves, stop themselves as Ctrl-Z does, or are asked to stop."""
    what, _, where = os.environ.get("WORLD_FAULT", "").partition("@")
    at, _, ranks = where.partition(":")
    if phase != "step" or heartbeat.record.done or str(step) != at or str(heartbeat.rank) not in ranks:
        return
    if what == "request":
        from guards.heartbeat import REQUEST_STOP, set_request

        set_request(heartbeat.path, REQUEST_STOP)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
