"""Checks images and captions and copies them into `datasets/<slug>/`.

All files are checked first and all errors are reported together, so that one bad file among 150 does not cost 150 uploads.
An image that every trainer reads the same way is copied byte for byte. An image with EXIF rotation, transparency, several
frames or another colour mode is decoded and saved again, because sd-scripts and diffusers treat it differently: as PNG,
or for a photo format as JPEG of quality 95 (a hundred phone photos as PNG would take minutes and gigabytes). A caption
becomes one line that ends in a newline, because sd-scripts fails on an empty file and reads only the first line.

Folders are kept, one level deep, because an image and its caption belong together by folder and name. A folder whose name
starts with a number and `_`, such as `10_cat`, is a subset with that many repeats, as in kohya's trainers.
"""

import codecs
import contextlib
import functools
import os
import re
import shutil
import stat
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs.files import RunError
from runs.paths import RESERVED_NAMES, datasets_dir

if TYPE_CHECKING:
    from PIL import Image

KEPT = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "BMP": ".bmp"}
PHOTO_FORMATS = ("JPEG", "MPO", "HEIF", "AVIF")  # saved again as JPEG, the others as PNG
# Only these decoders see a dropped file. Pillow has others, and that for EPS starts a program.
FORMATS = (*KEPT, "GIF", "TIFF", "ICO", "AVIF", "HEIF")
IMAGE_SUFFIXES = {*KEPT.values(), ".jpeg", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".svg", ".ico"}
CAPTION_SUFFIXES = (".txt", ".caption")
USABLE = "PNG, JPEG, WebP, HEIC, AVIF, BMP, GIF or TIFF"
EXIF_ORIENTATION = 0x0112
# Pillow's decoders raise these on damaged data; they have no common class.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, RuntimeError, struct.error, zlib.error)


@dataclass(frozen=True)
class Source:
    """An image to copy: its path, its name, its caption; the folder it came from; quarter turns clockwise."""

    path: Path
    name: str
    caption: str
    folder: str = ""
    turn: int = 0


def is_image_name(path: Path) -> bool:
    """Whether the file's suffix is that of an image."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def _regular(path: Path) -> bool:
    """Whether the path is a regular file. Opening a FIFO or device that is named x.png would block."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def read_caption(path: Path, name: str = "") -> str:
    """The caption in a file, as one line.

    Args:
        name: the name in messages; by default that of the file.

    Raises:
        RunError: the file is neither UTF-8 text nor UTF-16 text with a byte order mark, or it is larger than a caption.
    """
    name, limit_kb = name or path.name, presets.defaults()["images"]["max_caption_kb"]
    with path.open("rb") as file:
        content = file.read(limit_kb * 1000 + 1)
    if len(content) > limit_kb * 1000:
        raise RunError(f"{name}: the caption is larger than {limit_kb} kB; shorten it")
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return one_line(content.decode("utf-16" if utf16 else "utf-8-sig"))
    except UnicodeDecodeError as error:
        kind = "UTF-16" if utf16 else "UTF-8"
        raise RunError(
            f"{name}: the caption is not {kind} text (byte {error.start}); save the file as UTF-8"
        ) from error


def one_line(text: str) -> str:
    """A caption without line breaks, NULs and repeated spaces."""
    return " ".join(text.replace("\0", " ").split())


def gather(
    images: Path | Iterable[Path] | Sequence[Source], captions: Mapping[str, str] | None = None, trigger: str = ""
) -> list[Source]:
    """The images to copy with their captions: from `captions`, else from the .txt file beside it, else the trigger word,
    else the subject of its folder, such as "cat" of `10_cat`.

    Args:
        images: a folder (its images and those of its subfolders, without hidden and other files), or files.
        captions: by file name, file name without suffix, or path; they override .txt files.

    Raises:
        RunError: there are no images, a file is not an image, or a caption belongs to no image or is not UTF-8.
    """
    given = [] if isinstance(images, str | Path) else list(images)
    sources = [one for one in given if isinstance(one, Source)]
    if sources:
        return [replace(one, caption=one_line(one.caption) or _default(trigger, one.folder)) for one in sources]
    folder = Path(images) if isinstance(images, str | Path) else None
    if folder:
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder; use the folder of the images")
        files = _files_below(folder)
        texts = [p for p in files if p.suffix.lower() in CAPTION_SUFFIXES]
        files = [p for p in files if is_image_name(p)]
        where = str(folder)
    else:
        paths = [Path(p) for p in given if isinstance(p, str | Path)]
        texts = [p for p in paths if p.suffix.lower() in CAPTION_SUFFIXES]
        files = [p for p in paths if p not in texts]
        texts += [t for p in files for s in CAPTION_SUFFIXES if (t := p.with_suffix(s)).is_file() and t not in texts]
        where = "the selected files"
    errors = []
    for path in files:
        if not _regular(path):
            errors.append(f"{path.name}: not a regular file; remove it")
        elif not is_image_name(path):
            errors.append(f"{path.name}: not an image; use {USABLE}")
    if not files:
        raise RunError(f"no images in {where}; add at least one image (10 to 30 are recommended)")
    beside: dict[tuple[Path, str], str] = {}
    for text in sorted(texts, key=lambda p: CAPTION_SUFFIXES.index(p.suffix.lower()), reverse=True):
        try:
            beside[text.parent, text.stem] = read_caption(text)
        except RunError as error:
            errors.append(str(error))
    if errors:
        raise RunError("\n".join(errors))
    written = dict(captions or {})
    for path in files:
        names = [key for key in (str(path), path.name, path.stem) if key in written]
        caption = one_line(written[names[0]]) if names else ""
        inside = path.parent.relative_to(folder).as_posix() if folder else "."
        inside = "" if inside == "." else inside
        caption = caption or beside.get((path.parent, path.stem), "") or _default(trigger, inside)
        sources.append(Source(path, path.name, caption, inside))
    known = {key for p in files for key in (str(p), p.name, p.stem)}
    lost = sorted(set(written) - known)
    if lost:
        raise RunError(f"captions without an image: {', '.join(lost)}; correct the file names")
    return sources


def _default(trigger: str, folder: str) -> str:
    """The caption of an image without one: the trigger word, else what kohya's trainers read from the folder's name."""
    return one_line(trigger) or (repeats_of(folder) or (0, ""))[1]


def _files_below(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders by path, those of the folder first; hidden ones and links to folders not."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [path for name in sorted(names) if name[0] != "." and (path := Path(parent) / name).is_file()]
    return found


def check_image(path: Path, name: str = "") -> str:
    """Decode an image completely. Returns what will be changed to train on it; "" if nothing.

    Args:
        name: the name in messages; by default that of the file.

    Raises:
        RunError: it is not an image, damaged or too large; the message names the file.
    """
    image, _, why = _open(path, name)
    image.close()
    return why


def decoded_size(path: Path, name: str = "") -> tuple[int, int]:
    """Width and height in pixels, upright, of an image that is decoded completely. Args and errors: as check_image."""
    image, _, _ = _open(path, name)
    width, height = image.size
    image.close()
    return width, height


@functools.cache
def _add_heif() -> None:
    """Let Pillow read HEIC and HEIF, the format of phones."""
    from pillow_heif import register_heif_opener

    register_heif_opener(thumbnails=False)


@contextlib.contextmanager
def opened(path: Path, name: str = "") -> Iterator["Image.Image"]:
    """An image file within the limits, not decoded yet.

    Raises:
        RunError: it is not an image, too large, or the block finds that it is damaged; the message names the file.
    """
    from PIL import Image, UnidentifiedImageError

    name = name or path.name
    _add_heif()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit is lower than Pillow's; damaged EXIF data is no news
            with Image.open(path, formats=FORMATS) as image:
                _check_size(name, image)
                yield image
    except UnidentifiedImageError as error:
        raise RunError(f"{name}: Not a readable image. Export it as JPEG or PNG.") from error
    except Image.DecompressionBombError as error:
        raise RunError(f"{name}: The image is too large; {_limits()}") from error
    except (FileNotFoundError, PermissionError) as error:
        raise RunError(f"{name}: {error.strerror}; check the file {path}") from error
    except DAMAGE as error:
        raise RunError(f"{name}: the image is damaged ({error}); export it again or remove it") from error


def _open(path: Path, name: str = "", turn: int = 0):
    """The decoded image, upright and opaque; the suffix to save it with; what was changed ("" if nothing)."""
    with opened(path, name) as image:
        suffix = ".jpg" if image.format in PHOTO_FORMATS else KEPT.get(image.format, ".png")
        image, why = _normal(image)
        if turn % 4:
            image, why = turned(image, turn), ", ".join([*([why] if why else []), "rotated"])
        return image, ".png" if why and suffix != ".jpg" else suffix, why


def turned(image, turn: int):
    """An image after quarter turns clockwise."""
    from PIL import Image

    method = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}
    return image.transpose(method[turn % 4]) if turn % 4 else image


def _check_size(name: str, image) -> None:
    limits = presets.defaults()["images"]
    width, height = image.size
    if max(width, height) > limits["max_side"] or width * height > limits["max_megapixels"] * 1_000_000:
        raise RunError(f"{name}: {width} × {height} pixels is too large; {_limits()}")


def _limits() -> str:
    limits = presets.defaults()["images"]
    return f"scale it down to at most {limits['max_side']} pixels per side and {limits['max_megapixels']} megapixels"


def _normal(image):
    """The image in a form that every trainer reads the same way, and a list of the changes as text."""
    from PIL import Image, ImageOps

    image.load()
    kind = image.format
    reasons = [] if kind in (*KEPT, "MPO") else [f"{kind} saved as {'JPEG' if kind in PHOTO_FORMATS else 'PNG'}"]
    if getattr(image, "n_frames", 1) > 1 and kind != "HEIF":  # a HEIF file opens at its main picture
        reasons.append("only the first frame is used")
        image.seek(0)
        image.load()
    if image.getexif().get(EXIF_ORIENTATION, 1) not in (0, 1):
        reasons.append("rotated upright")
        image = ImageOps.exif_transpose(image)
    elif reasons:
        image = image.copy()  # the file is closed before the image is saved
    if image.has_transparency_data:
        reasons.append("transparency replaced by white")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    elif image.mode.startswith(("I", "F")):
        reasons.append("converted to 8 bits per channel")
        image = eight_bits(image)
    elif image.mode not in ("RGB", "L"):
        reasons.append(f"converted from {image.mode} to RGB")
        image = image.convert("RGB")
    return image, ", ".join(reasons)


def eight_bits(image):
    """A greyscale image of 16 or 32 bits in 8 bits. Pillow's own conversion makes everything above 255 white."""
    _, high = image.getextrema()
    top = 65535.0 if image.mode.startswith("I") and high > 255 else max(float(high), 1.0)
    return image.convert("F").point(lambda value: value * (255.0 / top)).convert("L")


def _plain(text: str) -> str:
    """Text as a file name's stem that is valid everywhere; "" where nothing is left of it."""
    from slugify import slugify

    stem = slugify(text, lowercase=False, regex_pattern=r"[^-a-zA-Z0-9_]+", max_length=80).strip("-_")
    return f"image-{stem}" if stem.upper() in RESERVED_NAMES else stem


def repeats_of(folder: str) -> tuple[int, str] | None:
    """The repeats and the subject that a folder's name sets, such as (10, "cat") for `10_cat`; None where it sets none.

    The innermost folder of a path with such a name decides.
    """
    for part in reversed(folder.split("/")):
        found = re.fullmatch(r"([0-9]{1,4})_(.*)", part, re.DOTALL)
        if found and int(found[1]):
            return int(found[1]), one_line(found[2])
    return None


def _subfolder(folder: str, taken: set[str]) -> str:
    """The name of a dropped folder's subfolder in the data set, which is not in `taken`; it is added to `taken`."""
    if not folder:
        return ""
    sets = repeats_of(folder)
    name = _plain("-".join(part for part in folder.split("/") if not (sets and repeats_of(part) == sets)))
    if sets:
        stem = f"{sets[0]}_{'-'.join(part for part in (name, _plain(sets[1])) if part)}"
    else:
        stem = f"folder-{name}" if not name or repeats_of(name) else name
    return _unique(stem, taken)


def unique_stem(name: str, taken: set[str]) -> str:
    """A file name's stem that is valid everywhere and not in `taken`; it is added to `taken`."""
    stem = _plain(Path(name).stem) or "image"
    return _unique(stem, taken)


def _unique(stem: str, taken: set[str]) -> str:
    candidate, n = stem, 1
    while candidate.casefold() in taken:
        n += 1
        candidate = f"{stem}-{n}"
    taken.add(candidate.casefold())
    return candidate


def ingest(sources: list[Source], folder: Path, on_note: Callable[[str], None] = lambda _: None) -> list[str]:
    """Write the images and captions into `folder`, which is empty; returns the new file names in order.

    Args:
        on_note: called with one sentence for each image that was changed and each warning.

    Raises:
        RunError: files are not images, damaged or too large; the message has one line for each.
        OSError: a file cannot be read or written.
    """
    errors: list[str] = []
    taken: dict[str, set[str]] = {}
    subfolders: dict[str, str] = {}
    used: set[str] = set()
    names: list[str] = []
    for source in sources:
        try:
            image, suffix, why = _open(source.path, source.name, source.turn)
        except RunError as error:
            errors.append(str(error))
            continue
        if errors:
            continue  # write nothing more; only find the other errors
        if source.folder not in subfolders:
            subfolders[source.folder] = _subfolder(source.folder, used)
        target_folder = folder / subfolders[source.folder]
        target_folder.mkdir(exist_ok=True)
        stem = unique_stem(source.name, taken.setdefault(source.folder, set()))
        target = target_folder / f"{stem}{suffix}"
        if not why:
            shutil.copyfile(source.path, target)
        elif suffix == ".jpg":
            image.save(target, format="JPEG", exif=b"", quality=95, subsampling=0)
        else:
            image.save(target, format="PNG", exif=b"", compress_level=3)
        if why:
            on_note(f"{source.name}: {why}")
        if not source.caption:
            on_note(f"{source.name}: no caption and no trigger word; it is trained with an empty caption")
        target.with_suffix(".txt").write_text(source.caption + "\n", encoding="utf-8", newline="\n")
        names.append(target.relative_to(folder).as_posix())
    if errors:
        raise RunError("\n".join(errors))
    if len(names) == 1:
        on_note("only one image: the LoRA will reproduce it; use 10 to 30 different images")
    return names


def images_in(folder: Path) -> list[Path]:
    """The images of a data set: those of the folder by name, then those of its subfolders."""
    if not folder.is_dir():
        return []
    inside = sorted(p for p in folder.iterdir() if p.name[0] != ".")
    folders = [folder, *(p for p in inside if p.is_dir() and not p.is_symlink())]
    return [p for one in folders for p in (inside if one is folder else sorted(one.iterdir())) if _is_kept(p)]


def _is_kept(path: Path) -> bool:
    return path.suffix.lower() in (*KEPT.values(), ".jpeg") and path.name[0] != "."


def counts(folder: Path) -> dict[str, int]:
    """The number of images in each folder of a data set that has any; "" is the data set's own folder."""
    found = Counter(p.parent.relative_to(folder).as_posix() for p in images_in(folder))
    return {"" if name == "." else name: number for name, number in found.items()}


def shown_per_epoch(images: int | Mapping[str, int], repeats: int) -> int:
    """How many images an epoch shows. A folder such as `10_cat` has its own repeats.

    Args:
        images: their number, or their number by folder. repeats: those of images outside such folders.
    """
    by_folder = images if isinstance(images, Mapping) else {"": images}
    return sum(number * (sets[0] if (sets := repeats_of(name)) else repeats) for name, number in by_folder.items())


def read_captions(slug: str) -> dict[str, str]:
    """The captions of a data set by image file, such as `a.png` or `10_cat/a.png`, sorted by folder and name.

    Raises:
        RunError: there is no such data set, or a caption is not UTF-8.
    """
    folder = datasets_dir() / slug
    if not folder.is_dir():
        raise RunError(f"no data set {slug!r} in {datasets_dir()}; create a run with this name first")
    return {
        p.relative_to(folder).as_posix(): read_caption(t) if (t := p.with_suffix(".txt")).is_file() else ""
        for p in images_in(folder)
    }
