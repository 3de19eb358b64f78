"""One request to a provider's HTTP API: the key in a header only, retried where that is safe, errors as sentences.

Decision: urllib and forty lines instead of two vendors' client libraries. Both APIs are a handful of JSON requests, and what
matters here is what those libraries do not promise: the key never appears in a URL, a log or an error; a redirect is not
followed with it; a request that creates a machine is repeated only after a look at the provider's list for the machine's name.
"""

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from launch.common import LaunchError

TIMEOUT_S = 30.0
PATIENCE_S = 120.0  # for all tries of one request
PAUSE_S = 1.0  # before the second try; doubled each time
MAX_PAUSE_S = 30.0
LOOKS_COUNT = 3  # at a provider's list for a machine whose creation nobody confirmed
MAX_ANSWER_BYTES = 16_000_000


class ApiError(LaunchError):
    """The provider refused. `status`: of HTTP, 0 without an answer; `lost`: the answer was lost, or never came;
    `wait_s`: the provider asks to wait this long."""

    def __init__(self, message: str, status: int = 0, lost: bool = False, wait_s: float = 0.0):
        super().__init__(message)
        self.status, self.lost, self.wait_s = status, lost, wait_s

    @property
    def unknown(self) -> bool:
        """Whether the provider may have done what was asked: the answer was lost, or a server on the way failed."""
        return self.lost or self.status >= 500


@dataclass(frozen=True)
class Api:
    """A provider. url: https, or plain http on loopback; key: of the account or of one machine."""

    name: str
    url: str
    key: str
    pause_s: float = PAUSE_S
    patience_s: float = PATIENCE_S
    sleep: Callable[[float], None] = time.sleep

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer to a request that may be repeated; {} for an empty one. One that rents a machine: `rent`.

        Raises:
            ApiError: the provider refused, or did not answer within `patience_s`.
        """
        until_s, pause_s = time.monotonic() + self.patience_s, self.pause_s
        while True:
            try:
                return self.once(method, path, body)
            except ApiError as error:
                passing = error.status == 429 or error.unknown
                wait_s = max(pause_s, error.wait_s)
                if not passing or time.monotonic() + wait_s > until_s:
                    raise
            self.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def once(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The answer to one request. Raises ApiError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Accept": "application/json", "User-Agent": "hangproof"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with _opener(self.url).open(request, timeout=TIMEOUT_S) as reply:
                return _json(reply.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(method, path, error) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            message = f"{self.name} does not answer ({method} {path}: {reason}); check the network"
            if method != "GET":
                message += f" and the console of {self.name}: the request may have been carried out"
            raise ApiError(message, lost=True) from None

    def _refused(self, method: str, path: str, error: urllib.error.HTTPError) -> ApiError:
        try:
            text = error.read(4000).decode("utf-8", "replace")
        except (OSError, HTTPException):
            text = ""
        why = _reason(text).replace(self.key, "…") if self.key else _reason(text)
        what = {
            401: f"{self.name} does not accept the key; make a new one in its console",
            402: f"{self.name}: the balance of the account is too low",
            403: f"{self.name}: the key may not do this ({method} {path}); make one with write access",
            429: f"{self.name}: too many requests; try again in a minute",
        }.get(error.code, f"{self.name} refused {method} {path}")
        after = error.headers.get("Retry-After", "")
        wait_s = min(float(after), MAX_PAUSE_S) if after.isdigit() else 0.0
        return ApiError(f"{what} (HTTP {error.code}{': ' + why if why else ''})", error.code, wait_s=wait_s)


def rent(
    api: Api, method: str, path: str, body: dict[str, Any], name: str, find: Callable[[], dict[str, Any] | None]
) -> dict[str, Any]:
    """The machine that a request creates: exactly one, also where the answer is lost or a proxy answers with an error.

    Args:
        name: of the machine, and of no other. find: what the provider's list has of it, None where it is not there.

    Raises:
        ApiError: the provider refused. LaunchError: nobody knows whether there is a machine; the message has its name.
    """
    until_s, pause_s = time.monotonic() + api.patience_s, api.pause_s
    while True:
        try:
            return api.once(method, path, body)
        except ApiError as error:
            if error.status != 429 and not error.unknown:
                raise
            why, looks, wait_s = error, LOOKS_COUNT if error.unknown else 0, error.wait_s
        for _ in range(looks):  # a new machine may appear in the list late
            api.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                found = find()
            except ApiError as error:
                raise LaunchError(
                    f"{why}; its list of machines cannot be read either ({error}). {_look_for(api, name)}"
                ) from error
            if found is not None:
                return found
        if time.monotonic() + max(pause_s, wait_s) > until_s:
            raise LaunchError(f"{why}. {_look_for(api, name)}" if why.unknown else f"{why}") from why
        if not looks:
            api.sleep(max(pause_s, wait_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _look_for(api: Api, name: str) -> str:
    return (
        f"Look for the machine {name} in the console of {api.name} before you try again: if it is there, it costs money"
    )


def entries(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a list of machines. ApiError: the answer holds none, so it says nothing about a machine."""
    found = next((value for value in answer.values() if isinstance(value, list)), None)
    if found is None:
        raise ApiError("the answer is no list of machines")
    return [one for one in found if isinstance(one, dict)]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would send the key along to the new address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """An opener for `url`. A proxy of the environment is used, but never for loopback. Raises ApiError for plain http."""
    parts = urllib.parse.urlsplit(url)
    loopback = parts.hostname in ("127.0.0.1", "localhost", "::1")
    if parts.scheme != "https" and not loopback:
        raise ApiError(f"{url}: the key is sent over https only; fix the address")
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    return urllib.request.build_opener(*handlers, *([urllib.request.ProxyHandler({})] if loopback else []))


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data or b"{}")
    except ValueError:
        raise ApiError("the answer is not JSON; a proxy may stand in between") from None
    return value if isinstance(value, dict) else {"items": value}


def _reason(text: str) -> str:
    """What a refusal says, in one line: RunPod sends RFC 9457 problems, Vast {"error", "msg"}, both also plain text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = {"detail": text}
    if not isinstance(value, dict):
        value = {"detail": str(value)}
    parts = [str(value.get("detail") or value.get("msg") or value.get("message") or value.get("title") or "")]
    if isinstance(value.get("errors"), list):
        parts += map(str, value["errors"][:3])
    return " ".join(" ".join(parts).split())[:500]


def key_of(variable: str, where: str) -> str:
    """The key in an environment variable.

    Raises:
        LaunchError: it is not set; says where a user gets one.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise LaunchError(
            f"{variable} is not set; make a key at {where} and set it in the environment, not in a file of the run"
        )
    if not key.isascii() or not key.isprintable() or any(c.isspace() for c in key):
        raise LaunchError(f"{variable} is not a key: it contains spaces or other unusual characters")
    return key
