"""Downloads one file of a model hub so that it ends: complete and verified, or with a reason and its bytes kept.

Decision: plain HTTP ranges with the standard library, not the hub's own library. That one waits without a limit (xet
transfers stalled for ever through 2026, and HF_HUB_DOWNLOAD_TIMEOUT does not reach them), and since 1.0 it deletes an
unfinished file with its process, so that 20 of 24 GB are downloaded again. Here the bytes are watched: a connection that
brings less than `LEAST_BYTES` in `download_read_s` is closed and continued by a range request; after `download_stall_s`
without as many new bytes the download fails. Received bytes stay in `.NAME.part`, with the ETag of their file beside them.

xet is faster and comes first where hf_xet is installed, nothing has been received yet and the hub names the SHA-256. It
runs in a child process (xet_child.py), because a stuck thread of it cannot be ended. A child whose bytes stall is killed
and HTTP continues. Of its output only a complete file with the right hash is used.

The token goes to the endpoint's own host, never to the host of a redirect. Each file has a lock that ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from guards import limits
from guards.deadline import Deadline

LEAST_BYTES = 1 << 16
CHUNK = 1 << 20
XET_LEAST_BYTES = 1 << 24  # for smaller files, starting the child takes longer than the download
CHANGES = 5  # contradictory answers without a new byte, before the download fails
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
POLL_S = 0.5
REDIRECTS = (301, 302, 303, 307, 308)
BUSY = (408, 425, 429)
XET_CHILD = [sys.executable, str(Path(__file__).with_name("xet_child.py"))]
_FULL = (errno.ENOSPC, errno.EDQUOT)

_xet_failed: list[str] = []  # after the first failure, this process uses HTTP only


class DownloadError(Exception):
    """A download that ended without its file. The message says why and what to do.

    kind: "gated", "missing", "offline", "space", "disk", "stalled", "damaged", "busy" or "server".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Refused(urllib.error.URLError):
    """An answer that a retry does not change."""


class _Busy(ConnectionError):
    """The server asks for a pause. `retry_s`: how long, in seconds."""

    def __init__(self, status: int, retry_s: float) -> None:
        super().__init__(f"HTTP status {status}")
        self.retry_s = retry_s


class _Contradiction(ConnectionError):
    """An answer that does not belong to the file that was resolved."""


NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


@dataclass(frozen=True)
class Source:
    """A file of a hub repository."""

    repo: str
    file: str
    revision: str = "main"
    repo_type: str = "model"

    @property
    def page(self) -> str:
        """The repository's page, which shows its licence."""
        return f"{endpoint()}/{'' if self.repo_type == 'model' else self.repo_type + 's/'}{self.repo}"

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"{self.page}/resolve/{urllib.parse.quote(self.revision, safe='')}/{urllib.parse.quote(self.file)}"


@dataclass(frozen=True)
class Remote:
    """What the hub says about a file. size: bytes, None when unknown. sha256, git_sha1, commit, xet: "" when unknown."""

    size: int | None
    etag: str
    sha256: str = ""
    git_sha1: str = ""
    commit: str = ""
    xet: str = ""

    @property
    def verifiable(self) -> bool:
        """Whether the hub names a hash of the contents."""
        return bool(self.sha256 or self.git_sha1)


@dataclass(frozen=True)
class Progress:
    """Bytes of one file. total: 0 when unknown. speed: bytes per second. eta_s: None when unknown."""

    name: str
    done: int
    total: int
    speed: float = 0.0
    eta_s: float | None = None


OnProgress = Callable[[Progress], None]


def ignore(_: object) -> None:
    """Report nothing."""


def to_stderr(message: str) -> None:
    """Report to standard error."""
    sys.stderr.write(f"hangproof: {message}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Options:
    """How to download. stall_s: seconds without a new byte before the download fails; None: `download_stall_s`; 0: no limit.

    token: None: the stored one; "": none. wait: wait for another process that downloads the same file, as long as its bytes
    grow. by_hand: where a user can put the file, for messages.
    """

    on_progress: OnProgress = ignore
    say: Callable[[str], None] = to_stderr
    stall_s: float | None = None
    token: str | None = None
    wait: bool = False
    by_hand: str = ""

    @property
    def limit_s(self) -> float:
        """The limit without a new byte, in seconds."""
        return limits.seconds("download_stall_s") if self.stall_s is None else self.stall_s


# The hub's settings, as its own library reads them.


def endpoint() -> str:
    """The URL of the hub: `$HF_ENDPOINT`, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_home() -> Path:
    """The folder of the hub's library: `$HF_HOME`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return _is_set("HF_HUB_OFFLINE")


def token() -> str | None:
    """The user's hub token; None when there is none."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"].strip()
    path = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


# Requests.


class _Link:
    """The socket of the request in progress, so that a deadline can close it."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.expired = False

    def attach(self, connected: socket.socket) -> None:
        self.socket = connected
        if self.expired:
            self.shut()

    def expire(self, _seconds: float, _what: str) -> None:
        self.expired = True
        self.shut()

    def shut(self) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # not SSLSocket's: another thread is reading


def _recording(base: Any, link: _Link) -> Any:
    class Connection(base):
        def connect(self) -> None:
            super().connect()
            link.attach(self.sock)

    return Connection


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The machine's certificates, and those that the hub's library uses: some machines have no others."""
    context = ssl.create_default_context()
    with contextlib.suppress(ImportError):
        import certifi

        context.load_verify_locations(certifi.where())
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if Path(os.environ.get(name, "")).is_file():
            context.load_verify_locations(os.environ[name])
    return context


class _Http(urllib.request.HTTPHandler):
    def __init__(self, link: _Link) -> None:
        super().__init__()
        self.link = link

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_recording(http.client.HTTPConnection, self.link), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, link: _Link) -> None:
        super().__init__(context=_certificates())
        self.link = link

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_recording(http.client.HTTPSConnection, self.link), req, context=_certificates())


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns errors and redirects as they are: each response's headers are needed, and each redirect is checked."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def follow(
    url: str, headers: dict[str, str], method: str, secret: str | None = None, link: _Link | None = None
) -> list[http.client.HTTPResponse]:
    """All responses on the way to a file; the token is sent to the first URL's host only.

    secret: the token; None: the stored one. Raises URLError, TimeoutError, HTTPException.
    """
    link = link or _Link()
    secret = (token() or "") if secret is None else secret
    opener = urllib.request.build_opener(_Http(link), _Https(link), _AnyStatus)
    responses: list[http.client.HTTPResponse] = []
    first = urllib.parse.urlsplit(url)
    for _ in range(10):
        here = urllib.parse.urlsplit(url)
        if here.scheme not in ("http", "https"):
            raise _Refused(f"a redirect to {here.scheme}: is not followed")
        sent = {"User-Agent": "hangproof", "Accept-Encoding": "identity", **headers}
        if secret and (here.scheme, here.netloc) == (first.scheme, first.netloc):
            sent["Authorization"] = f"Bearer {secret}"
        request = urllib.request.Request(url, headers=sent, method=method)
        response = opener.open(request, timeout=limits.seconds("download_read_s") or None)
        responses.append(response)
        where = response.headers.get("Location")
        if response.status not in REDIRECTS or not where:
            return responses
        response.close()
        url = urllib.parse.urljoin(url, where)
    raise _Refused("too many redirects; check HF_ENDPOINT")


class _Patience:
    """Retries with growing pauses, until `limit_s` seconds have brought nothing new."""

    def __init__(self, limit_s: float, what: str) -> None:
        self.limit_s, self.what = limit_s, what
        self.new()

    def new(self) -> None:
        """There was progress."""
        self.since_s, self.pause_s, self.contradictions = time.monotonic(), PAUSE_S, 0

    def left_s(self) -> float:
        """Seconds until the download fails; infinite without a limit."""
        return self.limit_s - (time.monotonic() - self.since_s) if self.limit_s else float("inf")

    def read_s(self) -> float:
        """The limit of one connection for `LEAST_BYTES`; 0: none."""
        given = [limit for limit in (limits.seconds("download_read_s"), self.limit_s) if limit]
        return min(given, default=0.0)

    def deadline(self, link: _Link) -> Deadline:
        """The limit of one request, until its first bytes."""
        return Deadline(min(self.read_s(), max(self.left_s(), POLL_S)), self.what, link.expire)

    def pause(self, error: Exception) -> bool:
        """Wait before the next attempt. False when there is none."""
        if isinstance(error, _Refused) or _not_trusted(error):
            return False
        if isinstance(error, _Contradiction):
            self.contradictions += 1
            if self.contradictions >= CHANGES:
                return False
        left_s = self.left_s()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, max(self.pause_s, getattr(error, "retry_s", 0.0))))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return True


def _not_trusted(error: Exception) -> bool:
    return isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError)


def _failure(error: Exception, host: str, limit_s: float, kept: int, by_hand: str) -> DownloadError:
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    bytes_kept = f"; the {kept} bytes received are kept" if kept else ""
    hint = f", or {by_hand}" if by_hand else ""
    if isinstance(error, (_Refused, _Contradiction)) or _not_trusted(error):
        return DownloadError("server", f"{host}: {reason}{bytes_kept}. Check HF_ENDPOINT and the proxy{hint}")
    return DownloadError(
        "stalled",
        f"no data from {host} for {limit_s:.0f} s ({reason}){bytes_kept}. Check the network and download again{hint}",
    )


def check_status(
    response: http.client.HTTPResponse, source: Source, by_hand: str = "", secret: str | None = None
) -> None:
    """Raises DownloadError for a refusal, with the licence's URL and what to do; ConnectionError for a busy server."""
    status, code = response.status, response.headers.get("X-Error-Code", "")
    hint = f", or {by_hand}" if by_hand else ""
    name = f"{source.file} of {source.repo}" if source.file else source.repo
    if status in BUSY or status >= 500:
        text = response.headers.get("Retry-After", "")
        raise _Busy(status, float(text) if text.isdecimal() else 0.0)
    if status in (401, 403) and code in ("RepoNotFound", "RevisionNotFound"):
        raise DownloadError(
            "missing",
            f"{source.page} does not exist, or is private; correct the name, or set HF_TOKEN to a token with access{hint}",
        )
    if status in (401, 403):
        known = (token() or "") if secret is None else secret
        account = (
            " A token is set: check that it belongs to the account that accepted the licence (`hf auth whoami`), and that it "
            "may read gated repositories"
            if known
            else ""
        )
        raise DownloadError(
            "gated",
            f"no access to {source.repo} (HTTP status {status}): accept its licence at {source.page}, then set HF_TOKEN to "
            f"your token (or run `hf auth login`){hint}.{account}".rstrip("."),
        )
    if status in (404, 410):
        raise DownloadError("missing", f"{name} does not exist at {source.page}; correct the name{hint}")
    if status >= 400 and status != 416:
        raise DownloadError("server", f"{source.url}: HTTP status {status}; check HF_ENDPOINT")


def ask(source: Source, url: str, method: str, options: Options, read: Callable[[Any], Any]) -> Any:
    """`read(responses)` of a small request, with retries. Raises DownloadError."""
    patience = _Patience(options.limit_s, f"an answer about {source.repo}")
    if offline():
        raise DownloadError("offline", f"HF_HUB_OFFLINE is set, so {source.repo} is not downloaded; unset it")
    while True:
        link = _Link()
        try:
            with patience.deadline(link):
                responses = follow(url, {}, method, options.token, link)
                with responses[-1]:
                    check_status(responses[-1], source, options.by_hand, options.token)
                    return read(responses)
        except NETWORK_ERRORS as error:
            if not patience.pause(error):
                host = urllib.parse.urlsplit(url).netloc
                raise _failure(error, host, patience.limit_s, 0, options.by_hand) from error


def resolve(source: Source, options: Options) -> Remote:
    """Size, ETag, hash and commit of a file. Raises DownloadError."""
    return ask(source, source.url, "HEAD", options, remote_of)


def remote_of(responses: list[http.client.HTTPResponse]) -> Remote:
    """What the headers of a file's responses say: the hub's own (X-Linked-…) before those of the host of its redirect."""

    def header(*names: str) -> str:
        found = (response.headers.get(name) for name in names for response in responses)
        return next((value for value in found if value), "")

    etag = header("X-Linked-ETag", "ETag").removeprefix("W/").strip('"')
    size = header("X-Linked-Size") or responses[-1].headers.get("Content-Length") or ""
    return Remote(
        size=int(size) if size.isdecimal() else None,
        etag=etag,
        sha256=etag.lower() if re.fullmatch(r"[0-9a-fA-F]{64}", etag) else "",
        git_sha1=etag.lower() if re.fullmatch(r"[0-9a-fA-F]{40}", etag) and header("X-Repo-Commit") else "",
        commit=header("X-Repo-Commit"),
        xet=header("X-Xet-Hash"),
    )


# Files.


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


def _note_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part.json")


def _scratch_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.xet")


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut. Does nothing on Windows, which cannot open folders."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_small(path: Path, text: str) -> None:
    """Replace a small file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
    patience, known = _Patience(options.limit_s, f"the other download of {source.file}"), -1
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
        done = size_of(part_of(target)) + _allocated(_scratch_of(target))
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
        time.sleep(POLL_S)


class _Download:
    """One file, from the first request to the rename. The caller holds the lock."""

    def __init__(self, source: Source, target: Path, options: Options, sha256: str) -> None:
        self.source, self.target, self.options, self.sha256 = source, target, options, sha256
        self.part, self.note = part_of(target), _note_of(target)
        self.patience = _Patience(options.limit_s, f"a byte of {source.file}")
        self.most = size_of(self.part)  # bytes on the disk when there was progress last
        self.server_etag = ""

    def run(self, pinned: Remote | None) -> Remote:
        """Download the file. pinned: what it must be; None: what the hub says, asked again when it has changed."""
        remote = pinned
        while True:
            try:
                remote = self.expected(remote or resolve(self.source, self.options))
                self.discard_other_file(remote)
                check_space(missing_bytes(self.target, remote.size), self.target.parent, self.target.name)
                meter = _Meter(self.target.name, remote.size or 0, self.options.on_progress)
                if self.by_xet(remote, meter) or self.by_http(remote, meter):
                    break
            except _Contradiction as error:
                self.retry(error)
                remote = pinned
            except NETWORK_ERRORS as error:
                self.retry(error)
        self.finish(remote)
        return remote

    def expected(self, remote: Remote) -> Remote:
        return replace(remote, sha256=self.sha256) if self.sha256 else remote

    def retry(self, error: Exception) -> None:
        if not self.patience.pause(error):
            host = urllib.parse.urlsplit(self.source.url).netloc
            kept = size_of(self.part)
            raise _failure(error, host, self.patience.limit_s, kept, self.options.by_hand) from error

    def discard_other_file(self, remote: Remote) -> None:
        """Delete the bytes of an earlier download unless they belong to the same file."""
        try:
            known = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        same = (
            isinstance(known, dict)
            and remote.etag
            and (known.get("etag"), known.get("size")) == (remote.etag, remote.size)
        )
        if same and (remote.size is None or size_of(self.part) <= remote.size):
            self.server_etag = known.get("server_etag", "")
        else:
            self.part.unlink(missing_ok=True)
            self.most, self.server_etag = 0, ""
            self.write_note(remote)
        shutil.rmtree(_scratch_of(self.target), ignore_errors=True)

    def write_note(self, remote: Remote) -> None:
        note = {"etag": remote.etag, "size": remote.size, "server_etag": self.server_etag}
        write_small(self.note, json.dumps(note))

    # HTTP

    def by_http(self, remote: Remote, meter: _Meter) -> bool:
        """Append the missing bytes to the part file. True when it is complete.

        Raises one of NETWORK_ERRORS when the connection ends early; the received bytes are kept.
        """
        have = size_of(self.part)
        if remote.size is not None and have == remote.size:
            self.part.touch()  # an empty file
            return True
        headers = {"Range": f"bytes={have}-"} if have else {}
        if have and self.server_etag:
            headers["If-Range"] = self.server_etag
        link = _Link()
        with self.patience.deadline(link) as deadline:
            responses = follow(self.source.url, headers, "GET", self.options.token, link)
            with responses[-1] as response:
                check_status(response, self.source, self.options.by_hand, self.options.token)
                self.check_same_file(responses, remote)
                if response.status == 416:
                    return self.at_the_end(response, remote, have)
                skip = have - self.first_byte(response, remote, have)
                with self.part.open("ab", buffering=0) as file:
                    meter(have)
                    self.receive(response, remote, file, have, skip, meter, deadline)
                    os.fsync(file.fileno())
        have = size_of(self.part)
        if link.expired:
            raise TimeoutError(f"fewer than {LEAST_BYTES} bytes in {deadline.seconds:g} s")
        if remote.size is not None and have < remote.size:
            raise ConnectionError(f"the connection ended after {have} of {remote.size} bytes")
        return True

    def check_same_file(self, responses: list[http.client.HTTPResponse], remote: Remote) -> None:
        linked = next((r.headers["X-Linked-ETag"] for r in responses if r.headers.get("X-Linked-ETag")), None)
        if linked is not None and linked.removeprefix("W/").strip('"') != remote.etag:
            raise _Contradiction("the file on the server has changed")
        if responses[-1].headers.get("Content-Encoding", "identity") != "identity":
            raise _Refused("the server compresses the file although it was asked not to")

    def at_the_end(self, response: http.client.HTTPResponse, remote: Remote, have: int) -> bool:
        """The server has no byte after `have`. True when the bytes that are here are the whole file."""
        if response.headers.get("Content-Range", "").replace(" ", "") == f"bytes*/{have}" and remote.verifiable:
            return True
        raise _Contradiction(f"the server has no bytes after {have}, but announced {remote.size}")

    def first_byte(self, response: http.client.HTTPResponse, remote: Remote, have: int) -> int:
        """The position of the response's first byte, at most `have`. Raises _Contradiction."""
        length = response.headers.get("Content-Length", "")
        etag = response.headers.get("ETag", "")
        start = 0
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
            start, total = (int(match[1]), match[2]) if match else (have, "*")
            if start > have or (total != "*" and remote.size not in (None, int(total))):
                raise _Contradiction(f"asked for bytes from {have}, received {response.headers.get('Content-Range')}")
            if match is None and remote.size is not None and length != str(remote.size - have):
                raise _Contradiction("a part of the file without its position")
        elif response.status != 200:
            raise _Contradiction(f"HTTP status {response.status} instead of the file")
        elif have and not remote.verifiable and etag != self.server_etag:
            self.part.unlink(missing_ok=True)
            self.server_etag = ""
            raise _Contradiction("the file on the server may have changed; it is downloaded from the start")
        if (
            remote.size is not None
            and length.isdecimal()
            and int(length) != remote.size - start
            and not remote.verifiable
        ):
            raise _Contradiction(f"{remote.size} bytes were announced, then {int(length) + start}")
        chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"
        if remote.size is None and not length and not chunked and not remote.verifiable:
            raise _Refused(
                "the server names neither a size nor a hash, so that nobody can tell whether the file is complete"
            )
        if not have and etag and not etag.startswith("W/") and etag != self.server_etag:
            self.server_etag = etag
            self.write_note(remote)
        return start

    def receive(
        self,
        response: http.client.HTTPResponse,
        remote: Remote,
        file: Any,
        have: int,
        skip: int,
        meter: _Meter,
        deadline: Deadline,
    ) -> None:
        since_extended = 0
        expected = response.length  # of the body; None for a chunked one
        while remote.size is None or have < remote.size:
            most = CHUNK if remote.size is None else min(CHUNK, skip + remote.size - have)
            piece = response.read1(most)  # read() discards received bytes when it times out
            if not piece:
                break
            if expected is not None:
                expected -= len(piece)
            since_extended += len(piece)
            if since_extended >= LEAST_BYTES:
                deadline.extend(self.patience.read_s())
                since_extended = 0
            if skip:  # the server ignores ranges: these bytes are here already
                dropped, piece = min(skip, len(piece)), piece[skip:]
                skip -= dropped
                meter(have)
            if piece:
                self.append(file, piece)
                have += len(piece)
                if have - self.most >= LEAST_BYTES or have == remote.size:
                    self.most = have
                    self.patience.new()
                meter(have)
        if remote.size is None and expected:
            raise ConnectionError(f"the connection ended {expected} bytes early")

    def append(self, file: Any, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                raise _disk_error(error, self.part) from error

    # xet

    def by_xet(self, remote: Remote, meter: _Meter) -> bool:
        """Whether the xet child has downloaded the file and its hash is right."""
        if not _xet_usable(remote) or size_of(self.part):
            return False
        scratch = _scratch_of(self.target)
        scratch.mkdir()
        try:
            reason = self.run_child(scratch, meter)
            for path in scratch.rglob("*"):
                if path.is_file() and not path.is_symlink() and path.stat().st_size == remote.size:
                    if _digest(path, remote, self.options.on_progress) == remote.sha256:
                        os.replace(path, self.part)
                        return True
                    reason = reason or "its file is damaged"
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        _xet_failed.append(reason or "it wrote no file")
        self.options.say(f"{self.target.name}: xet: {_xet_failed[-1]}; the download continues over HTTP")
        self.patience.new()
        return False

    def run_child(self, scratch: Path, meter: _Meter) -> str:
        """Run the xet child until it ends or its bytes stall; the reason for a failure, or ""."""
        job = {
            "repo_id": self.source.repo,
            "filename": self.source.file,
            "revision": self.source.revision,
            "repo_type": self.source.repo_type,
            "endpoint": endpoint(),
            "local_dir": str(scratch),
            "token": (token() or False) if self.options.token is None else (self.options.token or False),
        }
        limit_s = limits.seconds("xet_stall_s")
        with tempfile.TemporaryFile() as log:
            child = subprocess.Popen(
                XET_CHILD, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=os.name != "nt"
            )
            try:
                with contextlib.suppress(OSError):  # a child that has ended already
                    assert child.stdin is not None
                    child.stdin.write(json.dumps(job).encode() + b"\n")  # less than a pipe's buffer
                    child.stdin.flush()
                mark, since_s = 0, time.monotonic()
                while child.poll() is None:
                    done = _allocated(scratch)
                    if done - mark >= LEAST_BYTES:
                        mark, since_s = done, time.monotonic()
                        meter(min(done, meter.total))
                    elif limit_s and time.monotonic() - since_s > limit_s:
                        return f"no data for {limit_s:g} s, killed"
                    time.sleep(POLL_S / 5)
            finally:
                _kill(child)
            if child.returncode:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - 400))
                lines = log.read().decode(errors="replace").strip().splitlines()
                return lines[-1] if lines else f"exit code {child.returncode}"
        return ""

    # The end

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
        sync_folder(self.target.parent)


def _xet_usable(remote: Remote) -> bool:
    if not (remote.xet and remote.sha256 and remote.size and remote.size >= XET_LEAST_BYTES):
        return False
    if _xet_failed or _is_set("HF_HUB_DISABLE_XET"):
        return False
    return all(importlib.util.find_spec(name) is not None for name in ("hf_xet", "huggingface_hub"))


def _allocated(folder: Path) -> int:
    """Bytes that the files of a folder occupy: a file that was made large in advance has none."""
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            total += getattr(found, "st_blocks", found.st_size // 512) * 512
    return total


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if os.name == "nt":
                child.kill()
            else:
                os.killpg(child.pid, signal.SIGKILL)
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed while the kernel waits for a disk
        child.wait(limits.seconds("worker_term_s"))


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
