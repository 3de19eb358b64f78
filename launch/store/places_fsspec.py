"""Places that fsspec reaches in one request each: S3, Google Cloud Storage, Azure, and memory for trials.

An object store shows an object when its upload is complete, so no temporary names are needed. A new object is created by a
conditional request (S3: If-None-Match, Google: ifGenerationMatch=0), which only one of several writers can win. fsspec's
listings are not cached: another machine writes here too. Credentials come from where the libraries look for them:
AWS_… variables and ~/.aws, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_….
"""

import contextlib
import errno
import importlib
import itertools
import os
import threading
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback

from launch.store.kind import Entry, Meter

# Read when gcsfs is imported. Its classes for zonal buckets first ask what kind a bucket is, which a token may not be allowed.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

BLOCK = 1 << 20
CHUNK = 8 << 20  # bytes of one part of an upload; S3 takes at least 5 MiB and at most 10,000 parts
CONNECT_S, READ_S = 10, 25  # below the limit of a call, so that the library's own retry comes first

_NO_CACHE = {"skip_instance_cache": True, "use_listings_cache": False}
OPTIONS: dict[str, dict[str, Any]] = {  # scheme: arguments of its file system
    "s3": {
        "config_kwargs": {
            "connect_timeout": CONNECT_S,
            "read_timeout": READ_S,
            "retries": {"mode": "standard", "max_attempts": 2},
        },
        **_NO_CACHE,
    },
    "gs": {"timeout": READ_S, **_NO_CACHE},
    "az": {"anon": False, **_NO_CACHE},
    "memory": {},
}
CREATES = {"s3": True, "gs": True, "az": False, "memory": True}  # whether "create" is one atomic request
STREAMS = ("s3", "gs", "memory")  # whose files can be written in parts and given up
LIBRARY_ERRORS = {  # scheme: the classes of the library's errors that are no OSError
    "s3": ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError", "aiohttp:ClientError"),
    "gs": ("gcsfs.retry:HttpError", "aiohttp:ClientError", "google.auth.exceptions:GoogleAuthError"),
    "az": ("azure.core.exceptions:AzureError", "aiohttp:ClientError"),
    "memory": (),
}
FINAL = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "DefaultCredentialsError")
EXISTS = ("PreconditionFailed", "ConditionNotMet", "ResourceExists", "BlobAlreadyExists")


def make(scheme: str, body: str) -> tuple["FsspecKind", str]:
    """The kind of a scheme, and the prefix of all its names: bucket and folder."""
    return FsspecKind(scheme), body


class _Ticks(Callback):
    """Says that fsspec is still sending; never waits, because it is called in fsspec's event loop."""

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self.meter(0)


class FsspecKind:
    """One file system of fsspec. It connects with the first call."""

    def __init__(self, scheme: str):
        self.scheme = scheme
        self.exclusive = CREATES[scheme]
        self.failures: tuple[type[Exception], ...] = (OSError, *map(_class, LIBRARY_ERRORS[scheme]))
        self._made: AbstractFileSystem | None = None
        self._lock = threading.Lock()
        self._is_proven = False

    @property
    def fs(self) -> AbstractFileSystem:
        """The file system."""
        with self._lock:
            if self._made is None:
                import fsspec

                self._made = fsspec.filesystem(self.scheme, **OPTIONS[self.scheme])
            return self._made

    def prove(self, prefix: str) -> None:
        """Create a file twice: some servers of these protocols ignore the condition, and then the second call succeeds, too."""
        if self.scheme == "memory" or not self.exclusive or self._is_proven:
            return
        name = f"{prefix}probe-{uuid.uuid4().hex}"
        self.create(name, b"first")
        try:
            self.create(name, b"second")
            self.exclusive = False
        except FileExistsError:
            pass
        self._is_proven = True
        self.delete([name])

    def size(self, name: str) -> int:
        """The size in bytes."""
        return int(self.fs.info(name)["size"])

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer only at the end of the file."""
        size = self.size(name)
        if start >= size:
            return b""
        return bytes(self.fs.cat_file(name, start=start, end=min(size, start + length)))

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace an object."""
        if isinstance(source, bytes):
            self.fs.pipe_file(name, source)
            meter(len(source))
        elif self.scheme not in STREAMS:
            size = os.path.getsize(source)
            self.fs.put_file(source, name, callback=_Ticks(meter))
            meter(size)
        elif os.path.getsize(source) <= CHUNK:
            with open(source, "rb") as file:
                self.put(name, file.read(), meter)
        else:
            self._stream(name, source, meter)

    def _stream(self, name: str, source: str, meter: Meter) -> None:
        """Send a large file in parts; it is visible when the last has arrived.

        The meter waits in this thread. In a callback of put_file it would stop the one event loop that all of fsspec's calls
        share, and with it the renewal of a lease.
        """
        target = self.fs.open(name, "wb", block_size=CHUNK)
        try:
            with open(source, "rb") as file:
                while block := file.read(BLOCK):
                    target.write(block)
                    meter(len(block))
            target.close()
        except BaseException:
            target.closed = True  # else its destructor completes the upload with what has arrived
            with contextlib.suppress(*self.failures):
                target.discard()
            raise

    def create(self, name: str, data: bytes) -> None:
        """Write a new object. Raises FileExistsError."""
        if not self.exclusive and self.fs.exists(name):
            raise FileExistsError(errno.EEXIST, "exists already", name)
        try:
            self.fs.pipe_file(name, data, mode="create")
        except self.failures as error:
            if any(word in _text(error) for word in EXISTS):
                raise FileExistsError(errno.EEXIST, "exists already", name) from error
            raise

    def list(self, prefix: str) -> dict[str, Entry]:
        """The objects below `prefix`."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(prefix.rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        rows = found.values() if isinstance(found, dict) else []
        return {
            str(row["name"]).lstrip("/"): Entry(int(row["size"] or 0), _modified(row))
            for row in rows
            if row.get("type") == "file"
        }

    def folders(self, prefix: str) -> Sequence[str]:
        """The names before the next slash after `prefix`."""
        self.fs.invalidate_cache()
        try:
            rows = self.fs.ls(prefix.rstrip("/"), detail=True)
        except FileNotFoundError:
            return []
        return [str(row["name"]).rstrip("/").rpartition("/")[2] for row in rows if row.get("type") == "directory"]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        with contextlib.suppress(FileNotFoundError):
            if len(names) > 1 and self.scheme in ("s3", "gs"):
                self.fs.rm(list(names))
                return
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(name)

    def refusal(self, error: Exception) -> str:
        """Why repeating cannot help; "" where it may."""
        text, chain = _text(error), _chain(error)
        if any(type(one).__name__ in FINAL for one in chain):
            return "no credentials; log in with the provider's own tool or set its environment variables"
        if isinstance(error, PermissionError):
            return "no permission; check the credentials and what they may do"
        if "NoSuchBucket" in text or "bucket does not exist" in text.lower():
            return "there is no such bucket; create it"
        if any(
            word in text
            for word in ("QuotaExceeded", "quota exceeded", "EntityTooLarge", "StorageFull", "InsufficientStorage")
        ):
            return "no space is left there; free some space or raise the quota"
        return ""

    def reset(self) -> None:
        """The library connects anew by itself; to make its client again would cost a second of a processor."""


def _class(name: str) -> type[Exception]:
    module, _, attribute = name.partition(":")
    try:
        found: type[Exception] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return OSError  # another version of the library names it differently
    return found


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, at most five."""
    chain = [error]
    for _ in itertools.repeat(None, 4):
        cause = chain[-1].__cause__ or chain[-1].__context__
        if cause is None:
            break
        chain.append(cause)
    return chain


def _text(error: BaseException) -> str:
    return " ".join(f"{type(one).__name__} {one}" for one in _chain(error))


def _modified(row: dict[str, Any]) -> float | None:
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = row.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return None
