"""The mask files of a draft: PNGs named by their content. draft_store.py deletes those that no undo step needs.

The name of a mask that ignores the complete image ends in `-all.png`, so that a start can warn without reading every mask.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from runs import masks
from runs.files import atomic_write, explained
from ui.dataset import draft_store

if TYPE_CHECKING:
    from PIL import Image

IGNORES_ALL = "-all.png"


def store(draft_id: str, mask: "Image.Image", place: Path | None = None) -> str:
    """Store a mask. Returns its file name in the draft's folder of masks. Raises RunError: the disk does not take it.

    Args:
        place: where to write it; the caller moves it into the folder of masks. Without it, the caller is in a change of the
            draft: else the mask may be deleted before an image names it.
    """
    content = masks.png(mask)
    kind = IGNORES_ALL if mask.getextrema() == (0, 0) else ".png"
    name = f"{hashlib.sha256(content).hexdigest()[:24]}{kind}"
    target = (place or draft_store.masks_dir(draft_id)) / name
    with explained("store the mask"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file():
            atomic_write(target, content)
    return name
