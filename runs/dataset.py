"""Checks images and captions and copies them into `datasets/<slug>/`.

All files are checked first and all errors are reported together, so that one bad file among 150 does not cost 150
uploads. An image that every trainer reads the same way is copied byte for byte. An image with EXIF rotation,
transparency, several frames or another colour mode is decoded and saved again, because sd-scripts and diffusers treat
it differently: as PNG, or for a photo format as JPEG of quality 95 (a hundred phone photos as PNG would take minutes
and gigabytes). A caption becomes one line that ends in a newline, because sd-scripts fails on an empty file and reads
only the first line.

Folders are kept, one level deep, because an image and its caption belong together by folder and name. A folder whose
name starts with a number and `_`, such as `10_cat`, is a subset with that many repeats, as in kohya's trainers. An
image with a weight goes into a subset of its own, because every trainer knows repeats and none knows weights: weight 3
of `10_cat` is `30_weight-3-cat`, and weight 3 of images without a folder is `weight-3`, which has three times the
repeats of the run.
"""

import codecs
import functools
import itertools
import os
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import presets
from guards.checkpoint import files_below
from presets.steps import repeats_in, repeats_of, weight_of
from runs import masks
from runs.files import RunError, explained
from runs.paths import RESERVED_NAMES, datasets_dir
from runs.pictures import KEPT, Crop, decoded, is_image_name, workers

MAX_WEIGHT = 10
MAX_REPEATS = 9999  # that a folder's name can set
CAPTION_SUFFIXES = (".txt", ".caption")
NO_IMAGES = "no images in {where}; add at least one image (10 to 30 are recommended)"


@dataclass(frozen=True)
class Source:
    """An image to copy: its path, its name, its caption; the folder it came from; quarter turns clockwise.

    crop: the part to keep of the turned image, as fractions. mask: a PNG that runs/masks.py has checked, of the image
    before it is turned, or `path` itself, in another data set: its alpha channel. weight: how often the image is
    repeated compared with the others, 1 to MAX_WEIGHT.
    """

    path: Path
    name: str
    caption: str
    folder: str = ""
    turn: int = 0
    crop: Crop | None = None
    mask: Path | None = None
    weight: int = 1


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
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
        if text.count("\0") * 3 > len(text):  # UTF-16 without its mark, or UTF-32
            raise UnicodeDecodeError("utf-8", content, content.index(0), len(content), "NUL")
        return one_line(text)
    except UnicodeDecodeError as error:
        kind = "UTF-16" if utf16 else "UTF-8"
        raise RunError(f"{name}: the caption is not {kind} (byte {error.start}); save the file as UTF-8") from error


def one_line(text: str) -> str:
    """A caption without line breaks, NULs and repeated spaces."""
    return " ".join(text.replace("\0", " ").split())


def gather(images: Path | Sequence[Source], trigger: str = "") -> list[Source]:
    """The images to copy. One without a caption gets the trigger word, else the subject of its folder, such as "cat"
    of `10_cat`.

    Args:
        images: a folder, or images with their captions.

    Raises:
        RunError: there are no images, or as `_in_folder`.
    """
    found = _in_folder(Path(images)) if isinstance(images, str | Path) else list(images)
    if not found:
        where = images if isinstance(images, str | Path) else "the selected files"
        raise RunError(NO_IMAGES.format(where=where))
    subjects = [(repeats_of(one.folder) or (0, ""))[1] for one in found]
    return [
        replace(one, caption=one_line(one.caption) or one_line(trigger) or subject)
        for one, subject in zip(found, subjects, strict=True)
    ]


def _in_folder(folder: Path) -> list[Source]:
    """The images of a folder and its subfolders, with the captions in the files beside them; hidden ones and other
    files are left out. The repeats that the folder's own name sets count, too; of another run's data set, its weights
    and masks.

    Raises:
        RunError: it is no folder, or a caption is not UTF-8; one line for each.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; use the folder of the images")
    folder = folder.absolute()
    with explained(f"read the images in {folder}"):
        files = sorted(filter(Path.is_file, files_below(folder, False)), key=lambda path: (path.parent, path.name))
    ours = folder.resolve().parent == datasets_dir().resolve()
    seen_from = folder.parent if repeats_of(folder.name) and not ours else folder
    errors, captions = [], dict[str, str]()
    for suffix in reversed(CAPTION_SUFFIXES):  # of two, the first kind counts
        for path in (path for path in files if path.suffix.lower() == suffix):
            try:
                captions[_pair(path)] = read_caption(path)
            except RunError as error:
                errors.append(str(error))
    if errors:
        raise RunError("\n".join(errors))
    found = []
    for path in filter(is_image_name, files):
        weight, inside = weight_of(_inside(path, seen_from)) if ours else (1, _inside(path, seen_from))
        mask = masks.of(folder, path) if ours else None
        found.append(Source(path, path.name, captions.get(_pair(path), ""), inside, mask=mask, weight=weight))
    return found


def _pair(path: Path) -> str:
    """What an image and its caption have in common. macOS writes é in two ways."""
    return unicodedata.normalize("NFC", os.fspath(path.with_suffix("")))


def _inside(path: Path, folder: Path) -> str:
    """The folder of a file, seen from `folder`; "" for that one itself."""
    inside = path.parent.relative_to(folder).as_posix()
    return "" if inside == "." else inside


def _plain(text: str) -> str:
    """Text as a file name's stem that is valid everywhere; "" where nothing is left of it."""
    from slugify import slugify

    stem = slugify(text, lowercase=False, regex_pattern=r"[^-a-zA-Z0-9_]+", max_length=80).strip("-_")
    return f"image-{stem}" if RESERVED_NAMES.fullmatch(stem) else stem


def folder_names(images: Iterable[tuple[str, int]]) -> list[str]:
    """The folder of the data set that `ingest` will write each image to.

    Args:
        images: the dropped folder and the weight of each, in order.
    """
    taken: set[str] = set()

    @functools.cache
    def name(folder: str, weight: int) -> str:
        wanted = _subfolder(folder)
        if weight != 1:
            base = name(folder, 1)
            number, _, rest = base.partition("_") if repeats_of(base) else ("", "", base)
            stem = f"weight-{weight}" + (f"-{rest}" if rest else "")
            wanted = f"{int(number) * weight}_{stem}" if number else stem
        return _unique(wanted, taken) if wanted else ""

    return [name(*one) for one in images]


def too_often(images: Iterable[tuple[str, int]]) -> str:
    """Why a run cannot have these images (as `folder_names`): a weight makes too many repeats; "" where none does."""
    for folder, weight in images:
        number, _ = repeats_of(folder) or (0, "")
        if weight > 1 and number * weight > MAX_REPEATS:
            return f"{folder}: {number} repeats × weight {weight} is more than {MAX_REPEATS}; lower one of them"
    return ""


def _subfolder(folder: str) -> str:
    """The name of a dropped folder's subfolder in the data set."""
    if not folder:
        return ""
    sets = repeats_of(folder)
    name = _plain("-".join(part for part in folder.split("/") if not (sets and repeats_of(part) == sets)))
    if sets:
        return f"{sets[0]}_{'-'.join(part for part in (name, _plain(sets[1])) if part)}"
    return f"folder-{name}" if not name or repeats_of(name) or weight_of(name)[0] > 1 else name


def unique_stem(name: str, taken: set[str]) -> str:
    """A file name's stem that is valid everywhere and not in `taken`; it is added to `taken`."""
    return _unique(_plain(Path(name).stem) or "image", taken)


def _unique(stem: str, taken: set[str]) -> str:
    numbered = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    free = next(name for name in numbered if name.casefold() not in taken)
    taken.add(free.casefold())
    return free


def ingest(
    sources: list[Source],
    folder: Path,
    on_note: Callable[[str], None] = lambda _: None,
    with_masks: bool = True,
) -> None:
    """Write the images and captions into `folder`, which is empty.

    Args:
        on_note: called with one sentence for each image that was changed and each warning.
        with_masks: whether the trainer uses masks; else they are kept beside the images (runs/masks.py).

    Raises:
        RunError: files are not images, damaged or too large; the message has one line for each.
        OSError: a file cannot be read or written.
    """
    placed, taken = [(source.folder, source.weight) for source in sources], dict[str, set[str]]()
    if why := too_often(placed):
        raise RunError(why)
    names = folder_names(placed)
    stems = [unique_stem(one.name, taken.setdefault(inside, set())) for one, inside in zip(sources, names, strict=True)]
    for inside in taken:
        (folder / inside).mkdir(exist_ok=True)

    def write(source: Source, inside: str, stem: str) -> tuple[str, str]:
        """What was changed of an image, and what is wrong with it."""
        try:
            mask = masks.opened(source.mask, source.name) if source.mask else None
            used, own = mask if with_masks else None, source.mask == source.path
            image, suffix, why = decoded(source.path, source.name, source.turn, source.crop, used, own)
        except RunError as error:
            return "", str(error)
        target = folder / inside / f"{stem}{suffix}"
        if not why:
            shutil.copyfile(source.path, target)
        elif suffix == ".jpg":
            image.save(target, format="JPEG", exif=b"", quality=95, subsampling=0)
        else:
            image.save(target, format="PNG", exif=b"", compress_level=3)
        if mask is not None and used is None:
            masks.put_aside(folder, target, mask, source.turn, source.crop)
        target.with_suffix(".txt").write_text(source.caption + "\n", encoding="utf-8", newline="\n")
        return why, ""

    with ThreadPoolExecutor(workers()) as pool:  # a photo of 24 megapixels takes a third of a second
        written = list(pool.map(write, sources, names, stems))
    if errors := [error for _, error in written if error]:
        raise RunError("\n".join(errors))
    for source, (why, _) in zip(sources, written, strict=True):
        if why:
            on_note(f"{source.name}: {why}")
        if not source.caption:
            on_note(f"{source.name}: no caption and no trigger word; it is trained with an empty caption")
    if len(sources) == 1:
        on_note("only one image: the LoRA will reproduce it; use 10 to 30 different images")


def images_in(folder: Path) -> list[Path]:
    """The images of a data set: those of the folder by name, then those of its subfolders."""
    if not folder.is_dir():
        return []
    inside = sorted(p for p in folder.iterdir() if p.name[0] != ".")
    folders = (sorted(p.iterdir()) for p in inside if p.is_dir() and not p.is_symlink())
    found = itertools.chain(inside, *folders)
    return [p for p in found if p.suffix.lower() in (*KEPT.values(), ".jpeg") and p.name[0] != "."]


def counts(folder: Path) -> dict[str, int]:
    """The number of images in each folder of a data set that has any; "" is the data set's own folder."""
    return Counter(_inside(path, folder) for path in images_in(folder))


def shown_per_epoch(images: Mapping[str, int], repeats: int) -> int:
    """How many images an epoch shows. A folder such as `10_cat` has its own repeats.

    Args:
        images: their number by folder. repeats: those of images outside such folders.
    """
    return sum(number * repeats_in(name, repeats) for name, number in images.items())


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
