"""A part of a run that is made when it is opened and not with the page, so that it costs a visit nothing."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from launch.common import LaunchError
from presets import PresetError
from runs.files import RunError
from ui import jobs
from ui.html import duration, esc
from ui.run import view

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# A part that is drawn anew loses the events that it had, and a tick that its old timer had just sent would find none: the page then
# says "Internal Server Error". So the tick of each timer in such a part has a `key`, by which it stays the same event.
# Gradio 6.31 draws a part in a thread, and goes through the page's events there without a lock (Renderable.apply). Of two
# parts drawn at the same time, one failed with "dictionary changed size during iteration" and stayed empty.
DRAWN: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 1, "concurrency_id": "drawn parts"}

ERRORS = (RunError, PresetError, LaunchError)  # their messages are for people
TICK_S, IDLE_S = 1.0, 5.0  # while a command runs, and while none does: somebody else may start one
Look = Callable[[], tuple[bool, str]]


def opened(source: gr.Component, title: str, elem_id: str, draw: Callable[[Any], None]) -> gr.Accordion:
    """Build an accordion whose components `draw(value of source)` makes each time it is opened. It shows an error of `draw`."""
    with gr.Accordion(title, open=False, elem_id=elem_id) as fold:

        @gr.render(inputs=[source], triggers=[fold.expand], **DRAWN)
        def _opened(value: Any) -> None:
            try:
                draw(value)
            except ERRORS as error:
                say(error)

    return fold


def build(title: str, elem_id: str, selected: gr.State, draw: Callable[[Path], None]) -> gr.Accordion:
    """Build an accordion whose components `draw(folder of the run)` makes. Selecting another run closes and empties it.

    run_page.py closes it. What was drawn says for which run; while the page shows another one, run_address.js hides it, so
    that no press acts on the run before.
    """

    def drawn(name: str) -> None:
        gr.HTML(f'<i data-drawn-for="{esc(name)}"></i>', visible="hidden")
        if not name:
            raise RunError("Choose a run in the list.")
        draw(view.folder_of(name))

    return opened(selected, title, elem_id, drawn)


def say(text: object) -> gr.HTML:
    """A sentence in the part."""
    return gr.HTML(f'<p class="hp-say">{esc(text)}</p>', apply_default_css=False)


def note(text: object, bad: bool = False) -> str:
    """What came of a press of a button, as markup; a screen reader says it. "" without text."""
    kind, role = ("hp-job-note", "alert") if bad else ("hp-job-state", "status")
    return f'<p class="{kind}" role="{role}">{esc(text)}</p>' if text else ""


def outcome(folder: Path, name: str, busy: str, failed: str, done: Callable[[Any], str]) -> tuple[bool, str]:
    """(whether a command of ui/jobs.py runs, what it does or did as markup: `busy`, `failed` with the reason, or what
    `done` makes of the JSON value that it printed)."""
    job = jobs.read(folder, name)
    if job is None or job.state == "cancelled":
        return False, ""
    if job.state == "running":
        return True, note(f"{busy} ({duration(job.seconds)})…")
    found = jobs.output(folder, name)[1]
    if job.state != "done" or not isinstance(found, dict):
        return False, note(f"{failed}: {jobs.reason(folder, name)}", True)
    return False, done(found)


class Jobs:
    """The commands of a fold that run in the background (ui/jobs.py): the button that starts each, one that ends it, and
    what it does. One timer looks at all of them, so any page shows their progress, whoever started them.
    """

    def __init__(self) -> None:
        self._looks: list[tuple[Look, int]] = []  # with the number of what is hidden while it runs
        self._outputs: list[Any] = []
        self._key = ""
        self._timer = gr.Timer(IDLE_S)
        self._drawn = gr.State(None)  # what `_looks` returned last; None: another press of a button has drawn since

    def add(
        self,
        go: gr.Button,
        begin: Callable[..., object],
        look: Look,
        cancel: Callable[[], object],
        elem_id: str,
        inputs: list[Any] | None = None,
        js: str | None = None,
        hides: Sequence[Any] | None = None,
        more: Sequence[tuple[Any, Callable[..., object]]] = (),
    ) -> gr.HTML:
        """Show a command here. Returns the component that shows what it does.

        Args:
            begin: starts it with the values of `inputs`. look: returns whether it runs, and what it does or did as markup.
            hides: what is hidden while it runs; by default `go`. more: other events that start it, and how.
        """
        hides, (busy, markup) = [go] if hides is None else hides, look()
        for one in hides:
            one.visible = not busy
        self._key = self._key or f"{elem_id}-tick"
        self._timer.value = TICK_S if busy else self._timer.value
        stop = gr.Button("Cancel", size="sm", visible=busy, scale=0, min_width=110, elem_id=f"cancel-{elem_id}")
        problem = gr.HTML(apply_default_css=False)
        shown = gr.HTML(markup, elem_id=f"job-{elem_id}", apply_default_css=False)
        outputs = [*hides, stop, shown]

        def started(begin: Callable[..., object], *values: Any) -> list[Any]:
            try:
                begin(*values)
            except ERRORS as error:
                return [note(error, True), *[gr.skip()] * (len(outputs) + 2)]
            return ["", *_updates(look(), len(hides)), None, gr.Timer(TICK_S)]

        changed = [problem, *outputs, self._drawn, self._timer]
        for event, act in ((go.click, begin), *more):
            event(functools.partial(started, act), inputs, changed, js=js, **QUIET)
        stop.click(lambda: cancel(), None, None, **QUIET)
        self._looks.append((look, len(hides)))
        self._outputs += outputs
        return shown

    def follow(self) -> None:
        """Draw again what has changed, every TICK_S or IDLE_S."""

        def on_tick(before: list[Any] | None) -> list[Any]:
            now = [look() for look, _ in self._looks]
            old = [tuple(one) for one in before] if before else [None] * len(now)
            if now == old:
                return [gr.skip()] * (len(self._outputs) + 2)
            out: list[Any] = []
            for was, new, (_, hidden) in zip(old, now, self._looks, strict=True):
                out += _updates(new, hidden) if new != was else [gr.skip()] * (hidden + 2)
            return [*out, now, gr.Timer(TICK_S if any(busy for busy, _ in now) else IDLE_S)]

        outputs = [*self._outputs, self._drawn, self._timer]
        self._timer.tick(on_tick, self._drawn, outputs, key=self._key, **QUIET)


def _updates(found: tuple[bool, str], hidden: int) -> list[Any]:
    busy, markup = found
    return [*[gr.update(visible=not busy)] * hidden, gr.update(visible=busy), markup]
