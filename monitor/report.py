"""`report.md`: what happened, where, since when, why, what was changed and what it cost, in plain words.

For somebody who gets up, sees that the run was restarted, and has never seen this program: the first half needs no
knowledge of it, the details at the end are for whoever wants to look closer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monitor.incident import Incident

PHASES = {
    "import": "starting up",
    "load": "loading the model",
    "cache_latents": "caching the images",
    "cache_text": "caching the captions",
    "hash": "hashing the model",
    "first_step": "the first step",
    "step": "training",
    "validate": "validation",
    "sample": "making sample images",
    "save": "saving a checkpoint",
    "end": "finishing",
}
PLACES = {
    "step": "in the middle of training",
    "first_step": "in the first step",
    "validate": "during validation",
    "end": "at the end",
}
STATES = {
    "R": "running",
    "S": "asleep",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "dead, not collected",
    "I": "idle",
    "": "gone",
}
TAIL = 15  # lines of the log
WIDTH = 200


def write(incident: Incident, name: str) -> str:
    """The report as Markdown."""
    cause = incident.cause
    parts = [
        f"# {cause.title}",
        f"Run **{name}**, attempt {incident.attempt}, incident {incident.number}, {moment(incident.started_at)}.",
        "## What happened",
        _what(incident),
        "## Why, most likely",
        cause.explanation + (f"\n\n{cause.advice}" if cause.advice else ""),
        "## What was done",
        _done(incident),
        "## What it cost",
        _cost(incident),
        "## Details",
        _details(incident),
    ]
    return "\n\n".join(parts) + "\n"


def duration(seconds: float) -> str:
    """`3.2 s`, `5 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def count(number: int, thing: str) -> str:
    """`1 step`, `2 steps`, `3 processes`."""
    return f"{number} {thing}" + ("" if number == 1 else "es" if thing.endswith("s") else "s")


def moment(utc: str) -> str:
    """`2026-11-21 11:35:46 UTC` of an ISO time."""
    return f"{utc[:10]} {utc[11:19]} UTC"


def _what(incident: Incident) -> str:
    e = incident.evidence
    place = PLACES.get(e.phase, f"while {PHASES.get(e.phase, e.phase)}")
    where = f"{place}, at step {e.step}" + (f" of {e.planned}" if e.planned else "")
    progress = f"Its last progress was at {moment(incident.started_at)}."
    if e.kind == "crash":
        return f"{_ended(incident, where)} {progress}"
    signs = f": {'; '.join(e.why)}." if e.why else "; nothing spoke for or against it, so twice that was waited."
    stood = f" Its main thread stood in `{e.where()}`." if e.where() else ""
    return (
        f"The training stood still {where}. {progress} Here it is given {duration(e.budget_s)} without progress; after "
        f"{duration(incident.detect_s)} it was taken to be stuck{signs}{stood}"
    )


def _ended(incident: Incident, where: str) -> str:
    e = incident.evidence
    code = f" (exit code {e.exit_code})" if e.exit_code is not None else ""
    if e.outcome == "failed":
        return f"The training failed with an error {where}{code}."
    if e.outcome == "deadline":
        return f"The training ended itself {where}{code}: it had waited too long for something."
    if e.outcome == "stopped":
        return f"The training saved a checkpoint and left {where}{code}."
    return f"The training ended {where}: {e.ended}."


def _done(incident: Incident) -> str:
    lines = []
    if incident.killed:
        names = ", ".join(f"{p['name']} ({p['pid']})" for p in incident.killed[:12])
        lines.append(f"The monitor ended what was left of it, {count(len(incident.killed), 'process')}: {names}.")
    lines += [f"Checkpoint set aside, because it is bad: {bad}." for bad in incident.bad_checkpoints]
    if incident.resumed_from:
        lines.append(f"The run went back to its checkpoint of step {incident.resumed_from}.")
    elif incident.resumed_from is not None:
        none = "no checkpoint is left that can be used" if incident.bad_checkpoints else "there was no checkpoint yet"
        lines.append(f"The run began again: {none}.")
    lines += [f"Changed: {sentence}." for sentence in incident.changed]
    lines.append(incident.outcome[:1].upper() + incident.outcome[1:] + ".")
    return "\n".join(f"- {line}" for line in lines)


def _cost(incident: Incident) -> str:
    hang = incident.evidence.kind == "hang"
    parts = [f"Found after {duration(incident.detect_s)}." if hang else "Found at once."]
    if incident.steps_repeated is not None:
        repeated = incident.steps_repeated
        parts.append(f"{count(repeated, 'step')} had to be trained again." if repeated else "No step was lost.")
    if incident.recover_s is not None:
        parts.append(f"From the last progress to the next new step it took {duration(incident.recover_s)}.")
    return " ".join(parts)


def _details(incident: Incident) -> str:
    e = incident.evidence
    lines = []
    for rank in e.ranks:
        who = f"rank {rank['rank']}" if len(e.ranks) > 1 else "the trainer"
        items = f", item {rank['done']} of {rank['total'] or '?'}" if rank["done"] or rank["total"] else ""
        note = f", at {rank['note']}" if rank["note"] and rank["outcome"] == "running" else ""
        lines.append(
            f"- {who} (pid {rank['pid']}): {PHASES.get(rank['phase'], rank['phase'])}{items}{note}; step {rank['step']} "
            f"complete, its last sign {duration(rank['silent_s'])} before"
        )
    for p in e.processes:
        waits = f", waits in `{p['wchan']}`" if p["wchan"] else ""
        lines.append(
            f"- process {p['pid']} {p['name']}: {STATES.get(p['state'], p['state'])}{waits}, {p['cpu_s']} s CPU"
        )
    for i, gpu in enumerate(e.gpu):
        lines.append(
            f"- GPU {i} {gpu.get('name', '')}: {gpu.get('utilization', '?')} % busy, "
            f"{_gb(gpu.get('memory_used'))} of {_gb(gpu.get('memory_total'))} GB, {gpu.get('temperature', '?')} °C"
            + (f", {gpu['power_w']:.0f} W" if "power_w" in gpu else "")
        )
    if e.gpu_note:
        lines.append(f"- GPU: {e.gpu_note}")
    host = e.host
    if "MemAvailable" in host:
        lines.append(f"- memory: {_gb(host['MemAvailable'])} of {_gb(host.get('MemTotal'))} GB available")
    if "disk_free" in host:
        lines.append(f"- disk: {_gb(host['disk_free'])} of {_gb(host['disk_total'])} GB free")
    lines += [f"- kernel: {line}" for line in e.kernel]
    lines.append("- beside this file: `stacks.txt`, what every thread was doing; `log_tail.txt`, the end of the log")
    tail = "\n".join(_tail(e.log_tail))
    return "\n".join(lines) + (f"\n\nThe last lines of its log:\n\n```text\n{tail}\n```" if tail else "")


def _tail(log: str) -> list[str]:
    """The last lines that say something: without blank ones, without a launcher's traceback about its child's end."""
    log = re.sub(
        r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*subprocess\.CalledProcessError: .*\n?",
        "",
        log,
        flags=re.M,
    )
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    return [line[:WIDTH] + ("…" if len(line) > WIDTH else "") for line in lines[-TAIL:]]


def _gb(value: int | None) -> str:
    return f"{value / 1e9:.1f}" if value is not None else "?"
