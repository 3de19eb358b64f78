"""The evidence on a hung or dead run, and the probable cause by a table, `causes.toml`: the first row that matches
decides.

Evidence is collected without waiting for the run's processes, from /proc, the kernel's counters and files of the
monitor; stacks are collected beforehand (`detect/probe.py`). What cannot be read (no /proc/meminfo on gVisor, no
permission for the kernel log, an I/O error) is named in `Evidence.missing` and never an exception: evidence explains a
failure, but the restart does not depend on it.

A row matches when each condition of its `match` holds, or of one where it has several; a list holds when one of its
entries does. `stack` is a pattern for a `file.py:function` of the main thread of the rank in question (other threads
always wait somewhere), `log`, `error`, `note` and `kernel` are regular expressions, `host` is one of `facts`; the others
are values of the evidence. `error` is only the exception that ended the run: what a library could not import, and did
without, is in the log, too.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import tomllib

from monitor.attempt import Attempt
from monitor.detect import probe
from monitor.detect.probe import Missing
from monitor.diagnose import ranks as of_ranks
from monitor.diagnose.ranks import BARRIER, Rank
from monitor.phrases import PHASES, printable
from monitor.process import platform
from monitor.process.platform import ProcessInfo, signal_name
from monitor.run_folder import STATUS, read_json
from monitor.state import ExitStatus, Verdict

KERNEL_FAULTS = ("Xid", "GPU reset", "GPU HANG", "Out of memory", "oom-kill", "I/O error")
LORA_DAMAGED = "lora_damaged"  # Evidence.outcome: the script exited, but its LoRA is missing or does not verify
MEMINFO, KMSG = "/proc/meminfo", "/dev/kmsg"
KERNEL_RECORDS = 20_000  # read at most; the kernel's buffer rarely holds more
KERNEL_LINES = 20  # kept


@dataclass
class Evidence:
    """What was found. `kind` is hang or crash; phase, step and rank are those of the rank in question."""

    kind: str
    phase: str = "import"
    step: int = 0
    planned: int = 0
    rank: int = 0
    stalled_s: float = 0.0
    budget_s: float = 0.0
    signs: list[str] = field(default_factory=list)  # of a hang, each a clause
    exit_code: int | None = None
    signal: int | None = None
    outcome: str = ""
    note: str = ""
    ended: str = ""
    ranks: list[Rank] = field(default_factory=list)  # of `ranks.records`
    processes: list[dict[str, Any]] = field(default_factory=list)  # of `process_facts`
    stacks: dict[int, str] = field(default_factory=dict)
    log_tail: str = ""
    gpu: list[dict[str, Any]] = field(default_factory=list)
    gpu_note: str = ""
    other_gpus: list[str] = field(default_factory=list)  # that the run does not use, as the kernel's log names them
    host: dict[str, int] = field(default_factory=dict)
    kernel: list[str] = field(default_factory=list)
    missing: Missing = field(default_factory=Missing)

    def where(self) -> str:
        """The innermost frame of the main thread of the rank in question, "" when not known."""
        return next(filter(None, map(probe.where, self.rank_stacks())), "")

    def rank_stacks(self) -> list[str]:
        """The stack of the late rank; else of all ranks, that in question first; all of a script without ranks."""
        late = self.late()
        ranks = [late] if late else sorted(self.ranks, key=lambda r: r["rank"] != self.rank)
        pids = [r["pid"] for r in ranks] or self.stacks
        return [self.stacks[pid] for pid in pids if pid in self.stacks]

    def group(self) -> of_ranks.Group:
        """The ranks with their stacks, and which of them a signal has stopped."""
        return of_ranks.Group(self.ranks, self.stacks, (p["pid"] for p in self.processes if p["state"] in ("T", "t")))

    def late(self) -> Rank | None:
        """The rank that the others wait for, None where the evidence does not tell."""
        return self.group().culprit()

    def worker(self) -> str:
        """Where a loader worker waits, as a sentence; "" when no worker's stack is known."""
        ranks = {r["pid"] for r in self.ranks}
        workers = [p["pid"] for p in self.processes if p["ppid"] in ranks]
        seen = ((pid, probe.where(self.stacks.get(pid, ""))) for pid in workers)
        return next((f" Worker {pid} was in {frame}." for pid, frame in seen if frame), "")


def of_hang(
    found: Evidence, attempt: Attempt, verdict: Verdict, status: ExitStatus, stacks: dict[int, str], slow_reason: str
) -> Evidence:
    """`found` with the evidence on a hung run. `slow_reason`: why the monitor waited beyond the limit, "" if not."""
    slow = [f"the run was slow before it hung: {slow_reason}"] if slow_reason else []
    found.phase, found.rank, found.step = verdict.phase, verdict.rank, verdict.step or found.step
    found.signs, found.outcome = [*verdict.evidence, *slow], status.outcome
    found.stacks = {pid: stacks[pid] for pid in sorted(stacks, key=lambda pid: pid != attempt.pid)}
    found.stalled_s, found.budget_s = verdict.stalled_s, verdict.budget_s
    _add_common(found, attempt)
    found.note = status.note or next((r["note"] for r in found.ranks if r["rank"] == found.rank), "")
    silent = [r for r in found.ranks if r["pid"] in attempt.tree.members and r["pid"] not in stacks]
    found.missing += [f"stack of rank {r['rank']} (pid {r['pid']})" for r in silent]
    return found


def of_crash(found: Evidence, attempt: Attempt, status: ExitStatus) -> Evidence:
    """`found` with the evidence on a dead run; the outcome may be LORA_DAMAGED."""
    outcome, note, ended = status.outcome, status.note, str(status)
    # The rank that failed knows the reason; the launcher kills the others.
    first = next((b for b in attempt.beats if b.outcome in ("failed", "deadline")), next(iter(attempt.beats), None))
    if first and first.rank and first.outcome not in ("running", outcome):
        ended += f"; rank {first.rank}: {first.outcome}" + (f" ({first.note})" if first.note else "")
    if first and outcome != LORA_DAMAGED:  # which is not about a rank
        outcome, note = first.outcome, first.note if first.outcome != "running" else note
    found.exit_code, found.outcome, found.note, found.ended = status.code, outcome, note, ended
    found.signal = status.signal if outcome in ("", "running") else None
    if first:
        found.phase, found.step, found.rank = first.phase, first.step or found.step, first.rank
    fatal = {b.pid: probe.fatal_dump(attempt.heartbeats, b.pid) for b in attempt.beats}
    found.stacks = {pid: text for pid, text in fatal.items() if text}
    return _add_common(found, attempt)


def _add_common(found: Evidence, attempt: Attempt) -> Evidence:
    """Add to `found` what every kind has: ranks, processes, memory, disk, kernel log; the late rank of a group decides."""
    now, beats = platform.now(), attempt.beats
    found.planned = max([found.planned, *(b.planned for b in beats)])
    found.outcome = "" if found.outcome == "running" else found.outcome
    found.ranks = of_ranks.records(beats, now)
    trainers = [b.pid for b in beats] or [attempt.pid or 0]
    found.processes = process_facts(attempt.tree.members, trainers, found.missing)
    found.host = host_facts(attempt, found.missing)
    kernel = found.missing.read("kernel log", lambda: kernel_lines(attempt.record.started_s)) or []
    found.kernel = [line for line in kernel if not any(bus in line.lower() for bus in found.other_gpus)]
    # In a group, the rank that the others wait for decides: a save that hangs on rank 0 is no hung collective.
    late = found.late() if found.kind == "hang" or BARRIER in found.note else None
    if late is not None:
        found.rank, found.phase, found.step = late["rank"], late["phase"], late["step"] or found.step
    return found


def process_facts(members: dict[int, ProcessInfo], trainers: list[int], missing: Missing) -> list[dict[str, Any]]:
    """The processes of a run; `trainers` are the pids of its ranks.

    `state` is the kernel's letter, "" once the process has exited; `wchan` is the kernel function where it waits.
    """
    living = probe.processes(((pid, known.start) for pid, known in members.items()), missing)
    found = []
    for pid, known in sorted(members.items()):
        fresh = living.get((pid, known.start))
        latest = fresh or known
        found.append({
            "pid": pid, "ppid": latest.ppid, "name": latest.name, "state": fresh.state if fresh else "",
            "wchan": fresh.wchan if fresh else "", "cpu_s": round(latest.cpu_s, 2), "trainer": pid in trainers,
            "command": platform.command_of(pid)[:300] if fresh else "",
        })  # fmt: skip
    return found


def _memory() -> dict[str, int]:
    """Bytes of memory of the machine."""
    if platform.LINUX:
        lines = re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", Path(MEMINFO).read_text(), re.M)
        return {name: int(value) * 1024 for name, value in lines}
    import psutil

    usage = psutil.virtual_memory()
    return {"MemTotal": usage.total, "MemAvailable": usage.available}


def host_facts(attempt: Attempt, missing: Missing) -> dict[str, int]:
    """Bytes of memory (of machine, cgroup, training) and of the disk of the run, and new kills for lack of memory."""
    found = missing.read("memory of the machine", _memory) or {}
    for name, key in (("memory.max", "cgroup_limit"), ("memory.current", "cgroup_used")):
        with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no limit
            found[key] = int(Path(platform.CGROUP, name).read_text())
    if disk := missing.read("free disk space", lambda: shutil.disk_usage(attempt.folder.folder)):
        found |= {"disk_free": disk.free, "disk_total": disk.total}
    found["held"] = (read_json(attempt.folder.own / STATUS) or {}).get("memory_bytes") or 0
    before, after = attempt.record.oom_kills, platform.oom_kills()
    both = [path for path in platform.OOM_COUNTERS if path in before and path in after]
    if both:  # the same counter twice: that of a cgroup starts at 0 with its container
        found["oom_kills"] = max(0, after[both[0]] - before[both[0]])
    elif platform.LINUX:
        missing.note("processes killed for lack of memory: no counter could be compared")
    return found


def kernel_lines(since_s: float) -> list[str]:
    """Kernel log lines about a GPU, memory or disk fault since this monotonic time. OSError, ValueError.

    Like that clock, the kernel's log does not count the time in which the machine was suspended (dmesg(1), --ctime).
    """
    found: list[str] = []
    if not platform.LINUX:
        return found
    with open(KMSG, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as log:
        for _ in range(KERNEL_RECORDS):
            try:
                record = log.read(8192)  # one record, None at the end
            except BrokenPipeError:
                continue  # overwritten while it was read: the next record follows
            if not record:
                break
            head, _, text = record.decode("utf-8", "replace").partition(";")
            _, _, since_us, *_ = head.split(",")
            if int(since_us) / 1e6 >= since_s and any(word in text for word in KERNEL_FAULTS):
                found.append(text.splitlines()[0])
    return found[-KERNEL_LINES:]


# ---- the cause ----

TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))[
    "cause"
]
for _row in TABLE:  # a list of conditions, one of which is enough
    _row["match"] = _row["match"] if isinstance(_row["match"], list) else [_row["match"]]
LINES, WIDTH = 300, 2000  # of the log: an older line is not about how the run ended, a longer one makes searches slow
CUT = " … "  # in the middle of a longer line: a launcher's error ends with the exit code, behind the complete command
BUSY = 95  # percent of a GPU
_LAUNCHER = ("subprocess.CalledProcessError", "torch.distributed.elastic")
_EXCEPTION = re.compile(r"([\w.]+\.)?[A-Z]\w*(Error|Exception|Interrupt|Exit)\b|[a-z_]\w*(\.\w+)*\.[A-Z]\w*: |error: ")
_MORE = 12  # lines of one exception's message
# Of a file with its folder; both may have spaces.
_NAME = r"(?<![\w.~-])[\w.~-]*[\\/](?:[^\"'<>|:\[\]\s]| (?![\\/])){0,250}"
_FILE = re.compile(rf"((?:\b[a-z]:)?{_NAME}\.(?:safetensors|sft|ckpt|pt|png|jpe?g|webp|npz|txt|toml))\b", re.I)


@dataclass(frozen=True)
class Cause:
    """What probably happened: a row of causes.toml, filled in."""

    name: str
    title: str
    explanation: str
    ladder: list[str] = field(default_factory=list)
    wait_s: float = 0.0
    restart: bool = True
    may_return: bool = False  # restart all the same once the run has trained: what it needs was there
    at_once: bool = False  # use the ladder from the first failure on, not from the second
    outside: bool = False  # use it only where the run would end otherwise
    advice: str = ""
    damages_memory: bool = False  # snapshots in memory that were written since then are not trusted


def match(evidence: Evidence) -> Cause:
    """The probable cause: the first row that matches, its texts filled in from the evidence."""
    log, late, where = Log(evidence.log_tail), evidence.late(), evidence.where()
    row, conditions = row_of(evidence, log)
    line = log.shown([*conditions.get("log", []), *conditions.get("error", [])], evidence.note)
    files = _FILE.findall("\n".join(log.before[-20:]))
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
        "file": f" The last file that the log names before it is {files[-1]}." if files else "",
        "where": f" The main thread was in {where}." if where else "",
        "worker": evidence.worker(),
        "held": f" The training itself held {evidence.host['held'] / 1e9:.1f} GB." if evidence.host.get("held") else "",
        "kernel": next((s.rstrip(".") for s in evidence.kernel if _found(conditions.get("kernel", []), s)), ""),
        "wchan": next((p["wchan"] for p in evidence.processes if p["state"] == "D" and p["wchan"]), "the kernel"),
    }
    texts = {key: row[key].format_map(values) for key in ("title", "explanation", "advice") if key in row}
    return Cause(**{key: value for key, value in row.items() if key != "match"} | texts)


def row_of(evidence: Evidence, log: Log) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first row of the table that matches, and which conditions of it hold. The last one matches everything."""
    late = evidence.late()
    if late is not None and BARRIER in evidence.note:  # it gave up waiting for the late rank, which is judged as hung
        evidence = replace(evidence, kind="hang", outcome="", note=late["note"])
    frames = [frame.name for text in evidence.rank_stacks() for frame in probe.frames(text)]
    own = evidence.note * (evidence.outcome == "failed")  # the log lacks it where its disk is full
    lines = [line for line in log.lines if " skipped: " not in line]  # a sample image, and why
    texts = {"note": f"{evidence.note} {evidence.ended}", "log": "\n".join([*lines, own])}
    texts["kernel"] = "\n".join(evidence.kernel)
    killed = evidence.signal or re.search(r"died with <Signals|exitcode\s*: -", texts["log"])
    raised = evidence.outcome in ("", "failed") and not killed
    texts["error"] = "\n".join([*log.error, own]) if raised else ""
    # A launcher reports the exit code of its child; its own is often 1.
    launchers = re.findall(r"returned non-zero exit status (-?\d+)|exitcode\s*: (\d+)", texts["log"])
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

    each = ((row, conditions) for row in TABLE for conditions in row["match"])
    return next(found for found in each if all(holds(*condition) for condition in found[1].items()))


def facts(evidence: Evidence) -> set[str]:
    """What rows may name under `host`."""
    late = evidence.late()
    trainers = [p for p in evidence.processes if p["trainer"]]
    ours = {p["pid"] for p in trainers}
    workers = [p for p in evidence.processes if not p["trainer"] and p["ppid"] in ours]
    in_question = [p for p in trainers if late is None or p["pid"] == late["pid"]] or evidence.processes
    found = {
        "oom_killed": evidence.host.get("oom_kills", 0) > 0
        or any("ut of memory" in line or "oom-kill" in line for line in evidence.kernel),
        "gpu_busy": any((g.get("utilization") or 0) >= BUSY and ours & set(g.get("pids", ())) for g in evidence.gpu),
        "late_rank": late is not None,
        "trainer_stopped": any(p["state"] in ("T", "t") for p in trainers),
        "worker_stopped": any(p["state"] in ("T", "t") for p in workers),
        "uninterruptible": any(p["state"] == "D" for p in in_question),
    }
    return {name for name, holds in found.items() if holds}


def _found(patterns: list[str], text: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE | re.MULTILINE) for pattern in patterns)


class Log:
    """The end of the log. `error`: the exception that ended the run, and its message; [] for none but a launcher's.
    `before`: the lines before it."""

    def __init__(self, text: str):
        self.lines = log_lines(text)
        lines = [line.strip() for line in self.lines]
        starts = [i for i, line in enumerate(lines) if _EXCEPTION.match(line) and not line.startswith(_LAUNCHER)]
        begin = starts[-1] if starts else len(lines)
        error = list(takewhile(lambda line: not line.startswith(("Traceback", *_LAUNCHER)), lines[begin:]))[:_MORE]
        self.before = lines[:begin]
        self.error = [" ".join(error[:2]), *error[2:]] if error and error[0].endswith(":") else error

    def shown(self, patterns: list[str], note: str) -> str:
        """The line that shows this cause; else the last error, the rank's note, or the last line."""
        last = "".join(self.error[:1])[:400]
        if last and (not patterns or _found(patterns, last)):
            return last
        lines = [line.strip() for line in self.lines]
        shows = [line for line in lines if _found(patterns, line) and not line.startswith("Traceback")]
        own = [line for line in shows if not line.startswith(_LAUNCHER)]
        line = (own or shows)[-1] if shows else last or note or (lines[-1] if lines else "the log is empty")
        died = re.search(r"died with <Signals\.(\w+)|returned non-zero exit status (\d+)", line)
        if died and line.startswith(_LAUNCHER):  # without the complete command
            return f"its launcher reports {died[1] or f'exit code {died[2]}'}"
        return line[:400]


def log_lines(log: str) -> list[str]:
    """The last lines of the log that have text, without the prefixes of ranks, and without the middle of a long one."""
    half = (WIDTH - len(CUT)) // 2
    shown = (line if len(line) <= WIDTH else line[:half] + CUT + line[-half:] for line in log.splitlines()[-LINES:])
    lines = (re.sub(r"^\[rank\d+\]:\s?", "", printable(line)).rstrip() for line in shown)
    return [line for line in lines if line and not line.startswith("=== ")]  # a heading of the monitor
