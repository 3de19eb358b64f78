"""Downloads one file of a model hub so that it ends: complete and verified, or with a reason and its bytes kept.

Decision: plain HTTP ranges with the standard library, bounded by a watchdog on bytes, not the hub's own library. What that one
lacks: its transfers by xet wait without a limit (HF_HUB_DOWNLOAD_TIMEOUT does not reach them), and since 1.0 it
downloads to a file of a new name in each process (huggingface_hub/file_download.py, `_download_to_tmp_and_move`), so
that 20 of 24 GB are downloaded again. Here a connection that brings less than `LEAST_BYTES` in `download_read_s` is
closed and continued by a range request; after `download_stall_s` without as many new bytes the download fails. Received
bytes stay in `.NAME.part`, with the hash of their file beside them. Each file has a lock that ends with its process;
another process that wants the file waits as long as the bytes grow.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from guards.checkpoint import atomic_write, fsync_path
from guards.deadline import call
from guards.hub import DownloadError, Options, Progress, Remote, Source, offline
from guards.hub_request import NETWORK_ERRORS, POLL_S, Patience, Refused, check_status, follow, resolve
from guards.reading import read_json

CHUNK = 1 << 20
LEAST_BYTES = 1 << 16  # that a connection must bring in `download_read_s`; fewer are no progress
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` in the block; False when another process holds it. The lock ends with its process.

    The same kind of lock as the package `filelock` uses. On a file system without locks: True, the hash has to do.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK):
                yield False
                return
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                raise
        yield True
    finally:
        os.close(handle)


def part_of(target: Path) -> Path:
    """The file that holds the received bytes of an unfinished download."""
    return target.with_name(f".{target.name}.part")


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def missing_bytes(target: Path, size: int) -> int:
    """How much disk space the download of a file still needs, in bytes."""
    return 0 if target.exists() else max(0, size - size_of(part_of(target)))


def check_space(needed: int, folder: Path, what: str) -> None:
    """Raises DownloadError when the disk of `folder` has less than `needed` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            "space",
            f"{what} needs {needed / 1e9:.1f} GB more, but {folder} has {free / 1e9:.1f} GB free; free some space, or use a "
            "folder on another disk (HANGPROOF_DATA, HF_HOME)",
        )


def digest_of(path: Path, wanted: str, on_piece: Callable[[int], object] = lambda _: None) -> str:
    """The hash of a file, of the kind of `wanted`: SHA-256, or git's SHA-1 of a blob. on_piece gets the bytes so far."""
    size = path.stat().st_size
    total = hashlib.sha256() if len(wanted) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    done = 0
    with path.open("rb") as file:
        while piece := file.read(8 * CHUNK):
            total.update(piece)
            done += len(piece)
            on_piece(done)
    return total.hexdigest()


def fetch(
    source: Source,
    target: Path,
    options: Options,
    remote: Remote | None = None,
    sha256: str = "",
    lock: Path | None = None,
) -> None:
    """Download a file to `target` unless it is there, continuing an earlier download.

    remote: what `resolve` returned; None: it is asked. sha256: the hash that the file must have; "": the hub's.
    lock: the lock file; None: beside the target. Raises DownloadError; the received bytes are kept.
    """
    if offline():
        raise DownloadError(
            "offline",
            f"HF_HUB_OFFLINE is set, so {target.name} is not downloaded; unset it, or put the file at {target}",
        )
    options = replace(options, by_hand=options.by_hand or f"put {target.name} at {target} yourself")
    lock = lock or target.with_name(f".{target.name}.lock")
    patience, known = Patience(options.limit_s, f"the other download of {source.file}", options.say), -1
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with locked(lock) as ours:
                if ours:
                    if not target.exists():
                        _Download(source, target, options, sha256.lower()).run(remote)
                    return
            done = size_of(part_of(target))
            if done != known:
                patience.progress()
                options.on_progress(Progress(source.file, done, remote.size if remote else 0))
                known = done
            if patience.left_s() <= 0:
                raise DownloadError(
                    "stalled",
                    f"another process holds {lock} and has downloaded no byte of {source.file} for {patience.limit_s:.0f} s; "
                    "end it and download again",
                )
            patience.report()
            time.sleep(POLL_S)
    except OSError as error:
        part = part_of(target)
        if error.errno in _FULL:
            kept = f"the disk of {target.parent} is full; the {size_of(part)} bytes received are kept"
            raise DownloadError("space", f"{kept}. Free some space and download again") from error
        text = f"cannot write {part}: {error.strerror or error}; fix the folder and download again"
        raise DownloadError("disk", text) from error


class _Download:
    """One file, from the first request to the rename. The caller holds the lock."""

    def __init__(self, source: Source, target: Path, options: Options, sha256: str) -> None:
        self.source, self.target, self.options, self.sha256 = source, target, options, sha256
        self.part, self.note = part_of(target), target.with_name(f".{target.name}.part.json")
        self.patience = Patience(options.limit_s, f"a byte of {source.file}", options.say)
        self.samples: deque[tuple[float, int]] = deque(maxlen=64)  # of the last seconds: when, bytes
        self.most = size_of(self.part)  # bytes on the disk when there was progress last

    def run(self, remote: Remote | None) -> None:
        """Download the file. remote: what it must be; None: what the hub says."""
        remote = remote or resolve(self.source, self.options)
        self.discard_other_file(remote)
        check_space(missing_bytes(self.target, remote.size), self.target.parent, self.target.name)
        while size_of(self.part) < remote.size:
            try:
                self.receive(remote)
            except NETWORK_ERRORS as error:
                self.patience.pause(error, self.source, self.options, size_of(self.part))
        self.part.touch()  # an empty file
        self.finish(remote)

    def discard_other_file(self, remote: Remote) -> None:
        """Delete the bytes of an earlier download unless they belong to the same file."""
        known = read_json(self.note) or {}
        if known.get("digest") != remote.digest or size_of(self.part) > remote.size:
            self.part.unlink(missing_ok=True)
            self.most = 0
            atomic_write(self.note, json.dumps({"digest": remote.digest}))

    def receive(self, remote: Remote) -> None:
        """Append the missing bytes to the part file. Raises one of NETWORK_ERRORS when the connection ends early."""
        have, read_s = size_of(self.part), self.patience.read_s()
        # A commit does not change while it is downloaded.
        url = replace(self.source, revision=remote.commit or self.source.revision).url
        # On a thread: nothing interrupts a name look-up.
        headers = {"Range": f"bytes={have}-"} if have else {}
        responses = call(follow, url, headers, "GET", read_s, seconds=read_s, what="the file's first byte")
        with responses[-1] as response:
            check_status(response, self.source, self.options)
            where = response.headers.get("Content-Range", "")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Refused("the server compresses the file although it was asked not to")
            if response.status == 200:
                have = 0  # the server ignores ranges
            elif response.status != 206:
                raise Refused(f"HTTP status {response.status} instead of the file")
            elif not re.match(rf"bytes {have}-", where):
                raise ConnectionError(f"asked for bytes from {have}, received {where or 'a part without its position'}")
            with self.part.open("ab" if have else "wb", buffering=0) as file:
                since_s, since = time.monotonic(), have
                self.report(have, remote.size)
                # read() discards received bytes when it times out
                while have < remote.size and (piece := response.read1(min(CHUNK, remote.size - have))):
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[file.write(rest) :]
                    have += len(piece)
                    self.report(have, remote.size)
                    if have - since >= LEAST_BYTES:
                        since_s, since = time.monotonic(), have
                    elif time.monotonic() - since_s > read_s:
                        raise TimeoutError(f"fewer than {LEAST_BYTES} bytes in {read_s:g} s")
                os.fsync(file.fileno())
        if have < remote.size:
            raise ConnectionError(f"the connection ended after {have} of {remote.size} bytes")

    def report(self, done: int, total: int) -> None:
        """`done` bytes are on the disk."""
        if done - self.most >= LEAST_BYTES or self.most < done == total:
            self.most = done
            self.patience.progress()
        now_s = time.monotonic()
        if not self.samples or now_s - self.samples[-1][0] >= POLL_S:
            self.samples.append((now_s, done))
        then_s, then = self.samples[0]
        speed = max(0, done - then) / (now_s - then_s) if now_s - then_s >= POLL_S else 0.0
        eta_s = (total - done) / speed if speed else None
        self.options.on_progress(Progress(self.target.name, done, total, speed, eta_s))

    def finish(self, remote: Remote) -> None:
        """Verify the part file and rename it to the target."""
        wanted, name = self.sha256 or remote.digest, f"{self.target.name} (checking)"
        found = digest_of(self.part, wanted, lambda done: self.options.on_progress(Progress(name, done, remote.size)))
        if found != wanted:
            self.part.unlink(missing_ok=True)
            self.note.unlink(missing_ok=True)
            raise DownloadError(
                "damaged",
                f"{self.target.name} arrived damaged (its hash is {found[:12]}… instead of {wanted[:12]}…) and was deleted; "
                "download it again",
            )
        os.replace(self.part, self.target)
        self.note.unlink(missing_ok=True)
        fsync_path(self.target.parent)
