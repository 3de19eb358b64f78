"""What a restart will need, made ready while the run is well: the newest checkpoint verified, the next script rendered.

Both are helpers' work of half a second and more, which would otherwise lie between a crash and the next step. They run when
nothing is suspected, one at a time, and rest for 25 times as long as they took. The script is rendered with a stand-in for
the state's name, which is known only when it is needed; anything that changed meanwhile is noticed, and then it is rendered
anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from monitor import checkpoints, system
from monitor.folder import MonitorError, RunFiles
from monitor.helpers import Helper, Rendered

REST = 25.0
LATEST_S = 60.0  # rest at most this long
EVERY_S = 1.0
NAME = "HANGPROOF-NEWEST-state"  # letters that no quoting touches


class Foresight:
    """Looks ahead for one run."""

    def __init__(self, files: RunFiles, verifier: checkpoints.Verifier, timeout_s: float):
        self.files = files
        self.verifier = verifier
        self.timeout_s = timeout_s
        self._rendering: tuple[tuple, Helper] | None = None
        self._template: tuple[tuple, dict] | None = None
        self._next_s = 0.0
        self._verifying = False

    def tick(self, now_s: float, folders: list[Path], changes: list[dict]) -> None:
        """Collect what is ready, begin what is missing. Called while the run makes progress."""
        if self._rendering is not None:
            self._collect(now_s)
            return
        if self._verifying:
            self.verifier.poll()
            if self.verifier.busy():
                return
            self._verifying = False
            self._rest(now_s, self.verifier.took_s)
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        newest = checkpoints.newest(folders)
        if newest is None:
            return
        if not self.files.foreign and not system.WINDOWS and self._fresh(changes) is None:
            self._render(changes)
        elif not self.verifier.known(newest):
            self.verifier.begin(newest)
            self._verifying = True

    def script(self, number: int, resume: Path | None, changes: list[dict], was: list[str]) -> Rendered | None:
        """The script of attempt `number` from what was rendered ahead; None when that does not fit any more."""
        found = self._fresh(changes)
        if found is None or resume is None or resume.parent != self.files.folder or was != [c["name"] for c in changes]:
            return None
        path = self.files.folder / f"train.attempt-{number}.sh"
        if not self.files.replace(path.name, found["text"].replace(NAME, resume.name).rstrip("\n")):
            return None
        path.chmod(0o755)
        return Rendered(path, found["save_dir"])

    def close(self) -> None:
        if self._rendering is not None:
            self._rendering[1].cancel()
            self._rendering = None

    def _mark(self, changes: list[dict]) -> tuple:
        """What the rendered text depends on."""
        try:
            stat = os.stat(self.files.folder / "run.toml")
        except OSError:
            return ()
        return (stat.st_mtime_ns, stat.st_size, *(c["name"] for c in changes))

    def _fresh(self, changes: list[dict]) -> dict | None:
        if self._template is not None and self._template[0] == self._mark(changes):
            return self._template[1]
        return None

    def _render(self, changes: list[dict]) -> None:
        arguments = [str(self.files.folder), "--text", "--resume", str(self.files.folder / NAME)]
        for change in changes:
            arguments += ["--change", change["name"]]
        self._rendering = (self._mark(changes), Helper("monitor.render", arguments, self.timeout_s))

    def _collect(self, now_s: float) -> None:
        mark, helper = self._rendering
        if not helper.done():
            return
        self._rendering = None
        self._rest(now_s, helper.took_s)
        try:
            self._template = (mark, helper.result())
        except MonitorError:
            self._next_s = now_s + LATEST_S  # the restart will render it, and say what is wrong

    def _rest(self, now_s: float, took_s: float) -> None:
        self._next_s = now_s + min(REST * took_s, LATEST_S)
