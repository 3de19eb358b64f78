"""Stores on loopback, with faults: S3 (moto), SFTP (asyncssh), hub buckets (HTTP double), a folder.

Every server asks one `Faults` before and after what it does. The hub's double answers the calls of huggingface_hub;
the contents go through hf_xet's own local storage (`local://`, part of the library).
"""

import asyncio
import errno
import io
import json
import os
import random
import shutil
import socket
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from loopback import Answer, Double, Request, running
from werkzeug import wrappers
from werkzeug.serving import make_server

from launch.store.filesystems import PROTOCOLS, Meter
from launch.store.places import Limits, Place, open_place

KINDS = ("folder", "s3", "sftp", "hub")
EACH_KIND = ["folder", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]


class Fails(Exception):
    """This request is to fail; `Full`: there is no space for it."""


class Full(Fails):
    pass


@contextmanager
def failing(error: Exception) -> Iterator[None]:
    """A fault becomes what the server says then."""
    try:
        yield
    except Fails as fault:
        raise error from fault


@dataclass
class Faults:
    """What a server does wrong."""

    slow_s: float = 0.0
    fail_share: float = 0.0
    quota_bytes: int | None = None
    failed: int = 0
    used_bytes: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        self.slow_s, self.fail_share, self.quota_bytes = 0.0, 0.0, None

    def maybe(self, part: float = 0.5) -> None:
        """Before a request, and after it: then the client does not learn that it was carried out. Raises Fails.

        part: of the share, for requests that come in dozens.
        """
        time.sleep(self.slow_s * part)
        with self.lock:
            if self.dice.random() < 1 - (1 - self.fail_share) ** part:
                self.failed += 1
                raise Fails

    def take(self, count: int) -> None:
        """Bytes are written. Raises Full."""
        with self.lock:
            if self.quota_bytes is not None and self.used_bytes + count > self.quota_bytes:
                raise Full
            self.used_bytes += count


@dataclass
class Server:
    """A running store: its address for `open_place`, and its faults."""

    address: str
    faults: Faults
    wrap: Callable[[Place], Place] = lambda place: place
    s3: Any = None

    def place(self, limits: Limits) -> Place:
        return self.wrap(open_place(self.address, limits))


# S3 -------------------------------------------------------------------------------------------------------------------


class S3:
    """moto with faults, as a WSGI application."""

    def __init__(self, faults: Faults):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.app, self.faults = DomainDispatcherApplication(create_backend_app), faults
        self.conditional = True  # False: If-None-Match is ignored, as by some servers that speak S3
        self.page, self.page_status = b"", "200 OK"  # the answer of a proxy to everything

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return self.answer(environ)(environ, start_response)

    def answer(self, environ: dict[str, Any]) -> wrappers.Response:
        body = wrappers.Request(environ).get_data()
        if self.page:
            return wrappers.Response(self.page, self.page_status, content_type="text/html")
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        if not self.conditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        try:
            self.faults.maybe()
            if environ["REQUEST_METHOD"] == "PUT":
                self.faults.take(len(body))
            found = wrappers.Response.from_app(self.app, environ, buffered=True)
            self.faults.maybe()
            return found
        except Full:
            return wrappers.Response(ERROR.format("XMinioStorageFull"), 507, content_type="application/xml")
        except Fails as fault:
            if self.faults.dice.random() < 0.5:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionError from fault  # there is no answer
            return wrappers.Response(ERROR.format("InternalError"), 500, content_type="application/xml")


ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>injected</Message></Error>"


@contextmanager
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A bucket. botocore's own retries, which wait for seconds, are off."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler

    app, bucket = S3(Faults()), f"runs-of-tests-{os.urandom(4).hex()}"
    monkeypatch.setitem(PROTOCOLS["s3"][1]["config_kwargs"], "retries", {"mode": "standard", "total_max_attempts": 1})
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    url, keys = f"http://127.0.0.1:{server.port}", dict.fromkeys(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), "test")
    settings = {"CONFIG_FILE": str(tmp_path / "none"), "DEFAULT_REGION": "us-east-1", "ENDPOINT_URL": url, **keys}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=60).close()
        yield Server(f"s3://{bucket}/runs", app.faults, s3=app)
    finally:
        server.shutdown()


# SFTP -----------------------------------------------------------------------------------------------------------------


def faulty(name: str, before: float, after: float = 0.0) -> Callable[..., Any]:
    """A call of asyncssh's server that may fail before it, and after it."""
    call = getattr(asyncssh.SFTPServer, name)

    def method(self: "FaultySftp", *given: Any) -> Any:
        with failing(asyncssh.SFTPFailure("injected")):
            self.faults.maybe(before)
            done = call(self, *given)
            self.faults.maybe(after)
        return done

    return method


class FaultySftp(asyncssh.SFTPServer):
    """asyncssh's server, which fails at every call that matters."""

    faults: Faults
    open, stat, remove = (faulty(name, 0.5) for name in ("open", "stat", "remove"))
    read, posix_rename = faulty("read", 0.02), faulty("posix_rename", 0.5, 0.5)

    def write(self, file, offset, data):
        with failing(asyncssh.SFTPFailure("No space left on device")):
            self.faults.take(len(data))
        return faulty("write", 0.02)(self, file, offset, data)

    async def scandir(self, path):
        with failing(asyncssh.SFTPFailure("injected")):
            self.faults.maybe()
        async for row in super().scandir(path):
            yield row


@contextmanager
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An SFTP server whose root is a folder of `tmp_path`; $HOME gets a key, a configuration and the known host."""
    faults, home, root = Faults(), tmp_path / "home", tmp_path / "sftp root"
    (home / ".ssh").mkdir(parents=True)
    root.mkdir()
    user_key, host_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    (home / ".ssh" / "key").write_bytes(user_key.export_private_key())
    (home / ".ssh" / "key").chmod(0o600)
    allowed = tmp_path / "authorized_keys"
    allowed.write_bytes(user_key.export_public_key())
    made, loop = type("Sftp", (FaultySftp,), {"faults": faults}), asyncio.new_event_loop()
    keys = {"server_host_keys": [host_key], "authorized_client_keys": str(allowed)}
    factory = lambda channel: made(channel, chroot=os.fsencode(root))  # noqa: E731
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    listener = loop.run_until_complete(asyncssh.listen("127.0.0.1", 0, **keys, sftp_factory=factory))
    thread.start()
    port = listener.get_port()
    public = host_key.export_public_key().decode().split()[:2]
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(public)}\n")
    host = f"Host store\n  HostName 127.0.0.1\n  Port {port}\n  User me\n  IdentityFile {home}/.ssh/key\n"
    (home / ".ssh" / "config").write_text(host)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    try:
        yield Server("sftp://store/runs", faults)
    finally:
        loop.call_soon_threadsafe(listener.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


# Hub buckets ----------------------------------------------------------------------------------------------------------


class Hub(Double):
    """The hub's calls for buckets (huggingface_hub/hf_api.py, `…bucket…`)."""

    def __init__(self, cas: Path, faults: Faults):
        super().__init__(self.reply)
        self.cas, self.faults = cas, faults
        self.buckets: dict[str, dict[str, dict[str, Any]]] = {}
        self.lock = threading.Lock()

    def reply(self, request: Request) -> Answer:
        try:
            self.faults.maybe()
            answer = self.carry_out(request, urllib.parse.urlsplit(request.path).path)
            self.faults.maybe()
            return answer
        except Full:
            return 507, {"error": "storage limit reached"}
        except Fails:
            return None if self.faults.dice.random() < 0.5 else (503, b"")

    def carry_out(self, request: Request, path: str) -> Answer:
        if path.startswith("/buckets/"):  # a range of a file
            _, _, owner, name, _, file = path.split("/", 5)
            row = self.buckets.get(f"{owner}/{name}", {}).get(urllib.parse.unquote(file))
            if row is None:
                return 404, b"", {"X-Error-Code": "EntryNotFound"}
            start, end = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
            return 206, self.contents(row["xetHash"])[start : end + 1]
        _, _, _, owner, name, *rest = path.split("/", 5)
        bucket = f"{owner}/{name}"
        with self.lock:
            if not rest and request.method == "POST":
                if bucket in self.buckets:
                    return 409, {"url": f"{self.url}/buckets/{bucket}", "error": "exists"}
                self.buckets[bucket] = {}
                return 200, {"url": f"{self.url}/buckets/{bucket}"}
            if bucket not in self.buckets:
                return 404, {"error": "no such bucket"}, {"X-Error-Code": "RepoNotFound"}
            files = self.buckets[bucket]
            if not rest:
                return 200, {"id": bucket, "private": True, "createdAt": STAMP, "size": 0, "totalFiles": len(files)}
            what = rest[0]
            if what.endswith("-token"):
                expires, url = int(time.time()) + 3600, f"local://{self.cas}"
                headers = {"X-Xet-Access-Token": "t", "X-Xet-Cas-Url": url, "X-Xet-Token-Expiration": str(expires)}
                return 200, {"accessToken": "t", "casUrl": url, "exp": expires}, headers
            if what == "paths-info":
                return 200, [_row(p, files[p]) for p in request.json["paths"] if p in files]
            if what.startswith("tree"):
                prefix = urllib.parse.unquote(what.removeprefix("tree").lstrip("/"))
                found = [_row(p, row) for p, row in sorted(files.items()) if p.startswith(prefix)]
                if "recursive=true" in request.path.lower():
                    return 200, found
                start = len(prefix) + 1 if prefix else 0  # only what is directly below
                folders = {row["path"][:at] for row in found if (at := row["path"].find("/", start)) > 0}
                rows = [row for row in found if "/" not in row["path"][start:]]
                return 200, rows + [{"type": "directory", "path": path} for path in sorted(folders)]
            assert what == "batch", path
            for row in map(json.loads, request.body.splitlines()):
                if row["type"] == "deleteFile":
                    files.pop(row["path"], None)
                    continue
                assert row["type"] == "addFile", row
                size = len(self.contents(row["xetHash"]))
                self.faults.take(size)
                files[row["path"]] = {"xetHash": row["xetHash"], "size": size}
            return 200, {}

    def contents(self, xet_hash: str) -> bytes:
        import hf_xet

        def read(cas: Path) -> bytes:
            group = hf_xet.XetSession().new_download_stream_group(endpoint=f"local://{cas}")
            return b"".join(group.download_stream(hf_xet.XetFileInfo(xet_hash, None)))

        try:
            return read(self.cas)
        except RuntimeError:  # another process has it open; only its index is ever changed in place
            with tempfile.TemporaryDirectory(dir=self.cas.parent) as copy:
                index = Path("xet", "xorbs", "global_dedup_lookup.redb")
                shutil.copytree(self.cas / "xet", Path(copy) / "xet", copy_function=_link)
                (Path(copy) / index).unlink()
                shutil.copyfile(self.cas / index, Path(copy) / index)
                return read(Path(copy))


def _link(source: str, target: str) -> None:
    with suppress(FileNotFoundError):  # a temporary file
        os.link(source, target)


STAMP = "2026-11-22T00:00:00.000Z"


def _row(path: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"type": "file", "path": path, "mtime": STAMP, **row}


@contextmanager
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub with no bucket yet."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    faults = Faults()
    with running(Hub(tmp_path / "cas", faults)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        for call in (_http.http_backoff, _http._http_backoff_base):  # the library's own retries wait up to 8 s
            for option, value in (("base_wait_time", 0.01), ("max_wait_time", 0.05), ("max_retries", 1)):
                monkeypatch.setitem(call.__kwdefaults__, option, value)
        monkeypatch.setenv("HF_TOKEN", "hf_token_of_the_test")
        monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
        yield Server("hf://buckets/me/runs-of-tests/deep", faults)


# A folder -------------------------------------------------------------------------------------------------------------


class FaultyFolder(Place):
    """A folder on a bad disk: the only kind without a server, so the faults are here."""

    faults: Faults

    @contextmanager
    def session(self) -> Iterator[Any]:
        with failing(OSError(errno.EIO, "injected")):
            self.faults.maybe()
        with super().session() as fs:
            yield fs

    def write(self, fs: Any, key: str, source: bytes | str, meter: Meter) -> None:
        with self.writing(len(source) if isinstance(source, bytes) else os.path.getsize(source)):
            super().write(fs, key, source, meter)

    def write_new(self, fs: Any, key: str, data: bytes) -> None:
        with self.writing(len(data)):
            super().write_new(fs, key, data)

    @contextmanager
    def writing(self, count: int) -> Iterator[None]:
        with failing(OSError(errno.ENOSPC, "No space left on device")):
            self.faults.take(count)
        yield
        with failing(OSError(errno.EIO, "injected")):
            self.faults.maybe()


@contextmanager
def folder(tmp_path: Path, _: pytest.MonkeyPatch) -> Iterator[Server]:
    faults, root = Faults(), tmp_path / "folder store"

    def wrap(place: Place) -> Place:
        faulty = FaultyFolder("file", place.address, place.prefix, place.limits)
        faulty.faults = faults
        return faulty

    yield Server(str(root), faults, wrap)


def serving(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Server]:
    return {"folder": folder, "s3": s3, "sftp": sftp, "hub": hub}[kind](tmp_path, monkeypatch)
