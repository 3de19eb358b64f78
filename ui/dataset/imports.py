"""Imports into a draft that take long: a folder on the server, and large ZIPs.

An import is a file in the draft's folder `imports/`: what to import, how far it is, and its result, until the next one
is started. `python -m ui.dataset.imports DRAFT` works on those that wait, and outlives the server. It adds images in
chunks, each stored as a whole. An import that was killed with its machine continues when a page opens the draft; a kill
loses at most one chunk, because images that were added are known by their drop. Uploads are linked into a folder of the
import: Gradio deletes its own when the server stops, and we do after a day.
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
from pathlib import Path
from typing import Any

from monitor.phrases import count
from monitor.run_folder import read_json
from runs import archives, masks
from runs.dataset import CAPTION_SUFFIXES
from runs.files import RunError, atomic_write, explained
from runs.paths import datasets_dir
from runs.pictures import IMAGE_SUFFIXES, USABLE
from ui import jobs
from ui.dataset import draft_drop, draft_images
from ui.dataset.draft_drop import Dropped
from ui.dataset.draft_store import OUT_OF_DATE, folder, plain_text, read, uploads_dir
from ui.html import part

JOB = "import"
LIMIT_S = 7 * 24 * 3600.0
MAX_ATTEMPTS = 3  # of one import whose process ends without a result
LARGE_ZIP_BYTES = 10_000_000  # a smaller one is unpacked while the page waits, for a minute at most (images.js)
CHUNK = 32  # files that are added at once
MAX_FILES = 200_000
MAX_MESSAGES = 20
NUMBERS = ("done", "total", "added", "attempts")


class Import:
    """An import: its file, and what that says. state: waiting, done, failed or cancelled."""

    def __init__(self, path: Path):
        new = {"state": "waiting", "phase": "starting", "name": "", "kind": "", "messages": []}
        self.path, self.values = path, {**new, **dict.fromkeys(NUMBERS, 0), **(read_json(path) or {})}

    def store(self, **values: Any) -> None:
        """Set values, and store all. Raises RunError: the disk does not take them."""
        self.values |= values
        with explained("store the import"):
            atomic_write(self.path, json.dumps(self.values))

    def end(self, state: str, messages: list[str]) -> None:
        """Store the result, and delete what the import needed."""
        messages = [*dict.fromkeys(messages)]  # a limit is reached in each chunk
        if len(messages) > MAX_MESSAGES:
            more = f"{len(messages) - MAX_MESSAGES} more files were not added, or have a message"
            messages = [*messages[:MAX_MESSAGES], more]
        self.store(state=state, messages=messages)
        shutil.rmtree(own_folder(self.path), ignore_errors=True)


def place(draft_id: str) -> Path:
    """The folder of a draft's imports."""
    return folder(draft_id) / "imports"


def imports(draft_id: str) -> list[Import]:
    """The imports that wait or run, and those that ended since the last one was started; the oldest first."""
    return [Import(path) for path in sorted(place(draft_id).glob("[!.]*.json"))]


def waiting(draft_id: str) -> list[Import]:
    """The imports that are not done."""
    return [one for one in imports(draft_id) if one.values["state"] == "waiting"]


def given_folder(text: str) -> Path:
    """The folder that a user named. Raises RunError: it is no full path, or no folder that can be read."""
    text = plain_text(text).strip()
    try:
        path = Path(text).expanduser()
        if not path.is_absolute():
            raise RunError("Type the full path of a folder on the server, such as /home/me/photos")
        path = path.resolve() if ".." in path.parts else path  # its name becomes that of a subset
        os.scandir(path).close()
    except (OSError, ValueError, RuntimeError) as error:  # a null character; no home folder
        why = getattr(error, "strerror", None) or "no path"
        raise RunError(f"{text[:200]!r}: {why}; name a folder on the server that this user can read") from error
    return path


def start_folder(draft_id: str, text: str) -> dict[str, Any]:
    """Start to import a folder on the server. Returns the status. Raises RunError: see given_folder."""
    path = given_folder(text)
    return _start(draft_id, {"kind": "folder", "path": str(path), "name": str(path)})


def add(draft_id: str, files: list[tuple[Path, str]], drop: str, more: bool = False) -> dict[str, Any]:
    """Add uploaded files, (path, name with its folders) each, for parts of one `drop`: {"added", "messages"}."""
    uploads = uploads_dir().resolve()
    try:
        outside = any(not path.resolve().is_relative_to(uploads) for path, _ in files)
    except ValueError as error:  # a path that no system can have
        raise RunError(OUT_OF_DATE) from error
    if outside:
        raise RunError("Only files that were uploaded here can be added; upload them, or import their folder")
    if any(archives.is_zip(name) and path.is_file() and path.stat().st_size > LARGE_ZIP_BYTES for path, name in files):
        start_uploads(draft_id, files, drop)
        return {"added": 0, "messages": []}
    added, messages = draft_drop.add(draft_id, files, drop, more)
    return {"added": added, "messages": messages}


def start_uploads(draft_id: str, files: list[tuple[Path, str]], drop: str) -> dict[str, Any]:
    """Start to import uploaded files, large ZIPs among them. Returns the status. Raises RunError: one is gone."""
    names = [name for _, name in files]
    name = names[0] if len(names) == 1 else f"{len(names)} files"
    return _start(draft_id, {"kind": "uploads", "name": plain_text(name)[:200], "drop": drop}, files)


def _start(draft_id: str, spec: dict[str, Any], uploads: list[tuple[Path, str]] | None = None) -> dict[str, Any]:
    with explained("store the import"):
        place(draft_id).mkdir(parents=True, exist_ok=True)
        for one in imports(draft_id):
            if one.values["state"] != "waiting":  # its result was shown
                one.path.unlink(missing_ok=True)
        path = place(draft_id) / f"{time.time_ns()}.json"
        if uploads is not None:
            spec["files"] = _kept(uploads, own_folder(path))
    Import(path).store(**{**spec, "drop": draft_drop.drop_id(spec.get("drop", ""))})
    ensure(draft_id)
    return status(draft_id)


def own_folder(path: Path) -> Path:
    """The folder of an import, which is removed with it: its uploads, and what is unpacked of them."""
    return path.with_suffix(".files")


def _kept(uploads: list[tuple[Path, str]], folder: Path) -> list[list[str]]:
    """The uploads as files of `folder`, with their names. RunError: one is gone. OSError: the disk does not take it."""
    folder.mkdir()
    kept = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for number, (path, name) in enumerate(uploads):
            draft_images.put(path, plain_text(name), folder / f"{number}", link=True)
            kept.append([str(folder / f"{number}"), name])
        stack.pop_all()  # nothing failed: they stay
    return kept


def ensure(draft_id: str) -> None:
    """Start the process of the imports that wait, where it does not run."""
    if not waiting(draft_id):
        return
    with contextlib.suppress(RunError):  # another page starts it at this moment; the next status starts it otherwise
        if not jobs.running(folder(draft_id), JOB):
            jobs.start(folder(draft_id), JOB, ["ui.dataset.imports", draft_id], LIMIT_S)


def status(draft_id: str) -> dict[str, Any]:
    """What the imports do: {"waiting": number, "now": {"name", "phase", "done", "total", "added"} or None, "finished": […]}.

    A result is {"name", "state": "done", "failed" or "cancelled", "added", "messages"}. An import whose process
    was killed is started again.
    """
    ensure(draft_id)
    names = ("state", "phase", "name", "messages", *NUMBERS)
    found = [{name: one.values[name] for name in names} for one in imports(draft_id)]
    left = [one for one in found if one["state"] == "waiting"]
    results = [one for one in found if one["state"] != "waiting"]
    return {"waiting": len(left), "now": left[0] if left else None, "finished": results}


def cancel(draft_id: str) -> dict[str, Any]:
    """Cancel all imports of a draft; what they added stays. Returns the status."""
    jobs.cancel(folder(draft_id), JOB)
    jobs.wait(folder(draft_id), JOB, jobs.GRACE_S + jobs.KILL_S)
    for one in waiting(draft_id):  # those that its process had not begun
        one.end("cancelled", [])
    return status(draft_id)


# The fold ------------------------------------------------------------------------------------------------------------

PHASES = {"starting": "Starting", "reading": "Reading the folder", "unpacking": "Unpacking", "adding": "Adding images"}
ENDED = {
    "done": "{images} added from {name}.",
    "cancelled": "Import of {name} cancelled; {images} added. Undo removes them.",
    "failed": "{name}: not imported completely; {images} added.",
}


def shown(status: dict[str, Any]) -> str:
    """The import that runs and the results of those before it, as markup."""
    said, now = "", status["now"]
    if now:
        far = f" {now['done']:,} of" if now["phase"] == "adding" else ""
        far += f" {count(now['total'], 'file')}" if now["total"] else ""
        queued = f" · {count(status['waiting'] - 1, 'import')} after it" if status["waiting"] > 1 else ""
        said = f"{PHASES.get(now['phase'], 'Importing')}:{far} · {now['name']}{queued}"
    ended = [
        (ENDED[one["state"]].format(images=count(one["added"], "image"), **one), one) for one in status["finished"]
    ]
    return part("dataset/folds.html", "imports", said, now, ended)


def draw(draft_id: str) -> None:
    """Make the components of the fold "Add a folder on the server", which shows large ZIPs too."""
    import gradio as gr

    from ui.new import form
    from ui.run import fold

    def look() -> tuple[bool, str]:
        now = status(draft_id)
        return now["waiting"] > 0, shown(now)

    def begin(text: str) -> None:
        start_folder(draft_id, text)

    about = "Images in the folder and its subfolders are added with their captions. The folder is only read."
    path = fold.line("Folder on the server", about, placeholder="/home/me/photos")
    start = gr.Button("Import", size="sm", scale=0, min_width=110, elem_id="import-start")
    more = [(path.submit, begin)]  # several imports wait for each other: nothing is hidden
    state = fold.job(start, begin, look, lambda: cancel(draft_id), "import", [path], hides=[], more=more)
    state.change(None, None, None, js=form.SHOW_NEW, **fold.QUIET)


# The process ----------------------------------------------------------------------------------------------------------


class Cancelled(BaseException):
    """The user cancelled the import."""


def main(argv: list[str]) -> int:
    """Import what waits for a draft. Exit code 1 when one of the imports failed."""
    (draft_id,) = argv
    signal.signal(signal.SIGTERM, _cancel)
    code = 0
    while left := waiting(draft_id):
        one, state, messages = left[0], "failed", list[str]()
        try:
            with explained(f"import {one.values['name']}"):
                messages = _import(draft_id, one)
            state = "done"
        except Cancelled:
            state = "cancelled"
        except RunError as error:
            messages = [str(error)]
        except Exception as error:  # noqa: BLE001 - the top of a process: the page shows it, the log has its place
            traceback.print_exc()
            messages = [f"the import failed: {error!r}"]
        one.end(state, messages)
        if state == "cancelled":
            return 0
        code |= state == "failed"
    return code


def _cancel(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Cancelled


def _import(draft_id: str, one: Import) -> list[str]:
    """Import one folder or some uploads, which are unpacked into the import's own folder. Returns one message for each file
    that was not added. Raises RunError: the folder has no images, an upload is gone, or its process ended too often."""
    spec, own = one.values, own_folder(one.path)
    if spec["kind"] not in ("folder", "uploads"):
        raise RunError("this import cannot be read; start it again")
    if spec["attempts"] >= MAX_ATTEMPTS:
        raise RunError(f"this import ended {MAX_ATTEMPTS} times without a result; the images added so far are there")
    one.store(attempts=spec["attempts"] + 1, phase="reading" if spec["kind"] == "folder" else "unpacking")
    with contextlib.ExitStack() as stack:
        if spec["kind"] == "folder":
            files, messages = files_of(Path(spec["path"]), spec["drop"])
        else:
            uploads = [(Path(path), name) for path, name in spec["files"]]
            if gone := [name for path, name in uploads if not path.is_file()]:
                raise RunError(f"{', '.join(gone[:5])}: {draft_images.GONE}")
            for left in own.glob("zip-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            files, messages = draft_drop.expanded(stack, uploads, spec["drop"], own)
        if spec["attempts"] > 1:
            files = _not_added(draft_id, files)
        one.store(phase="adding", total=len(files))
        for at in range(0, len(files), CHUNK):
            chunk, more = files[at : at + CHUNK], at + CHUNK < len(files)
            link = all(file.path.parent != own for file in chunk)  # not an upload itself, to which Gradio may write
            added, said = draft_drop.take(draft_id, chunk, spec["drop"], more, link)
            messages += said
            one.store(done=at + len(chunk), added=spec["added"] + added)
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


def files_of(root: Path, drop: str) -> tuple[list[Dropped], list[str]]:
    """The images and captions of a folder and its subfolders, sorted as people count, without hidden ones; and a
    message for what is not added. A link is followed to a file inside the folder only. Raises RunError: the folder has
    no images, or too many files."""
    found: list[Dropped] = []
    messages: list[str] = []
    outside, images, real = 0, 0, root.resolve()

    def unread(error: OSError) -> None:
        messages.append(f"{error.filename}: the folder cannot be read; allow this user to read it")

    def named(text: str) -> str:
        return plain_text(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))

    for parent, folders, names in os.walk(root, onerror=unread):
        folders[:] = sorted((name for name in folders if not archives.ignored(name)), key=_natural)
        inside = named(Path(parent).relative_to(root.parent).as_posix() if Path(parent).name else "")
        for name in sorted((name for name in names if not archives.ignored(name)), key=_natural):
            path, suffix = Path(parent) / name, Path(name).suffix.lower()
            if suffix not in IMAGE_SUFFIXES and suffix not in CAPTION_SUFFIXES:
                continue
            if not _is_inside(path, real):
                outside += 1
                continue
            images += suffix in IMAGE_SUFFIXES
            found.append(Dropped(path.resolve() if path.is_symlink() else path, named(name), inside, drop))
            if len(found) > MAX_FILES:
                most = f"the folder has more than {MAX_FILES} images and captions"
                raise RunError(f"{root}: {most}; name its subfolders one by one")
    if outside:
        files = "1 file was" if outside == 1 else f"{outside} files were"
        messages.append(f"{files} not added: links to places outside {root}, or no regular files; name that folder")
    own = found if real.is_relative_to(datasets_dir().resolve()) else []
    if any("weight-" in one.folder or masks.of(real, one.path.resolve()) for one in own):
        messages.append("masks and weights are not added; 'New LoRA from this run' on a run's page copies them")
    if not images:
        raise RunError("\n".join([f"{root}: no images in this folder; use {USABLE}", *messages]))
    return found, messages


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
