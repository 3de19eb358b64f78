"""Small phrases for people: phases, process states, counts, durations, times; and text from outside made printable."""

import re

# A phase as the end of "while …" and as a label of its own.
PHASES = {
    "import": "starting up", "load": "loading the model", "cache_latents": "caching images", "cache_text": "caching captions",
    "hash": "hashing the model", "first_step": "running the first step", "step": "training", "validate": "running validation",
    "sample": "generating sample images", "save": "saving a checkpoint", "end": "finishing",
}  # fmt: skip
# The kernel's letter for the state of a process: proc(5). "" is a process that no longer exists.
STATES = {
    "R": "running", "S": "sleeping", "D": "uninterruptible sleep", "T": "stopped by a signal", "t": "stopped by a debugger",
    "Z": "zombie", "I": "idle", "": "exited",
}  # fmt: skip


def count(number: int, thing: str) -> str:
    """`1 step`, `2 steps`, `3 processes`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("s") else "s")


def duration(seconds: float) -> str:
    """`3.2 s`, `5 min 10 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(utc: str) -> str:
    """`2026-11-21 11:35:46 UTC` of an ISO time."""
    return f"{utc[:10]} {utc[11:19]} UTC"


def printable(text: str) -> str:
    """`text` without terminal colours and control characters."""
    return "".join(c for c in re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text).expandtabs(4) if c.isprintable())
