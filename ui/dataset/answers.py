"""What the image functions answer to the browser: a page of cards, and errors as text.

Each function takes a dict from the browser, checks every value before it uses it, and returns {"ok": True, …} or {"ok":
False, "error": message} instead of raising: Gradio's browser code returns nothing where a call fails, so the script
takes everything but `ok: true` for "not stored".
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runs.files import RunError
from ui.dataset import captioning, draft, image_edit, imports, selection, subsets
from ui.dataset.selection import OUT_OF_DATE, Query
from ui.new import settings

PAGE_SIZE = 12
PAGE_SIZES = (12, 48, 120)  # to choose from
MAX_SUBSETS = 200  # that a page gets
NAMED = 20  # names of captions without an image that a page gets


def file_url(path: Path) -> str:
    """URL of a file in the data folders; relative, so that it works behind a proxy with a path prefix."""
    return "gradio_api/file=" + quote(path.as_posix())


def listing(draft_id: str, page: int = 0, query: Query | None = None, size: int = PAGE_SIZE) -> dict[str, Any]:
    """One page of images for the cards, with its page number and the number of pages.

    Args:
        query: which images to show; by default all. size: images of a page.
    """
    query = query or Query()
    images = draft.items(draft_id)
    found = images if query.is_all else query.found(images)
    pages = max(1, -(-len(found) // size))
    page = min(max(page, 0), pages - 1)
    shown = found[page * size : (page + 1) * size]
    texts = draft.waiting(draft_id)
    return {
        "draft": draft_id,
        "total": len(images),
        "found": len(found),
        "filter": query.kind,
        "query": {"how": query.how, "text": query.text, "folder": query.folder},
        "size": size,
        "page": page,
        "pages": pages,
        "waiting": texts[:NAMED],
        "texts": len(texts),
        "history": draft.history(draft_id),
        "subsets": subsets.overview(draft_id)[:MAX_SUBSETS],
        "importing": imports.is_active(draft_id),
        "captioning": captioning.running(draft_id),
        "items": [_card(draft_id, item, _near_names(images, shown)) for item in shown],
    }


def opened(draft_id: str, image_id: str) -> dict[str, Any]:
    """What the large view shows of an image; {"item": None} when it was removed."""
    images = draft.items(draft_id)
    item = next((one for one in images if one.id == image_id), None)
    if item is None:
        return {"item": None}
    card = _card(draft_id, item, _near_names(images, [item]))
    details = image_edit.details(draft_id, item, settings.current(draft_id)["backend"])
    return {"item": card, "url": file_url(draft.large(draft_id, image_id)), **details}


def listed_again(draft_id: str, shown: object) -> dict[str, Any]:
    """The page of images that a browser shows, `shown` as `listing` gave it, read again."""
    data = shown if isinstance(shown, dict) else {}
    size = number_of(data, "size")
    return listing(
        draft_id, number_of(data, "page"), selection.query_of(data), size if size in PAGE_SIZES else PAGE_SIZE
    )


def _near_names(images: list[draft.Item], shown: list[draft.Item]) -> dict[str, str]:
    """The file names of the images that those of a page are nearly identical to."""
    wanted = {item.near for item in shown if item.near}
    return {item.id: item.file for item in images if item.id in wanted} if wanted else {}


def _card(draft_id: str, item: draft.Item, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": item.id,
        "file": item.file,
        "folder": item.folder,
        "caption": item.caption,
        "caption_by": item.caption_by,
        "warnings": item.warnings,
        "near": names.get(item.near, ""),
        **image_edit.fields_of(item),
        "thumb": thumb_url(draft_id, item),
    }


def thumb_url(draft_id: str, item: draft.Item) -> str:
    """URL of an image's thumbnail; "" where its file is gone or damaged, which must not make the whole page unusable."""
    try:
        return file_url(draft.thumb(draft_id, item))
    except RunError:
        return ""


def text_of(data: object, key: str) -> str:
    """A text that the browser sent. Raises RunError: it is none."""
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise RunError(OUT_OF_DATE)
    return value


def texts_of(data: object, key: str) -> list[str]:
    """A list of texts that the browser sent. Raises RunError: it is none."""
    values = data.get(key) if isinstance(data, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RunError(OUT_OF_DATE)
    return values


def number_of(data: Mapping[str, Any], key: str, otherwise: int = 0) -> int:
    """A whole number that the browser sent, else `otherwise`."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else otherwise


def respond(action: Callable[[str], dict[str, Any] | None], data: dict[str, Any]) -> dict[str, Any]:
    """Run one call and add the list of images; a RunError becomes {"ok": False, "error": message}."""
    try:
        draft_id = text_of(data, "draft")
        extra = action(draft_id) or {}
        size = number_of(data, "size")
        page, query = extra.pop("page", number_of(data, "page")), selection.query_of(data)
        shown = listing(draft_id, page, query, size if size in PAGE_SIZES else PAGE_SIZE)
    except RunError as error:
        return {"ok": False, "error": str(error)}
    return {"ok": True, **extra, "list": shown}
