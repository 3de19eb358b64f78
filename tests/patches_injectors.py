"""Fault injectors (HANGPROOF_INJECT) for the tests of the patches: record the phases, request a stop."""

import os

_last = None


def phases(phase, step, heartbeat):
    """Append `phase` to $PHASES_FILE whenever it changes."""
    global _last
    if phase != _last:
        _last = phase
        with open(os.environ["PHASES_FILE"], "a") as file:
            file.write(f"{phase}\n")


def stop_at_four(phase, step, heartbeat):
    """Request a stop, as the monitor does, after step 4."""
    _stop_at(4, phase, step, heartbeat)


def stop_at_six(phase, step, heartbeat):
    """The same after step 6."""
    _stop_at(6, phase, step, heartbeat)


def _stop_at(number, phase, step, heartbeat):
    from guards import heartbeat as records

    if phase == "step" and step == number:
        records.set_request(heartbeat.path, records.REQUEST_STOP)
