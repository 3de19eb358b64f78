"""A part of a run that is made when it is opened and not with the page, so that it costs a visit nothing."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from presets import PresetError
from runs.files import RunError
from ui import jobs
from ui.html import duration, esc, note
from ui.run import view

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# A part that is drawn anew loses the events that it had, and a tick that its old timer had just sent would find none:
# the page then says "Internal Server Error". So events that can be on their way without a press (ticks, previews, those
# of components outside of the part) have a `key`, by which they stay the same event. Gradio 6.31 draws a part in a
# thread, and goes through the page's events there without a lock (Renderable.apply). Of two parts drawn at the same
# time, one failed with "dictionary changed size during iteration" and stayed empty.
DRAWN: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 1, "concurrency_id": "drawn parts"}

ERRORS = (RunError, PresetError)  # their messages are for people
TICK_S, IDLE_S = 1.0, 5.0  # while a command runs, and while none does: somebody else may start one


def opened(source: gr.Component, title: str, elem_id: str, draw: Callable[[Any], None]) -> gr.Accordion:
    """Build an accordion whose components `draw(value of source)` makes when it is opened. It shows its error."""
    with gr.Accordion(title, open=False, elem_id=elem_id, elem_classes="hp-opened") as fold:

        @gr.render(inputs=[source], triggers=[fold.expand], **DRAWN)
        def _opened(value: Any) -> None:
            try:
                draw(value)
            except ERRORS as error:
                say(error)

    return fold


def build(title: str, elem_id: str, selected: gr.State, draw: Callable[[Path], None]) -> gr.Accordion:
    """Build an accordion whose components `draw(folder of the run)` makes. What was drawn says for which run: once the
    page shows another one, stale_folds.js closes the accordion and hides what it has, so that no press acts on the run
    before."""

    def drawn(name: str) -> None:
        gr.HTML(f'<i data-drawn-for="{esc(name)}"></i>', visible="hidden")
        draw(view.folder_of(name))

    return opened(selected, title, elem_id, drawn)


def of_run(folder: Path, elem_id: str) -> dict[str, Any]:
    """For a component that may have no value: Gradio (6.31) leaves that of the run before in it, but for another key."""
    return {"elem_id": elem_id, "key": (elem_id, folder.name), "preserved_by_key": None}


def line(label: str, info: str | None = None, **more: Any) -> gr.Textbox:
    """A field of one line. It says that it is interactive: Gradio knows of those in the page's first config only."""
    return gr.Textbox(label=label, info=info, lines=1, max_lines=1, interactive=True, **more)


def say(text: object, look: str = "hp-say") -> gr.HTML:
    """A sentence in the part. look: its class of style.css."""
    return gr.HTML(f'<p class="{look}">{esc(text)}</p>', apply_default_css=False)


def tried(act: Callable[..., object]) -> Callable[..., str]:
    """A handler that gives what `act` says, or why it cannot be done, as markup."""

    @functools.wraps(act)
    def handler(*given: Any) -> str:
        try:
            return note(act(*given))
        except ERRORS as error:
            return note(error, True)

    return handler


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


def job(
    go: gr.Button,
    begin: Callable[..., object],
    look: Callable[[], tuple[bool, str]],
    cancel: Callable[[], object],
    elem_id: str,
    inputs: list[Any] | None = None,
    js: str | None = None,
    hides: Sequence[Any] | None = None,
    more: Sequence[tuple[Any, Callable[..., object]]] = (),
) -> gr.HTML:
    """Show a command that runs in the background (ui/jobs.py): a button that ends it, and what it does. Its timer looks
    at it, so any page shows its progress, whoever started it. Returns the component that shows what it does.

    Args:
        go: the button that starts it. begin: starts it with the values of `inputs`. look: returns whether it runs, and what
            it does or did as markup. hides: what is hidden while it runs; by default `go`. more: other events that
            start it, and how.
    """

    def looked() -> tuple[bool, str]:
        try:
            return look()
        except ERRORS as error:
            return False, note(error, True)

    hides, (busy, markup) = [go] if hides is None else hides, looked()
    for one in hides:
        one.visible = not busy
    stop = gr.Button("Cancel", size="sm", visible=busy, scale=0, min_width=110, elem_id=f"cancel-{elem_id}")
    problem = gr.HTML(apply_default_css=False)
    shown = gr.HTML(markup, elem_id=f"job-{elem_id}", apply_default_css=False)
    drawn, timer = gr.State((busy, markup)), gr.Timer(TICK_S if busy else IDLE_S)
    outputs = [*hides, stop, shown, drawn, timer]

    def updates(now: tuple[bool, str]) -> list[Any]:
        busy, markup = now
        while_idle, while_busy = gr.update(visible=not busy), gr.update(visible=busy)
        return [*[while_idle] * len(hides), while_busy, markup, now, gr.Timer(TICK_S if busy else IDLE_S)]

    def started(begin: Callable[..., object], *values: Any) -> list[Any]:
        try:
            begin(*values)
        except ERRORS as error:
            return [note(error, True), *[gr.skip()] * len(outputs)]
        return ["", *updates(looked())]

    def on_tick(before: tuple[bool, str]) -> list[Any]:
        now = looked()
        return [gr.skip()] * len(outputs) if now == tuple(before) else updates(now)

    for event, act in ((go.click, begin), *more):
        event(functools.partial(started, act), inputs, [problem, *outputs], js=js, **QUIET)
    stop.click(lambda: cancel(), None, None, **QUIET)
    timer.tick(on_tick, drawn, outputs, key=f"{elem_id}-tick", **QUIET)
    return shown
