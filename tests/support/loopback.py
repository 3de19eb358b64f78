"""What the servers of the tests share: an HTTP server on loopback whose clients may be killed at any moment."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


@dataclass(frozen=True)
class Request:
    """What a client sent. headers: by names in any case."""

    method: str
    path: str
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        """The value in the body; None without one."""
        return json.loads(self.body) if self.body else None


Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None


class Cut(Exception):
    """Raised by an iterator of pieces: the connection ends in the middle of the answer."""


class Double(ThreadingHTTPServer):
    """A server on a free port. closing: set when it stops, for answers that wait.

    `respond` makes of each request (status, value, headers), or None: the connection ends. The value: bytes, text, what
    becomes JSON, or an iterator of pieces, which are sent with these headers alone.
    """

    daemon_threads = True
    request_queue_size = 64
    scheme = "http"

    def __init__(self, respond: Callable[[Request], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Replies)
        self.respond = respond
        self.closing = threading.Event()
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, and end the connections that clients keep open: a closed server answers nothing more."""
        super().server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients close connections on purpose


class Replies(BaseHTTPRequestHandler):
    """Connections stay open, and nothing is printed."""

    server: Double
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        """The body of the request, chunked or not."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def reply(self) -> None:
        found = self.server.respond(Request(self.command, self.path, self.headers, self.body()))
        if found is None:
            self.close_connection = True
            return
        status, value, headers = (*found, {})[:3]
        if not isinstance(value, Iterator):
            kind = {} if isinstance(value, bytes | str) else {"Content-Type": "application/json"}
            text = value if isinstance(value, bytes | str) else json.dumps(value)
            data = text if isinstance(text, bytes) else text.encode()
            value, headers = iter([data]), {"Content-Length": str(len(data)), **kind, **headers}
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        try:
            for piece in value if self.command != "HEAD" else ():
                self.wfile.write(piece)
        except Cut:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = reply


S = TypeVar("S", bound=Double)


@contextmanager
def running(server: S) -> Iterator[S]:
    """The server while it answers."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def answering(respond: Callable[[Request], Answer]) -> AbstractContextManager[Double]:
    return running(Double(respond))


@contextmanager
def in_turn(*answers: Answer) -> Iterator[Double]:
    """A running server with these answers; it repeats the last. `requests`: (method, path, the body's value, headers)."""
    left = list(answers)

    def answer(request: Request) -> Answer:
        server.requests.append((request.method, request.path, request.json, dict(request.headers)))
        return left.pop(0) if len(left) > 1 else left[0]

    with answering(answer) as server:
        server.requests = []
        yield server
