"""Step 1 of the page: the drop zone and the cards with captions, shown in pages.

One gr.HTML with its own script replaces hundreds of Gradio components, because an image component and a text box for
each of 500 photos make a page that takes a minute to open. `image_action` serves the script's calls: the values come
from a browser, so each is checked, and an error is a sentence.
"""

import functools
import inspect
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, validate_call
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12

from presets import PresetError
from runs.files import RunError, explained, unwritable
from runs.paths import datasets_dir
from ui import scripts
from ui.dataset import captioning, draft, draft_store, image_edit, imports, subsets
from ui.dataset.draft import OUT_OF_DATE, Text
from ui.new import form, script_editor, summary
from ui.served import file_url

if TYPE_CHECKING:
    import gradio as gr

PAGE_SIZE = 12
MAX_SUBSETS = 200  # that a page gets
MAX_SEARCH = 1_000  # characters of the text to search for
NAMED = 20  # names of captions without an image that a page gets


# Which images a page shows: by what is wrong with them, their caption and their subset --------------------------------


FILTERS: dict[str, Callable[[draft.Item], bool]] = {
    "": lambda item: True,
    "no_caption": lambda item: not item.caption.strip(),
    "warned": lambda item: any(code != "no_caption" for code in item.warnings),
    "model": lambda item: item.caption_by == "model",
    "edited": lambda item: bool(item.crop or item.mask or item.weight != 1),
}


@dataclass(frozen=True)
class Query:
    """Which images to show. kind: a key of FILTERS; text: of their captions; folder: a subset, or None."""

    kind: str = ""
    text: str = ""
    folder: str | None = None

    def found(self, items: list[draft.Item]) -> list[draft.Item]:
        """The items to show, in their order; `items` itself for all."""
        if self == Query():
            return items
        of_kind, text = FILTERS.get(self.kind, FILTERS[""]), self.text.casefold()
        some = [item for item in items if of_kind(item) and self.folder in (None, item.folder)]
        return [item for item in some if text in item.caption.casefold()]


def query_of(data: Mapping[str, Any]) -> Query:
    """The query that a browser sent as "query", a table of the fields of Query; unknown values show all images. Raises
    RunError: the text is too long."""
    sent = data.get("query")
    known = {name: sent.get(name) for name in Query.__annotations__} if isinstance(sent, dict) else {}
    query = Query(**{name: draft.plain_text(value) for name, value in known.items() if isinstance(value, str)})
    if len(query.text) > MAX_SEARCH:
        raise RunError(f"The text to search for has {len(query.text)} characters; shorten it to {MAX_SEARCH}")
    return query


# What a page shows ----------------------------------------------------------------------------------------------------


def listing(draft_id: str, page: int = 0, query: Query | None = None) -> dict[str, Any]:
    """One page of images for the cards, with its page number and the number of pages.

    Args:
        query: which images to show; by default all.
    """
    query = query or Query()
    images = draft.items(draft_id)
    found = query.found(images)
    pages = max(1, -(-len(found) // PAGE_SIZE))
    page = min(max(page, 0), pages - 1)
    shown = found[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
    texts = draft.waiting(draft_id)
    return {
        "draft": draft_id,
        "total": len(images),
        "found": len(found),
        "query": vars(query),
        "size": PAGE_SIZE,
        "page": page,
        "pages": pages,
        "waiting": texts[:NAMED],
        "texts": len(texts),
        "history": draft.history(draft_id),
        "done": draft_store.read(draft_id)["done"],  # two steps can have one label
        "subsets": subsets.overview(draft_id)[:MAX_SUBSETS],
        "importing": bool(imports.waiting(draft_id)),
        "captioning": captioning.running(draft_id),
        "items": _cards(draft_id, images, shown),
    }


def opened(draft_id: str, id: str) -> dict[str, Any]:
    """What the large view shows of an image: its card, the mask as base64, and what the trainer does with it; where it
    was removed, {"item": None}."""
    images = draft.items(draft_id)
    item = next((one for one in images if one.id == id), None)
    if item is None:
        return {"item": None}
    (card,) = _cards(draft_id, images, [item])
    note, used = image_edit.mask_note(form.current(draft_id)["backend"])
    return {
        "item": card,
        "url": file_url(draft.large(draft_id, id)),
        "mask": image_edit.shown_mask(draft_id, item),
        "note": note,
        "uses_masks": used,
    }


def listed_again(draft_id: str, shown: object) -> dict[str, Any]:
    """The page of images that a browser shows, `shown` as `listing` gave it, read again."""
    data = shown if isinstance(shown, dict) else {}
    page = data.get("page")
    return listing(draft_id, page if type(page) is int else 0, query_of(data))


def _cards(draft_id: str, images: list[draft.Item], shown: list[draft.Item]) -> list[dict[str, Any]]:
    """What the cards of some `images` show; their `width` and `height` are those that are trained."""
    wanted, found = {item.near for item in shown if item.near}, []
    names = {item.id: item.file for item in images if item.id in wanted} if wanted else {}
    for item in shown:
        width, height = item.trained_size
        size = {"width": width, "height": height, "full": [item.width, item.height]}
        more = {"mask": item.mask or "", "near": names.get(item.near, ""), "thumb": thumb_url(draft_id, item)}
        found.append({**vars(item), **size, **more})
    return found


def thumb_url(draft_id: str, item: draft.Item) -> str:
    """URL of an image's thumbnail; "" where its file is gone or damaged: the page must stay usable."""
    try:
        return file_url(draft.thumb(draft_id, item))
    except RunError:
        return ""


# Calls of the script --------------------------------------------------------------------------------------------------


_checked = functools.lru_cache(maxsize=64)(validate_call(config={"strict": True}))


def image_action(data: dict[str, Any]) -> dict[str, Any]:
    """Do what `action` names, a key of READS or CHANGES, for the draft that `data` names.

    It gets the values of `data` that its parameters name, of the types that they have; `draft_id`, and all as `data`.

    Returns:
        {"ok": True, …} with what it returns, and the list of images after a change; {"ok": False, "error", "removed"}.
        Gradio's browser code returns nothing where a call fails: for the scripts, all but `ok: true` is "not stored".
    """
    acts = {**READS, **CHANGES}
    try:
        name = data.get("action") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in acts or not draft.is_id(draft_id := data.get("draft")):
            raise RunError(OUT_OF_DATE)
        act, known = acts[name], {**data, "draft_id": draft_id, "data": data}
        wanted = {one: known[one] for one in inspect.signature(act).parameters if one in known}
        found = _checked(act)(**wanted) or {}
        return {"ok": True, **found, **({"list": listed_again(draft_id, {**data, **found})} if name in CHANGES else {})}
    except ValidationError:
        return {"ok": False, "error": OUT_OF_DATE}
    except (RunError, PresetError) as error:
        return {"ok": False, "error": str(error), "removed": str(error) == draft.REMOVED}


def save_caption(draft_id: str, id: str, text: Text) -> dict[str, Any]:
    """Store the caption of one image."""
    draft.set_caption(draft_id, id, text)
    return {"history": draft.history(draft_id)}


def undo(draft_id: str, back: bool = True) -> str | None:
    """`draft.undo`. Raises RunError: images are being imported. The next ones would become a new step, after which
    nothing brings back those that were undone."""
    if imports.waiting(draft_id):
        raise RunError("Images are being imported. Undo and redo when that has ended, or cancel the import first")
    return draft.undo(draft_id, back)


class Upload(TypedDict):
    """An uploaded file: the path that the upload returned, and its name with its folders."""

    path: Text
    name: Text


def add_images(draft_id: str, uploads: list[Upload], drop: Text, more: bool = False) -> dict[str, Any]:
    """Add uploaded files. `drop` is the same for all parts of one drop, and `more` says that another part follows."""
    return imports.add(draft_id, [(Path(one["path"]), one["name"]) for one in uploads], drop[:64], more)


def explain_failed_upload(names: list[Text], bytes: float = 0) -> None:
    """Raise a RunError that says why an upload failed: Gradio reports only that it failed."""
    files, folder = ", ".join(name[:80] for name in names[:5]), datasets_dir()
    with explained(f"store {files}"):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    why = unwritable(folder)
    if not why and free < 2 * bytes + 50_000_000:
        why = f"the disk is full ({free / 1e6:.0f} MB free in {folder}); free some space, then drop the files again"
    raise RunError(f"{files}: {why or 'the upload failed; drop the files again'}")


def find_ids(draft_id: str, data: dict, between: list[str] | None = None) -> dict[str, Any]:
    """The ids of the images that are shown on all pages; with `between`, of those from one image to another, in either
    order. Raises RunError: one of the two is not shown."""
    found = [item.id for item in query_of(data).found(draft.items(draft_id))]
    if between is None:
        return {"ids": found}
    places = sorted(found.index(one) for one in between[:3] if one in found)
    if len(places) != 2:
        raise RunError("One of these images is no longer shown; select the images again")
    return {"ids": found[places[0] : places[1] + 1]}


# Name: what it does and returns.
READS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "open": opened,
    "ids": find_ids,
    "save_caption": save_caption,
    "save_settings": summary.save_settings,
    "save_script": script_editor.save,
    "recent_drafts": lambda draft_id: {"drafts": draft.recent(draft_id)},
    "explain_failed_upload": explain_failed_upload,
}
CHANGES: dict[str, Callable[..., dict[str, Any] | None]] = {
    "list_images": lambda: None,
    "remove_images": draft.remove,
    "clear_images": draft.clear,
    "insert_trigger": draft.insert_trigger,
    "undo": lambda draft_id: {"message": undo(draft_id) or "There is nothing to undo."},
    "redo": lambda draft_id: {"message": undo(draft_id, back=False) or "There is nothing to redo."},
    "add_images": add_images,
    **image_edit.EDITS,
}


def images_view() -> "gr.HTML":
    """The component. Events: `show` (settings that changed), `chosen` (another model, VRAM or trainer) and `review`
    (anything changed) are those of ui/new/fields.js; `changed` (images, or which of them are selected) and `checked`
    (images, captions or settings) tell the folds."""
    events = ("show", "chosen", "review", "script", "changed", "checked")
    return scripts.component("images", "images", image_action, events=events)
