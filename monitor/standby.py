"""The standby attempt: the next attempt, started early, which waits at the gate (guards/gate.py) with everything imported.

Starting Python and importing a trainer's libraries takes seconds and is the same for each attempt. So once a run makes steps, the
monitor starts the next attempt's script with a stand-in for the state to resume from. When the attempt that trains fails,
it gets the state in a message and goes on; when the failure changes the script, it is dropped, and a cold start follows.

Decision: it is an `Attempt` from the beginning, with a token and a private folder of its own, so that everything that watches,
adopts and kills attempts works for it once it is released. Until then only this file knows it. It holds the reading end of a pipe
whose writing end only the monitor has: however the monitor dies, the standby ends by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from guards import gate, memory
from monitor import config
from monitor.attempt import Attempt, AttemptView
from monitor.process import platform, tree
from monitor.process.tree import KillResult
from monitor.resume.script import STAND_IN
from monitor.run_folder import TRAINING_LOG, RunFolder

LOOK_S = 5.0  # between two looks at its processes and at the free memory
IDLE_CORES = 0.005  # with less of a processor than this, an import does not go on
REST_S = 60.0  # before the next try, once memory was short
AT_MOST_BYTES = 4 << 30  # what the imports of a trainer need; a training holds its model and data beside them
OUTPUT = "output"  # what it prints before it is released; then it goes into training.log
NEVER = {
    "standby": "turned off in the limits (standby = false)",
    "system": "only Linux has what it needs",
    "foreign": "the script is not one of Hangproof's",
    "edited": "the script was edited, and what it does before the training is not known",
    "several": "several processes train together, and their launcher starts them",
    "save_dir": "the script copies its results when it ends",
}


def never(folder: RunFolder, limits: config.Standby) -> str:
    """Why this run has no standby attempt, as a key of NEVER; "" when it can have one."""
    spec = folder.spec
    reasons = {
        "standby": not limits.tries_count,
        "system": not platform.LINUX,
        "foreign": folder.foreign,
        "edited": "edited" in spec,
        "several": int(spec.get("gpus", 1)) * int(spec.get("nodes", 1)) > 1,
        "save_dir": bool(spec.get("save_dir")),
    }
    return next((key for key, applies in reasons.items() if applies), "")


class Standby:
    """The standby attempt of one run, or why there is none."""

    def __init__(self, folder: RunFolder, limits: config.Standby, end: config.Ending):
        self.folder = folder
        self.limits = limits
        self.end = end
        self.off = NEVER.get(never(folder, limits), "")
        self.attempt: Attempt | None = None
        self._for_ever = bool(self.off)
        self._text = ""  # of its script
        self._writer = -1  # the end of the pipe that opens the gate
        self._failed_count = 0
        self._look_s = self._rest_s = -1e9
        self._ready = False
        self._begun_s = 0.0
        self._looks: deque[tuple[float, float]] = deque(maxlen=2)  # (when, seconds of processor time) of the last two
        self._bytes = 0
        self._short = False  # memory was

    # ---- while the run is steady ----

    def tick(self, view: AttemptView, trains: Attempt, text: str, inherit: tuple[int, ...]) -> None:
        """Start the standby, or look after it. Called while the run makes progress.

        Args:
            trains: the attempt that trains. text: the next attempt's script with the stand-in, "" while that is not
                prepared; inherit: descriptors that an attempt keeps open.
        """
        now_s = view.moment.mono_s
        if self._for_ever or now_s < self._rest_s:
            return
        if self.attempt is not None:
            if text and text != self._text:
                self.drop("the next attempt's script has changed")
            elif now_s - self._look_s >= LOOK_S or self._became_ready():
                self._look_s = now_s
                self._look_after(now_s)
        elif text and max((b.count for b in view.beats), default=0) >= self.limits.steps_count:
            self._begin(trains, text, inherit, now_s)

    def _begin(self, trains: Attempt, text: str, inherit: tuple[int, ...], now_s: float) -> None:
        used = sum(platform.private_bytes(pid) for pid in trains.tree.members)
        if self._is_short(min(used, AT_MOST_BYTES) + self.limits.reserve_bytes, now_s):
            return
        reader, writer = os.pipe()
        try:
            attempt = Attempt.prepare(self.folder, trains.record.number + 1, platform.now(), {})
            self.attempt, self._writer, self._text, self._bytes = attempt, writer, text, 0
            script = attempt.heartbeats / f"train.attempt-{attempt.record.number}.sh"
            script.write_text(text, encoding="utf-8", errors="surrogateescape")
            stand_in = str(self.folder.folder / STAND_IN)
            variables = {gate.VARIABLE: str(reader), gate.STAND_IN: stand_in, gate.NO_CONTEXT: "1"}
            attempt.spawn(script, attempt.heartbeats / OUTPUT, variables, (*inherit, reader))
            self.off, self._look_s, self._begun_s, self._ready = "", now_s, now_s, False
            self._looks.clear()
            self._looks.append((now_s, 0.0))
        except OSError as error:
            self._failed(f"it cannot be started: {error.strerror or error}")
        finally:
            os.close(reader)

    def _became_ready(self) -> bool:
        """Whether it has arrived at the gate since the last call: from now on its memory stays the same."""
        before, self._ready = self._ready, self.attempt is not None and _at_gate(self.attempt)
        return self._ready and not before

    def _look_after(self, now_s: float) -> None:
        """Is it alive, and is there memory for it?"""
        attempt = self.attempt
        assert attempt is not None
        members = attempt.tree.refresh()
        for pid in members:
            platform.kill_first(pid, True)  # short of memory, the kernel kills it and not the training
        self._bytes = sum(platform.private_bytes(pid) for pid in members)
        self._looks.append((now_s, sum(process.cpu_s for process in members.values())))
        if not members:
            self._failed(f"it ended by itself: {self._last_line() or 'without a message'}")
        elif not self._ready and now_s - self._begun_s >= self.limits.start_s:
            self._failed(f"its imports took more than {self.limits.start_s:g} s")
        elif self._is_short(self.limits.reserve_bytes // 2, now_s):
            self.drop(self.off)

    def _is_short(self, needed: int, now_s: float) -> bool:
        """Whether less memory is free than that; says so and waits before the next try."""
        free = memory.available_bytes()
        short = free is not None and free < needed
        if short:
            self._rest_s = now_s + REST_S
            self.off = f"memory is short: {(free or 0) / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed"
            if not self._short:
                self.folder.log(f"no standby attempt: {self.off}")
        self._short = short
        return short

    def _failed(self, reason: str) -> None:
        """It could not be started, or died: tried again, a few times in a row."""
        self._failed_count += 1
        self._rest_s = platform.now().mono_s + LOOK_S
        self._for_ever = self._failed_count >= self.limits.tries_count
        self.drop(f"{reason} ({self._failed_count} times)" if self._for_ever else reason)

    @property
    def imports(self) -> bool:
        """Whether it is on its way to the gate, which takes processor time from the training beside it."""
        return self.attempt is not None and not self._ready

    def _stands_still(self, members: Mapping[int, platform.ProcessInfo]) -> bool:
        """Whether its imports have used next to no processor time in the last 5 to 10 s: it hangs, and never arrives."""
        since_s, cpu_s = self._looks[0]
        elapsed_s = platform.now().mono_s - since_s
        used_s = sum(process.cpu_s for process in members.values()) - cpu_s
        return elapsed_s >= LOOK_S and used_s < IDLE_CORES * elapsed_s

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            assert self.attempt is not None
            lines = (self.attempt.heartbeats / OUTPUT).read_text("utf-8", "replace").strip().splitlines()
            return lines[-1][:300] if lines else ""
        return ""

    def kill_orphans(self, trains: Attempt) -> None:
        """Kill what a killed monitor left of its standby. One at the gate ends by itself, but not one that hangs on the way.

        trains: the attempt that has been adopted. OSError: the processes of this machine cannot be read.
        """
        variable = f"{gate.VARIABLE}=".encode()
        left = {p.pid: p for p in tree.with_environment(tree.RUN, str(self.folder.folder))}
        left = {pid: p for pid, p in left.items() if pid not in trains.tree.members}
        left = {pid: p for pid, p in left.items() if variable in platform.environ_of(pid)}
        if left:
            tree.kill(tree.Tree("", members=left), 0.0, self.end.kill_wait_s)

    # ---- a failure ----

    def pids(self) -> set[int]:
        """Its processes: none of them is a leftover."""
        return set(self.attempt.tree.refresh()) if self.attempt is not None else set()

    def take(self, number: int, script: Path, resume: Path | None) -> Attempt | None:
        """The standby when it waits for exactly this script; else it is dropped, and the result is None.

        Raises:
            OSError: it cannot be dropped: one of its processes does not die.
        """
        attempt = self.attempt
        if attempt is None:
            return None
        if resume is None or attempt.record.number != number:
            reason = "the training starts over" if resume is None else "another attempt came between"
        elif self._text.replace(str(self.folder.folder / STAND_IN), str(resume)).rstrip() != _read(script).rstrip():
            reason = "the failure changes the script"
        elif not (members := attempt.tree.refresh()):
            reason = f"it ended by itself: {self._last_line() or 'without a message'}"
        elif not _at_gate(attempt) and self._stands_still(members):
            reason = "it hangs in its imports"
        else:
            return attempt
        result = self.drop(reason)
        if result is not None and result.survivors:
            raise OSError(f"the standby attempt (pid {result.survivors[0].pid}) cannot be killed")
        return None

    def release(self, attempt: Attempt, script: Path, resume: Path, variables: Mapping[str, str], pause: Any) -> bool:
        """Let the standby train; False when it does not answer at the gate: then it was killed.

        One that still imports gets the message as well, and is watched from now on like any attempt: it is ahead of a
        cold start by all that it has imported already.

        Args:
            script: the script that it stands for; variables: more of its environment. pause(seconds): waits.

        Raises:
            OSError: it does not answer, and cannot be killed.
        """
        self.attempt = None
        waits = _at_gate(attempt)
        log = self.folder.folder / TRAINING_LOG
        environment = {**variables, "HANGPROOF_RESUME": str(resume)}
        try:
            attempt.announce(script, resume, before=_read_bytes(attempt.heartbeats / OUTPUT))
            for pid in attempt.tree.members:
                platform.kill_first(pid, False)
            os.write(self._writer, gate.message(str(resume), environment, str(log)))
        except OSError as error:  # it died a moment ago
            self.folder.log(f"the standby attempt does not take its message: {error.strerror or error}")
            waits, until_s = True, 0.0
        else:
            until_s = platform.now().mono_s + self.limits.gate_s
        self._close_pipe()
        while waits and not (attempt.heartbeats / gate.PASSED).exists():
            if platform.now().mono_s >= until_s:
                result = attempt.kill(0.0, self.end.kill_wait_s)
                if result.survivors:
                    raise OSError(f"the standby attempt (pid {result.survivors[0].pid}) cannot be killed")
                attempt.close()
                self.folder.log(f"the standby attempt did not go on within {self.limits.gate_s:g} s; it was killed")
                return False
            pause(0.02)
        self._failed_count = 0
        return True

    def drop(self, reason: str) -> KillResult | None:
        """Kill the standby, if there is one."""
        attempt, self.attempt, self.off = self.attempt, None, reason
        self._close_pipe()
        if attempt is None:
            return None
        self.folder.log(f"the standby attempt is dropped: {reason}")
        result = attempt.kill(0.0, self.end.kill_wait_s)
        attempt.close()
        return result

    def close(self) -> None:
        """The run has ended, or its monitor does."""
        self._for_ever = True
        if self.attempt is not None:
            self.drop("the run has ended")

    def _close_pipe(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
        self._writer = -1

    def summary(self) -> dict[str, Any]:
        """For status.json: "state" (none, starting, ready), "pid", "memory_bytes", "reason" (why there is none)."""
        if self.attempt is None:
            return {"state": "none", "pid": None, "memory_bytes": 0, "reason": self.off}
        state = "ready" if self._ready else "starting"
        return {"state": state, "pid": self.attempt.pid, "memory_bytes": self._bytes, "reason": ""}


def _at_gate(attempt: Attempt) -> bool:
    return (attempt.heartbeats / gate.READY).exists()


def adopted(attempt: Attempt, log_start: int, oom_kills: dict[str, int]) -> Attempt:
    """A standby as the attempt that is about to train: its record, with the log and the counters of now."""
    now_s = platform.now().mono_s
    attempt.record = replace(attempt.record, log_start=log_start, started_s=now_s, oom_kills=oom_kills)
    return attempt


def _read(path: Path) -> str:
    return _read_bytes(path).decode("utf-8", "surrogateescape")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
