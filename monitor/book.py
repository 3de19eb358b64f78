"""What must survive the monitor itself: attempts, restarts, what was changed, what was learned. Kept in `monitor.json`.

A monitor that is killed leaves this behind; the next one reads it, finds the living training by (boot, pid, start) and its
token, and goes on as if it had been there all the time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from monitor.folder import BOOK, RunFiles, read_json
from monitor.policy import History

VERSION = 1


@dataclass
class Book:
    """Plain values only."""

    state: str = "queued"
    attempt: int = 0  # the last one that was started
    restarts: int = 0  # of the whole run, never refunded: what the user is shown
    best_step: int = 0  # the furthest step that any attempt reached
    resumed_step: int = 0  # where the attempt under way began
    planned: int = 0
    started_at: str | None = None
    reason: str | None = None
    history: History = field(default_factory=History)
    changes: list[dict] = field(default_factory=list)  # mitigations in force: {"name", "sentence"}
    was: list[str] = field(default_factory=list)  # mitigations in force when the states were saved
    save_dir: str = ""  # where states are written first, "" for the run's own folder
    used: dict[str, int] = field(default_factory=dict)  # cause -> failures by it since the run began
    known: dict[str, dict] = field(default_factory=dict)  # learned durations, by phase
    attempt_under_way: dict | None = None
    asked_at: float | None = None  # when the run was queued for its GPU (seconds since boot)
    spec_mark: str = ""

    def save(self, files: RunFiles) -> None:
        files.book({"version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, files: RunFiles) -> Book:
        """The book of this run; a new one where there is none, or of another version."""
        values = files.read_book()
        if values.pop("version", None) != VERSION:
            return cls()
        history = History(**values.pop("history"))
        return cls(history=history, **values)

    def renewed(self, mark: str) -> None:
        """The user starts the run again: allowance and waiting are whole; changes stay unless the spec was edited."""
        self.history = History()
        self.reason = None
        self.attempt_under_way = None
        self.asked_at = None
        if mark != self.spec_mark:
            self.changes, self.used = [], {}
        self.spec_mark = mark


def spec_mark(folder: Path) -> str:
    """Tells whether `run.toml` was edited between two starts."""
    try:
        return hashlib.sha256((folder / "run.toml").read_bytes()).hexdigest()
    except OSError:
        return ""


def nothing_left(folder: Path) -> str:
    """A sentence for a run that has completed, has its LoRA, and was not changed since; "" where a start has work to do."""
    book = read_json(folder / BOOK) or {}
    mark = spec_mark(folder)
    if book.get("state") != "completed" or not mark or mark != book.get("spec_mark") or RunFiles(folder).lora is None:
        return ""
    return (
        f"completed already ({book.get('best_step')} steps), nothing is left to train; to train on from there raise epochs "
        f"or max_train_steps in {folder / 'run.toml'} and start it again, to train anew make another run"
    )


def learned_key(spec: dict, gpu: str) -> str:
    """Runs that take equally long: same model, tier, resolution, batch and GPU."""
    parts = [str(spec.get(k, "")) for k in ("backend", "model", "tier", "resolution", "batch_size")]
    return "|".join([*parts, gpu or "cpu"])


def learned(path: Path, key: str) -> dict[str, dict]:
    """Durations that earlier runs of this kind taught; {} for the first."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get(key, {})
    except (OSError, ValueError, AttributeError):
        return {}


def learn(path: Path, key: str, known: dict[str, dict]) -> None:
    """Keep durations for the next run of this kind. OSError when they cannot be written: then nothing is kept."""
    from guards.checkpoint import atomic_write

    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = {}
    table[key] = known
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(table, indent=1))
