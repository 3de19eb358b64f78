"""Downloads from a model hub that end: complete and verified, or with a reason and the bytes kept. One file, or a
repository into the cache of the hub's library, which then finds it without a network.

Decision: plain HTTP ranges, bounded by a watchdog on bytes, not the library's own download. What that one lacks: its
transfers by xet wait without a limit (HF_HUB_DOWNLOAD_TIMEOUT does not reach them), and since 1.0 it downloads to a
file of a new name in each process (huggingface_hub/file_download.py, `_download_to_tmp_and_move`), so that 20 of 24 GB
are downloaded again. Here a connection that brings less than `LEAST_BYTES` in `download_read_s` is
closed and continued by a range request; after `download_stall_s` without as many new bytes the download fails. Received
bytes stay in `.NAME.HASH.part`. Each file has a lock that ends with its process; another process that wants the file
waits as long as the bytes grow.

The cache's layout is the library's own: contents in `blobs/`, named by their hash; `snapshots/COMMIT/` with links to
them; the commit of a branch in `refs/`. Links and refs are written after the contents, so a download that was killed
never looks complete. A repository that this module completed is noted in `.hangproof.json`: it is used again without a
request, so a restart needs no network and gets the same files even when the branch has moved on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from guards import limits
from guards.checkpoint import atomic_write, rename, writing_file
from guards.deadline import call
from guards.hub import (
    NETWORK_ERRORS,
    POLL_S,
    DownloadError,
    Patience,
    Progress,
    Remote,
    ask,
    check_status,
    hub_home,
    listing,
)
from guards.reading import read_json, read_text

RECORD = ".hangproof.json"
OnProgress = Callable[[Progress], object]
CHUNK = 1 << 20
LEAST_BYTES = 1 << 16  # that a connection must bring in `download_read_s`; fewer are no progress


def part_of(target: Path, remote: Remote) -> Path:
    """The file that holds the received bytes of an unfinished download."""
    return target.with_name(f".{target.name}.{remote.digest[:16]}.part")


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def missing_bytes(target: Path, remote: Remote) -> int:
    """How much disk space the download of a file still needs, in bytes."""
    return 0 if target.exists() else max(0, remote.size - size_of(part_of(target, remote)))


def check_space(needed: int, folder: Path, what: str) -> None:
    """Raises DownloadError when the disk of `folder` has less than `needed` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            "space",
            f"{what} needs {needed / 1e9:.1f} GB more, but {folder} has {free / 1e9:.1f} GB free; free some space, or "
            "use a folder on another disk (HANGPROOF_DATA, HF_HOME)",
        )


def digest_of(path: Path, wanted: str, on_piece: Callable[[int], object] = lambda _: None) -> str:
    """The hash of a file, of the kind of `wanted`: SHA-256, or git's SHA-1. on_piece gets the bytes so far."""
    size = path.stat().st_size
    total = hashlib.sha256() if len(wanted) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    done = 0
    with path.open("rb") as file:
        while piece := file.read(8 * CHUNK):
            total.update(piece)
            done += len(piece)
            on_piece(done)
    return total.hexdigest()


def fetch(remote: Remote, target: Path, on_progress: OnProgress, lock: Path | None = None) -> None:
    """Download a file to `target` unless it is there, continuing an earlier download.

    lock: the lock file; None: beside the target. DownloadError: received bytes are kept.
    """
    from filelock import FileLock, Timeout  # not in a trainer of kohya's, which uses `digest_of`

    lock = lock or target.with_name(f".{target.name}.lock")
    ours = _Download(remote, target, on_progress)
    part, patience = ours.part, ours.patience
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
                if not target.exists():
                    patience.progress()
                    ours.run()
                return
            ours.report(size_of(part))  # of the other download
            if patience.left_s() <= 0:
                raise DownloadError(
                    "stalled",
                    f"another process holds {lock} and has downloaded no byte of {remote.name} for "
                    f"{patience.limit_s:.0f} s; end it and download again",
                )
            patience.report()
            time.sleep(POLL_S)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = f"the disk of {target.parent} is full ({error.strerror}); {size_of(part)} bytes received are kept"
            raise DownloadError("space", f"{kept}. Free some space and download again") from error
        text = f"cannot write {part}: {error.strerror or error}; fix the folder and download again"
        raise DownloadError("disk", text) from error


class _Download:
    """One file, from the first request to the rename. The caller holds the lock."""

    def __init__(self, remote: Remote, target: Path, on_progress: OnProgress) -> None:
        self.remote, self.target, self.on_progress = remote, target, on_progress
        self.part = part_of(target, remote)
        self.patience = Patience(limits.seconds("download_stall_s"), f"a byte of {remote.name}")
        self.begun_s, self.begun = time.monotonic(), size_of(self.part)
        self.most = self.begun  # bytes on the disk when there was progress last

    def run(self) -> None:
        for other in self.target.parent.glob(f".{self.target.name}*.part"):
            if other != self.part or size_of(other) > self.remote.size:  # of another version of the file
                other.unlink()
        check_space(missing_bytes(self.target, self.remote), self.target.parent, self.target.name)
        while size_of(self.part) < self.remote.size:
            try:
                self.receive()
            except NETWORK_ERRORS as error:
                self.patience.pause(error, size_of(self.part))
        self.part.touch()  # an empty file
        self.finish()

    def receive(self) -> None:
        """Append the missing bytes to the part file. Raises one of NETWORK_ERRORS when the connection ends early."""
        have, size, read_s = size_of(self.part), self.remote.size, self.patience.read_s()
        with contextlib.ExitStack() as stack:
            # On a thread: nothing interrupts a name look-up.
            begun = ask(self.remote.url, read_s, **({"Range": f"bytes={have}-"} if have else {}))
            response = call(stack.enter_context, begun, seconds=read_s, what="the file's first byte")
            check_status(response, self.remote.repo, self.remote.name)
            where = response.headers.get("Content-Range", "")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise DownloadError("server", f"{self.remote.url} is compressed although it was asked not to be")
            if response.status_code == 200:
                have = 0  # the server ignores ranges
            elif not where.startswith(f"bytes {have}-"):
                raise ConnectionError(f"asked for bytes from {have}, received {where or 'a part without its position'}")
            file = stack.enter_context(self.part.open("r+b" if have else "wb"))
            file.seek(have)
            since_s, since = time.monotonic(), have
            self.report(have)
            for piece in response.iter_raw():
                have += file.write(piece[: size - have])
                file.flush()
                self.report(have)
                if have - since >= LEAST_BYTES:
                    since_s, since = time.monotonic(), have
                elif time.monotonic() - since_s > read_s:
                    raise TimeoutError(f"fewer than {LEAST_BYTES} bytes in {read_s:g} s")
                if have == size:
                    break
            os.fsync(file.fileno())
        if have < size:
            raise ConnectionError(f"the connection ended after {have} of {size} bytes")

    def report(self, done: int) -> None:
        """`done` bytes are on the disk."""
        total = self.remote.size
        if done - self.most >= LEAST_BYTES or self.most < done == total:
            self.most = done
            self.patience.progress()
        took_s = time.monotonic() - self.begun_s
        speed = max(0, done - self.begun) / took_s if took_s >= POLL_S else 0.0
        self.on_progress(Progress(self.target.name, done, total, speed))

    def finish(self) -> None:
        """Verify the part file and rename it to the target."""
        wanted, name = self.remote.digest, f"{self.target.name} (checking)"
        found = digest_of(self.part, wanted, lambda done: self.on_progress(Progress(name, done, self.remote.size)))
        if found != wanted:
            self.part.unlink(missing_ok=True)
            text = f"{self.remote.name} of {self.remote.repo} arrived damaged (its hash is {found[:12]}… instead of "
            raise DownloadError("damaged", f"{text}{wanted[:12]}…) and was deleted; download it again")
        rename(self.part, self.target)


def cache_folder() -> Path:
    """The library's cache: `$HF_HUB_CACHE` (once `$HUGGINGFACE_HUB_CACHE`), else in `hub_home()`."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or hub_home() / "hub").expanduser()


def repository(repo: str) -> Path:
    """The folder of a repository in the cache."""
    return cache_folder() / "--".join(["models", *repo.split("/")])


def cached_repository(repo: str) -> Path | None:
    """The snapshot of a repository in the cache, complete or not; None when there is none."""
    home = repository(repo)
    commit = read_text(home / "refs" / "main").strip()
    found = home / "snapshots" / commit
    return found if commit and found.is_dir() else None


def snapshot(repo: str, choose: Callable[[list[str]], list[str]], on_progress: OnProgress) -> Path:
    """Download the files of a repository that `choose` selects from all names; returns the snapshot's folder.

    Progress counts the bytes of all of them. Raises DownloadError; received bytes are kept.
    """
    home = repository(repo)
    record = (read_json(home / RECORD) or {}).get("main", {"commit": "", "files": [""]})
    found = home / "snapshots" / record["commit"]
    if all((found / name).is_file() for name in record["files"]):
        return found
    files = listing(repo)
    wanted = sorted({*choose(list(files))} & files.keys(), key=lambda name: (files[name].size, name))
    blobs = {name: home / "blobs" / files[name].digest for name in wanted}
    missing = [name for name in wanted if not blobs[name].is_file()]
    check_space(sum(missing_bytes(blobs[name], files[name]) for name in missing), home, repo)
    total = sum(files[name].size for name in wanted)
    before = total - sum(files[name].size for name in missing)
    for name in missing:

        def report(at: Progress, name: str = name, before: int = before) -> None:
            on_progress(replace(at, name=name, done=before + at.done, total=total))

        fetch(files[name], blobs[name], report, home.parent / ".locks" / home.name / f"{blobs[name].name}.lock")
        before += files[name].size
    commit = next(iter(files.values())).commit
    found = home / "snapshots" / commit
    for name in wanted:
        _link(found / name, blobs[name])
    (home / "refs").mkdir(parents=True, exist_ok=True)
    atomic_write(home / "refs" / "main", commit)
    atomic_write(home / RECORD, json.dumps({"main": {"commit": commit, "files": wanted}}))
    return found


def _link(path: Path, blob: Path) -> None:
    """Make the file of a snapshot, as a link to its blob, or a second name of it, or a copy."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_file(path, sync=False) as temporary:
        temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError, NotImplementedError):  # Windows without the right to create links
            return temporary.symlink_to(os.path.relpath(blob, path.parent))
        with contextlib.suppress(OSError):
            return os.link(blob, temporary)
        shutil.copyfile(blob, temporary)
