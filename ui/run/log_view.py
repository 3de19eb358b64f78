"""The part "Log" of a run: its end as it grows, and the lines near the end that have a text.

A log can have a gigabyte. So no call reads all of it: the end is read again when it has grown, a search reads the last
SEARCHED_BYTES, and whoever wants more downloads the file.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from monitor.phrases import count
from monitor.run_folder import TRAINING_LOG
from runs.env_file import masked_end
from runs.files import RunError
from runs.growing import LINE_BYTES
from runs.manage import size_text
from ui import scripts
from ui.dataset.images import OUT_OF_DATE
from ui.html import esc, region
from ui.run import fold
from ui.run.cards import local_times
from ui.run.fold import QUIET
from ui.run.readers import end_of, kept, stamp
from ui.served import file_url

TICK_S = 1.0
SHOWN = 300  # lines of the end
LOG_BYTES = 2 << 20  # of the end, in which they are looked for
SEARCHED_BYTES = 4_000_000
MOST_FOUND = 500
LONGEST_QUERY = 200
LONGEST_LINE = 4000  # characters of a line that are shown and searched
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
COLOUR = re.compile(r"(\x1b\[[0-9;]{0,40}m)")


def styled(line: bytes) -> str:
    """A line as a terminal shows it: of a progress bar, which can grow for hours without a line end, what it shows now.
    The only control characters left are the codes of colours, which the browser makes styles, and tabs."""
    line = line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]
    text = line[:LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
    text = ANSI.sub(lambda code: code[0] if COLOUR.fullmatch(code[0]) else "", text)
    if not text.isprintable():
        parts = COLOUR.split(text)
        parts[::2] = ["".join(c for c in part if c == "\t" or c.isprintable()) for part in parts[::2]]
        text = "".join(parts)
    return text[:LONGEST_LINE]


def tail(folder: Path) -> list[str]:
    """The end of the log without the values of secrets; the same object until the log changes."""

    def made() -> list[str]:
        data = end_of(folder / TRAINING_LOG, LOG_BYTES)
        shown = masked_end(folder, data, len(data) == LOG_BYTES).rstrip().split(b"\n")
        lines = [styled(line) for line in shown[-SHOWN:]]
        return lines if any(lines) else []

    return kept("log", folder, [folder / TRAINING_LOG], made)


def find(folder: Path, text: str) -> tuple[list[str], float]:
    """The last MOST_FOUND lines with a text, and the share of the log that was searched, from its end.

    Raises:
        RunError: the log cannot be read.
    """
    if len(text) > LONGEST_QUERY:
        raise RunError(OUT_OF_DATE)
    try:
        with (folder / TRAINING_LOG).open("rb") as file:
            size = file.seek(0, 2)
            searched = min(size, SEARCHED_BYTES)
            file.seek(size - searched)
            data = masked_end(folder, file.read(searched), searched < size)  # what is hidden is not found either
    except OSError as error:
        raise RunError(f"{TRAINING_LOG} cannot be read: {error.strerror}") from error

    def backwards() -> Iterator[str]:
        for line in map(styled, reversed(data.split(b"\n"))):
            seen = COLOUR.sub("", line)
            if seen and text.casefold() in seen.casefold():
                yield line

    return [*itertools.islice(backwards(), MOST_FOUND)][::-1], searched / size if size else 1.0


# The part of the page -------------------------------------------------------------------------------------------------

EMPTY = '<p class="hp-none">The log is empty.</p>'


def markup(lines: list[str]) -> str:
    """Lines as markup."""
    return region("Training log", "".join(f"{_coloured(line)}\n" for line in lines), "hp-log") or EMPTY


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


def draw(folder: Path) -> None:
    """Make the components of the part."""
    query = fold.line("Search the log", max_length=LONGEST_QUERY, elem_id="log-query")
    follow = gr.Checkbox(True, label="Follow the end", interactive=True, elem_id="log-follow")
    file = gr.HTML(_link(folder), apply_default_css=False)
    status = gr.HTML(elem_id="log-status", apply_default_css=False)
    shown = tail(folder)
    pane = scripts.drawn("log-pane", markup(shown))
    # `drawn`: the end of the log as it is shown; None where something else is, over which a look at the end draws
    # nothing, however late its answer is.
    drawn, timer = gr.State(shown), gr.Timer(TICK_S)
    outputs = [pane, status, follow, timer, drawn]

    def on_tick(drawn: list[str] | None) -> list[Any]:
        if drawn is None or (now := tail(folder)) == drawn:
            return [gr.skip()] * 3
        return [markup(now), now, _link(folder)]

    def on_follow(following: bool) -> list[Any]:
        if not following:
            return [*[gr.skip()] * 3, gr.Timer(active=False), None]
        now = tail(folder)
        return [markup(now), "", True, gr.Timer(active=True), now]

    def on_search(text: str) -> list[Any]:
        if not text:
            return on_follow(True)
        try:
            lines, share = find(folder, text)
        except RunError as error:
            return [gr.skip(), fold.note(error, True), *[gr.skip()] * 3]
        said = f"{'the last ' * (len(lines) == MOST_FOUND)}{count(len(lines), 'line')} found"
        if share < 1:
            said += f" in the last {size_text(SEARCHED_BYTES)} of the log; all of it is in the download"
        return [markup(lines), fold.note(said), False, gr.Timer(active=False), None]

    timer.tick(on_tick, drawn, [pane, drawn, file], key="log-tick", **QUIET)
    query.change(on_search, query, outputs, trigger_mode="always_last", **QUIET)
    follow.input(on_follow, follow, outputs, trigger_mode="always_last", **QUIET)
    pane.act(lambda: [False, gr.Timer(active=False), None], None, [follow, timer, drawn], **QUIET)


def _link(folder: Path) -> str:
    if not (size := stamp(folder / TRAINING_LOG).size):
        return ""
    address = esc(file_url(folder / TRAINING_LOG))
    return f'<a class="hp-button" href="{address}" download="{TRAINING_LOG}">Download ({size_text(size)})</a>'
