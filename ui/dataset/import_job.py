"""The process that imports folders and large ZIPs into a draft: `python -m ui.dataset.import_job DRAFT`.

It adds images in chunks of about two seconds, each stored as a whole, and prints its progress as lines of JSON. A kill
loses at most one chunk, which the next process adds.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import archives
from runs.dataset import CAPTION_SUFFIXES
from runs.files import RunError
from runs.pictures import IMAGE_SUFFIXES, USABLE
from ui.dataset import draft_drop, draft_images, imports
from ui.dataset.draft_drop import Dropped
from ui.dataset.draft_store import plain_text, read

CHUNK_S = 2.0  # aimed at for one chunk
FIRST_CHUNK, MIN_CHUNK, MAX_CHUNK = 16, 8, 500
MAX_FILES = 200_000
MAX_MESSAGES = 20
SHOW_S = 0.3  # between two lines of progress


class Cancelled(BaseException):
    """The user cancelled the imports."""


def main(argv: list[str]) -> int:
    """Import what waits for a draft. Exit code 1 when one of the imports failed."""
    (draft_id,) = argv
    signal.signal(signal.SIGTERM, _cancel)
    code = 0
    while paths := imports.waiting(draft_id):
        path, progress, state, messages = paths[0], Progress(paths[0].stem), "failed", list[str]()
        try:
            with contextlib.ExitStack() as stack:
                messages = _import(stack, draft_id, imports.attempt(path), progress, imports.own_folder(path))
            state = "done"
        except Cancelled:
            state = "cancelled"
        except RunError as error:
            messages = [str(error)]
        except Exception as error:  # noqa: BLE001 - the top of a process: the page shows the error, the log has its place
            traceback.print_exc()
            messages = [f"the import failed: {error!r}"]
        imports.finish(path, state, progress.shown["added"], _short(messages))
        if state == "cancelled":
            return 0
        code |= state == "failed"
    return code


def _cancel(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Cancelled


class Progress:
    """What the page shows of an import; a line of JSON whenever it has changed for SHOW_S."""

    def __init__(self, number: str):
        self.shown: dict[str, Any] = {"id": number, "name": "", "phase": "reading", "done": 0, "total": 0, "added": 0}
        self.shown_at = -SHOW_S

    def show(self, now: bool = False, **values: Any) -> None:
        """Set values and print them, at most every SHOW_S seconds unless `now`."""
        self.shown |= values
        if now or time.monotonic() - self.shown_at >= SHOW_S:
            self.shown_at = time.monotonic()
            print(json.dumps(self.shown), flush=True)


def _import(
    stack: contextlib.ExitStack, draft_id: str, spec: dict[str, Any], progress: Progress, own: Path
) -> list[str]:
    """Import one folder or some uploads, which are unpacked into `own`. Returns one message for each file that was not
    added. Raises RunError: the folder has no images, or an upload is gone."""
    progress.show(now=True, name=spec["name"])
    if spec["kind"] == "folder":
        files, messages = files_of(Path(spec["path"]), spec["drop"], progress)
    else:
        progress.show(now=True, phase="unpacking")
        uploads = [(Path(path), name) for path, name in spec["files"]]
        if gone := [name for path, name in uploads if not path.is_file()]:
            raise RunError(f"{', '.join(gone[:5])}: {draft_images.GONE}")
        for left in own.glob("zip-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        files, messages = draft_drop.expanded(stack, uploads, spec["drop"], own)
    if spec["attempts"] > 1:
        files = _not_added(draft_id, files)
    size, at = FIRST_CHUNK, 0
    progress.show(now=True, phase="adding", total=len(files))
    while at < len(files):
        began, chunk = time.monotonic(), files[at : at + size]
        at += len(chunk)
        more = at < len(files)
        added, said = draft_drop.take(draft_id, chunk, spec["drop"], more, link=spec["kind"] == "folder")
        messages += said
        progress.show(now=True, done=at, added=progress.shown["added"] + added)
        took_s = max(time.monotonic() - began, 0.001)
        size = min(MAX_CHUNK, max(MIN_CHUNK, int(size * CHUNK_S / took_s)), size * 4)
    return messages


def _not_added(draft_id: str, files: list[Dropped]) -> list[Dropped]:
    """The files that an earlier process of this import did not add."""
    state = read(draft_id)
    added = Counter(
        (entry["folder"], scope, stem) for entry in state["images"].values() for scope, stem in entry["names"]
    )
    wanted = Counter((file.folder, file.drop, file.stem) for file in files if not file.is_caption)
    done = {key for key, number in wanted.items() if added[key] >= number}
    used = {key for key, text in state["texts"].items() if text["used"]}
    return [
        file
        for file in files
        if (file.folder, file.drop, file.stem) not in done or (file.is_caption and file.key not in used)
    ]


def files_of(root: Path, drop: str, progress: Progress | None = None) -> tuple[list[Dropped], list[str]]:
    """The images and captions in a folder and its subfolders, and one message for each that cannot be added.

    Hidden files and folders are left out. A link is followed only to a file inside the folder.

    Raises:
        RunError: the folder has no images, or too many files.
    """
    found: list[Dropped] = []
    outside, images = 0, 0
    unread: list[str] = []
    real = root.resolve()
    for path, inside in _walk(root, unread):
        name = plain_text(path.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        suffix = Path(name).suffix.lower()
        if suffix not in IMAGE_SUFFIXES and suffix not in CAPTION_SUFFIXES:
            continue
        if not _is_inside(path, real):
            outside += 1
            continue
        images += suffix in IMAGE_SUFFIXES
        found.append(Dropped(path.resolve() if path.is_symlink() else path, name, inside, drop))
        if len(found) > MAX_FILES:
            raise RunError(
                f"{root}: the folder has more than {MAX_FILES} images and captions; name its subfolders one by one"
            )
        if progress is not None:
            progress.show(total=len(found))
    messages = [f"{name}: the folder cannot be read; allow this user to read it" for name in unread]
    if outside:
        files = "1 file was" if outside == 1 else f"{outside} files were"
        messages.append(
            f"{files} not added: links to places outside {root}, or no regular files; name that folder instead"
        )
    if not images:
        raise RunError("\n".join([f"{root}: no images in this folder; use {USABLE}", *messages]))
    return found, messages


def _walk(root: Path, unread: list[str]) -> Iterator[tuple[Path, str]]:
    """(path, folder as it is named in the draft) of each file below a folder, sorted as people count, without hidden ones."""
    for parent, folders, names in os.walk(root, onerror=lambda error: unread.append(str(error.filename))):
        folders[:] = sorted((name for name in folders if not archives.ignored(name)), key=_natural)
        inside = Path(parent).relative_to(root).as_posix()
        shown = root.name if inside == "." else f"{root.name}/{inside}"
        shown = plain_text(shown.encode("utf-8", "surrogateescape").decode("utf-8", "replace")).strip("/")
        for name in sorted((name for name in names if not archives.ignored(name)), key=_natural):
            yield Path(parent) / name, shown


def _natural(name: str) -> list[str | int]:
    """A sorting key by which img2 is before img10."""
    parts = re.split("([0-9]{1,17})", name.lower())
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a path is a regular file, and a link leads to one inside the folder."""
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(root):
            return False
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, RuntimeError):
        return False


def _short(messages: list[str]) -> list[str]:
    if len(messages) <= MAX_MESSAGES:
        return messages
    return [*messages[:MAX_MESSAGES], f"{len(messages) - MAX_MESSAGES} more files were not added, or have a message"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
