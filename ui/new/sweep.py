"""The fold "Sweep" of step 3: several runs of this draft that differ in a few numbers, as one entry of the queue.

The fields are the draft's as they are stored; the script sends only the values to vary. What it would make is shown while one types;
nothing is written before the button is pressed (runs/sweep.py).
"""

from typing import TYPE_CHECKING, Any

import runs
from runs import env_file
from runs.files import Fault, RunError
from runs.sweep import MOST, SHORT, Sweep
from ui import scripts
from ui.dataset import draft
from ui.dataset.images import OUT_OF_DATE
from ui.new import form, run_starts, script_editor, settings

if TYPE_CHECKING:
    import gradio as gr

FIELDS = ("rank", "learning_rate", "epochs")
OTHERS = tuple(field for field in SHORT if field not in FIELDS)
LABELS = {"rank": "Rank", "learning_rate": "Learning rate", "epochs": "Epochs"}
LONGEST = 200  # characters of one field


def _specs(draft_id: str, texts: dict[str, str]) -> tuple[list["runs.RunSpec"], dict[str, list[float]]]:
    """The runs that the values would make. RunError: a field of the form or a value is wrong."""
    from runs import sweep

    values = sweep.parse(f"{key}={text}" for key, text in texts.items() if text.strip())
    if script_editor.stored(draft_id) is not None:
        raise RunError(
            "The script was edited by hand, and a sweep writes a script for each run. Discard the edit first"
        )
    base, faults = form.parse(settings.current(draft_id))
    if base is None:
        raise RunError([Fault("", form.shown(fault)) for fault in faults] or OUT_OF_DATE)
    return sweep.combinations(base, values), values


def plan(draft_id: str, texts: dict[str, str]) -> dict[str, Any]:
    """What the values would make: {"runs": names, "steps": of all runs together}. RunError: why it cannot be made."""
    specs, _ = _specs(draft_id, texts)
    counts = draft.counts(draft_id)
    steps = sum(runs.planned_steps(spec, counts) for spec in specs) if sum(counts.values()) else 0
    return {"runs": [spec.name for spec in specs], "steps": steps}


def start(draft_id: str, texts: dict[str, str]) -> Sweep:
    """Make the runs and put them into the queue.

    Raises:
        RunError: a field, a value or an image is wrong, or a name is taken.
    """
    from monitor import run_queue
    from monitor.run_folder import MonitorError
    from runs import sweep

    specs, values = _specs(draft_id, texts)
    specs = [env_file.filled(spec, draft.folder(draft_id)) for spec in specs]
    for spec in specs:
        if fault := runs.folders.name_fault(spec):
            raise RunError([fault])
    base, _ = run_starts.checked(draft_id)
    first, _ = run_starts.create(draft_id, specs[0])
    data = runs.datasets_dir() / first.name
    made = sweep.create(base.name, specs, values, data, [first])
    try:
        run_queue.add_sweep(made.name, [run for run, _ in made.runs])
    except (MonitorError, OSError) as error:
        raise RunError(
            f"{len(specs)} runs are made, but not in the queue: {error}. Add them there one by one"
        ) from error
    run_queue.ensure_worker()
    return made


# Calls of the script ------------------------------------------------------------------------------------------------------


def sweep_call(data: dict[str, Any]) -> dict[str, Any]:
    """{"draft": id, "do": open, plan or start, "values": {field: text}}: the fields, the plan, or {"sweep", "runs"}."""
    given = data if isinstance(data, dict) else {}
    try:
        if given.get("do") == "open":
            others = [{"key": key, "label": key.replace("_", " ").capitalize()} for key in OTHERS]
            return {"ok": True, "fields": LABELS, "others": others, "most": MOST}
        draft_id, texts = given.get("draft"), given.get("values")
        if not draft.is_id(draft_id) or not isinstance(texts, dict) or len(texts) > len(SHORT):
            raise RunError(OUT_OF_DATE)
        if not all(key in SHORT and isinstance(text, str) and len(text) <= LONGEST for key, text in texts.items()):
            raise RunError(f"Use numbers with commas between them, at most {LONGEST} characters in a field")
        if given.get("do") == "start":
            made = start(draft_id, texts)
            return {"ok": True, "sweep": made.name, "runs": [run for run, _ in made.runs]}
        return {"ok": True, **plan(draft_id, texts)}
    except RunError as error:
        return {"ok": False, "error": str(error)}


def build() -> "gr.HTML":
    """The fold. Its fields are built when it is opened."""
    return scripts.component("sweep", "sweep", sweep_call)
