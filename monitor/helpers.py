"""Work that the watching process hands to short-lived helpers with deadlines, so that it stays small and never blocks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from monitor.folder import SCRIPT, MonitorError, RunFiles
from monitor.tree import RUN, TOKEN

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """For helpers, which run in the project folder: they must not look like processes of the run."""
    return {k: v for k, v in os.environ.items() if k not in (TOKEN, RUN, "HANGPROOF_HEARTBEAT")}


class Helper:
    """`python -m module arguments` beside the watching, with a deadline; its last line of output is JSON."""

    def __init__(self, module: str, arguments: list[str], timeout_s: float):
        self.module = module
        self.timeout_s = timeout_s
        self.took_s = 0.0
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody drains would block the helper
        self._began = time.monotonic()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(),
        )

    def done(self) -> bool:
        """Has it ended, by itself or by its deadline?"""
        if self._popen.poll() is None and time.monotonic() - self._began > self.timeout_s:
            self.cancel()
        if self._popen.returncode is not None and not self.took_s:
            self.took_s = time.monotonic() - self._began
        return self._popen.returncode is not None

    def wait(self, pause: Callable[[float], None]) -> None:
        """Until it is done; `pause` is called meanwhile and may raise, which ends the helper."""
        step = 0.01
        try:
            while not self.done():
                pause(step)
                step = min(2 * step, 0.25)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End it."""
        if self._popen.poll() is None:
            self._popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(1.0)  # it may be stuck in the kernel: then it is collected when we end

    def result(self) -> dict:
        """Its answer, once it is done.

        Raises:
            MonitorError: it gave none; the message is its last line, or that its time was over.
        """
        self._out.seek(0)
        lines = self._out.read(1 << 20).decode("utf-8", "replace").strip().splitlines()
        self._out.close()
        if lines and lines[-1].startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(lines[-1])
        if self.took_s > self.timeout_s:
            raise MonitorError(f"{self.module}: no answer within {self.timeout_s:.0f} s")
        raise MonitorError(lines[-1] if lines else f"{self.module}: exit code {self._popen.returncode}")


def ask(module: str, arguments: list[str], timeout_s: float, pause: Callable[[float], None]) -> dict:
    """The answer of a helper. MonitorError: it gave none."""
    helper = Helper(module, arguments, timeout_s)
    helper.wait(pause)
    return helper.result()


@dataclass(frozen=True)
class Rendered:
    """An attempt's script; `fits`: the state it was to resume from can be resumed after the changes."""

    script: Path
    save_dir: str = ""
    fits: bool = True


def script_for(
    files: RunFiles,
    number: int,
    resume: Path | None,
    changes: list[dict],
    was: list[str],
    timeout_s: float,
    pause: Callable[[float], None],
) -> Rendered:
    """The script of attempt `number`. A foreign script is always its own; it is told where to resume by its environment.

    Args:
        changes: the mitigations in force. was: the names of those in force when the states were saved.

    Raises:
        MonitorError: it could not be rendered.
    """
    own = files.folder / SCRIPT
    if files.foreign or (number == 1 and resume is None and not changes):
        return Rendered(own, str(files.spec.get("save_dir", "")))
    arguments = [str(files.folder), "--attempt", str(number)]
    if resume is not None:
        arguments += ["--resume", str(resume)]
    for change in changes:
        arguments += ["--change", change["name"]]
    for name in was:
        arguments += ["--was", name]
    answer = ask("monitor.render", arguments, timeout_s, pause)
    return Rendered(Path(answer["script"]), answer["save_dir"], answer["fits"])


def problems(files: RunFiles, timeout_s: float, pause: Callable[[float], None]) -> list[str]:
    """What stands in the way of a start (a missing model file, no checkout), each as a sentence; [] for a foreign script.

    Raises:
        MonitorError: the spec itself is wrong.
    """
    if files.foreign:
        return []
    return ask("monitor.render", [str(files.folder), "--problems"], timeout_s, pause)["problems"]


def next_change(
    files: RunFiles, ladder: tuple[str, ...], changes: list[dict], timeout_s: float, pause: Callable[[float], None]
) -> dict:
    """The first mitigation of `ladder` that changes anything beyond `changes`: {"name", "sentence"}; {} when there is none."""
    taken = {c["name"] for c in changes}
    left = [name for name in ladder if name not in taken]
    if files.foreign or not left:
        return {}
    arguments = [str(files.folder), "--next", *left]
    for change in changes:
        arguments += ["--change", change["name"]]
    return ask("monitor.render", arguments, timeout_s, pause)
