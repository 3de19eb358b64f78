"""The part "Log" of a run: its end as it grows, and the lines near the end that have a text or a level.

A log can have a gigabyte. So no call reads all of it: the end is read as it grows (ui/run/readers.py), a search reads the last
SEARCHED_BYTES, and whoever wants more downloads the file.
"""

import re
from pathlib import Path
from typing import Any

import gradio as gr

from runs.env_file import masking
from runs.files import RunError
from runs.manage import size_text
from ui import scripts
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.html import esc
from ui.run import fold, view
from ui.run.cards import ERROR_STATES, local_times
from ui.run.fold import QUIET
from ui.run.readers import plain_line, styled_line

NAME = "training.log"
TICK_S = 1.0
SEARCHED_BYTES = 4_000_000
MOST_FOUND = 500
LONGEST_QUERY = 200
LONGEST_LINE = 4000  # characters of a line that are shown and searched
# Without a word's beginning: a terminal's colour code can stand before it.
ERROR = re.compile(rb"(?i)error\b|exception\b|traceback|fatal\b|critical\b|out of memory|killed\b|nan loss")
WARNING = re.compile(rb"(?i)warn(?:ing)?\b|deprecat")
KINDS = {"": ("", "warning", "error"), "warning": ("warning", "error"), "error": ("error",)}

Line = tuple[str, str]  # its level, its text with a terminal's colours


def first_error(shown: "view.View | None") -> str:
    """What went wrong, as the log of a run that failed says it, as markup."""
    if shown is None or shown.state not in ERROR_STATES or not (error := view.log(shown.folder).error):
        return ""
    return f'<p class="hp-first-error" data-testid="first-error">{esc(error[:2000])}</p>'


def tail(folder: Path) -> list[Line]:
    """The end of the log."""
    return [(level_of(line.encode("utf-8", "replace")), line[:LONGEST_LINE]) for line in view.log(folder).lines]


def level_of(line: bytes) -> str:
    """The level of a line: "error", "warning" or ""."""
    return "error" if ERROR.search(line) else "warning" if WARNING.search(line) else ""


def find(folder: Path, text: str, level: str = "") -> tuple[list[Line], float]:
    """The last MOST_FOUND lines with a text and of a level, and the share of the log that was searched, from its end.

    Args:
        level: "", "warning" (errors too) or "error".

    Raises:
        RunError: the log cannot be read.
    """
    if level not in KINDS or len(text) > LONGEST_QUERY:
        raise RunError(OUT_OF_DATE)
    try:
        with (folder / NAME).open("rb") as file:
            size = file.seek(0, 2)
            searched = min(size, SEARCHED_BYTES)
            file.seek(size - searched)
            data = masking(folder)(file.read(searched))  # before it is searched: what is hidden is not found either
    except OSError as error:
        raise RunError(f"{NAME} cannot be read: {error.strerror}") from error
    found: list[Line] = []
    for line in reversed(data.split(b"\n")):
        plain = plain_line(line)[:LONGEST_LINE]
        if plain and text.casefold() in plain.casefold():
            kind = level_of(plain.encode("utf-8", "replace"))
            if kind in KINDS[level]:
                found.append((kind, styled_line(line)[:LONGEST_LINE]))
        if len(found) == MOST_FOUND:
            break
    return found[::-1], searched / size if size else 1.0


# The part of the page ---------------------------------------------------------------------------------------------------

CHOICES = [("All lines", ""), ("Warnings and errors", "warning"), ("Errors", "error")]
EMPTY = '<p class="hp-none">The log is empty.</p>'


def markup(lines: list[Line]) -> str:
    """Lines as markup."""
    out = [
        f'<span class="hp-log-line{f" hp-log-{level}" if level else ""}">{_coloured(text)}\n</span>'
        for level, text in lines
    ]
    region = '<div class="hp-log" tabindex="0" role="region" aria-label="Training log">'
    return f"{region}<pre>{''.join(out)}</pre></div>" if out else EMPTY


def _coloured(line: str) -> str:
    if "\x1b" not in line:
        return local_times(esc(line))
    from rich.console import Console
    from rich.text import Text

    out = []
    for part in Text.from_ansi(line).render(Console()):
        style = part.style
        classes = [
            f"hp-sgr-{name}" for name in ("bold", "dim", "italic", "underline") if style and getattr(style, name)
        ]
        if style and style.color and style.color.number is not None and style.color.number < 16:
            classes.append(f"hp-sgr-c{style.color.number % 8}")
        text = local_times(esc(part.text))
        out.append(f'<span class="{" ".join(classes)}">{text}</span>' if classes else text)
    return "".join(out)


def build(selected: gr.State) -> gr.Accordion:
    """Build the part; `selected` has the name of the run."""
    return fold.build("Log", "log-fold", selected, _draw)


def _draw(folder: Path) -> None:
    with gr.Row(elem_classes="hp-log-bar"):
        query = gr.Textbox(
            label="Search the log",
            interactive=True,
            max_length=LONGEST_QUERY,
            lines=1,
            max_lines=1,
            elem_id="log-query",
            scale=3,
        )
        level = gr.Dropdown(CHOICES, value="", label="Lines", interactive=True, elem_id="log-level")
    with gr.Row(elem_classes="hp-log-bar"):
        follow = gr.Checkbox(True, label="Follow the end", interactive=True, elem_id="log-follow")
        file = gr.HTML(_link(folder), apply_default_css=False)
    status = gr.HTML(elem_id="log-status", apply_default_css=False)
    shown = tail(folder)
    pane = scripts.drawn("log", "log-pane", "scroll_up", value=markup(shown))
    # `drawn`: the end of the log as it is shown; None where something else is, over which a look at the end draws
    # nothing, however late its answer is.
    drawn, timer = gr.State(shown), gr.Timer(TICK_S)
    outputs = [pane, status, follow, timer, drawn]

    def on_tick(drawn: list[Line] | None) -> list[Any]:
        if drawn is None or (now := tail(folder)) == [tuple(line) for line in drawn]:
            return [gr.skip()] * 3
        return [markup(now), now, _link(folder)]

    def on_follow(following: bool) -> list[Any]:
        if not following:
            return [*[gr.skip()] * 3, gr.Timer(active=False), None]
        now = tail(folder)
        return [markup(now), "", True, gr.Timer(active=True), now]

    def on_search(text: str, level: str | None) -> list[Any]:
        if not text and not level:
            return on_follow(True)
        try:
            lines, share = find(folder, text, level or "")
        except RunError as error:
            return [gr.skip(), fold.note(error, True), *[gr.skip()] * 3]
        count = "1 line" if len(lines) == 1 else f"{len(lines):,} lines"
        least = "the last " if len(lines) == MOST_FOUND else ""
        where = (
            "" if share == 1 else f" in the last {size_text(SEARCHED_BYTES)} of the log; all of it is in the download"
        )
        return [markup(lines), fold.note(f"{least}{count} found{where}"), False, gr.Timer(active=False), None]

    timer.tick(on_tick, drawn, [pane, drawn, file], key="log-tick", **QUIET)
    gr.on([query.change, level.input], on_search, [query, level], outputs, trigger_mode="always_last", **QUIET)
    follow.input(on_follow, follow, outputs, trigger_mode="always_last", **QUIET)
    pane.scroll_up(lambda: [False, gr.Timer(active=False), None], None, [follow, timer, drawn], **QUIET)


def _link(folder: Path) -> str:
    size = view.stamp(folder / NAME).size
    address = esc(file_url(folder / NAME))
    return f'<a class="hp-button" href="{address}" download="{NAME}">Download ({size_text(size)})</a>' if size else ""
