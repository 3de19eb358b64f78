"""Converts images of a draft to what is trained of them: RGB, one frame, upright.

The converted file is a new one beside the old, so that undo brings the old one back.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runs.files import RunError, explained
from runs.pictures import decoded
from ui.dataset import draft, draft_store
from ui.dataset.draft_images import Entry

STEP_IMAGES = 50  # that are stored, and undone, together


def convert(draft_id: str, ids: Sequence[str], on_line: Callable[[str], object] = print) -> int:
    """Convert these images; returns how many. One that cannot be read is left as it is. Raises RunError: the disk does
    not take them."""
    entries, done = draft_store.read(draft_id)["images"], 0
    todo = [key for key in ids if key in entries]
    for start in range(0, len(todo), STEP_IMAGES):
        shown = (on_line(f"{number} of {len(todo)}") for number in itertools.count(start))
        done += _convert(draft_id, {key: entries[key] for key in todo[start : start + STEP_IMAGES]}, shown)
    on_line(f"{len(todo)} of {len(todo)}")
    return done


def _convert(draft_id: str, entries: dict[str, Entry], shown: Iterator[object]) -> int:
    """Convert these images as one step; `shown` is asked for its next value before each."""
    root = draft.images_dir(draft_id)
    with explained("store a converted image"), draft_store.working(draft_id) as work:
        made = {
            key: _converted(root, work, key, entry) for (key, entry), _ in zip(entries.items(), shown, strict=False)
        }

        def store(key: str, entry: Entry) -> Entry | None:
            new = made[key]
            if new is None or entry["stored"] != entries[key]["stored"]:
                return None
            (work / new["stored"]).replace(root / new["stored"])
            return new

        return draft.change_images(draft_id, made, store, "conversion of {}")


def _converted(root: Path, work: Path, key: str, entry: Entry) -> Entry | None:
    """The fields of an entry whose file is the converted one, which is written into `work`; None when it cannot be read."""
    try:
        image, suffix, _ = decoded(root / entry["stored"], entry["file"])
    except RunError:
        return None
    new = work / f"{key}{suffix}"
    if suffix == ".jpg":
        image.save(new, format="JPEG", exif=b"", quality=95, subsampling=0)
    else:
        image.save(new, format="PNG", exif=b"", compress_level=3)
    with new.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    stored = f"{key}-{sha256[:12]}{suffix}"
    new.replace(work / stored)
    return {
        "stored": stored,
        "file": f"{Path(entry['file']).stem}{suffix}",
        "sha256": sha256,
        "bytes": (work / stored).stat().st_size,
        "width": image.width,
        "height": image.height,
        "upright": 0,
    }
