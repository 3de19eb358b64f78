"""The standby attempt: the next attempt, started early, waits at the gate (guards/gate.py) with everything imported.

Starting Python and importing a trainer's libraries takes seconds and is the same for each attempt. So once a run makes
steps, the monitor starts the next attempt's script with a stand-in for the state to resume from. When the attempt that
trains fails, it gets the state in a message and goes on; when the failure changes the script, or it is not at the gate
yet, a cold start follows.

Decision: it is an `Attempt` from the beginning, so that everything that watches, adopts and kills attempts works for it
once it is released. Until then only this file knows it. It holds the reading end of a pipe whose writing end only the
monitor has: however the monitor dies, the standby ends by itself.
"""

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from guards import gate, memory
from guards.reading import read_text
from monitor import config
from monitor.attempt import Attempt
from monitor.process import platform
from monitor.resume.script import STAND_IN
from monitor.run_folder import TRAINING_LOG, RunFolder
from monitor.state import Observation

LOOK_S = 5.0  # between two looks at its processes and at the free memory
AT_MOST_BYTES = 4 << 30  # what the imports of a trainer need; a training holds its model and data beside them
Save = Callable[[Attempt], None]
OUTPUT = "output"  # what it prints before it is released; then it goes into training.log


def never(folder: RunFolder, limits: config.Section) -> str:
    """Why this run has no standby attempt; "" when it can have one."""
    spec = folder.spec
    reasons = {
        "turned off in the limits (standby = false)": not limits.tries_count,
        "only Linux has what it needs": not platform.LINUX,
        "the script is not one of Hangproof's": folder.foreign,
        "the script was edited, and what it does before the training is not known": "edited" in spec,
        "several processes train together": int(spec.get("gpus", 1)) * int(spec.get("nodes", 1)) > 1,
        "the script copies its results when it ends": bool(spec.get("save_dir")),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


class Standby:
    """The standby attempt of one run. `off`: why there is none."""

    def __init__(self, folder: RunFolder, limits: config.Section, kill_wait_s: float):
        self.folder, self.limits, self.kill_wait_s = folder, limits, kill_wait_s
        self.off = never(folder, limits)
        self.attempt: Attempt | None = None
        self._tries = 0 if self.off else limits.tries_count  # starts that may fail in a row
        self._gate: BinaryIO = io.BytesIO()
        self._next_s = 0.0  # of the next look at it; no start before

    @property
    def ready(self) -> bool:
        """It waits at the gate."""
        return self.attempt is not None and (self.attempt.heartbeats / gate.READY).exists()

    def tick(self, view: Observation, trains: Attempt, text: str, inherit: tuple[int, ...]) -> None:
        """Start the standby, or look after it. Called while the run makes progress; OSError: it cannot be killed.

        trains: the attempt that trains. text: the next one's script with the stand-in, "" while that is not prepared.
        inherit: descriptors that an attempt keeps open.
        """
        attempt, limits, failed = self.attempt, self.limits, ""
        may_begin = self._tries and text and any(b.count >= limits.steps_count for b in view.beats)
        if view.now_s < self._next_s or not (attempt or may_begin):
            return
        self._next_s = view.now_s + LOOK_S
        members, free, needed = self.pids(), memory.available_bytes(), limits.reserve_bytes // 2
        if attempt is None:  # more than what it may not fall below later
            needed = limits.reserve_bytes + min(platform.private_bytes(*trains.tree.members), AT_MOST_BYTES)
        if free is not None and free < needed:
            self.off = f"memory is short: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed"
            self.drop(self.off)
        elif attempt is None:
            failed = self._begin(trains.record.number + 1, text, inherit)
        elif not members:
            lines = read_text(attempt.heartbeats / OUTPUT).strip().splitlines()
            failed = f"it ended by itself: {lines[-1][:300] if lines else 'without a message'}"
        elif not self.ready and view.now_s - attempt.record.started_s >= limits.start_s:
            failed = f"its imports took more than {limits.start_s:g} s"
        if failed:  # tried again at the next look, a few times in a row
            self._tries -= 1
            self.drop(failed if self._tries else f"{failed} ({limits.tries_count} times)")
        platform.kill_first(self.pids())  # short of memory, the kernel kills it and not the training

    def _begin(self, number: int, text: str, inherit: tuple[int, ...]) -> str:
        """Start it; "" or why it cannot be started."""
        reader, writer = os.pipe()
        self._gate = open(writer, "wb", buffering=0)  # noqa: SIM115 - until it is released or dropped
        try:
            self.attempt = attempt = Attempt.prepare(self.folder, number)
            script = attempt.heartbeats / f"train.attempt-{number}.sh"
            script.write_text(text, encoding="utf-8", errors="surrogateescape")
            stand_in = str(self.folder.folder / STAND_IN)
            variables = {gate.VARIABLE: str(reader), gate.STAND_IN: stand_in, gate.NO_CONTEXT: "1"}
            attempt.start(script, attempt.heartbeats / OUTPUT, variables, (*inherit, reader))
            return ""
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}"
        finally:
            os.close(reader)

    def release(self, script: Path, resume: Path | None, more: Mapping[str, str], save: Save) -> Attempt | None:
        """Let it train if it waits for exactly this script; else, and where it does not answer, it is killed.

        more: of its environment. save: writes its record, for a later monitor. OSError: it cannot be killed or saved.
        """
        attempt, self._next_s = self.attempt, 0.0  # the next one need not wait
        if attempt is None:
            return None
        waits_for = read_text(attempt.heartbeats / script.name).replace(str(self.folder.folder / STAND_IN), str(resume))
        if resume is None:
            reason = "the training starts over"
        elif not waits_for or waits_for.rstrip() != read_text(script).rstrip():
            reason = "the failure changes the script"
        elif not (self.ready and self.pids()):
            reason = "it has not imported everything yet"
        else:
            attempt.begins_now()
            save(attempt)
            until_s, passed = time.monotonic() + self.limits.gate_s, attempt.heartbeats / gate.PASSED
            with contextlib.suppress(OSError):  # it died a moment ago
                attempt.announce(script, resume, before=read_text(attempt.heartbeats / OUTPUT))
                platform.kill_first(attempt.tree.members, False)
                environment, log = {**more, "HANGPROOF_RESUME": str(resume)}, self.folder.folder / TRAINING_LOG
                self._gate.write(gate.message(str(resume), environment, str(log)))
                while not passed.exists() and time.monotonic() < until_s:
                    platform.sleep(0.02)
            if passed.exists():
                self.attempt, self._tries = None, self.limits.tries_count
                self._gate.close()
                return attempt
            reason = f"it did not go on within {self.limits.gate_s:g} s"
        self.drop(reason)
        return None

    def drop(self, reason: str) -> None:
        """Kill the standby, if there is one. OSError: it cannot be killed."""
        attempt, self.attempt = self.attempt, None
        self._gate.close()
        if attempt is not None:
            self.off = reason
            self.folder.log(f"the standby attempt is dropped: {reason}")
            killed = attempt.kill(0.0, self.kill_wait_s)
            attempt.close()
            if killed.survivors:
                raise OSError("the standby attempt cannot be killed")

    def close(self) -> None:
        """The run has ended, or its monitor does."""
        self._tries = 0
        with contextlib.suppress(OSError):
            self.drop("the run has ended")

    def pids(self) -> set[int]:
        """Its processes: none of them is a leftover."""
        return set(self.attempt.tree.refresh()) if self.attempt is not None else set()

    def summary(self) -> dict[str, Any]:
        """For status.json: "state" (none, starting, ready), "pid", "memory_bytes", "reason" (why there is none)."""
        if self.attempt is None:
            return {"state": "none", "pid": None, "memory_bytes": 0, "reason": self.off}
        state, used = "ready" if self.ready else "starting", platform.private_bytes(*self.attempt.tree.members)
        return {"state": state, "pid": self.attempt.pid, "memory_bytes": used, "reason": ""}
