"""The log of a run: its end as it grows, a search through all of it, and the place where an incident happened.

A log can have a gigabyte. So no call reads all of it: the end is read as it grows (ui/run/readers.py), and a search goes
backwards from the end for SEARCH_S at most, returns what it found, and says where to continue. A pattern is searched by the
library `regex`, which has a time limit; Python's own `re` would block the server for a bad pattern. The browser gets plain text
with a terminal's colour codes, and sets it with textContent.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from runs.files import RunError
from runs.manage import size_text
from ui import scripts
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.run import calls, view
from ui.run.cards import ERROR_STATES
from ui.run.readers import HEADER, plain_line, styled_line

if TYPE_CHECKING:
    import gradio as gr

NAME = "training.log"
SEARCH_S = 0.4
PATTERN_S = 0.2  # for one line
CHUNK_BYTES = 1 << 20
MOST_FOUND = 200
LONGEST_QUERY = 200
LONGEST_LINE = 4000  # characters of a line that are shown and searched
BEFORE_BYTES, AFTER_BYTES = 48 << 10, 16 << 10  # around a place
FAR = 1 << 50
# Without a word's beginning: a terminal's colour code can stand before it.
ERROR = re.compile(rb"(?i)error\b|exception\b|traceback|fatal\b|critical\b|out of memory|killed\b|nan loss")
WARNING = re.compile(rb"(?i)warn(?:ing)?\b|deprecat")
LEVELS = {"": None, "warning": re.compile(ERROR.pattern + rb"|" + WARNING.pattern[4:]), "error": ERROR}
MOST_INCIDENTS = 100


def value(shown: "view.View | None") -> dict[str, Any]:
    """What the script gets each second: the run, a text that changes with the log, and what went wrong."""
    if shown is None or not shown.status.get("state"):
        return {"run": "", "stamp": ""}
    log, stamp = view.log(shown.folder), view.stamp(shown.folder / NAME)
    incidents = [
        {
            "number": one.number,
            "label": f"{one.number}: {one.fields.get('title') or one.fields.get('cause') or one.fields.get('kind')}",
        }
        for one in view.incidents(shown.folder)[:MOST_INCIDENTS]
    ]
    return {
        "run": shown.folder.name,
        "stamp": f"{stamp.inode}-{stamp.size}-{log.hidden}",
        "error": log.error[:2000] if shown.state in ERROR_STATES else "",
        "hidden": log.hidden,
        "incidents": incidents,
        "url": file_url(shown.folder / NAME) if stamp.size else "",
        "size": size_text(stamp.size),
    }


def log_tail(data: dict[str, Any]) -> dict[str, Any]:
    """The end of the log: {"ok", "lines": [[level, text]]}."""
    return calls.answer(lambda folder, _: {"lines": _marked(view.log(folder).styled)}, data)


def _marked(lines: tuple[str, ...]) -> list[list[str]]:
    return [[level_of(line.encode("utf-8", "replace")), line[:LONGEST_LINE]] for line in lines]


def level_of(line: bytes) -> str:
    """The level of a line: "error", "warning" or ""."""
    return "error" if ERROR.search(line) else "warning" if WARNING.search(line) else ""


def log_search(data: dict[str, Any]) -> dict[str, Any]:
    """Lines with a text or a pattern and of a level, backwards from the end.

    Args:
        data: {"run", "text", "pattern": whether the text is a regular expression, "level": "", "warning" or "error", "before": where the
            last search ended, None for the end of the log}.

    Returns:
        {"ok", "found": [[offset in bytes, level, text]] in the order of the log, "next": where to continue, None at the beginning,
        "searched": share of the log that was searched, 0 to 1}.
    """

    def action(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        text, level = data.get("text", ""), data.get("level", "")
        if not isinstance(text, str) or not isinstance(level, str) or level not in LEVELS:
            raise RunError(OUT_OF_DATE)
        if len(text) > LONGEST_QUERY:
            raise RunError(f"Search for at most {LONGEST_QUERY} characters.")
        pattern = _compiled(text) if data.get("pattern") is True and text else None
        before = calls.number_in(data, "before", 0, FAR)
        try:
            with (folder / NAME).open("rb") as file:
                size = file.seek(0, 2)
                end = size if before is None else min(int(before), size)
                found, next_end = search(file, end, text, pattern, level)
        except OSError as error:
            raise RunError(f"{NAME} cannot be read: {error.strerror}") from error
        share = 1.0 - (next_end or 0) / size if size else 1.0
        return {"found": found, "next": next_end, "searched": round(share, 3)}

    return calls.answer(action, data)


def _compiled(text: str) -> Any:
    import regex

    try:
        return regex.compile(text, regex.IGNORECASE)
    except regex.error as error:
        raise RunError(f"Not a regular expression: {error}. Turn off “Regex” to search for this text.") from error
    except (RecursionError, OverflowError, MemoryError) as error:
        raise RunError("This regular expression is too large. Use a shorter one.") from error


def search(file: BinaryIO, end: int, text: str, pattern: Any, level: str) -> tuple[list[list[Any]], int | None]:
    """(what was found before byte `end`, where to continue or None). RunError: a line takes the pattern longer than PATTERN_S."""
    until_s = time.monotonic() + SEARCH_S
    wanted, needle = LEVELS[level], text.lower().encode("utf-8")
    found: list[list[Any]] = []
    for start, data in chunks_before(file, end):
        for offset, line in reversed(list(_candidates(start, data, b"" if pattern else needle, wanted))):
            if pattern is not None and time.monotonic() > until_s:
                return found[::-1], offset + len(line)  # this line is not searched yet
            shown = styled_line(line)
            plain = plain_line(line)[:LONGEST_LINE]
            if pattern is not None and not _matches(pattern, plain):
                continue
            if pattern is None and text and text.lower() not in plain.lower():
                continue
            if wanted is not None and not wanted.search(plain.encode("utf-8", "replace")):
                continue
            found.append([offset, level_of(plain.encode("utf-8", "replace")), shown[:LONGEST_LINE]])
            if len(found) >= MOST_FOUND:
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


def _candidates(
    start: int, data: bytes, needle: bytes, wanted: "re.Pattern[bytes] | None"
) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that can match, in order."""
    if needle and needle.isascii():
        lower = data.lower()
        places = _places(lower, needle)
    elif wanted is not None:
        places = (match.start() for match in wanted.finditer(data))
    else:
        places = _places(data, b"\n")
        if data[:1] != b"\n":
            yield start, data[: data.find(b"\n") if b"\n" in data else len(data)]
        for place in places:
            if place + 1 < len(data):
                line_end = data.find(b"\n", place + 1)
                yield start + place + 1, data[place + 1 : line_end if line_end >= 0 else len(data)]
        return
    last = -1
    for place in places:
        begin = data.rfind(b"\n", 0, place) + 1
        if begin != last:
            last = begin
            line_end = data.find(b"\n", place)
            yield start + begin, data[begin : line_end if line_end >= 0 else len(data)]


def _places(data: bytes, needle: bytes) -> Iterator[int]:
    place = data.find(needle)
    while place >= 0:
        yield place
        place = data.find(needle, place + len(needle))


def log_around(data: dict[str, Any]) -> dict[str, Any]:
    """The lines around a place: {"ok", "lines": [[level, text]], "here": index of the line that was asked for}.

    Args:
        data: {"run", "at": an offset in bytes of `log_search`, or "incident": its number, for the end of the attempt that it ended}.
    """

    def action(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        at = calls.number_in(data, "at", 0, FAR)
        try:
            with (folder / NAME).open("rb") as file:
                size = file.seek(0, 2)
                place = end_of_attempt(file, size, _attempt_of(folder, data)) if at is None else min(int(at), size)
                begin = max(0, place - BEFORE_BYTES)
                file.seek(begin)
                before, after = file.read(place - begin), file.read(AFTER_BYTES)
        except OSError as error:
            raise RunError(f"{NAME} cannot be read: {error.strerror}") from error
        above = before.split(b"\n")[1 if begin else 0 :]
        partial = above.pop() if above else b""
        lines = [*above, *(partial + after).rstrip(b"\n").split(b"\n")]
        here = len(above) if at is not None else max(0, len(above) - 1)
        return {"lines": _marked(tuple(map(styled_line, lines))), "here": min(here, len(lines) - 1)}

    return calls.answer(action, data)


def _attempt_of(folder: Path, data: dict[str, Any]) -> int:
    number = data.get("incident")
    known = next((one for one in view.incidents(folder) if one.number == number), None)
    if known is None:
        raise RunError(OUT_OF_DATE)
    attempt = known.fields.get("attempt")
    return attempt if type(attempt) is int else 0


def end_of_attempt(file: BinaryIO, size: int, attempt: int) -> int:
    """Where the attempt after this one begins in the log; its end where there is none, or it is not found in time."""
    until_s = time.monotonic() + 2 * SEARCH_S
    place = size
    for start, data in chunks_before(file, size):
        for offset, line in reversed(list(_candidates(start, data, b"=== ", None))):
            match = HEADER.match(line.decode("utf-8", "replace"))
            number = int(match[2][:9]) if match else None
            if number is not None and number <= attempt:
                return place
            if number is not None:
                place = offset
        if time.monotonic() > until_s:
            break
    return place


def build() -> "gr.HTML":
    """The component; its value is that of `value`."""
    return scripts.component("log_view", "run-log", log_tail, log_search, log_around)
