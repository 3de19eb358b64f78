"""What can be done with the selected run: start, stop, sample images or a checkpoint now, a pause, a place in the
queue; and the queue above the list of runs with its buttons, and the sweeps.

Start and stop are the monitor's commands as processes, because a run must outlive the page. They are not in the table
of ui/jobs.py: the monitor's own lock excludes a second start, a stop can be repeated, and a stop must work on a full
disk. Their output goes to a file, not to a pipe: the processes that the monitor starts inherit it and would keep a pipe
open. The other actions are the monitor's commands as functions, so the command line and the page do the same.

The order of the queue is in jobs/queue.py; the page shows it and changes it. It also starts the queue's process when
that is missing, so an open page, or a client of the API, is one more that keeps the queue going.
"""

import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from guards import step_requests
from jobs import queue
from monitor.process.spawned import helper, python, unnamed_file
from monitor.run_folder import EVENTS
from monitor.state import FINAL
from runs import results, sweep
from runs.files import REASONS, RunError
from runs.growing import json_objects
from ui.dataset.draft_store import OUT_OF_DATE
from ui.html import part
from ui.run import view
from ui.run.readers import end_of, kept

STEPS = ("starting", "running", "suspect", "slow")  # states in which a request is done at the next step
# action: (label, the label while it is being done, what it does)
ACTIONS = {
    "sample": ("Sample now", "Sampling…", "Makes the sample images of the current step. The training stays the same."),
    "save": ("Save a checkpoint", "Saving…", "Saves a checkpoint and the LoRA of the current step."),
    "pause": ("Pause", "Pausing…", "Saves a checkpoint, then ends the training, so that its GPU is free. Resume continues from there."),
    "queue": ("Add to the queue", "", "It starts when the GPU is free and the runs before it have ended."),
    "now": ("Run now", "", "Pauses the run that uses the GPU, trains this one, then goes on with the other."),
    "cancel": ("Leave the queue", "", "The run and its files stay."),
}  # fmt: skip
MOVES = {"up": -1, "down": 1, "retry": 0}
SHOWN_S = 120.0  # an answer to a request stays so long
EVENT_BYTES = 64 << 10
START_S = 60  # seconds `monitor start` may take
STOP_S = 5  # seconds the page waits for `monitor stop`, which continues without the page
_asked: set[tuple[Path, str]] = set()


def ask_once(folder: Path, *questions: str) -> str:
    """Why the run or draft in `folder` is not started unasked, the first time; "" from then on, and without a question:
    whoever starts again after the question means it. Another server asks again."""
    text = "".join(f"{one.rstrip('.')}. " for one in questions if one)
    if not text or (folder, text) in _asked:
        return ""
    _asked.add((folder, text))
    return f"{text}Press the button again to start anyway."


def start(folder: Path) -> None:
    """Start or resume a run, detached; while its GPU is busy, or others wait for it, it goes to the end of the queue.

    Raises:
        RunError: the monitor refused; carries its message.
    """
    if not _done(["jobs", "queue", "start", str(folder)], START_S):
        raise RunError(f"the monitor did not start within {START_S} s; read {folder / 'monitor.log'}, then try again")


def stop(folder: Path) -> None:
    """Request a checkpoint and a stop. Returns after at most STOP_S seconds; the run's state shows the progress.

    Raises:
        RunError: the monitor refused; carries its message.
    """
    _done(["monitor", "stop", str(folder)], STOP_S)


def _done(words: list[str], wait_s: float) -> bool:
    """Whether a command ended in time; it continues without the page. RunError: it failed, with its last lines."""
    with unnamed_file() as output:
        process = helper(python(*words), output)
        try:
            code = process.wait(wait_s)
        except subprocess.TimeoutExpired:
            threading.Thread(target=process.wait, daemon=True).start()  # it is no zombie when it has ended
            return False
        if code:
            output.seek(0)
            lines = output.read().decode("utf-8", "replace").strip().splitlines()[-8:]
            said = "\n".join(line.removeprefix("monitor: ").removeprefix("jobs: ") for line in lines)
            raise RunError(said or f"python -m {' '.join(words)} exited with code {code}")
        return True


def possible(shown: "view.View") -> list[str]:
    """The actions that the run's state allows."""
    if shown.problem:
        return []
    state, (position, entry) = shown.state, place(shown.folder)
    found = []
    if shown.running and state in STEPS:
        if shown.spec.get("sample_every_n_steps") != 0 and results.read_prompts(shown.folder / view.PROMPTS):
            found.append("sample")
        found.append("save")
    if shown.running and state not in ("stopping", "opening"):
        found.append("pause")
    if not shown.running and (entry or state != "completed"):
        found += ["now", "cancel"] if entry and entry.run == shown.folder.name else ["queue"] * (not position)
    return found


def html(shown: "view.View") -> str:
    """The buttons, and what came of the last request."""
    if shown.problem:
        return ""
    busy = step_requests.waiting(shown.folder) if shown.running else ()
    if shown.running and view.stop_requested(shown.folder):
        busy = (*busy, "pause")
    buttons = [(action, *ACTIONS[action], action in busy) for action in possible(shown)]
    return part("run/queue.html", "actions", shown.folder.name, buttons, _note(shown, busy))


def _note(shown: "view.View", busy: tuple[str, ...]) -> str:
    if "pause" in busy:
        return "Pausing: it saves a checkpoint first."
    for action in busy:
        return f"{ACTIONS[action][0]}: requested. It is done when the current step is complete."
    position, entry = place(shown.folder)
    if entry:
        return entry.problem or f"Waits in the queue, position {position}."
    if not shown.running:
        return ""
    events = shown.folder / EVENTS
    at, message = kept("answer", events, [events], lambda: _last_answer(events))
    if at is None or (datetime.now(UTC) - at).total_seconds() > SHOWN_S:
        return ""
    return f"{message[:1].upper()}{message[1:]}."


def place(folder: Path) -> tuple[int, queue.Entry | None]:
    """The run's place in the queue, from 1, and the entry there: its own, or its sweep's; (0, None) for none."""
    places = enumerate(entries(), 1)
    return next(((n, one) for n, one in places if folder.name in (one.run, *one.sweep)), (0, None))


def waits(folder: Path) -> bool:
    """Whether the queue starts the run in its turn."""
    entry = place(folder)[1]
    return entry is not None and not entry.problem


def _last_answer(events: Path) -> tuple[datetime | None, str]:
    """When the newest request of this run was answered, and how; None without an answer."""
    found = json_objects(end_of(events, EVENT_BYTES))
    answers = [one for one in found if one.get("kind") == step_requests.EVENT] or [{}]
    return view.moment(answers[-1].get("t")), str(answers[-1].get("message"))[:300]


def act(run: str, action: str) -> dict[str, Any]:
    """Do what a button says with a run; up, down, retry, now and cancel also with a sweep that waits.

    Returns {"id"} of a request, {"position"} in the queue, {"paused": runs that make room}, {"message": for people}.

    Raises:
        RunError: it cannot be done; the message says why.
    """
    from monitor.cli import commands

    try:
        match action:
            case "sample" | "save":
                return {"id": commands.request(view.folder_of(run), action)}
            case "pause":
                commands.ask_to_end(view.folder_of(run), {"pause": True})
                return {}
            case "queue":
                return {"position": queue.add(view.folder_of(run))}
            case "now":
                paused = queue.run_now(run)
                return {"paused": paused, "message": f"Pausing {', '.join(paused)} first." if paused else ""}
            case "cancel":
                stopped = queue.cancel(run)  # of a sweep
                also = f" Stopping {', '.join(stopped)}." if stopped else ""
                return {"message": f"{run} left the queue.{also} All files stay."}
            case "up" | "down" | "retry":
                order = [one.run for one in entries()]
                place = order.index(run) + 1 if run in order else 0
                to = queue.move(run, place + MOVES[action])
                queue.ensure_worker()
                return {"message": f"{run}: position {to} of {len(order)}"}
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            view.folder_of(run)  # says that it was deleted meanwhile
        why = REASONS.get(error.errno or 0) or error.strerror or error
        raise RunError(f"The action {action} on {run} was not stored: {why}") from error
    raise RunError(OUT_OF_DATE)


# The queue and the sweeps ---------------------------------------------------------------------------------------------

CHECK_S = 10.0  # between two looks whether the queue's process is there
SWEEPS = 4  # shown below the queue
_checked_s = -1e9


def entries() -> list[queue.Entry]:
    """The entries of the queue; the file is read again only after it changed."""
    file = queue.outputs() / queue.FILE
    return kept("queue", file, [file], queue.read).entries


def keep_queue() -> list[queue.Entry]:
    """The entries of the queue. Starts its process where it is missing: whoever looks at the runs keeps it going."""
    global _checked_s
    if (known := entries()) and time.monotonic() - _checked_s >= CHECK_S:
        _checked_s = time.monotonic()
        queue.ensure_worker()
    return known


def queue_html(everything: list[view.View]) -> str:
    """The queue and the newest sweeps; "" where there is neither."""
    known = keep_queue()
    views = {one.folder.name: one for one in everything}
    waiting = [one for one in known if one.next_run in views]  # a deleted run leaves at the queue's next turn
    shown = [(one, one.run if one.sweep else views[one.run].name, _queued(one, views[one.next_run])) for one in waiting]
    sweeps = []
    for one in sweep.all_sweeps()[:SWEEPS]:
        runs = [views[run] for run, _ in one.runs if run in views]
        goes_on = one.name in {entry.run for entry in known} or any(each.running for each in runs)
        sweeps.append((one, sum(each.state in FINAL for each in runs), goes_on))
    return part("run/queue.html", "queue", shown, sweeps) if shown or sweeps else ""


def _queued(entry: queue.Entry, shown: view.View) -> list[str]:
    """What is said of an entry. shown: its run, or the next one of its sweep."""
    if entry.problem:
        return [entry.problem]
    started = [f"{entry.total - len(entry.sweep)} of {entry.total} started"] if entry.sweep else []
    return started + ["paused"] * (shown.state == "paused")
