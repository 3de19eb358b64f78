"""Masks of images: what is white is trained, what is black is ignored, grey counts in part.

A data set keeps a mask as the alpha channel of its image, a PNG: sd-scripts and the built-in trainer read it there
(`alpha_mask` in dataset.toml), and an image can never lose its mask. Nothing else in a data set is transparent, because
`dataset.ingest` replaces transparency by white.

musubi-tuner has no masked loss, and it would enlarge a small image together with its alpha channel, which makes the
ignored part black (Pillow multiplies colours by alpha before it resizes). Its data sets have images without alpha; the
masks lie beside them in `.masks/`, so that a copy of the run has them again.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs import pictures
from runs.files import RunError
from runs.pictures import DAMAGE

if TYPE_CHECKING:
    from PIL import Image

MAX_SIDE = 1024  # pixels: trainers scale a mask down to latents, an eighth of the image's size or less
MAX_BYTES = 20_000_000  # of a mask that is uploaded
FOLDER = ".masks"
WITHOUT = ("musubi",)  # trainers that have no masked loss (musubi-tuner v0.3.4: no argument and no key of dataset.toml)
ALPHA = ("LA", "RGBA")  # modes of an image that has its mask in it
SHAPE_TOLERANCE = 0.02  # by which the sides of a mask and of its image may differ


def supported(backend: str) -> bool:
    """Whether a trainer can leave the masked part of an image out of its loss."""
    return backend not in WITHOUT


def ignored_note(backend: str, count: int) -> str:
    """What a trainer without a masked loss does with the masks of `count` images; "" where it uses them."""
    if supported(backend) or not count:
        return ""
    trainer = presets.backends()[backend]["label"]
    return (
        f"{trainer} cannot use masks: {count:,} of the images {'has one and is' if count == 1 else 'have one and are'} "
        "trained as a whole. Choose another trainer or base model, or crop instead."
    )


def read(content: bytes, name: str, shape: tuple[int, int]) -> "Image.Image":
    """The mask in a PNG, greyscale and at most MAX_SIDE pixels a side.

    An image with transparency is its own mask: what is transparent is ignored. Any other is taken by its brightness.

    Args:
        name: the name in messages. shape: width and height of the image that the mask is for.

    Raises:
        RunError: not a readable PNG, too large, or of another shape than the image.
    """
    from PIL import Image

    if len(content) > MAX_BYTES:
        raise RunError(f"{name}: {len(content) / 1e6:.0f} MB is too large for a mask; export it smaller")
    with pictures.opened(io.BytesIO(content), name, ("PNG",)) as image:
        if abs(image.size[0] * shape[1] / (image.size[1] * shape[0]) - 1) > SHAPE_TOLERANCE:
            sizes = f"the mask has {image.size[0]} × {image.size[1]} pixels and the image {shape[0]} × {shape[1]}"
            raise RunError(f"{name}: {sizes}; use a mask of the same shape")
        image.load()
        mask = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
        if mask is None or mask.getextrema() == (255, 255):
            plain = image.convert("RGB") if image.mode in ("RGBA", "LA", "P", "PA") else image
            mask = (pictures.eight_bits(plain) if plain.mode.startswith(("I", "F")) else plain).convert("L")
    mask.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BOX)
    return mask


def png(mask: "Image.Image") -> bytes:
    """A mask as the bytes of a PNG."""
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()


def opened(path: Path, name: str = "") -> "Image.Image":
    """A mask that `read` has checked, or an image's alpha channel. RunError, which names `name`: it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.convert("RGBA").getchannel("A") if image.mode in ALPHA else image.convert("L")
    except DAMAGE as error:
        raise RunError(f"{name or path}: the mask cannot be read ({error}); draw it again or clear it") from error


def has_mask(path: Path) -> bool:
    """Whether an image of a data set has a mask. Decodes nothing, because data sets have thousands of images."""
    from PIL import Image

    if path.suffix.lower() != ".png":
        return False
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.mode in ALPHA
    except DAMAGE:
        return False


def aside(folder: Path, image: Path) -> Path:
    """Where a data set keeps the mask of an image whose trainer has no masked loss."""
    return folder / FOLDER / image.relative_to(folder).parent / f"{image.name}.png"


def of(folder: Path, image: Path) -> Path | None:
    """The file with the mask of an image of a data set, which can be the image itself; None for none."""
    beside = aside(folder, image)
    return beside if beside.is_file() else image if has_mask(image) else None


def put_aside(folder: Path, image: Path, mask: "Image.Image", turn: int, crop: pictures.Crop | None) -> None:
    """Keep the mask of an image of a data set beside it, turned and cropped as the image is. Raises OSError."""
    mask = pictures.turned(mask, turn)
    if crop is not None:
        mask = mask.crop(pictures.crop_box(mask.size, crop))
    target = aside(folder, image)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(png(mask))


def split(folder: Path, image: Path, target: Path) -> "Image.Image | None":
    """The mask of an image of a data set; None for none. An image with alpha is written to `target` without it.

    Raises:
        RunError: the image is damaged. OSError: `target` cannot be written.
    """
    if (mask := of(folder, image)) == image:
        pictures.decoded(image, masked=True)[0].save(target, "PNG", compress_level=3)
    return opened(mask, image.name) if mask else None
