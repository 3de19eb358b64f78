"""Image files: opened within limits, made the same for every trainer, turned and cropped.

Every decoder that sees a dropped file is named here. An image with EXIF rotation, transparency, several frames or
another colour mode is decoded and changed, because sd-scripts and diffusers treat it differently.
"""

import contextlib
import errno
import functools
import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs.files import RunError

if TYPE_CHECKING:
    from PIL import Image

KEPT = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "BMP": ".bmp"}
PHOTO_FORMATS = ("JPEG", "MPO", "HEIF", "AVIF")  # saved again as JPEG, the others as PNG
# Only these decoders see a dropped file. Of the others, EPS starts a program, and ICO decodes what it does not measure.
FORMATS = (*KEPT, "GIF", "TIFF", "AVIF", "HEIF")
IMAGE_SUFFIXES = {*KEPT.values(), ".jpeg", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".svg", ".ico"}
USABLE = "PNG, JPEG, WebP, HEIC, AVIF, BMP, GIF or TIFF"
EXIF_ORIENTATION = 0x0112
# A decoder goes through the whole picture for each scan of a JPEG: a file of 1 MB can take it hours. Most files have one to ten.
SCAN, MAX_SCANS = b"\xff\xda\x00", 200
MAX_WORKERS = 8
# Pillow's decoders raise these on damaged data; they have no common class. It turns some of them into SyntaxError for
# the first frame of a file only (PIL/ImageFile.py): a later frame of a TIFF raises TypeError and KeyError.
DAMAGE = (OSError, SyntaxError, TypeError, LookupError, ValueError, EOFError, RuntimeError, struct.error, zlib.error)


def is_image_name(path: Path) -> bool:
    """Whether the file's suffix is that of an image."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def workers() -> int:
    """The number of images that are decoded at the same time: each can take 300 MB of memory."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_WORKERS)


@functools.cache
def add_heif() -> None:
    """Let Pillow read HEIC and HEIF, the format of phones."""
    from pillow_heif import register_heif_opener

    register_heif_opener(thumbnails=False)


@contextlib.contextmanager
def opened(path: Path | io.BytesIO, name: str, formats: Sequence[str] = FORMATS) -> Iterator["Image.Image"]:
    """An image file within the limits of presets/defaults.toml, not decoded yet. name: in messages.

    Raises:
        RunError: it is not an image, too large, or the block finds that it is damaged; the message names the file.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(path, Path) and path.exists() and not path.is_file():  # a pipe would be read for ever
        raise RunError(f"{name}: not a regular file; remove {path}")
    add_heif()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit is lower than Pillow's; damaged EXIF data is no news
            with Image.open(path, formats=formats) as image:
                width, height = image.size
                limits = presets.defaults()["images"]
                if max(image.size) > limits["max_side"] or width * height > limits["max_megapixels"] * 1_000_000:
                    raise RunError(f"{name}: {width} × {height} pixels is too large; {_limits()}")
                if image.format in ("JPEG", "MPO") and _scans(image) > MAX_SCANS:
                    raise RunError(f"{name}: a JPEG with more than {MAX_SCANS} scans takes too long; export it again")
                yield image
    except UnidentifiedImageError as error:
        usable = "JPEG or PNG" if len(formats) > 1 else formats[0]
        raise RunError(f"{name}: Not a readable image. Export it as {usable}.") from error
    except Image.DecompressionBombError as error:
        raise RunError(f"{name}: The image is too large; {_limits()}") from error
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a place outside a damaged file
            raise RunError(f"{name}: {error.strerror}; check the file {path}") from error
        raise RunError(f"{name}: the image is damaged ({error}); export it again or remove it") from error


def _scans(image: "Image.Image") -> int:
    """How many scans the file of an image has; it is left at its start."""
    image.fp.seek(0)
    found = sum(block.count(SCAN) for block in iter(functools.partial(image.fp.read, 1 << 20), b""))
    image.fp.seek(0)
    return found


Crop = Sequence[float]  # left, top, right, bottom as fractions of the image's width and height


def decoded(path: Path, name="", turn=0, crop: Crop | None = None, mask: "Image.Image | None" = None, masked=False):
    """The decoded image, upright and opaque; the suffix to save it with; what was changed ("" if nothing).

    Args:
        name: in messages; by default that of the file. turn: quarter turns clockwise. crop: the part to keep of the
            turned image. mask: of the image before it is turned; it becomes the alpha channel (runs/masks.py). masked:
            the alpha channel is a mask already, so the colours under it stay.

    Raises:
        RunError: as `opened`.
    """
    from PIL import Image

    with opened(path, name or path.name) as image:
        suffix = ".jpg" if image.format in PHOTO_FORMATS else KEPT.get(image.format, ".png")
        image, reasons = (image.convert("RGB"), ["mask apart"] * (mask is None)) if masked else _normal(image)
        if mask is not None:
            image, suffix = image.convert("RGB"), ".png"
            image.putalpha(mask.resize(image.size, Image.Resampling.BILINEAR))  # the colours under it stay
            reasons.append("mask added")
        if turn % 4:
            image = turned(image, turn)
            reasons.append("rotated")
        if crop is not None and (box := crop_box(image.size, crop)) != (0, 0, *image.size):
            image = image.crop(box)
            reasons.append("cropped")
        return image, ".png" if reasons and suffix != ".jpg" else suffix, ", ".join(reasons)


def crop_box(size: tuple[int, int], crop: Crop) -> tuple[int, int, int, int]:
    """The crop in pixels: left, top, right, bottom; at least one pixel a side, all inside the image."""
    (width, height), (left, top, right, bottom) = size, crop
    x, y = min(round(left * width), width - 1), min(round(top * height), height - 1)
    return x, y, max(x + 1, min(round(right * width), width)), max(y + 1, min(round(bottom * height), height))


def cropped_size(size: tuple[int, int], crop: Crop | None) -> tuple[int, int]:
    """Width and height of an image after a crop."""
    left, top, right, bottom = crop_box(size, crop or (0, 0, 1, 1))
    return right - left, bottom - top


def valid_crop(crop: object) -> tuple[float, float, float, float] | None:
    """A crop from a browser or a file; None for none and for the complete image.

    Raises:
        RunError: it is not four numbers from 0 to 1 that enclose an area.
    """
    if crop is None:
        return None
    if not isinstance(crop, list | tuple) or len(crop) != 4 or any(type(one) not in (int, float) for one in crop):
        raise RunError("A crop is four numbers from 0 to 1: left, top, right, bottom")
    left, top, right, bottom = (round(one, 6) for one in crop)
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise RunError("The crop has no area inside the image; draw it again")
    return None if (left, top, right, bottom) == (0, 0, 1, 1) else (left, top, right, bottom)


def turned_crop(crop: Crop | None, turn: int) -> tuple[float, float, float, float] | None:
    """The crop of the same pixels after the image was turned by quarter turns clockwise."""
    if crop is None:
        return None
    left, top, right, bottom = crop
    for _ in range(turn % 4):
        left, top, right, bottom = 1 - bottom, left, 1 - top, right
    return round(left, 6), round(top, 6), round(right, 6), round(bottom, 6)


def turned(image, turn: int):
    """An image after quarter turns clockwise."""
    return image.rotate(-90 * turn, expand=True) if turn % 4 else image


def _limits() -> str:
    limits = presets.defaults()["images"]
    return f"scale it down to at most {limits['max_side']} pixels per side and {limits['max_megapixels']} megapixels"


def several_frames(image: "Image.Image") -> bool:
    """Whether an image has more than one frame. They are not counted: of a TIFF with 300,000 that takes minutes."""
    return image.format != "HEIF" and getattr(image, "is_animated", False)  # a HEIF file opens at its main picture


def conversions(mode: str, transparent: bool, several: bool) -> list[str]:
    """What `decoded` changes of an image besides its format and its EXIF rotation, each as text."""
    reasons = ["only the first frame is used"] * several
    if transparent:
        reasons.append("transparency replaced by white")
    elif mode.startswith(("I", "F")):
        reasons.append("converted to 8 bits per channel")
    elif mode not in ("RGB", "L"):
        reasons.append(f"converted from {mode} to RGB")
    return reasons


def _normal(image):
    """The image in a form that every trainer reads the same way, and the changes, each as text."""
    from PIL import Image, ImageOps

    image.load()
    kind = image.format
    several = several_frames(image)
    changes = conversions(image.mode, image.has_transparency_data, several)
    reasons = [] if kind in (*KEPT, "MPO") else [f"{kind} saved as {'JPEG' if kind in PHOTO_FORMATS else 'PNG'}"]
    if image.getexif().get(EXIF_ORIENTATION, 1) not in (0, 1):
        reasons.append("rotated upright")
        image = ImageOps.exif_transpose(image)
    elif reasons or several:
        image = image.copy()  # the file is closed before the image is saved
    if image.has_transparency_data:
        image, white = image.convert("RGBA") if image.mode != "RGBA" else image, Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        image = white
    elif image.mode.startswith(("I", "F")):
        image = eight_bits(image)
    elif image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    return image, reasons + changes


def eight_bits(image):
    """A greyscale image of 16 or 32 bits in 8 bits. Pillow's own conversion makes everything above 255 white."""
    _, high = image.getextrema()
    top = 65535.0 if image.mode.startswith("I") and high > 255 else max(float(high), 1.0)
    return image.convert("F").point(lambda value: value * (255.0 / top)).convert("L")
