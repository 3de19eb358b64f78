"""The model hub: what is cached needs no network, what stands still ends, what is missing is said once."""

import contextlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny

from sd_scripts_patches import hub

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "a" * 40
TOKENIZER = """
import os, time
from transformers import CLIPTokenizer
from library.strategy_base import TokenizeStrategy
os.write(1, f"HANG {time.monotonic()}\\n".encode())
made = TokenizeStrategy()._load_tokenizer(CLIPTokenizer, "openai/clip-vit-large-patch14")
print("words", len(made), made.model_max_length, flush=True)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as its client asks for: files of one repository by name, and an answer to what is not there."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        server = self.server
        server.asked.append(self.path)
        if server.silent:
            server.closing.wait(600)
            self.close_connection = True
            return
        path = server.files / self.path.rpartition("/")[2]
        found = "/resolve/" in self.path and path.is_file()
        body = path.read_bytes() if found else b"{}"
        self.send_response(200 if found else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if found:
            self.send_header("ETag", f'"{path.name}"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD = answer

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(files: Path, silent: bool):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        server.files, server.asked = files, []
        server.silent, server.closing = silent, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """A tokenizer loaded three times: from the hub; from the cache that this made, while the hub is silent; and so from a
    copy of the cache that a killed download might have left. For each, how it ended and what the hub was asked."""
    tiny.need()
    base, told = tmp_path_factory.mktemp("hub"), {}
    files = tiny.workdir() / "tokenizers" / "openai_clip-vit-large-patch14"

    def load(name):
        (base / name).mkdir()
        if name != "hub":
            shutil.copytree(base / "hub-home", base / f"{name}-home", symlinks=True)
        if name == "half":
            (removed,) = (base / "half-home").rglob(f"snapshots/{COMMIT}/special_tokens_map.json")
            removed.unlink()
        with serving(files, silent=name != "hub") as server:
            env = {
                "HF_HUB_OFFLINE": "0",
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "HF_HOME": str(base / f"{name}-home"),
                "HANGPROOF_HUB_TIMEOUT_S": "4" if server.silent else "120",
                "HF_HUB_ETAG_TIMEOUT": "300",
                "no_proxy": "127.0.0.1",
            }
            told[name] = helpers.module(base / name, TOKENIZER, **env), server.asked

    load("hub")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, ("cache", "half")))
    return told


def test_a_tokenizer_comes_from_the_hub_where_the_cache_is_empty(loads):
    ended, asked = loads["hub"]
    assert ended.code == 0 and "words 1000 77" in ended.log, ended
    assert any(path.endswith("vocab.json") for path in asked)


def test_a_tokenizer_whose_cache_is_whole_needs_no_hub(loads):
    """As with HF_HUB_OFFLINE=1: its loader would ask for the list of its files, without any limit."""
    ended, asked = loads["cache"]
    assert ended.code == 0 and "words 1000 77" in ended.log, ended
    assert asked == []


def test_a_hub_that_never_answers(loads):
    """And a cache that is not whole is not taken for one."""
    ended, asked = loads["half"]
    assert ended.code == 75 and asked and ended.hung_s() < 4 + 10, ended
    assert "hangproof: waited 4 s for a byte of " in ended.log
    assert "openai/clip-vit-large-patch14 from the hub" in ended.log


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("HANGPROOF_HUB_TIMEOUT_S", "60")
    monkeypatch.setattr(hub, "POLL_S", 0.05)
    monkeypatch.setattr(hub, "PAUSE_S", 0.01)


def test_a_slow_download_goes_on_as_long_as_bytes_come(tmp_path, monkeypatch):
    """By a clock of its own, which runs a second at each look: ten times the limit in all, never two looks without a byte."""
    blobs, looks = tmp_path / "models--a--b" / "blobs", []
    blobs.mkdir(parents=True)
    done = threading.Event()

    def seconds():
        looks.append(1)
        with open(blobs / "x.incomplete", "ab") as file:
            file.write(b"x")
        if len(looks) > 30:
            done.set()
        return float(len(looks))

    monkeypatch.setenv("HANGPROOF_HUB_TIMEOUT_S", "3")
    monkeypatch.setattr(hub, "POLL_S", 0.01)
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=seconds))
    assert hub.watched(lambda: done.wait(60) and "path", tmp_path, "a file") == "path"


def test_a_download_that_stands_still_ends_the_process(tmp_path):
    script = (
        "import time; from pathlib import Path; from sd_scripts_patches import hub\n"
        f"hub.watched(lambda: time.sleep(60), Path({str(tmp_path)!r}), 'model.bin of a/b')"
    )
    env = {**os.environ, "HANGPROOF_HUB_TIMEOUT_S": "0.5"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 75 and "waited 0.5 s for a byte of model.bin of a/b" in ended.stderr


def test_errors_of_the_network_are_tried_again_and_a_missing_file_is_not(tmp_path, impatient, capsys):
    tries = []

    def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("reset")
        return "path"

    assert hub.watched(flaky, tmp_path, "a file") == "path" and len(tries) == 3
    assert "a file: ConnectionError: reset; trying again (2 of 3)" in capsys.readouterr().err

    class Missing(OSError):
        response = SimpleNamespace(status_code=404)

    def missing():
        tries.append(1)
        raise Missing("no such file")

    tries.clear()
    with pytest.raises(Missing):
        hub.watched(missing, tmp_path, "a file")
    assert len(tries) == 1


def test_a_cached_file_is_taken_without_a_request(tmp_path, monkeypatch):
    """The real client, against an address where nobody listens."""
    download = pytest.importorskip("huggingface_hub.file_download")
    name, commit = "models--some--model", "a" * 40
    snapshot = tmp_path / name / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / name / "refs").mkdir()
    (tmp_path / name / "refs" / "main").write_text(commit)
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise ConnectionError("no network here")

    monkeypatch.setattr(hub, "PAUSE_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(download, "hf_hub_download", refuse)
        hub.apply_to_download(download)
        found = download.hf_hub_download("some/model", "config.json", cache_dir=str(tmp_path))
        assert Path(found) == snapshot / "config.json" and not asked
        with pytest.raises(ConnectionError):
            download.hf_hub_download("some/model", "other.json", cache_dir=str(tmp_path))
        assert len(asked) == 3
