"""The file systems that keep a store, each by fsspec: a folder, sftp://, s3://, gs://, az://, hf://buckets/OWNER/NAME.

PROTOCOLS has a row for each. A call here is one attempt: it neither repeats nor limits itself, which `places.Place`
does. FileNotFoundError: no such name. FileExistsError: only from `create`. Any other error of a library is a failed call.

A file is visible completely or not at all. An object store shows an object when its upload is complete; elsewhere a
file is written under a hidden name, and renamed. `create` is one atomic request where the protocol has one
(all but WHOLE), so that only one of several machines can win. Azure's library and the hub's buckets have none, and some
servers that speak S3 ignore the condition: two machines may both create a file there, which a lease looks for
afterwards.

Nothing that was listed is cached: another machine writes here too. Credentials come from where the libraries look for
them: AWS_… variables and ~/.aws, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_…, ~/.ssh/config and the SSH agent, `hf
auth login`.
"""

import contextlib
import errno
import os
import posixpath
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec

from runs.files import fsync_folder

# Read when gcsfs is imported. Its classes for zonal buckets first ask what kind a bucket is, which a token may not be allowed.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

BLOCK = 1 << 20
CHUNK = 8 << 20  # bytes of one part of an upload; S3 takes at least 5 MiB and at most 10,000 parts
CONNECT_S, READ_S = 10, 25  # below the limit of a call, so that the library's own retry comes first
LEFT_S = 24 * 3600.0  # a hidden file older than this was left by a killed writer
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

Meter = Callable[[int], None]
"""Called with the number of bytes that were moved; waits where that was too fast. A call that calls it has not stalled."""


_NEW = {"skip_instance_cache": True}
_NO_CACHE = {**_NEW, "use_listings_cache": False}
_S3 = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"mode": "standard", "max_attempts": 2}}
PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {  # scheme: the library, and the arguments of fsspec's file system
    "file": ("fsspec", {**_NEW, "auto_mkdir": True}),
    "sftp": ("paramiko", {}),
    "s3": ("s3fs", {"config_kwargs": _S3, **_NO_CACHE}),
    "gs": ("gcsfs", {"timeout": READ_S, **_NO_CACHE}),
    "az": ("adlfs", {"anon": False, **_NO_CACHE}),
    "hf": ("huggingface_hub", _NEW),
}
WHOLE = ("az", "hf")  # have no conditional write, and send a file as a whole: `put` waits for its bandwidth first
EXISTS = ("PreconditionFailed", "ConditionNotMet", "ResourceExists", "BlobAlreadyExists")
REFUSALS = (  # what an error and its causes say (class and text), and why repeating the call cannot help
    ("BadHostKeyException", "the host has another key than in known_hosts; find out why before you replace it"),
    ("not found in known_hosts", "the host key is not known; run `ssh HOST` once and accept the key"),
    (
        "AuthenticationException|BadAuthenticationType|No authentication methods",
        "the login was refused; add your key there (ssh-copy-id) or start an SSH agent",
    ),
    (
        "NoCredentialsError|PartialCredentialsError|ParamValidationError|DefaultCredentialsError",
        "no credentials; log in with the provider's own tool or set its environment variables",
    ),
    ("LocalTokenNotFoundError|XetAuthenticationError|status 401", "run `hf auth login`, or set HF_TOKEN"),
    ("PermissionError|status 403", "no permission; fix it there, or use credentials that may write"),
    ("NoSuchBucket|bucket does not exist", "there is no such bucket; create it"),
    (f"errno {errno.EROFS}\\b", "the file system is read-only; use another folder"),
    (f"errno {errno.ENOTDIR}\\b", "a file has the name of a folder; move the file, or use another folder"),
    (
        f"errno ({errno.ENOSPC}|{errno.EDQUOT})\\b|status (402|413|507)|no space|quota|EntityTooLarge|StorageFull"
        "|InsufficientStorage|storage limit",
        "no space is left there; free some space or raise the limit",
    ),
)


class Files:
    """The files of an object store. It connects with the first call."""

    def __init__(self, scheme: str, options: dict[str, Any] | None = None):
        self.scheme = scheme
        self.options = PROTOCOLS[scheme][1] | (options or {})
        self.conditional = self.streams = scheme not in WHOLE
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        """The file system of fsspec, for one call: one for all, because a client costs a second of a processor."""
        with self._lock:
            if not self._idle:
                self._idle.append(self.connect())
        yield self._idle[0]

    def connect(self) -> Any:
        """A new file system."""
        if self.scheme != "sftp":
            return fsspec.filesystem(self.scheme, **self.options)
        from launch.store.sftp import KnownHosts

        return KnownHosts(**self.options)

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        with self.session() as fs:
            return _size(fs, name)

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes of a file from byte `start`; fewer only at its end."""
        more = {"cache_type": "none"} if self.scheme == "hf" else {}  # else 5 MB more are read than asked for
        with self.session() as fs:
            end = min(_size(fs, name), start + length)
            if start >= end:
                return b""
            return bytes(fs.cat_file(name, start=start, end=end, **more))

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file by bytes, or by the contents of the file at the path `source`."""
        if isinstance(source, str) and os.path.getsize(source) <= CHUNK:
            source = Path(source).read_bytes()
        with self.session() as fs:
            if isinstance(source, bytes):
                fs.pipe_file(name, source)
                meter(len(source))
            elif self.scheme in WHOLE:
                meter(os.path.getsize(source))
                fs.put_file(source, name)
            else:
                self._stream(fs, name, source, meter)

    def _stream(self, fs: Any, name: str, source: str, meter: Meter) -> None:
        """Send a large file in parts; it is visible when the last has arrived.

        The meter waits in this thread. In a callback of put_file it would stop the one event loop that all of fsspec's
        calls share, and with it the renewal of a lease.
        """
        target = fs.open(name, "wb", block_size=CHUNK)
        try:
            for block in blocks(source):
                target.write(block)
                meter(len(block))
            target.close()
        except BaseException:
            target.closed = True  # else its destructor completes the upload with what has arrived
            with contextlib.suppress(Exception):
                target.discard()
            raise

    def create(self, name: str, data: bytes) -> None:
        """Write a file that does not exist. Without `conditional`, two callers may both succeed. Raises FileExistsError."""
        with self.session() as fs:
            if not self.conditional:
                with contextlib.suppress(FileNotFoundError):
                    fs.info(name)
                    raise FileExistsError(errno.EEXIST, "exists already", name)
                self.put(name, data, lambda count: None)
                return
            try:
                fs.pipe_file(name, data, mode="create")
            except Exception as error:
                if any(word in _text(error) for word in EXISTS):
                    raise FileExistsError(errno.EEXIST, "exists already", name) from error
                raise

    def rows(self, prefix: str, deep: bool) -> Sequence[dict[str, Any]]:
        """What is in a folder, directly or at any depth (then files only), as fsspec lists it; nothing where there is none.

        The names begin as `prefix` does.
        """
        folder = prefix.rstrip("/") or "/"
        options = {"on_error": "raise"} if isinstance(self, Tree) else {}  # what cannot be listed is an error
        with self.session() as fs:
            fs.invalidate_cache()
            try:
                found = [*fs.find(folder, detail=True, **options).values()] if deep else fs.ls(folder, detail=True)
            except FileNotFoundError as error:
                try:
                    fs.info(folder)
                except FileNotFoundError:
                    return []
                raise error  # something in it was deleted meanwhile
        slashes = prefix[: len(prefix) - len(prefix.lstrip("/"))]
        return [row | {"name": slashes + str(row["name"]).strip("/")} for row in found]

    def delete(self, name: str) -> None:
        """Delete a file; one that does not exist is ignored."""
        with contextlib.suppress(FileNotFoundError), self.session() as fs:
            fs.rm_file(name)

    def reset(self) -> None:
        """Drop connections after a failure. These libraries connect anew by themselves."""


class Tree(Files):
    """The files of a folder, or of a server that speaks SFTP: a file is seen while it is written, so it gets a hidden name.

    A connection of SFTP carries one call, and is dropped when that fails.
    """

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        """A connection that no other call uses."""
        with self._lock:
            fs = self._idle.pop() if self._idle else None
        fs = fs or self.connect()
        try:
            yield fs
        except (FileNotFoundError, FileExistsError):
            self._idle.append(fs)
            raise
        except BaseException:
            _close(fs)
            raise
        self._idle.append(fs)

    def reset(self) -> None:
        """Close what is idle: the server may be gone."""
        with self._lock:
            idle, self._idle = self._idle, []
        for fs in idle:
            _close(fs)

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file."""
        with self._written(name, source, meter) as (fs, temporary):
            (os.replace if self.scheme == "file" else fs.mv)(temporary, name)

    def create(self, name: str, data: bytes) -> None:
        """Write a new file.

        A folder: linked to its name, which fails where the name exists (link(2)), also on NFS, where O_EXCL alone
        leaves an empty file for a moment. SFTP and file systems without links: opened exclusively; a writer that stops
        in the middle leaves a short file, which readers take for a damaged one.
        """
        if self.scheme == "file":
            with self._written(name, data, lambda count: None) as (fs, temporary):
                try:
                    fs.link(temporary, name)
                    return
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
        with self.session() as fs:
            try:
                target = _open(fs, name, "xb" if self.scheme == "file" else "wxb")
            except OSError as error:
                if isinstance(error, FileNotFoundError) or not fs.exists(name):
                    raise
                # SFTP version 3 has no code for "exists": servers answer "Failure" (draft-ietf-secsh-filexfer-02, 7).
                raise FileExistsError(errno.EEXIST, "exists already", name) from error
            try:
                self._fill(target, data, lambda count: None)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(name)
                raise

    @contextlib.contextmanager
    def _written(self, name: str, source: bytes | str, meter: Meter) -> Iterator[tuple[Any, str]]:
        """A hidden file beside `name` with the contents of `source`; it is gone afterwards."""
        folder, _, last = name.rpartition("/")
        temporary = f"{folder}/.{last}.{uuid.uuid4().hex}"
        with self.session() as fs:
            try:
                size = self._fill(_open(fs, temporary, "wb"), source, meter)
                if _size(fs, temporary) != size:
                    raise OSError(errno.EIO, "another size arrived than was sent", name)
                yield fs, temporary
            finally:
                with contextlib.suppress(Exception):
                    fs.rm_file(temporary)
        if self.scheme == "file":
            fsync_folder(Path(folder))

    def _fill(self, target: Any, source: bytes | str, meter: Meter) -> int:
        """Write a file that is open, onto the disk, and close it; its size."""
        size = 0
        with target:
            for block in blocks(source):
                if self.scheme == "sftp":
                    # Many writes without waiting for their answers, then one that waits for all: paramiko forgets the
                    # errors of those that nobody waited for.
                    target.set_pipelined(True)
                    target.write(block[:-1])
                    target.set_pipelined(False)
                    target.write(block[-1:])
                else:
                    target.write(block)
                size += len(block)
                meter(len(block))
            if self.scheme == "file":
                target.flush()
                os.fsync(target.fileno())
        return size

    def rows(self, prefix: str, deep: bool) -> Sequence[dict[str, Any]]:
        """What is in a folder. Removes what killed writers left a day ago."""
        found = super().rows(prefix, deep)
        for row in found:
            changed = row["mtime"]  # of SFTP a datetime
            changed_s = changed.timestamp() if isinstance(changed, datetime) else changed
            hidden = row["type"] == "file" and posixpath.basename(row["name"])[0] == "."
            if hidden and changed_s < time.time() - LEFT_S:
                with contextlib.suppress(Exception):  # tried again by the next listing
                    self.delete(row["name"])
        return found


class Bucket(Files):
    """The files of a bucket on the Hugging Face hub. The library sends a file as a whole, but no piece that the hub knows."""

    _is_there = False  # whether the bucket exists

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        """A file system of its own for each call, because it remembers what it has listed."""
        try:
            yield self.connect()
        except Exception as error:
            if type(error).__name__.endswith(("EntryNotFoundError", "BucketNotFoundError")):
                raise FileNotFoundError(errno.ENOENT, "no such file") from error
            raise

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file. The bucket is made, private, by the first one. Waits for its bandwidth before it sends."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import BucketNotFoundError
        from huggingface_hub.utils import disable_progress_bars

        meter(len(source) if isinstance(source, bytes) else os.path.getsize(source))
        disable_progress_bars()
        api, (_, owner, bucket, path) = HfApi(library_name="hangproof"), name.split("/", 3)
        if not self._is_there:
            try:
                api.bucket_info(f"{owner}/{bucket}")
            except BucketNotFoundError:
                api.create_bucket(f"{owner}/{bucket}", private=True, exist_ok=True)
            self._is_there = True
        api.batch_bucket_files(f"{owner}/{bucket}", add=[(source, path)])


def files(scheme: str, options: dict[str, Any] | None = None) -> Files:
    """The file system of a scheme of PROTOCOLS."""
    return {"file": Tree, "sftp": Tree, "hf": Bucket}.get(scheme, Files)(scheme, options)


def _close(fs: Any) -> None:
    if client := getattr(fs, "client", None):
        client.close()


def _open(fs: Any, name: str, mode: str) -> Any:
    """Open a file for writing; its folders are made where they are missing."""
    try:
        return fs.open(name, mode)
    except FileNotFoundError:
        fs.makedirs(posixpath.dirname(name), exist_ok=True)
        return fs.open(name, mode)


def _size(fs: Any, name: str) -> int:
    """The size of a plain file, never of one that a link points to."""
    info = fs.info(name)
    if info.get("islink") or info["type"] != "file":
        raise PermissionError(errno.EPERM, "not a plain file", name)
    return int(info["size"])


def blocks(source: bytes | str) -> Iterator[bytes]:
    """Bytes, or the contents of a local file, in blocks."""
    if isinstance(source, bytes):
        yield from (source[at : at + BLOCK] for at in range(0, len(source), BLOCK))
        return
    with open(source, "rb") as file:
        while block := file.read(BLOCK):
            yield block


def refusal(error: Exception) -> str:
    """Why repeating the call cannot help, and what to do; "" where it may help."""
    text = _text(error)
    return next((why for words, why in REFUSALS if re.search(words, text, re.IGNORECASE)), "")


def _text(error: BaseException) -> str:
    """What an error and its causes say, at most five: class, errno, HTTP status, text."""
    chain = [error]
    while len(chain) < 5 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    numbers = [f"errno {one.errno}" for one in chain if isinstance(one, OSError) and one.errno]
    answers = (getattr(getattr(one, "response", None), "status_code", None) for one in chain)
    numbers += [f"status {status}" for status in answers if status]
    return " ".join([*numbers, *(f"{type(one).__name__} {one}" for one in chain)])
