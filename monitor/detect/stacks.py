"""Stacks of every thread of a stuck process, from two sources that still work when it is stuck.

faulthandler (SIGUSR2, registered by the guards) is C code: it answers while another thread holds the GIL, but it shows
no C frames, and only guarded processes have it. py-spy reads memory from outside: it shows any Python process, needs
the right to do so (ptrace), and runs with `--nonblocking`, because a stop of a process in uninterruptible sleep would
stop py-spy too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from guards.crash import stacks_path
from monitor.process import platform
from monitor.process.subjob import Subjob

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
    """What a fatal signal left in the stacks file of `pid`, after the dumps of earlier false suspicions; "" without one."""
    text = _try(_read, stacks_path(heartbeats, pid)) or ""
    begin = text.rfind("Fatal Python error: ")
    return text[begin:] if begin >= 0 else ""


def comparable(text: str) -> str:
    """A dump without thread addresses: the same stacks give the same text."""
    return _ADDRESS.sub("", text).strip()


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
    """Every frame of a dump or of py-spy's output, in order."""
    matches = (_FRAME.match(line) or _SPY_FRAME.match(line) for line in text.splitlines())
    return [Frame(match["name"], match["file"], int(match["line"])) for match in matches if match]


def main_thread(text: str) -> str:
    """The main thread's part of a dump or of py-spy's output, "" when it is not there.

    faulthandler calls the thread that took the signal "current". That is the main thread, written last; after a fatal
    signal it is the faulting thread, written first. A dump without it is incomplete, and no other thread can stand for
    it: threads of pools and trackers always wait. py-spy names the main thread.
    """
    blocks = re.split(r"^(?=Thread |Current thread )", text, flags=re.M)
    return next((b for b in reversed(blocks) if b.startswith("Current thread ") or '"MainThread"' in b), "")


def where(text: str) -> str:
    """The main thread's innermost frame, "" when it is not there."""
    return next(map(str, frames(main_thread(text))), "")


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
