"""Reads a run's folder for the page: its status, incidents, losses, LoRAs and samples.

Nothing here waits for the trainer or the monitor. A missing, incomplete or invalid file affects only its own part of
the view. The page asks every second, with hundreds of runs and a `metrics.jsonl` of a million lines, so a file is read
again only after it changed, and a growing file is read from where the last read ended (ui/run/readers.py).
"""

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import tomllib

import runs
from guards.reading import read_bytes, read_json, read_text
from monitor.process.platform import LOCK, is_held
from monitor.run_folder import METRICS, STATUS, STOP
from monitor.state import FINAL, lost_status, with_age
from runs import env_file, manage, results
from runs.files import RunError, explained
from runs.results import Lora
from ui.dataset.draft_store import OUT_OF_DATE
from ui.run import snapshots
from ui.run.metrics import LARGEST, Metrics
from ui.run.readers import kept, latest, stamp

SAMPLES, PROMPTS = "sample", "sample_prompts.txt"
READ_RUNS = 32  # runs whose losses stay in memory
T = TypeVar("T")


@dataclass(frozen=True)
class Incident:
    """One hang or crash as the monitor recorded it."""

    number: str
    fields: dict[str, Any]
    report: str


@dataclass(frozen=True, eq=False)
class View:
    """One run; the same object as long as its files are unchanged. `problem` says which file cannot be read, or ""."""

    folder: Path
    name: str
    status: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether a monitor is running for it. Not asked for a run in a final state."""
        return bool(self.status.get("alive"))

    @property
    def stale(self) -> str:
        """Why the figures are old although a monitor runs, as a sentence; "" when they are not."""
        return str(self.status.get("stale") or "")

    @property
    def state(self) -> str:
        """The monitor's state; `new` when the run never started, `orphaned` when its monitor is gone."""
        state = self.status.get("state")
        if not isinstance(state, str):
            return "new"
        return state if state in FINAL or self.alive else "orphaned"

    @property
    def running(self) -> bool:
        """Whether it is under way, watched by a monitor."""
        return self.alive and self.state not in FINAL

    @property
    def progress(self) -> float:
        """Completed share of the planned steps, 0 to 1."""
        step, planned = self.number("step") or 0, self.number("planned_steps") or 0
        if self.state == "completed":
            return 1.0
        return min(1.0, step / planned) if planned else 0.0

    def number(self, key: str) -> float | None:
        """A number from status.json; None when it is missing or not a number."""
        return number_of(self.status, key)

    def time(self, key: str) -> datetime | None:
        """A time from status.json; None when it is missing or not a time."""
        return moment(self.status.get(key))

    @property
    def checkpoint(self) -> int | None:
        """The step that a restart resumes from; None without a checkpoint."""
        entry = self.status.get("checkpoint")
        step = entry.get("step") if isinstance(entry, dict) else None
        return step if isinstance(step, int) else None

    @property
    def start_label(self) -> str:
        """Label of the button that starts the run."""
        if self.state == "completed":
            return "Train longer"
        if self.state == "new":
            return "Start"
        return "Start again" if self.checkpoint is None else "Resume"


def number_of(values: dict[str, Any], key: str) -> float | None:
    """A number among the values of a file; None where it is missing, no number, or larger than any measured one."""
    value: Any = values.get(key)
    return value if type(value) in (int, float) and abs(value) < LARGEST else None


def moment(text: object) -> datetime | None:
    """The time that a status has as text, in UTC where it names no zone; None when it is none."""
    try:
        then = datetime.fromisoformat(str(text))
        return (then if then.tzinfo else then.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # the first or the last day of the calendar
        return None


def folder_of(name: object) -> Path:
    """The folder of the run that a browser or a program names. RunError: there is none."""
    if not isinstance(name, str):
        raise RunError(OUT_OF_DATE)
    folder = runs.outputs_dir() / name
    try:
        known = folder.parent == runs.outputs_dir() and name[:1] != "." and (folder / "run.toml").is_file()
    except (OSError, ValueError):  # too long, or with a null character
        known = False
    if not known:
        raise RunError(unreadable() or f"There is no run {name[:100]!r}. It may have been deleted.")
    return folder


def unreadable() -> str:
    """Why no run can be shown, such as a network drive that is gone; "" where all can, or where there is none yet."""
    try:
        with explained("show the runs"), contextlib.suppress(FileNotFoundError):
            os.listdir(runs.outputs_dir())
    except RunError as error:
        return str(error)
    return ""


# The list -------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()  # two open tabs poll in two threads


def read(folder: Path) -> View:
    """The current view of one run."""
    files = [folder / name for name in ("run.toml", STATUS, manage.LABEL)]
    view = kept("view", folder, files, lambda: _read(folder))
    state = view.status.get("state")
    if not isinstance(state, str) or state in FINAL or not is_held(folder / LOCK):
        return view
    stale = with_age({**view.status, "alive": True})["stale"]
    status = {**view.status, "alive": True, "stale": stale}
    return latest("alive", folder, (view, stale), lambda: replace(view, status=status))


def _read(folder: Path) -> View:
    spec: dict[str, Any] = {}
    now: dict[str, Any] = {}
    problem = ""
    try:
        # As plain values, not validated, because validating every run of the list takes too long.
        spec = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8-sig"))
        if env_file.exposed(spec):
            spec = env_file.moved(spec)  # into `environment`, which nobody is shown: an invalid spec cannot be loaded
            spec = runs.load(folder).public()  # takes the secrets out of the files that a person wrote
    except (OSError, ValueError, RecursionError, RunError) as error:
        problem = f"{folder / 'run.toml'} cannot be read: {error}"
    try:
        value = json.loads(read_bytes(folder / STATUS))
        now = value if isinstance(value, dict) else {}
    except (FileNotFoundError, ValueError, RecursionError):
        now = lost_status(folder)
    except OSError as error:
        problem = f"{folder / STATUS} cannot be read: {error}"
    name = manage.label_of(folder) or spec.get("name")
    return View(folder, name if isinstance(name, str) else folder.name, {**now, "alive": False}, problem, spec)


def read_all() -> list[View]:
    """All runs, newest first. The order does not change while runs progress, so that a click hits the intended run."""
    outputs = runs.outputs_dir()
    folders = [outputs / name for name in _names(outputs) if not results.FOREIGN.search(name)]
    created = {folder: stamp(folder / "run.toml").mtime_ns for folder in folders}
    newest = sorted(filter(created.get, folders), key=lambda folder: (created[folder], folder.name), reverse=True)
    with _lock:
        return [read(folder) for folder in newest]


# The selected run -----------------------------------------------------------------------------------------------------

# What grows is read from where the last look ended; a run of a million steps takes seconds, for which those who look at
# another run do not wait. A new run of a deleted one's name has another run.toml, while ext4 gives its files the inodes
# of the deleted ones.
_reader = functools.lru_cache(READ_RUNS)(lambda folder, made: Metrics(folder / METRICS))


def with_metrics(folder: Path, use: Callable[[Metrics], T]) -> T:
    """What `use` makes of the run's numbers, read up to now, which do not change meanwhile."""
    metrics = _reader(folder, stamp(folder / "run.toml"))
    with metrics.lock:
        return use(metrics.update())


def evolution(folder: Path) -> snapshots.Evolution:
    """The snapshots of a run, with the samples and losses of each; read again only after a file changed."""
    found, files = loras(folder), [folder / name for name in (SAMPLES, PROMPTS, METRICS)]

    def made(metrics: Metrics) -> snapshots.Evolution:
        prompts, samples = results.read_prompts(folder / PROMPTS), results.read_samples(folder / SAMPLES)
        return snapshots.table(prompts, samples, found, metrics)

    files += [one.path for one in found]
    return kept("evolution", folder, files, lambda: with_metrics(folder, made), young=True)


def loras(folder: Path) -> list[Lora]:
    """The complete LoRA files of a run; each is read again only after it changed."""
    return results.loras(folder, lambda path: kept("lora", path, [path], lambda: results.read_lora(path)))


def incidents(folder: Path) -> list[Incident]:
    """Hangs and crashes, newest first; one that is not written completely yet is left out."""
    names = sorted((name for name in _names(folder / "incidents") if name[:1].isdigit()), reverse=True)
    found = []
    for path in (folder / "incidents" / name for name in names):
        files = [path / "incident.json", path / "report.md"]
        found.append(kept("incident", path, files, functools.partial(_incident, *files)))
    return [one for one in found if one is not None]


def _incident(values: Path, report: Path) -> Incident | None:
    fields = read_json(values)
    return None if fields is None else Incident(values.parent.name, fields, read_text(report))


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing where it is missing."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def stop_requested(folder: Path) -> bool:
    """Whether a stop was requested that the monitor has not read yet."""
    return os.path.exists(folder / STOP)
