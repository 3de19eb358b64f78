"""A part of a run that is made when it is opened and not with the page, so that it costs a visit nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from runs.files import RunError
from ui.html import esc
from ui.run import calls

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Gradio 6.31 draws a part in a thread, and goes through the page's events there without a lock (Renderable.apply). Of two
# parts drawn at the same time, one failed with "dictionary changed size during iteration" and stayed empty.
DRAWN: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 1, "concurrency_id": "drawn parts"}


def opened(title: str, elem_id: str, source: gr.Component, draw: Callable[[Any], None]) -> gr.Accordion:
    """Build an accordion whose components `draw(value of source)` makes each time it is opened. It shows a RunError of `draw`."""
    with gr.Accordion(title, open=False, elem_id=elem_id) as fold:

        @gr.render(inputs=[source], triggers=[fold.expand], **DRAWN)
        def _opened(value: Any) -> None:
            try:
                draw(value)
            except RunError as error:
                say(error)

    return fold


def build(title: str, elem_id: str, selected: gr.State, draw: Callable[[Path], None]) -> None:
    """Build an accordion whose components `draw(folder of the run)` makes. When another run is selected, it closes."""

    def drawn(name: str) -> None:
        if not name:
            raise RunError("Choose a run in the list.")
        draw(calls.folder_of(name))

    fold = opened(title, elem_id, selected, drawn)
    before = gr.State("")  # the run shown before this one

    def _another(name: str, before: str) -> tuple[Any, str]:
        # Opened by somebody while the page was still loading its first run, it stays open.
        return (gr.update(open=False) if before not in ("", name) else gr.skip()), name

    selected.change(_another, [selected, before], [fold, before], **QUIET)


def say(text: object) -> gr.HTML:
    """A sentence in the part."""
    return gr.HTML(f'<p class="hp-say">{esc(text)}</p>', apply_default_css=False)


def note(text: object, bad: bool = False) -> str:
    """What came of a press of a button, as markup; a screen reader says it. "" without text."""
    kind, role = ("hp-job-note", "alert") if bad else ("hp-job-state", "status")
    return f'<p class="{kind}" role="{role}">{esc(text)}</p>' if text else ""
