"""From evidence to a cause in plain words, by a table (`causes.toml`): the first row that matches wins.

A row matches when each of its conditions does: `kind`, `phases`, `stack` (one of these `file.py:function` patterns is among
the frames), `log` and `note` (one of these regular expressions), `signals`, `exit_codes`, `states` (a process of the run is
in one), `host` (a fact that `facts` found). A list is met by any of its entries.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import tomllib

from monitor import stacks
from monitor.evidence import Evidence, late_rank
from monitor.system import signal_name

LOW_DISK = 64 << 20


@dataclass(frozen=True)
class Cause:
    """What probably happened. `ladder` are names of mitigations, gentlest first; `wait_s` is what a restart must wait."""

    name: str
    title: str
    explanation: str
    ladder: tuple[str, ...] = ()
    wait_s: float = 0.0
    restart: bool = True
    at_once: bool = False  # the ladder is used from the first failure on, not from the second
    advice: str = ""


@functools.cache
def table() -> list[dict]:
    """The rows of causes.toml, in order."""
    return tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))["cause"]


def match(evidence: Evidence, rows: list[dict] | None = None) -> Cause:
    """The cause of what was found. The table ends with rows that match everything."""
    known = facts(evidence)
    frames = [name for text in evidence.stacks.values() for name in stacks.names(text)]
    for row in table() if rows is None else rows:
        if _matches(row.get("match", {}), evidence, frames, known):
            return _cause(row, evidence)
    raise LookupError("causes.toml: its last row must match everything")


def facts(evidence: Evidence) -> set[str]:
    """Facts of the machine that rows ask for by name under `host`."""
    found = set()
    host = evidence.host
    if host.get("oom_kills", 0) > 0 or any("ut of memory" in line or "oom-kill" in line for line in evidence.kernel):
        found.add("oom_killed")
    if host.get("disk_free", LOW_DISK) < LOW_DISK:
        found.add("disk_full")
    if any("Xid" in line for line in evidence.kernel):
        found.add("xid")
    if evidence.gpu_note:
        found.add("nvml_failed")
    if late_rank(evidence.ranks) is not None:
        found.add("late_rank")
    if len(evidence.ranks) > 1:
        found.add("several_ranks")
    trainers = [p for p in evidence.processes if p["trainer"]]
    workers = [p for p in evidence.processes if not p["trainer"] and any(p["ppid"] == t["pid"] for t in trainers)]
    if any(p["state"] in "Tt" for p in trainers):
        found.add("trainer_stopped")
    if any(p["state"] in "Tt" for p in workers):
        found.add("worker_stopped")
    if any(p["state"] == "D" for p in evidence.processes):
        found.add("uninterruptible")
    return found


def _matches(want: dict, evidence: Evidence, frames: list[str], known: set[str]) -> bool:
    if "kind" in want and evidence.kind not in want["kind"]:
        return False
    if "phases" in want and evidence.phase not in want["phases"]:
        return False
    if "stack" in want and not any(fnmatch.filter(frames, pattern) for pattern in want["stack"]):
        return False
    if "log" in want and not _any(want["log"], evidence.log_tail):
        return False
    if "note" in want and not _any(want["note"], f"{evidence.note} {evidence.ended}"):
        return False
    if "outcomes" in want and evidence.outcome not in want["outcomes"]:
        return False
    if "signals" in want and (evidence.signal is None or signal_name(evidence.signal) not in want["signals"]):
        return False
    if "exit_codes" in want and evidence.exit_code not in want["exit_codes"]:
        return False
    if "states" in want and not any(p["state"] in want["states"] for p in evidence.processes):
        return False
    return "host" not in want or bool(known & set(want["host"]))


def _any(patterns: list[str], text: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE | re.MULTILINE) for pattern in patterns)


def _cause(row: dict, evidence: Evidence) -> Cause:
    late = late_rank(evidence.ranks)
    words = {
        "phase": evidence.phase,
        "step": evidence.step,
        "note": evidence.note or "nothing noted",
        "signal": signal_name(evidence.signal) if evidence.signal else "a signal",
        "ended": evidence.ended,
        "late": f"rank {late['rank']} (phase {late['phase']}, step {late['step']})" if late else "one rank",
        "error": last_error(evidence.log_tail),
        "where": evidence.where() or "an unknown place",
        "wchan": next((p["wchan"] for p in evidence.processes if p["state"] == "D" and p["wchan"]), "the kernel"),
    }
    return Cause(
        name=row["name"],
        title=row["title"].format_map(words),
        explanation=row["explanation"].format_map(words),
        ladder=tuple(row.get("ladder", ())),
        wait_s=row.get("wait", 0.0),
        restart=row.get("restart", True),
        at_once=row.get("at_once", False),
        advice=row.get("advice", "").format_map(words),
    )


def last_error(log: str) -> str:
    """The last line of the log that reads like an exception's (`Name: words`), without one the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        # A launcher reports its child's end as an error of its own: the child's is what is wanted.
        launchers = line.startswith(("subprocess.CalledProcessError", "torch.distributed.elastic"))
        if not launchers and re.match(r"^([\w.]+\.)?[A-Z]\w*(Error|Exception|Interrupt|Exit)\b", line):
            return line[:400]
    return lines[-1][:400] if lines else "the log is empty"
