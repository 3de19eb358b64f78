"""A place that keeps bytes by name: a folder, s3://, gs://, az://, sftp://, or hf://buckets/OWNER/NAME.

A name is checked before it is used. A call in which no byte moves for `call_s` has failed, wherever it hangs: it runs
in a thread, which is abandoned. A failed call is repeated with growing waits. Bytes per second are limited. Files are
read in pieces, so that a failure repeats a piece and not the file, and so that no more is read than was announced.

An upload is visible completely or not at all. An object store shows an object when its upload is complete; elsewhere a
file is written under a hidden name, and renamed. `create` never replaces anything: it is what a lease is built on. It
is one atomic request where the protocol has one (all but WHOLE), so that only one of several machines can win. Azure's
library and the hub's buckets have none, and some servers that speak S3 ignore the condition: two machines may both
create a file there, which a lease looks for afterwards.

Credentials come from the environment and the library's own files, and are never part of an address.
"""

import contextlib
import copy
import errno
import hashlib
import importlib
import os
import posixpath
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from guards.checkpoint import fsync_path
from launch.common import LaunchError
from launch.store import filesystems as kinds
from launch.store.filesystems import Limits, Pace, bounded

T = TypeVar("T")
SLOWEST = 50_000.0  # bytes a second of a line that is still used: what a piece may take beyond the limit of a call
MOST_CALLS = 32  # of a place; those that were given up and still hang, as on a dead mount, are threads of this machine
LEFT_S = 24 * 3600.0  # a hidden file older than this was left by a killed writer
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}){0,7}")


class StoreError(LaunchError):
    """What failed in a store, where, and what to do."""


class NotFound(StoreError):
    """The store has no file of this name."""


class Refused(StoreError):
    """The store answered, and repeating the call does not help: no permission, no such bucket, no space left."""


class Unavailable(StoreError):
    """The store did not answer, or failed each time. A later call may succeed."""


def check_name(name: str) -> str:
    """The name, if it is one that the store uses: relative, plain characters, no part that starts with a dot.

    Raises StoreError: anything else.
    """
    if not NAME.fullmatch(name):
        raise StoreError(f"{name[:200]!r} is not a name in a store; it may have letters, digits, . _ - and / only")
    return name


class Place:
    """A place, or a folder of it. Safe to use from several threads. It connects with the first call."""

    def __init__(self, scheme: str, address: str, prefix: str, limits: Limits | None = None, options: Any = None):
        """scheme: of PROTOCOLS. address: for messages. prefix: begins the names there. options: of an SFTP login."""
        self.scheme, self.address, self.prefix = scheme, address, prefix
        self.limits, self.options = limits or Limits(), options or {}
        self.conditional = scheme not in kinds.WHOLE  # `create` succeeds for only one of several callers
        self._idle: list[Any] = []
        self._lock, self._free = threading.Lock(), threading.BoundedSemaphore(MOST_CALLS)
        self._has_bucket = False
        self._pace = Pace(self.limits.bytes_per_s)

    def under(self, name: str) -> "Place":
        """The folder `name` of this place."""
        place = copy.copy(self)
        place.address, place.prefix = f"{self.address}/{check_name(name)}", f"{self.prefix}{name}/"
        return place

    def limited(self, **limits: float) -> "Place":
        """This place with other limits of time and repetition (fields of `Limits`)."""
        place = copy.copy(self)
        place.limits = replace(self.limits, **limits)  # type: ignore[arg-type]
        place._pace = Pace(place.limits.bytes_per_s)
        return place

    def read(self, name: str, most_bytes: int = 64 << 20) -> bytes:
        """The contents of a small file.

        Raises NotFound, Refused, Unavailable; StoreError: it is larger than `most_bytes`.
        """
        data = self._read(name, self._key(name), 0, most_bytes + 1)
        if len(data) > most_bytes:
            raise StoreError(f"{self.address}/{name} is larger than {most_bytes} bytes; Hangproof did not write it")
        return data

    def get(self, name: str, path: Path, size: int, on_progress: Callable[[int], None] = lambda count: None) -> str:
        """Write the first `size` bytes of a file to `path`, after those that an earlier call has written; the SHA-256 of
        all, to be compared. Not fsynced. on_progress: called with the bytes that are there, after each piece.

        Raises NotFound, Refused, Unavailable; StoreError: it has fewer. OSError: `path` cannot be written.
        """
        key, digest = self._key(name), hashlib.sha256()
        second = self._pace.bytes_per_s or kinds.PIECE
        piece = int(min(kinds.PIECE, max(kinds.PIECE / 32, second)))
        with open(path, "a+b") as file:
            file.seek(0)
            while block := file.read(kinds.BLOCK):
                digest.update(block)
            at = file.tell()
            while at < size:
                length = min(piece, size - at)
                data = self._read(name, key, at, length, more_s=length / SLOWEST)
                if not data:
                    raise StoreError(f"{self.address}/{name} ends after {at} of {size} bytes; it is not used")
                file.write(data)
                digest.update(data)
                at += len(data)
                self._pace.spend(len(data))
                on_progress(at)
        return digest.hexdigest()

    def put(self, name: str, source: bytes | Path) -> None:
        """Write or replace a file. Raises Refused, Unavailable. FileNotFoundError: the local file is gone."""
        key, what = self._key(name), source if isinstance(source, bytes) else os.fspath(source)
        size = len(what) if isinstance(what, bytes) else os.path.getsize(what)
        unseen_s = (size if self.scheme in kinds.WHOLE else min(size, kinds.PIECE)) / SLOWEST
        gone = what if isinstance(what, str) else ""
        self._call(f"write {name}", lambda fs, meter: self.write(fs, key, what, meter), gone=gone, more_s=unseen_s)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist; False when it exists and holds something else.

        A call that is repeated after an unclear failure finds its own file: the contents are compared, so they must
        differ between callers. Where `conditional` is False, two callers may both get True.

        Raises Refused, Unavailable: it is not known whether the file was written.
        """
        key = self._key(name)
        try:
            self._call(f"create {name}", lambda fs, meter: self.write_new(fs, key, data))
        except FileExistsError:
            with contextlib.suppress(NotFound):
                return self.read(name) == data
            return False
        return True

    def list(self, folder: str = "") -> dict[str, int]:
        """The sizes of the files below `folder` by name, as the other calls take it, without names that are not ours.

        Raises Refused, Unavailable.
        """
        where = self._key(folder) + "/" if folder else self.prefix
        found = self._call(f"list {folder or 'files'}", lambda fs, meter: self._rows(fs, where, deep=True))
        own = (row for row in found if row["type"] == "file" and row["name"].startswith(self.prefix))
        sizes = {row["name"].removeprefix(self.prefix): int(row["size"] or 0) for row in own}
        return {name: sizes[name] for name in sorted(sizes) if NAME.fullmatch(name)}

    def folders(self) -> Sequence[str]:
        """The names of the folders in this place, without what is in them: in a store, its runs.

        Raises Refused, Unavailable.
        """
        found = self._call("list folders", lambda fs, meter: self._rows(fs, self.prefix, deep=False))
        names = {row["name"].rpartition("/")[2] for row in found if row["type"] == "directory"}
        return sorted(name for name in names if NAME.fullmatch(name))

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that do not exist are ignored. Raises Refused, Unavailable."""
        for key in [self._key(name) for name in names]:
            with contextlib.suppress(NotFound):
                self._call("delete files", lambda fs, meter, key=key: fs.rm_file(key))  # type: ignore[misc]

    # One call --------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self.prefix + check_name(name)

    def _call(self, what: str, work: Callable[[Any, kinds.Meter], T], gone: str = "", more_s: float = 0.0) -> T:
        """The result of `work(file system, meter)`, repeated after failures.

        gone: a local file whose absence is the caller's to handle. more_s: beyond `call_s`, for the bytes of one piece.
        """

        def once(tick: Callable[[], None]) -> T:
            if not self._free.acquire(timeout=self.limits.call_s):
                raise TimeoutError(f"{MOST_CALLS} earlier calls still hang")
            try:
                tick()  # this call may have been given up meanwhile
                with self.session() as fs:
                    return work(fs, partial(self._pace.spend, tick=tick))
            finally:
                self._free.release()

        limits, wait_s = self.limits, self.limits.first_wait_s
        for attempt in range(1, limits.tries + 1):
            try:
                return bounded(once, limits.call_s + more_s, f"{what} in {self.address}")
            except FileExistsError:
                raise
            except Exception as error:
                absent = isinstance(error, FileNotFoundError)
                if absent and gone and not os.path.exists(gone):
                    raise
                why = kinds.refusal(error)
                if absent and not why:
                    raise NotFound(f"cannot {what}: {self.address} has no such file or bucket") from error
                if why or attempt == limits.tries or self.scheme not in kinds.SHARED:
                    self._idle.clear()  # the server may be gone; those that are SHARED connect anew, but keep their login
                if why:
                    raise Refused(f"cannot {what} in {self.address}: {why} ({short(error)})") from error
                if attempt == limits.tries:
                    times = f" {attempt} times" if attempt > 1 else ""
                    raise Unavailable(f"cannot {what} in {self.address}: failed{times}: {short(error)}") from error
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, limits.longest_wait_s)
        raise AssertionError("tries is at least 1")

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        """A file system of fsspec for one call. One that is not SHARED has no other call; if that fails, it goes."""
        is_shared = self.scheme in kinds.SHARED
        with self._lock:
            fs = self._idle.pop() if self._idle else None
            if is_shared:
                fs = fs or kinds.connect(self.scheme, self.options)
                self._idle.append(fs)
        fs = fs or kinds.connect(self.scheme, self.options)
        fs.invalidate_cache()
        try:
            yield fs
        except Exception as error:
            absent = isinstance(error, FileNotFoundError) or type(error).__name__.endswith(kinds.MISSING)
            if not is_shared and (absent or isinstance(error, FileExistsError)):
                self._idle.append(fs)
            if absent:
                raise FileNotFoundError(errno.ENOENT, "no such file") from error
            raise
        if not is_shared:
            self._idle.append(fs)

    def _read(self, name: str, key: str, start: int, length: int, more_s: float = 0.0) -> bytes:
        """At most `length` bytes of a file from byte `start`; fewer only at its end."""
        more = {"cache_type": "none"} if self.scheme == "hf" else {}  # else 5 MB more are read than asked for

        def work(fs: Any, meter: kinds.Meter) -> bytes:
            end = min(kinds.size_of(fs, key), start + length)
            return bytes(fs.cat_file(key, start=start, end=end, **more)) if start < end else b""

        return self._call(f"read {name}", work, more_s=more_s)

    def _rows(self, fs: Any, prefix: str, deep: bool) -> Sequence[dict[str, Any]]:
        """What is in a folder, directly or at any depth (then files only), as fsspec lists it; [] where there is none.

        The names begin as `prefix` does. Removes what killed writers left a day ago.
        """
        folder, is_tree = prefix.rstrip("/") or "/", self.scheme in kinds.TREES
        options = {"on_error": "raise"} if is_tree else {}  # what cannot be listed is an error
        try:
            found = [*fs.find(folder, detail=True, **options).values()] if deep else fs.ls(folder, detail=True)
        except FileNotFoundError as error:
            try:
                fs.info(folder)
            except FileNotFoundError:
                return []
            raise error  # something in it was deleted meanwhile
        for row in found if is_tree else ():
            changed = row["mtime"]  # of SFTP a datetime
            changed_s = changed.timestamp() if isinstance(changed, datetime) else changed
            hidden = row["type"] == "file" and posixpath.basename(row["name"])[0] == "."
            if hidden and changed_s < time.time() - LEFT_S:
                with contextlib.suppress(Exception):  # tried again by the next listing
                    fs.rm_file(row["name"])
        slashes = prefix[: len(prefix) - len(prefix.lstrip("/"))]
        return [row | {"name": slashes + str(row["name"]).strip("/")} for row in found]

    # Writing ---------------------------------------------------------------------------------------------------------

    def write(self, fs: Any, key: str, source: bytes | str, meter: kinds.Meter) -> None:
        """Replace a file by bytes, or by the contents of the file at the path `source`: one attempt."""
        if self.scheme in kinds.TREES:
            with self._hidden(fs, key, source, meter) as temporary:
                (os.replace if self.scheme == "file" else fs.mv)(temporary, key)
            return
        size, whole = len(source) if isinstance(source, bytes) else os.path.getsize(source), self.scheme in kinds.WHOLE
        if whole:
            meter(size)
        if isinstance(source, str) and size <= kinds.PIECE:
            source = Path(source).read_bytes()
        if self.scheme == "hf":
            self._write_to_bucket(key, source)
        elif isinstance(source, bytes):
            fs.pipe_file(key, source)
        elif whole:
            fs.put_file(source, key)
        else:
            kinds.stream(fs, key, source, meter)
            return
        if not whole:
            meter(size)

    def _write_to_bucket(self, key: str, source: bytes | str) -> None:
        """Replace a file on the Hugging Face hub; its bucket is made, private, by the first one.

        The library sends a file as a whole, but no piece that the hub knows.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import BucketNotFoundError
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        api, (_, owner, bucket, path) = HfApi(library_name="hangproof"), key.split("/", 3)
        if not self._has_bucket:
            try:
                api.bucket_info(f"{owner}/{bucket}")
            except BucketNotFoundError:
                api.create_bucket(f"{owner}/{bucket}", private=True, exist_ok=True)
            self._has_bucket = True
        api.batch_bucket_files(f"{owner}/{bucket}", add=[(source, path)])

    def write_new(self, fs: Any, key: str, data: bytes) -> None:
        """Write a file that does not exist: one attempt. Raises FileExistsError."""
        exists = FileExistsError(errno.EEXIST, "exists already", key)
        if self.scheme in kinds.TREES:
            self._write_new_in_tree(fs, key, data, exists)
        elif not self.conditional:
            with contextlib.suppress(FileNotFoundError):
                fs.info(key)
                raise exists
            self.write(fs, key, data, lambda count: None)
        else:
            try:
                fs.pipe_file(key, data, mode="create")
            except Exception as error:
                if any(word in kinds.text_of(error) for word in kinds.EXISTS):
                    raise exists from error
                raise

    def _write_new_in_tree(self, fs: Any, key: str, data: bytes, exists: FileExistsError) -> None:
        """A folder: linked to its name, which fails where the name exists (link(2)), also on NFS, where O_EXCL alone
        leaves an empty file for a moment. SFTP and file systems without links: opened exclusively; a writer that stops
        in the middle leaves a short file, which readers take for a damaged one."""
        if self.scheme == "file":
            with self._hidden(fs, key, data, lambda count: None) as temporary:
                try:
                    fs.link(temporary, key)
                    return
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
        try:
            target = kinds.open_new(fs, key, "xb" if self.scheme == "file" else "wxb")
        except OSError as error:
            if isinstance(error, FileNotFoundError) or not fs.exists(key):
                raise
            # SFTP version 3 has no code for "exists": servers answer "Failure" (draft-ietf-secsh-filexfer-02, 7).
            raise exists from error
        try:
            kinds.fill(self.scheme, target, data, lambda count: None)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(key)
            raise

    @contextlib.contextmanager
    def _hidden(self, fs: Any, key: str, source: bytes | str, meter: kinds.Meter) -> Iterator[str]:
        """A hidden file beside `key` with the contents of `source`; it is gone afterwards."""
        folder, _, last = key.rpartition("/")
        temporary = f"{folder}/.{last}.{uuid.uuid4().hex}"
        try:
            size = kinds.fill(self.scheme, kinds.open_new(fs, temporary, "wb"), source, meter)
            if kinds.size_of(fs, temporary) != size:
                raise OSError(errno.EIO, "another size arrived than was sent", key)
            yield temporary
        finally:
            with contextlib.suppress(Exception):
                fs.rm_file(temporary)
        if self.scheme == "file":
            fsync_path(Path(folder))


def one_line(value: object, most: int = 300) -> str:
    """An error, or a text of another machine, as one printable line."""
    return "".join(c if c.isprintable() else " " for c in str(value)[:most]).strip()


def short(error: BaseException) -> str:
    """An error in one line, its class where it has no text."""
    return one_line(error) or type(error).__name__


# Opening a place ----------------------------------------------------------------------------------------------------


def open_place(address: str, limits: Limits | None = None) -> Place:
    """The place of an address: a folder, or scheme://… Nothing is connected or created yet.

    Raises StoreError: the address is not valid or holds a secret, or the library for its scheme is not installed.
    """
    address = address.strip()
    scheme, separator, rest = address.partition("://")
    if not separator:
        if not address:
            raise StoreError("the store has no address; write a folder, or an address such as s3://bucket/runs")
        try:
            folder = Path(address).expanduser().absolute()
        except (RuntimeError, ValueError) as error:
            raise StoreError(f"{address}: there is no such user here; write the complete path of the folder") from error
        return Place("file", str(folder), f"{folder.as_posix().rstrip('/')}/", limits)
    if scheme == "file":
        return open_place(f"/{rest.lstrip('/')}", limits)
    if scheme not in kinds.PROTOCOLS:
        others = ", ".join(name for name in kinds.PROTOCOLS if name != "file")
        raise StoreError(f"{scheme}:// is not a kind of store; use a folder, or one of {others}")
    try:
        parts = urlsplit(address)
        port = parts.port if scheme == "sftp" else None
    except ValueError as error:  # its text may have a password
        raise StoreError(f"{scheme}://…: the host is not valid, or its port is not a number") from error
    if parts.password or parts.query or parts.fragment or (parts.username and scheme != "sftp"):
        why = "an address holds no password, key or option, because it is shown and saved"
        raise StoreError(f"{scheme}://…: {why}; use the library's own login or environment variables")
    body = rest.strip("/")
    if any(part in ("", ".", "..") for part in body.split("/")) or "\\" in body:
        raise StoreError(f"{address!r}: write the address without . and .. and with single slashes")
    package = kinds.PROTOCOLS[scheme][0]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise StoreError(f"{scheme}:// needs {package}: .venv/bin/pip install {package} ({short(error)})") from error
    options, root = None, body
    if scheme == "hf" and not re.match(r"buckets/[^/]+/[^/]+", body):
        raise StoreError(f"hf://{body}: write hf://buckets/OWNER/NAME/folder; models and data sets cannot be a store")
    if scheme == "sftp":
        from launch.store import sftp

        if not parts.hostname:
            raise StoreError(f"sftp://{body}: the host is missing; write sftp://user@host/folder")
        options = sftp.login(parts.hostname, port, unquote(parts.username or ""))
        root = unquote(parts.path).rstrip("/")
    return Place(scheme, f"{scheme}://{body}", f"{root}/", limits, options)
