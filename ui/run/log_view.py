"""The part "Log" of a run: its end as it grows, a search through all of it, and the place where an incident happened.

A log can have a gigabyte. So no call reads all of it: the end is read as it grows (ui/run/readers.py), and a search
goes backwards from the end for FIND_S at most, returns what it found, and says where to continue. A pattern is searched
by the library `regex`, which has a time limit; Python's own `re` would block the server for a bad pattern.
"""

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import gradio as gr

from runs.env_file import masking
from runs.files import RunError
from runs.manage import size_text
from ui import scripts
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.html import esc, pressed
from ui.run import fold, view
from ui.run.cards import ERROR_STATES
from ui.run.fold import QUIET
from ui.run.readers import HEADER, plain_line, styled_line

NAME = "training.log"
TICK_S = 1.0
FIND_S, LOOK_S = 2.0, 0.8  # for what one press searches, and for the place of an incident
PATTERN_S = 0.2  # for one line
CHUNK_BYTES = 1 << 20
MOST_FOUND, MOST_SHOWN = 200, 2000
LONGEST_QUERY = 200
LONGEST_LINE = 4000  # characters of a line that are shown and searched
BEFORE_BYTES, AFTER_BYTES = 48 << 10, 16 << 10  # around a place
# Without a word's beginning: a terminal's colour code can stand before it.
ERROR = re.compile(rb"(?i)error\b|exception\b|traceback|fatal\b|critical\b|out of memory|killed\b|nan loss")
WARNING = re.compile(rb"(?i)warn(?:ing)?\b|deprecat")
LINE = re.compile(rb"[^\n]+")
KINDS = {"": ("", "warning", "error"), "warning": ("warning", "error"), "error": ("error",)}
LEVELS = {"": None, "warning": re.compile(ERROR.pattern + rb"|" + WARNING.pattern[4:]), "error": ERROR}
MOST_INCIDENTS = 100


Line = tuple[
    int | None, str, str
]  # its place in bytes where it leads to one, its level, its text with a terminal's colours


def first_error(shown: "view.View | None") -> str:
    """What went wrong, as the log of a run that failed says it, and how many lines are not shown; markup."""
    if shown is None or not shown.status.get("state"):
        return ""
    log = view.log(shown.folder)
    text = ""
    if log.error and shown.state in ERROR_STATES:
        text = f'<p class="hp-first-error" data-testid="first-error">{esc(log.error[:2000])}</p>'
    if log.hidden:
        path = f"outputs/{esc(shown.folder.name)}/{NAME}"
        text += f'<p class="hp-none hp-hidden-lines">{log.hidden} lines of the launcher hidden; they are in {path}.</p>'
    return text


def tail(folder: Path) -> list[Line]:
    """The end of the log."""
    return [(None, level_of(line.encode("utf-8", "replace")), line[:LONGEST_LINE]) for line in view.log(folder).lines]


def level_of(line: bytes) -> str:
    """The level of a line: "error", "warning" or ""."""
    return "error" if ERROR.search(line) else "warning" if WARNING.search(line) else ""


def find(
    folder: Path, text: str, pattern: bool = False, level: str = "", before: int | None = None, limit_s: float = FIND_S
) -> tuple[list[Line], int | None, float]:
    """Lines with a text or a pattern and of a level, backwards from the end.

    Args:
        pattern: whether the text is a regular expression. level: "", "warning" or "error". before: where the last search ended,
            None for the end of the log. limit_s: the search ends then, or when it has found MOST_FOUND lines.

    Returns:
        The lines in the order of the log, where to continue (None at its beginning), and the share of it that was searched.

    Raises:
        RunError: the log cannot be read, or the pattern is wrong or takes too long.
    """
    if level not in LEVELS:
        raise RunError(OUT_OF_DATE)
    if len(text) > LONGEST_QUERY:
        raise RunError(f"Search for at most {LONGEST_QUERY} characters.")
    compiled = _compiled(text) if pattern and text else None
    until_s = time.monotonic() + limit_s
    try:
        with (folder / NAME).open("rb") as file:
            size = file.seek(0, 2)
            end = size if before is None else min(before, size)
            # Masked before it is searched: what is hidden is not found either.
            found, rest = search(file, end, text, compiled, level, masking(folder), until_s)
    except OSError as error:
        raise RunError(f"{NAME} cannot be read: {error.strerror}") from error
    return found, rest, 1.0 - (rest or 0) / size if size else 1.0


def _compiled(text: str) -> Any:
    import regex

    try:
        return regex.compile(text, regex.IGNORECASE)
    except regex.error as error:
        raise RunError(f"Not a regular expression: {error}. Turn off “Regex” to search for this text.") from error
    except (RecursionError, OverflowError, MemoryError) as error:
        raise RunError("This regular expression is too large. Use a shorter one.") from error


def search(
    file: BinaryIO,
    end: int,
    text: str,
    pattern: Any,
    level: str,
    masked: Callable[[bytes], bytes] = bytes,
    until_s: float = math.inf,
) -> tuple[list[Line], int | None]:
    """(what was found before byte `end`, where to continue or None). RunError: a line takes the pattern longer than PATTERN_S."""
    wanted = LEVELS[level]
    needle = text.lower().encode("utf-8") if pattern is None and text.isascii() else b""
    found: list[Line] = []
    for start, data in chunks_before(file, end):
        hopeless = needle not in data.lower() or (wanted is not None and not wanted.search(data))
        for match in [] if hopeless else reversed([*LINE.finditer(data)]):
            offset, line = start + match.start(), masked(match[0])
            plain = plain_line(line)[:LONGEST_LINE]
            fits = _matches(pattern, plain) if pattern is not None else text.lower() in plain.lower()
            kind = level_of(plain.encode("utf-8", "replace")) if fits else ""
            if fits and kind in KINDS[level]:
                found.append((offset, kind, styled_line(line)[:LONGEST_LINE]))
            if len(found) >= MOST_FOUND or (pattern is not None and time.monotonic() > until_s):
                return found[::-1], offset or None
        if time.monotonic() > until_s and start > 0:
            return found[::-1], start
    return found[::-1], None


def _matches(pattern: Any, text: str) -> bool:
    try:
        return pattern.search(text, timeout=PATTERN_S, concurrent=True) is not None
    except TimeoutError as error:
        raise RunError("This regular expression takes too long. Use a simpler one, or turn off “Regex”.") from error


def chunks_before(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of pieces of about CHUNK_BYTES that begin with a line, from `end` to the beginning of the file."""
    while end > 0:
        start = max(0, end - CHUNK_BYTES)
        file.seek(start)
        data = file.read(end - start)
        if start > 0:
            cut = data.find(b"\n", 0, len(data) - 1)  # a longer line than a piece is searched piece by piece
            start, data = start + cut + 1, data[cut + 1 :]
        if not data:
            return
        yield start, data
        end = start


def around(folder: Path, at: int) -> tuple[list[Line], int]:
    """The lines around a place, an offset in bytes, and the index of the line there. RunError: the log cannot be read."""
    try:
        with (folder / NAME).open("rb") as file:
            place = min(at, file.seek(0, 2))
            begin = max(0, place - BEFORE_BYTES)
            file.seek(begin)
            before, after = file.read(place - begin), file.read(AFTER_BYTES)
    except OSError as error:
        raise RunError(f"{NAME} cannot be read: {error.strerror}") from error
    above = before.split(b"\n")[1 if begin else 0 :]
    partial = above.pop() if above else b""
    lines = list(map(masking(folder), [*above, *(partial + after).rstrip(b"\n").split(b"\n")]))
    shown = [styled_line(line)[:LONGEST_LINE] for line in lines]
    return [(None, level_of(line.encode("utf-8", "replace")), line) for line in shown], min(len(above), len(lines) - 1)


def around_incident(folder: Path, number: str) -> tuple[list[Line], int]:
    """The end of the attempt that an incident ended, as `around`. RunError: there is no such incident."""
    known = next((one for one in view.incidents(folder) if one.number == number), None)
    if known is None:
        raise RunError(OUT_OF_DATE)
    attempt = known.fields.get("attempt")
    try:
        with (folder / NAME).open("rb") as file:
            place = end_of_attempt(file, file.seek(0, 2), attempt if type(attempt) is int else 0)
    except OSError as error:
        raise RunError(f"{NAME} cannot be read: {error.strerror}") from error
    return around(folder, max(0, place - 1))


def end_of_attempt(file: BinaryIO, size: int, attempt: int) -> int:
    """Where the attempt after this one begins in the log; its end where there is none, or it is not found in time."""
    until_s = time.monotonic() + LOOK_S
    place = size
    for start, data in chunks_before(file, size):
        for line in reversed([*LINE.finditer(data)] if b"=== " in data else []):
            if not (match := HEADER.match(line[0].decode("utf-8", "replace"))):
                continue
            if int(match[2][:9]) <= attempt:
                return place
            place = start + line.start()
        if time.monotonic() > until_s:
            break
    return place


# The part of the page ---------------------------------------------------------------------------------------------------

UTC = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)")
CHOICES = [("All lines", ""), ("Warnings and errors", "warning"), ("Errors", "error")]
EMPTY = '<p class="hp-none">The log is empty.</p>'


def markup(lines: list[Line], here: int = -1) -> str:
    """Lines as markup; `here` is the index of the line that was asked for. A line that leads to its place is a button."""
    out = []
    for n, (at, level, text) in enumerate(lines):
        kind = f"hp-log-line{f' hp-log-{level}' if level else ''}{' hp-log-here' if n == here else ''}"
        if at is None:
            out.append(f'<span class="{kind}">{_coloured(text)}\n</span>')
        else:
            title = "Show the lines around this one"
            out.append(
                f'<button type="button" class="{kind}" data-do="around" data-at="{at}" title="{title}">{_coloured(text)}\n</button>'
            )
    region = '<div class="hp-log" tabindex="0" role="region" aria-label="Training log">'
    return f"{region}<pre>{''.join(out)}</pre></div>" if out else EMPTY


def _coloured(line: str) -> str:
    if "\x1b" not in line:
        return _with_times(line)
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
        text = _with_times(part.text)
        out.append(f'<span class="{" ".join(classes)}">{text}</span>' if classes else text)
    return "".join(out)


def _with_times(text: str) -> str:
    """Escaped, with each UTC time as an element that the page shows in the browser's zone (ui/run/run_times.js)."""
    return UTC.sub(lambda match: f'<time datetime="{match[0]}">{match[0]}</time>', esc(text))


def build(selected: gr.State) -> None:
    """Build the part; `selected` has the name of the run."""
    fold.build("Log", "log-fold", selected, _draw)


def _draw(folder: Path) -> None:
    incidents = view.incidents(folder)[:MOST_INCIDENTS]
    labels = [
        (f"{one.number}: {one.fields.get('title') or one.fields.get('cause') or one.fields.get('kind')}", one.number)
        for one in incidents
    ]
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
        jump = gr.Dropdown(
            labels, value=None, label="Jump to an incident", interactive=True, visible=bool(labels), elem_id="log-jump"
        )
    with gr.Row(elem_classes="hp-log-bar"):
        pattern = gr.Checkbox(label="Regular expression", interactive=True, elem_id="log-regex")
        follow = gr.Checkbox(True, label="Follow the end", interactive=True, elem_id="log-follow")
        file = gr.HTML(_link(folder), apply_default_css=False)
    status = gr.HTML(elem_id="log-status", apply_default_css=False)
    more = gr.Button("Search earlier lines", size="sm", visible=False, elem_id="log-more")
    shown = tail(folder)
    pane = scripts.drawn("log", "log-pane", "act", "scroll_up", value=markup(shown))
    # `drawn`: the end of the log as it is shown; None where something else is, over which a look at the end draws
    # nothing, however late its answer is.
    drawn, found, timer = gr.State(shown), gr.State(([], None)), gr.Timer(TICK_S)
    outputs = [pane, status, more, found, follow, timer, drawn]

    def place(lines: list[Line], here: int) -> list[Any]:
        said = _say("A place in the log. Tick “Follow the end” to return to its end.")
        return [markup(lines, here), said, gr.update(visible=False), ([], None), False, gr.Timer(active=False), None]

    def failed(error: RunError) -> list[Any]:
        return [gr.skip(), _say(error, "alert"), *[gr.skip()] * 5]

    def on_tick(drawn: list[Line] | None) -> list[Any]:
        if drawn is None or (now := tail(folder)) == [tuple(line) for line in drawn]:
            return [gr.skip()] * 3
        return [markup(now), now, _link(folder)]

    def on_follow(following: bool) -> list[Any]:
        if not following:
            return [*[gr.skip()] * 5, gr.Timer(active=False), None]
        now = tail(folder)
        return [markup(now), "", gr.update(visible=False), ([], None), True, gr.Timer(active=True), now]

    def on_search(text: str, pattern: bool, level: str | None, before: Any = ((), None)) -> list[Any]:
        if not text and not level:
            return on_follow(True)
        try:
            lines, rest, share = find(folder, text, pattern, level or "", before[1])
        except RunError as error:
            return failed(error)
        lines = [*lines, *map(tuple, before[0])]
        count = "1 line" if len(lines) == 1 else f"{len(lines):,} lines"
        said = f"{count} found" + ("" if rest is None else f" in the last {share:.0%} of the log")
        again = gr.update(visible=rest is not None and len(lines) < MOST_SHOWN)
        return [markup(lines), _say(said), again, (lines, rest), False, gr.Timer(active=False), None]

    def on_jump(number: str | None) -> list[Any]:
        try:
            return [*place(*around_incident(folder, number)), None] if number else [gr.skip()] * 8
        except RunError as error:
            return [*failed(error), None]

    def on_line(event: gr.EventData) -> list[Any]:
        at = pressed(event, "at")
        try:
            if not at.isdecimal() or len(at) > 15:
                raise RunError(OUT_OF_DATE)
            return place(*around(folder, int(at)))
        except RunError as error:
            return failed(error)

    asked = [query, pattern, level]
    timer.tick(on_tick, drawn, [pane, drawn, file], **QUIET)
    gr.on([query.change, pattern.input, level.input], on_search, asked, outputs, trigger_mode="always_last", **QUIET)
    more.click(on_search, [*asked, found], outputs, **QUIET)
    follow.input(on_follow, follow, outputs, trigger_mode="always_last", **QUIET)
    jump.input(on_jump, jump, [*outputs, jump], **QUIET)
    pane.act(on_line, None, outputs, **QUIET)
    pane.scroll_up(lambda: [False, gr.Timer(active=False), None], None, [follow, timer, drawn], **QUIET)


def _link(folder: Path) -> str:
    size = view.stamp(folder / NAME).size
    address = esc(file_url(folder / NAME))
    return f'<a class="hp-button" href="{address}" download="{NAME}">Download ({size_text(size)})</a>' if size else ""


def _say(text: object, role: str = "status") -> str:
    return f'<p class="hp-log-status" role="{role}">{esc(text)}</p>'
