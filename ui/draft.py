"""A LoRA being prepared: its images, captions and settings, on disk from the moment they are given.

On disk and not in the browser's session, because a reload, a crash or a refused start must not cost an evening of
captions. One folder a browser, `datasets/.drafts/<id>/`: `images/` as dropped, `thumbs/`, and `draft.json`. A caption
is kept by image, so adding or removing an image never touches another one's.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runs.dataset import (
    CAPTION_SUFFIXES,
    check_image,
    is_image_name,
    one_line,
    read_caption,
    read_captions,
    unique_stem,
)
from runs.files import RunError, atomic_write, explained
from runs.paths import datasets_dir

THUMB_SIDE = 480  # pixels: a card's width on a screen of double density
MAX_CAPTION = 20_000  # characters
STALE_S = 24 * 3600
FORGOTTEN_S = 60 * 24 * 3600  # a draft that no page has shown for so long is given up
_lock = threading.RLock()  # one process serves the page; its threads take turns at a draft.json


@dataclass(frozen=True)
class Item:
    """One image of a draft."""

    file: str
    width: int
    height: int
    caption: str
    sha256: str


def new_id() -> str:
    """A draft's id: not guessable, because whoever knows it sees the draft."""
    return secrets.token_hex(12)


def is_id(text: object) -> bool:
    """Whether `text` can be a draft's id; everything from a browser is tested before it becomes a path."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{24}", text) is not None


def folder(draft_id: str) -> Path:
    """The draft's folder (made when the first thing is stored).

    Raises:
        RunError: that is no id.
    """
    if not is_id(draft_id):
        raise RunError("this page has lost its draft; reload it")
    return datasets_dir() / ".drafts" / draft_id


def uploads_dir() -> Path:
    """Where dropped files arrive; beside the drafts, so that storing one is a rename."""
    return datasets_dir() / ".uploads"


def tidy() -> None:
    """Delete what uploads that broke off left a day ago and earlier, and drafts that no page has shown for sixty days."""
    old = [path for path in uploads_dir().glob("*") if _age_s(path) > STALE_S]
    drafts = (path for path in (datasets_dir() / ".drafts").glob("*") if is_id(path.name))
    old += [path for path in drafts if _age_s(path / "draft.json", path) > FORGOTTEN_S]
    for path in old:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _age_s(*paths: Path) -> float:
    """Seconds since the first of the paths that is there was written; 0 where none is."""
    for path in paths:
        with contextlib.suppress(OSError):
            return time.time() - path.stat().st_mtime
    return 0.0


def seen(draft_id: str) -> None:
    """A page shows this draft: it is not forgotten."""
    with contextlib.suppress(OSError):  # not stored yet; or a disk that cannot be written, which the next edit tells
        os.utime(folder(draft_id) / "draft.json")


def _read(draft_id: str) -> dict:
    path = folder(draft_id) / "draft.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        state = {}
    except ValueError as error:
        raise RunError(f"{path} cannot be read ({error}); move it aside and reload the page") from error
    return {"images": {}, "waiting": {}, "form": {}, "kept": "", **state}


def _write(draft_id: str, state: dict) -> None:
    place = folder(draft_id)
    with explained("store what you entered"):
        place.mkdir(parents=True, exist_ok=True)
        atomic_write(place / "draft.json", json.dumps(state, ensure_ascii=False, indent=1))


def items(draft_id: str) -> list[Item]:
    """The images in the order they came."""
    return [
        Item(file, entry["width"], entry["height"], entry["caption"], entry["sha256"])
        for file, entry in _read(draft_id)["images"].items()
    ]


def images_dir(draft_id: str) -> Path:
    """The folder of the draft's images."""
    return folder(draft_id) / "images"


def thumb(draft_id: str, item: Item) -> Path:
    """The small picture of an image."""
    return folder(draft_id) / "thumbs" / f"{item.sha256[:32]}.jpg"


def form(draft_id: str) -> dict:
    """What was last typed into the settings."""
    return _read(draft_id)["form"]


def save_form(draft_id: str, values: dict) -> None:
    """Keep the settings as typed, whatever they are."""
    with _lock:
        state = _read(draft_id)
        if state["form"] != values:
            state["form"] = values
            _write(draft_id, state)


def _mark(state: dict) -> str:
    """Tells images and captions apart from those of another time."""
    told = [(entry["sha256"], entry["caption"]) for entry in state["images"].values()]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest() if told else ""


def in_a_run(draft_id: str) -> None:
    """These images and captions are now in a run's data set."""
    with _lock:
        state = _read(draft_id)
        _write(draft_id, {**state, "kept": _mark(state)})


def only_here(draft_id: str) -> int:
    """How many images, with their captions, are in no run yet and would be lost with the draft."""
    state = _read(draft_id)
    return 0 if _mark(state) == state["kept"] else len(state["images"])


def take_over(draft_id: str, slug: str) -> list[str]:
    """Put copies of a data set's images and captions in the place of the draft's; a sentence for each left out.

    Raises:
        RunError: no such data set, or no room for another copy of it: the draft is then as it was.
    """
    room, paths = uploads_dir() / secrets.token_hex(12), []
    try:
        with explained("copy the images"):
            room.mkdir(parents=True)
            for file in read_captions(slug):
                image = datasets_dir() / slug / file
                paths += [
                    shutil.copyfile(one, room / one.name) for one in (image.with_suffix(".txt"), image) if one.is_file()
                ]
        clear(draft_id)
        _, told = add(draft_id, paths)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    in_a_run(draft_id)
    return told


def add(draft_id: str, uploads: Iterable[Path]) -> tuple[int, list[str]]:
    """Take dropped files in; what cannot be taken is told by name and leaves the rest alone.

    Args:
        uploads: files below `uploads_dir()`; they are moved away from there.

    Returns:
        How many images were added, and one sentence for each file that was not.
    """
    added, told = 0, []
    texts, pictures = [], []
    for path in uploads:
        (texts if path.suffix.lower() in CAPTION_SUFFIXES else pictures).append(path)
    with explained("store the files"):
        for path in texts:
            told += _add_caption(draft_id, path)
        for path in pictures:
            try:
                sentence = _add_image(draft_id, path)
            except RunError as error:
                sentence = str(error)
            if sentence:
                told.append(sentence)
                path.unlink(missing_ok=True)
            else:
                added += 1
    return added, told


def _add_image(draft_id: str, upload: Path) -> str:
    """Store one image; the reason why not, or ""."""
    if not is_image_name(upload):
        return f"{upload.name}: not an image; give PNG, JPEG, WebP, BMP, GIF or TIFF files, and .txt captions"
    check_image(upload)
    digest = _sha256(upload)
    place = folder(draft_id)
    with _lock:
        state = _read(draft_id)
        for file, entry in state["images"].items():
            if entry["sha256"] == digest:
                return f"{upload.name}: already there ({file})"
        stem = unique_stem(upload.name, {Path(file).stem.casefold() for file in state["images"]})
        for name in ("images", "thumbs"):
            (place / name).mkdir(parents=True, exist_ok=True)
        width, height = _make_thumb(upload, place / "thumbs" / f"{digest[:32]}.jpg")
        target = place / "images" / f"{stem}{upload.suffix.lower()}"
        shutil.move(upload, target)
        caption = state["waiting"].pop(upload.stem, "")
        state["images"][target.name] = {
            "width": width,
            "height": height,
            "sha256": digest,
            "caption": caption,
            "stem": upload.stem,
            "by_hand": False,
        }
        _write(draft_id, state)
    return ""


def _add_caption(draft_id: str, upload: Path) -> list[str]:
    """Give a dropped .txt to its image, or keep it until that image comes; never over a caption written by hand."""
    try:
        text = read_caption(upload)
    except RunError as error:
        return [str(error)]
    finally:
        upload.unlink(missing_ok=True)
    with _lock:
        state = _read(draft_id)
        owners = [entry for entry in state["images"].values() if entry["stem"] == upload.stem]
        if not owners:
            state["waiting"][upload.stem] = text
        for entry in owners:
            if entry["by_hand"] and entry["caption"].strip() and entry["caption"] != text:
                return [
                    f"{upload.name}: kept the caption you wrote; empty it and drop the file again to use the file's"
                ]
            entry.update(caption=text, by_hand=False)
        _write(draft_id, state)
    return []


def waiting(draft_id: str) -> list[str]:
    """Names of dropped captions whose image has not come."""
    return [f"{stem}.txt" for stem in _read(draft_id)["waiting"]]


def set_caption(draft_id: str, file: str, text: str) -> None:
    """Keep a caption as typed.

    Raises:
        RunError: the image is not there any more, or the caption is longer than any model reads.
    """
    if len(text) > MAX_CAPTION:
        raise RunError(f"{file}: the caption has {len(text)} characters; keep it under {MAX_CAPTION}")
    with _lock:
        state = _read(draft_id)
        if file not in state["images"]:
            raise RunError(f"{file}: the image has been removed")
        state["images"][file].update(caption=text, by_hand=True)
        _write(draft_id, state)


def insert_trigger(draft_id: str, trigger: str) -> int:
    """Put the trigger word in front of every caption that does not start with it; how many changed."""
    word = one_line(trigger)
    if not word:
        raise RunError("there is no trigger word yet; type one in step 1")
    with _lock:
        state, changed = _read(draft_id), 0
        for entry in state["images"].values():
            first = entry["caption"].split(",")[0].strip()
            if first != word:
                entry["caption"] = f"{word}, {entry['caption']}" if entry["caption"].strip() else word
                changed += 1
        if changed:
            _write(draft_id, state)
    return changed


def remove(draft_id: str, file: str) -> None:
    """Take one image out; every other caption stays as it is."""
    with _lock:
        state = _read(draft_id)
        entry = state["images"].pop(file, None)
        if entry is None:
            return
        _write(draft_id, state)
        (images_dir(draft_id) / file).unlink(missing_ok=True)
        (folder(draft_id) / "thumbs" / f"{entry['sha256'][:32]}.jpg").unlink(missing_ok=True)


def clear(draft_id: str) -> None:
    """Take all images out; the settings stay."""
    with _lock:
        state = _read(draft_id)
        _write(draft_id, {**state, "images": {}, "waiting": {}})
        for name in ("images", "thumbs"):
            shutil.rmtree(folder(draft_id) / name, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_thumb(image: Path, target: Path) -> tuple[int, int]:
    """Draw the card's picture; the image's own size, upright."""
    from PIL import Image, ImageOps

    with Image.open(image) as opened:
        width, height = opened.size
        if opened.getexif().get(0x0112, 1) in (5, 6, 7, 8):
            width, height = height, width
        opened.draft("RGB", (THUMB_SIDE, THUMB_SIDE))
        small = ImageOps.exif_transpose(opened).convert("RGBA")
        small.thumbnail((THUMB_SIDE, THUMB_SIDE))
        paper = Image.new("RGBA", small.size, "white")
        Image.alpha_composite(paper, small).convert("RGB").save(target, "JPEG", quality=82)
    return width, height
