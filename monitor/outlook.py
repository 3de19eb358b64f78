"""What the run looks like from outside: `status.json`, the events of its phases, the learned durations that are kept."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from guards import checkpoint
from guards.heartbeat import Beat
from guards.metrics import append_line
from monitor import book, clock, gpu

if TYPE_CHECKING:
    from monitor.core import Core

EVERY_S = 1.0
CHECKPOINTS_S = 5.0
GPU_S = 30.0


class Outlook:
    """Writes; decides nothing."""

    def __init__(self, run: Core):
        self.run = run
        self.learned: dict[str, dict] = {}
        self._phases: set[str] = set()
        self._phase = ""
        self._written_s = self._looked_s = self._gpu_s = -1e9
        self._progress_mono: float | None = None
        self._progress_utc: str | None = None
        self._states: dict[str, int] | None = None  # name -> step
        self._checkpoint: dict | None = None

    def attached(self) -> None:
        """An attempt begins: its phases are told anew, and what runs of its kind taught is looked up."""
        self._phases.clear()
        self._phase = ""
        self._progress_mono = None
        if not self.learned and not self.run.files.foreign:
            self.learned = book.learned(self._store(), self._key())

    def phases(self, beats: list[Beat]) -> None:
        """An event for every phase that is entered for the first time, except those that come and go all the time."""
        if not beats:
            return
        first = beats[0]
        if first.phase != self._phase:
            self._phase = first.phase
            if first.phase not in self._phases:
                self._phases.add(first.phase)
                total = f", {first.total} items" if first.total else ""
                self.run.files.event("phase", f"{first.phase}{total}", phase=first.phase, step=first.step)

    def write(self, force: bool = False) -> None:
        """status.json, once a second or when something has changed."""
        now = clock.now()
        if not force and now.mono_s - self._written_s < EVERY_S:
            return
        self._written_s = now.mono_s
        self.run.notifier.poll()
        if force or now.mono_s - self._looked_s >= CHECKPOINTS_S:
            self._looked_s = now.mono_s
            self._checkpoints()
        if now.mono_s - self._gpu_s >= GPU_S:
            self._gpu_s = now.mono_s
            self._gpu(now)
        self.run.files.status(self.values(now))

    def values(self, now: clock.Moment) -> dict:
        """The status as the contract with the page names it."""
        run = self.run
        beat = run.beats[0] if run.beats else None
        step = max([b.step for b in run.beats] or [run.book.best_step]) or run.book.resumed_step
        step_s = run.watch.step_s()
        left = run.book.planned - step
        under_way = run.attempt is not None and run.state in ("starting", "running", "suspect", "slow", "stopping")
        if under_way and run.watch.ranks:
            moved = run.watch.last_progress_s()
            if moved != self._progress_mono:
                self._progress_mono = moved
                self._progress_utc = clock.utc(now.wall_s - (now.mono_s - moved))
        return {
            "version": 1,
            "name": run.files.name,
            "folder": str(run.files.folder),
            "state": run.state,
            "phase": beat.phase if beat and under_way else None,
            "phase_done": beat.done if beat and under_way else 0,
            "phase_total": beat.total if beat and under_way else 0,
            "note": beat.note if beat and under_way else "",
            "step": step,
            "planned_steps": run.book.planned,
            "epoch": beat.epoch if beat else 0,
            "loss": beat.loss if beat and math.isfinite(beat.loss) else None,
            "step_s": round(step_s, 4) or None,
            "eta_s": round(left * step_s, 1) if step_s and left > 0 and under_way else None,
            "attempt": run.book.attempt,
            "restarts": run.book.restarts,
            "pid": run.attempt.pid if under_way else None,  # the script's shell
            "trainer_pids": [b.pid for b in run.beats] if under_way else [],  # the training itself, by rank
            "monitor_pid": os.getpid(),
            "started_at": run.book.started_at,
            "updated_at": now.utc,
            "last_progress_at": self._progress_utc,
            "message": run.message,
            "incidents": sum(1 for p in (run.files.folder / "incidents").glob("*") if p.name.isdigit()),
            "checkpoint": self._checkpoint,
            "lora": str(run.files.lora) if run.files.lora else None,
            "reason": run.book.reason,
            "changes": [c["sentence"] for c in run.book.changes],
        }

    def keep_learned(self) -> None:
        """The run completed: what it taught helps the next one of its kind."""
        if self.run.files.foreign:
            return
        try:
            book.learn(self._store(), self._key(), self.run.watch.learned())
        except OSError as error:
            self.run.files.log(f"learned durations are not kept: {error}")

    def _checkpoints(self) -> None:
        folder = self.run.files.folder
        try:
            names = {name for name in os.listdir(folder) if name.endswith("-state") and not name.startswith(".")}
        except OSError:
            return  # the folder is gone, or its disk does not answer: the next look tells
        first, old = self._states is None, self._states or {}
        self._states = {name: old[name] for name in names & old.keys()}
        for name in names - self._states.keys():
            guard = checkpoint.guard_of(folder / name)
            if guard is not None:  # without one it is being written, or never was
                self._states[name] = guard["step"]
        newest = max(self._states, key=lambda name: (self._states[name], name), default=None)
        step = self._states.get(newest, 0)
        self._checkpoint = {"path": str(folder / newest), "step": step} if newest else None
        if newest is not None and newest not in old and not first:
            self.run.files.event(
                "checkpoint", f"checkpoint of step {step}: {newest}", step=step, path=str(folder / newest)
            )

    def _gpu(self, now: clock.Moment) -> None:
        for i, reading in enumerate(self.run.gpus.read()):
            values = {k: v for k, v in reading.items() if k not in ("pids", "spill")}
            try:
                append_line(self.run.files.folder / "metrics.jsonl", {"kind": "gpu", "t": now.utc, "gpu": i, **values})
            except OSError as error:
                self.run.files.log(f"metrics.jsonl: {error.strerror}")

    def _store(self) -> Path:
        from runs.paths import data_root

        return data_root() / "outputs" / ".learned.json"

    def _key(self) -> str:
        return book.learned_key(self.run.files.spec, gpu.model())
