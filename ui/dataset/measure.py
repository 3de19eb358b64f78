"""What the pixels of an image show: sharpness, brightness, whether it is damaged. Kept by content, because it takes a while.

`checks.jsonl` in the draft's folder has one line for each content (SHA-256). Lines are only appended, so a check that
is killed continues after the last line, and a second check measures only what is new. The check is a process of its own
(ui/dataset/doctor.py), which a restart of the page does not stop.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from runs.files import RunError, explained
from runs.pictures import DAMAGE, EXIF_ORIENTATION, eight_bits, opened

NAME = "checks.jsonl"
VERSION = 1
SIDE = 512  # pixels: the size at which sharpness is compared; a smaller image is not enlarged
REPORT_S = 0.5
WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Measure:
    """What was measured of a content. error: why it cannot be read, "" if it can; pixels: hash of what it shows.

    sharpness: variance of the Laplacian in parts of that of the brightness. contrast: variance of the brightness. mean, low,
    high: brightness of 0 to 255: mean, 5th and 95th percentile. changes: what is converted before the training.
    orientation: that of its EXIF data, 1 for upright.
    """

    error: str = ""
    pixels: str = ""
    sharpness: float = 0.0
    contrast: float = 0.0
    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    changes: str = ""
    orientation: int = 1


def measure(path: Path, name: str, sha256: str = "") -> Measure:
    """Measure an image file.

    Args:
        name: the name in messages. sha256: of the content that was added; "" to skip that comparison.
    """
    import numpy
    from PIL import Image

    try:
        if sha256:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return Measure(f"{name}: the file was changed since you added it; remove it and add it again")
        with opened(path, name) as image:
            size, kind, (changes, orientation) = image.size, image.mode, changes_of(image)
            if image.format == "JPEG":
                image.draft("L", (SIDE, SIDE))  # decodes at a fraction of the size
            grey = _grey(image)
            grey.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    except FileNotFoundError:
        return Measure(f"{name}: the file is missing; remove the image and add it again")
    except RunError as error:
        return Measure(str(error))
    except OSError as error:
        return Measure(f"{name}: cannot be read ({error.strerror or error})")
    values = numpy.asarray(grey, dtype=numpy.float32)
    shown = hashlib.sha256(f"{size}{kind}{orientation}".encode() + grey.tobytes()).hexdigest()[:24]
    contrast = float(values.var())
    low, high = (float(one) for one in numpy.percentile(values, (5, 95)))
    sharp = 0.0
    if min(values.shape) > 2 and contrast > 0:
        inner = values[1:-1, 1:-1]
        laplacian = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:] - 4 * inner
        sharp = float(laplacian.var()) / contrast
    return Measure(
        pixels=shown,
        sharpness=round(sharp, 5),
        contrast=round(contrast, 2),
        mean=round(float(values.mean()), 2),
        low=round(low, 2),
        high=round(high, 2),
        changes=changes,
        orientation=orientation,
    )


def _grey(image: Any) -> Any:
    """The image in 8 bits of grey, transparent parts on white, as it is trained."""
    from PIL import Image

    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("L")
    if image.mode.startswith(("I", "F")):
        return eight_bits(image)
    return image.convert("L")


def changes_of(image: Any) -> tuple[str, int]:
    """(what runs.pictures.decoded changes of an image that was opened but not decoded, its EXIF orientation).

    "" for nothing that changes how it looks or what a trainer reads; the format alone is not named.
    """
    reasons, orientation = [], 1
    if getattr(image, "n_frames", 1) > 1 and image.format not in ("HEIF", "MPO"):
        reasons.append("only the first frame is used")
    try:
        orientation = image.getexif().get(EXIF_ORIENTATION, 1)
    except DAMAGE:
        reasons.append("its EXIF data cannot be read")
    if image.has_transparency_data:
        reasons.append("transparency becomes white")
    elif image.mode.startswith(("I", "F")):
        reasons.append("reduced to 8 bits per channel")
    elif image.mode not in ("RGB", "L"):
        reasons.append(f"{image.mode} becomes RGB")
    return ", ".join(reasons), orientation if isinstance(orientation, int) and 1 < orientation < 9 else 1


# The file of measures ----------------------------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, Measure]:
    """The measures in a draft's folder by SHA-256; the same table as before while nothing was appended."""
    try:
        state = (folder / NAME).stat()
        return _stored(folder / NAME, state.st_ino, state.st_size)
    except OSError:
        return {}


@functools.lru_cache(maxsize=8)
def _stored(path: Path, inode: int, size: int) -> dict[str, Measure]:
    return dict(one for line in path.read_bytes().splitlines() if (one := _parsed(line)) is not None)


def _parsed(line: bytes) -> tuple[str, Measure] | None:
    """(SHA-256, measure) of a line; None for one of another version, or cut off."""
    try:
        values = json.loads(line)
        if values.pop("version") != VERSION:
            return None
        sha256 = str(values.pop("sha256"))
        texts = all(isinstance(values[one.name], str if one.type is str else int | float) for one in fields(Measure))
        return (sha256, Measure(**values)) if texts else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def missing(folder: Path, entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a draft whose content was not measured yet, each content once. A file that is gone is measured again."""
    known, images = stored(folder), folder / "images"
    found = {}
    for entry in entries.values():
        measure_ = known.get(entry["sha256"])
        if measure_ is None or measure_.error or not _has_size(images / entry["stored"], entry["bytes"]):
            found[entry["sha256"]] = entry
    return list(found.values())


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size or not size
    except OSError:
        return False


def run(folder: Path, entries: dict[str, dict[str, Any]], on_line: Any = print) -> int:
    """Measure what is missing, several files at once; returns their number. on_line: called with "N of M" now and then.
    Raises RunError: the measures cannot be stored."""
    todo, done, reported_s = missing(folder, entries), 0, 0.0
    total = len(todo)
    on_line(f"0 of {total}")
    with explained("store what was found"), (folder / NAME).open("ab", buffering=0) as file:
        if file.tell():
            file.write(b"\n")  # after a line that was cut off by a kill
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            jobs = {pool.submit(measure, folder / "images" / e["stored"], e["file"], e["sha256"]): e for e in todo}
            for job in concurrent.futures.as_completed(jobs):
                line = {"version": VERSION, "sha256": jobs[job]["sha256"], **asdict(job.result())}
                file.write(json.dumps(line).encode() + b"\n")
                done += 1
                if time.monotonic() - reported_s >= REPORT_S or done == total:
                    reported_s = time.monotonic()
                    on_line(f"{done} of {total}")
    return total
