"""The settings of a draft as they are stored: what the page, the API, a sweep, a rehearsal and an export read."""

from typing import Any

from runs.files import RunError
from runs.machine import this_machine, tier_for
from ui.dataset import draft
from ui.dataset.images import OUT_OF_DATE
from ui.new import form


def current(draft_id: str) -> dict[str, Any]:
    """The form's values as they are stored. RunError: there is no such draft."""
    if not draft.is_id(draft_id):
        raise RunError(OUT_OF_DATE)
    return form.restored({"tier": tier_for(this_machine()), **draft.form(draft_id)})
