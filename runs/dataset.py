"""Take images and captions in: checked whole before anything is written, then copied into `datasets/<slug>/`.

All faults are found first and told together by file name, so that one bad file among 150 does not cost 150 uploads.
An image that a trainer reads as it is keeps its bytes; one that is rotated by EXIF, transparent, animated, or in another
colour mode is decoded once and saved again, because sd-scripts and diffusers each treat these differently: as PNG, or a
camera's JPEG as JPEG of quality 95 (a hundred phone photos as PNG would take minutes and gigabytes). Captions
become one line that ends in a newline: sd-scripts fails on an empty file and reads only the first line.
"""

import shutil
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import presets
from runs.files import RunError
from runs.paths import RESERVED, datasets_dir

KEPT = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "BMP": ".bmp"}
IMAGE_SUFFIXES = {*KEPT.values(), ".jpeg", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".svg", ".ico"}
CAPTION_SUFFIXES = (".txt", ".caption")
EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Source:
    """One image to take in: where it is, the name it was given, its caption."""

    path: Path
    name: str
    caption: str


def is_image_name(path: Path) -> bool:
    """Whether a file is called like an image."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def _regular(path: Path) -> bool:
    """A FIFO or device called x.png would block whoever opens it."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def read_caption(path: Path) -> str:
    """The caption in a file, as one line.

    Raises:
        RunError: the file is not UTF-8 text.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RunError(
            f"{path.name}: the caption is not UTF-8 text (byte {error.start}); save it as UTF-8 and try again"
        ) from error
    return one_line(text)


def one_line(text: str) -> str:
    """A caption without line breaks, NULs and doubled spaces."""
    return " ".join(text.replace("\0", " ").split())


def gather(images: Path | Iterable[Path], captions: Mapping[str, str] | None = None, trigger: str = "") -> list[Source]:
    """The images to take in, with their captions: as given, else of a .txt beside it, else the trigger word.

    Args:
        images: a folder (its images, sorted by name; hidden and other files are left out), or files: images and .txt.
        captions: by file name, file name without suffix, or path; an entry counts more than a .txt file.

    Raises:
        RunError: nothing to train on, a file is no image by its name, or captions that fit no image or are not UTF-8.
    """
    if isinstance(images, str | Path):
        folder = Path(images)
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder; give the folder that holds the images")
        files = [p for p in sorted(folder.iterdir()) if not p.name.startswith(".") and p.is_file()]
        texts = [p for p in files if p.suffix.lower() in CAPTION_SUFFIXES]
        files = [p for p in files if is_image_name(p)]
        where = str(folder)
    else:
        given = [Path(p) for p in images]
        texts = [p for p in given if p.suffix.lower() in CAPTION_SUFFIXES]
        files = [p for p in given if p not in texts]
        texts += [t for p in files for s in CAPTION_SUFFIXES if (t := p.with_suffix(s)).is_file() and t not in texts]
        where = "the files given"
    faults = []
    for path in files:
        if not _regular(path):
            faults.append(f"{path.name}: not a file; remove it from the list")
        elif not is_image_name(path):
            faults.append(f"{path.name}: not an image; give PNG, JPEG, WebP, BMP, GIF or TIFF files")
    if not files:
        raise RunError(f"no images in {where}; add at least one (10 to 30 make a good LoRA)")
    beside: dict[tuple[Path, str], str] = {}
    for text in sorted(texts, key=lambda p: CAPTION_SUFFIXES.index(p.suffix.lower()), reverse=True):
        try:
            beside[text.parent, text.stem] = read_caption(text)
        except RunError as error:
            faults.append(str(error))
    if faults:
        raise RunError("\n".join(faults))
    written = dict(captions or {})
    sources = []
    for path in files:
        names = [key for key in (str(path), path.name, path.stem) if key in written]
        caption = one_line(written[names[0]]) if names else ""
        caption = caption or beside.get((path.parent, path.stem), "") or one_line(trigger)
        sources.append(Source(path, path.name, caption))
    known = {key for p in files for key in (str(p), p.name, p.stem)}
    lost = sorted(set(written) - known)
    if lost:
        raise RunError(f"captions for images that are not there: {', '.join(lost)}; correct the file names")
    return sources


def check_image(path: Path) -> str:
    """Decode an image fully, within the limits; what has to be changed to train on it ("" if nothing).

    Raises:
        RunError: no image, damaged, or too large; the message names the file.
    """
    image, _, why = _open(path)
    image.close()
    return why


def _open(path: Path):
    """The decoded image, upright and opaque; the suffix to save it with; why it is not the file's own ("" when it is)."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own, lower limit comes first
            image = Image.open(path)
        _check_size(path, image)
        suffix = KEPT.get(image.format, ".jpg" if image.format == "MPO" else ".png")
        image, why = _normal(image)
        return image, ".png" if why and suffix != ".jpg" else suffix, why
    except UnidentifiedImageError as error:
        raise RunError(f"{path.name}: not an image, whatever its name says; remove it or save it again") from error
    except Image.DecompressionBombError as error:
        raise RunError(f"{path.name}: the image is too large; {_limits()}") from error
    except (FileNotFoundError, PermissionError) as error:
        raise RunError(f"{path.name}: {error.strerror}; check the file {path}") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        # What Pillow's decoders raise on damaged data; they have no common class.
        raise RunError(f"{path.name}: the image is damaged ({error}); save it again or remove it") from error


def _check_size(path: Path, image) -> None:
    limits = presets.defaults()["images"]
    width, height = image.size
    if max(width, height) > limits["max_side"] or width * height > limits["max_megapixels"] * 1_000_000:
        image.close()
        raise RunError(f"{path.name}: {width} × {height} pixels is too large; {_limits()}")


def _limits() -> str:
    limits = presets.defaults()["images"]
    return f"scale it down to at most {limits['max_side']} pixels a side and {limits['max_megapixels']} megapixels"


def _normal(image):
    """An image as every trainer reads it the same, and what had to be changed for that, as words."""
    from PIL import Image, ImageOps

    image.load()
    reasons = [] if image.format in (*KEPT, "MPO") else [f"{image.format} saved as PNG"]
    if getattr(image, "n_frames", 1) > 1:
        reasons.append("first frame of several")
        image.seek(0)
        image.load()
    if image.getexif().get(EXIF_ORIENTATION, 1) not in (0, 1):
        reasons.append("turned upright")
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        reasons.append("transparency laid on white")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    elif image.mode.startswith(("I", "F")):
        reasons.append("brought to 8 bits a channel")
        image = _to_eight_bits(image)
    elif image.mode not in ("RGB", "L"):
        reasons.append(f"{image.mode} turned into RGB")
        image = image.convert("RGB")
    return image, ", ".join(reasons)


def _to_eight_bits(image):
    """A greyscale image of 16 or 32 bits in 8; Pillow's own conversion turns everything above 255 into white."""
    _, high = image.getextrema()
    top = 65535.0 if image.mode.startswith("I") and high > 255 else max(float(high), 1.0)
    return image.convert("F").point(lambda value: value * (255.0 / top)).convert("L")


def unique_stem(name: str, taken: set[str]) -> str:
    """A file name's stem that every file system and trainer takes, not yet in `taken` (to which it is added)."""
    from slugify import slugify

    stem = slugify(Path(name).stem, lowercase=False, regex_pattern=r"[^-a-zA-Z0-9_]+", max_length=80).strip("-_")
    if not stem or stem.upper() in RESERVED:
        stem = f"image-{stem}".rstrip("-")
    candidate, n = stem, 1
    while candidate.casefold() in taken:
        n += 1
        candidate = f"{stem}-{n}"
    taken.add(candidate.casefold())
    return candidate


def ingest(sources: list[Source], folder: Path, tell: Callable[[str], None] = lambda _: None) -> list[str]:
    """Write the images and captions into `folder`, which exists and is empty; the names they got, in order.

    Args:
        tell: called with one sentence for everything that was changed or is worth knowing.

    Raises:
        RunError: files that are no image, damaged or too large: all of them, by name.
        OSError: as the file system says.
    """
    faults, taken, names = [], set(), []
    for source in sources:
        try:
            image, suffix, why = _open(source.path)
        except RunError as error:
            faults.append(str(error))
            continue
        if faults:
            continue  # only looking for more faults now
        stem = unique_stem(source.name, taken)
        target = folder / f"{stem}{suffix}"
        if not why:
            shutil.copyfile(source.path, target)
        elif suffix == ".jpg":
            image.save(target, format="JPEG", exif=b"", quality=95, subsampling=0)
        else:
            image.save(target, format="PNG", exif=b"", compress_level=3)
        if why:
            tell(f"{source.name}: {why}")
        if not source.caption:
            tell(f"{source.name}: no caption and no trigger word; it trains with an empty caption")
        target.with_suffix(".txt").write_text(source.caption + "\n", encoding="utf-8", newline="\n")
        names.append(target.name)
    if faults:
        raise RunError("\n".join(faults))
    if len(names) == 1:
        tell("one image only: the LoRA will learn that very picture; 10 to 30 different ones are better")
    return names


def images_in(folder: Path) -> list[Path]:
    """The images of a data set, by name."""
    if not folder.is_dir():
        return []
    return [p for p in sorted(folder.iterdir()) if p.suffix.lower() in (*KEPT.values(), ".jpeg") and p.name[0] != "."]


def read_captions(slug: str) -> dict[str, str]:
    """Captions of a data set by image file name, in the order of the names.

    Raises:
        RunError: no such data set, or a caption that is not UTF-8.
    """
    folder = datasets_dir() / slug
    if not folder.is_dir():
        raise RunError(f"no data set {slug!r} in {datasets_dir()}; make a run first")
    return {p.name: read_caption(t) if (t := p.with_suffix(".txt")).is_file() else "" for p in images_in(folder)}
