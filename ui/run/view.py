"""Reads a run's folder for the page: its status, incidents, losses, LoRAs, samples and log.

Nothing here waits for the trainer or the monitor. A missing, incomplete or invalid file affects only its own part of
the view. The page asks every second, with hundreds of runs and a `metrics.jsonl` of a million lines, so a file is read
again only after it changed, and a growing file is read from where the last read ended (ui/run/readers.py).
"""

import functools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomllib

import runs
from runs import env_file, manage
from runs.evolution import SUFFIX, Evolution, Lora, Losses, read_lora, read_prompts, read_samples, table
from ui.run.metrics import Metrics
from ui.run.readers import Log, LogTail, kept, stamp

if TYPE_CHECKING:
    from monitor.ledger import Ledger

FINAL = ("completed", "failed", "stopped", "paused", "preempted", "unkillable")
STOP_REQUEST = "stop.request"  # in a run's folder, until the monitor has read it (monitor/run_folder.py)
SAMPLES, PROMPTS, METRICS = "sample", "sample_prompts.txt", "metrics.jsonl"
READ_RUNS = 8  # runs whose losses, log and incidents stay in memory
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
        value = self.status.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def time(self, key: str) -> datetime | None:
        """A time from status.json; None when it is missing or not a time."""
        return moment(self.status.get(key))

    def since(self, key: str, now: datetime | None = None) -> float | None:
        """Seconds since a time in status.json; None when it is missing or not a time."""
        then = self.time(key)
        return max(0.0, ((now or datetime.now(UTC)) - then).total_seconds()) if then else None

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


def moment(text: object) -> datetime | None:
    """The time that a status has as text, in UTC where it names no zone; None when it is none."""
    try:
        then = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return then if then.tzinfo else then.replace(tzinfo=UTC)


# The list -------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()  # two open tabs poll in two threads


def read(folder: Path) -> View:
    """The current view of one run."""
    from monitor.process.locks import LOCK, is_held
    from monitor.state import with_age

    files = [folder / name for name in ("run.toml", "status.json", manage.LABEL)]
    view = kept("view", folder, files, lambda: _read(folder))
    state = view.status.get("state")
    if not isinstance(state, str) or state in FINAL or not is_held(folder / LOCK):
        return view
    return _watched(view, with_age({**view.status, "alive": True})["stale"])


@functools.lru_cache(maxsize=1000)
def _watched(view: View, stale: str) -> View:
    """The view of a run whose monitor lives."""
    return replace(view, status={**view.status, "alive": True, "stale": stale})


def _read(folder: Path) -> View:
    spec: dict[str, Any] = {}
    now: dict[str, Any] = {}
    problem = ""
    try:
        # As plain values, not validated, because validating every run of the list takes too long.
        spec = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))
        if env_file.exposed(spec):
            spec = runs.load(folder).public()  # takes the secrets out of the files that a person wrote
    except (OSError, ValueError, runs.RunError) as error:
        problem = f"{folder / 'run.toml'} cannot be read: {error}"
    try:
        value = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        now = value if isinstance(value, dict) else {}
    except FileNotFoundError:
        pass  # never started
    except ValueError:
        pass  # incomplete: it is replaced within a second
    except OSError as error:
        problem = f"{folder / 'status.json'} cannot be read: {error}"
    name = manage.label_of(folder) or spec.get("name")
    return View(folder, name if isinstance(name, str) else folder.name, {**now, "alive": False}, problem, spec)


def read_all() -> list[View]:
    """All runs, newest first. The order does not change while runs progress, so that a click hits the intended run."""
    found, outputs = [], runs.outputs_dir()
    try:
        names = os.listdir(outputs)
    except OSError:
        names = []
    for name in names:
        if name.startswith("."):
            continue
        folder = outputs / name
        try:
            created = os.stat(folder / "run.toml").st_mtime
        except OSError:
            continue
        found.append((created, name, folder))
    with _lock:
        return [read(folder) for _, _, folder in sorted(found, reverse=True)]


# The selected run -------------------------------------------------------------------------------------------------------


class Reader:
    """What the page keeps of one run between two ticks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.metrics = Metrics(folder / METRICS)
        self.tail = LogTail(folder / "training.log")
        self._losses = Losses(folder / METRICS)
        self._made_of: tuple[Any, ...] = ()
        self._evolution = Evolution()

    def evolution(self) -> Evolution:
        """The snapshots."""
        found, stamps = loras(self.folder), [stamp(self.folder / name) for name in (SAMPLES, PROMPTS, METRICS)]
        if (*stamps, *found) != self._made_of or any(one.young for one in stamps):
            self._losses.update()
            prompts, samples = read_prompts(self.folder / PROMPTS), read_samples(self.folder / SAMPLES)
            self._evolution = table(prompts, samples, found, self._losses)
            self._made_of = (*stamps, *found)
        return self._evolution


def _incident(path: Path) -> Incident | None:
    try:
        fields = json.loads((path / "incident.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        report = (path / "report.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        report = ""
    return Incident(path.name, fields, report) if isinstance(fields, dict) else None


_readers: OrderedDict[Path, Reader] = OrderedDict()


def _with_reader(folder: Path, use: Callable[[Reader], T]) -> T:
    with _lock:
        reader = _readers.pop(folder, None) or Reader(folder)
        _readers[folder] = reader
        while len(_readers) > READ_RUNS:
            _readers.popitem(last=False)
        return use(reader)


def incidents(folder: Path) -> list[Incident]:
    """Hangs and crashes, newest first."""
    try:
        names = sorted((n for n in os.listdir(folder / "incidents") if n[:1].isdigit()), reverse=True)
    except OSError:
        return []
    paths = [folder / "incidents" / name for name in names]
    found = (_kept_incident(path) for path in paths)
    return [one for one in found if one is not None]  # None: not written completely yet


def _kept_incident(path: Path) -> Incident | None:
    return kept("incident", path, [path / "incident.json", path / "report.md"], lambda: _incident(path))


def ledger(view: View) -> "Ledger":
    """Where the time of a run went."""
    from monitor.ledger import Ledger

    return Ledger.of(view.status)


def with_metrics(folder: Path, use: Callable[[Metrics], T]) -> T:
    """What `use` makes of the run's numbers, which are up to date and do not change meanwhile."""
    return _with_reader(folder, lambda reader: use(reader.metrics.update()))


def log(folder: Path) -> Log:
    """The end of the training log as a terminal shows it, with its first error."""
    return _with_reader(folder, lambda reader: reader.tail.update())


def loras(folder: Path) -> list[Lora]:
    """The complete LoRA files: the final one first, then the newest first.

    The trainers write to a hidden name and rename, and safetensors refuses a file that is shorter than its header says,
    which covers scripts of the user's own.
    """
    try:
        paths = [folder / name for name in os.listdir(folder) if name.endswith(SUFFIX) and name[0] != "."]
    except OSError:
        return []
    loras = (kept("lora", path, [path], functools.partial(_lora, path)) for path in paths)
    found = [lora for lora in loras if lora is not None]
    return sorted(found, key=lambda one: (one.final, one.step or 0, one.epoch or 0, one.path.name), reverse=True)


def _lora(path: Path) -> Lora | None:
    return read_lora(path, stamp(path).size)


def evolution(folder: Path) -> Evolution:
    """The snapshots of a run, with the samples and losses of each; read again only after a file changed."""
    return _with_reader(folder, Reader.evolution)


def stop_requested(folder: Path) -> bool:
    """Whether a stop was requested that the monitor has not read yet."""
    return os.path.exists(folder / STOP_REQUEST)
