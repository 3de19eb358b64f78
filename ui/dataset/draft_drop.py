"""Dropped files become images and captions of a draft: matched by folder, name and drop, in every order of arrival.

Files of one drop belong together: a caption file is for the image of its name in its own folder and drop, and only
without such an image for one that was there before. A file that cannot be added does not affect the others.
"""

import contextlib
import itertools
import os
import re
import secrets
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import presets
from guards.checkpoint import rename
from monitor.phrases import count
from presets.steps import weight_of
from runs import archives, masks
from runs.dataset import CAPTION_SUFFIXES, read_caption, read_captions, unique_stem
from runs.files import RunError, explained
from runs.paths import datasets_dir
from runs.pictures import workers
from ui.dataset import draft_images, draft_store
from ui.dataset.draft_images import Entry
from ui.dataset.draft_store import State

MAX_NAME = 1_000  # characters of a dropped file's relative path


@dataclass(frozen=True)
class Dropped:
    """A dropped file: where it is, its name, its folder, and the files that it belongs together with."""

    path: Path
    name: str
    folder: str
    drop: str

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return f"{self.folder}/{self.name}" if self.folder else self.name

    @property
    def stem(self) -> str:
        """What its image or caption is called as well."""
        return unicodedata.normalize("NFC", Path(self.name).stem)  # macOS writes é in two ways

    @property
    def key(self) -> str:
        """What an image and its caption have in common."""
        return f"{self.folder}/{self.stem}"

    @property
    def is_caption(self) -> bool:
        """Whether it is a caption; else it is an image, or cannot be added."""
        return Path(self.name).suffix.lower() in CAPTION_SUFFIXES


def add(
    draft_id: str, uploads: Iterable[tuple[Path, str]], drop: str = "", more: bool = False
) -> tuple[int, list[str]]:
    """Add dropped files. A file that cannot be added does not affect the others. No upload is moved or deleted.

    Args:
        uploads: each file and its relative name in what was dropped, such as `10_cat/a.png`. A ZIP is unpacked.
        drop: the same text for all parts of one drop. more: another part follows, so captions wait for their images.

    Returns:
        The number of images added, and one message for each file that was not added.
    """
    drop = drop_id(drop)
    with contextlib.ExitStack() as stack, explained("store the files"):
        dropped, messages = expanded(stack, uploads, drop, draft_store.uploads_dir())
        added, more_messages = take(draft_id, dropped, drop, more)
    return added, messages + more_messages


def drop_id(given: str) -> str:
    """The text that files of one drop have in common, from what a browser sent; a new one where that is empty."""
    return re.sub("[^A-Za-z0-9-]", "", given) or secrets.token_hex(6)


def take(draft_id: str, dropped: Iterable[Dropped], drop: str, more: bool, link: bool = False) -> tuple[int, list[str]]:
    """Add files whose names were checked, as one step with the others of their drop. Args and result: as `add`. link:
    images may be hard-linked, because nothing writes to these files."""
    dropped, messages = list(dropped), []
    pictures = [file for file in dropped if not file.is_caption]
    with explained("store the files"), draft_store.working(draft_id) as work:
        measured = _measured(pictures, work, link)
        texts: list[tuple[Dropped, str]] = []
        # Of a.txt and a.caption, the first kind counts, as in a data set (runs/dataset.py): it comes last.
        for file in sorted(dropped, key=lambda file: Path(file.name).suffix.lower() == CAPTION_SUFFIXES[0]):
            if not file.is_caption:
                continue
            try:
                texts.append((file, _caption_in(file)))
            except RunError as error:
                messages.append(str(error))
        with draft_store.change(draft_id, merge=f"add:{drop}") as edit:
            before = len(edit.state["images"])
            messages += _store(draft_id, edit.state, work, measured)
            messages += _assign(edit.state, texts, drop, more)
            added = len(edit.state["images"]) - before
            edit.label = lambda number: f"addition of {count(number, 'image')}" if number else "captions from files"
    return added, messages


def _measured(pictures: Iterable[Dropped], work: Path, link: bool = False) -> list[tuple[Dropped, Entry | str]]:
    """Each image with its measurements, stored in `work` under its number `at`; or with the reason against it."""

    def one(number: int, file: Dropped) -> tuple[Dropped, Entry | str]:
        try:
            found = draft_images.measured(file.path, file.shown, work / f"{number}", link)
        except RunError as error:
            return file, str(error)
        return file, {**found, "at": number}

    with ThreadPoolExecutor(workers()) as pool:  # Pillow and hashlib release the interpreter's lock
        return list(pool.map(one, itertools.count(), pictures))


def expanded(
    stack: contextlib.ExitStack, uploads: Iterable[tuple[Path, str]], drop: str, place: Path
) -> tuple[list[Dropped], list[str]]:
    """The dropped files, those of ZIPs unpacked into a folder in `place` that `stack` deletes, and one message for each
    file that cannot be added. Files of a system are left out.
    """
    found, messages = [], []
    for path, given in uploads:
        given = draft_store.plain_text(given)
        try:
            name = archives.relative_name(given)
            if archives.ignored(name):
                continue
            if len(name) > MAX_NAME:
                raise RunError(f"{name[:80]}…: the path has more than {MAX_NAME} characters; shorten it")
            inside, _, last = name.rpartition("/")
            if not archives.is_zip(name):
                found.append(Dropped(path, last, inside, drop))
                continue
            into = place / f"zip-{secrets.token_hex(6)}"
            stack.callback(shutil.rmtree, into, ignore_errors=True)
            into.mkdir(parents=True)
            entries, notes = archives.unpack(path, into, name)
            messages += notes
            for entry in entries:
                relative = f"{inside}/{entry.name}" if inside else entry.name
                under, _, last = draft_store.plain_text(relative).rpartition("/")
                found.append(Dropped(entry.path, last, under, f"{drop}/{name}"))
        except FileNotFoundError:
            messages.append(f"{given}: {draft_images.GONE}")
        except RunError as error:
            messages.append(str(error))
    return found, messages


def _caption_in(file: Dropped) -> str:
    try:
        text = read_caption(file.path, file.shown)
    except FileNotFoundError as error:
        raise RunError(f"{file.shown}: {draft_images.GONE}") from error
    except OSError as error:
        raise RunError(f"{file.shown}: {draft_images.UNREAD}") from error
    if len(text) > draft_store.MAX_CAPTION:
        raise RunError(f"{file.shown}: the caption has {len(text)} characters; shorten it to {draft_store.MAX_CAPTION}")
    return text


def _store(draft_id: str, state: State, work: Path, pictures: list[tuple[Dropped, Entry | str]]) -> list[str]:
    """Put measured images into the draft. Returns the reasons for those that were not added."""
    images, messages, limits = state["images"], [], presets.defaults()["images"]
    in_all = sum(entry["bytes"] for entry in images.values())
    taken: dict[str, set[str]] = {}
    same_content = {}  # an image that the user moved to another subset keeps its id
    for key, entry in images.items():
        taken.setdefault(entry["folder"], set()).add(os.path.splitext(entry["file"])[0].casefold())
        same_content[entry["folder"], entry["sha256"]] = key
    most = f"{limits['max_images']} images or {limits['max_draft_mb']} MB"
    full = f"A LoRA can have {most}: the other images were not added; remove some images first"
    for file, found in pictures:
        if isinstance(found, str):
            messages.append(found)
            _refuse(state, file)
            continue
        key = draft_images.image_id(file.folder, found["sha256"])
        key = same_content.get((file.folder, found["sha256"]), key)
        if key in images:
            same = images[key]
            if (own := [file.drop, file.stem]) not in same["names"]:
                images[key] = {**same, "names": [*same["names"], own]}
            # The same content: what a power cut has left of the file is whole again.
            rename(work / f"{found['at']}", draft_store.images_dir(draft_id) / same["stored"], sync=False)
            shown = f"{same['folder']}/{same['file']}" if same["folder"] else same["file"]
            messages.append(f"{file.shown}: already added as {shown}")
            continue
        if len(images) >= limits["max_images"] or in_all + found["bytes"] > limits["max_draft_mb"] * 1_000_000:
            messages.append(full)
            _refuse(state, file)
            continue
        in_all += found["bytes"]
        suffix = Path(file.name).suffix.lower()
        stem = unique_stem(file.name, taken.setdefault(file.folder, set()))
        for name in ("images", "thumbs"):
            (draft_store.folder(draft_id) / name).mkdir(exist_ok=True)
        rename(work / f"{found['at']}", draft_store.images_dir(draft_id) / f"{key}{suffix}", sync=False)
        thumb = draft_store.folder(draft_id) / "thumbs" / draft_images.picture_name(key)
        rename(work / f"{found['at']}.jpg", thumb, sync=False)
        text = state["texts"].get(file.key)
        use = bool(text) and (text["drop"] == file.drop or not text["used"])
        if use:
            state["texts"][file.key] = {**text, "used": True}
        images[key] = {
            **draft_store.FIELDS,
            **{name: value for name, value in found.items() if name != "at"},
            "file": f"{stem}{suffix}",
            "stored": f"{key}{suffix}",
            "folder": file.folder,
            "names": [[file.drop, file.stem]],
            "caption": text["text"] if use else "",
            "caption_by": "file" if use and text["text"].strip() else "",
            "turn": 0,
        }
    return [*dict.fromkeys(messages)]


def _refuse(state: State, file: Dropped) -> None:
    """Remember that an image of this drop was not added: its caption must not go to an older image of its name."""
    drop = file.drop.partition("/")[0]
    keys = state["refused"].get(drop, [])
    state["refused"] = {drop: [*keys, [file.drop, file.key]]}


def _assign(state: State, texts: list[tuple[Dropped, str]], drop: str, more: bool) -> list[str]:
    """Give captions from files to their images. Returns one message for each that was not used."""
    messages: list[str] = []
    named: dict[tuple[str, str, str], list[str]] = {}  # (folder, drop, stem): the images
    by_stem: dict[tuple[str, str], list[str]] = {}
    if texts or not more:
        for key, entry in state["images"].items():
            for scope, stem in entry["names"]:
                named.setdefault((entry["folder"], scope, stem), []).append(key)
                by_stem.setdefault((entry["folder"], stem), []).append(key)
    same_name = Counter((file.folder, file.name) for file, _ in texts)
    for file, text in texts:
        owners = named.get((file.folder, file.drop, file.stem), [])
        if len(owners) > 1 and same_name[file.folder, file.name] > 1:  # dropped from several folders, such as a search
            messages.append(f"{file.shown}: several files have this name; type the captions on the cards")
            continue
        state["texts"][file.key] = {"text": text, "drop": file.drop, "used": bool(owners)}
        messages += [line for key in owners for line in _give(state, key, file.key, text)]
    if more:
        return messages
    lone = []
    for key, text in list(state["texts"].items()):
        if text["used"] or text["drop"].partition("/")[0] != drop:
            continue
        inside, _, stem = key.rpartition("/")
        older = list(dict.fromkeys(by_stem.get((inside, stem), [])))
        empty = [one for one in older if not state["images"][one]["caption"].strip()]
        owners = older if len(older) == 1 else empty
        if [text["drop"], key] in state["refused"].get(drop, []):
            continue  # it waits for its own image, which has a message of its own
        if len(owners) == 1:
            state["texts"][key] = {**text, "used": True}
            messages += _give(state, owners[0], key, text["text"])
        elif older:
            del state["texts"][key]
            names = ", ".join(state["images"][one]["file"] for one in older)
            messages.append(f"{_file_of(key)}: it can belong to {names}; type the caption on its card")
        else:
            lone.append(_file_of(key))
    if lone:
        names = ", ".join(lone[:5]) + (f" and {len(lone) - 5} more" if len(lone) > 5 else "")
        messages.append(f"{names}: no image has this name; the caption is kept until you add that image")
    return messages


def _file_of(key: str) -> str:
    return f"{key.removeprefix('/')}.txt"


def _give(state: State, image_id: str, key: str, text: str) -> list[str]:
    """Set an image's caption from a file, unless another one was typed."""
    entry = state["images"][image_id]
    if entry["caption_by"] == "person" and entry["caption"].strip() and entry["caption"] != text:
        return [f"{_file_of(key)}: your typed caption was kept; to use the file, clear it and drop the file again"]
    state["images"][image_id] = {**entry, "caption": text, "caption_by": "file" if text.strip() else ""}
    return []


def _of_run(data: Path, name: str, plain: Path) -> tuple[Dropped, Entry]:
    """An image of a run's data set, written to `plain` where it has a mask in it; and its weight and mask."""
    inside, _, last = name.rpartition("/")
    weight, subset = weight_of(inside)
    path = data / name
    edits: Entry = {"weight": weight}
    with contextlib.suppress(RunError):  # a damaged image is reported when it is measured
        if (mask := masks.split(data, path, plain)) is not None:
            edits["mask"] = draft_images.store_mask(mask, plain.parent / "masks")
    return Dropped(plain if plain.exists() else path, last, subset, data.name), edits


def copy_dataset(draft_id: str, slug: str, fields: Mapping[str, Any] | None = None) -> list[str]:
    """Replace the draft's images and captions by copies of a run's data set, as one step that can be undone, and store
    form values with them. Returns one message for each image that was not copied. Raises RunError: there is no such
    data set, or the disk has no space for a copy; the draft is unchanged."""
    with explained("copy the images"), draft_store.working(draft_id) as work:
        captions = read_captions(slug)
        data = datasets_dir() / slug
        given = [_of_run(data, name, work / f"{n}-plain.png") for n, name in enumerate(captions)]
        measured = _measured([file for file, _ in given], work)
        pictures = [
            (file, found if isinstance(found, str) else {**found, **edits})
            for (file, found), (_, edits) in zip(measured, given, strict=True)
        ]
        with draft_store.change(draft_id) as edit:
            texts = {
                file.key: {"text": captions[name], "drop": slug, "used": False}
                for name, (file, _) in zip(captions, pictures, strict=True)
            }
            edit.state |= {"images": {}, "texts": texts, "form": {**edit.state["form"], **(fields or {})}}
            messages = _store(draft_id, edit.state, work, pictures)
            draft_store.masks_dir(draft_id).mkdir(exist_ok=True)
            for mask in (work / "masks").glob("*"):
                mask.replace(draft_store.masks_dir(draft_id) / mask.name)
            edit.state |= {"texts": {}, "refused": {}, "kept": draft_store.digest(edit.state)}
            edit.label = f"copy of {count(len(edit.state['images']), 'image')} from a run"
    return messages
