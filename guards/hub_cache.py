"""Downloads repositories into the cache of the hub's library, which then finds them without a network.

The layout is the library's own: contents in `blobs/`, named by their hash; `snapshots/COMMIT/` with links to them; the
commit of a branch in `refs/`. Links and refs are written after the contents, so a download that was killed never looks
complete. A repository that this module completed is noted in `.hangproof.json`: it is used again without a request, so
a restart needs no network and gets the same files even when the branch has moved on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from guards.checkpoint import atomic_write, writing_file
from guards.download import check_space, fetch, missing_bytes
from guards.hub import Options, Progress, Source, hub_home, listing, safe
from guards.reading import read_json, read_text


def folder() -> Path:
    """The library's cache: `$HF_HUB_CACHE`, else in `hub_home()`."""
    return Path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub").expanduser()


def repository(source: Source) -> Path:
    """The folder of a repository in the cache."""
    return folder() / "--".join(["models", *source.repo.split("/")])


def cached_repository(source: Source) -> Path | None:
    """The snapshot of a revision in the cache, complete or not; None when there is none."""
    home = repository(source)
    commit = read_text(home / "refs" / safe(source.revision)).strip() or source.revision
    found = home / "snapshots" / safe(commit)
    return found if found.is_dir() else None


def snapshot(source: Source, choose: Callable[[list[str]], list[str]], options: Options) -> Path:
    """Download the files of a repository that `choose` selects from all names; returns the snapshot's folder.

    Progress counts the bytes of all of them. Raises DownloadError; received bytes are kept.
    """
    home = repository(source)
    records = read_json(home / ".hangproof.json") or {}
    record = records.get(source.revision) or {"commit": "", "files": [""]}
    found = home / "snapshots" / record["commit"]
    if all((found / name).is_file() for name in record["files"]):
        return found
    commit, files = listing(source, options)
    wanted = sorted({*choose(list(files))} & files.keys(), key=lambda name: (files[name].size, name))
    blobs = {name: home / "blobs" / files[name].digest for name in wanted}
    missing = [name for name in wanted if not blobs[name].is_file()]
    check_space(sum(missing_bytes(blobs[name], files[name]) for name in missing), home, source.repo)
    total = sum(files[name].size for name in wanted)
    before = total - sum(files[name].size for name in missing)
    by_hand = options.by_hand or f"download it elsewhere (hf download {source.repo}) and use the folder"
    for name in missing:

        def report(at: Progress, name: str = name, before: int = before) -> None:
            label = at.name.replace(blobs[name].name, name)
            options.on_progress(replace(at, name=label, done=before + at.done, total=total))

        one = replace(source, file=name, revision=commit)
        lock = home.parent / ".locks" / home.name / f"{blobs[name].name}.lock"
        fetch(one, blobs[name], files[name], replace(options, by_hand=by_hand, on_progress=report), lock)
        before += files[name].size
    found = home / "snapshots" / commit
    for name in wanted:
        _link(found / safe(name), blobs[name])
    if source.revision != commit:
        _write(home / "refs" / safe(source.revision), commit)
    _write(home / ".hangproof.json", json.dumps({**records, source.revision: {"commit": commit, "files": wanted}}))
    return found


def _link(path: Path, blob: Path) -> None:
    """Make the file of a snapshot, as a link to its blob; where links are not possible, a copy."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_file(path, sync=False) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(os.path.relpath(blob, path.parent))
        except (OSError, NotImplementedError):  # Windows without the right to create links
            shutil.copyfile(blob, temporary)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
