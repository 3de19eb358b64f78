"""Step 2 of the page: the drop zone, and the cards with their captions, a page at a time.

One gr.HTML with its own script instead of hundreds of Gradio components, because an image component and a text box
for each of 500 photos make a page that takes a minute to open. The script's calls end here; each takes a dict from the
browser, so each value is tested before it is used, and each answers {"error": …} in words instead of failing.
"""

import shutil
from pathlib import Path
from urllib.parse import quote

from runs.files import RunError
from runs.paths import datasets_dir
from ui import draft
from ui.html import script

PAGE_SIZE = 12


def file_url(path: Path) -> str:
    """Where the browser finds a file of the data folders; relative, so that it works behind a proxy's path."""
    return "gradio_api/file=" + quote(path.as_posix())


def listing(draft_id: str, page: int = 0) -> dict:
    """What the cards show: one page of images and where it is among the pages."""
    images = draft.items(draft_id)
    pages = max(1, -(-len(images) // PAGE_SIZE))
    page = min(max(page, 0), pages - 1)
    return {
        "draft": draft_id,
        "total": len(images),
        "page": page,
        "pages": pages,
        "waiting": draft.waiting(draft_id),
        "items": [
            {
                "file": item.file,
                "width": item.width,
                "height": item.height,
                "caption": item.caption,
                "thumb": file_url(draft.thumb(draft_id, item)),
            }
            for item in images[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        ],
    }


def _text(data: object, key: str) -> str:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise RunError("the page and the server do not fit; reload the page")
    return value


def _page(data: dict) -> int:
    return data["page"] if isinstance(data.get("page"), int) else 0


def _answer(act, data: dict) -> dict:
    """Run one call; errors a person can put right become words, the list comes along."""
    try:
        draft_id = _text(data, "draft")
        extra = act(draft_id) or {}
        return {**extra, "list": listing(draft_id, _page(data))}
    except RunError as error:
        return {"error": str(error)}


def list_images(data: dict) -> dict:
    """One page of cards."""
    return _answer(lambda draft_id: None, data)


def save_caption(data: dict) -> dict:
    """Store what was typed into one card."""
    try:
        draft.set_caption(_text(data, "draft"), _text(data, "file"), _text(data, "text"))
    except RunError as error:
        return {"error": str(error)}
    return {}


def remove_image(data: dict) -> dict:
    """Take one image out."""
    return _answer(lambda draft_id: draft.remove(draft_id, _text(data, "file")), data)


def clear_images(data: dict) -> dict:
    """Take all images out."""
    return _answer(draft.clear, data)


def add_images(data: dict) -> dict:
    """Take uploaded files in: their paths, as the upload answered them."""

    def act(draft_id: str) -> dict:
        room = draft.uploads_dir().resolve()
        paths = [Path(p) for p in data.get("paths", []) if isinstance(p, str)]
        if any(not path.resolve().is_relative_to(room) for path in paths):
            raise RunError("the page and the server do not fit; reload the page")
        added, told = draft.add(draft_id, paths)
        for path in paths:
            shutil.rmtree(path.parent, ignore_errors=True) if path.parent != room else None
        return {"added": added, "told": told}

    return _answer(act, data)


def explain_refusal(data: dict) -> dict:
    """Why an upload did not arrive: the server only said that it failed."""
    names = ", ".join(str(name)[:80] for name in data.get("names", [])[:5])
    size = data.get("bytes") if isinstance(data.get("bytes"), int | float) else 0
    place = datasets_dir()
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return {"error": f"{names}: cannot be stored in {place}: {error.strerror}; fix the folder and drop them again"}
    if free < 2 * size + 50_000_000:
        return {
            "error": f"{names}: the disk is full ({free / 1e6:.0f} MB free in {place}); "
            "free some space and drop them again"
        }
    return {"error": f"{names}: the upload broke off; drop them again"}


def images_view():
    """The component; its events: `change` (images came or went, or another page is shown), `insert` (put the trigger word first)."""
    import gradio as gr

    return gr.HTML(
        value=None,
        html_template="",
        js_on_load=script("images"),
        server_functions=[list_images, save_caption, remove_image, clear_images, add_images, explain_refusal],
        elem_id="images",
        apply_default_css=False,
    )
