"""The first tab: three steps that create a run.

The page's script stores each field as it is typed (ui/new/fields.js); the handlers take the draft's id and read it.
"""

import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

import presets
import runs
from runs import fields
from runs.machine import this_machine
from ui.dataset import bulk, captioning, doctor, draft, images, imports
from ui.html import box, esc, linked
from ui.new import export, flags, form, hub_login, rehearsal, run_starts, script_editor, summary, sweep, templates
from ui.run import fold
from ui.run.fold import QUIET

TRY_BUSY = '<p class="hp-intro" role="status">Preparing the example photos…</p>'
TRY_INTRO = (
    '<p class="hp-intro"><strong>New here?</strong> Watch a complete run first. It trains Tiny Flux, a toy model, on example '
    'photos. It needs no GPU and no download, and changes nothing below. The <a href="?tab=doctor">hang drill</a> shows how a '
    "frozen run recovers.</p>"
)
BUSY = box(["Preparing the images…"], "busy", "Please wait")
FETCH = "Download the missing model files"
FETCH_TICK_S = 1.0
# The browser's part of the settings (ui/new/fields.js).
DRAFT = """async (known) => {
  while (!window.hangproof) await new Promise((done) => setTimeout(done, 10)); // until its component is on the page
  return hangproof.draftId(known);
}"""
RESTORE = f"(id, images, ...values) => hangproof.restore({json.dumps(form.KEYS)}, id, images.marks, values)"
SHOW = "() => hangproof.shown()"
SAID = "() => hangproof.said()"
LOOK = "() => { hangproof.sync(); return []; }"
START = """async (draft) => {
  await hangproof.starting();
  const count = (kind) => hangproof.unsaved(kind).length;
  const kept = count('caption') + count('mask');
  return [draft, { kept, script: count('script'), fields: count('field'), waiting: hangproof.kept() }];
}"""


@dataclass(frozen=True)
class NewLora:
    """The components of the tab that the rest of the page uses.

    intro: the offer of an example run. outputs: what `load` updates after the draft's id, in order. begun: events after
    which the states of `build` hold the run that was started.
    """

    intro: gr.Row
    fields: list[gr.components.Component]
    images: gr.HTML
    outputs: list[gr.components.Component]
    begun: list[Any]


def step(number: int, title: str, hint: str) -> None:
    """The heading of a step."""
    gr.HTML(
        f'<div class="hp-steptitle"><i>{number}</i><div><h2>{esc(title)}</h2><p>{esc(hint)}</p></div></div>',
        apply_default_css=False,
    )


def build(draft_id: gr.BrowserState, started: gr.State, messages: gr.State) -> NewLora:
    """Build the tab and its events.

    Args:
        draft_id: has the draft of this browser. started, messages: get the folder's name of a run that was started, and
            what its page says.
    """
    parts = dict[str, Any].fromkeys(form.KEYS)
    opened = functools.partial(fold.opened, draft_id)
    threading.Thread(target=this_machine, daemon=True).start()  # the driver answers before the first page asks
    with gr.Row(elem_classes="hp-try") as try_row:
        try_note = gr.HTML(TRY_INTRO, elem_id="try-note", apply_default_css=False)
        try_button = gr.Button("Try it in one minute", elem_id="try-it", size="md", min_width=200, scale=0)
    with gr.Column(elem_classes="hp-step"):
        step(
            1,
            "Images and captions",
            "10 to 30 varied images make a good LoRA. A caption describes what its image shows.",
        )
        shown = images.images_view()
        opened("Add a folder on the server", "import-fold", imports.draw)
        opened("Edit many images: captions and subsets", "bulk-fold", lambda name: bulk.draw(name, shown))
        opened("Check images", "image-check", lambda name: doctor.draw(name, shown))
        opened("Write captions", "caption-writer", captioning.draw)
        unsent = gr.HTML(html_template="", elem_id="unsent")  # shows nothing: START gives its value
    with gr.Column(elem_classes="hp-step"):
        step(2, "The LoRA", "Choose a name, a trigger word, what your images show, and a base model.")
        with gr.Row(elem_classes="hp-fields"):
            for key, example in (("name", "my-cat"), ("trigger", "mycat")):
                parts[key] = _component(fields.HEAD[key], placeholder=example)
        with gr.Row(elem_classes="hp-fields"):
            parts["subject"] = _component(fields.SUBJECT, gr.Radio, choices=list(fields.SUBJECT.choices))
            parts["model"] = _component(fields.HEAD["model"], gr.Dropdown, choices=summary.model_choices())
        parts["control_dir"] = _component(fields.CONTROL, visible=False)
        with gr.Accordion(summary.GPU, open=False, elem_id="gpu-fold") as of_gpu:
            with gr.Row(elem_classes="hp-fields"):
                for key, choices in summary.gpu_choices(form.defaults()).items():
                    parts[key] = _component(fields.HEAD[key], gr.Radio, choices=choices)
            opened("Which model fits my GPU?", "models-fold", _models)
        note = gr.HTML(elem_id="model-note", apply_default_css=False)
        fetch_button = gr.Button(FETCH, visible=False, elem_id="fetch", size="sm")
        fetching = gr.Timer(FETCH_TICK_S, active=False)
        of_model = [note, parts["tier"], parts["backend"], of_gpu, parts["control_dir"], fetch_button, fetching]
        opened(hub_login.LABEL, "hub-fold", hub_login.draw)
        _row(parts, fields.LENGTH)
        with gr.Accordion("Sample images during training", open=False):
            parts["prompts"] = _component(fields.SAMPLES[0])
            _row(parts, fields.SAMPLES[1:])
        with gr.Accordion("More settings", open=False):
            _row(parts, fields.MORE, "hp-many")
            with gr.Accordion("Machines, store and cost", open=False):
                _row(parts, fields.MACHINES, "hp-many")
            parts["flags"] = _component(fields.FLAGS)
            opened("All trainer options", "all-flags-fold", lambda name: flags.draw(name, shown))
        opened("Templates and import", "setup", templates.draw)
    with gr.Column(elem_classes="hp-step"):
        step(
            3,
            "Review and start",
            "Hangproof runs exactly the script below. It is saved with the run, and you can also run it yourself.",
        )
        plan = gr.HTML(elem_id="plan", apply_default_css=False)
        opened("The script", "script-fold", lambda name: script_editor.draw(name, shown, export.draw))
        opened("Sweep: several runs that differ in a few numbers", "sweep", sweep.draw)
        opened("Rehearse before you start (about 2 minutes)", "rehearsal", rehearsal.draw)
    with gr.Column(elem_id="start-bar"):  # stays at the lower edge of the window
        problem = gr.HTML(elem_id="problem", apply_default_css=False)
        go = gr.Button("Start training", variant="primary", elem_id="start", size="lg")

    form_fields, reviewed = [parts[key] for key in form.KEYS], [plan, *of_model]
    shown.show(None, None, form_fields, js=SHOW, **QUIET)
    shown.review(None, None, reviewed, js=SAID, **QUIET)
    fetch_button.click(fetch_model, draft_id, problem, **QUIET).then(None, None, None, js=form.SYNC, **QUIET)
    fetching.tick(None, None, None, js=LOOK, **QUIET)
    begun = [
        try_button.click(try_example, None, [try_note, started, messages], **QUIET),
        go.click(start, [draft_id, unsent], [problem, started, messages], js=START, **QUIET),
    ]
    return NewLora(try_row, form_fields, shown, [shown, problem, *form_fields, *reviewed], begun)


def _row(parts: dict[str, Any], some: Sequence[fields.Field], look: str = "") -> None:
    with gr.Row(elem_classes=f"hp-fields {look}"):
        parts.update({one.key: _component(one) for one in some})


def _component(one: fields.Field, kind: Any = None, **more: Any) -> gr.components.Component:
    """The component of a field. It accepts any value, because RunSpec validates and explains. kind: not the usual one."""
    common = {
        "value": form.defaults()[one.key],
        "label": one.label,
        "info": one.info or None,
        "elem_id": one.key,
        **more,
    }
    if kind is not None:
        return kind(**common)
    if one.kind == "integer":
        return gr.Number(precision=0, min_width=140, **common)
    if one.kind == "choice":
        return gr.Dropdown(list(one.choices), min_width=140, **common)
    if one.kind == "lines":
        return gr.Textbox(lines=3, max_lines=12, **common)
    return gr.Textbox(max_lines=1, min_width=140, **common)


def problem_html(what: str | Exception, title: str = "Not started", kind: str = "bad") -> str:
    """An alert box with one item for each fault of an error, or for each line of a message."""
    texts = [form.shown(fault) for fault in what.faults] if isinstance(what, runs.RunError) else str(what).splitlines()
    return box([linked(text) for text in texts if text.strip()], kind, title)


def load(draft_id: str | None) -> tuple[Any, ...]:
    """What a newly opened page shows: this browser's draft, or a new one, with all that is said of it: what came later
    would move what the user is about to press."""
    draft_id = draft_id if draft.is_id(draft_id) else draft.new_id()
    draft.touch(draft_id)
    try:
        stored, shown, problem = draft.form(draft_id), images.listing(draft_id), ""
    except runs.RunError as error:
        draft_id = draft.new_id()
        stored, shown, problem = {}, images.listing(draft_id), problem_html(str(error), "Your draft could not be read")
    said: tuple[Any, ...] = (gr.skip(),) * 8
    try:
        found = form.reviewed(draft_id)
        values = found.values
        shown, said = {**shown, "marks": found.marks()}, summary.said(draft_id, found)
    except presets.PresetError as error:
        values, problem = stored, problem_html(str(error), "The base models could not be read")
    return draft_id, shown, problem, *(values.get(key, gr.skip()) for key in form.KEYS), *said


def fetch_model(draft_id: str) -> str:
    """Start to download the chosen model's files. Returns why they cannot be, as HTML."""
    try:
        if key := summary.model_to_fetch(form.current(draft_id)):
            summary.fetch(key)
    except fold.ERRORS as error:
        return problem_html(error, "Model files not downloaded")
    return ""


def _models(_: str) -> None:
    """The table of all models."""
    gr.HTML(summary.table_html(this_machine()), elem_id="models", apply_default_css=False)


# What a browser still holds prevents a start.
NOT_ARRIVED = {
    "fields": "Settings not saved: {}; the note at the top says why. Press Start again when it is gone",
    "kept": "Captions or masks not saved: {}; correct the captions marked 'not saved', then press Start again",
    "script": "The edited script is not saved; the note at the top says why. Press Start again when it is gone",
    "waiting": "Files not uploaded yet: {}; wait until they are, then press Start again",
}


def start(draft_id: str, sent: dict[str, int]) -> Iterator[tuple[str, str, list[str]]]:
    """Create and start the draft's run; yields as `starting`."""

    def begin() -> tuple[Path, list[str]]:
        for key, text in NOT_ARRIVED.items():
            if sent.get(key):
                raise runs.RunError(text.format(sent[key]))
        return run_starts.start(draft_id)

    yield from starting(BUSY, begin)


def try_example() -> Iterator[tuple[str, str, list[str]]]:
    """Create and start the example run; yields as `starting`."""
    yield from starting(TRY_BUSY, run_starts.start_example, TRY_INTRO)


def starting(
    busy: str, begin: Callable[[], tuple[Path, list[str]]], intro: str = ""
) -> Iterator[tuple[str, str, list[str]]]:
    """Start a run; yields (`busy`, then `intro` and what is wrong, the run's folder or "", messages for its page)."""
    yield busy, "", []
    try:
        folder, messages = begin()
    except run_starts.NotStarted as error:
        yield intro, error.folder.name, [str(error), *error.messages]
    except fold.ERRORS as error:
        yield f"{intro}{problem_html(error)}", "", []
    else:
        yield intro, folder.name, messages
