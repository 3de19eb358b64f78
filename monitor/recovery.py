"""From the evidence on a failure to the next attempt: diagnose, kill, decide, and say what follows; `start.py` starts
it.

Each function can be called again after an error in its middle. What must not happen twice (counting the failure) is
committed to the RunState in one step at the end.

Restart or stop is a pure rule (`after_failure`): progress counts, not restarts. A failure has a fingerprint (phase,
step, cause). The first failure since new steps were made is answered at once: nothing is gained by waiting, and the
time from the hang to the next new step is what a user pays. After that, waiting may help (another program's memory, a
network), so 10 s, 20 s, 40 s … 300 s. The third failure with one fingerprint and no new step ends the run, unless its
ladder still has a change to try. Ten restarts in all; ten minutes of new steps give back the ten and reset the waiting,
so a run of three days with a hang an hour finishes.
"""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path

from guards.checkpoint import writing_file
from guards.heartbeat import REQUEST_TERM
from monitor.attempt import Attempt
from monitor.config import Section
from monitor.diagnose import causes
from monitor.diagnose.causes import LORA_DAMAGED, Evidence
from monitor.diagnose.incident import Incident
from monitor.phrases import PHASES, count
from monitor.process import platform
from monitor.process.spawned import KillResult
from monitor.resume import checkpoints, next_attempt
from monitor.start import VERIFY_TRIES_COUNT, Run, Unkillable, keep_newest, wait
from monitor.state import EXIT_AGAIN, EXIT_BUDGET, ExitStatus, History, Observation, State, Transition

MIXED_COUNT = 2  # failures of changing fingerprints are allowed this many more than one that repeats


def recover(run: Run, attempt: Attempt, evidence: Evidence | None, progress_s: float = 0.0) -> Transition:
    """Answer a failure; the last progress was at `progress_s` (monotonic).

    `evidence` None: go on with the recovery that `run.state` records.

    Returns what follows: BACKOFF before a restart, an end, COMPLETED when the training was complete, or STOPPING when
    it stopped because it was asked to.

    Raises:
        Unkillable: a process of the attempt lives on.
    """
    state = run.state
    if not state.failing and evidence is not None:
        _open_incident(run, attempt, evidence, progress_s)
    incident = run.incident
    if incident is None or not state.failing:
        raise RuntimeError("recover() was called without a failure")
    evidence, cause = incident.evidence, incident.cause
    run.report(State.RECOVERING, _summary(evidence))

    kill_processes(run, attempt)
    view = attempt.poll(platform.now(), 0.0, fresh=True)
    status = attempt.exit_status(view.beats)
    if stopped_on_request(status, view) and state.shutdown is not None:
        return Transition(State.STOPPING, "stopped as requested")
    if status.done(run.folder.foreign, evidence.kind == "hang") and evidence.outcome != LORA_DAMAGED:
        problem = complete(run)
        if not problem:
            incident.outcome = "the training was complete; only its process had not exited"
            return Transition(State.COMPLETED)
        run.folder.log(f"{problem}; the last checkpoint is used to write it again")

    cause_count = state.cause_counts.get(cause.name, 0) + 1
    # From a cause's second failure on, or at once where it is certain to return.
    if run.leads and cause.ladder and (cause_count >= 2 or cause.at_once):
        limit_s = run.config.check.render_s
        change = next_attempt.next_change(run.folder, cause.ladder, state.changes, limit_s, run.pause)
    else:
        change = {}
    mark = f"{evidence.phase}/{evidence.step}/{cause.name}"  # the same failure twice has the same fingerprint
    new_steps = state.best_step > state.best_before
    limits = run.config.restart
    history, stop, wait_s = after_failure(state.history, mark, new_steps, bool(change), limits, cause.wait_s)
    stop = stop if cause.restart else cause.explanation
    if stop:
        keep_newest(run, run.pause)  # the message names the checkpoint that is kept
        code = EXIT_BUDGET if cause.restart else None
        result = Transition(State.FAILED, _close_given_up(run, incident, stop), code=code)
    else:
        restarting = f"restarting in {wait_s:.0f} s" if wait_s else "restarting"
        result = wait(wait_s, f"{cause.title}; {restarting}")
        if run.several:
            result = Transition(State.PREEMPTED, f"{result.message} with all machines", code=EXIT_AGAIN)
        if change:
            incident.changed.append(change["sentence"])
            patch = {name: value for name, value in change["patch"].items() if name != "spec"}
            run.folder.event("mitigated", change["sentence"], change=change["name"], patch=patch)
        if wait_s:
            run.folder.event("backoff", restarting)
        incident.save(run.folder)
    attempt.close()
    # Nothing below can fail: the failure is counted once.
    state.history, state.cause_counts[cause.name] = history, cause_count
    state.failing, state.current = False, None
    if not stop:
        state.restarts += 1
        state.changes += [change] if change else []
    state.save(run.folder)
    return result


def _open_incident(run: Run, attempt: Attempt, evidence: Evidence, progress_s: float) -> None:
    """Name the cause and write the incident; from here on a killed monitor can continue it."""
    cause, now = causes.match(evidence), platform.now()
    since_s = max(0.0, now.mono_s - progress_s)
    message = f"{cause.title}: {_summary(evidence)}"
    run.folder.event(evidence.kind, message, phase=evidence.phase, step=evidence.step, since_s=round(since_s, 3))
    if run.incident is not None:
        run.incident.close(run.folder, "the restart after it failed as well", now.utc)
    incident = Incident.open(
        run.folder,
        evidence,
        cause,
        attempt=attempt.record.number,
        progress_s=progress_s,
        best_step=run.state.best_step,
        started_at=platform.utc(now.wall_s - (now.mono_s - progress_s)),
        detect_s=since_s,
    )
    run.incident, run.state.incident, run.state.failing = incident, incident.number, True
    run.state.ledger.fails(since_s)
    run.state.save(run.folder)
    run.folder.log(f"incident {incident.number}: {cause.title}. {cause.explanation}")


def evidence_of(run: Run, attempt: Attempt, kind: str) -> Evidence:
    """What the run itself knows of a failure: causes.of_hang and of_crash add the rest."""
    tail, gpus = attempt.log_tail(run.config.check.log_tail_bytes), list(run.gpus.read())
    known = run.state
    return Evidence(kind, step=known.best_step, planned=known.planned, log_tail=tail, gpu=gpus, gpu_note=run.gpus.note)


def _summary(evidence: Evidence) -> str:
    where = f"{PHASES.get(evidence.phase, evidence.phase)}, step {evidence.step}"
    if evidence.kind == "crash":
        return f"{where}: {evidence.ended}"
    signs = f" ({'; '.join(evidence.signs)})" if evidence.signs else ""
    return f"{where}: no progress for {evidence.stalled_s:.1f} s{signs}"


def load_incident(run: Run) -> None:
    """Take up the incident that an earlier monitor left open. One that cannot be read is forgotten, with its failure."""
    number = run.state.incident
    if number:
        run.incident = Incident.load(run.folder.own / "incidents" / number)
        if run.incident is None:
            run.folder.log(f"incident {number} cannot be continued: its incident.json is missing or damaged")
            run.state.failing, run.state.incident = False, ""
        elif not run.state.failing and run.incident.recover_s is not None:
            run.incident = None  # closed already


def close_incident(run: Run, view: Observation, first_new: int) -> None:
    """Step `first_new` is the first one beyond those reached before the failure: the run has recovered."""
    incident, run.incident, run.state.incident = run.incident, None, ""
    if incident is None:
        return
    first = max(view.beats, key=lambda b: b.step)
    later = first.step - first_new  # steps since, whose durations the record keeps: they date `first_new`
    at_s = first.step_s - (sum(first.intervals[-later:]) if later else 0.0)
    incident.recover_s = max(0.0, at_s - incident.progress_s)
    incident.steps_repeated = incident.best_step - (incident.resumed_from or 0)
    incident.close(run.folder, f"the run recovered: step {first_new} is new", platform.now().utc)
    run.state.save(run.folder)
    repeated = count(incident.steps_repeated, "step")
    message = f"step {first_new} is new: recovered in {incident.recover_s:.1f} s, {repeated} trained twice"
    run.folder.event("progress", message, incident=incident.number)


def _close_given_up(run: Run, incident: Incident, reason: str) -> str:
    """Close the incident; the reason as the user reads it."""
    newest = checkpoints.newest(run.state_folders())
    kept = f"; {newest.name} is kept, and a new start resumes from it" if newest else ""
    incident.close(run.folder, f"the run gave up: {reason}{kept}", platform.now().utc)
    cause = incident.cause
    where = (
        f"Machine {run.folder.machine} ({socket.gethostname()}), rank {incident.evidence.rank}." if run.several else ""
    )
    parts = [f"{cause.title}.", where, cause.explanation, cause.advice]
    parts += [f"Gave up: {reason}."] if reason != cause.explanation else []
    # The last line of the log, where a launcher's own traceback has pushed the trainer's error out of sight.
    run.folder.mark_log(f"stopped: {' '.join(filter(None, parts)).splitlines()[0]}")
    return " ".join([*filter(None, parts), f"See incidents/{incident.number}/report.md"])


def kill_processes(
    run: Run, attempt: Attempt, grace_s: float | None = None, kill_wait_s: float | None = None
) -> KillResult:
    """Kill what is left of the attempt and wait until its GPU memory is free, all within `run.remaining_s()`.

    Without times, those after a failure. Raises Unkillable: a process lives on.
    """
    grace_s = run.config.end.grace_s if grace_s is None else grace_s
    kill_wait_s = run.config.end.kill_wait_s if kill_wait_s is None else kill_wait_s
    left_s = run.remaining_s()
    result = attempt.kill(min(grace_s, left_s), min(kill_wait_s, max(1.0, left_s - grace_s)))
    if result.killed:
        names = ", ".join(f"{p.name} ({p.pid})" for p in result.killed)
        run.folder.event("killed", f"killed {count(len(result.killed), 'process')} in {result.took_s:.1f} s: {names}")
        timeout_s = min(run.config.end.gpu_memory_s, run.remaining_s())
        if held := run.gpus.wait_free({p.pid for p in result.killed}, timeout_s):
            run.folder.log(f"the GPU still holds memory of killed processes: {sorted(held)}")
    if run.incident is not None and run.state.failing:
        known = {p["pid"] for p in run.incident.killed}
        run.incident.killed += [{"name": p.name, "pid": p.pid} for p in result.killed if p.pid not in known]
        if result.survivors:
            run.incident.save(run.folder)
    if result.survivors:
        raise Unkillable(result.survivors)
    return result


def stopped_on_request(status: ExitStatus, view: Observation) -> bool:
    """It saved and exited because the monitor asked, and not because something else sent it SIGTERM."""
    return status.outcome == "stopped" and not any(b.request == REQUEST_TERM for b in view.beats)


def complete(run: Run) -> str:
    """Make sure that the finished LoRA is in the run's folder and verifies: "" or what is wrong with it.

    A script with `save_dir` copies its files at its end; a script that was killed did not. The user's own script may
    write anything anywhere, so its own exit code is all there is.
    """
    if run.folder.foreign or not run.leads:
        return ""
    _fetch_lora(run)
    lora = run.folder.lora
    if lora is None:
        return f"the LoRA {run.folder.folder.name}.safetensors is missing"
    for attempt in range(VERIFY_TRIES_COUNT):
        if attempt:
            run.pause(1.0)
        result = checkpoints.verify_lora(lora, run.config.check.verify_s, run.remaining_s(), run.pause)
        if not result.error:
            return f"the LoRA {lora.name} is damaged: {'; '.join(result.problems)}" if result.problems else ""
    return f"the LoRA {lora.name} cannot be verified: {result.error}"


def _fetch_lora(run: Run) -> None:
    """Copy the LoRA from `save_dir` where the script did not; under a temporary name: it is never half there."""
    name = f"{run.folder.folder.name}.safetensors"
    source, target = Path(run.state.save_dir) / name, run.folder.folder / name
    if not run.state.save_dir or not source.is_file():
        return
    try:
        if not target.is_file() or target.stat().st_size != source.stat().st_size:
            with writing_file(target) as temporary:
                shutil.copyfile(source, temporary)
    except OSError as error:
        run.folder.log(f"the LoRA stays in {source.parent}: it cannot be copied: {error}")


# ---- restart or stop ----


def after_progress(history: History, seconds: float, restart: Section) -> tuple[History, bool]:
    """The history after `seconds` of new steps, and whether the full allowance of restarts was just given back."""
    new_steps_s = history.new_steps_s + seconds
    if new_steps_s < restart.refund_s or not history.restarts:
        return replace(history, new_steps_s=new_steps_s), False
    return replace(history, restarts=0, new_steps_s=0.0), True


def after_failure(
    history: History, mark: str, new_steps: bool, changes: bool, restart: Section, least_wait_s: float = 0.0
) -> tuple[History, str, float]:
    """The history after a failure; the reason to end the run, "" to restart it; the seconds to wait before that.

    Args:
        mark: the failure's fingerprint.
        new_steps: the attempt that failed got further than any before it.
        changes: the restart changes something.
        least_wait_s: what the cause needs (a full disk, a GPU that is being reset).
    """
    failures = {} if new_steps else dict(history.failures)
    failures[mark] = failures.get(mark, 0) + 1
    counted = replace(history, failures=failures)
    same, in_all = failures[mark], sum(failures.values())
    if same >= restart.without_progress_count and not changes:
        return counted, f"the same failure {same} times without a new step", 0.0
    if in_all >= restart.without_progress_count + MIXED_COUNT and not changes:
        return counted, f"{in_all} failures in a row without a new step", 0.0
    if history.restarts >= restart.in_all_count:
        return counted, f"all {history.restarts} restarts are used up", 0.0
    wait_s = 0.0 if in_all == 1 else min(restart.backoff_first_s * 2 ** (in_all - 2), restart.backoff_last_s)
    return replace(counted, restarts=history.restarts + 1), "", max(wait_s, least_wait_s)
