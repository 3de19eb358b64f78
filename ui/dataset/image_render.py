"""An image of a draft as its card shows it: cropped, and grey where its mask ignores it."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from runs import masks
from runs.files import RunError, explained
from runs.pictures import Crop, crop_box, turned

IGNORED = (116, 122, 134)  # the colour towards which the ignored part fades
FADE = 0.72
ID, DIGEST = 24, 12  # characters of an image's id, and of what tells its edits apart


def name_of(image_id: str, turn: int, crop: Crop | None, mask: str | None) -> str:
    """The file name of an edited thumbnail: another one for each crop and mask."""
    edits = hashlib.sha256(json.dumps([crop, mask]).encode()).hexdigest()[:DIGEST]
    return f"{image_id}-{turn}-{edits}.jpg"


def write(large: Path, target: Path, side: int, turn: int, crop: Sequence[float] | None, mask: Path | None) -> None:
    """Write the thumbnail of an image from its large JPEG, which is turned already.

    Args:
        side: most pixels a side. mask: of the image before it is turned; one that cannot be read is left out, because a
            card without its mask is better than no card, and a start reports it.

    Raises:
        RunError: the thumbnail cannot be written.
    """
    from PIL import Image

    with explained("write a thumbnail"):
        with Image.open(large) as image:
            small = image.convert("RGB")
        if mask is not None:
            with contextlib.suppress(RunError):
                small = faded(small, turned(masks.opened(mask), turn))
        if crop is not None:
            small = small.crop(crop_box(small.size, crop))
        small.thumbnail((side, side))
        part = target.with_suffix(".part")
        small.save(part, "JPEG", quality=82)
        part.replace(target)
        for old in target.parent.glob(
            f"{target.name[:ID]}-?-{'?' * DIGEST}.jpg"
        ):  # each stroke of a mask makes a thumbnail
            if old != target:
                old.unlink(missing_ok=True)


def faded(image, mask):
    """The image, without colours and light where the mask is black."""
    from PIL import Image

    grey = Image.blend(image.convert("L").convert("RGB"), Image.new("RGB", image.size, IGNORED), FADE)
    return Image.composite(image, grey, mask.resize(image.size, Image.Resampling.BILINEAR))
