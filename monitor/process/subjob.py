"""A child process with a deadline: the monitor hands long or risky work to it, so that it stays small and never blocks.

Output goes to a temporary file, because a pipe that nobody drains blocks the child. A child that cannot be started is a
result like any other (`error`), because the monitor must survive a machine without memory, processes or descriptors.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from guards.reading import moved_bytes
from monitor.process import platform
from monitor.process.tree import MARKS

ROOT = Path(__file__).resolve().parents[2]
TEXT_BYTES = 1 << 20
KILL_WAIT_S = 1.0


def helper_environment() -> dict[str, str]:
    """The environment of helpers, without the variables that mark the processes of a run."""
    return {k: v for k, v in os.environ.items() if k not in MARKS}


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def helper(
    command: list[str], out: IO[bytes] | int, stdin: IO[bytes] | int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a helper in a session of its own, which prints into the file `out`. OSError: it cannot be started."""
    return platform.popen(
        command,
        bufsize=0,
        stdin=stdin,
        stdout=out,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=helper_environment(),
        **platform.detached(),
    )


class Subjob:
    """One child in a session of its own. Never raises: if it cannot be started, `done()` is True and `error` says why.

    Once it is done: `code` is its exit status (negative: the signal; None: not started, or not killable), `took_s` its
    time in seconds, and `error` the reason when it did not exit by itself with status 0, else "".
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
        self.took_s = 0.0
        self.error = ""
        self._text = ""
        self._done = False
        self._began_s = self._moved_s = time.monotonic()
        self._bytes: int | None = None
        self._out: IO[bytes] | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_finish`
            with tempfile.TemporaryFile() as source:
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
        self.took_s = time.monotonic() - self._began_s
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
        with contextlib.suppress(ValueError):
            value = json.loads(self._last_line())
            return value if isinstance(value, dict) else None
        return None

    def _last_line(self) -> str:
        return (self._text.strip().splitlines() or [""])[-1].strip()
