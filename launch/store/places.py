"""A place that keeps bytes by name: a folder, s3://, gs://, az://, sftp://, or hf://buckets/OWNER/NAME.

`filesystems` does one call; `Place` adds what all need. A name is checked before it is used. A call in which no byte moves for `call_s` has failed, wherever it hangs: it runs in a thread, which is abandoned. A
failed call is repeated with growing waits. Bytes per second are limited. Files are read in pieces, so that a failure
repeats a piece and not the file, and so that no more is read than was announced.

An upload is visible completely or not at all. `create` never replaces anything: it is what a lease is built on.
Credentials come from the environment and the library's own files, and are never part of an address.
"""

import copy
import hashlib
import importlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from launch.common import LaunchError
from launch.store.filesystems import PROTOCOLS, Files, Meter, files, refusal

T = TypeVar("T")
# Bytes that one reading call fetches; a file system that streams sends no more without calling its meter.
PIECE = 8 << 20
SLOWEST = 50_000.0  # bytes a second of a line that is still used: what a piece may take beyond the limit of a call
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}){0,7}")


class StoreError(LaunchError):
    """What failed in a store, where, and what to do."""


class NotFound(StoreError):
    """The store has no file of this name."""


class Refused(StoreError):
    """The store answered, and repeating the call does not help: no permission, no such bucket, no space left."""


class Unavailable(StoreError):
    """The store did not answer, or failed each time. A later call may succeed."""


@dataclass(frozen=True)
class Limits:
    """How long a call may take and how often it is repeated; how many bytes a second puts and gets move together."""

    call_s: float = 30.0  # in which no byte moves
    tries: int = 8
    first_wait_s: float = 0.25
    longest_wait_s: float = 8.0
    bytes_per_s: float = 0.0  # 0: no limit


def check_name(name: str) -> str:
    """The name, if it is one that the store uses: relative, plain characters, no part that starts with a dot.

    Raises StoreError: anything else.
    """
    if not NAME.fullmatch(name):
        raise StoreError(f"{name[:200]!r} is not a name in a store; it may have letters, digits, . _ - and / only")
    return name


class Place:
    """A place, or a folder of it. Safe to use from several threads."""

    def __init__(self, files: Files, address: str, limits: Limits | None = None, prefix: str = ""):
        self.files = files
        self.address = address  # for messages
        self.limits = limits or Limits()
        self.prefix = prefix
        self._pace = _Pace(self.limits.bytes_per_s)

    @property
    def conditional(self) -> bool:
        """Whether `create` succeeds for only one of several callers."""
        return self.files.conditional

    def under(self, name: str) -> "Place":
        """The folder `name` of this place."""
        place = copy.copy(self)
        place.address, place.prefix = f"{self.address}/{check_name(name)}", f"{self.prefix}{name}/"
        return place

    def limited(self, **limits: float) -> "Place":
        """This place with other limits of time and repetition (fields of `Limits`)."""
        place = copy.copy(self)
        place.limits = replace(self.limits, **limits)  # type: ignore[arg-type]
        if "bytes_per_s" in limits:
            place._pace = _Pace(place.limits.bytes_per_s)
        return place

    def read(self, name: str, most_bytes: int = 16 << 20) -> bytes:
        """The contents of a small file.

        Raises NotFound, Refused, Unavailable; StoreError: it is larger than `most_bytes`.
        """
        key = self._key(name)
        data = self._call(f"read {name}", lambda tick: self.files.read(key, 0, most_bytes + 1))
        if len(data) > most_bytes:
            raise StoreError(
                f"{self.address}/{name} is larger than {most_bytes} bytes; it was not written by Hangproof"
            )
        return data

    def get(self, name: str, path: Path, size: int) -> str:
        """Write a file of `size` bytes to `path` (replaced, not fsynced); the SHA-256 of what arrived, for the caller to compare.

        Raises NotFound, Refused, Unavailable; StoreError: another size. OSError: `path` cannot be written.
        """
        key, digest = self._key(name), hashlib.sha256()
        found = self._call(f"look up {name}", lambda tick: self.files.size(key))
        if found != size:
            raise StoreError(f"{self.address}/{name} has {found} bytes instead of {size}; it is not used")
        piece = int(min(PIECE, max(PIECE / 32, self._pace.bytes_per_s or PIECE)))  # about a second's worth
        with open(path, "wb") as file:
            at = 0
            while at < size:
                length = min(piece, size - at)
                read = partial(self.files.read, key, at, length)
                data = self._call(f"read {name}", lambda tick, read=read: read(), more_s=length / SLOWEST)  # type: ignore[misc]
                if not data:
                    raise StoreError(f"{self.address}/{name} ends after {at} of {size} bytes; it is not used")
                file.write(data)
                digest.update(data)
                at += len(data)
                self._pace.spend(len(data))
        return digest.hexdigest()

    def put(self, name: str, source: bytes | Path) -> None:
        """Write or replace a file. Raises Refused, Unavailable. FileNotFoundError: the local file is gone."""
        key, what = self._key(name), source if isinstance(source, bytes) else os.fspath(source)

        def write(tick: Meter) -> None:
            if isinstance(what, str):
                os.stat(what)
            self.files.put(key, what, tick)

        size = len(what) if isinstance(what, bytes) else os.path.getsize(what)
        unseen = min(size, PIECE) if self.files.streams else size
        self._call(f"write {name}", write, gone=what if isinstance(what, str) else "", more_s=unseen / SLOWEST)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist; False when it exists and holds something else.

        A call that is repeated after an unclear failure finds its own file: the contents are compared, so they must
        differ between callers. Where `conditional` is False, two callers may both get True.

        Raises Refused, Unavailable: it is not known whether the file was written.
        """
        key = self._key(name)
        try:
            self._call(f"create {name}", lambda tick: self.files.create(key, data))
        except FileExistsError:
            try:
                return self.read(name) == data
            except NotFound:
                return False
        return True

    def list(self, folder: str = "") -> dict[str, int]:
        """The sizes of the files below `folder` by name, as the other calls take it. Names that no store of ours has are left out.

        Raises Refused, Unavailable.
        """
        where = self._key(folder) + "/" if folder else self.prefix
        found = self._call(f"list {folder or 'files'}", lambda tick: self.files.rows(where, deep=True))
        sizes = {row["name"]: int(row["size"] or 0) for row in found if row["type"] == "file"}
        cut = len(self.prefix)
        return {
            name[cut:]: size
            for name, size in sorted(sizes.items())
            if name.startswith(self.prefix) and NAME.fullmatch(name[cut:])
        }

    def folders(self) -> Sequence[str]:
        """The names of the folders in this place, without what is in them: in a store, its runs.

        Raises Refused, Unavailable.
        """
        found = self._call("list folders", lambda tick: self.files.rows(self.prefix, deep=False))
        names = {row["name"].rpartition("/")[2] for row in found if row["type"] == "directory"}
        return sorted(name for name in names if NAME.fullmatch(name))

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that do not exist are ignored. Raises Refused, Unavailable."""
        for key in [self._key(name) for name in names]:
            self._call("delete files", lambda tick, key=key: self.files.delete(key))  # type: ignore[misc]

    def _key(self, name: str) -> str:
        return self.prefix + check_name(name)

    def _call(self, what: str, work: Callable[[Meter], T], gone: str = "", more_s: float = 0.0) -> T:
        """The result of `work`, repeated after failures.

        gone: a local file whose absence is the caller's to handle. more_s: beyond `call_s`, for the bytes of one piece.
        """
        limits, wait_s = self.limits, self.limits.first_wait_s
        for attempt in range(1, limits.tries + 1):
            try:
                return _bounded(
                    lambda tick: work(partial(self._pace.spend, tick=tick)),
                    limits.call_s + more_s,
                    f"{what} in {self.address}",
                )
            except FileExistsError:
                raise
            except Exception as error:
                absent = isinstance(error, FileNotFoundError)
                if absent and gone and not os.path.exists(gone):
                    raise
                if why := refusal(error):
                    raise Refused(f"cannot {what} in {self.address}: {why} ({short(error)})") from error
                if absent:
                    raise NotFound(f"cannot {what}: {self.address} has no such file") from error
                self.files.reset()
                if attempt == limits.tries:
                    times = f" {attempt} times" if attempt > 1 else ""
                    raise Unavailable(f"cannot {what} in {self.address}: failed{times}: {short(error)}") from error
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, limits.longest_wait_s)
        raise AssertionError("tries is at least 1")


def short(error: BaseException) -> str:
    """An error in one line of at most 300 characters, with its class where it has no text."""
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:300]


def one_line(value: object, most: int = 300) -> str:
    """Text of another machine as one printable line."""
    return "".join(c if c.isprintable() else " " for c in str(value)[:most]).strip()


class _Pace:
    """Spreads bytes over time: `spend` returns when the bytes so far fit the limit. Shared by threads."""

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0  # monotonic: when the bytes so far are paid for
        self._lock = threading.Lock()

    def spend(self, count: int, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until `count` more bytes may have been moved; `tick` is called before and meanwhile."""
        tick()
        if not self.bytes_per_s or not count:
            return
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + count / self.bytes_per_s
            until = self._free_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            tick()


def _bounded(work: Callable[[Callable[[], None]], T], idle_s: float, what: str) -> T:
    """The result of `work(tick)`. TimeoutError when neither it returned nor `tick` was called for `idle_s`.

    The thread of a call that hangs is abandoned: nothing can interrupt a read of a dead mount. It is a daemon, so that
    the process can end.
    """
    moved, abandoned = [time.monotonic()], threading.Event()
    result: Future[T] = Future()

    def tick() -> None:
        if abandoned.is_set():
            raise TimeoutError(f"{what} was given up")
        moved[0] = time.monotonic()

    def run() -> None:
        try:
            result.set_result(work(tick))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"store: {what[:60]}").start()
    while (left_s := moved[0] + idle_s - time.monotonic()) > 0:
        if wait([result], left_s).done:
            return result.result()
    abandoned.set()
    raise TimeoutError(f"no answer within {round(idle_s, 1):g} s")


# Opening a place ------------------------------------------------------------------------------------------------------


def open_place(address: str, limits: Limits | None = None) -> Place:
    """The place of an address: a folder, or scheme://… Nothing is connected or created yet.

    Raises StoreError: the address is not valid or holds a secret, or the library for its scheme is not installed.
    """
    address = address.strip()
    scheme, separator, rest = address.partition("://")
    if not separator:
        if not address:
            raise StoreError("the store has no address; write a folder, or an address such as s3://bucket/runs")
        folder = Path(address).expanduser().absolute()
        return Place(files("file"), str(folder), limits, f"{folder.as_posix().rstrip('/')}/")
    if scheme == "file":
        return open_place(f"/{rest.lstrip('/')}", limits)
    if scheme not in PROTOCOLS:
        others = ", ".join(name for name in PROTOCOLS if name != "file")
        raise StoreError(f"{scheme}:// is not a kind of store; use a folder, or one of {others}")
    parts = urlsplit(address)
    if parts.password or parts.query or parts.fragment or (parts.username and scheme != "sftp"):
        raise StoreError(
            f"{scheme}://…: an address holds no password, key or option, because it is shown and saved; "
            "use the library's own login or environment variables"
        )
    body = rest.strip("/")
    if any(part in ("", ".", "..") for part in body.split("/")) or "\\" in body:
        raise StoreError(f"{address!r}: write the address without . and .. and with single slashes")
    package = PROTOCOLS[scheme][0]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise StoreError(f"{scheme}:// needs {package}; install it: pip install {package} ({short(error)})") from error
    options, root = None, body
    if scheme == "hf" and not re.match(r"buckets/[^/]+/[^/]+", body):
        raise StoreError(f"hf://{body}: write hf://buckets/OWNER/NAME/folder; models and data sets cannot be a store")
    if scheme == "sftp":
        from launch.store import sftp

        if not parts.hostname:
            raise StoreError(f"sftp://{body}: the host is missing; write sftp://user@host/folder")

        try:
            options = sftp.login(parts.hostname or "", parts.port, unquote(parts.username or ""))
        except ValueError as error:
            raise StoreError(f"sftp://{body}: the port is not a number") from error
        root = unquote(parts.path).rstrip("/")
    return Place(files(scheme, options), f"{scheme}://{body}", limits, f"{root}/")
