"""Fault injectors (HANGPROOF_INJECT) for the tests of the patches: record phases and check points, request a stop."""

import os

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


def stop_at_four(phase, step, heartbeat):
    """Request a stop, as the monitor does, after step 4."""
    from guards import heartbeat as records

    if phase == "step" and step == 4:
        records.set_request(heartbeat.path, records.REQUEST_STOP)
