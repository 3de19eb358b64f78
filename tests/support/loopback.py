"""What the servers of the tests share: an HTTP server on loopback whose clients may be killed at any moment."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class Server(ThreadingHTTPServer):
    """Listens on a free port. closing: set when it stops, for answers that wait."""

    daemon_threads = True
    request_queue_size = 64
    scheme = "http"

    def __init__(self, answers: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), answers)
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients close connections on purpose


S = TypeVar("S", bound=Server)


class Answers(BaseHTTPRequestHandler):
    """Connections stay open, and nothing is printed."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running(server: S) -> Iterator[S]:
    """The server while it answers."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
