"""A draft of a LoRA: its images, captions and settings, stored on disk as soon as they are entered.

They are on disk and not in the browser's session, because a reload, a crash or a failed start must not lose an evening of
captions. Each browser has one folder, `datasets/.drafts/<id>/`, with `images/`, `thumbs/`, `history/` and `draft.json`.
`draft.json` is replaced last, so a change is either complete or did not happen.

A caption belongs to its image, which is named by its folder and content, never by its file name or position: adding,
moving or removing one image never changes the caption of another. Files of one drop belong together: a caption file is
for the image of its name in its own folder and drop, and only without such an image for one that was there before.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import presets
from runs import archives
from runs.dataset import CAPTION_SUFFIXES, Source, one_line, read_caption, read_captions, repeats_of, unique_stem
from runs.files import RunError, atomic_write, explained
from runs.paths import datasets_dir
from ui import draft_history, draft_images
from ui.draft_images import Entry

MAX_CAPTION = 20_000  # characters
MAX_NAME = 1_000  # characters of a dropped file's relative path
UPLOAD_EXPIRES_S = 24 * 3600
DRAFT_EXPIRES_S = 60 * 24 * 3600  # counted from the last time a page opened the draft
HISTORY_STEPS = 100
MERGE_S = 5.0  # changes of one caption that follow each other within this time are one step
REMOVED = "This image was removed"
State = dict[str, Any]
_lock = threading.RLock()  # one process serves the page; its threads share each draft.json


@dataclass(frozen=True)
class Item:
    """One image of a draft.

    file: its name in its folder. folder: the relative path of the dropped folder it came from, "" for none.
    width, height: pixels as shown. warnings: codes, see draft_images.warnings_of.
    """

    id: str
    file: str
    folder: str
    width: int
    height: int
    caption: str
    sha256: str
    warnings: tuple[str, ...]
    turn: int = 0  # quarter turns clockwise that the user added


def new_id() -> str:
    """A new id. It cannot be guessed, because anyone who knows it can read the draft."""
    return secrets.token_hex(12)


def is_id(text: object) -> TypeGuard[str]:
    """Whether `text` is a valid draft id; a value from a browser is checked before it becomes part of a path."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{24}", text) is not None


def folder(draft_id: str) -> Path:
    """The draft's folder, which exists once something is stored.

    Raises:
        RunError: `draft_id` is not a valid id.
    """
    if not is_id(draft_id):
        raise RunError("This page is out of date; reload it")
    return datasets_dir() / ".drafts" / draft_id


def uploads_dir() -> Path:
    """Folder for incoming uploads."""
    return datasets_dir() / ".uploads"


def delete_expired() -> None:
    """Delete uploads after one day, and drafts that no page has opened for 60 days.

    An upload is deleted by its age only: two drops of one file share its path.
    """
    old = [path for path in uploads_dir().glob("*") if _age_s(path, *path.glob("*")) > UPLOAD_EXPIRES_S]
    drafts = (path for path in (datasets_dir() / ".drafts").glob("*") if is_id(path.name))
    for path in drafts:
        state = path / "draft.json"
        if _age_s(*([state] if state.exists() else [path])) > DRAFT_EXPIRES_S:
            old.append(path)
    unfinished = (datasets_dir() / ".drafts").glob("*/.new-*")  # of drops that ended with the server
    old += [path for path in unfinished if _age_s(path) > UPLOAD_EXPIRES_S]
    for path in old:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _age_s(*paths: Path) -> float:
    """Age in seconds of the newest of the paths that exist; 0 when none exists."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times) if times else 0.0


def touch(draft_id: str) -> None:
    """Record that a page has opened this draft, which restarts its expiry."""
    with contextlib.suppress(OSError):  # not stored yet, or the disk is read-only, which the next edit reports
        os.utime(folder(draft_id) / "draft.json")


# The state on disk -----------------------------------------------------------------------------------------------------


def _read(draft_id: str) -> State:
    path = folder(draft_id) / "draft.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        state = {}
    except ValueError as error:
        raise RunError(f"{path} cannot be read ({error}); move it to another folder, then reload the page") from error
    if "waiting" in state:
        state = _upgraded(state)
    return {"images": {}, "texts": {}, "form": {}, "kept": "", "refused": {}, "history": [], "done": 0, **state}


def _upgraded(state: State) -> State:
    """A draft of an earlier version, whose images are named by their files."""
    images = {}
    for file, old in state.get("images", {}).items():
        key = draft_images.image_id("", old["sha256"])
        entry = {name: old[name] for name in ("width", "height", "sha256", "caption", "by_hand")}
        names = [["", old["stem"]]]
        images[key] = {**entry, "file": file, "stored": file, "folder": "", "names": names, **_UNMEASURED}
    texts = {f"/{stem}": {"text": text, "drop": "", "used": False} for stem, text in state["waiting"].items()}
    kept = {"images": images, "texts": texts, "form": state.get("form", {})}
    return {**kept, "kept": _digest(kept) if state.get("kept") == _old_digest(state) else ""}


_UNMEASURED = {"bytes": 0, "hash": "", "upright": 0, "turn": 0}


def _old_digest(state: State) -> str:
    content = [(entry["sha256"], entry["caption"]) for entry in state.get("images", {}).values()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if content else ""


def _write(draft_id: str, state: State) -> None:
    target = folder(draft_id)
    with explained("store your changes"):
        target.mkdir(parents=True, exist_ok=True)
        atomic_write(target / "draft.json", json.dumps(state))


def _step_file(draft_id: str, number: int) -> Path:
    return folder(draft_id) / "history" / f"{number}.json"


def _read_step(draft_id: str, number: int) -> draft_history.Step:
    path = _step_file(draft_id, number)
    try:
        step: draft_history.Step = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); this change cannot be undone") from error
    return step


@contextlib.contextmanager
def _change(draft_id: str, merge: str = "", within_s: float = math.inf) -> Iterator["_Edit"]:
    """Change a draft as one step that can be undone. The block changes `edit.state` and sets `edit.label`.

    Args:
        merge: steps with the same text that follow each other within `within_s` become one.
    """
    with _lock:
        before = _read(draft_id)
        edit = _Edit({**before, **{part: dict(before[part]) for part in draft_history.PARTS}})
        yield edit
        step = draft_history.difference(before, edit.state)
        if _visible(before) == _visible(edit.state):  # a file that was dropped again changes only where it came from
            if edit.state != before:
                _write(draft_id, edit.state)
            return
        history, now = before["history"], time.time()
        last = history[-1] if history and before["done"] == len(history) else None
        if merge and last and last["merge"] == merge and 0 <= now - last["at"] < within_s:
            with contextlib.suppress(RunError):  # a step that cannot be read stays as it is
                start = draft_history.applied(before, _read_step(draft_id, last["n"]), draft_history.UNDO)
                step, history = draft_history.difference(start, edit.state), history[:-1]
        number = 1 + max((one["n"] for one in before["history"]), default=0)
        kept = history[: before["done"]][-HISTORY_STEPS + 1 :]
        if step:
            with explained("store your changes"):
                _step_file(draft_id, number).parent.mkdir(parents=True, exist_ok=True)
                atomic_write(_step_file(draft_id, number), json.dumps(step))
            kept = [*kept, {"n": number, "label": edit.label(step), "merge": merge, "at": now}]
        _write(draft_id, {**edit.state, "history": kept, "done": len(kept)})
        _forget(draft_id, [one["n"] for one in before["history"] if one not in kept], kept, edit.state)


def _visible(state: State) -> tuple[list[Any], list[str]]:
    """What a user sees of the images and the captions that wait for one."""
    images = [(key, entry["caption"], entry["turn"]) for key, entry in state["images"].items()]
    return images, [key for key, text in state["texts"].items() if not text["used"]]


@dataclass
class _Edit:
    state: State
    label: Callable[[draft_history.Step], str] = lambda step: "change"


def _forget(draft_id: str, gone: list[int], kept: list[dict[str, Any]], state: State) -> None:
    """Delete the files of steps that left the history, and of images that neither the draft nor the history needs."""
    lost: dict[str, Entry] = {}
    needed = {entry["stored"] for entry in state["images"].values()}
    with contextlib.suppress(RunError):
        for number in gone:
            lost |= draft_history.images_of(_read_step(draft_id, number))
        if lost:
            for step in kept:
                needed |= {e["stored"] for e in draft_history.images_of(_read_step(draft_id, step["n"])).values()}
        for key, entry in lost.items():
            if entry["stored"] not in needed:
                (images_dir(draft_id) / entry["stored"]).unlink(missing_ok=True)
                for path in (folder(draft_id) / "thumbs").glob(f"{key}*"):
                    path.unlink(missing_ok=True)
    for number in gone:
        _step_file(draft_id, number).unlink(missing_ok=True)


# What is in a draft ----------------------------------------------------------------------------------------------------


def items(draft_id: str) -> list[Item]:
    """The images in display order."""
    images = _read(draft_id)["images"]
    near, small_side = draft_images.nearly_identical(images), presets.defaults()["images"]["small_side"]
    found = []
    for key, entry in images.items():
        size = (entry["width"], entry["height"])
        width, height = reversed(size) if entry["turn"] % 2 else size
        codes = draft_images.warnings_of(entry, near.get(key), small_side)
        found.append(
            Item(
                key,
                entry["file"],
                entry["folder"],
                width,
                height,
                entry["caption"],
                entry["sha256"],
                codes,
                entry["turn"],
            )
        )
    return found


def images_dir(draft_id: str) -> Path:
    """The folder of the draft's images as they were dropped, and of removed ones that undo can bring back."""
    return folder(draft_id) / "images"


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
    return images_dir(draft_id) / _entry(_read(draft_id), image_id)["stored"]


def thumb(draft_id: str, item: Item) -> Path:
    """Path of an image's thumbnail, upright; written when it is missing."""
    path = folder(draft_id) / "thumbs" / f"{item.id}-{item.turn}.jpg"
    return path if path.is_file() else _scaled(draft_id, item.id, "", draft_images.THUMB_SIDE)


def large(draft_id: str, image_id: str) -> Path:
    """Path of a JPEG of at most 1,600 pixels, upright; browsers cannot show HEIC and TIFF."""
    return _scaled(draft_id, image_id, "-large", draft_images.LARGE_SIDE)


def _scaled(draft_id: str, image_id: str, kind: str, side: int) -> Path:
    entry = _entry(_read(draft_id), image_id)
    path = folder(draft_id) / "thumbs" / f"{image_id}{kind}-{entry['turn']}.jpg"
    if not path.is_file():
        with explained("write a thumbnail"):
            draft_images.write_thumb(images_dir(draft_id) / entry["stored"], path, entry["turn"], side)
    return path


def counts(draft_id: str) -> dict[str, int]:
    """The number of images in each folder; what runs.planned_steps counts."""
    return dict(Counter(entry["folder"] for entry in _read(draft_id)["images"].values()))


def repeats(draft_id: str) -> dict[str, int]:
    """The repeats of each folder whose name sets them, such as `10_cat`."""
    return {name: found[0] for name in counts(draft_id) if (found := repeats_of(name))}


def sources(draft_id: str) -> list[Source]:
    """The images with their captions, for runs.create."""
    return [
        Source(images_dir(draft_id) / e["stored"], e["file"], e["caption"], e["folder"], e["turn"])
        for e in _read(draft_id)["images"].values()
    ]


def waiting(draft_id: str) -> list[str]:
    """Names of caption files that have no matching image."""
    texts = _read(draft_id)["texts"].items()
    return [f"{key.removeprefix('/')}.txt" for key, text in texts if not text["used"]]


def form(draft_id: str) -> dict[str, Any]:
    """The form values stored last."""
    values: dict[str, Any] = _read(draft_id)["form"]
    return values


def save_fields(draft_id: str, changes: Mapping[str, Any]) -> None:
    """Store these form values exactly as typed, valid or not; the other fields stay."""
    with _lock:
        state = _read(draft_id)
        merged = {**state["form"], **{key: _plain(value) for key, value in changes.items()}}
        if state["form"] != merged:
            _write(draft_id, {**state, "form": merged})


def _plain(value: Any) -> Any:
    return plain_text(value) if isinstance(value, str) else value


def _digest(state: State) -> str:
    """Hash of all images and captions; "" when there are none."""
    content = [(key, entry["caption"], entry["turn"]) for key, entry in state["images"].items()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if content else ""


def mark_in_a_run(draft_id: str) -> None:
    """Record that a run's data set contains these images and captions."""
    with _lock:
        state = _read(draft_id)
        _write(draft_id, {**state, "kept": _digest(state)})


def images_not_in_a_run(draft_id: str) -> int:
    """Number of images when no run contains them with their captions, so that replacing the draft loses them; else 0."""
    state = _read(draft_id)
    return 0 if _digest(state) == state["kept"] else len(state["images"])


# Undo and redo ---------------------------------------------------------------------------------------------------------


def history(draft_id: str) -> tuple[str, str]:
    """What undo would undo and redo would redo, such as "caption of cat.png"; "" for nothing."""
    state = _read(draft_id)
    steps, done = state["history"], state["done"]
    return steps[done - 1]["label"] if done else "", steps[done]["label"] if done < len(steps) else ""


def undo(draft_id: str) -> str | None:
    """Undo the last change of images or captions. Returns a sentence about it; None when there is nothing to undo."""
    return _travel(draft_id, draft_history.UNDO)


def redo(draft_id: str) -> str | None:
    """Make the change again that was undone last. Returns a sentence about it; None when there is none."""
    return _travel(draft_id, draft_history.REDO)


def _travel(draft_id: str, side: int) -> str | None:
    with _lock:
        state = _read(draft_id)
        at = state["done"] - (side == draft_history.UNDO)
        if not 0 <= at < len(state["history"]):
            return None
        entry = state["history"][at]
        state = draft_history.applied(state, _read_step(draft_id, entry["n"]), side)
        _write(draft_id, {**state, "done": at + (side == draft_history.REDO)})
    return f"{'Undone' if side == draft_history.UNDO else 'Redone'}: {entry['label']}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# Changes ---------------------------------------------------------------------------------------------------------------


def set_caption(draft_id: str, image_id: str, text: str) -> None:
    """Store a caption as typed.

    Raises:
        RunError: the image was removed, or the caption is longer than MAX_CAPTION characters.
    """
    text = plain_text(text)
    with _change(draft_id, merge=f"caption:{image_id}", within_s=MERGE_S) as edit:
        entry = _entry(edit.state, image_id)
        if len(text) > MAX_CAPTION:
            raise RunError(f"{entry['file']}: the caption has {len(text)} characters; shorten it to {MAX_CAPTION}")
        if text != entry["caption"]:
            edit.state["images"][image_id] = {**entry, "caption": text, "by_hand": True}
        edit.label = lambda step: f"caption of {entry['file']}"


def replace(draft_id: str, find: str, replacement: str) -> int:
    """Replace a text in all captions, as one step. Returns how many captions changed.

    Raises:
        RunError: a caption would be longer than MAX_CAPTION characters; no caption was changed.
    """
    find, replacement = plain_text(find), plain_text(replacement)
    with _change(draft_id) as edit:
        images, changed = edit.state["images"], 0
        for key, entry in images.items():
            text = entry["caption"].replace(find, replacement) if find else entry["caption"]
            if len(text) > MAX_CAPTION:
                raise RunError(f"{entry['file']}: the caption would have {len(text)} characters; shorten it first")
            if text != entry["caption"]:
                images[key] = {**entry, "caption": text, "by_hand": True}
                changed += 1
        edit.label = lambda step: f"replacement in {_count(changed, 'caption')}"
    return changed


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
    with _change(draft_id) as edit:
        images, changed = edit.state["images"], 0
        for key, entry in images.items():
            caption = _with_trigger(entry["caption"], word)
            if caption != entry["caption"]:
                images[key] = {**entry, "caption": caption}
                changed += 1
        edit.label = lambda step: f"trigger word in {_count(changed, 'caption')}"
    return changed


def _with_trigger(caption: str, word: str) -> str:
    if caption.split(",")[0].strip() == word:
        return caption
    return f"{word}, {caption}" if caption.strip() else word


def remove(draft_id: str, ids: Iterable[str]) -> None:
    """Remove images; the other captions stay unchanged, and undo brings them back."""
    with _change(draft_id) as edit:
        gone = [edit.state["images"].pop(key) for key in ids if key in edit.state["images"]]
        edit.label = lambda step: f"removal of {gone[0]['file'] if len(gone) == 1 else _count(len(gone), 'image')}"


def clear(draft_id: str) -> None:
    """Remove all images and captions; the settings stay, and undo brings the images back."""
    with _change(draft_id) as edit:
        number = len(edit.state["images"])
        edit.label = lambda step: f"removal of {_count(number, 'image')}"
        edit.state |= {"images": {}, "texts": {}}


def move(draft_id: str, image_id: str, before_id: str | None) -> None:
    """Move an image before another one, or to the end.

    Raises:
        RunError: one of them was removed.
    """
    with _change(draft_id) as edit:
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
    """Fix a warning: "sideways" rotates the image (upright where its EXIF data says how, else 90° clockwise), "small" and
    "near" remove it, "no_caption" sets the trigger word as its caption.

    Raises:
        RunError: the image was removed, there is no trigger word, or the code is unknown.
    """
    with _change(draft_id) as edit:
        entry = _entry(edit.state, image_id)
        kind = code.split(":")[0]
        if kind == "sideways":
            turn = entry["upright"] if entry["upright"] and not entry["turn"] else entry["turn"] + 1
            edit.state["images"][image_id] = {**entry, "turn": turn % 4}
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


# Dropped files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dropped:
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
        return Path(self.name).stem

    @property
    def key(self) -> str:
        """What an image and its caption have in common."""
        return f"{self.folder}/{self.stem}"


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
    drop = re.sub("[^A-Za-z0-9-]", "", drop) or secrets.token_hex(6)
    messages: list[str] = []
    with contextlib.ExitStack() as stack, explained("store the files"):
        dropped = _dropped(stack, uploads, drop, messages)
        captions = [file for file in dropped if Path(file.name).suffix.lower() in CAPTION_SUFFIXES]
        pictures = [file for file in dropped if file not in captions]
        work = folder(draft_id) / f".new-{secrets.token_hex(6)}"
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        work.mkdir(parents=True)
        measured: list[tuple[_Dropped, Entry | str]] = []
        for number, file in enumerate(pictures):
            try:
                entry = draft_images.measured(file.path, file.shown, work / f"{number}", work / f"{number}.jpg")
                measured.append((file, {**entry, "at": number}))
            except RunError as error:
                measured.append((file, str(error)))
        texts: list[tuple[_Dropped, str]] = []
        for file in captions:
            try:
                texts.append((file, _caption_in(file)))
            except RunError as error:
                messages.append(str(error))
        with _change(draft_id, merge=f"add:{drop}") as edit:
            before = len(edit.state["images"])
            messages += _store(draft_id, edit.state, work, measured)
            messages += _assign(edit.state, texts, drop, more)
            added = len(edit.state["images"]) - before
            edit.label = _what_was_added
    return added, messages


def _what_was_added(step: draft_history.Step) -> str:
    number = len(draft_history.images_of(step))
    return f"adding of {_count(number, 'image')}" if number else "captions from files"


def _dropped(
    stack: contextlib.ExitStack, uploads: Iterable[tuple[Path, str]], drop: str, messages: list[str]
) -> list[_Dropped]:
    """The dropped files, those of ZIPs unpacked into a folder that `stack` deletes; files of a system are left out."""
    found = []
    for path, given in uploads:
        given = plain_text(given)
        try:
            name = archives.relative_name(given)
            if archives.ignored(name):
                continue
            if len(name) > MAX_NAME:
                raise RunError(f"{name[:80]}…: the path has more than {MAX_NAME} characters; shorten it")
            parts = [(path, name, drop)]
            if archives.is_zip(name):
                into = uploads_dir() / f"zip-{secrets.token_hex(6)}"
                stack.callback(shutil.rmtree, into, ignore_errors=True)
                into.mkdir(parents=True)
                entries, notes = archives.unpack(path, into, name)
                messages += notes
                where = name.rpartition("/")[0]
                parts = [
                    (entry.path, f"{where}/{entry.name}" if where else entry.name, f"{drop}/{name}")
                    for entry in entries
                ]
        except FileNotFoundError:
            messages.append(f"{given}: the upload is gone; drop the file again")
            continue
        except RunError as error:
            messages.append(str(error))
            continue
        for file, relative, scope in parts:
            inside, _, last = plain_text(relative).rpartition("/")
            found.append(_Dropped(file, last, inside, scope))
    return found


def plain_text(text: str) -> str:
    """Text that UTF-8 can hold: a browser can send half of a character that takes two."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _caption_in(file: _Dropped) -> str:
    try:
        text = read_caption(file.path, file.shown)
    except FileNotFoundError as error:
        raise RunError(f"{file.shown}: the upload is gone; drop the file again") from error
    if len(text) > MAX_CAPTION:
        raise RunError(f"{file.shown}: the caption has {len(text)} characters; shorten it to {MAX_CAPTION}")
    return text


def _store(draft_id: str, state: State, work: Path, pictures: list[tuple[_Dropped, Entry | str]]) -> list[str]:
    """Put measured images into the draft. Returns the reasons for those that were not added."""
    images, messages, limits = state["images"], [], presets.defaults()["images"]
    in_all = sum(entry["bytes"] for entry in images.values())
    taken: dict[str, set[str]] = {}
    for entry in images.values():
        taken.setdefault(entry["folder"], set()).add(Path(entry["file"]).stem.casefold())
    refused = 0
    for file, found in pictures:
        if isinstance(found, str):
            messages.append(found)
            _refuse(state, file)
            continue
        key = draft_images.image_id(file.folder, found["sha256"])
        if key in images:
            same = images[key]
            names = [*same["names"], [file.drop, file.stem]]
            images[key] = {**same, "names": names if [file.drop, file.stem] not in same["names"] else same["names"]}
            shown = f"{same['folder']}/{same['file']}" if same["folder"] else same["file"]
            messages.append(f"{file.shown}: already added as {shown}")
            continue
        in_all += found["bytes"]
        if len(images) >= limits["max_images"] or in_all > limits["max_draft_mb"] * 1_000_000:
            refused += 1
            _refuse(state, file)
            continue
        suffix = Path(file.name).suffix.lower()
        stem = unique_stem(file.name, taken.setdefault(file.folder, set()))
        for name in ("images", "thumbs"):
            (folder(draft_id) / name).mkdir(exist_ok=True)
        os.replace(work / f"{found['at']}", images_dir(draft_id) / f"{key}{suffix}")
        os.replace(work / f"{found['at']}.jpg", folder(draft_id) / "thumbs" / f"{key}-0.jpg")
        text = state["texts"].get(file.key)
        use = bool(text) and (text["drop"] == file.drop or not text["used"])
        if use:
            state["texts"][file.key] = {**text, "used": True}
        images[key] = {
            **{name: value for name, value in found.items() if name != "at"},
            "file": f"{stem}{suffix}",
            "stored": f"{key}{suffix}",
            "folder": file.folder,
            "names": [[file.drop, file.stem]],
            "caption": text["text"] if use else "",
            "by_hand": False,
            "turn": 0,
        }
    if refused:
        most = f"{limits['max_images']} images or {limits['max_draft_mb']} MB"
        messages.append(f"{_count(refused, 'image')} not added: a LoRA can have {most}; remove some images first")
    return messages


def _refuse(state: State, file: _Dropped) -> None:
    """Remember that an image of this drop was not added: its caption must not go to an older image of its name."""
    drop = file.drop.partition("/")[0]
    keys = state["refused"].get(drop, [])
    state["refused"] = {drop: [*keys, [file.drop, file.key]]}


def _assign(state: State, texts: list[tuple[_Dropped, str]], drop: str, more: bool) -> list[str]:
    """Give captions from files to their images. Returns one message for each that was not used."""
    messages = []
    for file, text in texts:
        owners = [
            key
            for key, entry in state["images"].items()
            if entry["folder"] == file.folder and [file.drop, file.stem] in entry["names"]
        ]
        state["texts"][file.key] = {"text": text, "drop": file.drop, "used": bool(owners)}
        messages += [line for key in owners for line in _give(state, key, file.key, text)]
    if more:
        return messages
    lone = []
    for key, text in list(state["texts"].items()):
        if text["used"] or text["drop"].partition("/")[0] != drop:
            continue
        inside, _, stem = key.rpartition("/")
        older = [
            one
            for one, entry in state["images"].items()
            if entry["folder"] == inside and any(name[1] == stem for name in entry["names"])
        ]
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
    if len(lone) == 1:
        messages.append(f"{lone[0]}: no image has this name; the caption is kept until you add that image")
    elif lone:
        names = ", ".join(lone[:5]) + (f" and {len(lone) - 5} more" if len(lone) > 5 else "")
        messages.append(
            f"No image has the names of {len(lone)} captions; they are kept until you add the images: {names}"
        )
    return messages


def _file_of(key: str) -> str:
    return f"{key.removeprefix('/')}.txt"


def _give(state: State, image_id: str, key: str, text: str) -> list[str]:
    """Set an image's caption from a file, unless another one was typed."""
    entry = state["images"][image_id]
    if entry["by_hand"] and entry["caption"].strip() and entry["caption"] != text:
        return [
            f"{_file_of(key)}: your typed caption was kept; to use the file, clear the caption and drop the file again"
        ]
    state["images"][image_id] = {**entry, "caption": text, "by_hand": False}
    return []


def copy_dataset(draft_id: str, slug: str, fields: Mapping[str, Any] | None = None) -> list[str]:
    """Replace the draft's images and captions by copies of a run's data set, as one step that can be undone.

    Args:
        fields: form values to store with them.

    Returns:
        One message for each image that was not copied.

    Raises:
        RunError: the data set does not exist, or the disk has no space for a copy; the draft is unchanged.
    """
    work = folder(draft_id) / f".new-{secrets.token_hex(6)}"
    pictures: list[tuple[_Dropped, Entry | str]] = []
    captions = read_captions(slug)
    try:
        with explained("copy the images"):
            work.mkdir(parents=True)
            for number, name in enumerate(captions):
                inside, _, last = name.rpartition("/")
                file = _Dropped(datasets_dir() / slug / name, last, inside, slug)
                try:
                    entry = draft_images.measured(file.path, file.shown, work / f"{number}", work / f"{number}.jpg")
                    pictures.append((file, {**entry, "at": number}))
                except RunError as error:
                    pictures.append((file, str(error)))
            with _change(draft_id) as edit:
                edit.label = lambda step: f"copy of {_count(len(edit.state['images']), 'image')} from a run"
                texts = {
                    file.key: {"text": captions[name], "drop": slug, "used": False}
                    for name, (file, _) in zip(captions, pictures, strict=True)
                }
                edit.state |= {"images": {}, "texts": texts, "form": {**edit.state["form"], **(fields or {})}}
                messages = _store(draft_id, edit.state, work, pictures)
                edit.state |= {"texts": {}, "refused": {}, "kept": _digest(edit.state)}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return messages
