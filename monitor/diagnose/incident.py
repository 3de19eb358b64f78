"""An incident's folder: `incident.json` for programs, `report.md` for people, stacks and log tail as they were.

The first half of the report needs no knowledge of the monitor, the details come last. Text from outside (log lines,
process names, the kernel log) is escaped and cannot change its structure. An incident outlives its monitor: `load`
returns what `save` has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from guards.reading import read_text
from monitor.diagnose.causes import LORA_DAMAGED, Cause, Evidence, log_lines
from monitor.phrases import PHASES, STATES, count, duration, moment, printable
from monitor.process import platform
from monitor.run_folder import RunFolder, read_json
from monitor.state import Signals
from runs.files import typed

TAIL, WIDTH = 15, 200  # lines of the log in the report, characters of such a line
RESTARTING, COMPLETED = "the run is being restarted", "the run completed"
_PROCESS = "--- process "  # begins the stacks of a process in stacks.txt
_OVERWRITTEN = re.compile(r"^.*\r(?=[^\r\n])", re.M)  # a progress bar, by its newer state
_LAUNCHERS_TRACEBACK = re.compile(r"^Traceback \(most.*\n(?:[ \t].*\n)*subprocess\.CalledProcessError: .*\n", re.M)


@dataclass
class Incident:
    """One hang or crash, from the last progress before it to the first new step after it. Unknown values are None."""

    folder: Path
    evidence: Evidence
    cause: Cause
    attempt: int
    progress_s: float  # monotonic time of the last progress before it
    best_step: int  # the highest step reached by then
    started_at: str  # UTC of the last progress
    detect_s: float
    recover_s: float | None = None
    resumed_from: int | None = None
    from_memory: bool = False  # from a snapshot in memory; else from a checkpoint on the disk
    standby: bool = False  # in an attempt that had been started early
    steps_repeated: int | None = None
    changed: list[str] = field(default_factory=list)
    outcome: str = RESTARTING  # a sentence
    bad_checkpoints: list[str] = field(default_factory=list)
    killed: list[dict[str, Any]] = field(default_factory=list)  # {"name", "pid"}

    @property
    def number(self) -> str:
        """As its folder is named: `0001`."""
        return self.folder.name

    @classmethod
    def open(
        cls, folder: RunFolder, evidence: Evidence, cause: Cause, attempt: int, progress_s: float, **known: Any
    ) -> Incident:
        """A new incident with these fields, saved."""
        now = platform.now()
        known = {"started_at": platform.utc(now.wall_s - (now.mono_s - progress_s)), **known}
        try:
            last = max(folder.incident_numbers(), default=0)
        except OSError:  # the folder cannot be listed; an attempt has one incident at most, so its number is free
            last = attempt - 1
        folders = [folder.own / "incidents" / f"{number:04d}" for number in (last, last + 1)]
        begun = cls.load(folders[0])  # by a monitor that was killed before it had noted the failure
        again = begun is not None and (begun.attempt, begun.outcome) == (attempt, RESTARTING)
        path = folders[0] if again else folders[1]
        incident = cls(path, evidence, cause, attempt, progress_s, **known)
        incident.save(folder)
        return incident

    @classmethod
    def load(cls, path: Path) -> Incident | None:
        """The incident in folder `path`, None when its incident.json is missing or damaged."""
        values = read_json(path / "incident.json") or {}
        try:
            # "--- process 7\nstack\n--- process 8\n…" -> ["", "7", "stack", "8", …]
            parts = re.split(rf"^{_PROCESS}(\d+)\n", read_text(path / "stacks.txt"), flags=re.M)
            stacks = {int(pid): stack.strip() for pid, stack in zip(parts[1::2], parts[2::2], strict=True)}
            incident: Incident = typed(cls, {**values, "folder": path, "cause": values["diagnosis"]})
            incident.evidence.stacks, incident.evidence.log_tail = stacks, read_text(path / "log_tail.txt")
            report(incident, "")  # it can be written again
            if values["boot_id"] != platform.boot_id():  # a monotonic time of before the reboot: only the UTC is left
                now = platform.now()
                incident.progress_s = now.mono_s - now.wall_s + datetime.fromisoformat(incident.started_at).timestamp()
            return incident
        except (AttributeError, LookupError, TypeError, ValueError):
            return None  # written by another version

    def recovered(self, folder: RunFolder, at_s: float, outcome: str) -> None:
        """Close it: at `at_s` (monotonic) the first new step was complete, or the run, which had none left."""
        self.recover_s = max(0.0, at_s - self.progress_s)
        # It went on by itself where it has resumed nothing; a full disk may not have kept how far the run was.
        from_step = self.best_step if self.resumed_from is None else self.resumed_from
        self.steps_repeated = max(0, self.best_step - from_step)
        self.close(folder, outcome)

    def close(self, folder: RunFolder, outcome: str) -> None:
        """Record how it ended, as a sentence; saved."""
        self.outcome = outcome
        self.save(folder)

    def save(self, folder: RunFolder) -> bool:
        """Write incident.json and report.md as they are now, and the stacks and the log tail if they are not there yet.

        False: something could not be written (a full disk); the next call tries again.
        """
        values = asdict(self)
        del values["folder"]
        stacks, log_tail = values["evidence"].pop("stacks"), values["evidence"].pop("log_tail")
        e, cause = self.evidence, self.cause
        values |= {
            "id": self.number, "kind": e.kind, "phase": e.phase, "step": e.step, "cause": cause.name,
            "title": cause.title, "explanation": cause.explanation, "diagnosis": values["cause"],
            "boot_id": platform.boot_id(), "verdict": vars(e.group().verdict()),
        }  # fmt: skip
        once = {
            "stacks.txt": "".join(f"{_PROCESS}{pid}\n{text.strip()}\n\n" for pid, text in stacks.items()),
            "log_tail.txt": log_tail,
        }
        texts = {name: text for name, text in once.items() if not os.path.exists(self.folder / name)} | {
            "incident.json": json.dumps(values, ensure_ascii=False, indent=1),
            "report.md": report(self, folder.name),
        }
        with contextlib.suppress(OSError):  # `replace` names what cannot be written
            self.folder.parent.mkdir(exist_ok=True)  # never the run's folder, which may have been moved
            self.folder.mkdir(exist_ok=True)
        return all([folder.replace(f"incidents/{self.number}/{name}", text) for name, text in texts.items()])


def report(incident: Incident, name: str) -> str:
    """The report as Markdown; `name` is the run's."""
    cause, evidence = incident.cause, incident.evidence
    group = evidence.group()
    # None for a single process that had started.
    several = len(evidence.ranks) > 1 or not all(r["count"] for r in evidence.ranks)
    ranks = "\n".join(f"    {line}".rstrip() for line in group.lines(group.verdict()) if several)
    parts = [
        f"# {escape(cause.title)}",
        f"Run **{escape(name)}**, attempt {incident.attempt}, incident {incident.number}, {moment(incident.started_at)}.",
        f"## What happened\n\n{escape(_what_happened(incident))}",
        f"## Likely cause\n\n{escape(cause.explanation)}",
        *([escape(cause.advice)] if cause.advice else []),
        f"## What was done\n\n{_list(_what_was_done(incident))}",
        f"## Cost\n\n{_cost(incident)}",
        *([f"## Ranks\n\n{ranks}"] if ranks else []),
        f"## Details\n\n{_list(_details(evidence))}",
        "Files in this folder: stacks.txt (what every thread was doing), log_tail.txt (the end of the log).",
    ]
    lines = log_lines(_OVERWRITTEN.sub("", evidence.log_tail))
    if log := _LAUNCHERS_TRACEBACK.sub("", "".join(f"{line}\n" for line in lines)).splitlines():
        shown = [f"    {line[:WIDTH]}" + ("…" if len(line) > WIDTH else "") for line in log[-TAIL:]]  # a code block
        parts += ["The last lines of the log:", "\n".join(shown)]
    return "\n\n".join(parts) + "\n"


def _where(e: Evidence) -> str:
    """`after step 22 of 40`, `while saving a checkpoint, after step 20 of 40`, `while loading the model`."""
    after = f"after step {e.step}" + (f" of {e.planned}" if e.planned else "") if e.step else ""
    if e.phase == "step" and after:
        return after
    comma = "" if e.phase == "first_step" else ","  # the first step after step 20
    return f"while {PHASES.get(e.phase, e.phase)}" + (f"{comma} {after}" if after else "")


def _what_happened(incident: Incident) -> str:
    e, late = incident.evidence, incident.evidence.late()
    last = f"Last progress: {moment(incident.started_at)}."
    if e.kind == "crash":
        code = f" (exit code {e.exit_code})" if e.exit_code is not None else ""
        sentences = {
            "failed": f"The training failed with an error {_where(e)}{code}.",
            "deadline": f"A wait inside the training timed out {_where(e)}, so the training stopped itself{code}.",
            "stopped": f"The training saved a checkpoint and exited {_where(e)}{code}.",
            LORA_DAMAGED: f"The script exited {_where(e)}{code}, but {e.note}.",
        }
        return f"{sentences.get(e.outcome, f'The training ended {_where(e)}: {e.ended}.')} {last}"
    limit = "The limit" if late else "The limit for this phase"
    no_signs = ". There was no other evidence, so the monitor waited twice the limit."
    signs = f". Evidence: {'; '.join(e.signs)}." if e.signs else no_signs
    not_named_yet = e.where() and e.where() not in incident.cause.explanation
    return (
        f"The training hung {_where(e)}. {last} "
        + (f"The other ranks were waiting for rank {late['rank']}. " if late else "")
        + f"{limit} was {duration(e.budget_s)} without progress; "
        + f"the monitor declared a hang after {duration(incident.detect_s)}{signs}"
        + (f" The main thread was in {e.where()}." if not_named_yet else "")
    )


def _what_was_done(incident: Incident) -> list[str]:
    lines = []
    if killed := incident.killed:
        names = ", ".join(f"{p['name']} ({p['pid']})" for p in killed)
        lines.append(f"The monitor killed {count(len(killed), 'remaining process')}: {names}.")
    lines += [f"Checkpoint set aside as damaged: {bad}." for bad in incident.bad_checkpoints]
    lines += [f"Changed: {sentence}." for sentence in incident.changed]
    if incident.resumed_from:
        source = "snapshot in memory" if incident.from_memory else "checkpoint"
        early = ", in an attempt that had been started early" if incident.standby else ""
        lines.append(f"The monitor restarted the run from its {source} of step {incident.resumed_from}{early}.")
    elif incident.resumed_from is not None:
        lines.append("The monitor restarted the run from step 0, because the disk had no checkpoint to resume from.")
    if incident.outcome != RESTARTING or incident.resumed_from is None:
        lines.append(f"{incident.outcome[:1].upper()}{incident.outcome[1:].rstrip('.')}.")
    return lines


def _cost(incident: Incident) -> str:
    repeated, recover_s = incident.steps_repeated, incident.recover_s
    if recover_s is None:
        return "No new step has been completed since then."
    were = "was" if repeated == 1 else "were"
    twice = f"{count(repeated, 'step')} {were} trained twice." if repeated else "No step was trained twice."
    until = "the end of the run" if incident.outcome == COMPLETED else "the first new step"
    return f"{duration(recover_s)} from the last progress to {until}. {twice}"


def _details(e: Evidence) -> list[str]:
    """The state of every rank, process and device, a line each."""
    lines = []
    for r in e.ranks:
        if r["missing"]:
            lines.append(f"Rank {r['rank']} has not started")
            continue
        who = f"Rank {r['rank']}" if len(e.ranks) > 1 else "Trainer"
        items = f", item {r['done']} of {r['total'] or '?'}" if r["done"] or r["total"] else ""
        note = f" ({r['note']})" if r["note"] and r["outcome"] == "running" else ""
        phase, steps, ago = PHASES.get(r["phase"], r["phase"]), count(r["step"], "step"), duration(r["silent_s"])
        lines.append(f"{who} (pid {r['pid']}): {phase}{items}{note}, {steps} completed, last heartbeat {ago} earlier")
    for p in e.processes:
        waits = f", waits in {p['wchan']}" if p["wchan"] else ""
        state = STATES.get(p["state"], p["state"])
        lines.append(f"Process {p['pid']} ({p['name']}): {state}{waits}, {p['cpu_s']} s of CPU time")
    for i, gpu in enumerate(e.gpu):
        busy = f"{gpu.get('utilization', '?')} % busy, {_gb(gpu, 'memory_used', 'memory_total')} used"
        power = f", {gpu['power_w']:.0f} W" if "power_w" in gpu else ""
        lines.append(f"GPU {i} ({gpu.get('name', 'unknown')}): {busy}, {gpu.get('temperature', '?')} °C{power}")
    lines += [f"GPU: {e.gpu_note}"] if e.gpu_note else []
    for what, used, total, verb in (
        ("Memory", "MemAvailable", "MemTotal", "available"),
        ("Memory of the container", "cgroup_used", "cgroup_limit", "used"),
        ("Disk", "disk_free", "disk_total", "free"),
    ):
        lines += [f"{what}: {_gb(e.host, used, total)} {verb}"] if total in e.host else []
    return [*lines, *(f"Kernel log: {line}" for line in e.kernel), *(f"Not available: {what}" for what in e.missing)]


def _gb(values: dict[str, Any], part: str, total: str) -> str:
    """`2.0 of 8.0 GB`."""
    return " of ".join(f"{values[key] / 1e9:.1f}" if key in values else "?" for key in (part, total)) + " GB"


def escape(text: str) -> str:
    """Any text as one line of plain Markdown."""
    line = re.sub(r"[\\`*<&\[]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(" ".join(text.split())))
    return re.sub(r"^(\d*)(?=[#>+=~|-]|[.)]\s)", r"\1\\", line)  # what begins a block at the start of a line


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def describe(name: str, evidence: Evidence, signals: Signals, cause: Cause) -> tuple[str, dict[str, Any]]:
    """What `monitor diagnose` prints, as text and for --json; `name` is that of the run or the process."""
    stuck = bool(signals.stuck)
    summary = "slow, but making progress" if signals.slow else "no progress" if stuck else "no sign of a hang"
    lines = [f"{name}: {summary}.", *(f"- {sign}" for sign in signals.stuck + signals.slow)]
    if evidence.ranks:
        phase = PHASES.get(evidence.phase, evidence.phase).capitalize()
        lines.insert(1, f"{phase}, step {evidence.step}. Last progress: {duration(evidence.stalled_s)} ago.")
    if stuck:
        lines.append(f"Likely cause if it is stuck: {cause.title}. {cause.explanation} {cause.advice}".rstrip())
    group = evidence.group()
    said = group.verdict(stuck)
    if report := group.lines(said):
        lines += ["", *report, ""]
    lines += [f"  {line}" for line in _details(evidence)]
    lines += [f"\nStacks of {pid}:\n{text.strip()}" for pid, text in evidence.stacks.items()]
    found: dict[str, Any] = {"name": name, "summary": summary, "where": evidence.where(), "signals": asdict(signals)}
    found["verdict"] = vars(said) if evidence.ranks else None
    known = {"cause": cause.name, "explanation": f"{cause.title}. {cause.explanation}", "advice": cause.advice}
    return "\n".join(lines), asdict(evidence) | found | (known if stuck else dict.fromkeys(known))
