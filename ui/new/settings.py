"""The settings of a draft: stored field by field as they are typed, and read by whatever needs them.

A draft holds only the fields that somebody set. The others have the values that suit the base model, this machine and the number
of images, and follow them. So the page, the API, a sweep, a rehearsal and an export need no values from each other.
"""

from collections.abc import Mapping
from typing import Any

import presets
from runs.dataset import shown_per_epoch
from runs.fields import KEYS
from runs.files import RunError
from runs.machine import this_machine
from runs.proposal import Proposal, propose
from ui.dataset import calls, draft
from ui.dataset.draft import OUT_OF_DATE
from ui.new import form

# For events of the page (ui/new/fields.js): before one, the server gets what was typed; after one, the page shows what is stored.
FLUSH = "async (...values) => { await hangproof.flush(); return values; }"
# As FLUSH; the last value is replaced by the ids of the images that are selected on the cards (ui/dataset/images.js).
CHOSEN = "async (...values) => { await hangproof.flush(); return [...values.slice(0, -1), hangproof.selected()]; }"
# The cards show what the server stored of the images, in the other tabs of this browser too.
SHOW_NEW = "() => { hangproof.showNew(); hangproof.tellOthers(); return []; }"
SYNC = "() => { hangproof.sync(); return []; }"
LENGTH = ("repeats", "epochs")  # follow the number of images, until one of them is set


def current(draft_id: str) -> dict[str, Any]:
    """All settings by field. RunError: there is no such draft; PresetError: the user's table of models is invalid."""
    if not draft.is_id(draft_id):
        raise RunError(OUT_OF_DATE)
    stored = draft.form(draft_id)
    model, backend, subject = (form.restored(stored)[key] for key in ("model", "backend", "subject"))
    values = form.restored(stored, {**form.defaults(), **form.model_values(model, backend, subject, this_machine())})
    if not set(LENGTH) <= stored.keys() and (found := proposal(draft_id, values)):
        values = {**values, "repeats": found.repeats, "epochs": found.epochs}
        values |= {key: stored[key] for key in LENGTH if key in stored}
    return values


def reviewed(draft_id: str, ask: bool = False) -> form.Review:
    """The draft's settings and images as they are, parsed and judged. Raises as `current`. ask: as in runs.problems."""
    values, items = current(draft_id), draft.items(draft_id)
    sizes = [item.trained_size for item in items]
    return form.review(values, draft.counts(draft_id), this_machine(values["backend"]), sizes, ask, items)


def proposal(draft_id: str, values: Mapping[str, Any]) -> Proposal | None:
    """Repeats and epochs for the draft's images; folders such as `10_cat` keep their own repeats. None: a field is invalid."""
    batch, accumulation = values["batch_size"], values["gradient_accumulation"]
    if not all(isinstance(one, int | float) and one >= 1 and one == int(one) for one in (batch, accumulation)):
        return None
    counts = draft.counts(draft_id)
    fixed = shown_per_epoch(counts, 0)
    steps = form.subject_of(values["subject"])["steps"]
    return propose(shown_per_epoch(counts, 1) - fixed, fixed, int(batch), int(accumulation), steps)


def follow_images(draft_id: str) -> None:
    """Let repeats and epochs follow the number of images again."""
    draft.save_fields(draft_id, {}, LENGTH)


def save(draft_id: str, changes: Mapping[str, Any], typed: bool = False) -> None:
    """Store fields exactly as they were entered, valid or not; the others stay.

    Args:
        typed: on the page, where a field that is set back to the base model's own value follows the model again.

    Raises:
        RunError: there is no such field, or the disk does not take it; nothing was stored.
    """
    if wrong := sorted(str(key) for key in changes if key not in KEYS):
        raise RunError(f"There is no setting {wrong[0][:100]!r}; use some of {', '.join(KEYS)}")
    if wrong := [key for key, value in changes.items() if not isinstance(value, str | int | float | bool | None)]:
        raise RunError(f"{wrong[0]}: a setting is a text, a number or null")
    with draft.locked(draft_id):
        try:
            more, following = _follow(draft_id, changes, typed)
        except presets.PresetError:  # `current` reports it
            more, following = {}, set[str]()
        draft.save_fields(draft_id, {**more, **changes}, following)


def _follow(draft_id: str, changes: Mapping[str, Any], typed: bool) -> tuple[dict[str, Any], set[str]]:
    """The fields that these changes also set, and those that follow the base model from now on."""
    more, following = {}, set[str]()
    if changes.keys() & {*LENGTH}:
        now = current(draft_id)
        more = {key: now[key] for key in LENGTH}
    if changes.keys() & {"model", *form.MODEL_FIELDS}:
        now = form.restored({**draft.form(draft_id), **changes})
        own = form.model_values(now["model"], now["backend"], now["subject"], this_machine())
        if "model" in changes and "backend" not in changes and now["backend"] != own["backend"]:
            following.add("backend")  # it cannot train the model just chosen
        if typed:
            following |= {key for key in form.MODEL_FIELDS if key in changes and form.same(changes[key], own[key])}
    return more, following


def save_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Call of the page's script: store `changes`; returns `values`, all settings as they are now, and `marks`, what is
    wrong with them by field. starting: whether what is only missing is wrong too."""

    def action(draft_id: str, changes: dict[str, Any], starting: bool = False) -> dict[str, Any]:
        if changes:
            save(draft_id, changes, typed=True)
        try:
            return {"values": current(draft_id), "marks": reviewed(draft_id).marks(starting)}
        except presets.PresetError:  # the plan reports it; what was typed is stored
            return {"values": draft.form(draft_id), "marks": {}}

    return calls.answer(action, data)
