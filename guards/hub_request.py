"""Requests to a model hub that end: with an answer, or with the reason after a limit without progress.

Decision: the standard library's client, with each redirect followed here, because the token goes to the endpoint's own
host and never to the host of a redirect, and because the hub's headers are on the first response and the file's on the
last. A socket's own timeout limits one read; a server that sends a byte now and then would never reach it. So a small
request has a limit as a whole (`hub_reach_s`), and who reads a file counts the bytes (download.py).
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import math
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guards import limits
from guards.deadline import call
from guards.hub import DownloadError, Options, Remote, Source, offline, token

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
POLL_S = 0.5
FIRST_REPORT_S, REPORT_S = 4.0, 30.0
"""A wait without progress is on the log after the first, and again after each of the others."""
REDIRECTS = (301, 302, 303, 307, 308)
BUSY = (408, 425, 429)
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
Responses = list[http.client.HTTPResponse]


class Refused(urllib.error.URLError):
    """An answer that a retry does not change."""


class _Busy(ConnectionError):
    """The server asks for a pause. `retry_s`: how long, in seconds."""

    def __init__(self, status: int, retry_s: float) -> None:
        super().__init__(f"HTTP status {status}")
        self.retry_s = retry_s


NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


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


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns errors and redirects as they are: each response's headers are needed, and each redirect is checked."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def follow(url: str, headers: dict[str, str], method: str, read_s: float | None = None) -> Responses:
    """All responses on the way to a file; the token is sent to the first URL's host only.

    read_s: the limit of one read, infinite for none; None: `download_read_s`. Raises one of NETWORK_ERRORS.
    """
    secret, read_s = token(), read_s or limits.seconds("download_read_s") or math.inf
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_certificates()), _AnyStatus)
    responses: Responses = []
    first = urllib.parse.urlsplit(url)
    for _ in range(10):
        here = urllib.parse.urlsplit(url)
        if here.scheme not in ("http", "https"):
            raise Refused(f"a redirect to {here.scheme}: is not followed")
        sent = {"User-Agent": "hangproof", "Accept-Encoding": "identity", **headers}
        if secret and (here.scheme, here.netloc) == (first.scheme, first.netloc):
            sent["Authorization"] = f"Bearer {secret}"
        request = urllib.request.Request(url, headers=sent, method=method)
        response = opener.open(request, timeout=read_s if read_s < math.inf else None)
        responses.append(response)
        where = response.headers.get("Location")
        if response.status not in REDIRECTS or not where:
            return responses
        response.close()
        url = urllib.parse.urljoin(url, where)
    raise Refused("too many redirects; check HF_ENDPOINT")


class Patience:
    """Retries with growing pauses, until `limit_s` seconds (0: no limit) have brought no progress. `say` reports a wait."""

    def __init__(self, limit_s: float, what: str, say: Callable[[str], object]) -> None:
        self.limit_s, self.what, self.say = limit_s or math.inf, what, say
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
            self.say(f"waited {waited_s:.0f} s for {self.what} ({self.reason}){limit}")

    def pause(self, error: Exception, source: Source, options: Options, kept: int = 0) -> None:
        """Wait before the next attempt. Raises DownloadError when there is none. kept: bytes of the file on the disk."""
        reason = str(getattr(error, "reason", None) or error or type(error).__name__)
        host = urllib.parse.urlsplit(source.url).netloc
        bytes_kept = f"; the {kept} bytes received are kept" if kept else ""
        untrusted = isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError)
        if isinstance(error, Refused) or untrusted:
            text = f"{host}: {reason}{bytes_kept}. Check HF_ENDPOINT and the proxy{options.hint}"
            raise DownloadError("server", text) from error
        self.reason, left_s = reason, self.left_s()
        if left_s <= 0:
            text = f"no data from {host} for {self.limit_s:.0f} s ({reason}){bytes_kept}. Check the network and download again"
            raise DownloadError("stalled", f"{text}{options.hint}") from error
        end_s = time.monotonic() + min(left_s, max(self.pause_s, getattr(error, "retry_s", 0.0)))
        while (rest_s := end_s - time.monotonic()) > 0:
            self.report()
            time.sleep(min(rest_s, POLL_S))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def check_status(response: http.client.HTTPResponse, source: Source, options: Options) -> None:
    """Raises DownloadError for a refusal, with the licence's URL and what to do; ConnectionError for a busy server."""
    status, code = response.status, response.headers.get("X-Error-Code", "")
    name = f"{source.file} of {source.repo}" if source.file else source.repo
    if status in BUSY or status >= 500:
        text = response.headers.get("Retry-After", "")
        raise _Busy(status, float(text) if text.isdecimal() else 0.0)
    if status in (401, 403) and code in ("RepoNotFound", "RevisionNotFound"):
        text = f"{source.page} does not exist, or is private; correct the name, or set HF_TOKEN to a token with access"
        raise DownloadError("missing", f"{text}{options.hint}")
    if status in (401, 403):
        account = (
            ". A token is set: check that it belongs to the account that accepted the licence (`hf auth whoami`), and that "
            "it may read gated repositories"
            if token()
            else ""
        )
        raise DownloadError(
            "gated",
            f"no access to {source.repo} (HTTP status {status}): accept its licence at {source.page}, then set HF_TOKEN to "
            f"your token (or run `hf auth login`){options.hint}{account}",
        )
    if status in (404, 410):
        raise DownloadError("missing", f"{name} does not exist at {source.page}; correct the name{options.hint}")
    if status >= 400 and status != 416:
        raise DownloadError("server", f"{source.url}: HTTP status {status}; check HF_ENDPOINT")


def ask(source: Source, url: str, method: str, options: Options, read: Callable[[Responses], Any]) -> Any:
    """`read(responses)` of a small request, with retries. Raises DownloadError."""
    if offline():
        raise DownloadError(
            "offline", f"HF_HUB_OFFLINE is set, so {source.repo} is not downloaded; unset it{options.hint}"
        )
    host = urllib.parse.urlsplit(url).netloc
    limit_s = min(options.limit_s or math.inf, limits.seconds("hub_reach_s") or math.inf)
    patience = Patience(limit_s, f"an answer about {source.repo} from {host}", options.say)

    def attempt() -> Any:
        responses = follow(url, {}, method, patience.read_s())
        with responses[-1]:
            check_status(responses[-1], source, options)
            return read(responses)

    while True:
        at_most_s = min(patience.read_s(), round(max(patience.left_s(), POLL_S), 1))
        try:
            # On a thread: nothing interrupts a name look-up.
            return call(attempt, seconds=at_most_s, what="an answer", waiting=patience.report)
        except NETWORK_ERRORS as error:
            patience.pause(error, source, options)


def resolve(source: Source, options: Options) -> Remote:
    """Size, hash and commit of a file. Raises DownloadError."""
    return ask(source, source.url, "HEAD", options, remote_of)


def remote_of(responses: Responses) -> Remote:
    """What the headers of a file's responses say: the hub's own (X-Linked-…) before those of the host of its redirect."""

    def header(*names: str) -> str:
        found = (response.headers.get(name) for name in names for response in responses)
        return next((value for value in found if value), "")

    digest = header("X-Linked-ETag", "ETag").removeprefix("W/").strip('"').lower()
    size = header("X-Linked-Size") or responses[-1].headers.get("Content-Length") or ""
    if not DIGEST.fullmatch(digest) or not size.isdecimal():
        raise Refused("it names no size or no hash of the file, so it is not a model hub")
    return Remote(int(size), digest, header("X-Repo-Commit"))
