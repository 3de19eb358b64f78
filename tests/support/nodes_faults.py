"""A hang inside one rank, for HANGPROOF_INJECT=nodes_faults:inject. Light: it runs in the trainer's interpreter."""

import os
import time


def inject(phase: str, step: int, heartbeat) -> None:
    """Called at each beat. NODES_FAULT = `RANK:STEP`: in the first attempt that rank sleeps once the step is complete."""
    rank, _, at = os.environ.get("NODES_FAULT", "").partition(":")
    first = os.environ.get("HANGPROOF_ATTEMPT") == "1"
    if first and phase == "step" and str(step) == at and str(heartbeat.rank) == rank and not heartbeat._done:
        reads_a_file_that_never_comes()


def reads_a_file_that_never_comes() -> None:
    while True:
        time.sleep(60)
