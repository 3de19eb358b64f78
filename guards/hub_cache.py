"""Downloads files and repositories into the cache of the hub's library, which then finds them without a network.

The layout is the library's own: contents in `blobs/`, named by their ETag; `snapshots/COMMIT/` with links to them; the
commit of a branch in `refs/`. Links and refs are written after the contents, so a download that was killed never looks
complete. A repository that this module completed is noted in `.hangproof.json`: it is used again without a request, so
a restart needs no network and gets the same files even when the branch has moved on.
"""

from __future__ import annotations

import hashlib
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
from guards.download import CHUNK, check_space, fetch_locked, missing_bytes
from guards.hub import DownloadError, Options, Progress, Remote, Source, endpoint, hub_home
from guards.hub_request import ask, resolve
from guards.reading import read_json

MOST_LIST_BYTES = 1 << 26


def folder() -> Path:
    """The library's cache: `$HF_HUB_CACHE`, else in `hub_home()`."""
    return Path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub").expanduser()


def repository(source: Source, cache: Path | None = None) -> Path:
    """The folder of a repository in the cache."""
    return (cache or folder()) / "--".join([f"{source.repo_type}s", *source.repo.split("/")])


def commit_of(source: Source, cache: Path | None = None) -> str:
    """The commit of a revision that is in the cache; "" when there is none."""
    home = repository(source, cache)
    try:
        return (home / "refs" / _safe(source.revision)).read_text(encoding="utf-8").strip()
    except OSError:
        return source.revision if (home / "snapshots" / _safe(source.revision)).is_dir() else ""


def cached_repository(source: Source, cache: Path | None = None) -> Path | None:
    """The snapshot of a revision in the cache, complete or not; None when there is none."""
    commit = commit_of(source, cache)
    found = repository(source, cache) / "snapshots" / commit
    return found if commit and found.is_dir() else None


def to_cache(source: Source, options: Options, cache: Path | None = None) -> Path:
    """Download one file into the cache; returns its path in the snapshot. Raises DownloadError."""
    remote = resolve(source, options)
    if not re.fullmatch(r"[0-9a-f]{40}", remote.commit) or not remote.etag:
        raise DownloadError(
            "server", f"{source.url} names no commit or no ETag, so it is not a model hub; check HF_ENDPOINT"
        )
    home = repository(source, cache)
    pinned = replace(source, revision=remote.commit)
    if not (home / "snapshots" / remote.commit / _safe(source.file)).is_file():
        _fetch_blob(pinned, remote, home, options)
    path = _link(home, remote.commit, source.file, remote.etag)
    _write_ref(home, source.revision, remote.commit)
    return path


def listing(source: Source, options: Options) -> tuple[str, dict[str, Remote]]:
    """The commit and the files of a repository, by name. Raises DownloadError."""
    kind = f"{source.repo_type}s"
    revision = urllib.parse.quote(source.revision, safe="")
    url = f"{endpoint()}/api/{kind}/{source.repo}/revision/{revision}?blobs=true"

    def read(responses: list[Any]) -> tuple[str, dict[str, Remote]]:
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
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DownloadError("server", f"{url} names no commit; check HF_ENDPOINT")
    return commit, files


def _entry(item: dict[str, Any]) -> tuple[str, Remote]:
    """The name of a file in the hub's list, and what the list says about it, as `hub_request.resolve` would return it."""
    lfs, blob = item.get("lfs") or {}, str(item.get("blobId", ""))
    sha256 = str(lfs.get("sha256", ""))
    sha1 = blob.lower() if not sha256 and re.fullmatch(r"[0-9a-fA-F]{40}", blob) else ""
    remote = Remote(int(lfs.get("size", item["size"])), sha256 or blob, sha256, sha1)
    return _safe(item["rfilename"]).as_posix(), remote


def snapshot(
    source: Source, choose: Callable[[list[str]], list[str]], options: Options, cache: Path | None = None
) -> Path:
    """Download the files of a repository that `choose` selects from all names; returns the snapshot's folder.

    Progress counts the bytes of all of them. Raises DownloadError; received bytes are kept.
    """
    home = repository(source, cache)
    done = _completed(home, source.revision)
    if done is not None:
        return done
    commit, files = listing(source, options)
    sizes = {name: remote.size or 0 for name, remote in files.items()}
    wanted = sorted({*choose(list(files))} & files.keys(), key=lambda name: (sizes[name], name))
    blobs = {name: _blob(home, files[name].etag) for name in wanted}
    missing = [name for name in wanted if not blobs[name].is_file()]
    check_space(sum(missing_bytes(blobs[name], sizes[name]) for name in missing), home, source.repo)
    total, before = sum(sizes[name] for name in wanted), sum(sizes[name] for name in wanted if name not in missing)
    for name in missing:
        offset = before

        def report(at: Progress, offset: int = offset) -> None:
            left = total - offset - at.done
            eta_s = left / at.speed if at.speed else None
            options.on_progress(replace(at, done=offset + at.done, total=total, eta_s=eta_s))

        one = replace(source, file=name, revision=commit)
        _fetch_blob(one, files[name], home, replace(options, wait=True, on_progress=report))
        before += sizes[name]
    for name in wanted:
        _link(home, commit, name, files[name].etag)
    _write_ref(home, source.revision, commit)
    record = {**_records(home), source.revision: {"commit": commit, "files": wanted}}
    _write(home / ".hangproof.json", json.dumps(record))
    return home / "snapshots" / commit


def _records(home: Path) -> dict[str, Any]:
    return read_json(home / ".hangproof.json") or {}


def _completed(home: Path, revision: str) -> Path | None:
    """The snapshot that was completed here, when all its files still exist."""
    record = _records(home).get(revision)
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


def _blob(home: Path, etag: str) -> Path:
    usable = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", etag)
    return home / "blobs" / (etag if usable else hashlib.sha256(etag.encode()).hexdigest())


def _fetch_blob(source: Source, remote: Remote, home: Path, options: Options) -> None:
    blob = _blob(home, remote.etag)
    if blob.is_file():
        return
    lock = home.parent / ".locks" / home.name / f"{blob.name}.lock"
    hint = f"download it elsewhere (hf download {source.repo}) and use the folder"
    within = replace(options, by_hand=options.by_hand or hint, wait=True, on_progress=_named(source.file, options))
    fetch_locked(source, blob, within, lock, remote)


def _named(name: str, options: Options) -> Callable[[Progress], None]:
    """Progress under the file's name instead of its blob's."""
    return lambda at: options.on_progress(replace(at, name=f"{name} (checking)" if "(checking)" in at.name else name))


def _link(home: Path, commit: str, name: str, etag: str) -> Path:
    """The file of a snapshot, as a link to its blob; where links are not possible, a copy."""
    path, blob = home / "snapshots" / commit / _safe(name), _blob(home, etag)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(os.path.relpath(blob, path.parent))
    except (OSError, NotImplementedError):  # Windows without the right to create links
        shutil.copyfile(blob, temporary)
    os.replace(temporary, path)
    return path


def _write_ref(home: Path, revision: str, commit: str) -> None:
    if revision != commit:
        _write(home / "refs" / _safe(revision), commit)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
