"""From evidence to a cause in plain words, by a table (`causes.toml`): the first row that matches wins.

A row matches when each of its conditions does: `kind`, `phases`, `stack` (one of these `file.py:function` patterns is among
the frames of a rank's main thread; other threads always stand in some wait), `log` and `note` (one of these regular
expressions; of the log its last LINES), `outcomes`, `signals`, `exit_codes`, `host` (a fact that `facts` found). A list is
met by any of its entries.
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
from monitor.report import PHASES
from monitor.system import signal_name

LINES = 300  # of the log: what was written long before the end is not its cause
# The driver's codes for a GPU that is broken or gone; others (13, 31, 43, 45) are a program's own faults, or its end.
# docs.nvidia.com/deploy/xid-errors
LOST_XID = {46, 48, 54, 56, 57, 58, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 154}


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


def match(evidence: Evidence) -> Cause:
    """The cause of what was found."""
    return _cause(row_of(evidence), evidence)


def row_of(evidence: Evidence) -> dict:
    """The first row of the table that matches. The last one matches everything."""
    known = facts(evidence)
    frames = [name for text in evidence.rank_stacks() for name in stacks.names(stacks.main_thread(text))]
    log = _tail(evidence)
    return next(row for row in table() if _matches(row["match"], evidence, frames, log, known))


def _tail(evidence: Evidence) -> str:
    return "\n".join(evidence.log_tail.splitlines()[-LINES:])


def facts(evidence: Evidence) -> set[str]:
    """Facts of the machine that rows ask for by name under `host`."""
    found = set()
    host = evidence.host
    if host.get("oom_kills", 0) > 0 or any("ut of memory" in line or "oom-kill" in line for line in evidence.kernel):
        found.add("oom_killed")
    xids = {int(n) for line in evidence.kernel for n in re.findall(r"Xid \([^)]*\): (\d+)", line)}
    if xids & LOST_XID:
        found.add("gpu_lost")
    if late_rank(evidence.ranks, evidence.stacks) is not None:
        found.add("late_rank")
    trainers = [p for p in evidence.processes if p["trainer"]]
    workers = [p for p in evidence.processes if not p["trainer"] and any(p["ppid"] == t["pid"] for t in trainers)]
    if any(p["state"] in "Tt" for p in trainers):
        found.add("trainer_stopped")
    if any(p["state"] in "Tt" for p in workers):
        found.add("worker_stopped")
    if any(p["state"] == "D" for p in trainers or evidence.processes):
        found.add("uninterruptible")
    return found


def _matches(want: dict, evidence: Evidence, frames: list[str], log: str, known: set[str]) -> bool:
    if "kind" in want and evidence.kind not in want["kind"]:
        return False
    if "phases" in want and evidence.phase not in want["phases"]:
        return False
    if "stack" in want and not any(fnmatch.filter(frames, pattern) for pattern in want["stack"]):
        return False
    if "log" in want and not _any(want["log"], log):
        return False
    if "note" in want and not _any(want["note"], f"{evidence.note} {evidence.ended}"):
        return False
    if "outcomes" in want and evidence.outcome not in want["outcomes"]:
        return False
    if "signals" in want and (evidence.signal is None or signal_name(evidence.signal) not in want["signals"]):
        return False
    if "exit_codes" in want and evidence.exit_code not in want["exit_codes"]:
        return False
    return "host" not in want or bool(known & set(want["host"]))


def _any(patterns: list[str], text: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE | re.MULTILINE) for pattern in patterns)


def _cause(row: dict, evidence: Evidence) -> Cause:
    late = late_rank(evidence.ranks, evidence.stacks)
    words = {
        "phase": PHASES.get(evidence.phase, evidence.phase),
        "note": evidence.note or "nothing noted",
        "waited": evidence.note[max(0, evidence.note.find("waited ")) :],
        "signal": signal_name(evidence.signal) if evidence.signal else "a signal",
        "ended": evidence.ended,
        "behind": f"rank {late['rank']} is late, it is at {PHASES.get(late['phase'], late['phase'])}, step {late['step']}"
        if late
        else "it cannot be told which one is late",
        "error": _error(row, evidence).rstrip(". "),
        "where": evidence.where() or "a place that could not be seen",
        "worker": evidence.worker(),
        "kernel": next((line.rstrip(".") for line in evidence.kernel if "Xid" in line), "nothing"),
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


def _error(row: dict, evidence: Evidence) -> str:
    """The line of the log that tells of this cause, else the last error, else the last words."""
    log, patterns = _tail(evidence), row["match"].get("log", [])
    last = last_error(log)
    if last and (not patterns or _any(patterns, last)):
        return last
    telling = [line for line in _lines(log) if _any(patterns, line) and not line.startswith("Traceback")]
    return _launcher((telling[-1:] or [last or evidence.note or last_line(log)])[0])[:400].removeprefix("error: ")


def _launcher(line: str) -> str:
    """A launcher's line about its child, without the whole command."""
    died = re.search(r"died with <Signals\.(\w+)|returned non-zero exit status (\d+)", line)
    if not died or not line.startswith("subprocess.CalledProcessError"):
        return line
    return f"its launcher reports {died[1] or f'exit code {died[2]}'}"


def last_error(log: str) -> str:
    """The last line of the log that reads like an exception's (`Name: words`), "" without one."""
    for line in reversed(_lines(log)):
        # A launcher reports its child's end as an error of its own: the child's is what is wanted.
        launchers = line.startswith(("subprocess.CalledProcessError", "torch.distributed.elastic"))
        if not launchers and re.match(r"^([\w.]+\.)?[A-Z]\w*(Error|Exception|Interrupt|Exit)\b", line):
            return line[:400]
    return ""


def last_line(log: str) -> str:
    """The last line of the log."""
    lines = _lines(log)
    return lines[-1] if lines else "the log is empty"


def _lines(log: str) -> list[str]:
    """Its lines without the monitor's own headings and the prefixes of several ranks."""
    lines = (re.sub(r"^\[rank\d+\]:\s?", "", line).strip() for line in log.splitlines())
    return [line for line in lines if line and not line.startswith("=== ")]
