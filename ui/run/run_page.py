"""The second tab: the list of runs and the selected run.

A timer reads the run's folder once a second and sends only the parts that changed. `seen` holds a digest of each part
that the browser already shows, so that images do not flicker and an open report stays open. The browser holds it, as
JSON, and gets it with the parts: of two answers in the wrong order, the next one puts right what is out of date.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

import runs
from jobs import queue
from monitor.phrases import count
from runs import manage
from runs.dataset import counts
from runs.paths import outputs_dir
from ui import jobs, scripts
from ui.dataset import captioning, draft, images, imports
from ui.html import box, linked, pressed
from ui.new import form, script_editor
from ui.run import actions, blind_vote, cards, charts, compare, fold, launch_tab, log_view, publish, samples, view
from ui.run.fold import QUIET

TICK_S = 1.0
COPY = "New LoRA from this run"
PARTS = ("list", "head", "loras", "incidents", "ledger", "charts", "queue", "actions")
FOLDS = {
    "samples": ("Samples", samples.draw),
    "compare": ("Compare runs", compare.draw),
    "publish": ("Publish on Hugging Face", publish.draw),
    "checks": ("Checks and other machines", launch_tab.draw),
    "log": ("Log", log_view.draw),
}
# The click changes the button before the server hears of it; `refresh` changes it again when the run's state does.
STOPPING = """() => ({ __type__: 'update', value: 'Stopping…', interactive: false })"""
STARTING = box(["Starting…"], "busy")  # until `start` has answered, which can take a minute
SHOW_NOTE = "() => setTimeout(() => document.querySelector('#new-note').scrollIntoView({ block: 'center' }), 150)"
# Enables the form (style.css) and the address (run_address.js). Before, loading the draft would replace what was typed.
OPENED = """() => {
  document.body.classList.add('hp-open');
  window.dispatchEvent(new Event('hangproof-open'));
  return [];
}"""


@dataclass(frozen=True)
class RunPage:
    """The components of the tab that the rest of the page uses. outputs: what `render` updates, in order."""

    selected: gr.State
    confirmed: gr.State  # the run whose copy may replace images and settings
    timer: gr.Timer
    notice: gr.HTML
    copy: gr.Button
    outputs: list[Any]


def build() -> RunPage:
    """Build the tab and its events."""
    selected, confirmed = gr.State(""), gr.State("")
    seen = gr.Textbox("", visible="hidden", elem_id="run-seen", label="What this page shows")
    timer = gr.Timer(TICK_S, active=False)

    parts: dict[str, Any] = {}

    def part(name: str) -> None:
        parts[name] = scripts.drawn(f"run-{name}", part="run_actions" if name == "actions" else "drawn")

    def button(label: str, elem_id: str, width: int = 140, **more: Any) -> gr.Button:
        return gr.Button(label, visible=False, elem_id=elem_id, min_width=width, scale=0, **more)

    with gr.Row(elem_classes="hp-runs"):
        with gr.Column(scale=1, min_width=230, elem_classes="hp-side"):
            search = fold.line("Search runs", placeholder="Name or state", show_label=False, elem_id="run-search")
            part("queue")
            part("list")
        with gr.Column(scale=4, min_width=300, elem_classes="hp-main"):
            notice = gr.HTML(elem_id="run-notice")
            part("head")
            with gr.Row(elem_classes="hp-actions"):
                total = gr.Number(precision=0, visible=False, elem_id="total", min_width=190, scale=0)
                go, halt = button("Start", "go", variant="primary"), button("Stop", "stop")
                copy = button(COPY, "copy", 220)
            for name in ("actions", "loras", "incidents", "ledger"):
                part(name)
            parts["charts"] = scripts.component("charts", "run-charts")
            gr.set_static_paths(outputs_dir())  # Gradio names the samples by their path instead of copying them
            for name, (title, draw) in FOLDS.items():
                fold.build(title, f"{name}-fold", selected, draw)
            fold.build("Rename or delete", "manage-fold", selected, lambda folder: _manage(folder, notice, again))
    outputs = [selected, seen, *(parts[name] for name in PARTS), halt, go, total, copy]

    shown = [selected, seen, search]
    # Gradio copies the values of every component that shows an event's progress, twice an event, even a hidden one.
    quiet = {**QUIET, "show_progress_on": notice}
    again: dict[str, Any] = {"fn": refresh, "inputs": shown, "outputs": outputs, **quiet}
    timer.tick(queue=False, **again)
    search.input(trigger_mode="always_last", **again)
    # Presses that come while the answer to one is awaited are answered after it, and not lost.
    parts["list"].act(pick, search, [*outputs, notice, confirmed], trigger_mode="multiple", **quiet)
    for name in ("actions", "queue"):
        parts[name].act(on_press, None, notice, trigger_mode="multiple", **QUIET).then(**again)
    halt.click(None, None, halt, js=STOPPING, **QUIET)
    halt.click(stop, selected, [notice, seen], **QUIET).then(**again)
    go.click(None, None, notice, js=f"() => {json.dumps(STARTING)}", **QUIET)
    go.click(start, [selected, total], notice, **QUIET).then(**again)
    return RunPage(selected, confirmed, timer, notice, copy, outputs)


def _manage(folder: Path, said: gr.HTML, again: dict[str, Any]) -> None:
    """The fold that renames or deletes a run. again: the event that shows the tab as it is now."""
    shown, used = view.read(folder), manage.usage(folder)
    with gr.Row(elem_classes="hp-fields"):
        name = fold.line("New name", value=shown.name, elem_id="new-name")
        rename = gr.Button("Rename", size="sm", scale=0, min_width=110, elem_id="rename-ok")
    fold.say(
        f"Delete the run {shown.name!r} with its LoRAs, checkpoints, samples and log? This frees "
        f"{manage.size_text(used.run_bytes)}. It cannot be undone."
    )
    with_images = gr.Checkbox(
        label=f"Also delete its data set: {count(used.images, 'image')} with captions ({manage.size_text(used.images_bytes)})",
        visible=used.images_bytes > 0,
        interactive=True,
        elem_id="with-images",
    )
    delete = gr.Button("Delete", variant="stop", size="sm", scale=0, min_width=110, elem_id="delete-ok")

    def on_rename(name: str) -> str:
        try:
            manage.rename(folder, name)
        except runs.RunError as error:
            return notice(str(error).splitlines(), "bad")
        return notice([f"Renamed to {name.strip()!r}."])

    def on_delete(images: bool, _: str, seen: str, search: str) -> list[Any]:
        name = view.read(folder).name
        try:
            freed = manage.delete(folder, jobs.idle, images)
            queue.forget(folder.name)
        except runs.RunError as error:
            return [*[gr.skip()] * len(again["outputs"]), notice([str(error)], "bad")]
        said = notice([f"Deleted {name!r}. This freed {manage.size_text(freed)}."])
        return [*render(newest(), seen, search), said]

    gr.on([rename.click, name.submit], on_rename, name, said, **QUIET).then(**again)
    delete.click(on_delete, [with_images, *again["inputs"]], [*again["outputs"], said], **QUIET)


TOTALS = {"epochs": "Total epochs", "max_train_steps": "Total steps"}


def _buttons(shown: view.View | None) -> dict[str, dict[str, Any]]:
    """Updates for the buttons that the run's state allows: stop; start, resume or train longer; copy to New LoRA."""
    if shown is None:
        return {name: {"visible": False} for name in ("stop", "go", "total", "copy")}
    can_stop = shown.running
    stopping = shown.state == "stopping" or (can_stop and view.stop_requested(shown.folder))
    can_go = not can_stop and not actions.waits(shown.folder)
    field, now = (can_go and shown.state == "completed" and runs.longer(shown.spec)) or ("epochs", None)
    return {
        "stop": {"visible": can_stop, "interactive": not stopping, "value": "Stopping…" if stopping else "Stop"},
        "go": {"visible": can_go and (shown.state != "completed" or now is not None), "value": shown.start_label},
        "total": {"visible": now is not None, "value": now, "label": TOTALS[field]},
        "copy": {"visible": not shown.problem, "value": COPY},
    }


def render(selected: str, seen: str, search: str = "") -> list[Any]:
    """The current parts of the tab; parts that the browser already shows are skipped."""
    known = json.loads(seen or "{}")
    everything = view.read_all()
    shown = next((one for one in everything if one.folder.name == selected), None)
    parts: dict[str, Any] = dict.fromkeys(PARTS, "")
    parts["list"] = cards.run_list(everything, selected, search or "")
    parts["head"] = cards.head(shown, actions.waits(shown.folder)) if shown else cards.no_run(selected)
    parts["queue"] = actions.queue_html(everything)
    parts["charts"] = charts.value(shown)
    if shown is not None:
        saved, folder = view.loras(shown.folder), shown.folder
        if saved:
            parts["loras"] = cards.loras(folder, saved, view.evolution(folder), blind_vote.picked(folder))
        parts["incidents"] = cards.incidents(folder, view.incidents(folder))
        parts["ledger"] = cards.ledger(shown)
        parts["actions"] = actions.html(shown)
    parts |= {name: gr.update(**change) for name, change in _buttons(shown).items()}
    out = []
    for name, value in parts.items():
        text = value if isinstance(value, str) else str(value.get("revision", value))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        if name == "charts":  # as text: Gradio copies what is inside an object again and again while a page is open
            value = json.dumps(value)
        out.append(gr.skip() if known.get(name) == digest else value)
        known[name] = digest
    return [selected, json.dumps(known), *out]


def refresh(selected: str, seen: str, search: str = "") -> list[Any]:
    """`render` without selecting: the user may have selected another run since."""
    return [gr.skip(), *render(selected, seen, search)[1:]]


def first_run(name: str) -> str:
    """The run that a new page selects: the one in its address, else one with a live monitor, else ""."""
    everything = view.read_all()
    found = [one for one in everything if one.folder.name == name] or [one for one in everything if one.running]
    return found[0].folder.name if found else ""


def newest() -> str:
    """The first run of the list; "" where there is none."""
    return next((one.folder.name for one in view.read_all()), "")


def notice(lines: list[str], kind: str = "info") -> str:
    """A box of messages; "" without messages."""
    return box(map(linked, lines), kind)


def stop(selected: str) -> tuple[str, Any]:
    """Stop the selected run: (notice, what the browser shows: it has changed the button already, STOPPING)."""
    try:
        actions.stop(view.folder_of(selected))
    except runs.RunError as error:
        return notice(str(error).splitlines(), "bad"), ""
    return "", gr.skip()


def start(selected: str, total: float | None) -> str:
    """Start or resume the selected run; a completed run continues to `total` epochs or steps."""
    from launch import rehearse

    try:
        folder = view.folder_of(selected)
        if view.read(folder).state == "completed":
            _train_longer(folder, total)
        if text := actions.ask_once(folder, rehearse.objection(folder, runs.load(folder))):
            return notice([text], "warn")
        actions.start(folder)
    except runs.RunError as error:
        return notice(str(error).splitlines(), "bad")
    return ""


def _train_longer(folder: Path, total: float | None) -> None:
    from monitor.state import nothing_left

    field, now = runs.longer(runs.load(folder).model_dump())
    if total is None or total < now or (total == now and nothing_left(folder)):
        unit = TOTALS[field].removeprefix("Total ")
        raise runs.RunError(f"{TOTALS[field]}: Already trained for {now} {unit}; enter a larger number")
    runs.train_longer(folder, int(total))


def pick(search: str, event: gr.EventData) -> tuple[Any, ...]:
    """Select another run."""
    return (*render(str(event.run), "", search), "", "")


def on_press(event: gr.EventData) -> str:
    """A button beside Start or one of the queue was pressed: what to say."""
    run, action = pressed(event, "run"), pressed(event, "do")
    try:
        said = actions.act(run, action).get("message")
    except runs.RunError as error:
        return notice(str(error).splitlines(), "bad")
    return notice([said] if said else [])


def copy_to_new_lora(selected: str, confirmed: str, draft_id: str) -> Iterator[tuple[Any, ...]]:
    """Copy a run's settings, images and captions into the New LoRA tab.

    Yields (notice of this tab, run whose copy the user must confirm, image list, note at the top of the New LoRA tab,
    tab to open). Images or settings that no run has are replaced only after a second click.
    """
    try:
        folder = view.folder_of(selected)
        spec, unsaved = runs.load(folder), draft.images_not_in_a_run(draft_id)
        if (unsaved or draft.settings_not_in_a_run(draft_id)) and confirmed != selected:
            lost = count(unsaved, "image") if unsaved else "The settings"
            question = f"{lost} under New LoRA would be lost: no run has a copy. Click again to replace them."
            yield notice([question], "warn"), selected, gr.skip(), gr.skip(), gr.skip()
            return
        there = counts(runs.datasets_dir() / spec.slug)
        said = f"Copying {count(sum(there.values()), 'image')}…"  # each is measured: 5,000 take a minute
        yield notice([said], "busy"), "", gr.skip(), gr.skip(), gr.skip()
        values = form.values_of_spec(spec, there)
        values["name"] = runs.free_name(spec.name)
        imports.cancel(draft_id)  # its images would come after those of the run
        captioning.cancel(draft_id)
        # The draft is touched last, and once: an error above leaves it as it is.
        messages = draft.copy_dataset(draft_id, spec.slug, values)
        script_editor.copy_from_run(draft_id, spec)
        draft.mark_in_a_run(draft_id, draft.taken(draft_id))
    except runs.RunError as error:
        yield notice(str(error).splitlines(), "bad"), "", gr.skip(), gr.skip(), gr.skip()
        return
    lines = [f"Copied the settings, images and captions of {spec.name!r}. That run is unchanged.", *messages]
    if variables := ", ".join(spec.public()["environment"]):
        lines.append(f"Not copied: {variables}. Set them in the table [environment] of the new run's run.toml.")
    shown = images.listing(draft_id)
    yield "", "", shown, notice(lines), gr.update(selected="new")
