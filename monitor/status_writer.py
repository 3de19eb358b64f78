"""Writes what the page and the command line read: `status.json`, the events of phases and checkpoints, GPU samples; and
has messages sent to people (cli/notify.py).

The machine's figures (GPU, processor, memory, free disk) are read every MACHINE_S seconds; a second's write copies
them.

Decides nothing, and a reading that fails costs that reading: the next one is at most a few seconds away.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from guards.checkpoint import append_line
from guards.heartbeat import Beat
from monitor import gpu
from monitor.attempt import Attempt
from monitor.detect.probe import Missing, Sample, growths, take
from monitor.process import platform
from monitor.process.platform import Moment
from monitor.process.spawned import Subjob, python
from monitor.recovery import Run
from monitor.resume import checkpoints
from monitor.run_folder import METRICS, machines, notify_file
from monitor.state import State

EVERY_S = 1.0
CHECKPOINTS_S = 5.0
GPU_S = 30.0
MACHINE_S = 5.0
MESSAGE_S = 60.0  # for a message to leave
GPU_KEYS = ("name", "utilization", "memory_used", "memory_total", "temperature", "power_w")
ACTIVE = (State.STARTING, State.RUNNING, State.SUSPECT, State.SLOW, State.STOPPING)


class StatusWriter:
    """One for a run. `parent_pid`: the process that restarts this monitor when it is killed."""

    def __init__(self, run: Run, parent_pid: int | None):
        self.run, self.parent_pid = run, parent_pid
        self._phases: set[str] = set()  # entered in this attempt
        self._written_s = self._checkpoints_s = self._gpu_s = self._machine_s = -1e9
        self._machine: dict[str, Any] = {}
        self._sample = Sample(0.0)  # of the attempt's processes
        self._progress_utc: str | None = None
        self._states: dict[Path, int] | None = None  # the complete ones, with their steps
        self._checkpoint: dict[str, object] | None = None

    def new_attempt(self) -> None:
        """Report the phases of a new attempt from the beginning."""
        self._phases.clear()

    @property
    def steps(self) -> bool:
        """Whether this attempt makes steps, or has made some."""
        return not self._phases.isdisjoint(("first_step", "step"))

    def note_phase(self, beats: Sequence[Beat]) -> None:
        """An event for every phase that is entered for the first time in this attempt."""
        if beats and beats[0].phase not in self._phases:
            first = beats[0]
            self._phases.add(first.phase)
            total = f", {first.total} items" if first.total else ""
            self.run.folder.event("phase", f"{first.phase}{total}", phase=first.phase, step=first.step)

    def write(self, force: bool) -> bool:
        """Replace status.json, once a second or when `force`; False when it could not be written."""
        run, now = self.run, platform.now()
        state = run.at.state
        if not force and now.mono_s - self._written_s < EVERY_S:
            return True
        self._written_s = now.mono_s
        if force or now.mono_s - self._checkpoints_s >= CHECKPOINTS_S:
            self._checkpoints_s = now.mono_s
            if self._note_checkpoints() and state in ACTIVE:
                run.state.save(run.folder)  # its ledger: after a power cut, no later status may be left
        attempt = run.attempt if state in ACTIVE else None
        if now.mono_s - self._machine_s >= MACHINE_S:
            self._machine_s = now.mono_s
            self._machine = self._sample_machine(now, attempt)
        if attempt and run.watch.ranks:
            self._progress_utc = platform.utc(now.wall_s - (now.mono_s - run.watch.last_progress_s()))
        saved, folder, beats = run.state, run.folder, run.view.beats if run.view else []
        beat = beats[0] if beats else None
        current = beat if attempt else None
        step = max([b.step for b in beats] or [saved.best_step]) or saved.resumed_step
        step_s, left = run.watch.step_s(), saved.planned - step
        others = {"host": socket.gethostname(), "machines": machines(folder.folder)} if run.several else {}
        values: dict[str, Any] = {  # the keys are the contract with the page
            "version": 1,
            "name": folder.name,
            "folder": str(folder.folder),
            "state": State.QUEUED if state is State.OPENING else state,
            "phase": current.phase if current else None,
            "phase_done": current.done if current else 0,
            "phase_total": current.total if current else 0,
            "note": current.note if current else "",
            "step": step,
            "planned_steps": saved.planned,
            "epoch": beat.epoch if beat else 0,
            "loss": beat.loss if beat and math.isfinite(beat.loss) else None,
            "step_s": round(step_s, 4) or None,
            "eta_s": round(left * step_s, 1) if step_s and left > 0 and attempt else None,
            "attempt": saved.attempt,
            "restarts": saved.restarts,
            "pid": attempt.pid if attempt else None,  # the script's shell
            "trainer_pids": [b.pid for b in beats] if attempt else [],
            "monitor_pid": os.getpid(),
            "keeper_pid": self.parent_pid,
            "started_at": saved.started_at,
            "elapsed_s": round(saved.ledger.wall_s - saved.ledger.seconds["waiting"], 1),
            "ledger": asdict(saved.ledger),
            "devices": run.queue.devices,  # the GPUs that this run queues for
            **self._machine,
            "updated_at": now.utc,
            "updated_mono_s": round(now.mono_s, 3),  # with the boot, its age does not depend on the wall clock
            "boot": platform.boot_id()[:8],
            "last_progress_at": self._progress_utc,
            "message": run.at.message,
            "incidents": len(folder.incident_numbers()),
            "checkpoint": self._checkpoint,
            "lora": str(folder.lora) if folder.lora else None,
            "reason": saved.reason,
            "changes": [c["sentence"] for c in saved.changes],
            "slow": run.slow or None,
            **others,
            "standby": run.standby.summary(),  # the next attempt, started early
            "store": run.store.summary() if run.store else None,
            "snapshots": checkpoints.memory_summary(saved.snapshots, saved.snapshots_off),  # None where there are none
        }
        saved.save_again(folder)
        return folder.write_status(values)

    def _note_checkpoints(self) -> bool:
        """The newest checkpoint with its guard file; an event for a new one, and True."""
        try:
            found = checkpoints.states([self.run.folder.folder])
        except OSError:
            return False
        known, self._states = self._states, {path: step for path, step in found.items() if step >= 0}
        newest, step = next(iter(self._states.items()), (None, 0))
        self._checkpoint = {"path": str(newest), "step": step} if newest else None
        if newest is None or known is None or newest in known:
            return False
        self.run.folder.event("checkpoint", f"checkpoint of step {step}: {newest.name}", step=step, path=str(newest))
        return True

    def _sample_machine(self, now: Moment, attempt: Attempt | None) -> dict[str, Any]:
        """What the run uses: {"gpus", "cpu_cores", "memory_bytes", "disk_free"}; None for what is not known."""
        readings, folder, disk_free = self.run.gpus.read(), self.run.folder, None
        if now.mono_s - self._gpu_s >= GPU_S:
            self._gpu_s = now.mono_s
            for i, reading in enumerate(readings):
                values = {k: v for k, v in reading.items() if k not in ("pids", "spill", "uuid", "use")}
                try:
                    append_line(folder.own / METRICS, {"kind": "gpu", "t": now.utc, "gpu": i, **values})
                except OSError as error:
                    folder.log(f"metrics.jsonl: {error.strerror}")
        before, self._sample = self._sample, take(attempt.tree.keys(), Missing()) if attempt else Sample(0.0)
        used_s = growths(before, self._sample, "cpu_s")
        with contextlib.suppress(OSError):
            disk_free = shutil.disk_usage(folder.folder).free
        own = gpu.own(readings, self.run.queue.devices)
        return {
            "gpus": [{key: reading[key] for key in GPU_KEYS if key in reading} for reading in own],
            "cpu_cores": round(sum(used_s) / (self._sample.at_s - before.at_s), 2) if used_s else None,
            "memory_bytes": platform.private_bytes(*attempt.tree.members) or None if attempt else None,
            "disk_free": disk_free,
        }


# ---- messages to people ----


class Notifier:
    """The monitor's side: starts a subprocess for an event, and kills one that takes too long."""

    def __init__(self, name: str, log: Callable[[str], None]):
        self.name = name
        self._log = log
        self._path = os.fspath(notify_file())
        self._sending: list[tuple[str, Subjob]] = []

    def event(self, kind: str, message: str) -> None:
        """Send what the user asked for. Costs one file check where nothing is configured."""
        if not os.path.isfile(self._path):
            return
        text = json.dumps({"kind": kind, "title": f"{self.name}: {kind}", "body": message}).encode("utf-8")
        self._sending.append((kind, Subjob(python("monitor.cli.notify"), MESSAGE_S, stdin=text)))

    def poll(self, wait_s: float = 0.0) -> None:
        """Collect what is done; wait up to `wait_s` seconds for the rest (the last message of a run)."""
        until_s = time.monotonic() + wait_s
        while self._sending:
            for kind, job in [sending for sending in self._sending if sending[1].done()]:
                self._sending.remove((kind, job))
                if job.error:
                    said = job.text().strip()[:500] if job.code is not None and not job.timed_out else ""
                    self._log(f"notification of {kind}: {said or job.error}")
            if time.monotonic() >= until_s:
                return
            time.sleep(0.05)
