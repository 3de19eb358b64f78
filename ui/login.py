"""Who is let in: whoever sends the account's token (ui/token.py), or has logged in with the user name and password.

The token is for the account that started the server, and for its programs; a browser that opens the page with it gets a
cookie instead. A user name and password are for people elsewhere, who cannot read the token; with one, the page asks
for it and not for the token. The login replaces Gradio's, whose cookie other sites can use (SameSite=None), which never
slows down, and whose page loads all of Gradio. A session is a random text. The server keeps only its hash, together
with the password in the same hash, so that a copy of the file logs nobody in and a new password ends every session.
Sessions survive a restart of the server.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import math
import os
import secrets
import sys
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Scope

from runs.files import atomic_write
from ui.html import templates
from ui.token import cookie_value

HERE = Path(__file__).parent
SESSION_S = 30 * 24 * 3600
MAX_SESSIONS = 100  # the oldest is dropped
FORM_S = 30.0  # for a form to arrive
MAX_FIELD = 1000  # characters of a typed user name, password or token
READS = {"GET", "HEAD"}
PAGES = {"/", "/api/"}
ENDED = "Your login has ended. Log in again."
NO_TOKEN = (
    "The token is missing or wrong. Open the address that Hangproof printed when it started, or send the header "
    "'Authorization: Bearer TOKEN'. The token is in {} of the account that started Hangproof."
)
CHALLENGE = {"www-authenticate": "Bearer"}


class Waits(NamedTuple):
    """How long wrong passwords delay the next try: not for the first `free`, then `first_s`, doubled up to `most_s`.

    The count starts over after `forget_s` without a wrong password.
    """

    free: int
    first_s: float
    most_s: float
    forget_s: float


ADDRESS_WAITS = Waits(free=3, first_s=1, most_s=300, forget_s=1800)
ALL_WAITS = Waits(free=30, first_s=0.5, most_s=5, forget_s=300)  # short: an attack must not lock the owner out
ALL = ""  # the key of all addresses together
MAX_ADDRESSES = 1000


class Throttle:
    """Counts wrong passwords of each network and of all. One that has logged in does not wait for the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # By network: how many, when the last one was; the newest at the end.
        self.failures: dict[str, tuple[int, float]] = {}
        self.trusted: set[str] = set()

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try again; 0 when it may try now."""
        network = _network(address)
        own_s = self._wait_s(network, ADDRESS_WAITS)
        return own_s if network in self.trusted else max(own_s, self._wait_s(ALL, ALL_WAITS))

    def failed(self, address: str) -> None:
        """Count a wrong password."""
        for key, waits in ((_network(address), ADDRESS_WAITS), (ALL, ALL_WAITS)):
            count, last = self.failures.pop(key, (0, 0.0))
            self.failures[key] = (1 if self.clock() - last > waits.forget_s else count + 1, self.clock())
        if len(self.failures) > MAX_ADDRESSES:
            del self.failures[next(iter(self.failures))]

    def succeeded(self, address: str) -> None:
        """Forget the wrong passwords of an address that has logged in, and trust it."""
        self.failures.pop(_network(address), None)
        self.trusted.add(_network(address))

    def _wait_s(self, key: str, waits: Waits) -> float:
        count, last = self.failures.get(key, (0, 0.0))
        if count <= waits.free:
            return 0.0
        wait_s = min(waits.most_s, waits.first_s * 2.0 ** min(count - waits.free - 1, 60))
        return max(0.0, last + wait_s - self.clock())


def _network(address: str) -> str:
    """What counts as one address: all of an IPv6 /64, because one machine has all of them."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class Sessions:
    """The sessions of one user, kept in a file that only its owner may read."""

    def __init__(self, file: Path, credentials: tuple[str, str], now: Callable[[], float] = time.time) -> None:
        self.file, self.credentials, self.now = file, credentials, now
        self.expiry: dict[str, float] = {}  # hash: UTC seconds
        try:
            self.expiry = {str(key): float(end) for key, end in json.loads(file.read_text(encoding="utf-8")).items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            print(f"hangproof: {file} cannot be read ({error}); everyone must log in again", file=sys.stderr)

    def start(self) -> str:
        """A new session's token."""
        token = secrets.token_urlsafe(32)
        newest = sorted(self.expiry.items(), key=lambda one: one[1])[1 - MAX_SESSIONS :]
        self.expiry = {**dict(newest), self._hash(token): self.now() + SESSION_S}
        self._write()
        return token

    def valid(self, token: str) -> bool:
        """Whether the token's session has started, has not expired and was not ended."""
        return self.expiry.get(self._hash(token), 0.0) > self.now()

    def end(self, token: str) -> None:
        """End a session."""
        if self.expiry.pop(self._hash(token), None) is not None:
            self._write()

    def _hash(self, token: str) -> str:
        return hashlib.sha256("\0".join((token, *self.credentials)).encode("utf-8", "replace")).hexdigest()

    def _write(self) -> None:
        try:
            atomic_write(self.file, json.dumps(self.expiry), private=True)
        except OSError as error:  # the login is valid until the server stops
            print(f"hangproof: {self.file} cannot be written ({error.strerror})", file=sys.stderr)


class Login:
    """Decides who is let in, and sends the pages that ask for the token or the password."""

    def __init__(self, token: str | None, credentials: tuple[str, str] | None, folder: Path, port: int) -> None:
        """One of token and credentials is given, or both. folder: keeps the sessions, for each port in a file of its
        own, because two servers of a data folder would undo each other's logins."""
        self.token, self.credentials = token, credentials
        self.sessions = Sessions(folder / f".logins-{port}.json", credentials) if credentials else None
        self.throttle = Throttle()
        # A browser sends a cookie to every port of a host, so each server needs a name of its own.
        self.cookie = f"hangproof-{port}"
        # By path of the login; without a user name and password only the form for the token is there.
        self.answers: dict[str, Callable[[Request], Awaitable[Response]]] = {"/login": self.respond}
        if credentials is not None:
            self.answers |= {"/api/login": self.respond_to_program, "/logout": self.log_out}

    def admits(self, request: Request) -> bool:
        """Whether the request carries the token, or the cookie of a browser that has sent it or logged in."""
        cookie = request.cookies.get(self.cookie, "")
        if self.token is not None:
            scheme, _, value = request.headers.get("authorization", "").partition(" ")
            sent = [*request.query_params.getlist("token"), *([value.strip()] if scheme.lower() == "bearer" else [])]
            if any(same(one, self.token) for one in sent) or same(cookie, cookie_value(self.token)):
                return True
        return self.sessions is not None and self.sessions.valid(cookie)

    def without_token(self, request: Request) -> Response | None:
        """For a browser that opens an address with the token: its cookie, and the same address without the token, so
        that it is neither in the history nor in a link. None for every other request."""
        given = request.query_params.getlist("token")
        browser = is_page(request) or request.headers.get("sec-fetch-mode") == "navigate"
        if not given or not browser or request.method not in READS:
            return None
        last = _raw_path(request.scope).rpartition("/")[2]
        query = _without_token(request.url.query)
        response = RedirectResponse(f"./{last}" + (f"?{query}" if query else ""), 303, {"cache-control": "no-store"})
        if self.token is not None and any(same(one, self.token) for one in given):
            self._set(response, request, cookie_value(self.token), SESSION_S)
        return response

    def hidden(self, scope: Scope) -> Scope:
        """The request without the token, for the application behind: nothing there can keep or repeat it."""
        query = scope.get("query_string", b"")
        if b"token" in query:
            query = _without_token(query.decode("latin-1")).encode()
        headers = [(key, value) for key, value in scope["headers"] if key != b"authorization"]
        return {**scope, "query_string": query, "headers": headers}

    def refuse(self, request: Request) -> Response:
        """The answer to a request that is not let in."""
        if not is_page(request) and (self.credentials or "text/html" not in request.headers.get("accept", "")):
            return JSONResponse(
                {"error": ENDED if self.credentials else NO_TOKEN.format(token_place())}, 401, CHALLENGE
            )
        up = "../" * (_raw_path(request.scope).count("/") - 1)
        if request.headers.get("sec-fetch-site") == "cross-site":
            return page("again")
        if self.credentials is None:
            return page("token", _own_query(request.url.query), action=f"{up}login")
        shown = _own_query(request.url.query)
        ended = {"ended": "1"} if self.cookie in request.cookies else {}
        query = urlencode({**ended, **({"next": shown} if shown else {})})
        return RedirectResponse(f"{up}login" + (f"?{query}" if query else ""), 303)

    async def respond_to_program(self, request: Request) -> Response:
        """The session's cookie for the API's clients, as Gradio's login answers them: 200, or 401 with the reason."""
        answer = await self.respond(request)
        if answer.status_code != 303:
            text = "Too many wrong passwords; wait" if answer.status_code == 429 else "Wrong user name or password"
            return JSONResponse({"detail": text}, answer.status_code)
        accepted = JSONResponse({"success": True})
        accepted.raw_headers += [(key, value) for key, value in answer.raw_headers if key == b"set-cookie"]
        return accepted

    async def respond(self, request: Request) -> Response:
        """The page that asks for the password or the token; for POST the cookie, or the page with the reason."""
        reads = request.method in READS
        shown = _own_query(request.query_params.get("next", ""))
        if (reads or self.credentials is None) and self.admits(request):
            return RedirectResponse(_home(shown), 303)
        if reads:
            if request.headers.get("sec-fetch-site") == "cross-site":
                return page("again")
            said = {"out": "You are logged out.", "ended": "Your login has ended. Log in again to continue."}
            info = next((text for key, text in said.items() if request.query_params.get(key)), "")
            return page("password", shown, 200, {}, info=info) if self.credentials else page("token", shown)
        if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return PlainTextResponse("Send the form of the login page.", 401 if self.credentials is None else 415)
        try:
            async with asyncio.timeout(FORM_S):  # whoever sends it is not let in yet, and could keep the connection
                form = await request.form()
        except TimeoutError:
            return PlainTextResponse("The form did not arrive completely. Send it again.", 408)
        shown = _own_query(str(form.get("next", "")))
        if self.credentials is None:
            return self._with_token(request, str(form.get("token", ""))[:MAX_FIELD], shown)
        address = request.client.host if request.client else ""
        typed = [str(form.get(name, ""))[:MAX_FIELD] for name in ("username", "password")]
        # No await from here on: of many requests at the same time, each sees the failures of those before it.
        wait = math.ceil(self.throttle.wait_s(address))
        if wait:
            text = f"Too many wrong passwords. Wait {wait} {'second' if wait == 1 else 'seconds'}, then try again."
            return page("password", shown, 429, {"Retry-After": str(wait)}, user=typed[0], problem=text)
        right = [same(*pair) for pair in zip(typed, self.credentials, strict=True)]
        if not all(right) or self.sessions is None:
            self.throttle.failed(address)
            text = "Wrong user name or password. Try again."
            return page("password", shown, 401, {}, user=typed[0], problem=text)
        self.throttle.succeeded(address)
        return self._let_in(request, shown, self.sessions.start())

    def _with_token(self, request: Request, typed: str, shown: str) -> Response:
        """The answer to the form for the token; the complete address from the terminal does as well."""
        if self.token is None or not same(typed.rpartition("token=")[2].strip(), self.token):
            return page("token", shown, problem="This is not the token. Copy it again.")
        return self._let_in(request, shown, cookie_value(self.token))

    async def log_out(self, request: Request) -> Response:
        """End the session of this browser."""
        if self.sessions is not None:
            self.sessions.end(request.cookies.get(self.cookie, ""))
        response = RedirectResponse("login?out=1", 303)
        self._set(response, request, "", 0)
        return response

    def _let_in(self, request: Request, shown: str, cookie: str) -> Response:
        response = RedirectResponse(_home(shown), 303)
        self._set(response, request, cookie, SESSION_S)
        return response

    def _set(self, response: Response, request: Request, value: str, seconds: int) -> None:
        # The browser uses HTTPS, directly or to a proxy. A forged header only affects the cookie of its sender.
        scheme = request.headers.get("x-forwarded-proto") or request.scope["scheme"]
        secure = scheme.split(",")[0].strip().lower() == "https"
        response.set_cookie(
            self.cookie, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=secure
        )


def is_page(request: Request) -> bool:
    """Whether a browser shows the answer as a page, which is then one that asks for the token or the password."""
    return request.scope["path"] in PAGES and request.method in READS


def token_place() -> str:
    """Where the token is, as its account can find it; without the account's name."""
    if os.name == "nt":
        return r"%APPDATA%\hangproof\token"
    return f"{'$XDG_CONFIG_HOME' if os.environ.get('XDG_CONFIG_HOME') else '~/.config'}/hangproof/token"


def _home(query: str) -> str:
    """The page's address, from that of the login."""
    return "./" + (f"?{query}" if query else "")


def _raw_path(scope: Scope) -> str:
    """The path as it was sent: a decoded %2F is no level of it."""
    return (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")


def _without_token(query: str) -> str:
    return urlencode([(key, value) for key, value in parse_qsl(query, keep_blank_values=True) if key != "token"])


def _own_query(text: str) -> str:
    """A query of the page as a new one. No other part of an address is kept, so it cannot lead to another site."""
    return _without_token(text[:500])


def same(given: str, expected: str) -> bool:
    """Compare in a time that depends on neither text nor length."""
    return hmac.compare_digest(*(hashlib.sha256(one.encode("utf-8", "replace")).digest() for one in (given, expected)))


def page(
    kind: str, shown: str = "", status: int = 401, headers: Mapping[str, str] = CHALLENGE, **values: str
) -> Response:
    """A page of login.html, which has no script and loads no other file.

    Args:
        kind: "password", "token", or "again": it opens its own address again. A browser sends the cookie only on the way
            from a page of this server, and not with a link of another site, which is thus followed in two steps.
        shown: the query of the page that is opened afterwards. values: the template's others.
    """
    from ui.page import ICON, MARK

    css = (HERE / "login.css").read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )
    known = {"kind": kind, "shown": shown, "user": "", "problem": "", "info": "", "action": "login", **values}
    known |= {"icon": ICON, "css": Markup(css), "mark": Markup(MARK)}
    known |= {"max_field": str(MAX_FIELD), "token_place": token_place()}
    closed = {"content-security-policy": policy, "cache-control": "no-store"}
    return HTMLResponse(templates().get_template("login.html").render(known), status, {**headers, **closed})
