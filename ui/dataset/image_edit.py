"""Edits of one image of a draft: rotate, crop, mask and weight. Nothing changes the file that was dropped.

Each edit is a field of the image that undo knows; runs/dataset.py applies them when a run's data set is written.
"""

from collections.abc import Iterable
from typing import Any

import presets
from runs import masks
from runs.dataset import MAX_WEIGHT
from runs.files import RunError, explained
from runs.pictures import opened, turned, valid_crop
from ui.dataset import draft, draft_images

PAINT, PAINT_OPACITY = (217, 0, 255), 0.6  # of what is ignored: a colour that photos hardly have
COLOUR = ("rgb(217, 0, 255)", PAINT_OPACITY)


def rotate(draft_id: str, id: str, turns: int) -> None:
    """Rotate an image by quarter turns clockwise, with its crop and its mask. Raises RunError: it was removed."""
    draft.change_image(draft_id, id, lambda entry: draft.rotated(entry, turns), draft.ROTATION)


def set_upright(draft_id: str, id: str) -> None:
    """Rotate an image as its EXIF data says; by 90° clockwise where it does not say. Raises RunError: it was removed."""
    draft.change_image(draft_id, id, draft.upright, draft.ROTATION)


def crop(draft_id: str, id: str, crop: Any) -> None:
    """Train only a part of an image.

    Args:
        crop: left, top, right, bottom as fractions of the image as shown (upright and rotated); None for the complete image.

    Raises:
        RunError: the image was removed, or the crop is not a part of it.
    """
    part = valid_crop(crop)
    draft.change_image(draft_id, id, lambda _: {"crop": part and list(part)}, "crop of {}")


def weigh(draft_id: str, id: str, weight: Any) -> None:
    """Repeat an image `weight` times as often as the others. Raises RunError: it was removed; not a number from 1 to 10."""
    if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= MAX_WEIGHT:
        raise RunError(f"The weight is a whole number from 1 to {MAX_WEIGHT}")
    draft.change_image(draft_id, id, lambda _: {"weight": weight}, "weight of {}")


def mask(draft_id: str, image_id: str, content: bytes | None, turn: int | None = None, name: str = "The mask") -> None:
    """Set the mask of an image: white is trained, black is ignored.

    Args:
        content: a PNG of the image's shape; None, or one that is all white, removes the mask. turn: the rotation of the
            image that the mask was drawn on, in quarter turns; None for that of now. name: of the file, in messages.

    Raises:
        RunError: the image was removed; not a PNG, damaged, too large, or of another shape; the mask is unchanged.
    """
    item = draft.item(draft_id, image_id)
    drawn = None
    if content is not None:
        turn = item.turn if turn is None else turn % 4
        width, height = item.width, item.height
        shape = (height, width) if (turn - item.turn) % 2 else (width, height)
        drawn = turned(masks.read(content, name, shape), -turn % 4)
        if drawn.getextrema() == (255, 255):
            drawn = None

    def make(entry: draft.Entry) -> draft.Entry:  # under the draft's lock, as the deletion of unneeded masks is
        place = draft.masks_dir(draft_id)
        return {"mask": None if drawn is None else draft_images.store_mask(drawn, place)}

    draft.change_image(draft_id, image_id, make, "mask of {}")


def painted(layers: Iterable[Any]) -> bytes | None:
    """What was painted over an image, in layers of RGBA, as the PNG of a mask; None for nothing."""
    from PIL import ImageChops

    found: Any = None
    for layer in layers:
        alpha = layer.convert("RGBA").getchannel("A")
        found = alpha if found is None else ImageChops.lighter(found, alpha.resize(found.size))
    if found is None or not found.getbbox():
        return None
    return masks.png(found.point(lambda value: 255 - min(255, round(value / PAINT_OPACITY))))


def canvas(draft_id: str, item: draft.Item) -> dict[str, Any]:
    """Files of an image as it is shown, and of its mask as a layer of paint, for gr.ImageEditor. Raises RunError: one
    cannot be read or written."""
    from PIL import Image

    background, layers = draft.large(draft_id, item.id), []
    if item.mask:
        with opened(background, item.file) as large:
            layer = Image.new("RGBA", large.size, PAINT)
        mask = turned(masks.opened(draft.masks_dir(draft_id) / item.mask, item.file), item.turn).resize(layer.size)
        layer.putalpha(mask.point(lambda value: round((255 - value) * PAINT_OPACITY)))
        path = background.with_name(f"{item.id}-paint-{item.turn}-{item.mask}")
        with explained("store the mask"):
            layer.save(path, "PNG")
        layers = [str(path)]
    return {"background": str(background), "layers": layers, "composite": None}


def start_notes(items: Iterable[draft.Item], backend: str, pairs: bool) -> list[str]:
    """What a start with these images does not do although it was asked for, as sentences.

    Args:
        pairs: whether the model learns from pairs of images, the control images of which are not edited here.
    """
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
    note = f"The trainer chosen in step 1, {known[name]['label']}, cannot use masks: it trains the whole image."
    return f"{note} Crop the image instead.", False
