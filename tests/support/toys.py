"""Faults of the toy training (monitor_helpers.toy_run), and what it computes when nothing disturbs it."""

import hashlib


def fault_at(step: int, code: str, attempts: str = "attempt == 1") -> str:
    """A fault: `code` once step `step` is complete, on the attempts for which the condition holds."""
    body = "\n".join("        " + line for line in code.strip().splitlines())
    return f"def fault(step):\n    if step == {step} and {attempts}:\n{body}\n"


SHORT = dict(steps=50, pace=0.03, every=10)
AT = 34  # of SHORT: the monitor knows its steps by then, and it is between two checkpoints
HANG = fault_at(AT, "time.sleep(3600)")
GO = "    while step == 15 and not (run / 'go').exists():\n        time.sleep(0.02)\n"  # in a fault: waits for it
HOLD = fault_at(15, "while not hb.request:\n    time.sleep(0.02)")  # the first attempt waits for a request to stop


def undisturbed(steps: int = 60) -> str:
    """The result of a run of so many steps that nothing disturbed."""
    value = "seed"
    for step in range(1, steps + 1):
        value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
    return value
