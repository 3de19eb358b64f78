"""A run's folder: where its files are, who writes them, and how a run is found by name.

`status.json` is replaced without fsync: it changes every second, is worthless after a power cut, and a disk that takes
ten seconds to sync must not stop the monitor. `monitor.json`, which a restart relies on, is fsynced. A file that cannot
be written (full disk, read-only mount) costs that file, never the run: the writers here report the failure and return.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import tomllib

import runs
from guards.checkpoint import append_line, append_text, atomic_write
from guards.reading import read_json as read_json
from monitor.process import platform, spawned
from monitor.process.spawned import Subjob, helper, python
from presets.terminal import plain
from runs.paths import config_dir, outputs_dir, with_file

STATUS, EVENTS, LOG, TRAINING_LOG = "status.json", "events.jsonl", "monitor.log", "training.log"
METRICS, JOB = "metrics.jsonl", "job.json"
STATE, STOP = "monitor.json", "stop.request"
QUEUE = ".queue.json"  # in outputs/: see jobs/queue.py
MACHINES = "machines"  # in the run's folder: what the monitors of other machines than the first one write
# of another machine's status
SHOWN = ["host", "state", "phase", "step", "incidents", "message", "reason", "updated_at"]
MESSAGE_S = 60.0  # for a message to leave
NOTIFIED = {  # the events that are sent by default: what apprise calls them
    "hang": "warning", "crash": "warning", "restarted": "info", "completed": "success", "failed": "failure",
    "unkillable": "failure", "unwatched": "warning", "slowdown": "warning",
}  # fmt: skip
SENDERS = 4  # messages that leave at the same time
SCRIPT = "train.bat" if platform.WINDOWS else "train.sh"


class MonitorError(runs.RunError):
    """A problem that a person can fix: what is wrong, where, and what to do."""


class AlreadyWatched(MonitorError):
    """Another monitor watches the run."""


def find(name: str | os.PathLike[str]) -> Path:
    """The folder of a run: any folder with a train script, or a run by its name or slug.

    Raises:
        MonitorError: there is no such run; the message lists those that exist.
    """
    given = Path(os.path.expanduser(name))  # Path.expanduser fails where there is no such user
    for folder in (given, outputs_dir() / given):  # the second: the user's own script in a folder among the runs
        if (folder / SCRIPT).is_file():
            return folder.resolve()
    try:
        folder = runs.run_folder(str(name))
    except runs.RunError as error:
        raise MonitorError(f"{error}; or name a folder that contains {SCRIPT}") from error
    if not (folder / SCRIPT).is_file():
        raise MonitorError(f"{folder}: {SCRIPT} is missing; write it with `python -m runs render {folder.name}`")
    return folder.resolve()


def all_folders() -> list[Path]:
    """The folders of all runs of this data root that have a train script, by name."""
    return with_file(SCRIPT)


def notify_file() -> Path:
    """The file with the user's own addresses for messages (cli/notify.py); there may be none."""
    given = os.environ.get("HANGPROOF_NOTIFY")
    return Path(given).expanduser() if given else config_dir() / "notify.toml"


def wake_queue(outputs: Path) -> bool:
    """Start the queue's process where runs wait in the folder of all runs; whether it was. Never raises.

    It ends at once where another works.
    """
    try:
        if not (read_json(outputs / QUEUE) or {}).get("entries"):
            return False
        helper(python("jobs", "queue", "work"), subprocess.DEVNULL)
        return True
    except OSError:
        return False  # no memory, a full disk: the next one who looks tries again


LIVE = ("store", "price_per_hour", "spend_limit")  # fields of run.toml that only the monitor reads, at each start


def read_spec(folder: Path) -> dict[str, Any]:
    """The fields of a run's spec as its job has them, or `run.toml` without a job; {} where neither can be read."""
    try:
        edited = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        edited = {}
    made = (read_json(folder / JOB) or {}).get("spec")
    if isinstance(made, dict):
        edited = {**made, **{name: edited[name] for name in LIVE if name in edited}}
    wrong = [key for key in ("gpus", "nodes") if not isinstance(edited.get(key, 1), int)]  # a start says what is wrong
    return {key: value for key, value in edited.items() if key not in wrong}


def machine_number(folder: Path, environ: Mapping[str, str]) -> int | None:
    """Which of the machines that train this run together this one is, from 0; None for a run on one machine.

    A script of the user's own trains on several machines where the variable is set.

    Raises:
        MonitorError: the variable is missing, or is no number of a machine.
    """
    spec, text = read_spec(folder), environ.get(spawned.MACHINE, "")
    count = spec.get("nodes", 1) if spec else 0
    if count == 1 or not (spec or text):
        return None
    if not (text.isascii() and text.isdigit()) or (count and int(text) >= count):
        start = "start it with `python -m launch slurm` or `skypilot`, or by hand as docs/machines.md says"
        what = f"trains on several machines, and {spawned.MACHINE}={text!r} is not the number of one"
        raise MonitorError(f"{folder.name} {what}; {start}")
    return int(text)


def own_folder(folder: Path, machine: int | None) -> Path:
    """Where the monitor of a machine writes: the run's folder for the first, `machines/N` in it for another."""
    return folder / MACHINES / str(machine) if machine else folder


def machines(folder: Path) -> list[dict[str, Any]]:
    """What the other machines' monitors say in their own status.json, by number."""
    paths = sorted(folder.glob(f"{MACHINES}/*/{STATUS}"), key=lambda path: (len(path.parent.name), path.parent.name))
    found = [(path.parent.name, values) for path in paths if (values := read_json(path)) is not None]
    return [{"machine": number, **{key: values.get(key) for key in SHOWN}} for number, values in found]


class RunFolder:
    """Reads and writes the files of one run. `on_event` is called with (kind, message) of each event."""

    def __init__(self, folder: Path, echo: bool = False, machine: int | None = None):
        """echo: show the log on standard error too. machine: which of several this is, as `machine_number` says."""
        self.folder = folder
        self.machine = machine
        self.own = own_folder(folder, machine)  # what this machine's monitor writes
        self.spec = read_spec(folder)
        if machine and self.spec:  # the first machine alone copies the run, and counts what it costs
            self.spec = {**self.spec, "store": "", "spend_limit": 0, "price_per_hour": 0}
        self.name = str(self.spec.get("name") or folder.name)
        self.echo = echo
        self.ends = False  # the run has ended: what is written now is not written again
        self.on_event: Callable[[str, str], None] = lambda kind, message: None
        self._masked: Callable[[bytes, bool], bytes] = lambda text, begun: text
        if self.spec.get("secrets"):
            from runs import env_file  # most runs have none; now, because an update may replace the file later

            self._masked = partial(env_file.masked_end, folder)

    @property
    def foreign(self) -> bool:
        """The script was not rendered from a `run.toml`."""
        return not self.spec

    @property
    def lora(self) -> Path | None:
        """The finished LoRA, if there is one."""
        path = self.folder / f"{self.folder.name}.safetensors"
        return path if path.is_file() else None

    def log(self, text: str) -> None:
        """Append a line to monitor.log and, in the foreground, to standard error."""
        line = plain(f"{platform.now().utc} {text}")
        if self.echo:
            print_line(line)
        self._write(LOG, lambda path: append_text(path, line))

    def event(self, kind: str, message: str, **more: object) -> None:
        """Append an event to events.jsonl and to the log. Intervals between events of one boot are in `mono_s`."""
        clock = {"mono_s": round(time.monotonic(), 3), "boot": platform.boot_id()[:8]}
        values = {"t": platform.now().utc, "kind": kind, "message": message, **more, **clock}
        self._write(EVENTS, lambda path: append_line(path, values))
        self.log(f"{kind}: {message}")
        self.on_event(kind, message)

    def incident_numbers(self) -> list[int]:
        """The numbers of the run's incidents (folders `incidents/NNNN`)."""
        try:
            return [int(name) for name in os.listdir(self.own / "incidents") if name.isdecimal()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stop_request(self) -> dict[str, Any] | None:
        """The user's request to stop, {} or {"now": true}; None without one."""
        path = f"{self.own}{os.sep}{STOP}"  # a Path would take most of the time of each look
        return (read_json(path) or {}) if os.path.exists(path) else None

    def clear_stop_request(self, before_s: float = float("inf")) -> None:
        """Remove the request, if it was made before `before_s` (Unix time)."""
        with contextlib.suppress(FileNotFoundError):
            if (path := self.own / STOP).stat().st_mtime < before_s:
                path.unlink()

    def log_size(self) -> int:
        """Size of training.log in bytes, 0 when it cannot be read."""
        try:
            return os.stat(f"{self.own}{os.sep}{TRAINING_LOG}").st_size
        except OSError:
            return 0

    def mark_log(self, text: str) -> None:
        """Add a heading of the monitor to training.log."""
        self._write(TRAINING_LOG, lambda path: append_text(path, f"=== {platform.now().utc} {text}"))

    def log_tail(self, since: int, limit: int) -> str:
        """The last `limit` bytes of training.log, none of them from before byte `since`, without the run's secrets."""
        try:
            with open(self.own / TRAINING_LOG, "rb") as file:
                start = max(since, file.seek(0, os.SEEK_END) - limit)
                file.seek(start)
                text = file.read(limit)
        except OSError:
            return ""
        return self._masked(text, start > since).decode("utf-8", "replace")

    def write_status(self, values: dict[str, Any]) -> bool:
        """Replace status.json."""
        return self.replace(STATUS, json.dumps(values, ensure_ascii=False))

    def replace(self, name: str, text: str, sync: bool = False, errors: str = "replace") -> bool:
        """Replace a file of this machine's monitor atomically; False, with a message, if it fails. `sync`: onto disk.

        errors: how what UTF-8 cannot encode is written: a file name that is not UTF-8 is a surrogate in `text`.
        """
        data = (text + "\n").encode("utf-8", errors)
        return self._write(name, lambda path: atomic_write(path, data, sync)) or (self.ends and self._reuse(name, data))

    def _reuse(self, name: str, data: bytes) -> bool:
        """Write a file into the blocks that it has: a full disk takes no other. A kill in this moment damages it."""

        def write(path: str) -> None:
            with open(path, "r+b", buffering=0) as file:
                found = os.fstat(file.fileno())
                if len(data) > 512 * getattr(found, "st_blocks", 0):  # Windows does not say
                    raise OSError(errno.ENOSPC, "its blocks are too few")
                file.write(data.ljust(found.st_size))
                os.fsync(file.fileno())

        return self._write(name, write)

    def metric(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self._write(METRICS, lambda path: append_line(path, values))

    def _write(self, name: str, write: Callable[[str], None]) -> bool:
        path = os.path.join(self.own, name)
        try:
            write(path)
            return True
        except OSError as error:
            print_line(f"monitor: cannot write {path}: {error.strerror or error}")
            return False


class Notifier:
    """Messages to people, at events: a subprocess (cli/notify.py) for each, a few at a time; kills one that is too slow."""

    def __init__(self, name: str, log: Callable[[str], None]):
        self.name = name
        self._log = log
        self._path = os.fspath(notify_file())
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=100)  # the newest
        self._sending: list[tuple[str, Subjob]] = []

    def event(self, kind: str, message: str) -> None:
        """Send what the user asked for, and nothing where `notify.toml` does not exist."""
        try:
            asked = kind in tomllib.loads(Path(self._path).read_text(encoding="utf-8-sig")).get("on", NOTIFIED)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, RecursionError, TypeError, ValueError):
            asked = True  # the subprocess says what is wrong with the file
        if not asked:
            return
        text = json.dumps({"kind": kind, "title": f"{self.name}: {kind}", "body": message}).encode("utf-8")
        self._waiting.append((kind, text))
        self.poll()

    def poll(self, wait_s: float = 0.0) -> None:
        """Collect what is done, send what waits. wait_s: at the end of a run, seconds for the newest messages, which
        then wait for none that hangs."""
        until_s, most = time.monotonic() + wait_s, 2 * SENDERS if wait_s else SENDERS
        while self._sending or self._waiting:
            while self._waiting and len(self._sending) < most:
                kind, text = self._waiting.pop() if wait_s else self._waiting.popleft()
                self._sending.append((kind, Subjob(python("monitor.cli.notify"), MESSAGE_S, stdin=text)))
            for kind, job in [sending for sending in self._sending if sending[1].done()]:
                self._sending.remove((kind, job))
                if job.error:
                    said = job.text().strip()[:500] if job.code is not None and not job.timed_out else ""
                    self._log(f"notification of {kind}: {said or job.error}")
            if time.monotonic() >= until_s:
                return
            time.sleep(0.05)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line, by default on standard error, unless that would block: an undrained pipe must not stop us."""
    stream = stream or sys.stderr
    with contextlib.suppress(OSError, ValueError):  # closed or full: there is nowhere left to report to
        if platform.WINDOWS or select.select([], [stream], [], 0)[1]:
            # A pipe that is ready for writing takes at least PIPE_BUF (4096) bytes without blocking: pipe(7).
            print(plain(line)[:1000], file=stream, flush=True)
