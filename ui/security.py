"""Which requests reach the page, and with which headers its answers leave.

A request can start programs on this machine, and any website can make its visitor's browser send requests here: under
its own host name (DNS rebinding), from another origin (a form needs no permission), or inside a frame. So each request
must name a known host, come from this page itself, carry the token or a login (ui/login.py), use a route that the page
needs, and end within a size limit. The class is the outermost layer, in front of Gradio's own CORS answers. It buffers
only the page itself.
"""

import asyncio
import ipaddress
import re
import secrets
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ui import health, scripts, served
from ui.login import PAGES, READS, Login

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")

API = "/gradio_api/"
CALLS = (f"{API}component_server", f"{API}component_server/")  # the latter as Gradio's script calls it


def _gradio(top: str) -> dict[str, set[str]]:
    """What a Gradio app below a path serves."""
    files = ("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/assets/*", "/static/*", "/svelte/*")
    reads = ("app_id", "info", "startup-events", "theme.css", "heartbeat/*", "queue/data", "upload_progress")
    posts = ("queue/join", "cancel", "reset", "upload", "run/*")
    return {
        **{f"{top}{path}": READS for path in files},
        **{f"{top}{API}{path}": READS for path in reads},
        **{f"{top}{API}{path}": {"POST"} for path in posts},
        f"{top}{API}call/*": {"POST", *READS},
    }


# Path or, with a final *, prefix: methods. Gradio serves more (its API's description, proxy and login, MCP, tools for
# developers); a route that the page does not need is not reachable. The API (ui/api/) is a Gradio app of its own.
ROUTES: dict[str, set[str]] = {
    **_gradio(""),
    **_gradio("/api"),
    "/robots.txt": READS,
    "/healthz": READS,
    **{path: {"POST"} for path in CALLS},
    f"{served.PREFIX}*": READS,
    f"{scripts.PREFIX}*": READS,
    f"{served.ARCHIVES}*": READS,
    "/login": {"POST", *READS},
    "/logout": {"POST"},
    "/api": READS,
    "/api/login": {"POST"},
}
LOGIN = {"/login", "/logout", "/api/login"}
UPLOADS = {f"{API}upload", f"/api{API}upload"}
# Of forms of the login; of captions, fields and masks. An event is small, and Gradio walks through it: 3 MB of short
# lists keep all other requests waiting for seconds.
MOST_BYTES = {**dict.fromkeys(LOGIN, 16_000), **dict.fromkeys(CALLS, 32_000_000)}
EVENT_BYTES = 4_000_000
SILENT_S = 30.0  # without a request
MCP = f"/api{API}mcp"
EXACT = {path: methods for path, methods in ROUTES.items() if not path.endswith("*")}
PREFIXES = {path[:-1]: methods for path, methods in ROUTES.items() if path.endswith("*")}

HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Gradio makes functions from text ('unsafe-eval') and style attributes ('unsafe-inline'). A script element needs the
# nonce, so markup that gets into the page by a fault runs no script.
PAGE_POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)


class Hosts:
    """The names under which this server may be opened."""

    def __init__(self, listen: bool, extra: tuple[str, ...] = ()) -> None:
        self.listen, self.extra = listen, extra

    def allowed(self, host: str) -> bool:
        """Whether the Host header names this server."""
        name = _host_name(host)
        if name is None:
            return False
        if name in (*LOOPBACK, *self.extra) or any(name.endswith(one[1:]) for one in self.extra if one[:2] == "*."):
            return True
        return self.listen and name in machine_names()


def machine_names() -> frozenset[str]:
    """The names and addresses of this machine, which can change while the server runs."""
    import psutil

    name = socket.gethostname().lower()
    found = {name, f"{name}.local"} - {"", ".local"}
    for interface in psutil.net_if_addrs().values():
        for one in interface:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.add(str(ipaddress.ip_address(one.address.partition("%")[0])))
    return frozenset(found)


def valid_host(text: str) -> str | None:
    """A value of --allow-host as it is compared: a name, `*.name` or an address, without scheme and port; else None."""
    text = text.strip().lower()
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        return text if HOST_NAME.fullmatch(text) else None


def _host_name(host: str) -> str | None:
    """The name of a Host header; None when it is not a plain `name` or `name:port`."""
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return None if name is None or parts.netloc != host or set(host) & set("@/?#\\ ") else name


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names the server of a Host header, in any scheme: a proxy can speak HTTPS."""
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and _without_default(rest) == _without_default(host)


def _without_default(authority: str) -> str:
    return re.sub(r":(80|443)$", "", authority.lower())


def own_request(headers: Headers, method: str) -> bool:
    """Whether a request comes from this page, the address bar or a program, or is a link that was followed."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or len(origins) > 1 or any(not same_origin(origin, hosts[0]) for origin in origins):
        return False
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return True
    return (
        method in READS and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )


def methods_of(path: str, mcp: bool = False) -> set[str]:
    """The methods that are served for a path; none for an unknown path. mcp: whether the MCP server is on."""
    if mcp and (path == MCP or path.startswith(f"{MCP}/")):
        return {"POST", "DELETE", *READS}
    return EXACT.get(path) or next((found for prefix, found in PREFIXES.items() if path.startswith(prefix)), set())


class Guard:
    """ASGI application in front of the page."""

    def __init__(self, app: ASGIApp, hosts: Hosts, upload: int, login: Login | None = None, mcp: bool = False) -> None:
        """upload: the bytes of the largest upload."""
        self.app, self.hosts, self.upload, self.login, self.mcp = app, hosts, upload, login, mcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":  # the page uses none
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._most(scope["path"]), scope["path"] in UPLOADS)
        request = Request(scope, body.receive)
        outgoing = _Outgoing(send, scope["path"], self.login is not None, body)
        try:
            response = self._refusal(request) or await self._own(request)
            if response is not None:
                await response(scope, receive, outgoing.send)
            else:
                # Gradio's CORS answers depend on the Origin, which has been checked here.
                kept = [(key, value) for key, value in scope["headers"] if key != b"origin"]
                passed = {**scope, "headers": kept}
                await self.app(self.login.hidden(passed) if self.login else passed, body.receive, outgoing.send)
        except MultiPartException:
            body.too_large = True  # or has more fields than any form; answered below
        except ClientDisconnect:
            return
        except RuntimeError as error:
            if not (outgoing.started and isinstance(error.__cause__, HTTPException)):
                raise
            # Gradio's streams of answers (queue/data, call) end so where the page was left or the event is unknown.
            await outgoing.send({"type": "http.response.body", "body": b"", "more_body": False})
        if body.too_large and not outgoing.started:
            await _too_large(body.limit)(scope, receive, _Outgoing(send, "", False, None).send)

    def _refusal(self, request: Request) -> Response | None:
        path, headers = request.scope["path"], request.headers
        if not self.hosts.allowed(headers.get("host", "")):
            return PlainTextResponse(self._unknown_host(request), 403)
        if not own_request(headers, request.method):
            return PlainTextResponse(
                "Another website sent this request, so Hangproof refuses it. Behind a proxy: pass the Host header on.",
                403,
            )
        methods = methods_of(path, self.mcp)
        # Before anything else is said: without the token, an unknown address gets the same answer as a known one.
        login = self.login.answers if self.login else {}
        asks = path in login and path != "/logout" and request.method in methods  # for the token or the password
        if self.login and not asks and not self.login.admits(request):
            return self.login.refuse(request)
        if not methods or (path in LOGIN and path not in login):
            return PlainTextResponse("Hangproof has no such page.", 404)
        if request.method not in methods:
            return PlainTextResponse("This method is not allowed here.", 405, {"allow": ", ".join(sorted(methods))})
        if int(headers.get("content-length", "0")) > self._most(path):  # uvicorn has refused what is no number
            return _too_large(self._most(path))
        return self.login.without_token(request) if self.login else None

    def _most(self, path: str) -> int:
        """The bytes of the largest body that a request may have."""
        return self.upload if path in UPLOADS else MOST_BYTES.get(path, EVENT_BYTES)

    async def _own(self, request: Request) -> Response | None:
        """The answer to a request that Gradio does not get."""
        path = request.scope["path"]
        if path == "/healthz":
            return await health.respond()
        if path == "/api":
            return RedirectResponse("api/", 307)
        if self.login and path in self.login.answers:
            return await self.login.answers[path](request)
        if path.startswith(scripts.PREFIX):
            return scripts.respond(request)
        if path.startswith(served.ARCHIVES):
            return await served.respond_archive(request)
        return await served.respond(request) if path.startswith(served.PREFIX) else None

    def _unknown_host(self, request: Request) -> str:
        port = (request.scope.get("server") or ("", 7860))[1]
        name = _host_name(request.headers.get("host", "")) or ""
        if not (self.hosts.listen or self.hosts.extra):
            return f"Open this page as http://127.0.0.1:{port} or http://localhost:{port}."
        how = f"--allow-host {name}" if HOST_NAME.fullmatch(name) or ":" in name else "--allow-host NAME"
        return f"Hangproof does not know this host name. If it is a name of this machine, start Hangproof with {how}."


class Connection(H11Protocol):
    """Closes itself when no request comes within SILENT_S: for the first one, or the rest of one, uvicorn waits for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to look after it."""
        super().connection_made(transport)
        self.loop.call_later(SILENT_S, self._look, self.cycle)

    def _look(self, before: RequestResponseCycle | None) -> None:
        """Close it where the last request is still the one of the look `before`, and was answered."""
        if self.cycle is before and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(SILENT_S, self._look, self.cycle)


def _too_large(limit: int) -> Response:
    return PlainTextResponse(
        f"This is too large: Hangproof accepts at most {limit / 1e6:,g} MB at once. Drop fewer or smaller files.",
        413,
    )


class _Body:
    """Counts the bytes of a request's body, whether or not its length was announced. Gradio's parser removes its
    temporary files when it gets the exception."""

    def __init__(self, receive: Receive, limit: int, upload: bool) -> None:
        self.inner, self.limit, self.upload = receive, limit, upload
        self.bytes = 0
        self.too_large = False

    async def receive(self) -> Message:
        message = await self.inner()
        if message["type"] == "http.request":
            self.bytes += len(message.get("body", b""))
            if self.bytes > self.limit:
                self.too_large = True
                raise MultiPartException(f"This is too large: at most {self.limit} bytes")
        elif self.upload:
            raise MultiPartException("The browser left")
        return message


class _Outgoing:
    """Adds the headers to an answer. Of the page itself it also gives each script element the nonce of the policy."""

    def __init__(self, send: Send, path: str, private: bool, body: _Body | None) -> None:
        self.inner, self.path, self.private, self.body = send, path, private, body
        self.page = path in PAGES
        self.started = False
        self.first: Message | None = None
        self.parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if self.body is not None and self.body.too_large and not self.started:
            return  # Gradio's own answer to the exception
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            for key, value in HEADERS.items():
                headers[key] = value
            headers.setdefault("content-security-policy", CLOSED)
            if self.page:
                headers.setdefault("cache-control", "no-store" if self.private else "no-cache")
                html = headers.get("content-type", "").startswith("text/html") and "content-encoding" not in headers
                if html and message["status"] == 200:  # not the page that asks for the token
                    self.first = message
                    return
        elif self.first is not None and message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            await self._send_page(self.first)
            return
        self.started = True
        await self.inner(message)

    async def _send_page(self, first: Message) -> None:
        nonce = secrets.token_urlsafe(16)
        html = b"".join(self.parts)
        # Gradio adds what its `head` names only after its start; the style sheet would come after the first paint.
        if self.path == "/":
            html = html.replace(b"</head>", f"{scripts.links()}</head>".encode(), 1)
            html = html.replace(b"<script", f"{scripts.again()}<script".encode(), 1)
        # Gradio writes its data as JSON without "<", so each "<script" begins an element.
        html = html.replace(b"<script", f'<script nonce="{nonce}"'.encode())
        headers = MutableHeaders(raw=first["headers"])
        headers["content-security-policy"] = PAGE_POLICY.format(nonce=nonce)
        if html:  # the answer to HEAD has none, but the length of the page
            headers["content-length"] = str(len(html))
        self.started = True
        await self.inner(first)
        await self.inner({"type": "http.response.body", "body": html, "more_body": False})
