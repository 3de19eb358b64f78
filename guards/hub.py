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
import urllib.request
from collections.abc import Iterator
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
LOGIN = re.compile(r"(?<=://)[^/\s@]+@")  # in an address
COMMIT, DIGEST = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
NETWORK_ERRORS = (ConnectionError, TimeoutError)


class DownloadError(Exception):
    """A download that ended without its file. The message says why and what to do.

    kind: "gated", "missing", "offline", "space", "disk", "stalled", "damaged" or "server".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(LOGIN.sub("", message))
        self.kind = kind

    def or_by_hand(self, how: str) -> str:
        """The message; where the hub is what fails, also how a user can put the file in its place."""
        return str(self) if self.kind in ("space", "disk", "damaged") else f"{self}, or {how}"


@dataclass(frozen=True)
class Remote:
    """A file of a repository, as the hub lists it. digest: of its contents (git's SHA-1, or SHA-256)."""

    repo: str
    commit: str
    name: str
    size: int
    digest: str

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"{endpoint()}/{self.repo}/resolve/{self.commit}/{urllib.parse.quote(self.name)}"


@dataclass(frozen=True)
class Progress:
    """Bytes of one file. total: 0 when unknown. speed: bytes per second."""

    name: str
    done: int
    total: int
    speed: float = 0.0


def endpoint() -> str:
    """The URL of the hub: `$HF_ENDPOINT`, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def shown() -> str:
    """`endpoint` for people: without the user and password that it can have."""
    return LOGIN.sub("", endpoint())


def page_of(repo: str) -> str:
    """The page of a repository, which shows its licence."""
    return f"{shown()}/{repo}"


def hub_home() -> Path:
    """The folder of the hub's library: `$HF_HOME`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    found = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return found.lower() in ("1", "true", "yes", "on")


def token() -> str | None:
    """The user's hub token; None when there is none."""
    found = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    return (found or read_text(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")).strip() or None


@contextlib.contextmanager
def ask(url: str, read_s: float, method: str = "GET", **headers: str) -> Iterator[Any]:
    """The response at the end of the redirects, whatever its status. Raises one of NETWORK_ERRORS.

    read_s: the limit of one read, infinite for none. A caller that limits the whole (`deadline.call`) gives twice that
    limit here: of two equal ones, either could end first, with its own reason. No redirect's host gets the token.
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
        proxy = urllib.request.getproxies().get(urllib.parse.urlsplit(url).scheme, "").rpartition("@")[2]  # no password
        through = f"; the environment names the proxy {proxy}" if proxy else ""
        raise ConnectionError(f"{str(error) or type(error).__name__}{through}") from error


class Patience:
    """Retries with growing pauses, until `limit_s` seconds (0: no limit) bring no progress; the log names the wait."""

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

    def pause(self, error: Exception, kept: int = 0) -> None:
        """Wait before the next attempt; DownloadError when there is none. kept: bytes of the file on the disk."""
        self.reason = str(error)
        host = urllib.parse.urlsplit(shown()).netloc
        bytes_kept = f"; the {kept} bytes received are kept" if kept else ""
        if "CERTIFICATE_VERIFY_FAILED" in self.reason:
            raise DownloadError("server", f"{host}: {self.reason}{bytes_kept}. Check HF_ENDPOINT and proxy") from error
        left_s = self.left_s()
        if left_s <= 0:
            text = f"no data from {host} for {self.limit_s:.0f} s ({self.reason}){bytes_kept}"
            raise DownloadError("stalled", f"{text}. Check the network and download again") from error
        end_s = time.monotonic() + min(left_s, self.pause_s)
        while (rest_s := end_s - time.monotonic()) > 0:
            self.report()
            time.sleep(min(rest_s, POLL_S))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def check_status(response: Any, repo: str, file: str = "") -> None:
    """Raises DownloadError for a refusal, with the licence's URL and what to do; ConnectionError for a busy server."""
    status, code, page = response.status_code, response.headers.get("X-Error-Code", ""), page_of(repo)
    if status in BUSY or status >= 500:
        raise ConnectionError(f"HTTP status {status}")
    if status in (401, 403) and code in ("RepoNotFound", "RevisionNotFound"):
        text = f"{page} does not exist, or is private; correct the name, or set HF_TOKEN to a token with access"
        raise DownloadError("missing", text)
    if status in (401, 403):
        text = f"no access to {repo} (HTTP status {status}): accept its licence at {page}, then set HF_TOKEN to your "
        text += "token (or run `.venv/bin/hf auth login`)"
        if token():
            text += ". A token is set: check that it belongs to the account that accepted the licence "
            text += "(`.venv/bin/hf auth whoami`), and that it may read gated repositories"
        raise DownloadError("gated", text)
    if status in (404, 410):
        raise missing(repo, file)
    if status not in (200, 206):
        raise DownloadError("server", f"{page}: HTTP status {status} for {file or repo}; check HF_ENDPOINT")


def missing(repo: str, file: str = "") -> DownloadError:
    """The error for a file or a repository that the hub does not have."""
    what = f"{file} of {repo}" if file else repo
    return DownloadError("missing", f"{what} does not exist at {page_of(repo)}; correct the name")


def listing(repo: str) -> dict[str, Remote]:
    """The files of a repository as they are now, by name. Raises DownloadError."""
    if offline():
        name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
        raise DownloadError("offline", f"{name} is set, so {repo} is not downloaded; unset it")
    limit_s = min(limits.seconds(name) or math.inf for name in ("download_stall_s", "hub_reach_s"))
    patience = Patience(limit_s, f"an answer about {repo} from {shown()}")
    while True:
        at_most_s = min(patience.read_s(), round(max(patience.left_s(), POLL_S), 1))
        try:
            # On a thread: nothing interrupts a name look-up.
            return call(_list, repo, 2 * at_most_s, seconds=at_most_s, what="an answer", waiting=patience.report)
        except NETWORK_ERRORS as error:
            patience.pause(error)


def _list(repo: str, read_s: float) -> dict[str, Remote]:
    """What `listing` returns, from one request. Raises one of NETWORK_ERRORS, too."""
    url = f"{endpoint()}/api/models/{repo}/revision/main?blobs=true"
    with ask(url, read_s) as response:
        check_status(response, repo)
        data = response.read()
    files = {}
    try:
        found = json.loads(data)
        for item in found["siblings"]:
            large = item.get("lfs") or {}
            commit, digest = str(found["sha"]), str(large.get("sha256") or item["blobId"]).lower()
            if not DIGEST.fullmatch(digest) or not COMMIT.fullmatch(commit):
                raise ValueError(f"{digest!r} is no hash, or {commit!r} no commit")
            name = safe(item["rfilename"]).as_posix()
            files[name] = Remote(repo, commit, name, int(large.get("size", item["size"])), digest)
        if not files:
            raise ValueError("it names no file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        text = f"{url} is not the list of files of a model hub ({type(error).__name__}: {error}); check HF_ENDPOINT"
        raise DownloadError("server", text) from error
    return files


def safe(name: str) -> Path:
    """A relative path inside a repository. Raises DownloadError for a name that would leave it."""
    parts = name.split("/")
    if "\\" in name or ":" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise DownloadError("server", f"{name!r} is not a name of a file in a repository")
    return Path(*parts)
