"""Called at each beat of a training (HANGPROOF_INJECT): record phases and check points, make requests from inside."""

import os

from guards import step_requests

CHECK_POINT = "check point "

_last = None


def phases(phase, step, heartbeat):
    """Append `phase` to $PHASES_FILE whenever it changes; check points to the same file with the suffix .points."""
    global _last
    if phase.startswith(CHECK_POINT):
        with open(os.environ["PHASES_FILE"] + ".points", "a") as file:
            file.write(f"{phase.removeprefix(CHECK_POINT)}\n")
    elif phase != _last:
        _last = phase
        with open(os.environ["PHASES_FILE"], "a") as file:
            file.write(f"{phase}\n")


_left = [word.split("@") for word in os.environ.get("REQUESTS", "").split(",") if word]


def ask(phase, step, heartbeat):
    """`REQUESTS=sample@2,state@4`: request each kind once that step is complete, as the command line does."""
    step_requests.POLL_S = 0.0  # each is seen at the next step, however short the steps are
    for word in [*_left] if phase == "step" and heartbeat.rank == 0 else ():
        if step >= int(word[1]):
            _left.remove(word)
            step_requests.ask(os.environ["HANGPROOF_RUN"], word[0])
