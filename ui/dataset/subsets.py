"""The subsets of a draft: named folders, each with its own repeats.

A subset is the folder of its images, and its repeats are in the folder's name, such as `10_cat`, as in kohya's trainers
(runs/dataset.py). So a subset exists as long as it has an image, and a folder that was dropped is a subset.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monitor.phrases import count
from presets.steps import repeats_of
from runs import archives
from runs.dataset import MAX_REPEATS, unique_stem
from runs.files import RunError
from ui.dataset.draft_store import State, change, plain_text, read

MAX_NAME = 100  # characters


def overview(draft_id: str) -> list[dict[str, Any]]:
    """The subsets by their first images: {"folder", "name" without the repeats, "repeats" or None, "images"}."""
    numbers = Counter(entry["folder"] for entry in read(draft_id)["images"].values())
    return [
        {"folder": folder, "name": name, "repeats": repeats, "images": number}
        for folder, number in numbers.items()
        for name, repeats in [parts_of(folder)]
    ]


def parts_of(folder: str) -> tuple[str, int | None]:
    """(name, repeats) of a subset's folder, such as ("cat", 10) for `10_cat` and ("cat", None) for `cat`."""
    found = repeats_of(folder)
    if not found:
        return folder, None
    parts = folder.split("/")
    at = max(number for number, part in enumerate(parts) if repeats_of(part) == found)
    parts[at] = parts[at].partition("_")[2]
    return "/".join(part for part in parts if part), found[0]


def folder_of(name: str, repeats: int | None = None) -> str:
    """The folder of a subset; "" is the data set's own folder. Raises RunError: the name cannot be used, or the repeats
    are no number from 1 to MAX_REPEATS."""
    name = " ".join(plain_text(name).split())
    if repeats is not None and (type(repeats) is not int or not 0 < repeats <= MAX_REPEATS):
        raise RunError(f"Repeats: use a whole number from 1 to {MAX_REPEATS}")
    if not name:
        if repeats is not None:
            raise RunError("Images outside a subset have the repeats of step 2; name the subset first")
        return ""
    if len(name) > MAX_NAME:
        raise RunError(f"The name has {len(name)} characters; shorten it to {MAX_NAME}")
    try:
        folder = archives.relative_name(name)
    except RunError:
        raise RunError("Name: use a name without .. and without a slash at its start") from None
    if archives.ignored(folder):
        raise RunError("Name: a name that starts with a dot is hidden; use another one")
    if repeats is None:
        return folder
    *outer, last = parts_of(folder)[0].split("/")
    return "/".join([*outer, f"{repeats}_{last}"])


def move(draft_id: str, image_ids: Iterable[str], name: str, repeats: int | None = None) -> int:
    """Move images into a subset, which is created where it does not exist; "" moves them out of all subsets. Returns
    how many moved. Raises RunError: the name or the repeats cannot be used.

    Args:
        name: as in `overview`; repeats: those of a new subset, or None for the repeats of step 2.
    """
    plain = folder_of(name, repeats)
    with change(draft_id) as edit:
        existing = {folder: parts_of(folder)[0] for folder in _folders(edit.state)}
        same = [folder for folder, known in existing.items() if plain in (folder, known)]
        folder = same[0] if same and repeats is None else plain
        moved = _put(edit.state, (key for key in image_ids if key in edit.state["images"]), folder)
        shown = f"the subset {parts_of(folder)[0]}" if folder else "no subset"
        edit.label = f"move of {count(moved, 'image')} to {shown}"
    return moved


def rename(draft_id: str, folder: str, name: str, repeats: int | None = None) -> int:
    """Give a subset another name ("": none, its images are in no subset) and other repeats (None: those of step 2).
    Returns its number of images. Raises RunError: there is no such subset, another one has the name, or the name or the
    repeats cannot be used."""
    wanted = folder_of(name, repeats)
    with change(draft_id) as edit:
        folders = _folders(edit.state)
        if folder not in folders:
            raise RunError("This subset has no images any more; reload the page")
        others = {parts_of(one)[0] for one in folders} - {parts_of(folder)[0]}
        if wanted != folder and wanted and (wanted in folders or parts_of(wanted)[0] in others):
            raise RunError(f"There is a subset {name!r} already; choose another name, or move the images into it")
        keys = [key for key, entry in edit.state["images"].items() if entry["folder"] == folder]
        moved = _put(edit.state, keys, wanted)
        edit.label = f"change of the subset {parts_of(folder)[0] or parts_of(wanted)[0]}"
    return moved


def _folders(state: State) -> list[str]:
    return list(dict.fromkeys(entry["folder"] for entry in state["images"].values()))


def _put(state: State, keys: Iterable[str], folder: str) -> int:
    """Move images into a folder; one whose name is taken there gets another. Returns how many moved."""
    images = state["images"]
    taken = {Path(entry["file"]).stem.casefold() for entry in images.values() if entry["folder"] == folder}
    there = {entry["sha256"]: entry["file"] for entry in images.values() if entry["folder"] == folder}
    moved = 0
    for key in list(keys):
        entry = images[key]
        if entry["folder"] == folder:
            continue
        if entry["sha256"] in there:
            raise RunError(f"{entry['file']}: the same image is there as {there[entry['sha256']]}; remove one of them")
        there[entry["sha256"]] = entry["file"]
        suffix = Path(entry["file"]).suffix
        file = f"{unique_stem(entry['file'], taken)}{suffix}"
        images[key] = {**entry, "file": file, "folder": folder}
        moved += 1
    return moved
