"""What the page says of a draft's settings: the plan of step 3, the proposed length, and the notes on the model."""

from dataclasses import replace
from typing import Any

import gradio as gr

import presets
from monitor.phrases import count
from ui.dataset import draft
from ui.html import esc
from ui.new import estimates, form, model_note, script_editor

GPU = "GPU memory and trainer"


def save_settings(draft_id: str, changes: dict[str, Any], starting: bool = False) -> dict[str, Any]:
    """Store `changes`; returns `values`, all settings as they are now, `marks`, what is wrong with them by field, and what
    `said` gives. starting: whether what is only missing is wrong too."""
    if changes:
        form.save(draft_id, changes, typed=True)
    try:
        found = form.reviewed(draft_id)
        return {"values": found.values, "marks": found.marks(starting), "said": said(draft_id, found)}
    except presets.PresetError as error:  # what was typed is stored
        said_of_it = f'<p class="hp-plan hp-warn">{esc(error)}</p>'
        return {"values": draft.form(draft_id), "marks": {}, "said": (said_of_it, *[gr.skip()] * 8)}


def said(draft_id: str, found: form.Review) -> tuple[Any, ...]:
    """The plan, the button with the proposed length, the model's notes with the download's progress, the choices of VRAM and
    trainer, the title of the GPU's fold, the model's own field, the download button, and the timer that polls the download;
    values and updates as a script of the page can return them to Gradio, too."""
    planned, values = script_editor.reviewed(draft_id, found), found.values
    plan = form.plan(planned) + estimates.html(planned) + form.findings(found)
    key, model = model_note.model_to_fetch(values), presets.models().get(values["model"])
    busy, fetched = model_note.fetching(key) if key else (False, "")
    tier, backend = presets.tiers().get(values["tier"]), form.BACKENDS.get(values["backend"])
    return (
        plan,
        _propose(draft_id, found),
        model_note.html(values, found.spec) + fetched,
        *(gr.update(choices=one) for one in model_note.choices(values).values()),
        gr.update(label=f"{GPU}: {tier['label']}, {backend}" if tier and backend else GPU),
        gr.update(visible=bool(model and model["control"])),
        gr.update(visible=bool(key) and not busy),
        gr.update(active=busy),
    )


def _propose(draft_id: str, review: form.Review) -> dict[str, Any]:
    """The button that lets the length follow the number of images again; hidden while it does."""
    values = review.values
    found = None if str(values["max_train_steps"] or "").strip() else form.proposal(draft_id, values)
    if found is None or not found.steps or (values["repeats"], values["epochs"]) == (found.repeats, found.epochs):
        return gr.update(visible=False)
    if review.spec is not None:  # as the plan counts them: without held-out images, each bucket by itself
        spec = review.spec.changed(repeats=found.repeats, epochs=found.epochs)
        found = replace(found, steps=replace(review, spec=spec).steps)
    label = f"{count(found.repeats, 'repeat')} × {count(found.epochs, 'epoch')}"
    return gr.update(visible=True, value=f"Use proposed: {label} = {found.steps:,} steps")
