"""From evidence to a probable cause by a table, `causes.toml`: the first row that matches decides.

A row matches when each of its conditions holds; a list holds when one of its entries does. `stack` is a pattern for a
`file.py:function` of the main thread of the rank in question (other threads always wait somewhere), `log` and `note`
are regular expressions, `host` is one of `facts`; the others are values of the evidence.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomllib

from monitor.detect import stacks
from monitor.diagnose.collect import Evidence
from monitor.diagnose.ranks import BARRIER
from monitor.phrases import PHASES, printable
from monitor.process.platform import signal_name

TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))[
    "cause"
]
LINES, WIDTH = 300, 4000  # of the log: an older line is not about how the run ended, a longer one makes searches slow
CUT = " … "  # in the middle of a longer line: a launcher's error ends with the exit code, behind the complete command
BUSY = 95  # percent of a GPU
# A GPU is broken or lost; others (13, 31, 43, 45) are a program's own fault or its exit: docs.nvidia.com/deploy/xid-errors
LOST_XID = {46, 48, 54, 56, 57, 58, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 154}
_LAUNCHER = ("subprocess.CalledProcessError", "torch.distributed.elastic")
_EXCEPTION = re.compile(r"^([\w.]+\.)?[A-Z]\w*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Cause:
    """What probably happened: a row of causes.toml, filled in."""

    name: str
    title: str
    explanation: str
    ladder: list[str] = field(default_factory=list)
    wait_s: float = 0.0
    restart: bool = True
    at_once: bool = False  # use the ladder from the first failure on, not from the second
    advice: str = ""
    damages_memory: bool = False  # snapshots in memory that were written since then are not trusted


def match(evidence: Evidence) -> Cause:
    """The probable cause: the first row that matches, its texts filled in from the evidence."""
    row, late, where = row_of(evidence), evidence.late(), evidence.where()
    line = _line(row["match"].get("log", []), evidence)
    values = {
        "phase": PHASES.get(evidence.phase, evidence.phase),
        "note": evidence.note.rstrip(". ") or "no message was recorded",
        "item": f" The last item was {evidence.note}." if evidence.note else "",
        "waited": evidence.note[max(0, evidence.note.find("waited ")) :].rstrip(". "),
        "signal": signal_name(evidence.signal) if evidence.signal else "a signal",
        "ended": evidence.ended,
        "behind": f"rank {late['rank']} was late ({PHASES.get(late['phase'], late['phase'])}, step {late['step']})"
        if late
        else "the evidence does not show which one was late",
        "line": line.rstrip(". "),
        "error": re.sub(r"^(\S+: |.* launch: )?error: ", "", line).rstrip(". "),  # argparse: `train.py: error: …`
        "where": f" The main thread was in {where}." if where else "",
        "worker": evidence.worker(),
        "kernel": next((line.rstrip(".") for line in evidence.kernel if "Xid" in line), "no line"),
        "wchan": next((p["wchan"] for p in evidence.processes if p["state"] == "D" and p["wchan"]), "the kernel"),
    }
    texts = {key: row[key].format_map(values) for key in ("title", "explanation", "advice") if key in row}
    return Cause(**{key: value for key, value in row.items() if key != "match"} | texts)


def row_of(evidence: Evidence) -> dict[str, Any]:
    """The first row of the table that matches. The last one matches everything."""
    late = evidence.late()
    if late is not None and BARRIER in evidence.note:  # it gave up waiting for the late rank, which is judged as hung
        evidence = replace(evidence, kind="hang", outcome="", note=late["note"])
    frames = [frame.name for text in evidence.rank_stacks() for frame in stacks.frames(stacks.main_thread(text))]
    texts = {"note": f"{evidence.note} {evidence.ended}", "log": "\n".join(log_lines(evidence.log_tail))}
    # A launcher reports the exit code of its child; its own is often 1.
    launchers = re.findall(r"returned non-zero exit status (\d+)|exitcode\s*: (\d+)", texts["log"])
    values: dict[str, set[Any]] = {
        "kind": {evidence.kind},
        "phases": {evidence.phase},
        "outcomes": {evidence.outcome},
        "signals": {signal_name(evidence.signal)} if evidence.signal is not None else set(),
        "exit_codes": {evidence.exit_code, *(int(a or b) for a, b in launchers)},
        "host": facts(evidence),
    }

    def holds(condition: str, wanted: list[Any]) -> bool:
        if condition == "stack":
            return any(fnmatch.filter(frames, pattern) for pattern in wanted)
        return _found(wanted, texts[condition]) if condition in texts else not values[condition].isdisjoint(wanted)

    return next(row for row in TABLE if all(holds(*condition) for condition in row["match"].items()))


def facts(evidence: Evidence) -> set[str]:
    """What rows may name under `host`."""
    xids = {int(n) for line in evidence.kernel for n in re.findall(r"Xid \([^)]*\): (\d+)", line)}
    late = evidence.late()
    trainers = [p for p in evidence.processes if p["trainer"]]
    ours = {p["pid"] for p in trainers}
    workers = [p for p in evidence.processes if not p["trainer"] and p["ppid"] in ours]
    in_question = [p for p in trainers if late is None or p["pid"] == late["pid"]] or evidence.processes
    found = {
        "oom_killed": evidence.host.get("oom_kills", 0) > 0
        or any("ut of memory" in line or "oom-kill" in line for line in evidence.kernel),
        "gpu_lost": not xids.isdisjoint(LOST_XID),
        "gpu_busy": any(
            (gpu.get("utilization") or 0) >= BUSY and ours & set(gpu.get("pids", ())) for gpu in evidence.gpu
        ),
        "late_rank": late is not None,
        "trainer_stopped": any(p["state"] in ("T", "t") for p in trainers),
        "worker_stopped": any(p["state"] in ("T", "t") for p in workers),
        "uninterruptible": any(p["state"] == "D" for p in in_question),
    }
    return {name for name, holds in found.items() if holds}


def _found(patterns: list[str], text: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE | re.MULTILINE) for pattern in patterns)


def _line(patterns: list[str], evidence: Evidence) -> str:
    """The line of the log that shows this cause; else the last error, the rank's note, or the last line."""
    lines = [line.strip() for line in log_lines(evidence.log_tail)]
    # A launcher reports the exit of its child as an exception of its own; the child's is the one to show.
    errors = [line[:400] for line in lines if _EXCEPTION.match(line) and not line.startswith(_LAUNCHER)]
    last = errors[-1] if errors else ""
    if last and (not patterns or _found(patterns, last)):
        return last
    shows = [line for line in lines if _found(patterns, line) and not line.startswith("Traceback")]
    own = [line for line in shows if not line.startswith(_LAUNCHER)]
    line = (own or shows)[-1] if shows else last or evidence.note or (lines[-1] if lines else "the log is empty")
    died = re.search(r"died with <Signals\.(\w+)|returned non-zero exit status (\d+)", line)
    if died and line.startswith(_LAUNCHER):  # without the complete command
        return f"its launcher reports {died[1] or f'exit code {died[2]}'}"
    return line[:400]


def _shortened(line: str) -> str:
    """A line without its middle where it is longer than WIDTH."""
    half = (WIDTH - len(CUT)) // 2
    return line if len(line) <= WIDTH else line[:half] + CUT + line[-half:]


def log_lines(log: str) -> list[str]:
    """The last lines of the log that have text, without the prefixes of ranks."""
    shown = (printable(_shortened(line)) for line in log.splitlines()[-LINES:])
    lines = (re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in shown)
    return [line for line in lines if line and not line.startswith("=== ")]  # a heading of the monitor
