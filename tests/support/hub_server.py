"""A model hub on loopback: real HTTP, a redirect to another host for large files, and faults by schedule.

It counts every byte that it sends of every file, so that a test can see what was fetched twice.
"""

import hashlib
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loopback import Answers as Handler
from loopback import Server, running

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".bin")


@dataclass(frozen=True)
class Fault:
    """What one GET of a file's contents does wrong. kind: see `Answers.contents`. at: after how many bytes."""

    kind: str
    at: int = 0


def git_sha1(content: bytes) -> str:
    """The ETag of a small file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(Server):
    """`files`: name -> contents of the one repository, me/model. `faults`: one for each GET of contents, in order."""

    def __init__(self, files: dict[str, bytes], certificate: Path | None = None):
        """certificate: a PEM file with key and certificate, for HTTPS."""
        super().__init__(Answers)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
            self.scheme = "https"
        self.files, self.faults = files, list[Fault]()
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers by lower-case name
        self.sent: list[tuple[str, int, int]] = []  # name, from, to: bytes of files
        self.silent = False
        self.hashes, self.sizes = True, True
        self.refusal: tuple[int, str] | None = None
        self.redirect = ""
        self.retry_after = ""
        self.nap_s = 0.0
        self.lock = threading.Lock()

    def sent_of(self, name: str) -> int:
        return sum(to - start for one, start, to in self.sent if one == name)


class Answers(Handler):
    server: Hub

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def head(self, status: int, headers: dict[str, str]):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, body: bool):
        hub = self.server
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        if hub.silent:
            hub.closing.wait(600)
            self.close_connection = True
        elif hub.refusal:
            status, code = hub.refusal
            more = {"X-Error-Code": code} if code else {}
            if hub.retry_after:
                more["Retry-After"] = hub.retry_after
            self.head(status, {"Content-Length": "0", **more})
        elif path.startswith("/cdn/"):
            self.contents(path.removeprefix("/cdn/"), body)
        elif path.startswith("/api/models/me/model/revision/"):
            self.listing()
        elif "/resolve/" in path:
            self.resolve(path.split("/resolve/", 1)[1].split("/", 1)[1], body)
        else:
            self.head(404, {"Content-Length": "0"})

    def listing(self):
        siblings = []
        for name, content in self.server.files.items():
            row: dict = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
            if name.endswith(LARGE):
                row["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            siblings.append(row)
        data = json.dumps({"id": "me/model", "sha": COMMIT, "siblings": siblings}).encode()
        self.head(200, {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def resolve(self, name: str, body: bool):
        hub = self.server
        if name not in hub.files:
            self.head(404, {"Content-Length": "0", "X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"})
        elif not name.endswith(LARGE):
            self.contents(name, body)
        else:
            content = hub.files[name]
            where = hub.redirect or f"{hub.scheme}://localhost:{hub.server_port}/cdn/{urllib.parse.quote(name)}"
            headers = {"Location": where, "Content-Length": "0", "X-Repo-Commit": COMMIT}
            if hub.hashes:
                headers["X-Linked-ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            if hub.sizes:
                headers["X-Linked-Size"] = str(len(content))
            self.head(302, headers)

    def contents(self, name: str, body: bool):
        """Send a file, or the rest of it, with the next fault.

        drop, stall, trickle: after `at` bytes. busy: 503. whole: ignores the range. short, long: a Content-Length that is
        `at` bytes off. extra: more bytes than announced. moved: another part than requested. flipped: one wrong byte.
        changed: another file from now on.
        """
        hub = self.server
        with hub.lock:
            fault = hub.faults.pop(0) if body and hub.faults else Fault("none")
            if fault.kind == "changed":
                hub.files[name] = hub.files[name][::-1]
        content = hub.files[name]
        etag = f'"{git_sha1(content)}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if fault.kind == "busy":
            self.head(503, {"Content-Length": "0"})
            return
        start = 0
        asked = self.headers.get("Range")
        if asked and fault.kind != "whole" and self.headers.get("If-Range", etag) == etag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.head(416, {"Content-Length": "0", "Content-Range": f"bytes */{len(content)}"})
                return
            if fault.kind == "moved":
                start = min(start + 1 + fault.at, len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        length = len(content) - start + {"short": -fault.at, "long": fault.at + 1}.get(fault.kind, 0)
        if hub.sizes:
            headers["Content-Length"] = str(max(0, length))
        else:
            headers["Transfer-Encoding"] = "chunked"
        self.head(206 if "Content-Range" in headers else 200, headers)
        if body:
            self.send_part(name, content, start, fault, max(0, length))

    def send_part(self, name: str, content: bytes, start: int, fault: Fault, length: int):
        hub = self.server
        sent = hub.sent  # a connection that its client has left still counts where it began
        end = len(content) if fault.kind != "short" else start + length
        at = start
        while at < end:
            stop = min(end, at + 16384)
            if fault.kind in ("drop", "stall", "trickle"):
                stop = min(stop, max(at, start + fault.at))
                if fault.kind == "trickle" and at >= start + fault.at:
                    stop = min(end, at + 50)
                    if hub.closing.wait(0.1):
                        break
                elif stop == at:
                    self.wfile.flush()
                    if fault.kind == "stall":
                        hub.closing.wait(600)
                    self.close_connection = True
                    return
            piece = content[at:stop]
            if fault.kind == "flipped" and at == start:
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            sent.append((name, at, stop))  # before its client can ask
            self.wfile.write(piece if hub.sizes else b"%x\r\n%s\r\n" % (len(piece), piece))
            at = stop
            if hub.nap_s:
                time.sleep(hub.nap_s)
        if not hub.sizes:
            self.wfile.write(b"0\r\n\r\n")
        if fault.kind == "extra":
            self.wfile.write(b"x" * (1 + fault.at))
        if fault.kind in ("extra", "long", "short"):
            self.close_connection = True


@contextmanager
def serving(files: dict[str, bytes], certificate: Path | None = None) -> Iterator[Hub]:
    """A hub with these files."""
    with running(Hub(files, certificate)) as server:
        yield server
