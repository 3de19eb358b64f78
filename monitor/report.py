"""`report.md`: what happened, where, since when, why, what was changed and what it cost, in plain words."""

from __future__ import annotations

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
STATES = {
    "R": "running",
    "S": "asleep",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "dead, not collected",
    "I": "idle",
}


def write(incident: Incident, name: str) -> str:
    """The report as Markdown."""
    cause = incident.cause
    parts = [
        f"# {cause.title}",
        f"Run **{name}**, attempt {incident.attempt}, incident {incident.number}, {incident.started_at}",
        "## What happened",
        _what(incident),
        "## Why, most likely",
        cause.explanation + (f"\n\n{cause.advice}" if cause.advice else ""),
        "## What was done",
        _done(incident),
        "## What it cost",
        _cost(incident),
        "## What was seen",
        _seen(incident),
    ]
    return "\n\n".join(parts) + "\n"


def duration(seconds: float) -> str:
    """`3.2 s`, `5 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _what(incident: Incident) -> str:
    e = incident.evidence
    at = f"step {e.step}" + (f" of {e.planned}" if e.planned else "")
    place = f"while {PHASES.get(e.phase, e.phase)}" if e.phase != "step" else "in the middle of training"
    if e.kind == "hang":
        text = (
            f"The training stood still {place}, at {at}. Its last progress was at {incident.started_at}; after "
            f"{duration(incident.detect_s)} without any, where {duration(e.budget_s)} is what this phase is given, it was "
            "declared stuck."
        )
        where = e.where()
        return text + (f" Its main thread stood in `{where}`." if where else "")
    return f"The training ended {place}, at {at}: {e.ended}."


def _done(incident: Incident) -> str:
    lines = []
    if incident.killed:
        names = ", ".join(f"{p['name']} ({p['pid']})" for p in incident.killed[:12])
        lines.append(f"Its {len(incident.killed)} processes were ended: {names}.")
    lines += [f"Checkpoint set aside: {bad}." for bad in incident.bad_checkpoints]
    if incident.resumed_from is not None:
        lines.append(
            f"It goes on from the checkpoint of step {incident.resumed_from}."
            if incident.resumed_from
            else "There was no checkpoint yet, so it begins again."
        )
    lines += [f"Changed: {sentence}" for sentence in incident.changed]
    lines.append(incident.outcome[:1].upper() + incident.outcome[1:] + ".")
    return "\n".join(f"- {line}" for line in lines)


def _cost(incident: Incident) -> str:
    parts = [f"Found after {duration(incident.detect_s)}." if incident.evidence.kind == "hang" else "Found at once."]
    if incident.steps_repeated is not None:
        parts.append(f"{incident.steps_repeated} steps were trained again.")
    if incident.recover_s is not None:
        parts.append(f"From the last progress to the next new step it took {duration(incident.recover_s)}.")
    return " ".join(parts)


def _seen(incident: Incident) -> str:
    e = incident.evidence
    lines = [f"- {why}" for why in e.why]
    for rank in e.ranks:
        items = f", item {rank['done']} of {rank['total'] or '?'}" if rank["done"] or rank["total"] else ""
        note = f", note: {rank['note']}" if rank["note"] else ""
        lines.append(
            f"- rank {rank['rank']} (pid {rank['pid']}): {PHASES.get(rank['phase'], rank['phase'])}, step {rank['step']}"
            f"{items}{note}; silent for {duration(rank['silent_s'])}"
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
        )
    if e.gpu_note:
        lines.append(f"- GPU: {e.gpu_note}")
    host = e.host
    if "MemAvailable" in host:
        lines.append(f"- memory: {_gb(host['MemAvailable'])} of {_gb(host.get('MemTotal'))} GB available")
    if "disk_free" in host:
        lines.append(f"- disk: {_gb(host['disk_free'])} of {_gb(host['disk_total'])} GB free")
    lines += [f"- kernel: {line}" for line in e.kernel]
    lines.append("- every thread's stack: `stacks.txt`; the end of the log: `log_tail.txt`")
    tail = "\n".join(e.log_tail.splitlines()[-15:])
    return "\n".join(lines) + (f"\n\n```text\n{tail}\n```" if tail else "")


def _gb(value: int | None) -> str:
    return f"{value / 1e9:.1f}" if value is not None else "?"
