"""The page's scripts and its style sheet, each sent as one file.

They are not part of Gradio's config, because each visit downloads the config before it shows anything. Their addresses
contain a digest of their content, so a browser keeps them until they change.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

if TYPE_CHECKING:
    import gradio as gr

HERE = Path(__file__).parent
PREFIX = "/scripts/"
# The script of each component that has one: files of ui/, in this order. All can use what dom.js and unsaved.js define.
PARTS = {
    "header": ("header", "typed"),
    "images": (
        "vendor/cropper",
        "new/fields",
        "dataset/image_cards",
        "dataset/crop_tool",
        "dataset/mask_painter",
        "dataset/image_editor",
        "dataset/image_drops",
        "dataset/image_tools",
        "dataset/images",
    ),
    "drawn": ("drawn",),
    "run_actions": ("drawn", "run/run_address", "run/stale_folds"),
    "charts": ("vendor/uplot", "run/charts"),
}
# Gradio repeats the rules that it gets for its own container, so that they win over its components' rules.
NESTED = ".gradio-container.gradio-container .contain {\n%s\n}\n"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@cache
def source() -> str:
    """The scripts as one module: a function for each part, which gets what Gradio passes to a component's script."""
    found = [_read("dom.js"), _read("unsaved.js")]
    for name, files in PARTS.items():
        body = "".join(_read(f"{file}.js") for file in files)
        found.append(f"export function {name}({{ element, props, server, trigger, watch }}) {{\n{body}}}\n")
    return "".join(found)


@cache
def style() -> str:
    """The style sheet of the page and those of its parts, with each rule a second time for Gradio's container."""
    parts = sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("*/*.css"))
    rules = "".join(_read(name) for name in ("style.css", *parts))
    return rules + NESTED % re.sub(r"^\.dark\b", ".dark &", rules, flags=re.MULTILINE)


@cache
def _files() -> dict[str, tuple[str, str]]:
    """(text, media type) by address relative to the page."""
    found = {("page", "js"): (source(), "text/javascript"), ("style", "css"): (style(), "text/css")}
    return {
        f"{PREFIX[1:]}{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.{suffix}": (text, kind)
        for (name, suffix), (text, kind) in found.items()
    }


def links() -> str:
    """What the page's head needs to load both."""
    script, sheet = _files()
    return f'<link rel="stylesheet" href="{sheet}"><link rel="modulepreload" href="{script}">'


@cache
def again() -> str:
    """The scripts of the page's head: one reloads when a file does not arrive, one loses no answer."""
    return f"<script>{_read('again.js')}{_read('stream.js')}</script>"


def loader(name: str, *events: str) -> str:
    """The js_on_load of a component that runs a part. Gradio reads there which events the script triggers."""
    listed = f"/* {json.dumps(events)} */" if events else ""
    return (
        f'{listed}import(new URL("{next(iter(_files()))}", document.baseURI))'
        f".then((page) => page.{name}({{ element, props, server, trigger, watch }}), "
        '() => dispatchEvent(new Event("vite:preloadError")));'  # again.js
    )


def drawn(elem_id: str, value: str = "", part: str = "drawn") -> "gr.HTML":
    """A component whose value is markup of the server's. Its event "act" says which of its buttons was pressed,
    "drawn" that it is on the page (drawn.js)."""
    import gradio as gr

    return gr.HTML(value, elem_id=elem_id, js_on_load=loader(part, "act", "drawn"), apply_default_css=False)


def component(
    part: str, elem_id: str, *calls: Callable[[dict[str, Any]], dict[str, Any]], events: tuple[str, ...] = ()
) -> "gr.HTML":
    """A component that a part of the script draws; the script can call `calls` on the server and trigger `events`."""
    import gradio as gr

    return gr.HTML(
        html_template="",
        elem_id=elem_id,
        js_on_load=loader(part, *events),
        server_functions=list(calls),
        apply_default_css=False,
    )


def respond(request: Request) -> Response:
    """The file that a request names."""
    found = _files().get(request.scope["path"].removeprefix("/"))
    if found is None:
        return PlainTextResponse("Hangproof has no such file. Reload the page.", 404)
    return Response(found[0], media_type=found[1], headers={"cache-control": "private, max-age=31536000, immutable"})
