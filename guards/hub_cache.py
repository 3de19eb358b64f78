"""Downloads repositories into the cache of the hub's library, which then finds them without a network.

The layout is the library's own: contents in `blobs/`, named by their hash; `snapshots/COMMIT/` with links to them; the
commit of a branch in `refs/`. Links and refs are written after the contents, so a download that was killed never looks
complete. A repository that this module completed is noted in `.hangproof.json`: it is used again without a request, so
a restart needs no network and gets the same files even when the branch has moved on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from guards.checkpoint import atomic_write
from guards.download import CHUNK, check_space, fetch, missing_bytes
from guards.hub import DownloadError, Options, Progress, Remote, Source, endpoint, hub_home
from guards.hub_request import DIGEST, Responses, ask
from guards.reading import read_json, read_text

MOST_LIST_BYTES = 1 << 26


def folder() -> Path:
    """The library's cache: `$HF_HUB_CACHE`, else in `hub_home()`."""
    return Path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub").expanduser()


def repository(source: Source) -> Path:
    """The folder of a repository in the cache."""
    return folder() / "--".join([f"{source.repo_type}s", *source.repo.split("/")])


def cached_repository(source: Source) -> Path | None:
    """The snapshot of a revision in the cache, complete or not; None when there is none."""
    home = repository(source)
    commit = read_text(home / "refs" / _safe(source.revision)).strip() or source.revision
    found = home / "snapshots" / _safe(commit)
    return found if found.is_dir() else None


def snapshot(source: Source, choose: Callable[[list[str]], list[str]], options: Options) -> Path:
    """Download the files of a repository that `choose` selects from all names; returns the snapshot's folder.

    Progress counts the bytes of all of them. Raises DownloadError; received bytes are kept.
    """
    home = repository(source)
    records = read_json(home / ".hangproof.json") or {}
    if (done := _completed(home, records.get(source.revision))) is not None:
        return done
    commit, files = listing(source, options)
    wanted = sorted({*choose(list(files))} & files.keys(), key=lambda name: (files[name].size, name))
    blobs = {name: home / "blobs" / files[name].digest for name in wanted}
    missing = [name for name in wanted if not blobs[name].is_file()]
    check_space(sum(missing_bytes(blobs[name], files[name].size) for name in missing), home, source.repo)
    total = sum(files[name].size for name in wanted)
    before = total - sum(files[name].size for name in missing)
    by_hand = options.by_hand or f"download it elsewhere (hf download {source.repo}) and use the folder"
    for name in missing:

        def report(at: Progress, name: str = name, before: int = before) -> None:
            label = at.name.replace(blobs[name].name, name)
            left = total - before - at.done
            eta_s = left / at.speed if at.speed else None
            options.on_progress(replace(at, name=label, done=before + at.done, total=total, eta_s=eta_s))

        one = replace(source, file=name, revision=commit)
        lock = home.parent / ".locks" / home.name / f"{blobs[name].name}.lock"
        fetch(one, blobs[name], replace(options, by_hand=by_hand, on_progress=report), files[name], lock=lock)
        before += files[name].size
    found = home / "snapshots" / commit
    for name in wanted:
        _link(found / _safe(name), blobs[name])
    if source.revision != commit:
        _write(home / "refs" / _safe(source.revision), commit)
    _write(home / ".hangproof.json", json.dumps({**records, source.revision: {"commit": commit, "files": wanted}}))
    return found


def listing(source: Source, options: Options) -> tuple[str, dict[str, Remote]]:
    """The commit and the files of a repository, by name. Raises DownloadError."""
    revision = urllib.parse.quote(source.revision, safe="")
    url = f"{endpoint()}/api/{source.repo_type}s/{source.repo}/revision/{revision}?blobs=true"

    def read(responses: Responses) -> tuple[str, dict[str, Remote]]:
        data = b""
        while len(data) < MOST_LIST_BYTES and (piece := responses[-1].read1(CHUNK)):
            data += piece
        try:
            found = json.loads(data)
            return found["sha"], dict(_entry(item) for item in found["siblings"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if responses[-1].length:
                raise ConnectionError("the list of files is cut short") from error
            raise DownloadError(
                "server", f"{url} is not the list of files of a model hub ({type(error).__name__}); check HF_ENDPOINT"
            ) from error

    commit, files = ask(replace(source, file=""), url, "GET", options, read)
    if not re.fullmatch(r"[0-9a-f]{40}", str(commit)):
        raise DownloadError("server", f"{url} names no commit; check HF_ENDPOINT")
    return commit, files


def _entry(item: dict[str, Any]) -> tuple[str, Remote]:
    """The name of a file in the hub's list, and what the list says about it, as `hub_request.resolve` would return it."""
    large = item.get("lfs") or {}
    digest = str(large.get("sha256") or item["blobId"]).lower()
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no hash")
    return _safe(item["rfilename"]).as_posix(), Remote(int(large.get("size", item["size"])), digest)


def _completed(home: Path, record: Any) -> Path | None:
    """The snapshot that was completed here, when all its files still exist."""
    if not isinstance(record, dict):
        return None
    found = home / "snapshots" / str(record.get("commit"))
    files = record.get("files") or [""]
    return found if all((found / name).is_file() for name in files) else None


def _safe(name: str) -> Path:
    """A relative path inside a repository. Raises DownloadError for a name that would leave it."""
    parts = name.split("/")
    if "\\" in name or ":" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise DownloadError("server", f"{name!r} is not a name of a file in a repository")
    return Path(*parts)


def _link(path: Path, blob: Path) -> None:
    """Make the file of a snapshot, as a link to its blob; where links are not possible, a copy."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(os.path.relpath(blob, path.parent))
    except (OSError, NotImplementedError):  # Windows without the right to create links
        shutil.copyfile(blob, temporary)
    os.replace(temporary, path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
