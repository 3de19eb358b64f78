"""Stacks of every thread of a stuck process, by the two ways that work when it is stuck.

faulthandler (SIGUSR2, registered by our guards) is C code: it answers with the GIL held, but shows no C frames and only
processes with guards have it. py-spy reads the memory from outside: it shows any Python process, needs the right to
(ptrace), and runs `--nonblocking`, since stopping a process in uninterruptible sleep would stop py-spy too.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from guards.crash import stacks_path
from monitor import system

STILL_S = 0.05  # a dump that has not grown for so long is whole
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$')
_SPY_FRAME = re.compile(r"^    (?P<name>\S+) \((?P<file>.+?):(?P<line>\d+)\)$")  # py-spy: `    wait (threading.py:327)`


def dump(heartbeats: Path, processes: Iterable[tuple[int, float]], wait_s: float) -> dict[int, str]:
    """Every thread's stack of these (pid, start), by SIGUSR2 to all of them at once.

    Those without a handler get no signal, and those that are silent are left out: a stopped process answers only once it is
    continued, one in uninterruptible sleep never.

    wait_s: how long the texts may take to arrive.
    """
    asked: dict[int, tuple[Path, int]] = {}
    for pid, start in processes:
        path, process = stacks_path(heartbeats, pid), system.proc(pid)
        if process is None or process.dead or process.state in "TtD" or not hasattr(signal, "SIGUSR2"):
            continue
        try:
            before = path.stat().st_size
        except OSError:
            continue  # no file, no handler: the signal would end it
        if system.send(pid, start, signal.SIGUSR2):
            asked[pid] = (path, before)
    found: dict[int, str] = {}
    grew: dict[int, tuple[int, float]] = {}  # pid -> (size, when it was first seen)
    deadline = time.monotonic() + wait_s
    while asked.keys() - found.keys() and time.monotonic() < deadline:
        time.sleep(0.005)
        for pid, (path, before) in asked.items():
            size = path.stat().st_size
            now_s = time.monotonic()
            if grew.get(pid, (-1, 0.0))[0] != size:
                grew[pid] = (size, now_s)
            # It writes thread by thread, the main one last: on a busy machine the text pauses in between.
            elif pid not in found and size > before and now_s - grew[pid][1] >= STILL_S:
                found[pid] = _since(path, before)
    return found


def _since(path: Path, begin: int) -> str:
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(1 << 20).decode("utf-8", "replace")


def fatal_dump(heartbeats: Path, pid: int) -> str:
    """What a fatal signal left in the stacks file of `pid`, at most 64 KB; "" without one.

    Dumps that were asked for stand there too, from a suspicion that came to nothing: they say nothing about the end.
    """
    try:
        with open(stacks_path(heartbeats, pid), "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    begin = text.rfind("Fatal Python error: ")
    return text[begin:] if begin >= 0 else ""


def comparable(text: str) -> str:
    """A dump without thread addresses, so that two of the same stacks are the same text."""
    return _ADDRESS.sub("", text).strip()


def names(text: str) -> list[str]:
    """`file.py:function` of every frame of a dump or of py-spy's output, in order; what the table of causes is matched on."""
    matches = (_FRAME.match(line) or _SPY_FRAME.match(line) for line in text.splitlines())
    return [f"{Path(match['file']).name}:{match['name']}" for match in matches if match]


def main_thread(text: str) -> str:
    """The main thread's part of a dump or of py-spy's output, "" when it cannot be told.

    faulthandler: the thread that took the signal, the main one, is called current and comes last (after a fatal signal: the
    thread that made the fault, first). A dump without it was cut off, and any other thread would mislead: a pool's or a
    tracker's thread always stands in a wait. py-spy names the main thread.
    """
    blocks = re.split(r"^(?=Thread |Current thread )", text, flags=re.M)
    return next((b for b in reversed(blocks) if b.startswith("Current thread ") or '"MainThread"' in b), "")


def where(text: str) -> str:
    """`function (file.py:line)` of the innermost frame of the main thread, "" when it cannot be told."""
    for line in main_thread(text).splitlines():
        match = _FRAME.match(line) or _SPY_FRAME.match(line)
        if match:
            return f"{match['name']} ({Path(match['file']).name}:{match['line']})"
    return ""


class PySpy:
    """`py-spy dump --nonblocking` of some processes, beside everything else and with a deadline."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._running: dict[int, tuple[subprocess.Popen, BinaryIO, float, bool, float]] = {}
        self.texts: dict[int, str] = {}

    def begin(self, pid: int, start: float) -> None:
        """Start on process `pid`, unless it is under way or py-spy is not installed (said in `texts`)."""
        if pid in self._running:
            return
        program = Path(sys.executable).with_name("py-spy")
        found = str(program) if program.exists() else shutil.which("py-spy")
        if found is None:
            self.texts[pid] = "py-spy is not installed"
            return
        process = system.proc(pid)
        stopped = process is not None and process.state in "Tt"
        command = [found, "dump", "--nonblocking", "--pid", str(pid)]
        out = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would block it at 64 KB
        try:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            self.texts[pid] = f"py-spy cannot be started: {error.strerror}"
            return
        self._running[pid] = (popen, out, time.monotonic(), stopped, start)

    def cancel(self) -> None:
        """End what is under way."""
        for popen, out, *_ in self._running.values():
            popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(1.0)
            out.close()
        self._running = {}

    def poll(self) -> bool:
        """Collect what has ended, end what takes too long; True while something is under way."""
        for pid, (popen, out, began, stopped, start) in list(self._running.items()):
            if popen.poll() is None:
                if time.monotonic() - began < self.timeout_s:
                    continue
                popen.kill()
                self.texts[pid] = f"py-spy gave no answer within {self.timeout_s:.0f} s"
            else:
                out.seek(0)
                self.texts[pid] = out.read(1 << 20).decode("utf-8", "replace")
            out.close()
            del self._running[pid]
            if not stopped and hasattr(signal, "SIGCONT"):
                # py-spy can leave its target stopped, or about to stop: then its state does not tell yet
                system.send(pid, start, signal.SIGCONT)
        return bool(self._running)
