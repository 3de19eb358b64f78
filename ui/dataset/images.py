"""Step 2 of the page: the drop zone and the cards with captions, shown in pages.

One gr.HTML with its own script replaces hundreds of Gradio components, because an image component and a text box for each
of 500 photos make a page that takes a minute to open. The functions here serve the script's calls; answers.py says how.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs.archives import is_zip
from runs.files import RunError
from runs.paths import datasets_dir
from ui import scripts
from ui.dataset import draft, draft_store, imports
from ui.dataset.answers import (
    OUT_OF_DATE,
    PAGE_SIZE,
    PAGE_SIZES,
    file_url,
    listed_again,
    listing,
    number_of,
    respond,
    text_of,
    texts_of,
)
from ui.dataset.image_bulk import image_action
from ui.html import duration

if TYPE_CHECKING:
    import gradio as gr

RECENT = 8  # drafts to choose from
__all__ = ["OUT_OF_DATE", "PAGE_SIZE", "file_url", "images_view", "listed_again", "listing"]


def list_images(data: dict[str, Any]) -> dict[str, Any]:
    """One page of cards."""
    return respond(lambda draft_id: None, data)


def save_caption(data: dict[str, Any]) -> dict[str, Any]:
    """Store the caption of one image; `removed` says that the image no longer exists."""
    try:
        draft_id, image_id = text_of(data, "draft"), text_of(data, "id")
        draft.set_caption(draft_id, image_id, text_of(data, "text"))
        return {"ok": True, "history": draft.history(draft_id)}
    except RunError as error:
        return {"ok": False, "error": str(error), "removed": _is_removed(data)}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_removed(data: dict[str, Any]) -> bool:
    try:
        return text_of(data, "id") not in draft_store.read(text_of(data, "draft"))["images"]
    except RunError:
        return False


def remove_images(data: dict[str, Any]) -> dict[str, Any]:
    """Remove images by id."""
    return respond(lambda draft_id: draft.remove(draft_id, texts_of(data, "ids")), data)


def clear_images(data: dict[str, Any]) -> dict[str, Any]:
    """Remove all images."""
    return respond(draft.clear, data)


def fix_image(data: dict[str, Any]) -> dict[str, Any]:
    """Fix what a warning on a card says."""
    return respond(lambda draft_id: draft.fix(draft_id, text_of(data, "id"), text_of(data, "code")), data)


def move_image(data: dict[str, Any]) -> dict[str, Any]:
    """Move an image one place (`step`), or before or after another one (`beside`, `after`); shows the page it is then on."""

    def action(draft_id: str) -> dict[str, Any]:
        image_id, order = text_of(data, "id"), [item.id for item in draft.items(draft_id)]
        if image_id not in order:
            raise RunError("This image was removed in another tab")
        old = order.index(image_id)
        order.remove(image_id)
        if isinstance(data.get("step"), int):
            new = old + data["step"]
        else:
            beside = text_of(data, "beside")
            new = order.index(beside) + bool(data.get("after")) if beside in order else old
        new = min(max(new, 0), len(order))
        draft.move(draft_id, image_id, order[new] if new < len(order) else None)
        size = number_of(data, "size")
        return {"page": new // (size if size in PAGE_SIZES else PAGE_SIZE)}

    return respond(action, data)


def undo(data: dict[str, Any]) -> dict[str, Any]:
    """Undo the last change of the images or captions; `message` says what was undone."""
    return respond(lambda draft_id: {"message": draft.undo(draft_id) or "There is nothing to undo."}, data)


def redo(data: dict[str, Any]) -> dict[str, Any]:
    """Redo what was undone last."""
    return respond(lambda draft_id: {"message": draft.redo(draft_id) or "There is nothing to redo."}, data)


def add_images(data: dict[str, Any]) -> dict[str, Any]:
    """Add uploaded files.

    `uploads` holds for each the path that the upload returned and the file's name with its folders; `drop` is the same
    for all parts of one drop, and `more` says that another part follows.
    """

    def action(draft_id: str) -> dict[str, Any]:
        given = data.get("uploads")
        if not isinstance(given, list):
            raise RunError(OUT_OF_DATE)
        files = [(Path(text_of(one, "path")), text_of(one, "name")) for one in given]
        return add_uploads(draft_id, files, text_of(data, "drop")[:64], bool(data.get("more")))

    return respond(action, data)


def add_uploads(draft_id: str, files: list[tuple[Path, str]], drop: str, more: bool = False) -> dict[str, Any]:
    """Add uploaded files, (path, name with its folders) each, as `add_images` says: {"added", "messages"}."""
    uploads = draft.uploads_dir().resolve()
    try:
        outside = any(not path.resolve().is_relative_to(uploads) for path, _ in files)
    except ValueError as error:  # a path that no system can have
        raise RunError(OUT_OF_DATE) from error
    if outside:
        raise RunError(OUT_OF_DATE)
    if any(is_zip(name) and _size(path) > imports.LARGE_ZIP_BYTES for path, name in files):
        imports.start_uploads(draft_id, files, drop)
        return {"added": 0, "messages": []}
    added, messages = draft.add(draft_id, files, drop, more)
    return {"added": added, "messages": messages}


def recent_drafts(data: dict[str, Any]) -> dict[str, Any]:
    """The drafts that were used last, except this one, so that another browser can continue one."""
    own, found = data.get("draft") if isinstance(data, dict) else None, list[dict[str, Any]]()
    folders = [path for path in (datasets_dir() / ".drafts").glob("*") if draft.is_id(path.name)]
    used = {folder: draft_store.last_used(*draft_store.files_of(folder)) for folder in folders}
    for folder in sorted((one for one in folders if used[one]), key=lambda one: used[one], reverse=True):
        if len(found) < RECENT and folder.name != own:
            try:
                state = draft_store.read(folder.name)
            except RunError:
                continue  # a file that cannot be read is no draft to continue
            images, name = len(state["images"]), state["form"].get("name", "")
            if images or name:
                age = duration(time.time() - used[folder])
                found.append({"id": folder.name, "name": name, "images": images, "age": f"{age} ago"})
    return {"ok": True, "drafts": found}


def explain_failed_upload(data: dict[str, Any]) -> dict[str, Any]:
    """Why an upload failed: Gradio reports only that it failed."""
    try:
        names, size = ", ".join(draft.plain_text(name)[:80] for name in texts_of(data, "names")[:5]), data.get("bytes")
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


def images_view(more: Sequence[Callable[[dict[str, Any]], dict[str, Any]]] = ()) -> "gr.HTML":
    """The component. Events: `insert` (add the trigger word to all captions); `show` (settings that changed), `chosen`
    (another model, VRAM or trainer) and `review` (anything changed) are those of ui/new/fields.js; `changed` (images,
    or which of them are selected) is that of image_tools.js.

    Args:
        more: calls of the other parts of its script.
    """
    return scripts.component(
        "images",
        "images",
        list_images,
        save_caption,
        remove_images,
        clear_images,
        fix_image,
        move_image,
        undo,
        redo,
        add_images,
        recent_drafts,
        explain_failed_upload,
        image_action,
        *more,
        events=("insert", "show", "chosen", "review", "script", "changed"),
    )
