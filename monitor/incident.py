"""An incident's folder: `incident.json` for programs, `report.md` for people, stacks and log tail as they were."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from monitor import report
from monitor.causes import Cause
from monitor.evidence import Evidence
from monitor.folder import RunFiles


@dataclass
class Incident:
    """One hang or crash, from its discovery to the first new step after it. Seconds are None until they are known."""

    folder: Path
    evidence: Evidence
    cause: Cause
    attempt: int
    progress_s: float  # monotonic time of the last progress before it
    best_step: int  # the furthest step reached by then
    started_at: str  # UTC of the last progress
    detect_s: float
    recover_s: float | None = None
    resumed_from: int | None = None
    steps_repeated: int | None = None
    changed: list[str] = field(default_factory=list)
    ended_at: str | None = None
    outcome: str = "the run is being brought back"
    bad_checkpoints: list[str] = field(default_factory=list)
    killed: list[dict] = field(default_factory=list)

    @property
    def number(self) -> str:
        return self.folder.name

    @classmethod
    def open(cls, files: RunFiles, evidence: Evidence, cause: Cause, **known: object) -> Incident:
        """Make the incident's folder and write down what was found."""
        incident = cls(files.new_incident(), evidence, cause, **known)
        incident.save(files)
        return incident

    def save(self, files: RunFiles) -> None:
        """Write incident.json and report.md as they stand, and beside them what could not be written yet (a full disk)."""
        texts = [f"--- process {pid}\n{text.strip()}\n" for pid, text in self.evidence.stacks.items()]
        once = {"stacks.txt": "\n".join(texts) or "no stack could be had", "log_tail.txt": self.evidence.log_tail}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in once.items():
            if not (self.folder / name).exists():
                files.replace(f"incidents/{self.number}/{name}", text)
        values = {
            "id": self.number,
            "kind": self.evidence.kind,
            "cause": self.cause.name,
            "title": self.cause.title,
            "explanation": self.cause.explanation,
            "phase": self.evidence.phase,
            "step": self.evidence.step,
            "resumed_from": self.resumed_from,
            "steps_repeated": self.steps_repeated,
            "detect_s": round(self.detect_s, 3),
            "recover_s": round(self.recover_s, 3) if self.recover_s is not None else None,
            "changed": self.changed,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "attempt": self.attempt,
            "outcome": self.outcome,
            "evidence": self.evidence.to_json(),
        }
        text = json.dumps(values, ensure_ascii=False, indent=1)
        files.replace(f"incidents/{self.number}/incident.json", text)
        files.replace(f"incidents/{self.number}/report.md", report.write(self, files.name))
