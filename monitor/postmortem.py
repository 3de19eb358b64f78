"""Put together what is known of a hang or a crash, and open its incident."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monitor import causes, clock, evidence, stacks
from monitor.attempt import Exit
from monitor.causes import Cause
from monitor.decide import Verdict
from monitor.evidence import Evidence
from monitor.incident import Incident
from monitor.inquiry import Inquiry

if TYPE_CHECKING:
    from monitor.core import Core


def hang(run: Core, verdict: Verdict) -> Evidence:
    """The evidence on a stuck run. What the inquiry has gathered by now counts; nothing is waited for."""
    if run.inquiry is None:
        run.inquiry = Inquiry(run.attempt.tree, run.attempt.heartbeats, run.limits, run.gpus.read)
        run.inquiry.begin(run.beats, full=True)
    left = run.attempt.exit(run.beats)
    found = Evidence(
        kind="hang",
        phase=verdict.phase,
        step=verdict.step or run.book.best_step,
        rank=verdict.rank,
        quiet_s=verdict.quiet_s,
        budget_s=verdict.budget_s,
        why=verdict.why + ((f"left alone for a while, because {run.was_slow}",) if run.was_slow else ()),
        outcome=left.outcome if left.outcome != "running" else "",
        note=left.note or next((b.note for b in run.beats if b.rank == verdict.rank), ""),
        stacks=run.inquiry.texts(),
    )
    return _common(run, found)


def crash(run: Core, left: Exit) -> Evidence:
    """The evidence on a dead run."""
    # A rank that failed says why; the others only say that it is gone.
    first = next((b for b in run.beats if b.outcome in ("failed", "deadline")), run.beats[0] if run.beats else None)
    ended = str(left)
    if first and first.rank and first.outcome not in ("running", left.outcome):
        ended += f"; rank {first.rank}'s last word: {first.outcome}" + (f" ({first.note})" if first.note else "")
    outcome = first.outcome if first else left.outcome
    found = Evidence(
        kind="crash",
        phase=first.phase if first else "import",
        step=first.step if first else run.book.best_step,
        rank=first.rank if first else 0,
        exit_code=left.code,
        signal=left.signal if outcome in ("", "running") else None,  # a launcher ends the others once one has failed
        outcome=outcome if outcome != "running" else "",
        note=first.note if first and first.outcome != "running" else left.note,
        ended=ended,
    )
    dumps = {b.pid: stacks.fatal_dump(run.attempt.heartbeats, b.pid) for b in run.beats}
    found.stacks = {pid: text for pid, text in dumps.items() if text}
    return _common(run, found)


def _common(run: Core, found: Evidence) -> Evidence:
    now = clock.now()
    ranks = [b.pid for b in run.beats]
    found.planned = run.book.planned
    found.ranks = evidence.rank_words(run.beats, now.mono_s)
    found.processes = evidence.processes(run.attempt.tree.members, ranks)
    found.log_tail = run.files.log_tail(run.attempt.log_start, run.limits.check.log_tail)
    found.gpu, found.gpu_note = list(run.gpus.read()), run.gpus.note
    oom_kills = evidence.oom_kills() - run.oom_kills_before
    found.host = {**evidence.memory(), **evidence.disk(run.files.folder), "oom_kills": oom_kills}
    found.kernel = evidence.kernel_lines(now.boot_s - (now.mono_s - run.attempt.started_s))
    return found


def incident(run: Core, found: Evidence) -> tuple[Incident, Cause]:
    """Name the cause and write the incident down."""
    cause = causes.match(found)
    now = clock.now()
    if run.watch.ranks:
        moved = run.watch.last_progress_s()
    else:
        moved = run.attempt.started_s if found.kind == "crash" else now.mono_s - found.quiet_s
    opened = Incident.open(
        run.files,
        found,
        cause,
        attempt=run.attempt.number,
        progress_s=moved,
        best_step=run.book.best_step,
        started_at=clock.utc(now.wall_s - (now.mono_s - moved)),
        detect_s=max(0.0, now.mono_s - moved),
    )
    return opened, cause
