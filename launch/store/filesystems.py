"""The file systems that keep a store, each by fsspec, and how long and how fast a call to one may be.

PROTOCOLS has a row for each; refusals.toml says which of their errors no repeated call can help against.

Nothing that was listed is cached: another machine writes here too. Credentials come from where the libraries look for
them: AWS_… variables and ~/.aws, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_…, ~/.ssh/config and the SSH agent, `hf
auth login`.
"""

import contextlib
import errno
import importlib
import io
import math
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import tomllib

from guards import deadline

T = TypeVar("T")
# Read when gcsfs is imported. Its classes for zonal buckets first ask for a bucket's kind, which a token may not.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

BLOCK = 1 << 20
# Bytes that one reading call fetches, and of one part of an upload; S3 takes at least 5 MiB and at most 10,000 parts.
PIECE = 8 << 20
CONNECT_S, READ_S = 10, 25  # below the limit of a call, so that the library's own retry comes first

Meter = Callable[[int], None]
"""Called with the number of bytes that were moved; waits where that was too fast. Who calls it has not stalled."""

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
TREES = ("file", "sftp")  # show a file while it is written, so it gets a hidden name first
WHOLE = ("az", "hf")  # have no conditional write, and send a file as a whole: `put` waits for its bandwidth first
SHARED = ("s3", "gs", "az")  # one client for all calls, because it costs a second of a processor
MISSING = ("EntryNotFoundError", "BucketNotFoundError")  # of the hub's library: there is no such name
EXISTS = ("PreconditionFailed", "ConditionNotMet", "ResourceExists", "BlobAlreadyExists")
REFUSALS: dict[str, str] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Limits:
    """How long a call may take and how often it is repeated; how many bytes a second puts and gets move together."""

    call_s: float = 30.0  # in which no byte moves
    tries: int = 8
    first_wait_s: float = 0.25
    longest_wait_s: float = 8.0
    bytes_per_s: float = 0.0  # 0: no limit


class Pace:
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


def bounded(work: Callable[[Callable[[], None]], T], idle_s: float, what: str) -> T:
    """The result of `work(tick)`. TimeoutError when neither it returned nor `tick` was called for `idle_s`.

    The thread of a call that hangs is abandoned: nothing can interrupt a read of a dead mount.
    """
    moved, abandoned = [time.monotonic()], threading.Event()

    def tick() -> None:
        if abandoned.is_set():
            raise TimeoutError(f"{what} was given up")
        moved[0] = time.monotonic()

    def check() -> None:
        if time.monotonic() - moved[0] > idle_s:
            abandoned.set()
            raise TimeoutError(f"no answer within {round(idle_s, 1):g} s")

    return deadline.call(work, tick, seconds=math.inf, what=what, waiting=check)


def connect(scheme: str, options: dict[str, Any]) -> Any:
    """A new file system of a scheme of PROTOCOLS."""
    if scheme == "sftp":
        from launch.store.sftp import KnownHosts

        return KnownHosts(**options)
    arguments = dict(PROTOCOLS[scheme][1])
    if scheme == "s3":
        arguments["session"] = session = importlib.import_module("aiobotocore.session").AioSession()
        session.register("after-call.s3.ListObjectsV2", _check_listing)
    return fsspec.filesystem(scheme, **arguments)


def _check_listing(http_response: Any, parsed: dict[str, Any], **more: Any) -> None:
    """OSError for a page of HTML in place of a listing, in which botocore finds no files. It raises errors itself."""
    if http_response.status_code < 300 and "IsTruncated" not in parsed:
        raise OSError("the answer is no listing of S3; a proxy or a login page may stand in between")


def open_new(fs: Any, name: str, mode: str) -> Any:
    """Open a file for writing; its folders are made where they are missing."""
    try:
        return fs.open(name, mode)
    except FileNotFoundError:
        fs.makedirs(posixpath.dirname(name), exist_ok=True)
        return fs.open(name, mode)


def size_of(fs: Any, name: str) -> int:
    """The size of a plain file, never of one that a link points to."""
    info = fs.info(name)
    if info.get("islink") or info["type"] != "file":
        raise PermissionError(errno.EPERM, "not a plain file", name)
    return int(info["size"])


def blocks(source: bytes | str) -> Iterator[bytes]:
    """Bytes, or the contents of a local file, in blocks."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        while block := file.read(BLOCK):
            yield block


def fill(scheme: str, target: Any, source: bytes | str, meter: Meter) -> int:
    """Write a file that is open, onto the disk, and close it; its size."""
    size = 0
    with target:
        for block in blocks(source):
            if scheme == "sftp":
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
        if scheme == "file":
            target.flush()
            os.fsync(target.fileno())
    return size


def stream(fs: Any, key: str, source: str, meter: Meter) -> None:
    """Send a large file in parts; it is visible when the last has arrived.

    The meter waits in this thread. In a callback of put_file it would stop the one event loop that all of fsspec's
    calls share, and with it the renewal of a lease.
    """
    target = fs.open(key, "wb", block_size=PIECE)
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


def refusal(error: Exception) -> str:
    """Why repeating the call cannot help, and what to do; "" where it may help."""
    text = text_of(error)
    return next((why for words, why in REFUSALS.items() if re.search(words, text, re.IGNORECASE)), "")


def text_of(error: BaseException) -> str:
    """What an error and its causes say, at most five: class, name of the errno, HTTP status, text."""
    chain = [error]
    while len(chain) < 5 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    numbers = [errno.errorcode.get(one.errno, "") for one in chain if isinstance(one, OSError) and one.errno]
    answers = (getattr(getattr(one, "response", None), "status_code", None) for one in chain)
    numbers += [f"status {status}" for status in answers if status]
    return " ".join([*numbers, *(f"{type(one).__name__} {one}" for one in chain)])
