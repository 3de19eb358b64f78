"""One attempt: the script started in a session of its own, its processes, its heartbeats, and how it ended.

The script runs under a one-line shell that writes the script's exit code to a file at the end: a monitor that adopts a
living training is not its parent and could not ask for it. What is needed to adopt an attempt, the token that its
processes inherit, is written to monitor.json before the shell starts, so no kill of the monitor can leave a training
that nobody knows.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from guards import heartbeat, snapshot_files
from guards.heartbeat import Beat
from monitor.detect.probe import Missing, Sample, growths, take
from monitor.phrases import count
from monitor.process import platform, spawned
from monitor.process.platform import Moment, ProcessInfo
from monitor.process.spawned import MARKS, RUN, TOKEN, KillResult, Tree, kill
from monitor.run_folder import TRAINING_LOG, RunFolder
from monitor.state import AttemptRecord, ExitStatus, Observation

if TYPE_CHECKING:
    from monitor.recovery import Run

_WRAPPER = 'bash "$1"; code=$?; printf %s "$code" >"$2"; exit "$code"'
# of no use to a training
_OURS = (*MARKS, snapshot_files.RING, snapshot_files.SPEC, snapshot_files.LIMIT, "HANGPROOF_NOTIFY")
ACTIVE_CORES = 0.05  # processor cores that the script's processes use when they are at work
ACTIVE_BYTES_S = 16 * 1024  # bytes a second that they read and write


class Attempt:
    """The current training. Make one with `prepare` and `start` it, or `adopt` one."""

    def __init__(self, folder: RunFolder, record: AttemptRecord):
        self.folder = folder
        self.record = record
        self.tree = Tree(record.token, record.root)
        self.heartbeats = Path(record.heartbeats)
        self._popen: subprocess.Popen[bytes] | None = None
        self.beats: list[Beat] = []  # as they were read last
        self._start_times: dict[int, float] = {}  # rank's pid -> start time
        self._orphaned = False  # ranks outlived the script, so its exit code says nothing about them
        self._refreshed_s = self._sampled_s = -1e9
        self._activity = 0.0
        self._sample = Sample(0.0)  # of the processes that a script without ranks has left
        self._log_bytes = 0

    @classmethod
    def prepare(cls, folder: RunFolder, number: int) -> Attempt:
        """An attempt that has not started; its record can be saved. OSError: no private folder can be made."""
        heartbeats, token = str(platform.private_folder(folder.folder.name)), os.urandom(16).hex()
        known = folder.log_size(), platform.now().mono_s, None, platform.oom_kills()
        return cls(folder, AttemptRecord(platform.boot_id(), number, token, heartbeats, *known))

    @classmethod
    def adopt(cls, folder: RunFolder, record: AttemptRecord) -> Attempt | None:
        """The attempt that an earlier monitor recorded; None after a reboot. `tree.members` says what of it lives."""
        boot = platform.boot_id()  # "" off Linux, where a start that the monotonic clock has not reached yet tells it
        if (boot and record.boot_id and boot != record.boot_id) or record.started_s > time.monotonic():
            return None
        attempt = cls(folder, record)
        members = attempt.tree.refresh()
        if record.root is None and members:  # the monitor was killed while it started the script, whose shell is oldest
            attempt._set_root(next(iter(members.values())))
        return attempt

    def begins_now(self) -> None:
        """A standby attempt trains from now on: its time, its log and kills for lack of memory count from here."""
        log_start, now_s = self.folder.log_size(), platform.now().mono_s
        self.record = replace(self.record, log_start=log_start, started_s=now_s, oom_kills=platform.oom_kills())

    def announce(self, script: Path, resume: Path | None, before: str = "") -> None:
        """Begin this attempt's part of training.log; `before`: what it has printed so far. OSError: not writable."""
        header = f"=== {platform.now().utc} attempt {self.record.number}: {script.name}, from {resume or 'the start'}\n"
        with open(self.folder.own / TRAINING_LOG, "ab") as log:
            log.write((header + before).encode("utf-8", "replace"))

    def start(self, script: Path, output: Path, variables: Mapping[str, str], inherit: tuple[int, ...]) -> None:
        """Start `script` under the shell that records its end; it prints to the end of `output`.

        variables: more of its environment. inherit: descriptors that it keeps open. OSError: it cannot be started, and
        nothing runs.
        """
        env = {k: v for k, v in os.environ.items() if k not in _OURS} | dict(variables)
        env |= {RUN: str(self.folder.folder), TOKEN: self.record.token, "HANGPROOF_ATTEMPT": str(self.record.number)}
        env |= {"HANGPROOF_HEARTBEAT": str(self.heartbeats), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        command = ["cmd", "/c", f".\\{script.name}"]  # no path: cmd reads one with `(` or `&` as several words
        if not platform.WINDOWS:
            command = ["bash", "-c", _WRAPPER, "hangproof", str(script), str(self.heartbeats / "exit")]
        with open(output, "ab") as log:
            self._popen = platform.popen(command, log, cwd=self.folder.folder, env=env, pass_fds=inherit)
        # From here on a training runs: an error must not read as "not started". Without a root the token finds it.
        with contextlib.suppress(OSError, ValueError):
            process = platform.process_info(self._popen.pid)
            if process is not None:
                self._set_root(process)

    def _set_root(self, process: ProcessInfo) -> None:
        self.tree.root = (process.pid, process.start)
        self.record = replace(self.record, root=self.tree.root)

    @property
    def pid(self) -> int | None:
        """The script's shell."""
        return self.record.root[0] if self.record.root else (self._popen.pid if self._popen else None)

    def poll(self, now: Moment, tree_s: float, fresh: bool = False) -> Observation:
        """Observe the attempt: heartbeats, which ranks live, the log's size.

        tree_s: the age in seconds at which the list of processes is renewed. fresh: renew it now.
        """
        # A record that is being replaced, or that a kill has torn, cannot be read: the last one of its rank counts.
        known = {beat.rank: beat for beat in (*self.beats, *heartbeat.read_all(self.heartbeats))}
        beats = self.beats = [known[rank] for rank in sorted(known)]
        script_alive, living = self.script_alive(), self._living(beats)
        self._orphaned |= bool(living) and not script_alive
        if beats and not living and script_alive:
            self._measure_activity(now.mono_s)
        elif fresh or now.mono_s - self._refreshed_s >= tree_s:
            self.tree.refresh()
            self._refreshed_s = now.mono_s
        return Observation(
            now.mono_s,
            now.boot_s,
            tuple(beats),
            self.folder.log_size(),
            stopped=frozenset(p.pid for p in living if p.state == "T"),
            ranks_gone=bool(beats) and not living,
            activity=self._activity,
            dead=frozenset(b.pid for b in beats) - {p.pid for p in living},
            ended=not script_alive and not living,
        )

    def script_alive(self) -> bool:
        """Is the script's shell alive? Collects its exit code once it is not."""
        if self._popen is not None:
            return self._popen.poll() is None
        return self.record.root is not None and platform.alive(*self.record.root)

    def _living(self, beats: list[Beat]) -> list[ProcessInfo]:
        """The ranks that are alive. A process number that another process uses again does not count: its start time
        differs from the known one, or, for an adopted attempt whose ranks were never seen, it is not in the tree."""
        found = [p for beat in beats if (p := platform.process_info(beat.pid)) is not None and not p.dead]
        known = self._start_times.keys() | (self.tree.members.keys() if self._popen is None else {p.pid for p in found})
        return [p for p in found if p.pid in known and self._start_times.setdefault(p.pid, p.start) == p.start]

    def _measure_activity(self, now_s: float) -> None:
        """Once a second: do the processes that are left use a core, move bytes or write to the log?"""
        elapsed = now_s - self._sampled_s
        if elapsed < 1.0:
            return
        self._sampled_s = now_s
        before, log_before = self._sample, self._log_bytes
        self.tree.refresh()
        self._sample, self._log_bytes = take(self.tree.keys(), Missing()), self.folder.log_size()
        cpu_s, disk, copied = (sum(growths(before, self._sample, of)) for of in ("cpu_s", "disk_bytes", "copied_bytes"))
        changed = self._sample.processes.keys() - before.processes.keys() or self._log_bytes != log_before
        if changed or cpu_s / elapsed >= ACTIVE_CORES or (disk + copied) / elapsed >= ACTIVE_BYTES_S:
            self._activity += 1

    def exit_status(self, beats: Sequence[Beat]) -> ExitStatus:
        """How it ended, once it has."""
        code = self._popen.returncode if self._popen is not None else None
        with contextlib.suppress(OSError, ValueError):  # absent when the shell itself was killed
            code = int((self.heartbeats / "exit").read_text())
        code = None if self._orphaned else code
        number = None
        if code is not None and (code < 0 or 128 < code <= 192):
            number = -code if code < 0 else code - 128
        first = next((b for b in beats if b.local_rank == 0), None)
        if first is None:
            return ExitStatus(code, number, "", "", False)
        note = first.note if first.outcome != "running" else ""
        return ExitStatus(code, number, first.outcome, note, 0 < first.step >= first.planned)

    def log_tail(self, limit: int) -> str:
        """The last `limit` bytes that it has printed."""
        return self.folder.log_tail(self.record.log_start, limit)

    def request_stop(self) -> bool:
        """Ask every rank to save a checkpoint at the next step boundary and exit; False when no rank could be asked."""
        asked = False
        for beat in self.beats:
            with contextlib.suppress(OSError):
                heartbeat.set_request(heartbeat.path_of(self.heartbeats, beat.rank), heartbeat.REQUEST_STOP)
                asked = True
        return asked

    def kill(self, grace_s: float, kill_wait_s: float) -> KillResult:
        """Kill whatever is left of the attempt; the ranks at once: they had their time to save, or hang."""
        result = kill(self.tree, grace_s, kill_wait_s, at_once=[b.pid for b in self.beats])
        self.script_alive()
        return result

    def close(self) -> None:
        """Remove its private folder. Only once all its processes are gone."""
        self.script_alive()
        platform.drop_private(self.heartbeats)


class Unkillable(Exception):
    """Processes that SIGKILL did not end: no second writer may start while they live."""

    def __init__(self, processes: Sequence[ProcessInfo]):
        super().__init__(", ".join(f"{p.name} ({p.pid})" for p in processes))


def kill_processes(run: Run, attempt: Attempt, times_s: tuple[float, float] | None = None) -> KillResult:
    """Kill what is left of the attempt and wait until its GPU memory is free, all within `run.remaining_s()`.

    times_s: the grace, and the wait for the end; by default those after a failure. Raises Unkillable: one lives on.
    """
    grace_s, kill_wait_s = times_s or (run.config.end.grace_s, run.config.end.kill_wait_s)
    left_s = run.remaining_s()
    result = attempt.kill(min(grace_s, left_s), min(kill_wait_s, max(1.0, left_s - grace_s)))
    run.queue.acquire()  # an adopted training had the GPU's lock: no other run takes it before the restart
    if result.killed:
        names = ", ".join(f"{p.name} ({p.pid})" for p in result.killed)
        run.folder.event("killed", f"killed {count(len(result.killed), 'process')} in {result.took_s:.1f} s: {names}")
        timeout_s = min(run.config.end.gpu_memory_s, run.remaining_s())
        if held := run.gpus.wait_free({p.pid for p in result.killed}, timeout_s):
            run.folder.log(f"the GPU still holds memory of killed processes: {sorted(held)}")
    if run.incident is not None and run.state.failing:
        known = {p["pid"] for p in run.incident.killed}
        run.incident.killed += [{"name": p.name, "pid": p.pid} for p in result.killed if p.pid not in known]
        if result.survivors:
            run.incident.save(run.folder)
    if result.survivors:
        raise Unkillable(result.survivors)
    return result


def kill_leftovers(run: Run, living: Attempt | None = None) -> None:
    """Kill every process that an earlier attempt left, and the standby of a killed monitor. living: is spared.

    Raises:
        Unkillable: one lives on.
        OSError: the processes of this machine cannot be read; then nothing may be started.
    """
    # Again until none is found: one may be forked between the search and its parent's death.
    while left := _leftovers(run, living):
        names = ", ".join(f"{p.name} ({p.pid})" for p in left.values())
        run.folder.event("killed", f"killing what an earlier attempt left: {names}")
        result = spawned.kill(Tree("", members=left), run.config.end.grace_s, run.config.end.kill_wait_s)
        if result.survivors:
            raise Unkillable(result.survivors)


def _leftovers(run: Run, living: Attempt | None) -> dict[int, ProcessInfo]:
    left = {p.pid: p for p in spawned.with_environment(spawned.RUN, str(run.folder.folder))}
    recorded = Attempt.adopt(run.folder, run.state.current) if run.state.current and living is None else None
    left |= recorded.tree.members if recorded else {}
    spared = run.standby.pids() | set(living.tree.refresh() if living else ())
    return {pid: process for pid, process in left.items() if pid not in spared}
