"""What a run's folder says, as plain values: the only place the page reads runs from.

Nothing here waits on the trainer or the monitor, and a file that is missing, half there or not ours costs its own part
of the view only. `metrics.jsonl` grows to a million lines, so it is read on from where the last look ended.
"""

import functools
import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import tomllib

import runs
from ui.html import plain_log

FINAL = ("completed", "failed", "stopped", "preempted", "unkillable")
LOG_BYTES = 128 * 1024
LOG_LINES = 300
SAMPLES = 12
SAMPLE_NAME = re.compile(r"_(e?)(\d{6,})_(\d+)_\d{8,}")


@dataclass(frozen=True)
class Incident:
    """One hang or crash, as the monitor wrote it down."""

    number: str
    fields: dict
    report: str


@dataclass(frozen=True)
class View:
    """One run. Fields that the run has not come to are None."""

    folder: Path
    name: str
    status: dict = field(default_factory=dict)
    fault: str = ""
    spec: dict = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether a monitor watches it now."""
        return bool(self.status.get("alive"))

    @property
    def state(self) -> str:
        """The monitor's word, `new` for a run that never started, `orphaned` for one whose monitor is gone."""
        state = self.status.get("state")
        if not isinstance(state, str):
            return "new"
        return state if state in FINAL or self.alive else "orphaned"

    @property
    def share(self) -> float:
        """Steps done of those planned, 0 to 1."""
        step, planned = self.number("step") or 0, self.number("planned_steps") or 0
        if self.state == "completed":
            return 1.0
        return min(1.0, step / planned) if planned else 0.0

    def number(self, key: str) -> float | None:
        """A number of the status; None when it is missing or something else."""
        value = self.status.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def since(self, key: str, now: datetime | None = None) -> float | None:
        """Seconds since a time of the status."""
        try:
            then = datetime.fromisoformat(str(self.status.get(key)))
        except ValueError:
            return None
        then = then if then.tzinfo else then.replace(tzinfo=UTC)
        return max(0.0, ((now or datetime.now(UTC)) - then).total_seconds())

    @property
    def checkpoint(self) -> int | None:
        """The step that a restart goes on from; None: it would begin anew."""
        entry = self.status.get("checkpoint")
        step = entry.get("step") if isinstance(entry, dict) else None
        return step if isinstance(step, int) else None

    @property
    def again(self) -> str:
        """What the button that starts it is called."""
        if self.state == "completed":
            return "Train longer"
        if self.state == "new":
            return "Start"
        return "Start again" if self.checkpoint is None else "Resume"

    @property
    def lora(self) -> Path | None:
        """The finished LoRA."""
        path = self.folder / f"{self.folder.name}.safetensors"
        return path if self.state == "completed" and path.is_file() else None


def read(folder: Path) -> View:
    """One run as its folder says it is now."""
    from monitor import status

    spec, fault, now = {}, "", {}
    try:
        spec = _spec(folder / "run.toml", (folder / "run.toml").stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        fault = f"{folder / 'run.toml'} cannot be read: {error}"
    try:
        now = status.read(folder) or {}
    except (OSError, ValueError) as error:
        fault = f"{folder / 'status.json'} cannot be read: {error}"
    name = spec.get("name")
    return View(folder, name if isinstance(name, str) else folder.name, now, fault, spec)


def read_all() -> list[View]:
    """All runs, the one made last first; this order stays while one looks, so that a click hits what it aims at."""
    return [read(folder) for folder in sorted(runs.list_runs(), key=_made, reverse=True)]


def _made(folder: Path) -> tuple[float, str]:
    try:
        return (folder / "run.toml").stat().st_mtime, folder.name
    except OSError:
        return 0.0, folder.name


@functools.lru_cache(maxsize=1024)
def _spec(path: Path, stamp: int) -> dict:
    """The run's spec as plain values, unchecked, because a list of runs must not cost a validation each."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def incidents(folder: Path) -> list[Incident]:
    """Hangs and crashes, the latest first."""
    found = []
    for place in sorted((folder / "incidents").glob("[0-9]*"), reverse=True):
        try:
            fields = json.loads((place / "incident.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # being written; the next look finds it
        try:
            report = (place / "report.md").read_text(encoding="utf-8", errors="replace")
        except OSError:
            report = ""
        if isinstance(fields, dict):
            found.append(Incident(place.name, fields, report))
    return found


def log_tail(folder: Path, name: str = "training.log") -> str:
    """The end of a log, as a person would have seen it."""
    try:
        with (folder / name).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_BYTES))
            return plain_log(file.read(), LOG_LINES)
    except OSError:
        return ""


def samples(folder: Path) -> list[tuple[Path, str]]:
    """The newest sample images, each with what it shows: (file, "step 120 · prompt 1")."""
    found = []
    for path in (folder / "sample").glob("*.png"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except OSError:
            continue
    out = []
    for _, path in sorted(found, reverse=True)[:SAMPLES]:
        match = SAMPLE_NAME.search(path.stem)
        unit = "epoch" if match and match[1] else "step"
        out.append((path, f"{unit} {int(match[2]):,} · prompt {int(match[3]) + 1}" if match else path.stem))
    return out


class Losses:
    """Loss by step of a run's `metrics.jsonl`, read on from where the last look ended.

    For a step seen twice (repeated after a restart) the last line counts, as for every reader of that file.
    """

    def __init__(self, path: Path):
        self.path, self.by_step = path, {}
        self._offset, self._inode = 0, None

    def update(self) -> dict[int, float]:
        """Read what is new; the losses by step."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self.by_step, self._offset, self._inode = {}, 0, stat.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return self.by_step
        whole = data.rfind(b"\n") + 1  # a line still being written waits for the next look
        self._offset += whole
        for line in data[:whole].splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("kind") == "step" and isinstance(entry.get("step"), int):
                loss = entry.get("loss")
                self.by_step[entry["step"]] = float(loss) if isinstance(loss, int | float) else float("nan")
        return self.by_step


_losses: OrderedDict[Path, Losses] = OrderedDict()
_turn = threading.Lock()  # two open tabs tick in two threads


def losses(folder: Path) -> dict[int, float]:
    """Loss by step. The last eight runs looked at are kept, so that a tick reads only what was added."""
    path = folder / "metrics.jsonl"
    with _turn:
        reader = _losses.pop(path, None) or Losses(path)
        _losses[path] = reader
        while len(_losses) > 8:
            _losses.popitem(last=False)
        return dict(reader.update())
