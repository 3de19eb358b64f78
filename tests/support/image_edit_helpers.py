"""Masks of a draft's images, as the page sends and stores them."""

import io

import numpy as np
from PIL import Image

from ui.dataset import draft


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def top_ignored(width: int, height: int) -> bytes:
    """A mask that ignores the upper half."""
    mask = Image.new("L", (width, height), 255)
    mask.paste(0, (0, 0, width, height // 2))
    return png(mask)


def mask_of(draft_id: str, item: draft.Item) -> np.ndarray:
    with Image.open(draft.masks_dir(draft_id) / item.mask) as image:
        return np.asarray(image)
