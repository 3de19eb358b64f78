"""Requests to a model hub that end: with an answer, or with the reason after `limit_s` seconds without anything new.

Decision: the standard library's client, with each redirect followed here, because the token goes to the endpoint's own
host and never to the host of a redirect, and because the hub's headers are on the first response and the file's on the
last. A socket's own timeout limits one read; a server that sends a byte now and then would never reach it. So a small
request has a limit as a whole, and who reads a file counts the bytes (download.py).

A hub that has sent this process nothing is out of reach (no network, a wrong proxy), which differs from a download that
stalls: all requests of the process together wait for it `hub_reach_s` seconds at most, and none of them asks again.
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
from guards.hub import DownloadError, Options, Remote, Source, ignore, offline, token

LEAST_BYTES = 1 << 16  # that a connection must bring in `download_read_s`; fewer are no progress
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
POLL_S = 0.5
FIRST_REPORT_S, REPORT_S = (
    4.0,
    30.0,
)  # a wait without anything new is on the log after so many seconds, and again after so many
REDIRECTS = (301, 302, 303, 307, 308)
BUSY = (408, 425, 429)


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


def follow(
    url: str, headers: dict[str, str], method: str, secret: str | None = None, read_s: float | None = None
) -> list[http.client.HTTPResponse]:
    """All responses on the way to a file; the token is sent to the first URL's host only.

    secret: the token; None: the stored one. read_s: the limit of one read; None: `download_read_s`. Raises URLError, TimeoutError, HTTPException.
    """
    secret = (token() or "") if secret is None else secret
    read_s = limits.seconds("download_read_s") if read_s is None else read_s
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_certificates()), _AnyStatus)
    responses: list[http.client.HTTPResponse] = []
    first = urllib.parse.urlsplit(url)
    for _ in range(10):
        here = urllib.parse.urlsplit(url)
        if here.scheme not in ("http", "https"):
            raise Refused(f"a redirect to {here.scheme}: is not followed")
        sent = {"User-Agent": "hangproof", "Accept-Encoding": "identity", **headers}
        if secret and (here.scheme, here.netloc) == (first.scheme, first.netloc):
            sent["Authorization"] = f"Bearer {secret}"
        request = urllib.request.Request(url, headers=sent, method=method)
        response = opener.open(request, timeout=read_s or None)
        responses.append(response)
        where = response.headers.get("Location")
        if response.status not in REDIRECTS or not where:
            return responses
        response.close()
        url = urllib.parse.urljoin(url, where)
    raise Refused("too many redirects; check HF_ENDPOINT")


class Reach:
    """Whether the hub has sent this process anything yet, and how long the process still waits for that."""

    def __init__(self) -> None:
        self.answered = False
        self.until_s: float | None = None  # monotonic; None: nothing has waited yet

    def left_s(self) -> float:
        """Seconds that are left; infinite once the hub has answered, and without a limit. The first call begins the wait."""
        limit_s = limits.seconds("hub_reach_s")
        if self.answered or (not limit_s and self.until_s is None):
            return math.inf
        if self.until_s is None:
            self.until_s = time.monotonic() + limit_s
        return max(0.0, self.until_s - time.monotonic())

    def give_up(self) -> None:
        """The hub is out of reach: no request waits for it from now on."""
        self.until_s = min(self.until_s or math.inf, time.monotonic())

    @property
    def given_up(self) -> bool:
        return not self.answered and self.until_s is not None and time.monotonic() >= self.until_s


reach = Reach()


class Patience:
    """Retries with growing pauses, until `limit_s` seconds have brought nothing new. `say` reports a wait."""

    reported_s = -math.inf  # by any of them: of nested waits only one is reported

    def __init__(self, limit_s: float, what: str, say: Callable[[str], None] = ignore) -> None:
        self.limit_s, self.what, self.say = limit_s, what, say
        self.reason = "no answer"
        self.new()

    def new(self) -> None:
        """There was progress."""
        self.since_s, self.pause_s = time.monotonic(), PAUSE_S
        self.report_s = FIRST_REPORT_S

    def left_s(self) -> float:
        """Seconds until the download fails; infinite without a limit."""
        return self.limit_s - (time.monotonic() - self.since_s) if self.limit_s else float("inf")

    def report(self) -> None:
        """Say what is waited for when that is due."""
        now_s = time.monotonic()
        waited_s = now_s - self.since_s
        if waited_s < self.report_s:
            return
        self.report_s += REPORT_S
        if now_s - Patience.reported_s >= FIRST_REPORT_S:
            Patience.reported_s = now_s
            limit = f"; giving up after {self.limit_s:.0f} s" if 0 < self.limit_s < math.inf else ""
            self.say(f"waited {waited_s:.0f} s for {self.what} ({self.reason}){limit}")

    def read_s(self) -> float:
        """The limit of one connection for `LEAST_BYTES`; 0: none."""
        given = [limit for limit in (limits.seconds("download_read_s"), self.limit_s) if limit]
        return min(given, default=0.0)

    def pause(self, error: Exception) -> bool:
        """Wait before the next attempt. False when there is none."""
        if isinstance(error, Refused) or _not_trusted(error):
            return False
        self.reason = _reason(error)
        left_s = self.left_s()
        if left_s <= 0:
            return False
        end_s = time.monotonic() + min(left_s, max(self.pause_s, getattr(error, "retry_s", 0.0)))
        while (rest_s := end_s - time.monotonic()) > 0:
            self.report()
            time.sleep(min(rest_s, POLL_S))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return True


def _not_trusted(error: Exception) -> bool:
    return isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error or type(error).__name__)


def failure(error: Exception, host: str, limit_s: float, kept: int, by_hand: str) -> DownloadError:
    reason = _reason(error)
    bytes_kept = f"; the {kept} bytes received are kept" if kept else ""
    hint = f", or {by_hand}" if by_hand else ""
    if isinstance(error, Refused) or _not_trusted(error):
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
    if offline():
        raise DownloadError("offline", f"HF_HUB_OFFLINE is set, so {source.repo} is not downloaded; unset it")
    host = urllib.parse.urlsplit(url).netloc
    hint = f", or {options.by_hand}" if options.by_hand else ""
    if reach.given_up:
        raise DownloadError("unreachable", f"{host} is out of reach, so {source.repo} is not downloaded{hint}")
    limit_s = min(options.limit_s or math.inf, reach.left_s())
    patience = Patience(limit_s, f"an answer about {source.repo} from {host}", options.say)

    def attempt() -> Any:
        responses = follow(url, {}, method, options.token, patience.read_s())
        reach.answered, patience.limit_s = True, options.limit_s
        with responses[-1]:
            check_status(responses[-1], source, options.by_hand, options.token)
            return read(responses)

    while True:
        at_most_s = min(patience.read_s() or math.inf, round(max(patience.left_s(), POLL_S), 1))
        try:
            # On a thread: nothing interrupts a name look-up.
            return call(attempt, seconds=at_most_s, what="an answer", waiting=patience.report)
        except NETWORK_ERRORS as error:
            reach.answered = reach.answered or _not_trusted(error)
            if patience.pause(error):
                continue
            if reach.answered:
                raise failure(error, host, patience.limit_s, 0, options.by_hand) from error
            reach.give_up()
            message = f"{host} is out of reach ({_reason(error)}), tried for {patience.limit_s:.0f} s"
            options.say(f"{message}; this process does not ask it again")
            raise DownloadError(
                "unreachable", f"{message}. Check the network, HF_ENDPOINT and the proxy{hint}"
            ) from error


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
    )
