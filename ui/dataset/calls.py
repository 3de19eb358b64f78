"""A call from a draft's scripts: the values come from a browser, so each is checked, and an error is a sentence.

Gradio's browser code returns nothing where a call fails, so the scripts take everything but `ok: true` for "not stored".
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, validate_call

from presets import PresetError
from runs.files import RunError
from ui.dataset import draft

Values = dict[str, Any]
# Text as a browser sends it: half of a character that takes two is replaced, and not refused.
Text = Annotated[str, BeforeValidator(lambda value: draft.plain_text(value) if isinstance(value, str) else value)]
_checked = functools.lru_cache(maxsize=64)(validate_call(config={"strict": True}))


def answer(
    act: Callable[..., Values | None], data: object, listed: Callable[[str, Values], Values] | None = None
) -> Values:
    """{"ok": True, …} with what `act` returns for the draft that `data` names, or {"ok": False, "error", "removed"}.

    Args:
        act: gets the values of `data` that its parameters name, of the types that they have; `draft_id`, and all as `data`.
        listed: what the answer has as "list", from the draft and the values.
    """
    try:
        if not isinstance(data, dict) or not draft.is_id(draft_id := data.get("draft")):
            raise RunError(draft.OUT_OF_DATE)
        known = {**data, "draft_id": draft_id, "data": data}
        found = (
            _checked(act)(**{name: known[name] for name in inspect.signature(act).parameters if name in known}) or {}
        )
        return {"ok": True, **found, **({"list": listed(draft_id, {**data, **found})} if listed else {})}
    except ValidationError:
        return {"ok": False, "error": draft.OUT_OF_DATE}
    except (RunError, PresetError) as error:
        return {"ok": False, "error": str(error), "removed": str(error) == draft.REMOVED}
