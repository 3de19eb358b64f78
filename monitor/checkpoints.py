"""Which checkpoint to go on from: the newest that verifies, every bad one set aside and named, never the last good one lost.

The verification reads gigabytes and may import torch, so it runs in a helper with a deadline. It is begun when a run is
first suspected, while the evidence is gathered, and its answer is kept by the guard file's content: by the time the old
processes are gone, the answer is usually there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guards import checkpoint
from monitor.folder import MonitorError
from monitor.helpers import Helper

KEPT = 32  # answers
UNGUARDED = "it has no guard file: it was not written to its end"


@dataclass(frozen=True)
class Chosen:
    """`path` None: from the start. `bad` are those set aside, with the reason."""

    path: Path | None
    step: int
    bad: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What is wrong with a state, () when it verifies; not `sure` when the check itself failed (a disk that is stuck)."""

    problems: tuple[str, ...] = ()
    sure: bool = True


class Verifier:
    """Verifies states in a helper process, one at a time; remembers the answers."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.took_s = 0.0  # the last one
        self._answers: dict[tuple[str, str], Answer] = {}
        self._under_way: tuple[tuple[str, str], Helper] | None = None

    def known(self, state: Path) -> bool:
        """Is there an answer on this state, as it is now?"""
        return _key(state) in self._answers

    def busy(self) -> bool:
        return self._under_way is not None

    def begin(self, state: Path) -> None:
        """Start verifying `state` if that is not done or under way; another one under way is given up."""
        key = _key(state)
        if key in self._answers or (self._under_way and self._under_way[0] == key):
            return
        self.cancel()
        self._under_way = (
            key, Helper("guards.checkpoint", ["verify", str(state), "--deep", "--json"], self.timeout_s)
        )  # fmt: skip

    def answer(self, state: Path, wait: Callable[[float], None] = time.sleep) -> Answer:
        """The answer on `state`; `wait` is called while there is none yet."""
        key = _key(state)
        if key not in self._answers:
            self.begin(state)
            self._under_way[1].wait(wait)
            self.poll()
        return self._answers.get(key, Answer(("it changed while it was verified",), sure=False))

    def poll(self) -> None:
        """Collect an answer that has arrived."""
        if self._under_way is None or not self._under_way[1].done():
            return
        key, helper = self._under_way
        self._under_way = None
        self.took_s = helper.took_s
        try:
            found = Answer(tuple(helper.result()["problems"]))
        except MonitorError as error:  # no answer: the disk is stuck, or the check itself failed
            found = Answer((f"it could not be verified: {error}",), sure=False)
        self._answers[key] = found
        while len(self._answers) > KEPT:
            del self._answers[next(iter(self._answers))]

    def cancel(self) -> None:
        """Give up a verification under way."""
        if self._under_way is not None:
            self._under_way[1].cancel()
            self._under_way = None


def _key(state: Path) -> tuple[str, str]:
    try:
        guard = (state / checkpoint.GUARD).read_bytes()
    except OSError:
        guard = b""
    sizes = [(p.name, s.st_size, s.st_mtime_ns) for p in sorted(state.rglob("*")) if (s := _stat(p)) is not None]
    return str(state), hashlib.sha256(guard + repr(sizes).encode()).hexdigest()


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def states(folders: list[Path]) -> list[Path]:
    """Every state of these folders, newest step first, those without a guard file last."""
    found = [path for folder in folders for path in checkpoint.states(folder)]
    return sorted(found, key=lambda path: -(checkpoint.guard_of(path) or {"step": -1})["step"])


def newest(folders: list[Path]) -> Path | None:
    """The newest state with a guard file, verified or not."""
    return next((p for p in states(folders) if checkpoint.guard_of(p)), None)


def choose(folders: list[Path], verifier: Verifier, wait: Callable[[float], None] = time.sleep) -> Chosen:
    """The newest state of `folders` that verifies. Bad ones that are newer are set aside; older ones are left alone.

    A state without a guard file was written by a trainer without our guards, or not to its end: it is set aside only when
    a guarded one exists beside it (so this trainer does write guards), else it is passed over. A state that could not be
    checked is passed over and left where it is.
    """
    bad = []
    found = states(folders)
    guarded = [p for p in found if checkpoint.guard_of(p)]
    if guarded:
        bad += [(_aside(p, UNGUARDED), UNGUARDED) for p in found if p not in guarded]
    for state in guarded:
        answer = verifier.answer(state, wait)
        if not answer.problems:
            return Chosen(state, checkpoint.guard_of(state)["step"], tuple(bad))
        reason = "; ".join(answer.problems)
        bad.append((_aside(state, reason) if answer.sure else state, reason))
    return Chosen(None, 0, tuple(bad))


def _aside(state: Path, reason: str) -> Path:
    """Set aside; where even that cannot be written (a full disk), the state stays and is passed over."""
    try:
        return checkpoint.set_aside(state, reason)
    except OSError:
        return state


def room_needed(folders: list[Path]) -> int:
    """Bytes for two checkpoints of the size of the newest one (one being written, one kept); 0 while there is none."""
    state = newest(folders)
    if state is None:
        return 0
    return 2 * sum(s.st_size for p in state.rglob("*") if (s := _stat(p)) is not None)


def room_missing(folders: list[Path], floor: int = 64 << 20) -> str:
    """ "" when the disk has room for two checkpoints (at least `floor` bytes), else a sentence that says how much is missing."""
    folder = folders[-1]
    need, free = max(room_needed(folders), floor), shutil.disk_usage(folder).free
    if free >= need:
        return ""
    return (
        f"the disk of {folder} has {free / 1e6:.0f} MB free and two checkpoints need {need / 1e6:.0f} MB; "
        f"free {(need - free) / 1e6:.0f} MB, then start the run again"
    )
