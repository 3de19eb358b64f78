"""One image of a draft: checked and measured when it is dropped, its thumbnail, and the warnings on its card.

What "Check images" says of the pixels is measured from the thumbnail at the same time: the image is decoded once.

A dropped file is copied and never moved or deleted: Gradio stores an upload in a folder named after its content, so two
drops of one file share a path, and Gradio may write to that path again. A file of a folder on the server may be hard-linked.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import presets
from guards.checkpoint import writing_file
from runs import masks, pictures
from runs.files import RunError, atomic_write, explained

THUMB_SIDE = 480  # pixels: a card's width on a high-density screen
LARGE_SIDE = 1600
JPEG: dict[str, Any] = {"format": "JPEG", "quality": 82}  # of both
DRAFTED = ("JPEG", "MPO")  # formats that can be decoded at a fraction of their size
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
GONE = "the file is gone; drop it again"
UNREAD = "the file cannot be read; allow this user to read it"
EXIF_IFD, EXIF_WIDTH, EXIF_HEIGHT = 0x8769, 0xA002, 0xA003
# Ends the name of a mask that ignores the complete image, so that a start can warn without reading every mask.
IGNORES_ALL = "-all.png"
IGNORED, FADE = (116, 122, 134), 0.72  # the colour towards which the ignored part fades, and how far
TONES = 12  # values of a hash after its 64 bits: the colours of four quarters
Entry = dict[str, Any]


def image_id(folder: str, sha256: str) -> str:
    """The id of an image: its folder and its content."""
    return hashlib.sha256(f"{folder}\0{sha256}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


def measured(path: Path, name: str, copy: Path, link: bool = False) -> Entry:
    """Store a dropped image, decode it completely and once, write its thumbnail and measure it.

    Args:
        name: its name in messages. copy: where to put it; its thumbnail is beside it, as `.jpg`. link: it may be
            hard-linked, because nothing writes to it; else, and on another disk, it is copied.

    Returns:
        width, height (pixels, after EXIF rotation), sha256, bytes, hash (for nearly identical images), upright (quarter
        turns clockwise that undo an EXIF rotation of pixels that are upright already; else 0), changes (what is
        converted before the training), looks (see `looks_of`).

    Raises:
        RunError: it is not an image, damaged or too large; nothing is left of the copy and the thumbnail then.
        OSError: a file cannot be written.
    """
    if not pictures.is_image_name(Path(name)):
        raise RunError(f"{name}: not an image file; use {pictures.USABLE}, a ZIP of these, or .txt for captions")
    limit_mb = presets.defaults()["images"]["max_file_mb"]
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise RunError(f"{name}: {GONE}") from error
    if size > limit_mb * 1_000_000:
        raise RunError(f"{name}: {size / 1e6:.0f} MB is too large; export it with at most {limit_mb} MB")
    try:
        put(path, name, copy, link)
        with pictures.opened(copy, name) as image:
            if image.format == "PNG":
                image.load()  # `getexif` of a PNG decodes it as well, and damage is reported once only
            upright, shape, mode = _upright(image), image.size, image.mode
            transparent = image.has_transparency_data
            small = _thumbnail(image, THUMB_SIDE)
            if image.format not in DRAFTED:
                shape = image.size  # Pillow rotates a TIFF while it decodes it
            several = image.format not in DRAFTED and pictures.several_frames(image)
            width, height = reversed(shape) if image.getexif().get(pictures.EXIF_ORIENTATION, 1) in SIDEWAYS else shape
        small.save(copy.with_suffix(".jpg"), **JPEG)
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (RunError, OSError):
        copy.unlink(missing_ok=True)
        copy.with_suffix(".jpg").unlink(missing_ok=True)
        raise
    return {
        "width": width,
        "height": height,
        "sha256": digest,
        "bytes": size,
        "hash": _hash(small),
        "upright": upright,
        "changes": ", ".join(pictures.conversions(mode, transparent, several)),
        "looks": looks_of(small, (width, height)),
    }


def looks_of(small: Any, size: tuple[int, int]) -> dict[str, Any]:
    """What the pixels of a thumbnail show, for ui/dataset/checks.py.

    pixels: a hash of them and of the image's `size`. sharpness: variance of the Laplacian in parts of that of the
    brightness. contrast: variance of the brightness. mean, high: brightness of 0 to 255: mean and 95th percentile. grey:
    the share of rows at the lower end that are plain grey: where the data of a JPEG ends early, its decoder fills in 128.
    """
    values = np.asarray(small.convert("L"), dtype=np.float32)
    contrast, sharpness = float(values.var()), 0.0
    if min(values.shape) > 2 and contrast > 0:
        inner = values[1:-1, 1:-1]
        laplacian = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:] - 4 * inner
        sharpness = float(laplacian.var()) / contrast
    return {
        "pixels": hashlib.sha256(f"{size}".encode() + small.tobytes()).hexdigest()[:24],
        "sharpness": round(sharpness, 5),
        "contrast": round(contrast, 2),
        "mean": round(float(values.mean()), 2),
        "high": round(float(np.percentile(values, 95)), 2),
        "grey": round(int(np.argmin(np.abs(values - 128).max(axis=1)[::-1] < 4)) / len(values), 3),
    }


def put(path: Path, name: str, copy: Path, link: bool) -> None:
    """Put a file into the draft, as a hard link where it may be one. A link to another file is never followed. Raises
    RunError: it is one, or the file is gone or cannot be read."""
    if link:
        # Another disk, a file of another user, a system without hard links or (Windows) without this argument.
        with contextlib.suppress(OSError, NotImplementedError):
            os.link(path, copy, follow_symlinks=False)
        if copy.is_symlink():
            copy.unlink()
            raise RunError(f"{name}: a link; use the file itself")
        if copy.exists():
            return
    try:
        shutil.copyfile(path, copy)
    except FileNotFoundError as error:
        raise RunError(f"{name}: {GONE}") from error
    except PermissionError as error:
        if str(error.filename) != str(path):
            raise
        raise RunError(f"{name}: {UNREAD}") from error


def _upright(image: Any) -> int:
    """The turn that undoes an EXIF rotation where the tags of the camera contradict the stored size.

    A camera stores its sensor's width and height in EXIF. A program that rotates the pixels but keeps the orientation
    tag leaves a file that every viewer rotates a second time.
    """
    try:
        turn = {6: 3, 8: 1}.get(image.getexif().get(pictures.EXIF_ORIENTATION), 0)
        camera = image.getexif().get_ifd(EXIF_IFD)
        size = (camera.get(EXIF_WIDTH), camera.get(EXIF_HEIGHT))
    except pictures.DAMAGE:
        return 0
    return turn if size[0] != size[1] and size == (image.height, image.width) else 0


def picture_name(
    image_id: str, side: int = THUMB_SIDE, turn: int = 0, crop: pictures.Crop | None = None, mask: str | None = None
) -> str:
    """The file name of a picture that the page shows of an image: another one for each of its edits."""
    edits = hashlib.sha256(json.dumps([turn, crop, mask]).encode()).hexdigest()[:12]
    return f"{image_id}-{side}-{edits}.jpg"


def write_picture(
    path: Path, target: Path, side: int, turn: int, crop: pictures.Crop | None = None, mask: Path | None = None
) -> None:
    """Write what the page shows of an image, a JPEG of at most `side` pixels: upright, on white, turned, cropped, and
    grey where its mask ignores it. It replaces that of other edits. Raises RunError: the image cannot be read, or the
    picture cannot be written.

    Args:
        mask: of the image before it is turned; one that cannot be read is left out, because a card without its mask is
            better than no card, and a start reports it.
    """
    from PIL import Image

    with explained("write a thumbnail"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with pictures.opened(path, path.name) as image:
            small = pictures.turned(_thumbnail(image, LARGE_SIDE if crop or mask else side), turn)
        if mask is not None:
            with contextlib.suppress(RunError):
                grey = Image.blend(small.convert("L").convert("RGB"), Image.new("RGB", small.size, IGNORED), FADE)
                trained = pictures.turned(masks.opened(mask), turn).resize(small.size, Image.Resampling.BILINEAR)
                small = Image.composite(small, grey, trained)
        if crop is not None:
            small = small.crop(pictures.crop_box(small.size, crop))
        small.thumbnail((side, side))
        # Another page can ask for the same picture now.
        with writing_file(target, sync=False, temporary=target.with_suffix(f".{secrets.token_hex(4)}")) as part:
            small.save(part, **JPEG)
        for old in target.parent.glob(f"{target.name.rpartition('-')[0]}-*.jpg"):  # each stroke of a mask makes one
            if old != target:
                old.unlink(missing_ok=True)


def store_mask(mask: Any, folder: Path) -> str:
    """Store a mask in a folder. Returns its file name, that of its content. Raises RunError: the disk does not take it.

    The caller is in a change of the draft where this is the draft's folder of masks: else the mask may be deleted
    before an image names it.
    """
    content = masks.png(mask)
    kind = IGNORES_ALL if mask.getextrema() == (0, 0) else ".png"
    target = folder / f"{hashlib.sha256(content).hexdigest()[:24]}{kind}"
    with explained("store the mask"):
        folder.mkdir(parents=True, exist_ok=True)
        if not target.is_file():
            atomic_write(target, content)
    return target.name


def _thumbnail(image: Any, side: int) -> Any:
    """The whole image, decoded, as RGB of at most `side` pixels: upright and on white.

    A JPEG is decoded at a fraction of its size. The decoder still reads every bit of it, so it finds all damage; it
    leaves out most of the arithmetic, which makes it twice as fast.
    """
    from PIL import Image, ImageOps

    if image.format in DRAFTED:  # for HEIC it would use a stored preview
        image.draft("RGB", (side, side))
    image.load()
    small = ImageOps.exif_transpose(image) if image.getexif().get(pictures.EXIF_ORIENTATION, 1) not in (0, 1) else image
    if small.has_transparency_data:
        small = small.convert("RGBA")
        small.thumbnail((side, side))
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    else:
        small = (pictures.eight_bits(small) if small.mode.startswith(("I", "F")) else small).convert("RGB")
        small.thumbnail((side, side))
    return small.convert("RGB")


def _hash(small: Any) -> str:
    """The 64 bits of imagehash's dHash (is each pixel of 9 × 8 brighter than the one before it?) and the colours of
    four quarters, as hex."""
    import imagehash
    from PIL import Image

    return f"{imagehash.dhash(small)}{small.resize((2, 2), Image.Resampling.BOX).tobytes().hex()}"


@functools.lru_cache(maxsize=8)
def near_of(hashes: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Of (id, hash) of each image: the ids of those that are nearly identical to an earlier one, with the id of the
    first such one. 10,000 images take a tenth of a second."""
    unlike: Any = np.zeros(len(hashes), bool)  # to all before it
    found, limits = {}, presets.defaults()["images"]
    bits = np.array([int(hashed[:16], 16) for _, hashed in hashes], np.uint64)
    tones = np.array([list(bytes.fromhex(hashed[16:])) for _, hashed in hashes], np.int16).reshape(-1, TONES)
    for n, (key, _) in enumerate(hashes):
        like = np.flatnonzero(unlike[:n] & (np.bitwise_count(bits[:n] ^ bits[n]) <= limits["near_bits"]))
        like = like[(np.abs(tones[like] - tones[n]) <= limits["near_tone"]).all(axis=1)]
        unlike[n] = not like.size
        if like.size:
            found[key] = hashes[like[0]][0]
    return found


def warnings_of(entry: Entry, size: tuple[int, int], near: str) -> tuple[str, ...]:
    """The codes of an image's warnings: "small", "sideways", "near", "no_caption". size: after the crop."""
    checks = {
        "small": min(size) < presets.defaults()["images"]["small_side"],
        "sideways": entry["upright"] and not entry["turn"],
        "near": near,
        "no_caption": not entry["caption"].strip(),
    }
    return tuple(code for code, applies in checks.items() if applies)
