"""A draft of a LoRA: its images, captions and settings, stored on disk as soon as they are entered.

They are on disk and not in the browser's session, because a reload, a crash or a failed start must not lose an evening
of captions. A caption belongs to its image, which is named by its folder and content, never by its file name or
position: adding, moving or removing one image never changes the caption of another.

`draft_store.py` keeps the draft on disk, `draft_drop.py` takes in dropped files; the rest of the page uses this file only.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from presets.steps import repeats_of
from runs import env_file
from runs.dataset import MAX_WEIGHT, Source, folder_counts, one_line
from runs.files import RunError, explained
from runs.pictures import turned_crop
from ui.dataset import draft_history, draft_images, image_render
from ui.dataset.draft_drop import add, copy_dataset
from ui.dataset.draft_images import Entry
from ui.dataset.draft_items import Item, items
from ui.dataset.draft_store import (
    MAX_CAPTION,
    State,
    change,
    count,
    delete_expired,
    digest,
    folder,
    images_dir,
    is_id,
    locked,
    masks_dir,
    new_id,
    plain_text,
    read,
    read_step,
    touch,
    uploads_dir,
    write,
)

__all__ = [  # what the rest of the page uses by this module's name
    "Item",
    "add",
    "copy_dataset",
    "delete_expired",
    "folder",
    "images_dir",
    "is_id",
    "items",
    "locked",
    "masks_dir",
    "new_id",
    "plain_text",
    "touch",
    "uploads_dir",
]
MERGE_S = 5.0  # changes of one caption that follow each other within this time are one step
REMOVED = "This image was removed"
PERSON, FILE = "person", "file"
MASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def _entry(state: State, image_id: object) -> Entry:
    if not isinstance(image_id, str) or image_id not in state["images"]:
        raise RunError(REMOVED)
    entry: Entry = state["images"][image_id]
    return entry


def original(draft_id: str, image_id: str) -> Path:
    """Path of an image as it was dropped.

    Raises:
        RunError: the image was removed.
    """
    return images_dir(draft_id) / _entry(read(draft_id), image_id)["stored"]


def thumb(draft_id: str, item: Item) -> Path:
    """Path of an image's thumbnail, upright, cropped, with its mask; written when it is missing."""
    thumbs = folder(draft_id) / "thumbs"
    if item.crop or item.mask:
        path = thumbs / image_render.name_of(item.id, item.turn, item.crop, item.mask)
        mask = masks_dir(draft_id) / item.mask if item.mask else None
        if not path.is_file():
            whole = large(draft_id, item.id)
            image_render.write(whole, path, draft_images.THUMB_SIDE, item.turn, item.crop, mask)
        return path
    path = thumbs / f"{item.id}-{item.turn}.jpg"
    return path if path.is_file() else _scaled(draft_id, item.id, "", draft_images.THUMB_SIDE)


def large(draft_id: str, image_id: str) -> Path:
    """Path of a JPEG of at most 1,600 pixels, upright; browsers cannot show HEIC and TIFF."""
    return _scaled(draft_id, image_id, "-large", draft_images.LARGE_SIDE)


def _scaled(draft_id: str, image_id: str, kind: str, side: int) -> Path:
    entry = _entry(read(draft_id), image_id)
    path = folder(draft_id) / "thumbs" / f"{image_id}{kind}-{entry['turn']}.jpg"
    if not path.is_file():
        with explained("write a thumbnail"):
            draft_images.write_thumb(images_dir(draft_id) / entry["stored"], path, entry["turn"], side)
    return path


def counts(draft_id: str) -> dict[str, int]:
    """The number of images in each folder of the data set that a run would get; what runs.planned_steps counts."""
    return folder_counts((entry["folder"], entry["weight"]) for entry in read(draft_id)["images"].values())


def repeats(draft_id: str) -> dict[str, int]:
    """The repeats of each folder whose name sets them, such as `10_cat`."""
    folders = {entry["folder"] for entry in read(draft_id)["images"].values()}
    return {name: found[0] for name in folders if (found := repeats_of(name))}


def sources(draft_id: str) -> list[Source]:
    """The images with their captions, for runs.create."""
    return [
        Source(
            images_dir(draft_id) / entry["stored"],
            entry["file"],
            entry["caption"],
            entry["folder"],
            entry["turn"],
            tuple(entry["crop"]) if entry["crop"] else None,
            masks_dir(draft_id) / entry["mask"] if entry["mask"] else None,
            entry["weight"],
        )
        for entry in read(draft_id)["images"].values()
    ]


def waiting(draft_id: str) -> list[str]:
    """Names of caption files that have no matching image."""
    texts = read(draft_id)["texts"].items()
    return [f"{key.removeprefix('/')}.txt" for key, text in texts if not text["used"]]


def form(draft_id: str) -> dict[str, Any]:
    """The form values stored last."""
    values: dict[str, Any] = read(draft_id)["form"]
    return values


def save_fields(draft_id: str, changes: Mapping[str, Any], forget: Collection[str] = ()) -> None:
    """Store these form values exactly as typed, valid or not, and forget others; the rest stays."""
    with locked(draft_id):
        state = read(draft_id)
        stored = {**state["form"], **{key: _plain(value) for key, value in changes.items()}}
        if isinstance(changes.get("flags"), str):
            stored["flags"] = _plain(_without_secrets(draft_id, changes["flags"]))
        stored = {key: value for key, value in stored.items() if key not in forget}
        if state["form"] != stored:
            write(draft_id, {**state, "form": stored})


def _without_secrets(draft_id: str, flags: str) -> str:
    """The extra trainer options without the values of secrets, which are kept apart, with this draft."""
    text, found = env_file.of_lines(flags)
    known, names = {**env_file.read(folder(draft_id)), **found}, env_file.named_in(text)
    env_file.write(folder(draft_id), {name: value for name, value in known.items() if name in names})
    return text


def _plain(value: Any) -> Any:
    return plain_text(value) if isinstance(value, str) else value


def mark_in_a_run(draft_id: str) -> None:
    """Record that a run's data set contains these images and captions."""
    with locked(draft_id):
        state = read(draft_id)
        write(draft_id, {**state, "kept": digest(state)})


def images_not_in_a_run(draft_id: str) -> int:
    """Number of images when no run contains them with their captions, so that replacing the draft loses them; else 0."""
    state = read(draft_id)
    return 0 if digest(state) == state["kept"] else len(state["images"])


# Undo and redo ---------------------------------------------------------------------------------------------------------


def history(draft_id: str) -> tuple[str, str]:
    """What undo would undo and redo would redo, such as "caption of cat.png"; "" for nothing."""
    state = read(draft_id)
    steps, done = state["history"], state["done"]
    return steps[done - 1]["label"] if done else "", steps[done]["label"] if done < len(steps) else ""


def undo(draft_id: str) -> str | None:
    """Undo the last change of images or captions. Returns a sentence about it; None when there is nothing to undo."""
    return _travel(draft_id, draft_history.UNDO)


def redo(draft_id: str) -> str | None:
    """Make the change again that was undone last. Returns a sentence about it; None when there is none."""
    return _travel(draft_id, draft_history.REDO)


def _travel(draft_id: str, side: int) -> str | None:
    with locked(draft_id):
        state = read(draft_id)
        at = state["done"] - (side == draft_history.UNDO)
        if not 0 <= at < len(state["history"]):
            return None
        entry = state["history"][at]
        state = draft_history.applied(state, read_step(draft_id, entry["n"]), side)
        write(draft_id, {**state, "done": at + (side == draft_history.REDO)})
    return f"{'Undone' if side == draft_history.UNDO else 'Redone'}: {entry['label']}."


# Changes ---------------------------------------------------------------------------------------------------------------


def set_caption(draft_id: str, image_id: str, text: str) -> None:
    """Store a caption as typed.

    Raises:
        RunError: the image was removed, or the caption is longer than MAX_CAPTION characters.
    """
    text = plain_text(text)
    with change(draft_id, merge=f"caption:{image_id}", within_s=MERGE_S) as edit:
        entry = _entry(edit.state, image_id)
        if len(text) > MAX_CAPTION:
            raise RunError(f"{entry['file']}: the caption has {len(text)} characters; shorten it to {MAX_CAPTION}")
        if text != entry["caption"]:
            edit.state["images"][image_id] = written(entry, text, PERSON)
        edit.label = lambda step: f"caption of {entry['file']}"


def written(entry: Entry, caption: str, author: str) -> Entry:
    """An image's entry with another caption, and who wrote it; nobody wrote an empty one."""
    return {**entry, "caption": caption, "caption_by": author if caption.strip() else ""}


def set_captions(
    draft_id: str,
    captions: Mapping[str, str],
    label: str,
    source: str = PERSON,
    keep_written: bool = False,
    merge: str = "",
) -> int:
    """Store captions by image id, as one step. Images that were removed are left out.

    Args:
        label: what undo calls the step, such as "captions of Florence-2". source: who wrote them, "person" or "model".
        keep_written: leave captions that a person wrote or a file brought. merge: see draft_store.change; parts of one
            job with the same text are one step.

    Returns:
        How many captions changed.

    Raises:
        RunError: a caption is longer than MAX_CAPTION characters; no caption was changed.
    """
    with change(draft_id, merge=merge) as edit:
        images, changed = edit.state["images"], 0
        for key, text in captions.items():
            entry, text = images.get(key), plain_text(text)
            if entry is None or text == entry["caption"]:
                continue
            if keep_written and entry["caption"].strip() and entry["caption_by"] in (PERSON, FILE):
                continue
            if len(text) > MAX_CAPTION:
                raise RunError(f"{entry['file']}: the caption has {len(text)} characters; shorten it to {MAX_CAPTION}")
            images[key] = written(entry, text, source)
            changed += 1
        edit.label = lambda step: label
    return changed


def set_fields(draft_id: str, image_ids: Iterable[str], values: Mapping[str, Any], label: str) -> int:
    """Set fields of images, as one step: crop, mask, weight and turn, see Item. Returns how many images changed.

    Args:
        label: what undo calls the step, such as "crop of cat.png".

    Raises:
        RunError: all the images were removed, or a value is not one that the field can have.
    """
    for name, value in values.items():
        if name not in FIELD_CHECKS or not FIELD_CHECKS[name](value):
            raise RunError(f"{name}: {value!r} is not a value of this field; reload the page")
    values = {name: list(value) if name == "crop" and value else value for name, value in values.items()}
    with change(draft_id) as edit:
        images, changed = edit.state["images"], 0
        found = [key for key in image_ids if key in images]
        if not found:
            raise RunError(REMOVED)
        for key in found:
            if any(images[key][name] != value for name, value in values.items()):
                images[key] = {**images[key], **values}
                changed += 1
        edit.label = lambda step: label
    return changed


def _is_crop(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, list | tuple) or len(value) != 4:
        return False
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one <= 1 for one in value):
        return False
    return value[0] < value[2] and value[1] < value[3]


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    "crop": _is_crop,
    "mask": lambda value: value is None or (isinstance(value, str) and bool(MASK_NAME.fullmatch(value))),
    "weight": lambda value: _is_whole(value, 1, MAX_WEIGHT),
    "turn": lambda value: _is_whole(value, 0, 3),
}


def insert_trigger(draft_id: str, trigger: str) -> int:
    """Put the trigger word before every caption that does not start with it.

    Returns:
        How many captions changed.

    Raises:
        RunError: `trigger` is empty.
    """
    word = one_line(trigger)
    if not word:
        raise RunError("Type a trigger word in step 1 first")
    with change(draft_id) as edit:
        images, changed = edit.state["images"], 0
        for key, entry in images.items():
            caption = _with_trigger(entry["caption"], word)
            if caption != entry["caption"]:
                images[key] = {**entry, "caption": caption}
                changed += 1
        edit.label = lambda step: f"trigger word in {count(changed, 'caption')}"
    return changed


def _with_trigger(caption: str, word: str) -> str:
    if caption.split(",")[0].strip() == word:
        return caption
    return f"{word}, {caption}" if caption.strip() else word


def remove(draft_id: str, ids: Iterable[str]) -> None:
    """Remove images; the other captions stay unchanged, and undo brings them back."""
    with change(draft_id) as edit:
        gone = [edit.state["images"].pop(key) for key in ids if key in edit.state["images"]]
        edit.label = lambda step: f"removal of {gone[0]['file'] if len(gone) == 1 else count(len(gone), 'image')}"


def clear(draft_id: str) -> None:
    """Remove all images and captions; the settings stay, and undo brings the images back."""
    with change(draft_id) as edit:
        number = len(edit.state["images"])
        edit.label = lambda step: f"removal of {count(number, 'image')}"
        edit.state |= {"images": {}, "texts": {}}


def move(draft_id: str, image_id: str, before_id: str | None) -> None:
    """Move an image before another one, or to the end.

    Raises:
        RunError: one of them was removed.
    """
    with change(draft_id) as edit:
        entry = _entry(edit.state, image_id)
        if before_id is not None:
            _entry(edit.state, before_id)
        edit.label = lambda step: f"place of {entry['file']}"
        if before_id == image_id:
            return
        order = [key for key in edit.state["images"] if key != image_id]
        order.insert(len(order) if before_id is None else order.index(before_id), image_id)
        edit.state["images"] = {key: edit.state["images"][key] for key in order}


def fix(draft_id: str, image_id: str, code: str) -> None:
    """Fix a warning: "sideways" rotates the image (upright where its EXIF data says how, else 90° clockwise), "small"
    and "near" remove it, "no_caption" sets the trigger word as its caption.

    Raises:
        RunError: the image was removed, there is no trigger word, or the code is unknown.
    """
    with change(draft_id) as edit:
        entry = _entry(edit.state, image_id)
        kind = code.split(":")[0]
        if kind == "sideways":
            turn = entry["upright"] if entry["upright"] and not entry["turn"] else entry["turn"] + 1
            crop = turned_crop(entry["crop"], turn - entry["turn"])
            edit.state["images"][image_id] = {**entry, "turn": turn % 4, "crop": crop and list(crop)}
            edit.label = lambda step: f"rotation of {entry['file']}"
        elif kind in ("small", "near"):
            del edit.state["images"][image_id]
            edit.label = lambda step: f"removal of {entry['file']}"
        elif kind == "no_caption":
            word = one_line(str(edit.state["form"].get("trigger") or ""))
            if not word:
                raise RunError("Type a trigger word in step 1 first")
            edit.state["images"][image_id] = {**entry, "caption": _with_trigger(entry["caption"], word)}
            edit.label = lambda step: f"caption of {entry['file']}"
        else:
            raise RunError("This page is out of date; reload it")
