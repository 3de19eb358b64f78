"""The second tab: the runs, and the one looked at.

A timer reads the run's folder once a second and sends only the parts that have changed; what the browser shows already
is remembered by its digest, so that a picture does not flicker and a report stays open while one reads it.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import gradio as gr

import runs
from ui import cards, control, draft, form, images, view
from ui.html import esc

TICK_S = 1.0
AGAIN = "New LoRA from this"
PARTS = ("list", "head", "result", "incidents", "loss", "samples", "log")
PICK = """
element.addEventListener('click', (event) => {
  const row = event.target.closest('[data-run]');
  if (row) trigger('pick', { run: row.dataset.run });
});
let shown = '';
const bring = () => setTimeout(() => {
  const here = element.querySelector('.hp-here');
  if (!here || here.dataset.run === shown) return;
  shown = here.dataset.run;
  here.scrollIntoView({ block: 'nearest', inline: 'nearest' });
}, 50);
watch('value', bring);
bring();
"""
# The address names the run looked at, so that a reload or a bookmark opens it again. Read from the list as drawn, because
# the browser does not know the session's state; and not before OPENED: Gradio tells of the first tab as chosen while the
# page still opens, which would wipe the address it opens with.
ADDRESS = """() => setTimeout(() => {
  if (!window.hangproofOpened) return;
  const list = document.querySelector('#run-list');
  const here = list && list.offsetParent && list.querySelector('.hp-here');
  const url = new URL(window.location);
  if (here) url.searchParams.set('run', here.dataset.run); else url.searchParams.delete('run');
  window.history.replaceState(null, '', url);
}, 100)"""
# From here on the form may be typed into (style.css): before, what the draft brings back would replace what was typed.
OPENED = f"() => {{ window.hangproofOpened = true; document.body.classList.add('hp-open'); ({ADDRESS})(); }}"


@dataclass
class RunPage:
    """The components of the tab that others wire up."""

    parts: dict = field(default_factory=dict)
    stop: gr.Button | None = None
    go: gr.Button | None = None
    total: gr.Number | None = None
    again: gr.Button | None = None
    sure: gr.State | None = None
    notice: gr.HTML | None = None
    selected: gr.State | None = None
    seen: gr.State | None = None
    timer: gr.Timer | None = None

    @property
    def outputs(self) -> list:
        """What `render` gives values for, in order."""
        return [self.selected, self.seen, *self.parts.values(), self.stop, self.go, self.total, self.again]


def build() -> RunPage:
    """Lay the tab out."""
    page = RunPage(selected=gr.State(""), seen=gr.State({}), timer=gr.Timer(TICK_S, active=False), sure=gr.State(""))
    with gr.Row(elem_classes="hp-runs"):
        with gr.Column(scale=1, min_width=230, elem_classes="hp-side"):
            page.parts["list"] = gr.HTML(elem_id="run-list", js_on_load=PICK, apply_default_css=False)
        with gr.Column(scale=4, min_width=300, elem_classes="hp-main"):
            page.notice = gr.HTML(elem_id="run-notice")
            page.parts["head"] = gr.HTML(elem_id="run-head", apply_default_css=False)
            page.parts["result"] = gr.HTML(elem_id="run-result", apply_default_css=False)
            with gr.Row(elem_classes="hp-actions"):
                page.total = gr.Number(precision=0, visible=False, elem_id="total", min_width=190, scale=0)
                page.go = gr.Button("Start", variant="primary", visible=False, elem_id="go", min_width=140, scale=0)
                page.stop = gr.Button("Stop", visible=False, elem_id="stop", min_width=140, scale=0)
                page.again = gr.Button(AGAIN, visible=False, elem_id="again", min_width=190, scale=0)
            for part in PARTS[3:]:
                page.parts[part] = gr.HTML(elem_id=f"run-{part}", apply_default_css=False)
    page.parts = {part: page.parts[part] for part in PARTS}
    return page


BUTTONS = ("stop", "go", "total", "again")
TOTALS = {"epochs": "Epochs in all", "max_train_steps": "Steps in all"}


def _buttons(shown: view.View | None) -> dict[str, dict]:
    """What can be done with a run, as its state allows: stop it; start, resume or train it longer; use it once more."""
    if shown is None:
        return {name: {"visible": False} for name in BUTTONS}
    can_stop = shown.alive and shown.state not in view.FINAL
    stopping = shown.state == "stopping"
    field, now = (shown.state == "completed" and runs.longer(shown.spec)) or ("epochs", None)
    return {
        "stop": {"visible": can_stop, "interactive": not stopping, "value": "Stopping…" if stopping else "Stop"},
        "go": {"visible": not can_stop and (shown.state != "completed" or now is not None), "value": shown.again},
        "total": {"visible": now is not None, "value": now, "label": TOTALS[field]},
        "again": {"visible": not shown.fault, "value": AGAIN},
    }


def render(selected: str, seen: dict | None) -> list:
    """The tab's parts as they are now; those that the browser shows already are skipped."""
    seen = dict(seen or {})
    everything = view.read_all()
    shown = next((one for one in everything if one.folder.name == selected), None)
    if shown is None and everything:
        shown = everything[0]
        selected = shown.folder.name
    found = view.incidents(shown.folder) if shown else []
    html = {
        "list": cards.run_list(everything, selected),
        "head": cards.head(shown),
        "result": cards.result(shown),
        "incidents": cards.incidents(shown, found),
        "loss": cards.loss(shown, view.losses(shown.folder) if shown else {}, found),
        "samples": cards.samples(shown, view.samples(shown.folder) if shown else []),
        "log": cards.log(shown, view.log_tail(shown.folder) if shown else ""),
    }
    out = []
    for name, value in html.items():
        out.append(_unless_seen(seen, name, value, value))
    for name, change in _buttons(shown).items():
        out.append(_unless_seen(seen, name, repr(change), gr.update(**change)))
    return [selected, seen, *out]


def look_again(selected: str, seen: dict | None) -> list:
    """`render`, but which run is looked at is left alone: another may have been picked while this was on its way."""
    out = render(selected, seen)
    return [gr.skip() if out[0] == selected else out[0], *out[1:]]


def _unless_seen(seen: dict, name: str, text: str, value):
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    if seen.get(name) == digest:
        return gr.skip()
    seen[name] = digest
    return value


def first_run(wanted: str) -> str:
    """The run that a page opens with: the one its address names, else one that is being watched, else none."""
    everything = view.read_all()
    if any(one.folder.name == wanted for one in everything):
        return wanted
    return next((one.folder.name for one in everything if one.alive and one.state not in view.FINAL), "")


def notice(lines: list[str], kind: str = "info") -> str:
    """Sentences about what was just done."""
    if not lines:
        return ""
    role = "alert" if kind == "bad" else "status"
    return f'<div class="hp-problem hp-{kind}" role="{role}"><ul>{"".join(f"<li>{esc(line)}</li>" for line in lines)}</ul></div>'


def stop(selected: str) -> str:
    """Stop the run looked at."""
    try:
        control.stop(runs.run_folder(selected))
    except runs.RunError as error:
        return notice(str(error).splitlines(), "bad")
    return ""


def go(selected: str, total: float | None) -> str:
    """Start or resume the run looked at; a completed one is trained on, to `total` epochs or steps."""
    try:
        folder = runs.run_folder(selected)
        if view.read(folder).state == "completed":
            _train_longer(folder, total)
        control.start(folder)
    except runs.RunError as error:
        return notice(str(error).splitlines(), "bad")
    return ""


def _train_longer(folder: Path, total: float | None) -> None:
    from monitor.book import nothing_left

    field, now = runs.longer(runs.load(folder).model_dump())
    label = TOTALS[field]
    if total is None or total < now or (total == now and nothing_left(folder)):
        raise runs.RunError(f"{label}: it has been trained for {now}; type more than that to train it longer")
    try:
        runs.train_longer(folder, int(total))
    except runs.RunError as error:
        raise runs.RunError(str(error).replace(f"{field}:", f"{label}:")) from error


def pick(event: gr.EventData) -> tuple:
    """Look at another run."""
    return (*render(str(event.run), {}), "", "")


def use_again(selected: str, sure: str, draft_id: str):
    """Put a run's settings, images and captions into the three steps, to change them and train anew.

    Yields (notice of this tab, run that the person is sure about, cards, message of the three steps, fields of the
    form, tab to open); images that are in no run yet are replaced only when asked for twice.
    """
    nothing = [gr.skip()] * len(form.KEYS)
    try:
        folder = runs.run_folder(selected)
        spec, only = runs.load(folder), draft.only_here(draft_id)
        if only and sure != selected:
            what = "1 image with its caption" if only == 1 else f"{only} images with their captions"
            ask = f"{what} under New LoRA {'is' if only == 1 else 'are'} in no run yet; press again to replace what is there"
            yield notice([ask], "warn"), selected, gr.skip(), gr.skip(), *nothing, gr.skip()
            return
        yield notice(["Copying the images…"], "busy"), "", gr.skip(), gr.skip(), *nothing, gr.skip()
        told = draft.take_over(draft_id, spec.slug)
        values = form.values_of_spec(spec, len(draft.items(draft_id)))
        values["name"] = form.free_name(spec.name)
        draft.save_form(draft_id, values)
    except runs.RunError as error:
        yield notice(str(error).splitlines(), "bad"), "", gr.skip(), gr.skip(), *nothing, gr.skip()
        return
    lines = [f"Settings, images and captions are those of {spec.name!r}; that run stays as it is.", *told]
    shown = images.listing(draft_id)
    yield "", "", shown, notice(lines), *(values[key] for key in form.KEYS), gr.update(selected="new")
