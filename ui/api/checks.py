"""What the endpoints share: an answer that a script of the page would get, as a plain value or an error."""

import json
from typing import Any

from runs.files import RunError


def page_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """What a call of a page's script returned, as JSON. RunError: the call failed; with its message."""
    if not answer.get("ok"):
        raise RunError(str(answer.get("error", "")) or "This could not be done")
    plain: dict[str, Any] = json.loads(json.dumps({key: value for key, value in answer.items() if key != "ok"}))
    return plain
