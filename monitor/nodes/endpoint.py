"""The leader's HTTP server: three requests, each signed; everything else is refused before it is read.

`/poll` takes a report and answers with the order, `/list` names the files that a node may need, `/file` sends one of
them from a byte on. A name is looked up in the leader's own list: no path comes from a request.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monitor.nodes import files, wire
from monitor.nodes.leader import Nodes
from monitor.run_folder import MonitorError

REQUESTS = 64  # connections at once; one more is closed
IDLE_S = 10.0  # a connection that sends nothing
CHUNK = 1 << 20
SERVE_S = 0.2


def serve(nodes: Nodes, host: str, port: int) -> Callable[[], None]:
    """Listen on host:port in a thread; returns the function that stops it. MonitorError: the address cannot be used."""
    places = threading.BoundedSemaphore(REQUESTS)
    catalogue = files.Catalogue(nodes.folder)

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S
        protocol_version = "HTTP/1.0"  # one request for each connection
        server_version, sys_version = "Hangproof", ""

        def do_POST(self) -> None:
            with contextlib.suppress(OSError):  # the node has gone; it asks again
                self._answer()

        def _answer(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self.path not in (wire.POLL, wire.LIST, wire.FILE) or not length.isascii() or not length.isdigit():
                return self._refuse(404)
            if int(length) > wire.REQUEST_BYTES:
                return self._refuse(413)
            body = self.rfile.read(int(length))
            signature = self.headers.get(wire.SIGNATURE, "")
            if not wire.signed_by(nodes.token, signature, b"request", self.path.encode(), body):
                return self._refuse(403)
            try:
                values = wire.decode(body)
                if self.path == wire.POLL:
                    return self._send(nodes.receive(values, self.client_address[0]), signature)
                if self.path == wire.LIST:
                    return self._send(
                        {"files": catalogue.entries(nodes.order.resume, nodes.order.resume_path)}, signature
                    )
                self._send_file(values)
            except wire.WireError as error:
                nodes.folder.log(f"a message from {self.client_address[0]} is refused: {error}")
                self._refuse(400)

        def _send(self, values: dict[str, Any], signature: str) -> None:
            body = wire.encode(values)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header(wire.SIGNATURE, wire.sign(nodes.token, b"answer", signature.encode(), body))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, values: dict[str, Any]) -> None:
            """Without a signature of its own: the node knows the hash from the signed list."""
            name, offset = values.get("name"), values.get("offset")
            entry = catalogue.known.get(name) if isinstance(name, str) else None
            if entry is None or not isinstance(offset, int) or not 0 <= offset <= entry.size:
                return self._refuse(404)
            with open(entry.path, "rb") as file:
                file.seek(offset)
                self.send_response(200)
                self.send_header("Content-Length", str(entry.size - offset))
                self.end_headers()
                left = entry.size - offset
                while left and (chunk := file.read(min(CHUNK, left))):
                    self.wfile.write(chunk)
                    left -= len(chunk)

        def _refuse(self, code: int) -> None:
            self.close_connection = True
            self.send_response_only(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """A line for each poll would fill the disk."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = REQUESTS
        address_family = _family(host)

        def process_request(self, request: Any, client_address: Any) -> None:
            if places.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                places.release()

        def handle_error(self, *_: Any) -> None:
            """A connection that broke: the node asks again."""

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise MonitorError(
            f"HANGPROOF_LEADER={host}:{port}: this machine cannot listen there: {error.strerror or error}; set it to one "
            "of this machine's addresses and a free port"
        ) from error
    threading.Thread(target=server.serve_forever, args=(SERVE_S,), name="nodes", daemon=True).start()

    def close() -> None:
        with contextlib.suppress(OSError):
            server.shutdown()
            server.server_close()

    return close


def _family(host: str) -> int:
    import socket

    return socket.AF_INET6 if ":" in host else socket.AF_INET
