"""Evidence on a run without progress: stacks of its threads, samples of its processes, and what two samples prove
together.

Decision: evidence never decides alone. CPU at 0 % or GPU at 100 % prove nothing; they confirm a standstill that already
lasts (`stuck`), or show that the run moves slowly (`slow`) and should be left alone.

A probe begins at half of T. At T the second sample is compared with the first, and every later one with an earlier one:
a run that gets stuck after a slow stretch is found, and one that moves is left alone. Whatever cannot be read (no
/proc/vmstat or /proc/diskstats in gVisor, EIO, no memory for py-spy) is named in `missing` and proves nothing.

Stacks come from two sources that still work when a process is stuck. faulthandler (SIGUSR2, registered by the guards)
is C code: it answers while another thread holds the GIL, but it shows no C frames, and only guarded processes have it.
py-spy reads memory from outside: it shows any Python process, needs the right to do so (ptrace), and runs with
`--nonblocking`, because a stop of a process in uninterruptible sleep would stop py-spy too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomllib

from guards.heartbeat import Beat, stacks_path
from guards.reading import read_bytes
from monitor.config import Config
from monitor.process import platform
from monitor.process.platform import ProcessInfo
from monitor.process.spawned import Subjob, Tree
from monitor.state import Signals, Verdict

COMPLETE_S = 0.05  # a dump that has not grown for this long is complete
MAX_BYTES = 1 << 20  # of a stacks file
T = TypeVar("T")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$')
_SPY_FRAME = re.compile(r"^    (?P<name>\S+) \((?P<file>.+?):(?P<line>\d+)\)$")  # py-spy: `    wait (threading.py:327)`


def dump(heartbeats: Path, processes: Iterable[tuple[int, float]], wait_s: float) -> dict[int, str]:
    """The stacks of every thread of these (pid, start), by pid, from SIGUSR2 to all of them at once.

    Left out: a process that has no stacks file or does not catch SIGUSR2 (it would die of the signal), one that is
    stopped or in uninterruptible sleep, and one that does not answer within `wait_s`.
    """
    waiting: dict[int, tuple[int, int, float]] = {}  # pid -> size of its file before the signal, and now, seen since
    for pid, start in processes:
        before, process = _try(os.path.getsize, stacks_path(heartbeats, pid)), _try(platform.process_info, pid)
        if sys.platform == "win32" or before is None or process is None or process.state in "TtD":
            continue
        if platform.catches(pid, signal.SIGUSR2) and _try(platform.send, pid, start, signal.SIGUSR2):
            waiting[pid] = (before, before, time.monotonic())
    found: dict[int, str] = {}
    deadline_s = time.monotonic() + wait_s
    while waiting and (now_s := time.monotonic()) < deadline_s:
        for pid, (before, seen, since_s) in list(waiting.items()):
            path = stacks_path(heartbeats, pid)
            size = _try(os.path.getsize, path)
            if size is None:
                del waiting[pid]  # the file was removed with its run
            elif size != seen:
                waiting[pid] = (before, size, now_s)
            # It writes thread by thread, the main thread last: on a busy machine the text pauses in between.
            elif size > before and now_s - since_s >= COMPLETE_S:
                del waiting[pid]
                if text := _try(_read, path, before):
                    found[pid] = text
        time.sleep(0.005)
    return found


def _try(function: Callable[..., T], *args: object) -> T | None:
    """function(*args), None when it raises an OSError."""
    try:
        return function(*args)
    except OSError:
        return None


def _read(path: Path, begin: int = 0) -> str:
    """The text of a file from this byte on, of its last megabyte at most."""
    with open(path, "rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - MAX_BYTES))
        return file.read(MAX_BYTES).decode("utf-8", "replace")


def fatal_dump(heartbeats: Path, pid: int) -> str:
    """What a fatal signal left in the stacks file of `pid`, behind the dumps of false suspicions; "" without one."""
    text = _try(_read, stacks_path(heartbeats, pid)) or ""
    begin = text.rfind("Fatal Python error: ")
    return text[begin:] if begin >= 0 else ""


class Frame(NamedTuple):
    """One frame of a stack; as text `wait (threading.py:327)`."""

    function: str
    path: str
    line: int

    @property
    def name(self) -> str:
        """`threading.py:wait`: what the causes are matched on."""
        return f"{Path(self.path).name}:{self.function}"

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.path).name}:{self.line})"


def frames(text: str) -> list[Frame]:
    """The main thread's frames in a dump or in py-spy's output, innermost first; [] when it is not there.

    faulthandler calls the thread that took the signal "current". That is the main thread, written last; after a fatal
    signal it is the faulting thread, written first. A dump without it is incomplete, and no other thread can stand for
    it: threads of pools and trackers always wait. py-spy names the main thread.
    """
    blocks = re.split(r"^(?=Thread |Current thread )", text, flags=re.M)
    main = next((b for b in reversed(blocks) if b.startswith("Current thread ") or '"MainThread"' in b), "")
    matches = (_FRAME.match(line) or _SPY_FRAME.match(line) for line in main.splitlines())
    return [Frame(match["name"], match["file"], int(match["line"])) for match in matches if match]


def where(text: str) -> str:
    """The main thread's innermost frame, "" when it is not there."""
    return next(map(str, frames(text)), "")


class PySpy:
    """`py-spy dump --nonblocking` of some processes, in the background and with a deadline.

    texts: py-spy's output by pid, or why there is none.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.texts: dict[int, str] = {}
        self._running: dict[int, tuple[Subjob, float]] = {}  # pid -> the job, and the start of the process

    def begin(self, pid: int, start: float) -> None:
        """Start py-spy on this process, once."""
        if pid in self._running or pid in self.texts:
            return
        folders = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        program = shutil.which("py-spy", path=os.pathsep.join(folders))
        if program is None:
            self.texts[pid] = "py-spy is not installed"
            return
        process = _try(platform.process_info, pid)
        stopped = process is not None and process.state in "Tt"  # by a signal, before py-spy: it stays stopped
        job = Subjob([program, "dump", "--nonblocking", "--pid", str(pid)], self.timeout_s)
        self._running[pid] = (job, 0.0 if stopped else start)

    def poll(self) -> bool:
        """Collect what has finished. True while something is running."""
        for pid, (job, start) in list(self._running.items()):
            if job.done():
                self.texts[pid] = (not job.timed_out and job.text()) or job.error or "py-spy printed nothing"
                del self._running[pid]
                # py-spy can leave its target stopped, or about to stop; its state does not show that yet.
                if start and sys.platform != "win32":
                    _try(platform.send, pid, start, signal.SIGCONT)
        return bool(self._running)

    def close(self) -> None:
        """Kill what is running."""
        for job, _ in self._running.values():
            job.kill()
        self.poll()


# ---- samples ----

MAX_WORKERS = 4  # whose stacks are taken, beside those of the ranks
IDLE_CPU = 0.05  # of one core, all processes of the run together
COMPUTES = 0.5  # of one core, all processes of the run together
MOVING_BYTES_S = 64 * 1024  # to or from a disk
COPYING_BYTES_S = 1 << 20  # through read and write calls, from the page cache and pipes too
STARVED = 0.3  # of the time, runnable without a core
PAGES_S = 100  # swapped in or out, whole machine
FAULTS_S = 10  # major faults of the run
# On the stack only while torch.compile compiles, which it does again for each new size of images
_COMPILES = re.compile(r'/torch/(_dynamo/convert_frame|_inductor/(graph|async_compile))\.py"')
BUSY_DISK = 0.5  # of the time
BUSY_GPU = 50  # percent
# A frozen file system, a dead mount or a driver waits in other functions than a local disk.
WAITS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("waits.toml").read_text(encoding="utf-8"))
DISK, NETWORK_DISK = "for the disk", "for a network file system"  # of its rows

Key = tuple[int, float]  # (pid, start) of a process
Disks = dict[str, tuple[int, float]]  # name -> (sectors moved, seconds busy)
Gpu = dict[str, Any]  # readings of one device: "utilization", "memory_used", "memory_total", "throttle"…


class Missing(list[str]):
    """Sentences on what could not be read, and why; each once."""

    def note(self, sentence: str) -> None:
        """Add a sentence."""
        if sentence not in self:
            self.append(sentence)

    def read(self, what: str, read: Callable[[], T]) -> T | None:
        """read(), or None and a sentence."""
        try:
            return read()
        except (OSError, ValueError, LookupError) as error:
            self.note(f"{what}: {getattr(error, 'strerror', None) or f'unknown format ({error})'}")
            return None

    def proc(self, path: str, parse: Callable[[str], T]) -> T | None:
        """The parsed text of a file of /proc."""
        file = f"/proc/{path}"
        what = re.sub(r"\d+", "PID", file)
        return self.read(what, lambda: parse(read_bytes(file).decode("utf-8", "replace"))) if platform.LINUX else None


@dataclass(frozen=True)
class ProcessSample(ProcessInfo):
    """One process in a sample. Bytes since its start; `io_known` is False where they cannot be read."""

    disk_bytes: int = 0
    copied_bytes: int = 0
    io_known: bool = True
    starved_s: float = 0.0  # the main thread was runnable and had no core
    wchan: str = ""  # the kernel function where it waits


@dataclass(frozen=True)
class Sample:
    """The run's processes, the machine's disks and swapping, and the GPUs at one moment (monotonic seconds)."""

    at_s: float
    processes: dict[Key, ProcessSample] = field(default_factory=dict)
    swapped_pages: int = 0
    disks: Disks = field(default_factory=dict)
    gpu: tuple[Gpu, ...] = ()
    stacks: str = ""  # of the ranks, as one text without addresses


def waits_for(wchan: str) -> str:
    """What a process waits for in this kernel function, as a phrase; "" where that is not known."""
    name = wchan.lstrip("_")
    return next((what for what, begins in WAITS.items() if name.startswith(tuple(begins))), "")


def _io(text: str) -> dict[str, Any]:
    """The bytes of a ProcessSample."""
    value = {name: int(number) for name, _, number in (line.partition(":") for line in text.splitlines())}
    moved, copied = value["read_bytes"] + value["write_bytes"], value["rchar"] + value["wchar"]
    return {"disk_bytes": moved, "copied_bytes": copied}


def _disks(text: str) -> Disks:
    found = {}
    for line in text.splitlines():
        # kernel Documentation/admin-guide/iostats.rst: sectors read and written, milliseconds busy
        _, _, name, _, _, read, _, _, _, written, _, _, busy, *_ = line.split()
        found[name] = (int(read) + int(written), int(busy) / 1000)
    return found


def processes(keys: Iterable[Key], missing: Missing) -> dict[Key, ProcessSample]:
    """Those of these processes that live, now. Nothing here can block on them. Adds to `missing`, never raises."""
    found: dict[Key, ProcessSample] = {}
    for pid, start in keys:
        info = missing.read(f"process {pid}", partial(platform.process_info, pid))
        if info is not None and info.start == start:
            io = missing.proc(f"{pid}/io", _io) or {"io_known": False}
            starved_s = missing.proc(f"{pid}/schedstat", lambda text: int(text.split()[1]) / 1e9) or 0.0
            wchan = (missing.proc(f"{pid}/wchan", str.strip) or "").removeprefix("0")  # 0: it runs
            found[pid, start] = ProcessSample(**vars(info), **io, starved_s=starved_s, wchan=wchan)
    return found


def take(keys: Iterable[Key], missing: Missing, gpu: tuple[Gpu, ...] = (), stacks_text: str = "") -> Sample:
    """A sample of these processes, the machine and these GPUs, now. Adds to `missing`, never raises."""
    swapped = missing.proc("vmstat", lambda text: sum(map(int, re.findall(r"^pswp(?:in|out) (\d+)", text, re.M))))
    disks = missing.proc("diskstats", _disks) or {}
    return Sample(time.monotonic(), processes(keys, missing), swapped or 0, disks, gpu, stacks_text)


def growths(first: Sample, second: Sample, attribute: str, pids: Collection[int] | None = None) -> list[float]:
    """Growth of an attribute of each process that is in both samples; of these pids only."""
    both = [k for k in second.processes if k in first.processes and (pids is None or k[0] in pids)]
    return [getattr(second.processes[k], attribute) - getattr(first.processes[k], attribute) for k in both]


def compare(first: Sample, second: Sample, ranks: Collection[int], enough_cpu: bool = False) -> Signals:
    """What two samples prove about the run.

    ranks: their pids. enough_cpu: since the last progress they had the CPU time of many steps, so that a busy machine
    explains nothing.
    """
    elapsed = second.at_s - first.at_s
    both = {k: (first.processes[k], process) for k, process in second.processes.items() if k in first.processes}
    if elapsed <= 0 or not both:
        return Signals()

    def rate(attribute: str) -> float:
        return sum(growths(first, second, attribute)) / elapsed

    stopped = [(pid, new.name) for (pid, _), (old, new) in both.items() if old.state in "Tt" and new.state in "Tt"]
    stuck = [f"{name} (pid {pid}) is stopped by a signal" for pid, name in stopped]
    slow, busy = [], []
    cpu, disk, copied = rate("cpu_s"), rate("disk_bytes"), rate("copied_bytes")
    moving = disk >= MOVING_BYTES_S or copied >= COPYING_BYTES_S
    io_known = all(old.io_known and new.io_known for old, new in both.values())
    waits = {pid: new.wchan for (pid, _), (old, new) in both.items() if pid in ranks and old.state == new.state == "D"}
    crowded = _busy_disk(first, second, elapsed)
    if crowded and waits and all(waits_for(wchan) == DISK for wchan in waits.values()):
        slow.append(f"waits for a busy disk: {crowded}")
    elif waits and io_known and not moving:
        names = ", ".join(f"pid {pid} in {wchan or 'the kernel'}" for pid, wchan in waits.items())
        stuck.append(f"in uninterruptible sleep, with nothing read or written ({names})")
    busy_gpus = {i: gpu for i, gpu in enumerate(second.gpu) if (gpu.get("utilization") or 0) >= BUSY_GPU}
    # Not asleep: a process that waits for a core, or for a busy GPU.
    if cpu + rate("starved_s") < IDLE_CPU and not moving and not busy_gpus:
        if first.stacks and first.stacks == second.stacks:
            stuck.append(f"asleep, with the same stack twice within {elapsed:.1f} s and no CPU time used")
        elif io_known and not (first.stacks and second.stacks):
            stuck.append("asleep, with no CPU time used and nothing read or written")
        if first.gpu and second.gpu and not any(g.get("utilization") for g in (*first.gpu, *second.gpu)):
            stuck.append("the GPU is idle")
    if moving:
        slow.append(f"reading and writing files at {max(disk, copied) / 1e6:.1f} MB/s")
    if (second.swapped_pages - first.swapped_pages) / elapsed >= PAGES_S and rate("major_faults") >= FAULTS_S:
        slow.append("the machine is swapping: its memory is full")
    starved = max(growths(first, second, "starved_s", ranks), default=0.0) / elapsed
    if starved >= STARVED and not enough_cpu:
        slow.append(f"other programs keep the processor busy: the training waited for a core {starved:.0%} of the time")
    for i, gpu in busy_gpus.items():
        if gpu.get("throttle"):
            slow.append(f"GPU {i} is throttled ({gpu['throttle']})")
        if gpu.get("spill") and (gpu.get("memory_used") or 0) >= 0.98 * (gpu.get("memory_total") or 1):
            slow.append(f"GPU {i}'s memory is full and spills to the host's")
    if cpu >= COMPUTES and _COMPILES.search(second.stacks):
        slow.append("torch compiles the model, as for each new size of images")
    if cpu >= COMPUTES:
        busy.append(f"it computes: {cpu:.1f} processor cores in use")
    if busy_gpus:
        busy.append("a GPU is busy")
    return Signals(tuple(stuck), tuple(slow), tuple(busy))


def _busy_disk(first: Sample, second: Sample, elapsed: float) -> str:
    """The disk that was busy most of the time and completed something, as a phrase; "" for none."""
    for name, (sectors, busy_s) in second.disks.items():
        before = first.disks.get(name)
        if before and sectors > before[0] and (busy_s - before[1]) / elapsed >= BUSY_DISK:
            return f"{name}, {(sectors - before[0]) * 512 / elapsed / 1e6:.1f} MB/s for all programs together"
    return ""


class Probe:
    """Gathers the evidence on one suspicion, without waiting for anything but the stacks. Its methods never raise.

    It begins with a sample of these ranks, which is `full` with stacks (a signal to the processes) and py-spy.
    gpu: returns the newest GPU readings, () where there are none.
    """

    def __init__(
        self, tree: Tree, heartbeats: Path, config: Config, gpu: Callable[[], tuple[Gpu, ...]], beats: Sequence[Beat],
        full: bool,
    ):  # fmt: skip
        self.tree = tree
        self.signals = Signals()
        self.dumps: dict[int, str] = {}
        self.spy = PySpy(config.check.py_spy_s)
        self.missing = Missing()
        self._heartbeats = heartbeats
        self._dump_s = config.check.stack_dump_s
        self._gpu = gpu
        self._full = False
        self.missing.read("the list of processes", tree.refresh)
        self._samples = [self._take(beats, full)]  # the first, and the newest three

    @property
    def newest(self) -> Sample:
        """The last sample that was taken."""
        return self._samples[-1]

    def due(self, verdict: Verdict, now_s: float) -> bool:
        """Is it time for another sample?"""
        if verdict.stalled_s < verdict.budget_s:
            return False
        return not self._full or now_s - self.newest.at_s >= max(0.3, min(verdict.budget_s / 4, 5.0))

    def sample_again(self, beats: Sequence[Beat], budget_s: float = 0.0) -> Signals:
        """Take another sample with stacks and compare. The result is `signals` too. budget_s: T, which has passed."""
        earlier, last = self._samples[-3:], self._take(beats, with_stacks=True)
        # The oldest sample with stacks: the longer the time between the two, the more "the same" proves.
        first = next((s for s in earlier if s.stacks or not last.stacks), earlier[0])
        ranks = [b.pid for b in beats]
        cpu_s = max(growths(self._samples[0], last, "cpu_s", ranks), default=0.0)
        self.signals = compare(first, last, ranks, enough_cpu=cpu_s >= budget_s)
        self._samples.append(last)
        del self._samples[1:-3]
        return self.signals

    def texts(self) -> dict[int, str]:
        """Stacks by pid: the guards' own where there are any, else py-spy's or why it has none."""
        self.spy.poll()
        return {**{pid: f"(py-spy)\n{text}" for pid, text in self.spy.texts.items()}, **self.dumps}

    def close(self) -> None:
        """Kill what is still running."""
        self.spy.close()

    def _take(self, beats: Sequence[Beat], with_stacks: bool) -> Sample:
        text = ""
        if with_stacks:
            self._full = True
            members, pids = self.tree.members, {b.pid for b in beats}
            ranks = [(b.pid, members[b.pid].start) for b in beats if b.pid in members]  # a reused pid is not there
            # Workers of a guarded loader have a handler too: it answers where py-spy has no permission.
            python = [p for p in members.values() if p.name.startswith(("python", "pt_")) and p.pid not in pids]
            asked = ranks + [(p.pid, p.start) for p in python[:MAX_WORKERS]]
            found = dump(self._heartbeats, asked, self._dump_s)
            self.dumps.update(found)
            text = "".join(_ADDRESS.sub("", found.get(pid, "")).strip() for pid, _ in ranks)  # comparable
            for pid in (pid for pid, _ in ranks if pid not in found and not platform.WINDOWS):
                self.missing.note(f"stacks of process {pid}: no answer to SIGUSR2 within {self._dump_s:g} s")
            for pid, start in asked:
                self.spy.begin(pid, start)
        gpu = self.missing.read("GPU readings", self._gpu) or ()
        return take(self.tree.keys(), self.missing, gpu, text)
