"""What can be done with the selected run: start, stop, sample images or a checkpoint now, a pause, a place in the queue; and what
the buttons of the queue do.

Start and stop are the monitor's commands as processes, because a run must outlive the page. They are not in the table of
ui/jobs.py: the monitor's own lock excludes a second start, a stop can be repeated, and a stop must work on a full disk.
Their output goes to a file, not to a pipe: the processes that the monitor starts inherit it and would keep a pipe open.
The other actions are the monitor's commands as functions, so the command line and the page do the same.
"""

import os
import subprocess
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from guards import step_requests
from jobs import queue as run_queue
from monitor.process.spawned import helper, python
from monitor.run_folder import EVENTS, MonitorError
from runs.files import RunError
from runs.growing import json_objects
from ui.dataset.draft_store import OUT_OF_DATE
from ui.html import esc, press
from ui.run import queue, view
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
        raise RunError(
            f"the monitor did not start within {START_S} s; read {folder / 'monitor.log'}, then press Start again"
        )


def stop(folder: Path) -> None:
    """Request a checkpoint and a stop. Returns after at most STOP_S seconds; the run's state shows the progress.

    Raises:
        RunError: the monitor refused; carries its message.
    """
    _done(["monitor", "stop", str(folder)], STOP_S)


def _done(words: list[str], wait_s: float) -> bool:
    """Whether a command has ended within a time; it continues without the page. RunError: it failed, with its last lines."""
    in_memory = hasattr(os, "memfd_create")  # on Linux: a full disk takes no file
    with open(os.memfd_create("output"), "w+b") if in_memory else tempfile.TemporaryFile() as output:
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
    state, (position, waits_as) = shown.state, _place(shown.folder)
    found = []
    if shown.running and state in STEPS:
        found += ["sample"] * (shown.spec.get("sample_every_n_steps") != 0) + ["save"]
    if shown.running and state not in ("stopping", "opening"):
        found.append("pause")
    if not shown.running and state != "completed":
        found += ["now", "cancel"] if waits_as == shown.folder.name else ["queue"] * (not position)
    return found


def html(shown: "view.View") -> str:
    """The buttons, and what came of the last request."""
    if shown.problem:
        return ""
    busy = step_requests.waiting(shown.folder) if shown.running else ()
    if shown.running and view.stop_requested(shown.folder):
        busy = (*busy, "pause")
    buttons = []
    for action in possible(shown):
        label, doing, what = ACTIONS[action]
        text = doing if action in busy else label
        buttons.append(press(text, action, title=what, testid=f"do-{action}", off=action in busy))
    note = _note(shown, busy)
    said = f'<p class="hp-action-note" role="status" data-testid="action-note">{esc(note)}</p>' if note else ""
    return f'<div class="hp-more-actions" data-run="{esc(shown.folder.name)}">{"".join(buttons)}</div>{said}'


def _note(shown: "view.View", busy: tuple[str, ...]) -> str:
    if "pause" in busy:
        return "Pausing: it saves a checkpoint first."
    for action in busy:
        return f"{ACTIONS[action][0]}: requested. It is done when the current step is complete."
    if position := _place(shown.folder)[0]:
        return f"Waits in the queue, position {position}."
    if not shown.running:
        return ""
    events = shown.folder / EVENTS
    at, message = kept("answer", events, [events], lambda: _last_answer(events))
    if at is None or (datetime.now(UTC) - at).total_seconds() > SHOWN_S:
        return ""
    return f"{message[:1].upper()}{message[1:]}."


def _place(folder: Path) -> tuple[int, str]:
    """The run's place in the queue, from 1, and the name of that entry: its own, or its sweep's; (0, "") for none."""
    places = enumerate(queue.entries(), 1)
    return next(((n, one.run) for n, one in places if folder.name in (one.run, *one.sweep)), (0, ""))


def _last_answer(events: Path) -> tuple[datetime | None, str]:
    """When the newest request of this run was answered, and how; None without an answer."""
    found = json_objects(end_of(events, EVENT_BYTES))
    answers = [one for one in found if one.get("kind") == step_requests.EVENT] or [{}]
    return view.moment(answers[-1].get("t")), str(answers[-1].get("message"))[:300]


def act(run: str, action: str) -> dict[str, Any]:
    """Do what a button says with a run; up, down, retry, now and cancel also with a sweep that waits.

    Returns {"id"} of a request, {"position"} of a run that waits, {"paused": runs that make room}, {"message": for people}.

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
                return {"position": run_queue.add(view.folder_of(run))}
            case "now":
                paused = run_queue.run_now(run)
                return {"paused": paused, "message": f"Pausing {', '.join(paused)} first." if paused else ""}
            case "cancel":
                stopped = run_queue.cancel(run)  # of a sweep
                also = f" Stopping {', '.join(stopped)}." if stopped else ""
                return {"message": f"{run} left the queue.{also} All files stay."}
            case "up" | "down" | "retry":
                order = [one.run for one in queue.entries()]
                place = order.index(run) + 1 if run in order else 0
                to = run_queue.move(run, place + MOVES[action])
                run_queue.ensure_worker()
                return {"message": f"{run}: position {to} of {len(order)}"}
    except MonitorError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            view.folder_of(run)  # says that it was deleted meanwhile
        raise RunError(f"This cannot be written: {error.strerror or error}. Free some space, then try again") from error
    raise RunError(OUT_OF_DATE)
