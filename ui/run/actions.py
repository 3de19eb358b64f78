"""What can be done with the selected run beside Start and Stop: sample images or a checkpoint now, a pause, a place in the queue.

The buttons are one component: its script shows what `value` allows. The actions are the monitor's commands as functions, so the
command line and the page do the same.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guards import step_requests
from monitor import run_queue
from monitor.run_folder import EVENTS, MonitorError
from runs.files import RunError
from ui import scripts
from ui.dataset.images import OUT_OF_DATE
from ui.run import calls, queue, view
from ui.run.readers import Stamp, stamp

if TYPE_CHECKING:
    import gradio as gr

STEPS = ("starting", "running", "suspect", "slow")  # states in which a request is done at the next step
KEPT_RUNS = 20
EVENT_BYTES = 64 << 10
_answers: dict[Path, tuple[Stamp, dict[str, Any] | None]] = {}  # run's folder -> stamp of its events, its last answer


def value(shown: "view.View | None") -> dict[str, Any]:
    """What the script shows: {"run", "do": [action], "waiting": [kind], "answer": {"id", "done", "message"} or None, "position"}.

    position: the run's place in the queue, 0 for none.
    """
    if shown is None or shown.problem:
        return {"run": "", "do": [], "waiting": [], "answer": None, "position": 0}
    folder, state = shown.folder, shown.state
    entries = queue.entries()
    position = next((n for n, one in enumerate(entries, 1) if folder.name in (one.run, *one.sweep)), 0)
    do = []
    if shown.running and state in STEPS:
        do += ["sample"] * (shown.spec.get("sample_every_n_steps") != 0) + ["save"]
    if shown.running and state not in ("stopping", "opening"):
        do.append("pause")
    if not shown.running and state != "completed":
        do += ["now", "cancel"] if position and entries[position - 1].run == folder.name else ["queue"] * (not position)
    waiting = list(step_requests.waiting(folder)) if shown.running else []
    return {"run": folder.name, "do": do, "waiting": waiting, "answer": _last_answer(folder), "position": position}


def _last_answer(folder: Path) -> dict[str, Any] | None:
    """The newest answer to a request of this run."""
    path = folder / EVENTS
    now = stamp(path)
    known = _answers.get(folder)
    if known is not None and known[0] == now:
        return known[1]
    found = None
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - EVENT_BYTES))
            lines = file.read(EVENT_BYTES).splitlines()
    except OSError:
        lines = []
    mark = f'"kind": "{step_requests.EVENT}"'.encode()
    for line in reversed([line for line in lines if mark in line]):
        try:
            event = json.loads(line)
            found = {"id": str(event["id"]), "done": event.get("done") is True, "message": str(event["message"])[:300]}
            break
        except (ValueError, KeyError, TypeError):
            continue
    if len(_answers) >= KEPT_RUNS:
        _answers.clear()
    _answers[folder] = now, found
    return found


def act(folder: Path, action: str) -> dict[str, Any]:
    """Do one of: sample, save, pause, queue, now, cancel. Returns {"id"} of a request, {"position"} of a run that waits, or {}.

    Raises:
        RunError: it cannot be done; the message says why.
    """
    from monitor.cli import queue_worker, requests

    try:
        if action in ("sample", "save"):
            return {"id": requests.request(folder, action)}
        if action == "pause":
            requests.pause(folder)
        elif action == "queue":
            return {"position": queue_worker.add(folder)}
        elif action == "now":
            return {"paused": queue_worker.run_now(folder.name)}
        elif action == "cancel":
            run_queue.cancel(folder.name)
        else:
            raise RunError(OUT_OF_DATE)
    except MonitorError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"{folder}: {error.strerror or error}. Free some space, then try again") from error
    return {}


def run_action(data: dict[str, Any]) -> dict[str, Any]:
    """The script's call: {"run", "do"}."""

    def action(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        return act(folder, str(data.get("do")))

    return calls.answer(action, data)


def build() -> "gr.HTML":
    """The buttons; the value is that of `value`."""
    return scripts.component("run_actions", "run-actions", run_action)
