"""Who may speak to a page that listens on loopback: this machine's browser, from this very page.

A web page anywhere can send requests to 127.0.0.1 through its visitor's browser, under a host name of its own (DNS
rebinding) or across origins (a form needs no permission). Whoever reaches us can start programs, so both are refused.
"""

from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OnlyThisMachine:
    """ASGI middleware: 403 for a Host that is not loopback, or an Origin that is not the Host."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
            if not allowed(headers.get(b"host", ""), headers.get(b"origin")):
                await self._refuse(send)
                return
        await self.app(scope, receive, send)

    async def _refuse(self, send) -> None:
        head = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 403, "headers": head})
        await send(
            {"type": "http.response.body", "body": b"This page answers only http://127.0.0.1 and http://localhost."}
        )


def allowed(host: str, origin: str | None) -> bool:
    """Whether a request for `host` that a page of `origin` (None: no page) makes is let through."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if name not in LOOPBACK:
        return False
    return origin is None or origin in (f"http://{host}", f"https://{host}")
