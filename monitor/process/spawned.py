"""The processes that the monitor starts: those of an attempt, known before anything is killed, and short-lived helpers.

A process group is not enough to know an attempt: launcher workers and loaders start sessions of their own, and a
SIGTERM to `accelerate launch` orphans the trainer (measured). So a process belongs to the run when its parent does, or
when the environment it inherited carries the run's token. From then on it is remembered by (pid, start), whatever
happens to its parent.

Long or risky work is a helper's, so that the monitor stays small and never blocks. A helper's output goes to a
temporary file, because a pipe that nobody drains blocks it. One that cannot be started is a result like any other
(`Subjob.error`), because the monitor must survive a machine without memory, processes or descriptors.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from guards import shell
from guards.reading import json_object, moved_bytes
from monitor.phrases import count
from monitor.process import platform
from monitor.process.platform import LOCK, NULL, Lock, ProcessInfo, Stream, is_held

TOKEN = "HANGPROOF_TOKEN"
RUN = "HANGPROOF_RUN"
MACHINE = "HANGPROOF_NODE"
MARKS = (TOKEN, RUN, "HANGPROOF_ATTEMPT", "HANGPROOF_HEARTBEAT", "HANGPROOF_RESUME")  # of a training alone
_TOKEN_DIGITS = 32  # random, for each attempt


@dataclass
class Tree:
    """The living processes of one attempt. `token`: what its environment carries; `root`: (pid, start) of its shell."""

    token: str
    root: tuple[int, float] | None = None
    members: dict[int, ProcessInfo] = field(default_factory=dict)

    def refresh(self) -> dict[int, ProcessInfo]:
        """Scan the machine; returns the living members, which are `members` too. OSError: /proc cannot be read."""
        everything = platform.scan()
        known = [*self.keys(), *([self.root] if self.root else [])]
        ours = {pid for pid, start in known if pid in everything and everything[pid].start == start}
        young = self.root[1] if self.root else 0  # what is older than the shell has no token
        for pid in [pid for pid, p in everything.items() if self.token and p.start >= young and not p.dead]:
            with contextlib.suppress(OSError):  # it cannot be read now; in the middle of an exec it is empty
                if platform.environ_of(pid).get(TOKEN) == self.token:
                    ours.add(pid)

        def is_child(process: ProcessInfo) -> bool:
            """Windows keeps the number of a parent that is gone: one of ours that has it now is the younger."""
            return process.ppid in ours and process.start >= everything[process.ppid].start

        while children := {p.pid for p in everything.values() if is_child(p)} - ours:
            ours |= children
        found = [everything[pid] for pid in ours - {os.getpid(), os.getppid(), 0, 1}]
        # Oldest first: a parent is killed before it can replace a killed child.
        self.members = {p.pid: p for p in sorted(found, key=lambda p: (p.start, p.pid)) if not p.dead}
        return self.members

    def keys(self) -> list[tuple[int, float]]:
        """(pid, start) of every member."""
        return [(p.pid, p.start) for p in self.members.values()]


@dataclass(frozen=True)
class KillResult:
    """`killed` processes were found; `survivors` did not die in time (uninterruptible sleep). `took_s` in seconds."""

    killed: tuple[ProcessInfo, ...]
    survivors: tuple[ProcessInfo, ...]
    took_s: float


def kill(tree: Tree, grace_s: float, kill_wait_s: float, at_once: Iterable[int] = ()) -> KillResult:
    """Kill every process of the tree: SIGCONT, SIGTERM, `grace_s` to exit, SIGKILL, `kill_wait_s` to be gone.

    SIGCONT comes first, because a stopped process keeps SIGTERM pending. Every round looks for new children, so that a
    process that forks meanwhile does not escape. Never raises OSError: a signal that fails does not protect the others.

    at_once: pids that get SIGKILL instead of SIGTERM. These are the ranks: SIGTERM asks a guarded trainer for a
    checkpoint, and it either had its time for that or is stuck and would only use up the grace.
    """
    began_s, at_once, grace_over = time.monotonic(), set(at_once), False
    killed: dict[int, ProcessInfo] = {}
    signalled: set[int] = set()
    while _refresh(tree):
        took_s = time.monotonic() - began_s
        if grace_over and took_s > grace_s + kill_wait_s:
            break
        grace_over = took_s >= grace_s
        for pid, process in tree.members.items():
            if sys.platform == "win32":
                numbers = [signal.SIGTERM]  # terminates at once
            elif grace_over or pid in at_once:
                numbers = [signal.SIGKILL]
            else:
                numbers = [signal.SIGCONT, signal.SIGTERM] if pid not in signalled else []
            with contextlib.suppress(OSError):  # EPERM, EIO…: the next round tries again
                for number in numbers:
                    platform.send(pid, process.start, number)
                signalled.add(pid)
        killed |= tree.members
        waited_s = took_s - grace_s if grace_over else took_s
        platform.sleep(min(0.1, 0.005 + waited_s / 2))
    return KillResult(tuple(killed.values()), tuple(tree.members.values()), time.monotonic() - began_s)


def _refresh(tree: Tree) -> dict[int, ProcessInfo]:
    """`tree.refresh()`; while /proc cannot be read, the members known so far that are not known to be gone."""
    try:
        return tree.refresh()
    except OSError:
        with contextlib.suppress(OSError):
            tree.members = {pid: p for pid, p in tree.members.items() if platform.alive(pid, p.start)}
        return tree.members


def orphans() -> list[str]:
    """Trainings that run although no monitor watches them, one sentence a run. OSError: see `with_environment`."""
    found: dict[str, list[ProcessInfo]] = {}
    for process, folder in unwatched():
        found.setdefault(str(folder), []).append(process)
    return [
        f"unwatched: {count(len(processes), 'process')} of {folder} "
        f"({', '.join(f'{p.name} {p.pid}' for p in processes[:5])}); run `python -m monitor start {shell.word(folder)}`"
        f" to watch the run again, or `python -m monitor stop {shell.word(folder)}` to kill it"
        for folder, processes in sorted(found.items())
    ]


def unwatched() -> list[tuple[ProcessInfo, Path]]:
    """The processes of runs that no monitor watches, each with its run's folder. OSError: see `with_environment`.

    Not those of a container, whose folder has another path here.
    """
    found, here = [(process, Path(folder)) for process, folder in _with_variable(RUN) if folder], platform.namespace()
    known = [one for one in found if one[1].is_dir() or platform.namespace(pid=one[0].pid) == here]
    return [one for one in known if not is_held(one[1] / LOCK)]


@contextlib.contextmanager
def idle(folder: Path) -> Iterator[bool]:
    """Keep a monitor from starting for the run; False when one watches it, or its training is alive without one."""
    lock = Lock(folder / LOCK)
    try:
        free = lock.acquire() and not with_environment(RUN, str(folder.resolve()))
        if sys.platform == "win32":
            lock.release()  # Windows renames no folder with an open file
        yield free
    finally:
        lock.release()


def with_environment(name: str, value: str) -> list[ProcessInfo]:
    """Every living process but us whose environment has `name` with that value. OSError: one cannot be read now."""
    return [process for process, found in _with_variable(name) if found == value]


def _with_variable(name: str) -> list[tuple[ProcessInfo, str]]:
    """(process, value) of every living process but us whose environment has `name`.

    Under RUN only what an attempt has started counts, which has a random token besides: a shell may export the other,
    and what it starts is not ours to kill. Of a run on several machines, those of another one are left out: two may be
    nodes of one host.
    """
    found, first = [], "0"  # the number of the first machine, or the only one
    for pid, process in platform.scan().items():
        if pid == os.getpid() or process.dead:
            continue
        known = platform.environ_of(pid)
        here = (known.get(MACHINE) or first) == (os.environ.get(MACHINE) or first)
        if name in known and (name != RUN or (here and len(known.get(TOKEN, "")) == _TOKEN_DIGITS)):
            found.append((process, known[name]))
    return found


# ---- helpers ----

ROOT = Path(__file__).resolve().parents[2]
TEXT_BYTES = 1 << 20
KILL_WAIT_S = 1.0


def helper_environment() -> dict[str, str]:
    """The environment of helpers, without the variables that mark the processes of a run."""
    return {k: v for k, v in os.environ.items() if k not in MARKS}


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def helper(command: list[str], out: Stream, stdin: Stream = NULL) -> subprocess.Popen[bytes]:
    """Start a helper, which prints into the file `out`. OSError: it cannot be started."""
    return platform.popen(command, out, stdin, cwd=ROOT, env=helper_environment())


def unnamed_file() -> IO[bytes]:
    """A file for what a child reads or prints: in memory on Linux, because /tmp may be full. Raises OSError."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return open(os.memfd_create("hangproof"), "w+b")
    return tempfile.TemporaryFile()


def is_python_of(child: subprocess.Popen[bytes], pid: object) -> bool:
    """Whether `pid` is the Python that was started as `child`.

    The python.exe of a virtual environment on Windows starts the interpreter as its own child (python/cpython#83086).
    """
    found = platform.process_info(pid) if platform.WINDOWS and isinstance(pid, int) else None
    return pid == child.pid or (found is not None and found.ppid == child.pid)


class Subjob:
    """One child in a session of its own. Never raises: if it cannot be started, `done()` is True and `error` says why.

    Once it is done: `code` is its exit status (negative: the signal; None: not started, or not killable), and `error`
    the reason when it did not exit by itself with status 0, else "".
    """

    def __init__(self, command: list[str], timeout_s: float, stdin: bytes | None = b"", standstill_s: float = math.inf):
        """Start `command`; it is killed after `timeout_s` seconds, or `standstill_s` after the last byte that it moved.

        Where the system counts no bytes, both limits begin with it. stdin: what it reads; None: what `send` writes.
        """
        self.name = command[2] if command[1:2] == ["-m"] else Path(command[0]).name
        self.timeout_s = timeout_s
        self.standstill_s = standstill_s
        self.code: int | None = None
        self.timed_out = False
        self.error = ""
        self._text = ""
        self._done = False
        self._began_s = self._moved_s = time.monotonic()
        self._bytes: int | None = None
        self._out: IO[bytes] | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._out = unnamed_file()  # closed in `_finish`
            with unnamed_file() as source:
                source.write(stdin or b"")
                source.seek(0)
                self._popen = helper(command, self._out, subprocess.PIPE if stdin is None else source)
        except (OSError, ValueError, MemoryError) as error:
            if self._popen is None:
                reason = getattr(error, "strerror", "") or str(error) or "out of memory"
                self._finish(f"{self.name} cannot be started: {reason}")

    def send(self, data: bytes) -> None:
        """Write to its standard input. Dropped when the pipe is full or the child is gone."""
        if self._popen is not None and self._popen.stdin is not None and not self._done:
            with contextlib.suppress(OSError):
                if sys.platform != "win32":  # Windows before Python 3.12 has only blocking pipes
                    os.set_blocking(self._popen.stdin.fileno(), False)
                self._popen.stdin.write(data)

    def done(self) -> bool:
        """Whether it has exited, was killed or could not be started. Kills it when its time is over."""
        if not self._done and self._popen is not None:
            if self._popen.poll() is not None:
                self._finish()
            elif late := self._late():
                self.timed_out = True
                self._kill(f"{self.name} timed out after {late}")
        return self._done

    def _late(self) -> str:
        """The limit that it exceeds, "" for none."""
        assert self._popen is not None
        now_s = time.monotonic()
        if self.standstill_s < math.inf and (moved := moved_bytes(str(self._popen.pid))) != self._bytes:
            self._bytes, self._moved_s = moved, now_s
        if now_s - self._began_s > self.timeout_s:
            return f"{self.timeout_s:g} s"
        standstill = now_s - self._moved_s > self.standstill_s
        return f"{self.standstill_s:g} s in which it read and wrote nothing" if standstill else ""

    def wait(self, pause: Callable[[float], None]) -> None:
        """Wait until it is done. `pause(seconds)` sleeps; when it raises, the child is killed."""
        try:
            while not self.done():
                pause(0.05)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it and its children, unless it is done. Takes 1 s at most: what is stuck in the kernel is left there."""
        if not self.done():
            self._kill(f"{self.name} was killed")

    def _kill(self, error: str) -> None:
        assert self._popen is not None
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self._popen.kill()
            else:
                os.killpg(self._popen.pid, signal.SIGKILL)
        try:
            self._popen.wait(KILL_WAIT_S)
        except (subprocess.TimeoutExpired, OSError):
            error += f"; process {self._popen.pid} is stuck in the kernel and cannot be killed"
        self._finish(error)

    def _finish(self, error: str = "") -> None:
        """Keep the result and close the files."""
        self._done = True
        try:
            if self._popen is not None:
                self.code = self._popen.returncode
                if self._popen.stdin is not None:
                    self._popen.stdin.close()
            if self._out is not None:
                with self._out as out:
                    out.seek(max(0, out.seek(0, os.SEEK_END) - TEXT_BYTES))
                    self._text = out.read(TEXT_BYTES).decode("utf-8", "replace")
        except OSError as problem:
            error = error or f"the output of {self.name} cannot be read: {problem.strerror}"
        if self.code and not error:
            last = self._last_line()
            error = last if last and last[0] != "{" else f"{self.name} failed: exit status {self.code}"
            if self.code < 0:
                error = f"{self.name} was killed by {platform.signal_name(-self.code)}"
        self.error = error

    def text(self) -> str:
        """The last 1 MB of its output, standard error included, once it is done."""
        return self._text

    def answer(self) -> dict[str, Any] | None:
        """The JSON object on the last line of its output, None when there is none."""
        return json_object(self._last_line())

    def _last_line(self) -> str:
        return (self._text.strip().splitlines() or [""])[-1].strip()
