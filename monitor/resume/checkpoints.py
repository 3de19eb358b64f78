"""Which checkpoint to resume from: the newest that verifies. Bad ones are set aside by name, the last good one is kept.

The check reads gigabytes and may import torch, so it runs in a subprocess, which ends when it makes no progress. It
begins when a run is first suspected, and its result is kept by the content of the guard file: by the time the old
processes are gone, the result is usually there. "Cannot be verified" is not "bad": a check that fails (no memory,
broken torch, a disk that does not answer) is repeated with hashes alone, and if that fails too the state stays in place
and the run does not start over.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from guards import checkpoint
from monitor.process.subjob import Subjob, python
from monitor.state import ResumePoint, VerifyResult

KEPT = 32  # checks
UNGUARDED = "it has no guard file, so it was not written completely"


class Verifier:
    """Verifies states in a subprocess, one at a time, and keeps the checks that gave a result."""

    def __init__(self, standstill_s: float):
        """standstill_s: without a byte read, a check has failed; one that reads may take as long as it needs."""
        self.standstill_s = standstill_s
        self.took_s = 0.0  # the last check
        self._checks: dict[tuple[str, bytes], Subjob] = {}  # by the state as it was then; the last may be under way

    def known(self, state: Path) -> bool:
        """There is a result for this state as it is now."""
        self.poll()
        check = self._checks.get(_key(state))
        return check is not None and check.done()

    def busy(self) -> bool:
        return not all(check.done() for check in self._checks.values())

    def begin(self, state: Path) -> tuple[str, bytes]:
        """Start verifying `state` unless that is done or under way; a check of another state is given up. Its key."""
        key = _key(state)
        self.poll()
        if key not in self._checks:
            self.cancel()
            self._checks[key] = self._check(state, "--deep")
        return key

    def result(self, state: Path, pause: Callable[[float], None] = time.sleep) -> VerifyResult:
        """The result for `state`; `pause(seconds)` is called while there is none yet, and may raise."""
        key = self.begin(state)
        check = self._checks[key]
        check.wait(pause)
        if _result_of(check).unsure:  # the deep check failed: hashes need no torch
            check = self._checks[key] = self._check(state)
            check.wait(pause)
        self.poll()
        return _result_of(check)

    def poll(self) -> None:
        """Look after a check under way; one that failed, or was given up, may be made again."""
        for key, check in list(self._checks.items()):
            if check.done():
                self.took_s = check.took_s
                if _result_of(check).unsure or len(self._checks) > KEPT:
                    del self._checks[key]

    def cancel(self) -> None:
        """Give up a check under way."""
        for check in self._checks.values():
            check.kill()
        self.poll()

    def _check(self, state: Path, *more: str) -> Subjob:
        command = python("guards.checkpoint", "verify", str(state), *more, "--json")
        return Subjob(command, math.inf, standstill_s=self.standstill_s)


def _result_of(job: Subjob) -> VerifyResult:
    answer = job.answer() if job.code in (0, 1) else None
    if answer is None or not isinstance(answer.get("problems"), list):
        return VerifyResult(unsure=job.error or "the check gave no result")
    return VerifyResult(tuple(answer["problems"]))


def _key(state: Path) -> tuple[str, bytes]:
    """The state, and its guard file with its files' sizes and times."""
    content = [b""]
    with contextlib.suppress(OSError):
        content = [(state / checkpoint.GUARD).read_bytes()]
        stats = [(p.name, p.stat()) for p in sorted(state.rglob("*"))]
        content += [f"{name} {s.st_size} {s.st_mtime_ns}".encode() for name, s in stats]
    return str(state), b"\0".join(content)


def states(folders: list[Path]) -> dict[Path, int]:
    """Every state of these folders with its step, newest first; those without a readable guard file last, with -1."""
    found = [path for folder in folders for path in checkpoint.states(folder)]
    steps = {path: (checkpoint.guard_of(path) or {"step": -1})["step"] for path in found}
    return dict(sorted(steps.items(), key=lambda item: -item[1]))


def newest(folders: list[Path]) -> Path | None:
    """The newest state with a guard file, verified or not."""
    return next((path for path, step in states(folders).items() if step >= 0), None)


def choose(
    folders: list[Path],
    verifier: Verifier,
    pause: Callable[[float], None] = time.sleep,
    snapshots: Iterable[ResumePoint] = (),
) -> ResumePoint:
    """The newest that verifies, of the states in `folders` and the `snapshots` in memory. `pause` may raise.

    Newer bad states are set aside; older ones are left alone. A state without a guard file was written by a trainer without
    our guards, or not completely: it is set aside only when a guarded one exists beside it (this trainer does write
    guards), else it is skipped.
    """
    bad: list[tuple[Path, str]] = []
    unsure: list[tuple[Path, str]] = []
    refused: list[str] = []
    found, chosen = states(folders), ResumePoint(None)
    guarded = [ResumePoint(path, step) for path, step in found.items() if step >= 0]
    for point in sorted([*guarded, *snapshots], key=lambda point: -point.step):
        state = point.record or point.path
        assert state is not None
        result = verifier.result(state, pause)
        reason = result.unsure or "; ".join(result.problems)
        if not reason:
            chosen = point
            break
        if point.record is not None:
            refused.append(f"the snapshot of step {point.step} is not used: {reason}")
        elif result.unsure:
            unsure.append((state, reason))
        else:
            bad.append((_set_aside(state, reason), reason))
    for state in [path for path, step in found.items() if step < 0 and guarded and chosen.record is None]:
        if error := checkpoint.verify(state).error:
            unsure.append((state, error))  # its guard file cannot be read, which does not mean that there is none
        else:
            bad.append((_set_aside(state, UNGUARDED), UNGUARDED))
    return replace(chosen, bad=tuple(bad), unsure=tuple(unsure), refused=tuple(refused))


def _set_aside(state: Path, reason: str) -> Path:
    """Set a bad state aside; on a disk that refuses even that (full, read-only) it stays and is skipped."""
    try:
        return checkpoint.set_aside(state, reason)
    except OSError:
        return state


def room_missing(folders: list[Path], floor_bytes: int = 64 << 20) -> str:
    """ "" when the disk has room for two checkpoints of the newest one's size, else a sentence with the bytes missing."""
    state, size = newest(folders), 0
    with contextlib.suppress(OSError):  # it is being replaced
        size = sum(p.stat().st_size for p in state.rglob("*")) if state else 0
    need, free = max(2 * size, floor_bytes), shutil.disk_usage(folders[-1]).free
    have = f"the disk of {folders[-1]} has {free / 1e6:.0f} MB free and two checkpoints need {need / 1e6:.0f} MB"
    return "" if free >= need else f"{have}; free {(need - free) / 1e6:.0f} MB"


def verify_lora(path: Path, standstill_s: float, left_s: float, pause: Callable[[float], None]) -> VerifyResult:
    """Check a finished LoRA: a complete safetensors file with finite weights. left_s: until the machine goes."""
    job = Subjob(python("guards.checkpoint", "verify-lora", str(path), "--json"), left_s, standstill_s=standstill_s)
    job.wait(pause)
    return _result_of(job)
