"""A run of a few steps that is watched until it ends, hangs or its time is over, in a data folder of its own that is removed.

The rehearsal uses it. Decision: the real script is started, and watched as the monitor watches, instead of checks of
files, drivers and ports: what fails does so in ways that no check lists. Nothing of it is left, and nothing of the run
is changed.

A data folder whose process was killed is removed by the next one, with the processes that it left behind.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launch.common import LaunchError
from monitor import config
from monitor.attempt import Attempt
from monitor.detect.probe import Probe
from monitor.detect.progress import Observation
from monitor.diagnose import causes, collect
from monitor.gpu.nvml import Gpus
from monitor.gpu.queue import GpuQueue
from monitor.process import platform, tree
from monitor.run_folder import SCRIPT, RunFolder
from runs import mitigate
from runs.paths import data_root
from runs.spec import RunSpec

POLL_S = 0.05
QUIET_S = 8.0  # without any change, and with evidence, it hangs; without evidence its ranks get three times as long
PY_SPY_S = 3.0
KILL_S = 5.0
LOG_BYTES = 65536
MEMORY_S = 0.5  # between two readings
ENCODING = ("cache_latents", "cache_text", "hash")
TRAINS, HANGS, FAILS, SLOW = "trains", "hangs", "fails", "slow"
SCRATCH = ".scratch"  # in the data folder, so that it is on the disk that the run writes to
_OWNER = re.compile(r"-(\d+)-([\d.]+)-")


@dataclass
class Result:
    """How a short run ended. outcome: TRAINS, HANGS, FAILS or SLOW (still working when its time was over).

    text: what was seen where it hangs or is slow, as sentences. cause: a row of causes.toml, None where it trains or is slow.
    phase: of guards/heartbeat.py, where it stopped. log: the end of its log.
    """

    outcome: str = SLOW
    text: str = ""
    cause: causes.Cause | None = None
    phase: str = ""
    steps: int = 0
    log: str = ""


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A data folder on the disk of the runs: HANGPROOF_DATA of this process names it, and it has the user's own base models.

    kind: begins its name. What killed processes left there is removed first.
    """
    before, models, parent = os.environ.get("HANGPROOF_DATA"), data_root() / "models.toml", data_root() / SCRATCH
    sweep(parent)
    parent.mkdir(parents=True, exist_ok=True)
    me = platform.process_info(os.getpid())
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-{me.start if me else 0}-", dir=parent))
    try:
        if models.is_file():
            shutil.copyfile(models, folder / "models.toml")
        os.environ["HANGPROOF_DATA"] = str(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another one is at work
            parent.rmdir()
        if before is None:
            os.environ.pop("HANGPROOF_DATA", None)
        else:
            os.environ["HANGPROOF_DATA"] = before


def owner_alive(run: Path) -> bool:
    """Whether a short run in progress trains in this folder, `…/NAME-PID-START-…/outputs/RUN`."""
    owner = _OWNER.search(run.parent.parent.name)
    return owner is not None and platform.alive(int(owner[1]), float(owner[2]))


def sweep(parent: Path) -> list[Path]:
    """Remove the folders of `scratch` whose process is gone, and kill what it left running. Returns their paths."""
    removed = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        owner = _OWNER.search(folder.name)
        if owner is None or platform.alive(int(owner[1]), float(owner[2])):
            continue
        for run in (folder / "outputs").glob("*"):
            left = tree.with_environment(tree.RUN, str(run))
            tree.kill(tree.Tree("", members={p.pid: p for p in left}), 0.0, KILL_S)
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return removed


def end_on_sigterm() -> None:
    """From now on SIGTERM leaves this process as Ctrl-C does: on the way out, what was started is killed."""

    def terminated(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminated)


@contextlib.contextmanager
def gpus_of(what: str, count: int) -> Iterator[GpuQueue]:
    """The GPUs of this machine that it uses, taken as a run takes them. LaunchError: another run has one of them."""
    queue = GpuQueue(what, {"gpus": count})
    try:
        if not queue.acquire():
            raise LaunchError(f"{queue.message}; try again when it is free")
        yield queue
    finally:
        queue.release()


def run(
    folder: Path,
    limit_s: float,
    see: Callable[[Attempt, Observation], None],
    inherit: tuple[int, ...],
    number: int = 1,
    program: Path | None = None,
    resume: Path | None = None,
) -> Result:
    """Start the run in `folder` and watch it until it ends, hangs, or `limit_s` seconds are over. Nothing of it lives on.

    Args:
        see: called at each poll. number: of the attempt, whose script is `program`, which continues from the state
        `resume`. inherit: descriptors that it keeps open.

    Raises OSError: it cannot be started.
    """
    attempt = Attempt.prepare(RunFolder(folder), number, platform.now(), collect.oom_kills())
    try:
        attempt.start(program or folder / SCRIPT, resume, inherit)
        return _Watch(RunFolder(folder), attempt).follow(time.monotonic() + limit_s, see)
    finally:
        attempt.kill(0.0, KILL_S)
        attempt.close()


class _Watch:
    """An attempt, what was seen of it last, and the evidence that is collected while nothing moves."""

    def __init__(self, folder: RunFolder, attempt: Attempt):
        self.folder, self.attempt = folder, attempt
        self.view = attempt.poll(platform.now(), 0.0)
        self.evidence: Probe | None = None

    def follow(self, until_s: float, see: Callable[[Attempt, Observation], None]) -> Result:
        """Follow the attempt until it ends, hangs or `until_s`, and describe what was seen."""
        limits, moved_s, last = config.load(), time.monotonic(), None
        try:
            while not self.view.ended and time.monotonic() < until_s:
                time.sleep(POLL_S)
                self.view = self.attempt.poll(platform.now(), 1.0)
                see(self.attempt, self.view)
                now_s, seen = time.monotonic(), self._progress()
                if seen != last:
                    moved_s, last = now_s, seen
                    self._drop_evidence()
                elif self.evidence is None and now_s - moved_s >= QUIET_S / 2:
                    self.evidence = Probe(self.attempt.tree, self.attempt.heartbeats, limits, lambda: ())
                    self.evidence.begin(self.view.beats, full=True)
                elif self.evidence and min(now_s - moved_s, 4 * (now_s - self.evidence.newest.at_s)) >= QUIET_S:
                    found = self.evidence.sample_again(self.view.beats, QUIET_S)
                    if found.stuck or self.view.stopped:
                        return self._hangs(self.evidence)
            if self.view.ended:
                return self._ended()
            # One rank computes for ever, or compiles: what has not moved for so long, and is not slow for a known reason, hangs.
            if self.evidence and time.monotonic() - moved_s >= 3 * QUIET_S and not self.evidence.signals.slow:
                return self._hangs(self.evidence)
            return self._result(SLOW, self._evidence(), text="It was still working when its time was over.")
        finally:
            self._drop_evidence()

    def _drop_evidence(self) -> None:
        if self.evidence is not None:
            self.evidence.close()
            self.evidence = None

    def _progress(self) -> object:
        """What changes while a run moves."""
        beats = [(b.pid, b.point, b.phase, b.done, b.step, b.outcome) for b in self.view.beats]
        return beats, self.view.log_bytes

    def _hangs(self, probe: Probe) -> Result:
        until_s = time.monotonic() + PY_SPY_S
        while probe.spy.poll() and time.monotonic() < until_s:
            time.sleep(0.05)
        found = self._evidence(probe.signals.stuck, probe.texts())
        return self._result(HANGS, found, causes.match(found), found.verdict().text)

    def _ended(self) -> Result:
        self.view = self.attempt.poll(platform.now(), 0.0, fresh=True)
        status = self.attempt.exit_status(self.view.beats)
        if status.done(foreign=False, killed=False):
            return self._result(TRAINS, self._evidence())
        found = collect.of_crash(self._scope(), status)
        return self._result(FAILS, found, causes.match(found))

    def _evidence(self, signs: tuple[str, ...] = (), stacks: Mapping[int, str] = {}) -> collect.Evidence:
        return collect.of_process(self._scope(), self.attempt.pid or 0, signs, dict(stacks))

    def _result(
        self, outcome: str, found: collect.Evidence, cause: causes.Cause | None = None, text: str = ""
    ) -> Result:
        steps = max((b.step for b in self.view.beats), default=0)
        return Result(outcome, text, cause, found.phase, steps, found.log_tail)

    def _scope(self) -> collect.Scope:
        return self.attempt.scope(self.view.beats, LOG_BYTES, best_step=self.view.step)


def link_image(path: Path, copy: Path) -> None:
    """Put an image and its caption at `copy`, without copying where the disk allows it."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    for file in (path, path.with_suffix(".txt")):
        if file.is_file():
            target = copy.with_suffix(file.suffix)
            try:
                os.link(file, target)
            except OSError:
                shutil.copyfile(file, target)


def what_to_change(spec: RunSpec, found: Result) -> str:
    """What a person can do about it, as sentences: the cause's advice, and the first setting that helps against it."""
    if found.cause is None:
        return ""
    for name in found.cause.ladder:
        changed, sentence = mitigate.apply(spec, name)
        if changed != spec and sentence:
            change = f"Change this setting: {sentence}."
            return f"{found.cause.advice} {change}".strip()
    return found.cause.advice


class Meter:
    """The measurements of one attempt or several; `memory` holds host_bytes and, with a GPU, those that begin with gpu."""

    def __init__(self, on_phase: Callable[[str, float], None] = lambda phase, at_s: None):
        """on_phase: called with each phase that the first rank enters, and when (monotonic seconds)."""
        self.memory: dict[str, Any] = {}
        self.intervals: tuple[float, ...] = ()  # seconds of the last steps
        self._on_phase = on_phase
        self._gpus = Gpus()
        self._memory_s = 0.0
        self._entered: tuple[int, str] = (0, "")
        self._items: dict[tuple[int, str], list[tuple[int, float]]] = {}

    def see(self, attempt: Attempt, view: Observation) -> None:
        """One observation."""
        now_s = time.monotonic()
        if now_s - self._memory_s >= MEMORY_S:
            self._memory_s = now_s
            self._measure_memory(attempt)
        first = next((beat for beat in view.beats if beat.rank == 0), None)
        if first is None:
            return
        items = self._items.setdefault((first.pid, first.phase), [])
        if not items or items[-1][0] != first.done:
            items.append((first.done, first.beat_s))
        self.intervals = first.intervals or self.intervals
        if (first.pid, first.phase) != self._entered:
            same = first.pid == self._entered[0]
            self._entered = (first.pid, first.phase)
            self._on_phase(first.phase, first.phase_s if same else now_s)

    def _measure_memory(self, attempt: Attempt) -> None:
        members, memory = attempt.tree.members, self.memory
        memory["host_bytes"] = max(memory.get("host_bytes", 0), sum(map(platform.private_bytes, members)))
        for gpu in self._gpus.read():
            used, total = int(gpu.get("memory_used") or 0), int(gpu.get("memory_total") or 0)
            # In a container the driver names no process, or those of another namespace: then all memory in use counts.
            memory.setdefault("gpu_before_bytes", used)
            if used > memory.get("gpu_bytes", 0):
                memory |= {"gpu_bytes": used, "gpu_total_bytes": total, "gpu": str(gpu.get("name", ""))}

    def image_s(self) -> float:
        """Seconds that each further image costs: from the first item to the last one, in each phase that encodes."""
        total = 0.0
        for (_, phase), items in self._items.items():
            counted = [(done, at_s) for done, at_s in items if done > 0]
            if phase in ENCODING and counted:
                (first, first_s), (last, last_s) = counted[0], counted[-1]
                total += (last_s - first_s) / (last - first) if last > first else 0.0
        return round(total, 4)

    def close(self) -> None:
        """End the helper process."""
        self._gpus.close()
