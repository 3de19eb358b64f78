"""A model hub on loopback: real HTTP, a redirect to another host for large files, and faults by schedule.

It counts every byte that it sends of every file, so that a test can see what was fetched twice.
"""

import hashlib
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loopback import Answer, Cut, Double, Request, running

from guards import download, hub

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".bin")


@dataclass(frozen=True)
class Fault:
    """What one GET of a file's contents does wrong. kind: see `Hub.contents`. at: after how many bytes."""

    kind: str
    at: int = 0


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(Double):
    """`files`: name -> contents of the one repository, me/model. `faults`: one for each GET of contents, in order."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__(self.reply)
        self.files, self.faults = files, list[Fault]()
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers by lower-case name
        self.sent: list[tuple[str, int, int]] = []  # name, from, to: bytes of files
        self.silent = False
        self.hashes = True
        self.refusal: tuple[int, str] | None = None
        self.redirect = ""
        self.nap_s = 0.0
        self.lock = threading.Lock()

    def sent_of(self, name: str) -> int:
        return sum(to - start for one, start, to in self.sent if one == name)

    def reply(self, request: Request) -> Answer:
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        self.requests.append((request.method, path, {k.lower(): v for k, v in request.headers.items()}))
        if self.silent:
            self.closing.wait(600)
            return None
        if self.refusal:
            status, code = self.refusal
            return status, b"", {"X-Error-Code": code}
        if path.startswith("/cdn/"):
            return self.contents(path.removeprefix("/cdn/"), request)
        if path.startswith("/api/models/") and "/revision/" in path:
            return 200, {"sha": COMMIT, "siblings": [self.row(name) for name in self.files]}
        if "/resolve/" in path:
            return self.resolve(path.split("/resolve/", 1)[1].split("/", 1)[1], request)
        return 404, b""

    def row(self, name: str) -> dict:
        """A file in the list of the repository."""
        content = self.files[name]
        digest = hashlib.sha256(content).hexdigest() if self.hashes else "md5"
        large = {"sha256": digest, "size": len(content), "pointerSize": 130}
        found = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
        return {**found, "lfs": large} if name.endswith(LARGE) else found

    def resolve(self, name: str, request: Request) -> Answer:
        if name not in self.files:
            return 404, b"", {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}
        if not name.endswith(LARGE):
            return self.contents(name, request)
        where = self.redirect or f"{self.scheme}://localhost:{self.server_port}/cdn/{urllib.parse.quote(name)}"
        content = self.files[name]
        about = {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        return 302, b"", {"Location": where, "X-Repo-Commit": COMMIT, **about}

    def contents(self, name: str, request: Request) -> Answer:
        """A file, or the rest of it, with the next fault.

        drop, stall, trickle: after `at` bytes. busy: 503. whole: ignores the range. short, long: the Content-Length is
        `at` bytes off. extra: more bytes than announced. moved: another part than requested. flipped: one wrong byte.
        changed: another file from now on.
        """
        with self.lock:
            fault = self.faults.pop(0) if request.method == "GET" and self.faults else Fault("none")
            if fault.kind == "changed":
                self.files[name] = self.files[name][::-1]
        content = self.files[name]
        etag = f'"{git_sha1(content)}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if fault.kind == "busy":
            return 503, b""
        start = 0
        asked = request.headers.get("Range")
        if asked and fault.kind != "whole" and request.headers.get("If-Range", etag) == etag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return 416, b"", {"Content-Range": f"bytes */{len(content)}"}
            if fault.kind == "moved":
                start = min(start + 1 + fault.at, len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        length = max(0, len(content) - start + {"short": -fault.at, "long": fault.at + 1}.get(fault.kind, 0))
        headers["Content-Length"] = str(length)
        end = len(content) if fault.kind != "short" else start + length
        return 206 if "Content-Range" in headers else 200, self.part(name, content, start, end, fault), headers

    def part(self, name: str, content: bytes, start: int, end: int, fault: Fault) -> Iterator[bytes]:
        sent = self.sent  # a connection that its client has left still counts where it began
        good = start + fault.at if fault.kind in ("drop", "stall", "trickle") else end  # nothing is wrong up to here
        at = start
        while at < end:
            stop = min(end, at + 16384, good if at < good else at + 50)
            if at >= good:
                stopped = self.closing.wait({"drop": 0, "stall": 600, "trickle": 0.1}[fault.kind])
                if stopped or fault.kind != "trickle":
                    raise Cut
            piece = content[at:stop]
            if fault.kind == "flipped" and at == start:
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            sent.append((name, at, stop))  # before its client can ask
            yield piece
            at = stop
            if self.nap_s:
                time.sleep(self.nap_s)
        if fault.kind == "extra":
            yield b"x" * (1 + fault.at)
        if fault.kind in ("extra", "long", "short"):
            raise Cut


@contextmanager
def only_hub(environment, folder: Path, files: dict[str, bytes]) -> Iterator[Hub]:
    """A running hub that alone the environment leads to; HF_HOME is in this folder, pauses are short."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "http_proxy", "HTTP_PROXY", "HF_HUB_CACHE"):
        environment.delenv(name, raising=False)
    environment.setenv("no_proxy", "127.0.0.1,localhost")
    environment.setenv("HF_HOME", str(folder / "hf"))
    environment.setattr(hub, "PAUSE_S", 0.01)
    environment.setattr(hub, "LONGEST_PAUSE_S", 0.05)
    environment.setattr(download, "POLL_S", 0.05)
    with serving(dict(files)) as server:
        environment.setenv("HF_ENDPOINT", server.url)
        yield server


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with these files."""
    with running(Hub(files)) as server:
        yield server
