"""A model hub: what names a file there, what the hub says about it, and requests that end: with an answer, or with the
reason after a limit without progress.

The hub's settings (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`…) are read as its library reads them, but each time
anew: a login on the page changes them in a running process.

Decision: the client of the hub's own library, which follows redirects and knows proxies and certificates. Its timeout
limits one read; a server that sends a byte now and then would never reach it. So a small request has a limit as a whole
(`hub_reach_s`), and who reads a file counts the bytes (download.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guards import limits
from guards.deadline import call
from guards.metrics import say
from guards.reading import read_text

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
POLL_S = 0.5
FIRST_REPORT_S, REPORT_S = 4.0, 30.0
"""A wait without progress is on the log after the first, and again after each of the others."""
BUSY = (408, 425, 429)
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
NETWORK_ERRORS = (ConnectionError, TimeoutError)


class DownloadError(Exception):
    """A download that ended without its file. The message says why and what to do.

    kind: "gated", "missing", "offline", "space", "disk", "stalled", "damaged" or "server".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Source:
    """A file of a hub repository."""

    repo: str
    file: str
    revision: str = "main"

    @property
    def page(self) -> str:
        """The repository's page, which shows its licence."""
        return f"{endpoint()}/{self.repo}"

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"{self.page}/resolve/{urllib.parse.quote(self.revision, safe='')}/{urllib.parse.quote(self.file)}"


@dataclass(frozen=True)
class Remote:
    """What the hub says about a file: bytes, and the hash of its contents (git's SHA-1 or SHA-256)."""

    size: int
    digest: str


@dataclass(frozen=True)
class Progress:
    """Bytes of one file. total: 0 when unknown. speed: bytes per second."""

    name: str
    done: int
    total: int
    speed: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end; None when unknown."""
        return (self.total - self.done) / self.speed if self.speed else None


@dataclass(frozen=True)
class Options:
    """How to download. by_hand: where a user can put the file, for messages."""

    on_progress: Callable[[Progress], object] = lambda _: None
    by_hand: str = ""

    @property
    def hint(self) -> str:
        """`by_hand` as the end of a message."""
        return f", or {self.by_hand}" if self.by_hand else ""


def endpoint() -> str:
    """The URL of the hub: `$HF_ENDPOINT`, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_home() -> Path:
    """The folder of the hub's library: `$HF_HOME`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def token() -> str | None:
    """The user's hub token; None when there is none."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"].strip()
    return read_text(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token").strip() or None


@contextlib.contextmanager
def ask(url: str, read_s: float, method: str = "GET", **headers: str) -> Iterator[Any]:
    """The response at the end of the redirects, whatever its status. Raises one of NETWORK_ERRORS.

    read_s: the limit of one read, infinite for none. A caller that limits the whole (`deadline.call`) gives twice that
    limit here: of two equal ones, either could end first, with a reason of its own. The token goes to the hub's host, never to that of a redirect.
    """
    from huggingface_hub.utils import get_session, httpx

    sent = {"User-Agent": "hangproof", "Accept-Encoding": "identity", **headers}
    if secret := token():
        sent["Authorization"] = f"Bearer {secret}"
    try:
        limit_s = read_s if read_s < math.inf else None
        with get_session().stream(method, url, headers=sent, timeout=limit_s, follow_redirects=True) as response:
            yield response
    except httpx.UnsupportedProtocol as error:
        raise DownloadError("server", f"{url}: {error}; check HF_ENDPOINT") from error
    except httpx.RequestError as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


class Patience:
    """Retries with growing pauses, until `limit_s` seconds (0: no limit) bring no progress. A wait is reported in the log."""

    def __init__(self, limit_s: float, what: str) -> None:
        self.limit_s, self.what = limit_s or math.inf, what
        self.reason = "no answer"
        self.progress()

    def progress(self) -> None:
        """There was progress."""
        self.since_s, self.pause_s, self.report_s = time.monotonic(), PAUSE_S, FIRST_REPORT_S

    def left_s(self) -> float:
        """Seconds until the download fails."""
        return self.limit_s - (time.monotonic() - self.since_s)

    def read_s(self) -> float:
        """The limit of one connection without progress; infinite where there is none."""
        return min(limits.seconds("download_read_s") or math.inf, self.limit_s)

    def report(self) -> None:
        """Say what is waited for when that is due."""
        waited_s = time.monotonic() - self.since_s
        if waited_s >= self.report_s:
            self.report_s += REPORT_S
            limit = f"; giving up after {self.limit_s:.0f} s" if self.limit_s < math.inf else ""
            say(f"waited {waited_s:.0f} s for {self.what} ({self.reason}){limit}")

    def pause(self, error: Exception, options: Options, kept: int = 0) -> None:
        """Wait before the next attempt; DownloadError when there is none. kept: bytes of the file on the disk."""
        self.reason = str(error)
        host = urllib.parse.urlsplit(endpoint()).netloc
        bytes_kept = f"; the {kept} bytes received are kept" if kept else ""
        if "CERTIFICATE_VERIFY_FAILED" in self.reason:
            text = f"{host}: {self.reason}{bytes_kept}. Check HF_ENDPOINT and the proxy{options.hint}"
            raise DownloadError("server", text) from error
        left_s = self.left_s()
        if left_s <= 0:
            text = f"no data from {host} for {self.limit_s:.0f} s ({self.reason}){bytes_kept}"
            raise DownloadError("stalled", f"{text}. Check the network and download again{options.hint}") from error
        end_s = time.monotonic() + min(left_s, self.pause_s)
        while (rest_s := end_s - time.monotonic()) > 0:
            self.report()
            time.sleep(min(rest_s, POLL_S))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def check_status(response: Any, source: Source, options: Options) -> None:
    """Raises DownloadError for a refusal, with the licence's URL and what to do; ConnectionError for a busy server."""
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    name = f"{source.file} of {source.repo}" if source.file else source.repo
    if status in BUSY or status >= 500:
        raise ConnectionError(f"HTTP status {status}")
    if status in (401, 403) and code in ("RepoNotFound", "RevisionNotFound"):
        text = f"{source.page} does not exist, or is private; correct the name, or set HF_TOKEN to a token with access"
        raise DownloadError("missing", f"{text}{options.hint}")
    if status in (401, 403):
        check = ". A token is set: check that it belongs to the account that accepted the licence (`hf auth whoami`), "
        check += "and that it may read gated repositories"
        text = f"no access to {source.repo} (HTTP status {status}): accept its licence at {source.page}, then set "
        text += f"HF_TOKEN to your token (or run `hf auth login`){options.hint}{check if token() else ''}"
        raise DownloadError("gated", text)
    if status in (404, 410):
        raise missing(name, source, options)
    if status not in (200, 206):
        raise DownloadError("server", f"{source.url}: HTTP status {status}; check HF_ENDPOINT")


def missing(name: str, source: Source, options: Options) -> DownloadError:
    """The error for a file or a repository that the hub does not have."""
    return DownloadError("missing", f"{name} does not exist at {source.page}; correct the name{options.hint}")


def listing(source: Source, options: Options) -> tuple[str, dict[str, Remote]]:
    """The commit and the files of a repository, by name. Raises DownloadError."""
    if offline():
        text = f"HF_HUB_OFFLINE is set, so {source.repo} is not downloaded; unset it{options.hint}"
        raise DownloadError("offline", text)
    limit_s = min(limits.seconds(name) or math.inf for name in ("download_stall_s", "hub_reach_s"))
    patience = Patience(limit_s, f"an answer about {source.repo} from {endpoint()}")
    while True:
        at_most_s = min(patience.read_s(), round(max(patience.left_s(), POLL_S), 1))
        try:
            # On a thread: nothing interrupts a name look-up.
            return call(
                _list, source, options, 2 * at_most_s, seconds=at_most_s, what="an answer", waiting=patience.report
            )
        except NETWORK_ERRORS as error:
            patience.pause(error, options)


def _list(source: Source, options: Options, read_s: float) -> tuple[str, dict[str, Remote]]:
    """What `listing` returns, from one request. Raises one of NETWORK_ERRORS, too."""
    revision = urllib.parse.quote(source.revision, safe="")
    url = f"{endpoint()}/api/models/{source.repo}/revision/{revision}?blobs=true"
    with ask(url, read_s) as response:
        check_status(response, Source(source.repo, "", source.revision), options)
        data = response.read()
    try:
        found = json.loads(data)
        commit, files = str(found["sha"]), dict(_entry(item) for item in found["siblings"])
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise ValueError("it names no commit")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{url} is not the list of files of a model hub ({type(error).__name__}: {error}); check HF_ENDPOINT"
        raise DownloadError("server", text) from error
    return commit, files


def _entry(item: dict[str, Any]) -> tuple[str, Remote]:
    """The name of a file in the hub's list, and what the list says about it."""
    large = item.get("lfs") or {}
    digest = str(large.get("sha256") or item["blobId"]).lower()
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no hash")
    return safe(item["rfilename"]).as_posix(), Remote(int(large.get("size", item["size"])), digest)


def safe(name: str) -> Path:
    """A relative path inside a repository. Raises DownloadError for a name that would leave it."""
    parts = name.split("/")
    if "\\" in name or ":" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise DownloadError("server", f"{name!r} is not a name of a file in a repository")
    return Path(*parts)
