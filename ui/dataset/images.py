"""Step 2 of the page: the drop zone and the cards with captions, shown in pages.

One gr.HTML with its own script replaces hundreds of Gradio components, because an image component and a text box for each
of 500 photos make a page that takes a minute to open. The functions here serve the script's calls. Each takes a dict from
the browser, checks every value before it uses it, and returns {"ok": True, …} or {"ok": False, "error": message} instead of
raising: Gradio's browser code returns nothing where a call fails, so the script takes everything but `ok: true` for "not stored".
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from runs.files import RunError
from runs.paths import datasets_dir
from ui import scripts
from ui.dataset import draft
from ui.html import duration

if TYPE_CHECKING:
    import gradio as gr

PAGE_SIZE = 12
RECENT = 8  # drafts to choose from
OUT_OF_DATE = "This page is out of date; reload it"
FILTERS: dict[str, Callable[[draft.Item], bool]] = {
    "": lambda item: True,
    "no_caption": lambda item: not item.caption.strip(),
    "warned": lambda item: any(code != "no_caption" for code in item.warnings),
}


def file_url(path: Path) -> str:
    """URL of a file in the data folders; relative, so that it works behind a proxy with a path prefix."""
    return "gradio_api/file=" + quote(path.as_posix())


def listing(draft_id: str, page: int = 0, shown: str = "") -> dict[str, Any]:
    """One page of images for the cards, with its page number and the number of pages.

    Args:
        shown: a key of FILTERS.
    """
    images = draft.items(draft_id)
    found = [item for item in images if FILTERS[shown](item)]
    names = {item.id: item.file for item in images}
    pages = max(1, -(-len(found) // PAGE_SIZE))
    page = min(max(page, 0), pages - 1)
    return {
        "draft": draft_id,
        "total": len(images),
        "found": len(found),
        "filter": shown,
        "page": page,
        "pages": pages,
        "waiting": draft.waiting(draft_id),
        "history": draft.history(draft_id),
        "items": [_card(draft_id, item, names) for item in found[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]],
    }


def _card(draft_id: str, item: draft.Item, names: dict[str, str]) -> dict[str, Any]:
    near = [code.partition(":")[2] for code in item.warnings if code.startswith("near:")]
    return {
        "id": item.id,
        "file": item.file,
        "folder": item.folder,
        "width": item.width,
        "height": item.height,
        "caption": item.caption,
        "warnings": item.warnings,
        "near": {other: names.get(other, "") for other in near},
        "thumb": file_url(draft.thumb(draft_id, item)),
    }


def _text(data: object, key: str) -> str:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise RunError(OUT_OF_DATE)
    return value


def _texts(data: dict[str, Any], key: str) -> list[str]:
    values = data.get(key) if isinstance(data, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RunError(OUT_OF_DATE)
    return values


def _page(data: dict[str, Any]) -> int:
    return data["page"] if isinstance(data.get("page"), int) else 0


def _filter(data: dict[str, Any]) -> str:
    return data["filter"] if data.get("filter") in FILTERS else ""


def _respond(action: Callable[[str], dict[str, Any] | None], data: dict[str, Any]) -> dict[str, Any]:
    """Run one call and add the list of images; a RunError becomes {"ok": False, "error": message}."""
    try:
        draft_id = _text(data, "draft")
        extra = action(draft_id) or {}
        shown = listing(draft_id, extra.pop("page", _page(data)), _filter(data))
    except RunError as error:
        return {"ok": False, "error": str(error)}
    return {"ok": True, **extra, "list": shown}


def list_images(data: dict[str, Any]) -> dict[str, Any]:
    """One page of cards."""
    return _respond(lambda draft_id: None, data)


def save_caption(data: dict[str, Any]) -> dict[str, Any]:
    """Store the caption of one image; `removed` says that the image no longer exists."""
    try:
        draft_id, image_id = _text(data, "draft"), _text(data, "id")
        draft.set_caption(draft_id, image_id, _text(data, "text"))
        return {"ok": True, "history": draft.history(draft_id)}
    except RunError as error:
        return {"ok": False, "error": str(error), "removed": _is_removed(data)}


def _is_removed(data: dict[str, Any]) -> bool:
    try:
        return all(item.id != data.get("id") for item in draft.items(_text(data, "draft")))
    except RunError:
        return False


def remove_images(data: dict[str, Any]) -> dict[str, Any]:
    """Remove images by id."""
    return _respond(lambda draft_id: draft.remove(draft_id, _texts(data, "ids")), data)


def clear_images(data: dict[str, Any]) -> dict[str, Any]:
    """Remove all images."""
    return _respond(draft.clear, data)


def fix_image(data: dict[str, Any]) -> dict[str, Any]:
    """Fix what a warning on a card says."""
    return _respond(lambda draft_id: draft.fix(draft_id, _text(data, "id"), _text(data, "code")), data)


def move_image(data: dict[str, Any]) -> dict[str, Any]:
    """Move an image one place (`step`), or before or after another one (`beside`, `after`); shows the page it is then on."""

    def action(draft_id: str) -> dict[str, Any]:
        image_id, order = _text(data, "id"), [item.id for item in draft.items(draft_id)]
        if image_id not in order:
            raise RunError("This image was removed in another tab")
        old = order.index(image_id)
        order.remove(image_id)
        if isinstance(data.get("step"), int):
            new = old + data["step"]
        else:
            beside = _text(data, "beside")
            new = order.index(beside) + bool(data.get("after")) if beside in order else old
        new = min(max(new, 0), len(order))
        draft.move(draft_id, image_id, order[new] if new < len(order) else None)
        return {"page": new // PAGE_SIZE}

    return _respond(action, data)


def replace_text(data: dict[str, Any]) -> dict[str, Any]:
    """Replace a text in all captions."""

    def action(draft_id: str) -> dict[str, Any]:
        find, replacement = _text(data, "find"), _text(data, "replacement")
        return {"changed": draft.replace(draft_id, find, replacement)}

    return _respond(action, data)


def undo(data: dict[str, Any]) -> dict[str, Any]:
    """Undo the last change of the images or captions; `message` says what was undone."""
    return _respond(lambda draft_id: {"message": draft.undo(draft_id) or "There is nothing to undo."}, data)


def redo(data: dict[str, Any]) -> dict[str, Any]:
    """Redo what was undone last."""
    return _respond(lambda draft_id: {"message": draft.redo(draft_id) or "There is nothing to redo."}, data)


def add_images(data: dict[str, Any]) -> dict[str, Any]:
    """Add uploaded files.

    `uploads` holds for each the path that the upload returned and the file's name with its folders; `drop` is the same for
    all parts of one drop, and `more` says that another part follows.
    """

    def action(draft_id: str) -> dict[str, Any]:
        uploads = draft.uploads_dir().resolve()
        given = data.get("uploads")
        if not isinstance(given, list):
            raise RunError(OUT_OF_DATE)
        files = [(Path(_text(one, "path")), _text(one, "name")) for one in given]
        try:
            outside = any(not path.resolve().is_relative_to(uploads) for path, _ in files)
        except ValueError as error:  # a path that no system can have
            raise RunError(OUT_OF_DATE) from error
        if outside:
            raise RunError(OUT_OF_DATE)
        added, messages = draft.add(draft_id, files, _text(data, "drop")[:64], bool(data.get("more")))
        return {"added": added, "messages": messages}

    return _respond(action, data)


def enlarge_image(data: dict[str, Any]) -> dict[str, Any]:
    """URL of an image in a size for the whole window."""
    try:
        return {"ok": True, "url": file_url(draft.large(_text(data, "draft"), _text(data, "id")))}
    except RunError as error:
        return {"ok": False, "error": str(error)}


def recent_drafts(data: dict[str, Any]) -> dict[str, Any]:
    """The drafts that were used last, except this one, so that another browser can continue one."""
    own, found = data.get("draft") if isinstance(data, dict) else None, list[dict[str, Any]]()
    folders = [path.parent for path in (datasets_dir() / ".drafts").glob("*/draft.json")]
    for folder in sorted(folders, key=lambda path: path.joinpath("draft.json").stat().st_mtime, reverse=True):
        if len(found) < RECENT and draft.is_id(folder.name) and folder.name != own:
            try:
                images, name = len(draft.items(folder.name)), draft.form(folder.name).get("name", "")
            except RunError:
                continue  # a file that cannot be read is no draft to continue
            if images or name:
                age = duration(time.time() - folder.joinpath("draft.json").stat().st_mtime)
                found.append({"id": folder.name, "name": name, "images": images, "age": f"{age} ago"})
    return {"ok": True, "drafts": found}


def explain_failed_upload(data: dict[str, Any]) -> dict[str, Any]:
    """Why an upload failed: Gradio reports only that it failed."""
    try:
        names, size = ", ".join(draft.plain_text(name)[:80] for name in _texts(data, "names")[:5]), data.get("bytes")
    except RunError as problem:
        return {"ok": False, "error": str(problem)}
    size = size if isinstance(size, int | float) else 0
    folder = datasets_dir()
    error = f"{names}: the upload failed; drop the files again"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 2 * size + 50_000_000:
            error = (
                f"{names}: the disk is full ({free / 1e6:.0f} MB free in {folder}); "
                "free some space, then drop the files again"
            )
    except OSError as problem:
        error = f"{names}: cannot be stored in {folder}: {problem.strerror}; fix the folder, then drop the files again"
    return {"ok": False, "error": error}


def images_view() -> "gr.HTML":
    """The component. Events: `change` (images or page changed) and `insert` (add the trigger word to all captions)."""
    import gradio as gr

    return gr.HTML(
        value=None,
        html_template="",
        js_on_load=scripts.loader("images", "insert"),
        server_functions=[
            list_images,
            save_caption,
            remove_images,
            clear_images,
            fix_image,
            move_image,
            replace_text,
            undo,
            redo,
            add_images,
            enlarge_image,
            recent_drafts,
            explain_failed_upload,
        ],
        elem_id="images",
        apply_default_css=False,
    )
