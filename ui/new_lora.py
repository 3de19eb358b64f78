"""The first tab: three steps to a run.

Every handler takes the draft's id and all fields, and stores them before anything else, so that whatever goes wrong
after that costs nothing that was typed.
"""

from dataclasses import dataclass, field

import gradio as gr

import presets
import runs
from ui import control, draft, fetch, flags, form, images
from ui.html import esc, script

FETCH = "Fetch the missing model files"
FETCH_TICK_S = 1.0
FAULTS = (runs.RunError, presets.PresetError)
# Waits until the last caption typed is stored, then lets the event go on with the values of the fields.
FLUSH = "async (...values) => { if (window.hangproofFlush) await window.hangproofFlush(); return values; }"


@dataclass
class NewLora:
    """The components of the tab that others wire up."""

    fields: dict = field(default_factory=dict)
    images: gr.HTML | None = None
    plan: gr.HTML | None = None
    script: gr.Code | None = None
    model_note: gr.HTML | None = None
    fetch: gr.Button | None = None
    fetched: gr.HTML | None = None
    fetching: gr.Timer | None = None
    flag_note: gr.HTML | None = None
    flag_fold: gr.Accordion | None = None
    flag_table: gr.HTML | None = None
    faults: gr.HTML | None = None
    problem: gr.HTML | None = None
    start: gr.Button | None = None
    loaded: gr.State | None = None

    @property
    def follows(self) -> list:
        """What `refresh` answers into."""
        return [self.plan, self.script, self.flag_note, self.faults, *self.model]

    @property
    def model(self) -> list:
        """What `look_at_model` answers into."""
        return [self.model_note, self.fetch, self.fetched, self.fetching]


def step(number: int, title: str, hint: str) -> None:
    """The heading of a step."""
    gr.HTML(
        f'<div class="hp-steptitle"><i>{number}</i><div><h2>{esc(title)}</h2><p>{esc(hint)}</p></div></div>',
        apply_default_css=False,
    )


def build() -> NewLora:
    """Lay the tab out."""
    tab = NewLora(loaded=gr.State(False))
    tab.fields = dict.fromkeys(form.KEYS)
    with gr.Column(elem_classes="hp-step"):
        step(1, "The LoRA", "What it is called, what it learns from, and how much memory your GPU has.")
        _head(tab)
        with gr.Row(elem_classes="hp-fields"):
            for one in form.LENGTH:
                tab.fields[one.key] = _component(one)
        with gr.Accordion("Sample images while it trains", open=False):
            tab.fields["prompts"] = _component(form.SAMPLES[0])
            with gr.Row(elem_classes="hp-fields"):
                for one in form.SAMPLES[1:]:
                    tab.fields[one.key] = _component(one)
        with gr.Accordion("More settings", open=False):
            with gr.Row(elem_classes="hp-fields hp-many"):
                for one in form.MORE:
                    tab.fields[one.key] = _component(one)
            tab.fields["flags"] = _component(form.FLAGS)
            tab.flag_note = gr.HTML(elem_id="flag-note", apply_default_css=False)
            with gr.Accordion("All flags of the trainer", open=False, elem_id="all-flags-fold") as tab.flag_fold:
                tab.flag_table = flags.flags_view()
    with gr.Column(elem_classes="hp-step"):
        step(
            2,
            "Images and captions",
            "10 to 30 different pictures make a good LoRA. A caption says what is in the picture.",
        )
        tab.images = images.images_view()
    with gr.Column(elem_classes="hp-step"):
        step(
            3,
            "Review and start",
            "This script is all that runs. It is kept with the run, and you can start it by hand.",
        )
        tab.plan = gr.HTML(elem_id="plan", apply_default_css=False)
        with gr.Accordion("The script", open=False):
            tab.script = gr.Code(language="shell", interactive=False, max_lines=24, show_label=False, elem_id="script")
        tab.problem = gr.HTML(elem_id="problem", apply_default_css=False)
        tab.faults = gr.HTML(
            value=None, html_template="", js_on_load=script("faults"), elem_id="faults", container=False
        )
        tab.start = gr.Button("Start training", variant="primary", elem_id="start", size="lg")
    return tab


def _head(tab: NewLora) -> None:
    values = form.defaults()
    models = [(model["name"], key) for key, model in presets.models().items()]
    tiers = [(tier["label"], key) for key, tier in presets.tiers().items()]
    with gr.Row(elem_classes="hp-fields"):
        tab.fields["name"] = gr.Textbox(
            label="Name", info="of the LoRA and its folder", placeholder="my-cat", elem_id="name", max_lines=1
        )
        tab.fields["trigger"] = gr.Textbox(
            label="Trigger word", info="calls it in a prompt", placeholder="mycat", elem_id="trigger", max_lines=1
        )
        tab.fields["model"] = gr.Dropdown(
            models, value=values["model"], label="Base model", info="what the LoRA is made for", elem_id="model"
        )
    with gr.Row(elem_classes="hp-fields"):
        tab.fields["tier"] = gr.Radio(
            tiers, value=values["tier"], label="VRAM", info="memory of the GPU it trains on", elem_id="tier"
        )
        tab.fields["backend"] = gr.Radio(
            [(label, key) for key, label in form.BACKENDS.items()],
            value=values["backend"],
            label="Trainer",
            info="both write the same kind of LoRA",
            elem_id="backend",
        )
    tab.model_note = gr.HTML(elem_id="model-note", apply_default_css=False)
    tab.fetch = gr.Button(FETCH, visible=False, elem_id="fetch", size="sm")
    tab.fetched = gr.HTML(elem_id="fetched", apply_default_css=False)
    tab.fetching = gr.Timer(FETCH_TICK_S, active=False)


def _component(one: form.Field):
    """The component of a field; none has limits of its own: RunSpec judges, in words."""
    value = form.defaults()[one.key]
    common = {"label": one.label, "info": one.info or None, "elem_id": one.key}
    if one.kind == "whole":
        return gr.Number(value=value, precision=0, min_width=140, **common)
    if one.kind == "choice":
        return gr.Dropdown(list(one.choices), value=value, min_width=140, **common)
    if one.kind == "lines":
        return gr.Textbox(value=value, lines=3, max_lines=12, **common)
    return gr.Textbox(value=value, max_lines=1, min_width=140, **common)


def values_of(given: tuple) -> dict:
    """The fields' values by key."""
    return dict(zip(form.KEYS, given, strict=True))


def problem_html(message: str, title: str = "Not started yet", kind: str = "bad") -> str:
    """What is wrong, a line each."""
    lines = "".join(f"<li>{esc(line)}</li>" for line in message.splitlines() if line.strip())
    return f'<div class="hp-problem hp-{kind}" role="alert"><strong>{esc(title)}</strong><ul>{lines}</ul></div>'


def load(draft_id: str | None) -> tuple:
    """What a page that opens shows: the draft of this browser, or a new one."""
    draft_id = draft_id if draft.is_id(draft_id) else draft.new_id()
    try:
        stored, shown, problem = draft.form(draft_id), images.listing(draft_id), ""
        draft.seen(draft_id)
    except runs.RunError as error:
        draft_id = draft.new_id()
        stored, shown, problem = {}, images.listing(draft_id), problem_html(str(error), "Your draft")
    try:
        fields = form.restored(stored).values() if stored else [gr.skip()] * len(form.KEYS)
    except presets.PresetError as error:
        fields, problem = [stored.get(key, gr.skip()) for key in form.KEYS], problem_html(str(error), "Base models")
    return draft_id, shown, problem, *fields


def refresh(draft_id: str | None, *given) -> tuple:
    """Store what was typed; the plan, the script, the notes on the model, the flags and the fields that follow."""
    values = values_of(given)
    try:
        count = len(draft.items(draft_id))
        draft.save_form(draft_id, values)
        presets.models()  # the user's table may be half edited just now
    except FAULTS as error:
        return f'<p class="hp-plan hp-warn">{esc(error)}</p>', "", "", {}, *[gr.skip()] * 4
    try:
        text = form.script_of(values, count)
    except runs.RunError as error:
        text = "".join(
            f"# {line}\n" for line in ("The script appears here when this is settled:", *str(error).splitlines())
        )
    return form.plan(values, count), text, flags.note(values), form.faults(values), *look_at_model(values)


def look_at_model(values: dict) -> tuple:
    """The note on the model; the button that fetches its files, how far that is, and the timer that looks again."""
    key = fetch.wanted(values)
    busy = bool(key) and fetch.running(key)
    button = gr.update(visible=bool(key) and not busy)
    return form.model_note(values), button, fetch.told(key) if key else "", gr.Timer(active=busy)


def still_fetching(*given) -> tuple:
    """Look at the model again while its files are being fetched."""
    return look_at_model(values_of(given))


def fetch_model(*given) -> tuple:
    """Begin to fetch the files of the model that was chosen."""
    values = values_of(given)
    try:
        if key := fetch.wanted(values):
            fetch.start(key)
    except runs.RunError as error:
        return gr.skip(), gr.skip(), problem_html(str(error), "Model files"), gr.Timer(active=False)
    return look_at_model(values)


def open_flags(*given) -> tuple[bool, dict]:
    """The table of flags is opened: read them."""
    return True, flags.listing(values_of(given))


def follow_flags(opened: bool, *given):
    """The trainer, the model or the VRAM changed: list again where the table has been opened."""
    return flags.listing(values_of(given)) if opened else gr.skip()


def insert_trigger(draft_id: str, shown: dict | None, trigger: str) -> tuple:
    """Put the trigger word in front of every caption."""
    try:
        draft.insert_trigger(draft_id, trigger or "")
    except runs.RunError as error:
        return gr.skip(), problem_html(str(error), "Trigger word")
    page = shown.get("page", 0) if isinstance(shown, dict) else 0
    return images.listing(draft_id, page), ""


def choose_model(key: str, backend: str) -> list:
    """Set what the model brings along; the trainer only where it cannot train it: another may be chosen meanwhile."""
    values = form.model_values(key, backend)
    trainer = gr.skip() if values["backend"] == backend else values["backend"]
    return [trainer, *(values[name] for name in form.MODEL_FIELDS)]


def start(draft_id: str, *given):
    """Make the run and start it; yields (problem, faults by field, run's folder name or "", sentences for its page)."""
    values = values_of(given)
    try:
        count = len(draft.items(draft_id))
        yield problem_html(f"Preparing {count} image{'s' * (count != 1)}…", "One moment", "busy"), {}, "", []
        draft.save_form(draft_id, values)
        folder, told = form.create(values, draft_id)
    except FAULTS as error:
        yield problem_html(str(error)), form.by_field(str(error)), "", []
        return
    try:
        control.start(folder)
    except runs.RunError as error:
        yield "", {}, folder.name, [f"The run is made, but it did not start: {error}", *told]
        return
    yield "", {}, folder.name, told
