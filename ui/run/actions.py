"""What can be done with the selected run beside Start and Stop: sample images or a checkpoint now, a pause, a place in the queue.

The actions are the monitor's commands as functions, so the command line and the page do the same.
"""

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guards import step_requests
from jobs import queue as run_queue
from monitor.run_folder import EVENTS
from runs.files import RunError
from ui import scripts
from ui.dataset.images import OUT_OF_DATE
from ui.html import esc, press
from ui.run import queue, view
from ui.run.readers import kept

if TYPE_CHECKING:
    import gradio as gr

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
SHOWN_S = 120.0  # an answer to a request stays so long
EVENT_BYTES = 64 << 10


def possible(shown: "view.View | None") -> list[str]:
    """The actions that the run's state allows."""
    if shown is None or shown.problem:
        return []
    state, position = shown.state, _position(shown.folder)
    found = []
    if shown.running and state in STEPS:
        found += ["sample"] * (shown.spec.get("sample_every_n_steps") != 0) + ["save"]
    if shown.running and state not in ("stopping", "opening"):
        found.append("pause")
    if not shown.running and state != "completed":
        first = position and queue.entries()[position - 1].run == shown.folder.name
        found += ["now", "cancel"] if first else ["queue"] * (not position)
    return found


def html(shown: "view.View | None") -> str:
    """The buttons, and what came of the last request."""
    if shown is None or shown.problem:
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
    if position := _position(shown.folder):
        return f"Waits in the queue, position {position}."
    if not shown.running:
        return ""
    events = shown.folder / EVENTS
    answer = kept("answer", events, [events], lambda: _last_answer(events))
    if answer is None or (datetime.now(UTC) - answer["at"]).total_seconds() > SHOWN_S:
        return ""
    return f"{answer['message'][:1].upper()}{answer['message'][1:]}."


def _position(folder: Path) -> int:
    """The run's place in the queue, from 1; 0 for none."""
    return next((n for n, one in enumerate(queue.entries(), 1) if folder.name in (one.run, *one.sweep)), 0)


def _last_answer(events: Path) -> dict[str, Any] | None:
    """The newest answer to a request of this run: {"at", "message"}."""
    try:
        with events.open("rb") as file:
            file.seek(max(0, events.stat().st_size - EVENT_BYTES))
            lines = file.read(EVENT_BYTES).splitlines()
    except OSError:
        return None
    mark = f'"kind": "{step_requests.EVENT}"'.encode()
    for line in reversed([line for line in lines if mark in line]):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            at = datetime.fromisoformat(event["t"]).astimezone(UTC)
            return {"at": at, "message": str(event["message"])[:300]}
    return None


def act(folder: Path, action: str) -> dict[str, Any]:
    """Do one of: sample, save, pause, queue, now, cancel. Returns {"id"} of a request, {"position"} of a run that waits,
    {"paused": runs that make room}, or {}.

    Raises:
        RunError: it cannot be done; the message says why.
    """
    from jobs import worker
    from monitor.cli import requests

    with queue.explained():
        match action:
            case "sample" | "save":
                return {"id": requests.request(folder, action)}
            case "pause":
                requests.pause(folder)
            case "queue":
                return {"position": worker.add(folder)}
            case "now":
                return {"paused": worker.run_now(folder.name)}
            case "cancel":
                run_queue.cancel(folder.name)
            case _:
                raise RunError(OUT_OF_DATE)
    return {}


def build() -> "gr.HTML":
    """The buttons; the value is that of `html`."""
    return scripts.drawn("run_actions", "run-actions", "act")
