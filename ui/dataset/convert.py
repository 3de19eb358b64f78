"""Converts images of a draft to what is trained of them: RGB, one frame, upright.

The converted file is a new one beside the old, so that undo brings the old one back.
"""

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runs.files import RunError, explained
from runs.pictures import decoded
from ui.dataset import draft, draft_store

STEP_IMAGES = 50  # that are stored, and undone, together


def convert(draft_id: str, ids: Sequence[str], on_line: Callable[[str], object] = print) -> int:
    """Convert these images; returns how many. One that cannot be read is left as it is.

    Raises:
        RunError: the disk does not take them.
    """
    entries, root, done = draft_store.read(draft_id)["images"], draft.images_dir(draft_id), 0
    todo = [key for key in ids if key in entries]
    for start in range(0, len(todo), STEP_IMAGES):
        part: dict[str, dict[str, Any]] = {}
        with explained("store a converted image"), contextlib.ExitStack() as stack:
            work = draft.folder(draft_id) / f".new-{secrets.token_hex(6)}"
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            work.mkdir()
            for key in todo[start : start + STEP_IMAGES]:
                on_line(f"{start + len(part)} of {len(todo)}")
                if (new := _converted(root, work, key, entries[key])) is not None:
                    part[key] = new
            with draft_store.change(draft_id) as edit:
                images = edit.state["images"]
                for key, new in part.items():
                    if key in images and images[key]["stored"] == entries[key]["stored"]:
                        (work / new["stored"]).replace(root / new["stored"])
                        images[key] = {**images[key], **new}
                        done += 1
                edit.label = lambda step: f"conversion of {draft_store.count(len(step['images']), 'image')}"
    on_line(f"{len(todo)} of {len(todo)}")
    return done


def _converted(root: Path, work: Path, key: str, entry: dict[str, Any]) -> dict[str, Any] | None:
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
