"""Small pieces of markup. Text from files and users becomes HTML by `esc`, `markdown` or a template alone."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from guards import hub
from runs.paths import START

if TYPE_CHECKING:
    import jinja2
    from markdown_it import MarkdownIt


def esc(value: object) -> str:
    """Text as text, in markup and in attributes."""
    return html.escape(str(value), quote=True)


def hub_link(path: str, text: str) -> str:
    """A link to a page of the hub that opens in a new tab."""
    return f'<a href="{esc(hub.shown())}/{esc(path)}" target="_blank" rel="noopener noreferrer">{esc(text)}</a>'


def linked(text: str) -> str:
    """Text as HTML in which the addresses of the hub's pages are links, and what is between backticks is code. Our
    modules have the name that works in every terminal: Windows' has none of the environment's programs."""
    text = re.sub(r"python -m (?:monitor|runs|jobs|launch|presets)(?= [a-z])", lambda _: START, text)
    address = re.compile(re.escape(esc(hub.shown())) + r"(?:/[\w.-]*\w)+")
    link = r'<a href="\g<0>" target="_blank" rel="noopener noreferrer">\g<0></a>'
    return re.sub("`([^`]+)`", r"<code>\1</code>", address.sub(link, esc(text)))


def press(text: str, do: str, *, label: str = "", title: str = "", off: bool = False, **data: object) -> str:
    """A button whose press triggers the event "act" of its component (ui/drawn.js) with {"do": `do`, **data}.

    label: its name for a screen reader, where `text` is too short. off: it cannot be pressed.
    """
    values = "".join(f' data-{key}="{esc(value)}"' for key, value in data.items())
    values += f' aria-label="{esc(label)}"' if label else ""
    values += f' title="{esc(title or label)}"' if title or label else ""
    values += ' aria-disabled="true"' if off else ""
    return f'<button type="button" class="hp-button hp-quiet" data-do="{esc(do)}"{values}>{esc(text)}</button>'


def table(label: str, heads: list[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that the keyboard can scroll, the first column as the heads of its rows; "" without rows."""
    body = "".join(
        f'<tr><th scope="row">{esc(first)}</th>{"".join(f"<td>{esc(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    top = "".join(f'<th scope="col">{esc(head)}</th>' if head else "<td></td>" for head in heads)
    whole = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    shown = f'<div class="hp-table-scroll" role="region" tabindex="0" aria-label="{esc(label)}">{whole}</div>'
    return shown if body else ""


def box(lines: Iterable[str], kind: str = "bad", title: str = "") -> str:
    """A box of messages, each markup, which a screen reader says; "" without messages. kind: a colour of style.css."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    head = f"<strong>{esc(title)}</strong>" if title else ""
    role = "alert" if kind == "bad" else "status"
    return f'<div class="hp-problem hp-{kind}" role="{role}">{head}<ul>{items}</ul></div>' if items else ""


def note(text: object, bad: bool = False) -> str:
    """What came of a press of a button, as markup; a screen reader says it. "" without text."""
    kind, role = ("hp-job-note", "alert") if bad else ("hp-job-state", "status")
    return f'<p class="{kind}" role="{role}">{esc(text)}</p>' if text else ""


def region(label: str, markup: str, kind: str = "hp-printed") -> str:
    """Printed text, which scrolls and which the keyboard reaches; "" without text. kind: "hp-log" shows its end."""
    shown = f'<div class="{kind}" tabindex="0" role="region" aria-label="{esc(label)}"><pre>{markup}</pre></div>'
    return shown if markup else ""


def pressed(event: Any, key: str) -> str:
    """A value of the button that was pressed; "" where the browser sent none."""
    value = getattr(event, key, "")
    return value if isinstance(value, str) else ""


@cache
def templates() -> "jinja2.Environment":
    """The templates `ui/**/*.html`. Each value is text, unless it is Markup."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, function in {"note": note, "press": press, "region": region, "table": table}.items():
        found.globals[name] = lambda *values, function=function, **named: Markup(function(*values, **named))
    return found


def part(template: str, macro: str, *values: object, **named: object) -> str:
    """The markup that a macro of a template makes."""
    return str(getattr(templates().get_template(template).module, macro)(*values, **named)).strip()


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    # Raw HTML, images and links stay text: a report quotes log lines, which may contain anything.
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "link", "autolink", "reference"])


def markdown(text: str) -> str:
    """A report's Markdown as HTML; HTML inside it stays text."""
    # A long line scrolls: the keyboard must reach it.
    return str(_parser().render(text)).replace("<pre>", '<pre tabindex="0">')


def duration(seconds: float | None) -> str:
    """A time span for people: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`; `–` for None, NaN, infinite."""
    if seconds is None or not math.isfinite(seconds):
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
    """Training speed: steps per second when a step takes under a second, else seconds per step."""
    if not seconds or seconds != seconds:
        return "–"
    slow = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
    return f"{slow} s/step" if seconds >= 1 else f"{1 / seconds:.1f} steps/s"


def number(value: float | None, digits: int = 4) -> str:
    """A loss or learning rate with `digits` significant digits; `–` for None and NaN."""
    if value is None or value != value:
        return "–"
    return f"{value:.{digits}g}"
