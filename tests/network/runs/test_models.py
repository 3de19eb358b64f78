"""Model files arrive complete, interrupted downloads continue, and every wait has a limit: with a real loopback server."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from runs_helpers import PROJECT, data  # noqa: F401

import runs
from guards import download, hub_request
from guards import hub as hub_module
from runs import models

CONTENT = bytes(range(256)) * 20_000  # 5 MB
SHA = hashlib.sha256(CONTENT).hexdigest()


class Hub(ThreadingHTTPServer):
    """Answers as the hub does: a redirect that names size and hash, then the file, by ranges; and with faults."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.content, self.etag = CONTENT, SHA
        self.requests: list[tuple[str, str, str | None, str | None]] = []  # method, path, range, authorization
        self.cut_after: list[int] = []  # bytes after which a GET is cut off, one entry a GET
        self.status: dict[str, int] = {}  # by method
        self.ranges, self.stall, self.nap_s = True, False, 0.0
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body: bool):
        hub: Hub = self.server
        hub.requests.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.command in hub.status:
            self.head(hub.status[self.command], {"Content-Length": "0"})
        elif self.path.startswith("/cdn/"):
            self.send_file(body)
        else:
            where = f"http://localhost:{hub.server_port}/cdn/file"
            headers = {"Location": where, "Content-Length": "0"}
            if hub.etag:
                headers |= {"X-Linked-ETag": f'"{hub.etag}"', "X-Linked-Size": str(len(hub.content))}
            self.head(302, headers)

    def head(self, status: int, headers: dict[str, str]):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_file(self, body: bool):
        hub: Hub = self.server
        start = 0
        if hub.ranges and self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        if start >= len(hub.content):
            self.head(416, {"Content-Length": "0"})
            return
        self.head(206 if start else 200, {"Content-Length": str(len(hub.content) - start), "ETag": '"cdn"'})
        if not body:
            return
        cut = hub.cut_after.pop(0) if hub.cut_after else None
        rest = hub.content[start:]
        if cut is None and not hub.nap_s:
            self.wfile.write(rest)
            return
        for at in range(0, len(rest), 65536):
            if cut is not None and at >= cut:
                self.wfile.flush()
                if hub.stall:
                    hub.gone.wait(60)
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(rest[at : at + 65536])
            time.sleep(hub.nap_s)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setattr(hub_request, "PAUSE_S", 0.05)
    monkeypatch.setattr(hub_request, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "20")  # tests of a server that stalls set less
    yield server
    server.gone.set()
    server.shutdown()
    server.server_close()


def get(target: Path, **more) -> list[tuple]:
    calls: list[tuple] = []
    models.fetch(
        "me/model",
        "sub dir/ü.safetensors",
        target,
        on_progress=lambda at: calls.append((at.name, at.done, at.total)),
        **{"stall_s": 5, **more},
    )
    return calls


def nothing_but(target: Path) -> None:
    assert {p.name for p in target.parent.iterdir()} <= {
        target.name,
        f".{target.name}.lock",
    } and target.read_bytes() == CONTENT


def test_a_file_arrives_with_progress_and_is_checked(hub, tmp_path):
    calls = get(tmp_path / "m" / "model.safetensors")
    nothing_but(tmp_path / "m" / "model.safetensors")
    assert hub.requests[0][1] == "/me/model/resolve/main/sub%20dir/%C3%BC.safetensors"
    arrived = [done for name, done, size in calls if name == "model.safetensors"]
    assert arrived == sorted(arrived) and arrived[0] == 0 and arrived[-1] == len(CONTENT) and len(arrived) > 3
    assert all(size == len(CONTENT) for _, _, size in calls)


def test_a_broken_download_continues_where_it_stopped(hub, tmp_path):
    hub.cut_after = [1_000_000, 700_000, 0]
    get(tmp_path / "m" / "x")
    nothing_but(tmp_path / "m" / "x")
    starts = [
        int(r.removeprefix("bytes=").rstrip("-")) for m, p, r, _ in hub.requests if m == "GET" and "/cdn/" in p and r
    ]
    assert len(starts) == 3 and 0 < starts[0] < starts[1] <= starts[2] < len(CONTENT)


def test_a_killed_download_continues_in_the_next_process(hub, tmp_path):
    """SIGKILL, not an exception: received bytes are kept and not requested again."""
    hub.nap_s = 0.2  # 16 s for the complete file, so that the kill comes before its end even on a busy machine
    target = tmp_path / "m" / "x"
    code = f"from pathlib import Path; from runs import models; models.fetch('me/model', 'x', Path({str(target)!r}))"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, env=os.environ | {"PYTHONPATH": str(PROJECT)})
    part = target.with_name(".x.part")
    end = time.monotonic() + 200
    while not (part.exists() and part.stat().st_size > 1_500_000) and time.monotonic() < end:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=200)
    kept = part.stat().st_size
    assert 0 < kept < len(CONTENT)
    hub.nap_s = 0
    get(target)
    assert target.read_bytes() == CONTENT
    assert hub.requests[-1][:3] == ("GET", "/cdn/file", f"bytes={kept}-")


def test_a_server_without_ranges_sends_all_of_it_again(hub, tmp_path):
    hub.ranges, hub.cut_after = False, [1_000_000]
    get(tmp_path / "m" / "x")
    nothing_but(tmp_path / "m" / "x")


def test_a_file_that_changed_on_the_server_is_downloaded_again_from_the_start(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "2")
    target = tmp_path / "m" / "x"
    hub.cut_after = [1_000_000] + [0] * 50
    with pytest.raises(runs.RunError, match="bytes received are kept"):
        hub.status = {}
        hub.stall = True
        get(target, stall_s=3)
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "20")
    hub.stall, hub.cut_after = False, []
    hub.content = CONTENT[::-1]
    hub.etag = hashlib.sha256(hub.content).hexdigest()
    get(target)
    assert target.read_bytes() == CONTENT[::-1]


def test_a_damaged_file_is_deleted_and_reported(hub, tmp_path):
    hub.etag = "0" * 64
    with pytest.raises(runs.RunError, match="arrived damaged .* download it again"):
        get(tmp_path / "m" / "x")
    assert not [p for p in (tmp_path / "m").iterdir() if p.suffix != ".lock"]
    with pytest.raises(runs.RunError, match="arrived damaged"):
        hub.etag = SHA
        get(tmp_path / "m" / "x", sha256="ab" * 32)


@pytest.mark.timeout(300)
def test_a_server_that_stops_sending_fails_after_a_limit(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "2")
    hub.cut_after, hub.stall = [500_000] + [0] * 100, True
    with pytest.raises(
        runs.RunError, match=r"no data from 127\.0\.0\.1:\d+ for 3 s .* Check the network and download again"
    ):
        hub.content = CONTENT[:600_000]
        hub.etag = hashlib.sha256(hub.content).hexdigest()
        get(tmp_path / "m" / "x", stall_s=3)
    assert (tmp_path / "m" / ".x.part").stat().st_size > 0


@pytest.mark.timeout(300)
def test_no_network_is_an_error(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(runs.RunError, match=r"no data from 127\.0\.0\.1:9 for 1 s \(.*refused.*\)\. Check the network"):
        get(tmp_path / "m" / "x", stall_s=1)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "accept its licence at .*/me/model, then set HF_TOKEN"),
        (403, "no access to me/model"),
        (404, "does not exist"),
        (400, "HTTP status 400"),
    ],
)
def test_a_refusal_says_what_to_do(hub, tmp_path, status, says):
    hub.status = {"HEAD": status}
    with pytest.raises(runs.RunError, match=says):
        get(tmp_path / "m" / "x")


@pytest.mark.timeout(300)
def test_a_busy_server_is_tried_again(hub, tmp_path):
    hub.status = {"HEAD": 503}
    threading.Timer(0.4, hub.status.clear).start()
    get(tmp_path / "m" / "x")
    nothing_but(tmp_path / "m" / "x")


def test_the_token_goes_to_the_hub_only(hub, tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("secret\n")
    get(tmp_path / "m" / "x")
    assert {auth for _, path, _, auth in hub.requests if path.startswith("/me/")} == {"Bearer secret"}
    assert {auth for _, path, _, auth in hub.requests if path.startswith("/cdn/")} == {None}
    monkeypatch.setenv("HF_TOKEN", "other")
    assert hub_module.token() == "other"


def test_offline_means_offline(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(runs.RunError, match="HF_HUB_OFFLINE is set"):
        get(tmp_path / "m" / "x")
    assert hub.requests == []


def test_too_little_space_is_an_error_before_the_download(hub, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(runs.RunError, match="needs 0.0 GB more, but .* free some space"):
        get(tmp_path / "m" / "x")
    assert not any(method == "GET" for method, *_ in hub.requests)


def test_two_that_download_the_same_file_do_not_mix(hub, tmp_path):
    from filelock import FileLock

    (tmp_path / "m").mkdir()
    with FileLock(str(tmp_path / "m" / ".x.lock")), pytest.raises(runs.RunError, match="by another process"):
        get(tmp_path / "m" / "x")


def test_the_command_fetches_what_is_missing(hub, data):  # noqa: F811
    (data / "models").mkdir()
    (data / "models/clip_l.safetensors").write_bytes(b"already here")
    done = subprocess.run(
        [sys.executable, "-m", "runs", "fetch-model", "FLUX.1-schnell", "--json"], cwd=PROJECT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fetched = json.loads(done.stdout.splitlines()[-1])["files"]
    assert sorted(Path(f).name for f in fetched) == [
        "ae.safetensors",
        "flux1-schnell.safetensors",
        "t5xxl_fp16.safetensors",
    ]
    assert "ae.safetensors: 0.01 of 0.01 GB · 100 %" in done.stderr
    assert not runs.missing_files("flux-schnell") and not list((data / "models").glob(".*.part*"))
    assert (data / "models/clip_l.safetensors").read_bytes() == b"already here"
    for name, says in (("tiny-flux", "is generated on this machine"), ("nope", "no base model 'nope'")):
        wrong = subprocess.run(
            [sys.executable, "-m", "runs", "fetch-model", name],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert wrong.returncode == 1 and says in wrong.stderr
