"""Imports into a draft that take long: a folder on the server, and large ZIPs.

The page stores what to import as a file in the draft's folder `imports/` and starts `python -m ui.dataset.import_job`,
which outlives the server. The file is deleted when everything in it was added, so an import that was killed with its
machine continues when a page opens the draft. It continues where it stopped, because images that were added are known
by their drop. Uploads are linked into a folder of the import: Gradio deletes its own when the server stops, and we do
after a day.
"""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from runs.files import RunError, atomic_write, explained
from ui import jobs
from ui.dataset import draft_drop, draft_images
from ui.dataset.draft_store import folder, plain_text

JOB = "import"
LIMIT_S = 7 * 24 * 3600.0
MAX_ATTEMPTS = 3  # of one import whose process ends without a result
LARGE_ZIP_BYTES = 50_000_000  # a smaller one is unpacked while the page waits


def place(draft_id: str) -> Path:
    """The folder of a draft's imports."""
    return folder(draft_id) / "imports"


def given_folder(text: str) -> Path:
    """The folder that a user named. Raises RunError: it is no full path, or no folder that can be read."""
    text = plain_text(text).strip()
    if not text:
        raise RunError("Type the path of a folder on the server, such as /home/me/photos")
    try:
        path = Path(text).expanduser()
        if not path.is_absolute():
            raise RunError(f"{text[:200]}: type the full path of the folder, such as /home/me/photos")
        if not path.is_dir():
            raise RunError(f"{text[:200]}: there is no such folder on the server; check the path")
        with os.scandir(path):
            pass
    except (ValueError, RuntimeError) as error:  # a null character; no home folder
        raise RunError(f"{text[:200]!r} is no path; type the full path of a folder") from error
    except OSError as error:
        raise RunError(f"{text[:200]}: {error.strerror}; allow this user to read the folder") from error
    return path


def start_folder(draft_id: str, text: str) -> dict[str, Any]:
    """Start to import the images and captions of a folder on the server. Returns the status. Raises RunError: see given_folder."""
    path = given_folder(text)
    return _start(draft_id, {"kind": "folder", "path": str(path), "name": str(path)})


def start_uploads(draft_id: str, files: list[tuple[Path, str]], drop: str) -> dict[str, Any]:
    """Start to import uploaded files, large ZIPs among them. Returns the status. Raises RunError: one is gone."""
    names = [name for _, name in files]
    name = names[0] if len(names) == 1 else f"{len(names)} files"
    return _start(draft_id, {"kind": "uploads", "name": plain_text(name)[:200], "drop": drop}, files)


def _start(draft_id: str, spec: dict[str, Any], uploads: list[tuple[Path, str]] | None = None) -> dict[str, Any]:
    drop = draft_drop.drop_id(spec.get("drop", ""))
    with explained("store the import"):
        place(draft_id).mkdir(parents=True, exist_ok=True)
        path = place(draft_id) / f"{time.time_ns()}.json"
        if uploads is not None:
            spec["files"] = _kept(uploads, own_folder(path))
        atomic_write(path, json.dumps({**spec, "drop": drop, "attempts": 0}))
    ensure(draft_id)
    return status(draft_id)


def own_folder(path: Path) -> Path:
    """The folder of an import, which is removed with it: its uploads, and what is unpacked of them."""
    return path.with_suffix(".files")


def _kept(uploads: list[tuple[Path, str]], folder: Path) -> list[list[str]]:
    """The uploads as files of `folder`, with their names. Raises RunError: one is gone. OSError: the disk does not take it."""
    folder.mkdir()
    kept = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for number, (path, name) in enumerate(uploads):
            if not path.is_file():
                raise RunError(f"{plain_text(name)}: {draft_images.GONE}")
            try:
                os.link(path, folder / f"{number}")
            except OSError:  # another disk, or one without hard links
                shutil.copyfile(path, folder / f"{number}")
            kept.append([str(folder / f"{number}"), name])
        stack.pop_all()  # nothing failed: they stay
    return kept


def waiting(draft_id: str) -> list[Path]:
    """The imports that are not done, the oldest first."""
    return sorted(place(draft_id).glob("[!.]*.json"))


def finished(draft_id: str) -> list[Path]:
    """The results that no page has shown."""
    return sorted(place(draft_id).glob("[!.]*.done"))


def ensure(draft_id: str) -> None:
    """Start the process of the imports that wait, where it does not run."""
    if not waiting(draft_id):
        return
    with contextlib.suppress(RunError):  # another page starts it at this moment; the next status starts it otherwise
        if not jobs.running(folder(draft_id), JOB):
            jobs.start(folder(draft_id), JOB, ["ui.dataset.import_job", draft_id], LIMIT_S)


def is_active(draft_id: str) -> bool:
    """Whether the page should ask for the status."""
    return bool(waiting(draft_id) or finished(draft_id))


def status(draft_id: str) -> dict[str, Any]:
    """What the imports do: {"waiting": number, "now": {"name", "phase", "done", "total", "added"} or None, "finished": […]}.

    A result is {"id", "name", "state": "done", "failed" or "cancelled", "added", "messages"}. An import whose process
    was killed is started again.
    """
    ensure(draft_id)
    left, now = waiting(draft_id), None
    if left:
        _, now, _ = jobs.output(folder(draft_id), JOB)  # a line of import_job.Progress
        if not isinstance(now, dict) or now.get("id") != left[0].stem:
            now = {"name": _read(left[0]).get("name", ""), "phase": "starting", "done": 0, "total": 0, "added": 0}
    results = [{**_read(path), "id": path.stem} for path in finished(draft_id)]
    return {"waiting": len(left), "now": now, "finished": results}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def attempt(path: Path) -> dict[str, Any]:
    """An import to do, with its attempts counted on disk. Raises RunError: its process ended too often without a result."""
    spec = _read(path)
    if spec.get("kind") not in ("folder", "uploads"):
        raise RunError("this import cannot be read; start it again")
    spec["attempts"] += 1
    if spec["attempts"] > MAX_ATTEMPTS:
        raise RunError(f"this import ended {MAX_ATTEMPTS} times without a result; the images added so far are there")
    with explained("store the import"):
        atomic_write(path, json.dumps(spec))
    return spec


def finish(path: Path, state: str, added: int, messages: list[str]) -> None:
    """Store the result of an import and remove it from those that wait."""
    result = {"name": _read(path).get("name", ""), "state": state, "added": added, "messages": messages}
    with explained("store the result of the import"):
        atomic_write(path.with_suffix(".done"), json.dumps(result))
        path.unlink(missing_ok=True)
    shutil.rmtree(own_folder(path), ignore_errors=True)


def cancel(draft_id: str) -> dict[str, Any]:
    """Cancel all imports of a draft; what they added stays. Returns the status."""
    jobs.cancel(folder(draft_id), JOB)
    jobs.wait(folder(draft_id), JOB, jobs.GRACE_S + jobs.KILL_S)
    for path in waiting(draft_id):  # those that its process had not begun
        finish(path, "cancelled", 0, [])
    return status(draft_id)


def dismiss(draft_id: str, ids: list[str]) -> dict[str, Any]:
    """Forget results that a page has shown. Returns the status."""
    for path in finished(draft_id):
        if path.stem in ids:
            path.unlink(missing_ok=True)
    return status(draft_id)
