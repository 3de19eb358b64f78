"""Downloads one file of a model hub so that it ends: complete and verified, or with a reason and its bytes kept.

Decision: plain HTTP ranges with the standard library, bounded by a watchdog on bytes, not the hub's own library. What that one
lacks: its transfers by xet wait without a limit (HF_HUB_DOWNLOAD_TIMEOUT does not reach them), and since 1.0 it
downloads to a file of a new name in each process (huggingface_hub/file_download.py, `_download_to_tmp_and_move`), so
that 20 of 24 GB are downloaded again. Here a connection that brings less than `LEAST_BYTES` in `download_read_s` is
closed and continued by a range request; after `download_stall_s` without as many new bytes the download fails. Received
bytes stay in `.NAME.part`, with the ETag of their file beside them; a file whose hash the hub does not name is
downloaded from the start. Each file has a lock that ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import math
import os
import re
import shutil
import sys
import time
import urllib.parse
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from guards.checkpoint import atomic_write, fsync_path
from guards.deadline import call
from guards.hub import DownloadError, OnProgress, Options, Progress, Remote, Source, offline
from guards.hub_request import (
    LEAST_BYTES,
    NETWORK_ERRORS,
    POLL_S,
    Patience,
    Refused,
    check_status,
    failure,
    follow,
    resolve,
)
from guards.reading import read_json

CHUNK = 1 << 20
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


def missing_bytes(target: Path, size: int | None) -> int:
    """How much disk space the download of a file still needs, in bytes."""
    return 0 if target.exists() else max(0, (size or 0) - size_of(part_of(target)))


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


def _disk_error(error: OSError, path: Path) -> DownloadError:
    if error.errno in _FULL:
        return DownloadError(
            "space",
            f"the disk of {path.parent} is full; the {size_of(path)} bytes received are kept. Free some space and download again",
        )
    return DownloadError("disk", f"cannot write {path}: {error.strerror or error}; fix the folder and download again")


class _Meter:
    """Speed and remaining time, from the bytes of the last seconds."""

    def __init__(self, name: str, total: int, on_progress: OnProgress) -> None:
        self.name, self.total, self.on_progress = name, total, on_progress
        self.samples: deque[tuple[float, int]] = deque(maxlen=64)

    def __call__(self, done: int) -> None:
        now_s = time.monotonic()
        if not self.samples or now_s - self.samples[-1][0] >= POLL_S:
            self.samples.append((now_s, done))
        then_s, then = self.samples[0]
        speed = max(0, done - then) / (now_s - then_s) if now_s - then_s >= POLL_S else 0.0
        eta_s = (self.total - done) / speed if speed and self.total else None
        self.on_progress(Progress(self.name, done, self.total, speed, eta_s))


def fetch(source: Source, target: Path, options: Options, remote: Remote | None = None, sha256: str = "") -> Remote:
    """Download a file to `target`, continuing an earlier download; returns what the hub says about it.

    remote: what `resolve` returned; None: it is asked. sha256: the hash that the file must have; "": the hub's.
    Raises DownloadError; the received bytes are kept.
    """
    if offline():
        raise DownloadError(
            "offline",
            f"HF_HUB_OFFLINE is set, so {target.name} is not downloaded; unset it, or put the file at {target}",
        )
    options = replace(options, by_hand=options.by_hand or f"put {target.name} at {target} yourself")
    return fetch_locked(source, target, options, target.with_name(f".{target.name}.lock"), remote, sha256)


def fetch_locked(
    source: Source, target: Path, options: Options, lock: Path, remote: Remote | None, sha256: str = ""
) -> Remote:
    """`fetch` with another lock file."""
    patience, known = Patience(options.limit_s, f"the other download of {source.file}", options.say), -1
    while True:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock.parent.mkdir(parents=True, exist_ok=True)
            with locked(lock) as ours:
                if ours:
                    if remote is not None and options.wait and target.exists():
                        return remote  # another process has downloaded it
                    return _Download(source, target, options, sha256.lower()).run(remote)
        except OSError as error:
            raise _disk_error(error, part_of(target)) from error
        if not options.wait:
            raise DownloadError(
                "busy", f"{target.name} is already being downloaded by another process; wait until it finishes"
            )
        done = size_of(part_of(target))
        if done != known:
            patience.new()
            options.on_progress(Progress(source.file, done, (remote.size or 0) if remote else 0))
            known = done
        if patience.left_s() <= 0:
            raise DownloadError(
                "stalled",
                f"another process holds {lock} and has downloaded no byte of {source.file} for {patience.limit_s:.0f} s; "
                "end it and download again",
            )
        patience.report()
        time.sleep(POLL_S)


class _Download:
    """One file, from the first request to the rename. The caller holds the lock."""

    def __init__(self, source: Source, target: Path, options: Options, sha256: str) -> None:
        self.source, self.target, self.options, self.sha256 = source, target, options, sha256
        self.part, self.note = part_of(target), target.with_name(f".{target.name}.part.json")
        self.patience = Patience(options.limit_s, f"a byte of {source.file}", options.say)
        self.most = size_of(self.part)  # bytes on the disk when there was progress last

    def run(self, remote: Remote | None) -> Remote:
        """Download the file. remote: what it must be; None: what the hub says."""
        while True:
            try:
                if remote is None:
                    remote = resolve(self.source, self.options)
                if self.sha256:
                    remote = replace(remote, sha256=self.sha256)
                self.discard_other_file(remote)
                check_space(missing_bytes(self.target, remote.size), self.target.parent, self.target.name)
                self.receive(remote, _Meter(self.target.name, remote.size or 0, self.options.on_progress))
                break
            except NETWORK_ERRORS as error:
                if not self.patience.pause(error):
                    host = urllib.parse.urlsplit(self.source.url).netloc
                    kept = size_of(self.part)
                    raise failure(error, host, self.patience.limit_s, kept, self.options.by_hand) from error
        self.finish(remote)
        return remote

    def discard_other_file(self, remote: Remote) -> None:
        """Delete the bytes of an earlier download unless they belong to the same file and their end can be verified."""
        known = read_json(self.note)
        same = known is not None and (known.get("etag"), known.get("size")) == (remote.etag, remote.size)
        fits = remote.size is None or size_of(self.part) <= remote.size
        if not (same and fits and remote.verifiable):
            self.part.unlink(missing_ok=True)
            self.most = 0
            atomic_write(self.note, json.dumps({"etag": remote.etag, "size": remote.size}))

    def receive(self, remote: Remote, meter: _Meter) -> None:
        """Append the missing bytes to the part file until it is complete.

        Raises one of NETWORK_ERRORS when the connection ends early; the received bytes are kept.
        """
        if not remote.verifiable and remote.size is None:
            raise Refused(
                "the server names neither a size nor a hash, so that nobody can tell whether the file is complete"
            )
        have = size_of(self.part)
        if remote.size is not None and have == remote.size:
            self.part.touch()  # an empty file
            return
        # A commit does not change while it is downloaded.
        pinned = replace(self.source, revision=remote.commit or self.source.revision)
        headers = {"Range": f"bytes={have}-"} if have else {}
        read_s = self.patience.read_s()
        # On a thread: nothing interrupts a name look-up.
        responses = call(
            follow, pinned.url, headers, "GET", self.options.token, read_s, seconds=read_s, what="the file's first byte"
        )
        with responses[-1] as response:
            check_status(response, self.source, self.options.by_hand, self.options.token)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Refused("the server compresses the file although it was asked not to")
            if response.status == 416 and have:
                return  # the server has no byte after these; the hash decides
            if response.status not in (200, 206):
                raise Refused(f"HTTP status {response.status} instead of the file")
            asked = response.headers.get("Content-Range", "")
            if response.status == 206 and re.match(rf"bytes {have}-", asked) is None:
                raise ConnectionError(f"asked for bytes from {have}, received {asked or 'a part without its position'}")
            if response.status != 206:
                have = 0  # the server ignores ranges
            with self.part.open("ab" if have else "wb", buffering=0) as file:
                meter(have)
                have, end = self.write(response, remote, file, have, meter)
                os.fsync(file.fileno())
        if end is not None and have < end:
            raise ConnectionError(f"the connection ended after {have} of {end} bytes")

    def write(
        self, response: http.client.HTTPResponse, remote: Remote, file: Any, have: int, meter: _Meter
    ) -> tuple[int, int | None]:
        """Write the response to the part file, which has `have` bytes. Returns how many it has then, and should have."""
        end = remote.size
        if end is None and response.length is not None:
            end = have + response.length
        limit_s, since_s, since = self.patience.read_s() or math.inf, time.monotonic(), have
        while end is None or have < end:
            # read() discards received bytes when it times out
            piece = response.read1(CHUNK if end is None else min(CHUNK, end - have))
            if not piece:
                break
            self.append(file, piece)
            have += len(piece)
            if have - self.most >= LEAST_BYTES or (have == end and have > self.most):
                self.most = have
                self.patience.new()
            meter(have)
            if have - since >= LEAST_BYTES:
                since_s, since = time.monotonic(), have
            elif time.monotonic() - since_s > limit_s:
                raise TimeoutError(f"fewer than {LEAST_BYTES} bytes in {limit_s:g} s")
        return have, end

    def append(self, file: Any, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                raise _disk_error(error, self.part) from error

    def finish(self, remote: Remote) -> None:
        """Verify the part file and rename it to the target."""
        wanted = remote.sha256 or remote.git_sha1
        if wanted and (found := _digest(self.part, remote, self.options.on_progress)) != wanted:
            self.part.unlink(missing_ok=True)
            self.note.unlink(missing_ok=True)
            raise DownloadError(
                "damaged",
                f"{self.target.name} arrived damaged ({'SHA-256' if remote.sha256 else 'SHA-1'} {found[:12]}… instead of "
                f"{wanted[:12]}…) and was deleted; download it again",
            )
        os.replace(self.part, self.target)
        self.note.unlink(missing_ok=True)
        fsync_path(self.target.parent)


def _digest(path: Path, remote: Remote, on_progress: OnProgress) -> str:
    """The hash of a file that the hub names: SHA-256, or git's SHA-1 of a blob."""
    size = path.stat().st_size
    total = hashlib.sha256() if remote.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    done = 0
    with path.open("rb") as file:
        while piece := file.read(8 * CHUNK):
            total.update(piece)
            done += len(piece)
            on_progress(Progress(f"{path.name.removeprefix('.').removesuffix('.part')} (checking)", done, size))
    return total.hexdigest()
