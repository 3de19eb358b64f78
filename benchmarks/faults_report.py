"""A row of the fault matrix and its result as text: for the terminal and for the message of a failed test."""

from __future__ import annotations

import json
from typing import Any


def expected(row: dict[str, Any]) -> str:
    """What the table requires of this row."""
    want = row["expect"]
    parts = [
        f"{want['state']} (exit code {want['code']})",
        _restarts(want["restarts"]),
        _incidents_expected(want.get("incidents")),
    ]
    if "changes" in want:
        parts.append(_count(want["changes"], "change of the run", "changes of the run"))
    if "set_aside" in want:
        parts.append(_count(len(want["set_aside"]), "bad checkpoint", "bad checkpoints") + " set aside")
    lora = {"same": "the LoRA of an undisturbed run, bit for bit", "none": "no LoRA", "any": ""}[want["lora"]]
    return "; ".join(part for part in (*parts, lora) if part)


def observed(seen: dict[str, Any]) -> str:
    """What happened (`benchmarks.faults.observe`)."""
    code = seen["codes"][-1] if seen["codes"] else "none"
    incidents = [_incident(incident) for incident in seen["incidents"]]
    if len(incidents) > 4:
        incidents = [*incidents[:2], f"… {len(incidents) - 3} more …", incidents[-1]]
    shown = ": " + ", ".join(incidents) if incidents else ""
    parts = [
        f"{seen['state']} (exit code {code}) at step {seen['step']}",
        _restarts(seen["restarts"]),
        _count(len(seen["incidents"]), "incident", "incidents") + shown,
        seen["lora"],
    ]
    return "; ".join(part for part in parts if part)


def describe(row: dict[str, Any], result: dict[str, Any]) -> str:
    """The result of `benchmarks.faults.run`: expected, observed, verdict; with the logs where they differ."""
    lines = [f"{result['name']}: {row['fault']}"]
    if result["skipped"]:
        return f"{lines[0]}\n  skipped: {result['skipped']}"
    lines += [f"  expected: {expected(row)}"]
    if result["seen"]:
        lines += [f"  observed: {observed(result['seen'])}"]
    if result["ok"]:
        lines += [f"  as expected, after {result['seconds']:.0f} s"]
    else:
        lines += [f"  NOT as expected, after {result['seconds']:.0f} s:"]
        lines += [f"    {problem}" for problem in result["problems"]]
    if result.get("kept"):
        lines += [f"  kept: {result['kept']}"]
    if result["ok"]:
        return "\n".join(lines)
    lines += [f"  expect: {json.dumps(row['expect'])}", f"  seen: {json.dumps(result['seen'])}"]
    for name, text in (
        ("monitor.log", result.get("monitor_log", "")),
        ("training.log", result.get("training_log", "")),
        *((f"output of monitor {n}", text) for n, text in enumerate(result.get("monitor_output", []), 1)),
    ):
        lines += [f"  --- {name}", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines)


def _count(number: int, one: str, more: str) -> str:
    return f"{number or 'no'} {one if number == 1 else more}"


def _restarts(number: int | list[int] | None) -> str:
    if isinstance(number, list):
        return f"{number[0]} to {number[1]} restarts"
    return _count(number or 0, "restart", "restarts")


def _incidents_expected(wanted: int | list[list[str]] | None) -> str:
    if wanted is None:
        return ""
    if isinstance(wanted, int):
        return _count(wanted, "incident", "incidents")
    causes = ": " + ", ".join(" or ".join(names) for names in wanted) if wanted else ""
    return _count(len(wanted), "incident", "incidents") + causes


def _incident(incident: dict[str, Any]) -> str:
    facts = [f"detected after {incident['detect_s']:.1f} s"]
    if incident.get("recover_s") is not None:
        facts.append(f"a new step after {incident['recover_s']:.1f} s")
    if incident.get("steps_repeated"):
        facts.append(_count(incident["steps_repeated"], "step", "steps") + " repeated")
    return f"{incident['cause']} at step {incident['step']} ({', '.join(facts)})"
