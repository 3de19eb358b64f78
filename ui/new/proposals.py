"""Repeats and epochs follow the number of images until the user types other values; then one click uses the proposal.

The page's state `proposed` holds the pairs that were proposed last. Fields that have one of them were not typed: a pair may
still be on its way to the page when the next images arrive.
"""

import json
from collections.abc import Mapping
from typing import Any

import gradio as gr

from runs.dataset import shown_per_epoch
from runs.files import RunError
from runs.proposal import Proposal, propose
from ui.dataset import draft
from ui.new import form

FIELDS = ("repeats", "epochs", "batch_size", "gradient_accumulation", "max_train_steps")
KEPT = 8  # pairs
TYPED: tuple[tuple[int, int], ...] = ()  # the state when the fields' values are the user's own
NOTHING = (gr.skip(), gr.skip(), gr.skip(), gr.skip())


def for_images(counts: Mapping[str, int], batch_size: int, accumulation: int) -> Proposal:
    """The proposal for a draft's images by folder; folders such as `10_cat` keep their own repeats."""
    fixed = shown_per_epoch(counts, 0)
    return propose(shown_per_epoch(counts, 1) - fixed, fixed, batch_size, accumulation)


# Sets the fields to an answer only while they have the values that the server saw: a value typed since then stays.
APPLY = f"""(answer, ...values) => {{
  const seen = answer && values.every((value, n) => value === answer.seen[n]);
  return seen ? hangproof.offer({json.dumps(FIELDS[:2])}, values, answer.wanted) : [undefined, undefined];
}}"""


def valid(offers: Any) -> dict[str, tuple[list[Any], int]]:
    """A page's offers, {field: {"from": [values that it may replace], "to": value}}, for draft.save_fields."""
    found: dict[str, tuple[list[Any], int]] = {}
    for key, offer in offers.items() if isinstance(offers, dict) else ():
        before, value = (offer.get(name) for name in ("from", "to")) if isinstance(offer, dict) else (None, None)
        if key in FIELDS[:2] and isinstance(before, list) and isinstance(value, int):
            found[key] = (before, value)
    return found


def follow(draft_id: str | None, proposed: Any, *inputs: Any) -> tuple[Any, ...]:
    """Update (answer for APPLY, state, button) after the images or these fields changed."""
    repeats, epochs, *rest = _proposal(draft_id, proposed, *inputs)
    if isinstance(repeats, int) and isinstance(epochs, int):
        return {"seen": list(inputs[:2]), "wanted": [repeats, epochs]}, *rest
    return None, *rest


def _proposal(draft_id: str | None, proposed: Any, *inputs: Any) -> tuple[Any, ...]:
    """Updates of (repeats, epochs, state, button)."""
    repeats, epochs, batch_size, accumulation, max_steps = inputs
    if not draft.is_id(draft_id) or not _counts(batch_size, accumulation) or str(max_steps or "").strip():
        return *NOTHING[:3], gr.update(visible=False)
    try:
        found = for_images(draft.counts(draft_id), batch_size, accumulation)
        before = _untouched(draft_id) if proposed is None else proposed
    except RunError:
        return NOTHING
    wanted = (found.repeats, found.epochs)
    known = [tuple(pair) for pair in before if tuple(pair) != wanted]
    after = (*known[-KEPT + 1 :], wanted)
    if (repeats, epochs) == wanted:
        return *NOTHING[:2], after, gr.update(visible=False)
    if (repeats, epochs) in known:
        return *wanted, after, gr.update(visible=False)
    label = f"Use proposed: {found.repeats} repeat{'s' * (found.repeats != 1)} × {found.epochs} epoch{'s' * (found.epochs != 1)}"
    return *NOTHING[:2], TYPED, gr.update(visible=found.steps > 0, value=f"{label} = {found.steps:,} steps")


def _untouched(draft_id: str) -> tuple[tuple[Any, Any], ...]:
    """The first values of a draft in which nobody changed them: images can arrive before a new page asks for the first time."""
    values = form.defaults()
    return () if draft.form(draft_id).keys() & set(FIELDS[:2]) else ((values["repeats"], values["epochs"]),)


def use(draft_id: str | None, *inputs: Any) -> tuple[Any, ...]:
    """Set the fields to the proposal."""
    return _proposal(draft_id, [inputs[:2]], *inputs)


def keep() -> tuple[tuple[int, int], ...]:
    """The state that keeps the fields' values."""
    return TYPED


def _counts(*values: Any) -> bool:
    return all(isinstance(value, int | float) and value >= 1 and value == int(value) for value in values)
