"""The frame of a call from a draft's scripts: the values come from a browser, so each is checked, and an error is a sentence."""

from collections.abc import Callable
from typing import Any

from presets import PresetError
from runs.files import RunError
from ui.dataset import draft
from ui.dataset.selection import OUT_OF_DATE

Values = dict[str, Any]
Action = Callable[[str, Values], Values]


def answer(action: Action, data: object) -> Values:
    """{"ok": True, …} with what the action returns for the draft that `data` names, or {"ok": False, "error"}."""
    try:
        if not isinstance(data, dict) or not draft.is_id(draft_id := data.get("draft")):
            raise RunError(OUT_OF_DATE)
        return {"ok": True, **action(draft_id, data)}
    except (RunError, PresetError) as error:
        return {"ok": False, "error": str(error)}
