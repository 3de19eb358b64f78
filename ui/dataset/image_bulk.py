"""Calls of the images' script: one image's large view and edits, selection, and imports on the server."""

from collections.abc import Callable
from typing import Any

from runs.files import RunError
from ui.dataset import calls, image_edit, imports, selection
from ui.dataset.answers import OUT_OF_DATE, opened, respond, text_of, texts_of
from ui.dataset.selection import query_of

Values = dict[str, Any]


def image_action(data: dict[str, Any]) -> Values:
    """Do what `action` names, a key of READS or CHANGES; the answer of a change has the list of images."""
    name = data.get("action") if isinstance(data, dict) else None
    if isinstance(name, str) and name in CHANGES:
        return respond(lambda draft_id: CHANGES[name](draft_id, data), data)
    if not isinstance(name, str) or name not in READS:
        return {"ok": False, "error": OUT_OF_DATE}
    return calls.answer(READS[name], data)


def _ids(draft_id: str, data: Values) -> Values:
    ends = data.get("between")
    between = tuple(texts_of(data, "between")) if ends is not None else None
    if between is not None and len(between) != 2:
        raise RunError(OUT_OF_DATE)
    return {"ids": selection.ids(draft_id, query_of(data), between)}


def _import_folder(draft_id: str, data: Values) -> Values:
    return {"imports": imports.start_folder(draft_id, text_of(data, "path"))}


# Name: what it does and returns, from the draft and the browser's values.
READS: dict[str, Callable[[str, Values], Values]] = {
    "open": lambda draft_id, data: opened(draft_id, text_of(data, "id")),
    "ids": _ids,
    "imports": lambda draft_id, data: {"imports": imports.status(draft_id)},
    "dismiss_imports": lambda draft_id, data: {"imports": imports.dismiss(draft_id, texts_of(data, "ids"))},
}
CHANGES: dict[str, Callable[[str, Values], Values]] = {
    "edit_one": image_edit.edit,
    "import_folder": _import_folder,
    "cancel_imports": lambda draft_id, data: {"imports": imports.cancel(draft_id)},
}
