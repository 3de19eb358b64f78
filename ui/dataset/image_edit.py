"""Edits of one image of a draft: rotate, crop, mask and weight. Nothing changes the file that was dropped.

Each edit is a field of the image that undo knows; runs/dataset.py applies them when a run's data set is written.
"""

import base64
from collections.abc import Callable, Iterable
from typing import Any

import presets
from runs import masks
from runs.dataset import MAX_WEIGHT
from runs.files import RunError
from runs.pictures import turned, valid_crop
from ui.dataset import draft, draft_images
from ui.dataset.draft import Text


def rotate(draft_id: str, id: str, turns: int | None = None) -> None:
    """Rotate an image by quarter turns clockwise, with its crop and its mask; without `turns` as draft.rotated says.
    Raises RunError: it was removed."""
    draft.change_images(draft_id, [id], lambda _, entry: draft.rotated(entry, turns), "rotation of {}", needed=True)


def crop(draft_id: str, id: str, crop: Any) -> None:
    """Train only a part of an image: left, top, right, bottom as fractions of the image as shown (upright and rotated),
    or None for all of it. Raises RunError: the image was removed, or the crop is not a part of it."""
    part = valid_crop(crop)
    draft.change_images(draft_id, [id], lambda *_: {"crop": part and list(part)}, "crop of {}", needed=True)


def weigh(draft_id: str, ids: list[str], weight: Any) -> None:
    """Repeat images `weight` times as often as the others. RunError: they were removed; not a number from 1 to 10."""
    if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
        raise RunError(f"The weight is a whole number from 1 to {MAX_WEIGHT}")
    draft.change_images(draft_id, ids, lambda *_: {"weight": weight}, "weight of {}", needed=True)


def mask(draft_id: str, id: str, png: str | None = None, turn: int | None = None, name: Text = "") -> None:
    """Set the mask of an image: white is trained, black is ignored. Raises RunError: the image was removed; not a PNG,
    damaged, too large, or of another shape; the mask is unchanged.

    Args:
        png: base64 of a PNG of the image's shape; None, or one that is all white, removes the mask. turn: the rotation of
            the image that the mask was drawn on, in quarter turns; None for that of now. name: of the file, in messages.
    """
    item, drawn = draft.item(draft_id, id), None
    if png is not None:
        try:
            content = base64.b64decode(png, validate=True)
        except ValueError as error:
            raise RunError(draft.OUT_OF_DATE) from error
        turn = item.turn if turn is None else turn % 4
        width, height = item.width, item.height
        shape = (height, width) if (turn - item.turn) % 2 else (width, height)
        drawn = turned(masks.read(content, name[:80] or "The mask", shape), -turn % 4)
        if drawn.getextrema() == (255, 255):
            drawn = None

    def make(_: str, entry: draft.Entry) -> draft.Entry:
        place = draft.masks_dir(draft_id)  # written under the draft's lock: unneeded masks are deleted under it
        return {"mask": None if drawn is None else draft_images.store_mask(drawn, place)}

    draft.change_images(draft_id, [item.id], make, "mask of {}", needed=True)


def shown_mask(draft_id: str, item: draft.Item) -> str:
    """The mask of an image as base64 of a PNG, rotated as the image is shown; "" for none. Raises RunError: it cannot
    be read."""
    if not item.mask:
        return ""
    drawn = turned(masks.opened(draft.masks_dir(draft_id) / item.mask), item.turn)
    return base64.b64encode(masks.png(drawn)).decode()


def start_notes(items: Iterable[draft.Item], backend: str, pairs: bool) -> list[str]:
    """What a start with these images does not do although it was asked for, as sentences. pairs: whether the model
    learns from pairs of images, the control images of which are not edited here."""
    images = list(items)
    notes = [masks.ignored_note(backend, sum(item.mask is not None for item in images))]
    if pairs and (edited := sum(item.crop is not None or item.turn > 0 for item in images)):
        notes.append(
            f"{edited} image{'s are' if edited != 1 else ' is'} cropped or rotated, but the control images are not; "
            "crop and rotate those in the same way"
        )
    if black := [item.file for item in images if (item.mask or "").endswith(draft_images.IGNORES_ALL)]:
        names = ", ".join(black[:3]) + (f" and {len(black) - 3} more" if len(black) > 3 else "")
        notes.append(f"The mask ignores all of {names}: erase a part of it, or remove the image")
    return [note for note in notes if note]


def mask_note(backend: object) -> tuple[str, bool]:
    """What the chosen trainer does with a mask, as a sentence beside it; and whether it uses masks."""
    known = presets.backends()
    name = backend if isinstance(backend, str) and backend in known else presets.defaults()["run"]["backend"]
    if masks.supported(name):
        return "The trainer leaves the marked part out of its loss: the LoRA does not learn it.", True
    note = f"The trainer chosen in step 2, {known[name]['label']}, cannot use masks: it trains the whole image."
    return f"{note} Crop the image instead.", False


# What the large view sends.
EDITS: dict[str, Callable[..., None]] = {"rotate": rotate, "crop": crop, "weight": weigh, "mask": mask}
