"""The fold "Sweep" of step 3: several runs of this draft that differ in a few numbers, as one entry of the queue.

The other settings are the draft's. What it would make is shown while one types; nothing is written before the button is
pressed (runs/sweep.py).
"""

from typing import Any

import gradio as gr

import runs
from runs import env_file
from runs.files import Fault, RunError
from runs.sweep import MOST, SHORT, Sweep
from ui.dataset import bucket_preview, draft
from ui.dataset.draft import OUT_OF_DATE
from ui.new import form, run_starts, script_editor
from ui.run import fold
from ui.run.fold import QUIET

FIELDS = {"rank": "8, 16, 32", "learning_rate": "1e-4, 5e-4", "epochs": "8, 16"}  # and examples of values
OTHERS = [(form.LABELS[field], field) for field in SHORT if field not in FIELDS]
LONGEST = 200  # characters of one field


def _specs(draft_id: str, texts: dict[str, str]) -> tuple[list["runs.RunSpec"], dict[str, list[float]]]:
    """The runs that the values would make. RunError: a field of the form or a value is wrong."""
    from runs import sweep

    if any(len(text) > LONGEST for text in texts.values()):
        raise RunError(f"Use numbers with commas between them, at most {LONGEST} characters in a field")
    values = sweep.parse(f"{key}={text}" for key, text in texts.items())
    if script_editor.stored(draft_id) is not None:
        raise RunError("The script was edited, and a sweep writes one for each run. Discard the edit first")
    base, faults = form.parse(form.current(draft_id))
    if base is None:
        raise RunError([Fault("", form.shown(fault)) for fault in faults] or OUT_OF_DATE)
    return sweep.combinations(base, values), values


def plan(draft_id: str, texts: dict[str, str]) -> dict[str, Any]:
    """What the values would make: {"runs": names, "steps": of all runs together}. RunError: why it cannot be made."""
    specs, _ = _specs(draft_id, texts)
    items = draft.items(draft_id)
    steps = sum(runs.planned_steps(spec, bucket_preview.by_folder(spec, items)) for spec in specs) if items else 0
    return {"runs": [spec.name for spec in specs], "steps": steps}


def start(draft_id: str, texts: dict[str, str]) -> Sweep:
    """Make the runs, all or none, and put them into the queue; what Start asks first, this asks too (run_starts.ask).

    Raises:
        RunError: a field, a value or an image is wrong, or a name is taken; or they are made, but not in the queue.
    """
    from jobs import queue
    from runs import sweep

    specs, values = _specs(draft_id, texts)
    specs = [env_file.filled(spec, draft.folder(draft_id)) for spec in specs]
    base, _ = run_starts.checked(draft_id)
    run_starts.ask(draft_id, base)
    specs = [spec.changed(prompts=base.prompts) for spec in specs]  # all draw the same, also where that is a caption
    given = draft.taken(draft_id)
    made = sweep.create(base.name, specs, values, draft.sources(draft_id))
    draft.mark_in_a_run(draft_id, given)
    queue.add_sweep(made)
    queue.ensure_worker()
    return made


# The fold -------------------------------------------------------------------------------------------------------------


def draw(draft_id: str) -> None:
    """Make the components of the fold."""
    fold.say(f"Enter values with commas between. Each combination is a run, at most {MOST}; all share the images.")
    common: dict[str, Any] = {"max_length": LONGEST, "max_lines": 1, "interactive": True}
    with gr.Row(elem_classes="hp-fields"):
        texts = [
            gr.Textbox(label=form.LABELS[key], placeholder=example, elem_id=f"sweep-{key}", **common)
            for key, example in FIELDS.items()
        ]
        other = gr.Dropdown(OTHERS, value=None, label="Another setting", interactive=True, elem_id="sweep-other")
        texts.append(gr.Textbox(label="Its values", elem_id="sweep-values", **common))
    said = gr.HTML(elem_id="sweep-plan", apply_default_css=False)
    go = gr.Button("Queue these runs", size="sm", interactive=False, elem_id="sweep-start")

    def values(other: str | None, texts: tuple[str, ...]) -> dict[str, str]:
        found = dict(zip([*FIELDS, other], texts, strict=True))
        return {key: text for key, text in found.items() if key and text.strip()}

    def on_typed(other: str | None, *texts: str) -> list[Any]:
        if not (given := values(other, texts)):
            return ["", gr.update(interactive=False)]
        try:
            found = plan(draft_id, given)
        except fold.ERRORS as error:
            return [fold.note(error, True), gr.update(interactive=False)]
        steps = f", {found['steps']:,} steps together" if found["steps"] else ""
        return [fold.note(f"{len(found['runs'])} runs{steps}: {', '.join(found['runs'])}"), gr.update(interactive=True)]

    @fold.tried
    def on_start(other: str | None, *texts: str) -> str:
        made = start(draft_id, values(other, texts))
        return f"{len(made.runs)} runs are in the queue as {made.name}. The tab Runs shows them."

    given = [other, *texts]
    changes = [one.change for one in given]
    # An event that waits in the browser can overtake the one before; the second one here does not wait.
    stored = gr.on(changes, None, js=form.FLUSH, **QUIET)
    stored.then(on_typed, given, [said, go], trigger_mode="always_last", key="sweep-plan", **QUIET)
    go.click(on_start, given, said, js=form.FLUSH, **QUIET)
