"""`diagnose RUN|PID`: what a process and its children are doing, and what they wait for, in words. Changes nothing.

Two samples a moment apart, every stack that can be had, the kernel's state, and the table of causes on top.
"""

from __future__ import annotations

import time
from pathlib import Path

from monitor import causes, evidence, limits, report, signals, system
from monitor import status as statuses
from monitor.attempt import Attempt
from monitor.evidence import Evidence
from monitor.folder import BOOK, MonitorError, RunFiles, find, read_json
from monitor.inquiry import Inquiry
from monitor.tree import Tree

APART_S = 2.0


def diagnose(what: str) -> dict:
    """What was found on a run or a process number: {"summary", "cause", "explanation", "signals", "processes", "stacks", …}.

    Raises:
        MonitorError: there is no such run or process, or nothing of it lives.
    """
    if what.isdigit() and not Path(what).exists():
        return _process(int(what))
    return _run(find(what))


def _process(pid: int) -> dict:
    process = system.proc(pid)
    if process is None:
        raise MonitorError(f"there is no process {pid}")
    tree = Tree("", (pid, process.start))
    return _look(tree, Path(), [], [pid], f"process {pid} ({system.command_of(pid)[:120]})", None)


def _run(folder: Path) -> dict:
    files = RunFiles(folder)
    known = statuses.read(folder)
    attempt = Attempt.adopt(read_json(folder / BOOK) or {})
    if attempt is None or not attempt.tree.members:
        state = f"{known['state']}: {known['reason'] or known['message']}" if known else "never started"
        raise MonitorError(f"{folder.name}: nothing of it runs ({state})")
    beats = attempt.beats()
    name = f"{folder.name}, attempt {attempt.number}"
    return _look(attempt.tree, attempt.heartbeats, beats, [b.pid for b in beats], name, (files, attempt))


def _look(tree: Tree, heartbeats: Path, beats: list, ranks: list[int], name: str, run: tuple | None) -> dict:
    inquiry = Inquiry(tree, heartbeats, limits.load(), lambda: ())
    inquiry.begin(beats, full=True)
    if not beats:
        for pid in ranks:
            inquiry.spy.begin(pid, tree.members[pid].start)
    first = inquiry.last
    time.sleep(APART_S)
    inquiry.ask(beats)
    until = time.monotonic() + limits.load().check.py_spy
    while inquiry.spy.poll() and time.monotonic() < until:
        time.sleep(0.05)
    found = signals.compare(first, inquiry.last, ranks)
    now_s = time.monotonic()
    beat = beats[0] if beats else None
    quiet_s = now_s - max((beat.step_s, beat.phase_s)) if beat else 0.0
    seen = Evidence(
        kind="hang",
        phase=beat.phase if beat else "step",
        step=beat.step if beat else 0,
        planned=beat.planned if beat else 0,
        quiet_s=quiet_s,
        why=found.stuck,
        note=beat.note if beat else "",
        ranks=evidence.rank_words(beats, now_s),
        processes=evidence.processes(tree.members, ranks),
        stacks=inquiry.texts(),
        log_tail=run[0].log_tail(run[1].log_start, 65536) if run else "",
    )
    cause = causes.match(seen)
    where = seen.where()
    state = "it moves slowly" if found.slow else "it stands still" if found.stuck else "nothing speaks for a hang"
    return {
        "name": name,
        "summary": state,
        "phase": seen.phase if beat else None,
        "step": seen.step if beat else None,
        "silent_s": round(quiet_s, 1) if beat else None,
        "where": where,
        "signals": {"stuck": list(found.stuck), "slow": list(found.slow)},
        "cause": cause.name if found.stuck else None,
        "explanation": f"{cause.title}. {cause.explanation}" if found.stuck else "",
        "advice": cause.advice if found.stuck else "",
        "processes": seen.processes,
        "stacks": {str(pid): text for pid, text in seen.stacks.items()},
    }


def words(found: dict) -> str:
    """The same for a person."""
    lines = [f"{found['name']}: {found['summary']}."]
    if found["phase"]:
        at = report.PHASES.get(found["phase"], found["phase"])
        lines.append(
            f"It is at {at}, step {found['step']}; its last sign was {report.duration(found['silent_s'])} ago."
        )
    lines += [f"- {why}" for why in (*found["signals"]["stuck"], *found["signals"]["slow"])]
    if found["explanation"]:
        lines.append(f"If it is stuck, then most likely: {found['explanation']} {found['advice']}".rstrip())
    for p in found["processes"]:
        waits = f", waits in {p['wchan']}" if p["wchan"] else ""
        state = report.STATES.get(p["state"], p["state"])
        lines.append(f"  {p['pid']} {p['name']}: {state}{waits}, {p['cpu_s']} s CPU. {p['command'][:100]}")
    for pid, text in found["stacks"].items():
        lines.append(f"\nstacks of {pid}:\n{text.strip()}")
    return "\n".join(lines)
