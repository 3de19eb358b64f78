"""The second tab: the runs, and the one looked at.

A timer reads the run's folder once a second and sends only the parts that have changed; what the browser shows already
is remembered by its digest, so that a picture does not flicker and a report stays open while one reads it.
"""

import hashlib
from dataclasses import dataclass, field

import gradio as gr

import runs
from ui import cards, control, view
from ui.html import esc

TICK_S = 1.0
PARTS = ("list", "head", "result", "incidents", "loss", "samples", "log")
PICK = """
element.addEventListener('click', (event) => {
  const row = event.target.closest('[data-run]');
  if (row) trigger('pick', { run: row.dataset.run });
});
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
    notice: gr.HTML | None = None
    selected: gr.State | None = None
    seen: gr.State | None = None
    timer: gr.Timer | None = None

    @property
    def outputs(self) -> list:
        """What `render` gives values for, in order."""
        return [self.selected, self.seen, *self.parts.values(), self.stop, self.go]


def build() -> RunPage:
    """Lay the tab out."""
    page = RunPage(selected=gr.State(""), seen=gr.State({}), timer=gr.Timer(TICK_S, active=False))
    with gr.Row(elem_classes="hp-runs"):
        with gr.Column(scale=1, min_width=230, elem_classes="hp-side"):
            page.parts["list"] = gr.HTML(elem_id="run-list", js_on_load=PICK, apply_default_css=False)
        with gr.Column(scale=4, min_width=300, elem_classes="hp-main"):
            page.notice = gr.HTML(elem_id="run-notice")
            page.parts["head"] = gr.HTML(elem_id="run-head", apply_default_css=False)
            with gr.Row(elem_classes="hp-actions"):
                page.go = gr.Button("Start", variant="primary", visible=False, elem_id="go", min_width=120, scale=0)
                page.stop = gr.Button("Stop", visible=False, elem_id="stop", min_width=120, scale=0)
            for part in PARTS[2:]:
                page.parts[part] = gr.HTML(elem_id=f"run-{part}", apply_default_css=False)
    page.parts = {part: page.parts[part] for part in PARTS}
    return page


def _buttons(shown: view.View | None) -> tuple[dict, dict]:
    """(Stop, Start or Resume) as the run's state allows."""
    if shown is None:
        return {"visible": False}, {"visible": False}
    can_stop = shown.alive and shown.state not in view.FINAL
    stopping = shown.state == "stopping"
    return (
        {"visible": can_stop, "interactive": not stopping, "value": "Stopping…" if stopping else "Stop"},
        {"visible": not can_stop and shown.state != "completed", "value": shown.again},
    )


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
    for name, change in zip(("stop", "go"), _buttons(shown), strict=True):
        out.append(_unless_seen(seen, name, repr(change), gr.update(**change)))
    return [selected, seen, *out]


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
    return f'<div class="hp-problem hp-{kind}"><ul>{"".join(f"<li>{esc(line)}</li>" for line in lines)}</ul></div>'


def _act(what, selected: str) -> str:
    try:
        what(runs.run_folder(selected))
    except runs.RunError as error:
        return notice(str(error).splitlines(), "bad")
    return ""


def stop(selected: str) -> str:
    """Stop the run looked at."""
    return _act(control.stop, selected)


def go(selected: str) -> str:
    """Start or resume the run looked at."""
    return _act(control.start, selected)


def pick(event: gr.EventData) -> tuple:
    """Look at another run."""
    return (*render(str(event.run), {}), "")
