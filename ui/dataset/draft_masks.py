"""The mask files of a draft: PNGs named by their content, kept while an image or an undo step names them.

The name of a mask that ignores the complete image ends in `-all.png`, so that a start can warn without reading every mask.
"""

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from runs import masks
from runs.files import RunError, atomic_write, explained
from ui.dataset import draft_store

if TYPE_CHECKING:
    from PIL import Image

IGNORES_ALL = "-all.png"
SPARE = 200  # files above those of the images, before unused ones are looked for: a stroke of the brush is a file


def store(draft_id: str, mask: "Image.Image") -> str:
    """Store a mask. Returns its file name in the draft's folder of masks. Raises RunError: the disk does not take it."""
    content = masks.png(mask)
    kind = IGNORES_ALL if mask.getextrema() == (0, 0) else ".png"
    name = f"{hashlib.sha256(content).hexdigest()[:24]}{kind}"
    target = draft_store.masks_dir(draft_id) / name
    with explained("store the mask"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file():
            atomic_write(target, content)
    return name


def delete_unused(draft_id: str) -> None:
    """Delete the masks that neither an image nor an undo step names; looks only when there are many."""
    with draft_store.locked(draft_id):
        state = draft_store.read(draft_id)
        needed = {entry["mask"] for entry in state["images"].values() if entry["mask"]}
        files = list(draft_store.masks_dir(draft_id).glob("*.png"))
        if len(files) <= len(needed) + SPARE:
            return
        try:
            for step in state["history"]:
                needed |= _named(draft_store.read_step(draft_id, step["n"]))
        except RunError:
            return  # a step that cannot be read may name any of them
        for path in files:
            if path.name not in needed:
                _delete(path)


def _named(step: dict) -> set[str]:
    changes = step.get("images", {}).values()
    return {name for change in changes for side in change if side and (name := side.get("mask"))}


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
