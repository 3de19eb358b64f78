"""Small pieces of markup. Everything that is not ours goes through `esc` or `markdown`; nothing else makes HTML of text."""

import html
import re
from functools import cache, lru_cache
from pathlib import Path

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def esc(value: object) -> str:
    """Text as text, in markup and in attributes."""
    return html.escape(str(value), quote=True)


def script(name: str) -> str:
    """The source of `ui/NAME.js` for a component's js_on_load, with what all of them use in front."""
    return "".join((Path(__file__).parent / file).read_text(encoding="utf-8") for file in ("dom.js", f"{name}.js"))


@cache
def _parser():
    from markdown_it import MarkdownIt

    # Raw HTML, pictures and links are shown as the text they are: a report quotes log lines that anyone may have written.
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "link", "autolink", "reference"])


@lru_cache(maxsize=128)
def markdown(text: str) -> str:
    """A report's Markdown as HTML; HTML inside it stays text. Kept, because a timer asks for the same one each second."""
    return _parser().render(text)


def duration(seconds: float | None) -> str:
    """A time span as a person says it: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None or seconds != seconds:
        return "–"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min" + (f" {s % 60} s" if s % 60 and s < 600 else "")
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def per_step(seconds: float | None) -> str:
    """A step's length: steps a second when they are fast, seconds a step when slow."""
    if not seconds or seconds != seconds:
        return "–"
    return f"{seconds:.3g} s / step" if seconds >= 1 else f"{1 / seconds:.1f} steps / s"


def number(value: float | None, digits: int = 4) -> str:
    """A loss or learning rate, short; `–` where there is none."""
    if value is None or value != value:
        return "–"
    return f"{value:.{digits}g}"


def plain_log(data: bytes, lines: int) -> str:
    """The last lines of a log as a person would have seen them: no colours, a progress bar's last state only."""
    text = ANSI.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    kept = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")[-lines - 1 :]]
    kept = ["".join(c for c in line if c == "\t" or c.isprintable()) for line in kept]
    return "\n".join(kept).strip("\n")
