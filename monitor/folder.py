"""A run's folder as the monitor uses it: which files, who writes them, and how they are found.

`status.json` is replaced without fsync: it is written every second, is worth nothing after a power cut, and a disk that
takes ten seconds to sync must not stop the one who watches. What a restart is founded on (`monitor.json`) is fsynced.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from monitor import clock, system

STATUS, EVENTS, LOG, TRAINING_LOG = "status.json", "events.jsonl", "monitor.log", "training.log"
BOOK, STOP = "monitor.json", "stop.request"
SCRIPT = "train.bat" if system.WINDOWS else "train.sh"
FINAL = ("completed", "failed", "stopped", "preempted", "unkillable")


class MonitorError(Exception):
    """Something a person can put right: what is wrong, where, and what to do."""


def find(name: str | os.PathLike) -> Path:
    """The folder that `name` means: any folder with a train script, or a run by its name or slug.

    Raises:
        MonitorError: there is none; the message lists the runs that exist.
    """
    given = Path(name).expanduser()
    if (given / SCRIPT).is_file():
        return given.resolve()
    import runs
    from runs.paths import outputs_dir

    own = outputs_dir() / given  # a script of one's own, put among the runs
    if (own / SCRIPT).is_file():
        return own.resolve()
    try:
        folder = runs.run_folder(str(name))
    except runs.RunError as error:
        raise MonitorError(f"{error}; or give a folder that has a {SCRIPT}") from error
    if not (folder / SCRIPT).is_file():
        raise MonitorError(f"{folder}: has no {SCRIPT}; write it with `python -m runs render {folder.name}`")
    return folder.resolve()


def all_folders() -> list[Path]:
    """The folders of all runs of this data root that have a train script, by name."""
    from runs.paths import outputs_dir

    return sorted(p.parent for p in outputs_dir().glob(f"*/{SCRIPT}") if not p.parent.name.startswith("."))


def spec_of(folder: Path) -> dict:
    """The run's `run.toml` as plain values, {} for a folder without one (a foreign script) or with a broken one."""
    import tomllib

    try:
        return tomllib.loads((folder / "run.toml").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}


class RunFiles:
    """Writes what the page and the command line read."""

    def __init__(self, folder: Path, echo: bool = False):
        self.folder = folder
        self.spec = spec_of(folder)
        self.name = str(self.spec.get("name") or folder.name)
        self.echo = echo
        self._stop = os.path.join(folder, STOP)  # text: looked at all the time, and a Path costs ten times as much
        self._training_log = os.path.join(folder, TRAINING_LOG)
        self.on_event: Callable[[str, str], None] = lambda kind, message: None

    @property
    def foreign(self) -> bool:
        """A script that is not rendered from a `run.toml`."""
        return not self.spec

    @property
    def lora(self) -> Path | None:
        """The finished LoRA, where there is one."""
        path = self.folder / f"{self.folder.name}.safetensors"
        return path if path.is_file() else None

    def log(self, text: str) -> None:
        """A line in monitor.log, and on standard error in the foreground. A full disk costs the line, not the run."""
        line = f"{clock.now().utc} {text}"
        if self.echo:
            _say(line)
        self._append(LOG, line + "\n")

    def event(self, kind: str, message: str, **more: object) -> None:
        """A line in events.jsonl and in the log."""
        record = {"t": clock.now().utc, "kind": kind, "message": message, **more}
        self._append(EVENTS, json.dumps(record, ensure_ascii=False) + "\n")
        self.log(f"{kind}: {message}")
        self.on_event(kind, message)

    def status(self, values: dict) -> None:
        """Replace status.json."""
        self.replace(STATUS, json.dumps(values, ensure_ascii=False, indent=1))

    def book(self, values: dict) -> None:
        """Replace monitor.json, on the disk when this returns."""
        self.replace(BOOK, json.dumps(values, ensure_ascii=False, indent=1), sync=True)

    def read_book(self) -> dict:
        """What an earlier monitor of this run wrote down; {} when there was none."""
        return read_json(self.folder / BOOK) or {}

    def new_incident(self) -> Path:
        """A fresh folder `incidents/NNNN`."""
        parent = self.folder / "incidents"
        numbers = [int(p.name) for p in parent.glob("*") if p.name.isdigit()]
        path = parent / f"{max(numbers, default=0) + 1:04d}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            self.log(f"{path}: cannot be made: {error.strerror}")
        return path

    def stop_asked(self) -> dict | None:
        """The user's wish to stop, {} or {"now": true}; None when there is none."""
        if not os.path.exists(self._stop):
            return None
        return read_json(Path(self._stop)) or {}

    def stop_done(self) -> None:
        (self.folder / STOP).unlink(missing_ok=True)

    def log_size(self) -> int:
        """Bytes of training.log."""
        try:
            return os.stat(self._training_log).st_size
        except OSError:
            return 0

    def log_tail(self, since: int, limit: int) -> str:
        """The last `limit` bytes of training.log, none of them from before byte `since`."""
        try:
            with open(self.folder / TRAINING_LOG, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(since, end - limit))
                return file.read(limit).decode("utf-8", "replace")
        except OSError:
            return ""

    def _append(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            handle = os.open(self.folder / name, flags, 0o644)
            try:
                os.write(handle, text.encode("utf-8", "replace"))
            finally:
                os.close(handle)
        except OSError as error:
            _say(f"monitor: cannot write {self.folder / name}: {error.strerror}")

    def replace(self, name: str, text: str, sync: bool = False) -> bool:
        """Replace a file of the folder whole; False (and a word about it) when that is not possible, as on a full disk."""
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            return True
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            _say(f"monitor: cannot write {path}: {error.strerror}")
            return False


def _say(line: str) -> None:
    """A line on standard error, unless that would block: a pipe that nobody drains must not stop the one who watches."""
    if not system.WINDOWS and not select.select([], [sys.stderr], [], 0)[1]:
        return
    # A pipe that is ready for writing takes at least PIPE_BUF (4096) bytes without blocking: pipe(7).
    print(line[:1000], file=sys.stderr, flush=True)


def read_json(path: Path) -> dict | None:
    """A JSON object from a file; None when it is missing, being written, or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def private_folder(slug: str) -> Path:
    """A new folder for heartbeats, on local disk and for us alone (0700): the run's own may be on a network."""
    base = (
        Path(tempfile.gettempdir())
        / f"hangproof-{os.getuid() if hasattr(os, 'getuid') else os.environ.get('USERNAME')}"
    )
    base.mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{slug[:40]}-", dir=base))


def drop_private(path: Path) -> None:
    """Remove a folder that `private_folder` made."""
    if path.parent.name.startswith("hangproof-"):
        shutil.rmtree(path, ignore_errors=True)
