"""A draft of a LoRA: its images, captions and settings, stored on disk as soon as they are entered.

They are on disk and not in the browser's session, because a reload, a crash or a failed start must not lose an evening
of captions. A caption belongs to its image, which is named by its folder and content, never by its file name or
position: adding or removing one image never changes the caption of another.

`draft_store.py` keeps the draft on disk, `draft_drop.py` takes in dropped files; the rest uses this file only.
"""

import contextlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from guards.reading import read_text
from monitor.phrases import count
from runs import env_file
from runs.dataset import Source, folder_names, one_line
from runs.files import RunError
from runs.paths import datasets_dir, outputs_dir
from runs.pictures import cropped_size, turned_crop
from ui import jobs
from ui.dataset import draft_images, draft_store
from ui.dataset.draft_drop import add, copy_dataset
from ui.dataset.draft_images import Entry
from ui.dataset.draft_store import (
    OUT_OF_DATE,
    folder,
    history,
    images_dir,
    is_id,
    locked,
    masks_dir,
    new_id,
    plain_text,
    undo,
    uploads_dir,
)
from ui.html import duration
from ui.run.readers import stamp

# For the rest of the page.
__all__ = ["OUT_OF_DATE", "add", "copy_dataset", "history", "is_id", "new_id", "undo", "uploads_dir"]
UPLOAD_EXPIRES_S = 24 * 3600
DRAFT_EXPIRES_S = 60 * 24 * 3600  # counted from the last time a page opened the draft
RECENT = 8  # drafts to choose from
MERGE_S = 5.0  # changes of one caption that follow each other within this time are one step
REMOVED = "This image was removed"
PERSON, FILE = "person", "file"
SCRIPT = "script.json"  # the edited script


# Text as a browser sends it: half of a character that takes two is replaced, and not refused.
Text = Annotated[str, BeforeValidator(plain_text)]


@dataclass(frozen=True)
class Item:
    """One image of a draft.

    file: its name in its folder. folder: the relative path of the dropped folder it came from, "" for none. width,
    height: pixels as shown, before the crop. warnings: codes, see draft_images.warnings_of. crop: left, top, right,
    bottom as fractions of the image as shown. mask: the name of a file in the draft's `masks/`. weight: 1 to 10.
    caption_by: who wrote the caption: "person", "file", "model", or "" where nobody did. changes, looks: see
    draft_images.measured. trained_size: width and height after the crop.
    """

    id: str
    file: str
    folder: str
    width: int
    height: int
    caption: str
    sha256: str
    warnings: tuple[str, ...]
    near: str = ""  # the id of the earlier image that this one is nearly identical to
    turn: int = 0  # quarter turns clockwise that the user added
    crop: tuple[float, float, float, float] | None = None
    mask: str | None = None
    weight: int = 1
    caption_by: str = ""
    changes: str = ""
    looks: Mapping[str, Any] = field(default_factory=dict)
    trained_size: tuple[int, int] = (0, 0)


COPIED = ("file", "folder", "caption", "sha256", "turn", "mask", "weight", "caption_by", "changes", "looks")


def items(draft_id: str) -> list[Item]:
    """The images in display order. Do not change the list: it is shared."""
    with draft_store.lock:
        images, memory = draft_store.read(draft_id)["images"], draft_store.memory(draft_id)
        if memory.get("images") is not images:  # a page of twelve cards does not build those of 10,000 images again
            near = draft_images.near_of(tuple((key, entry["hash"]) for key, entry in images.items() if entry["hash"]))
            before: dict[str, tuple[Entry, Item]] = memory.get("made", {})
            made: dict[str, tuple[Entry, Item]] = {}
            for key, entry in images.items():
                known, near_id = before.get(key), near.get(key, "")
                if known is None or known[0] is not entry or known[1].near != near_id:  # else nothing of it has changed
                    known = entry, _item(key, entry, near_id)
                made[key] = known
            found = [item for _, item in made.values()]
            folders = Counter(folder_names((one.folder, one.weight) for one in found))
            memory |= {"images": images, "made": made, "items": found, "counts": folders}
        result: list[Item] = memory["items"]
        return result


def _item(key: str, entry: Entry, near: str) -> Item:
    size = (entry["width"], entry["height"])
    width, height = reversed(size) if entry["turn"] % 2 else size
    crop = tuple(entry["crop"]) if entry["crop"] else None
    trained = cropped_size((width, height), crop)
    warnings = draft_images.warnings_of(entry, trained, near)
    same = {name: entry[name] for name in COPIED if name in entry}  # an older version did not measure all of it
    same |= {"crop": crop, "trained_size": trained}
    return Item(id=key, width=width, height=height, warnings=warnings, near=near, **same)


def item(draft_id: str, image_id: str) -> Item:
    """An image of a draft. Raises RunError: it was removed."""
    for one in items(draft_id):
        if one.id == image_id:
            return one
    raise RunError(REMOVED)


def _entry(state: draft_store.State, image_id: object) -> Entry:
    if not isinstance(image_id, str) or image_id not in state["images"]:
        raise RunError(REMOVED)
    return state["images"][image_id]


def original(draft_id: str, image_id: str) -> Path:
    """Path of an image as it was dropped. Raises RunError: the image was removed."""
    return images_dir(draft_id) / _entry(draft_store.read(draft_id), image_id)["stored"]


def thumb(draft_id: str, item: Item) -> Path:
    """Path of an image's thumbnail, upright, cropped, with its mask; written when it is missing."""
    return _picture(draft_id, item, draft_images.THUMB_SIDE, item.crop, item.mask)


def large(draft_id: str, image_id: str) -> Path:
    """Path of a JPEG of at most 1,600 pixels, upright; browsers cannot show HEIC and TIFF."""
    return _picture(draft_id, item(draft_id, image_id), draft_images.LARGE_SIDE)


def _picture(draft_id: str, item: Item, side: int, crop: Any = None, mask: str | None = None) -> Path:
    path = folder(draft_id) / "thumbs" / draft_images.picture_name(item.id, side, item.turn, crop, mask)
    if not path.is_file() or not path.stat().st_size:  # a power cut leaves an empty one
        source = masks_dir(draft_id) / mask if mask else None
        draft_images.write_picture(original(draft_id, item.id), path, side, item.turn, crop, source)
    return path


def counts(draft_id: str) -> dict[str, int]:
    """The number of images in each folder of the data set that a run would get; what runs.planned_steps counts."""
    with draft_store.lock:
        return dict(draft_store.memory(draft_id)["counts"]) if items(draft_id) else {}


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
        for entry in draft_store.read(draft_id)["images"].values()
    ]


def waiting(draft_id: str) -> list[str]:
    """Names of caption files that have no matching image."""
    return [f"{key.removeprefix('/')}.txt" for key in draft_store.waiting(draft_store.read(draft_id))]


def form(draft_id: str) -> dict[str, Any]:
    """The form values stored last."""
    return draft_store.read(draft_id)["form"]


def edited_script(draft_id: str) -> Path:
    """The file of the script that a person edited, if one did; that of its secrets is named after it."""
    return folder(draft_id) / SCRIPT


def save_fields(draft_id: str, changes: Mapping[str, Any], forget: Collection[str] = ()) -> None:
    """Store these form values exactly as typed, valid or not, and forget others; the rest stays."""
    with locked(draft_id) as file:
        state = file.state
        stored = {**state["form"], **{key: plain_text(value) for key, value in changes.items()}}
        if isinstance(changes.get("flags"), str):
            stored["flags"] = plain_text(_without_secrets(draft_id, changes["flags"]))
        stored = {key: value for key, value in stored.items() if key not in forget}
        if state["form"] != stored:
            file.store({**state, "form": stored})


def _without_secrets(draft_id: str, flags: str) -> str:
    """The extra trainer options without the values of secrets, which are kept apart, with this draft."""
    text, found = env_file.of_lines(flags)
    known, names = {**env_file.read(folder(draft_id)), **found}, env_file.named_in(text)
    env_file.write(folder(draft_id), {name: value for name, value in known.items() if name in names})
    return text


def taken(draft_id: str) -> dict[str, Any]:
    """What a run that is made now takes from the draft, for `mark_in_a_run`."""
    state = draft_store.read(draft_id)
    return {"kept": draft_store.digest(state), "settings": [state["form"], read_text(edited_script(draft_id))]}


def mark_in_a_run(draft_id: str, given: Mapping[str, Any]) -> None:
    """Record that a run has these images, captions and settings. A disk that does not take it changes nothing of the
    run: the page then only asks before it replaces them."""
    with contextlib.suppress(RunError), locked(draft_id) as file:
        file.store({**file.state, **given})


def images_not_in_a_run(draft_id: str) -> int:
    """The number of images that replacing the draft would lose: no run contains them with their captions; else 0."""
    state = draft_store.read(draft_id)
    return 0 if draft_store.digest(state) == state["kept"] else len(state["images"])


def settings_not_in_a_run(draft_id: str) -> bool:
    """Whether replacing the draft would lose settings or an edited script that no run has."""
    return bool(taken(draft_id)["settings"] != draft_store.read(draft_id)["settings"])


# Changes --------------------------------------------------------------------------------------------------------------


def change_images(
    draft_id: str,
    ids: Iterable[str] | None,
    make: Callable[[str, Entry], Mapping[str, Any] | None],
    label: str,
    needed: bool = False,
    **merge: Any,
) -> int:
    """Change values of images as one step, and return how many images changed; ids of removed images are left out.
    Raises RunError: an image was removed, and all are `needed`.

    Args:
        ids: the images; None for all. make: the new values of an image, from its id and its entry; None for no change.
        label: what undo calls the step, such as "crop of {}"; {} is the file of the image, or "3 images", and {captions}
            is "3 captions". needed: see Raises. merge: see draft_store.change.
    """
    with draft_store.change(draft_id, **merge) as edit:
        images, changed = edit.state["images"], []
        for key in dict.fromkeys(images if ids is None else ids):
            if key not in images and not needed:
                continue
            entry = _entry(edit.state, key)
            new = make(key, entry)
            if new and any(entry[name] != value for name, value in new.items()):
                images[key] = {**entry, **new}
                changed.append(entry["file"])
        label = label.replace("{captions}", count(len(changed), "caption"))
        edit.label = label.replace("{}", changed[0] if len(changed) == 1 else count(len(changed), "image"))
    return len(changed)


def captioned(entry: Entry, text: str, author: str = PERSON) -> Entry:
    """The values of an image with another caption, and who wrote it; nobody wrote an empty one. Raises RunError: the
    caption is longer than MAX_CAPTION characters."""
    if text == entry["caption"]:
        return {}
    if len(text) > draft_store.MAX_CAPTION:
        raise RunError(f"{entry['file']}: a caption of {len(text)} characters; shorten it to {draft_store.MAX_CAPTION}")
    return {"caption": text, "caption_by": author if text.strip() else ""}


def set_caption(draft_id: str, image_id: str, text: str) -> None:
    """Store a caption as typed. Raises RunError: the image was removed, or the caption is longer than
    draft_store.MAX_CAPTION characters."""
    merge: dict[str, Any] = {"merge": f"caption:{image_id}", "within_s": MERGE_S}
    typed = plain_text(text)
    change_images(draft_id, [image_id], lambda _, entry: captioned(entry, typed), "caption of {}", True, **merge)


def trigger(draft_id: str) -> str:
    """The trigger word that the draft's form has; "" for none."""
    return one_line(str(form(draft_id).get("trigger") or ""))


def with_trigger(word: str) -> Callable[[Entry], Entry]:
    """What puts the trigger word before a caption that does not start with it. Raises RunError: there is no word."""
    if not word:
        raise RunError("Type a trigger word in step 2 first")

    def make(entry: Entry) -> Entry:
        caption = entry["caption"]
        if re.match(rf"\s*{re.escape(word)}\s*(,|$)", caption):  # a word may have commas itself
            return {}
        return {"caption": f"{word}, {caption}" if caption.strip() else word}

    return make


def insert_trigger(draft_id: str, id: str | None = None) -> None:
    """Put the trigger word before every caption that does not start with it, or before that of one image. Raises
    RunError: the image was removed, or there is no trigger word."""
    make, ids = with_trigger(trigger(draft_id)), None if id is None else [id]
    change_images(draft_id, ids, lambda _, entry: make(entry), "trigger word in {captions}", needed=True)


def remove(draft_id: str, ids: list[str]) -> None:
    """Remove images; the other captions stay unchanged, and undo brings them back."""
    with draft_store.change(draft_id) as edit:
        gone = [edit.state["images"].pop(key) for key in ids if key in edit.state["images"]]
        edit.label = f"removal of {gone[0]['file'] if len(gone) == 1 else count(len(gone), 'image')}"


def clear(draft_id: str) -> None:
    """Remove all images and captions; the settings stay, and undo brings the images back."""
    with draft_store.change(draft_id) as edit:
        edit.label = f"removal of {count(len(edit.state['images']), 'image')}"
        edit.state |= {"images": {}, "texts": {}}


def rotated(entry: Entry, turns: int | None = None) -> Entry:
    """The values of an image that is rotated by quarter turns clockwise, with its crop. None: as its EXIF data says; by
    90° where it does not say."""
    if turns is None:
        turns = entry["upright"] if entry["upright"] and not entry["turn"] else 1
    crop = turned_crop(entry["crop"], turns)
    return {"turn": (entry["turn"] + turns) % 4, "crop": crop and list(crop)}


# All drafts of the data folder --------------------------------------------------------------------------------------


def _folders() -> list[Path]:
    return [path for path in (datasets_dir() / ".drafts").glob("*") if is_id(path.name)]


def recent(own: str = "") -> list[dict[str, Any]]:
    """The drafts that were used last, except one's own, so that another browser can continue one."""
    found = list[dict[str, Any]]()
    for used, place in sorted(((last_used(*content_files(one)), one) for one in _folders()), reverse=True):
        if used and len(found) < RECENT and place.name != own:
            try:
                state = draft_store.read(place.name)
            except RunError:
                continue  # a file that cannot be read is no draft to continue
            images, name = len(state["images"]), state["form"].get("name", "")
            if images or name:
                age = duration(time.time() - used)
                found.append({"id": place.name, "name": name, "images": images, "age": f"{age} ago"})
    return found


def delete_expired() -> None:
    """Delete uploads and runs that a kill left half made after one day, and drafts that no page has opened for 60 days.

    An upload is deleted by its age only: two drops of one file share its path, and an import has a link of its own. A
    draft at which a command works (ui/jobs.py) stays as it is: after a night's sleep, what it writes is old too.
    """
    for_a_day = [*uploads_dir().glob("*"), *datasets_dir().glob(".new-*"), *outputs_dir().glob(".new-*")]
    old = [path for path in for_a_day if _is_older(UPLOAD_EXPIRES_S, path, *path.glob("*"))]
    for path in _folders():
        expired = [path] if _is_older(DRAFT_EXPIRES_S, *(content_files(path) or [path])) else []
        unfinished = path.glob(".new-*")  # of drops that ended with the server
        expired += [new for new in unfinished if _is_older(UPLOAD_EXPIRES_S, new)]
        places = [path, *(one.parent for one in path.glob(f"*/{jobs.FOLDER}"))]
        if expired and not any(map(jobs.at_work, places)):
            old += expired
    for path in old:
        draft_store.close(path / draft_store.NAME)
        for kept in (path, path / SCRIPT, path / "rehearsal"):
            env_file.forget(kept)
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def content_files(place: Path) -> list[Path]:
    """The files with the content of the draft in a folder. Reading makes an empty write-ahead log, which is none."""
    return [path for name in ("", "-wal") if stamp(path := place / f"{draft_store.NAME}{name}").size]


def last_used(*paths: Path) -> float:
    """When the newest of the paths that exist was changed, in seconds since 1970; 0 when none exists."""
    return max((stamp(path).mtime_ns / 1e9 for path in paths), default=0.0)


def _is_older(limit_s: float, *paths: Path) -> bool:
    """Whether the newest of the paths that exist is older; False when none exists."""
    newest = last_used(*paths)
    return newest > 0 and time.time() - newest > limit_s


def touch(draft_id: str) -> None:
    """Record that a page has opened this draft, which restarts its expiry."""
    with contextlib.suppress(OSError):  # not stored yet, or the disk is read-only, which the next edit reports
        for path in content_files(folder(draft_id)):
            os.utime(path)
