"""All drafts of the data folder: those used last, and those that nobody opens any more."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from runs import env_file
from runs.files import RunError
from runs.paths import datasets_dir
from ui import jobs
from ui.dataset import draft_store
from ui.html import duration

UPLOAD_EXPIRES_S = 24 * 3600
DRAFT_EXPIRES_S = 60 * 24 * 3600  # counted from the last time a page opened the draft
RECENT = 8  # drafts to choose from


def _folders() -> list[Path]:
    return [path for path in (datasets_dir() / ".drafts").glob("*") if draft_store.is_id(path.name)]


def recent(own: str = "") -> list[dict[str, Any]]:
    """The drafts that were used last, except one's own, so that another browser can continue one."""
    found = list[dict[str, Any]]()
    for used, folder in sorted(((last_used(*content_files(one)), one) for one in _folders()), reverse=True):
        if used and len(found) < RECENT and folder.name != own:
            try:
                state = draft_store.read(folder.name)
            except RunError:
                continue  # a file that cannot be read is no draft to continue
            images, name = len(state["images"]), state["form"].get("name", "")
            if images or name:
                age = duration(time.time() - used)
                found.append({"id": folder.name, "name": name, "images": images, "age": f"{age} ago"})
    return found


def delete_expired() -> None:
    """Delete uploads after one day, and drafts that no page has opened for 60 days.

    An upload is deleted by its age only: two drops of one file share its path, and an import has a link of its own. A
    draft at which a command works (ui/jobs.py) stays as it is: after a night's sleep, what it writes is old too.
    """
    old = [path for path in draft_store.uploads_dir().glob("*") if _age_s(path, *path.glob("*")) > UPLOAD_EXPIRES_S]
    for path in _folders():
        expired = [path] if (_age_s(*content_files(path)) or _age_s(path)) > DRAFT_EXPIRES_S else []
        unfinished = path.glob(".new-*")  # of drops that ended with the server
        expired += [new for new in unfinished if _age_s(new) > UPLOAD_EXPIRES_S]
        if expired and not _at_work(path):
            old += expired
    for path in old:
        draft_store.close(path / draft_store.NAME)
        for kept in (path, path / "script.json", path / "rehearsal"):
            env_file.forget(kept)
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _at_work(draft: Path) -> bool:
    """Whether a command works at a draft."""
    places = [draft, *(path.parent for path in draft.glob(f"*/{jobs.FOLDER}"))]
    return any(job.state == "running" for place in places for job in jobs.all_of(place).values())


def content_files(draft: Path) -> list[Path]:
    """The files with the content of the draft in a folder, whether they exist or not."""
    return [draft / draft_store.NAME, draft / f"{draft_store.NAME}-wal"]


def last_used(*paths: Path) -> float:
    """When the newest of the paths that exist was changed, in seconds since 1970; 0 when none exists."""
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _age_s(*paths: Path) -> float:
    """Age in seconds of the newest of the paths that exist; 0 when none exists."""
    newest = last_used(*paths)
    return time.time() - newest if newest else 0.0


def touch(draft_id: str) -> None:
    """Record that a page has opened this draft, which restarts its expiry."""
    with contextlib.suppress(OSError):  # not stored yet, or the disk is read-only, which the next edit reports
        for path in content_files(draft_store.folder(draft_id)):
            os.utime(path)
