"""One image of a draft: checked and measured when it is dropped, its thumbnail, and the warnings on its card.

A dropped file is copied and never moved or deleted: Gradio stores an upload in a folder named after its content, so two
drops of one file share a path, and Gradio may write to that path again.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import presets
from runs.dataset import DAMAGE, EXIF_ORIENTATION, USABLE, decoded_size, eight_bits, is_image_name, opened, turned
from runs.files import RunError

THUMB_SIDE = 480  # pixels: a card's width on a high-density screen
LARGE_SIDE = 1600
EXIF_IFD, EXIF_WIDTH, EXIF_HEIGHT = 0x8769, 0xA002, 0xA003
TONES = 12  # values of a hash after its 64 bits: the colours of four quarters
Entry = dict[str, Any]


def image_id(folder: str, sha256: str) -> str:
    """The id of an image: its folder and its content."""
    return hashlib.sha256(f"{folder}\0{sha256}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


def measured(upload: Path, name: str, copy: Path, thumb: Path) -> Entry:
    """Copy a dropped image to `copy`, decode it completely, write its thumbnail and measure it.

    Args:
        name: the name in messages.

    Returns:
        width, height (pixels, after EXIF rotation), sha256, bytes, hash (for nearly identical images), upright (quarter
        turns clockwise that undo an EXIF rotation of pixels that are upright already; else 0).

    Raises:
        RunError: it is not an image, damaged or too large; nothing is left of the copy and the thumbnail then.
        OSError: a file cannot be written.
    """
    if not is_image_name(Path(name)):
        raise RunError(f"{name}: not an image file; use {USABLE}, a ZIP of these, or .txt for captions")
    limit_mb = presets.defaults()["images"]["max_file_mb"]
    try:
        size = upload.stat().st_size
    except FileNotFoundError as error:
        raise RunError(f"{name}: the upload is gone; drop the file again") from error
    if size > limit_mb * 1_000_000:
        raise RunError(f"{name}: {size / 1e6:.0f} MB is too large; export it with at most {limit_mb} MB")
    try:
        shutil.copyfile(upload, copy)
        width, height = decoded_size(copy, name)
        with opened(copy, name) as image:
            upright = _upright(image)
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        write_thumb(copy, thumb)
        hashed = _hash(thumb)
    except (RunError, OSError):
        copy.unlink(missing_ok=True)
        thumb.unlink(missing_ok=True)
        raise
    return {"width": width, "height": height, "sha256": digest, "bytes": size, "hash": hashed, "upright": upright}


def _upright(image: Any) -> int:
    """The turn that undoes an EXIF rotation where the tags of the camera contradict the stored size.

    A camera stores its sensor's width and height in EXIF. A program that rotates the pixels but keeps the orientation tag
    leaves a file that every viewer rotates a second time.
    """
    try:
        turn = {6: 3, 8: 1}.get(image.getexif().get(EXIF_ORIENTATION), 0)
        camera = image.getexif().get_ifd(EXIF_IFD)
        size = (camera.get(EXIF_WIDTH), camera.get(EXIF_HEIGHT))
    except DAMAGE:
        return 0
    return turn if size[0] != size[1] and size == (image.height, image.width) else 0


def write_thumb(path: Path, target: Path, turn: int = 0, side: int = THUMB_SIDE) -> None:
    """Write a JPEG of at most `side` pixels: upright, on white, and after `turn` quarter turns clockwise."""
    from PIL import Image, ImageOps

    target.parent.mkdir(parents=True, exist_ok=True)
    with opened(path) as image:
        if image.format == "JPEG":
            image.draft(
                "RGB", (side, side)
            )  # decodes at a fraction of the size; for HEIC it would use a stored preview
        small = ImageOps.exif_transpose(image)
        if small.has_transparency_data:
            small = small.convert("RGBA")
            small.thumbnail((side, side))
            small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
        else:
            small = (eight_bits(small) if small.mode.startswith(("I", "F")) else small).convert("RGB")
            small.thumbnail((side, side))
        small = small.convert("RGB")
        turned(small, turn).save(target, "JPEG", quality=82)


def _hash(thumb: Path) -> str:
    """64 bits of dHash (is each pixel of 9 × 8 brighter than its neighbour?) and the colours of four quarters, as hex."""
    from PIL import Image

    with Image.open(thumb) as small:
        grey = small.convert("L").resize((9, 8), Image.Resampling.BOX).tobytes()
        quarters = small.resize((2, 2), Image.Resampling.BOX).tobytes()
    bits = 0
    for row in range(8):
        for column in range(8):
            bits = bits << 1 | (grey[row * 9 + column] > grey[row * 9 + column + 1])
    return f"{bits:016x}{quarters.hex()}"


class Near:
    """Which images of a draft are nearly identical to an earlier one. It keeps what it found, and compares only new images."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.keys: list[str] = []
        self.found: dict[str, str] = {}
        self.first: list[str] = []  # the images that are unlike all before them, and their hashes
        self.bits: Any = np.zeros(0, np.uint64)
        self.tones: Any = np.zeros((0, TONES), np.int16)

    def of(self, images: Mapping[str, Entry]) -> dict[str, str]:
        """For each image that is nearly identical to an earlier one, the id of the first such."""
        keys = list(images)
        if keys[: len(self.keys)] != self.keys:
            self._reset()
        limits = presets.defaults()["images"]
        for key in keys[len(self.keys) :]:
            if images[key]["hash"]:
                self._add(key, images[key]["hash"], limits["near_bits"], limits["near_tone"])
        self.keys = keys
        return self.found

    def _add(self, key: str, hashed: str, most_bits: int, most_tone: int) -> None:
        bits, tone = np.uint64(int(hashed[:16], 16)), np.frombuffer(bytes.fromhex(hashed[16:]), np.uint8)
        count = len(self.first)
        like = np.flatnonzero(np.bitwise_count(self.bits[:count] ^ bits) <= most_bits)
        if like.size:
            like = like[(np.abs(self.tones[like] - tone) <= most_tone).all(axis=1)]
        if like.size:
            self.found[key] = self.first[like[0]]
            return
        if count == len(self.bits):
            more = max(64, count)
            self.bits = np.concatenate([self.bits, np.zeros(more, np.uint64)])
            self.tones = np.concatenate([self.tones, np.zeros((more, TONES), np.int16)])
        self.bits[count], self.tones[count] = bits, tone
        self.first.append(key)


def warnings_of(entry: Entry, near: str | None, small_side: int) -> tuple[str, ...]:
    """The codes of an image's warnings: "small", "sideways", "near:<id>", "no_caption"."""
    checks = {
        "small": min(entry["width"], entry["height"]) < small_side,
        "sideways": entry["upright"] and not entry["turn"],
        f"near:{near}": near,
        "no_caption": not entry["caption"].strip(),
    }
    return tuple(code for code, applies in checks.items() if applies)
