"""The model hub: cached files need no network, a stalled download ends the process, a missing file is not retried, and a hub
that is out of reach leaves the library to its own error."""

import contextlib
import http.server
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny

ROOT = Path(__file__).resolve().parents[2]
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
    """The part of the hub that its client uses: the files of one repository by name, 404 for everything else."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        server = self.server
        server.requests.append(self.path)
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
        server.files, server.requests = files, []
        server.silent, server.closing = silent, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture(scope="module")
def loads(newest, tmp_path_factory):
    """A tokenizer loaded three times: from the hub; from the cache that this created, with a silent hub; and from a copy
    of the cache as a killed download leaves it, with a silent hub. For each: the result and the requests to the hub."""
    base, results = tmp_path_factory.mktemp("hub"), {}
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
            results[name] = helpers.module(base / name, TOKENIZER, **env), server.requests

    load("hub")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, ("cache", "half")))
    return results


def test_a_tokenizer_comes_from_the_hub_when_the_cache_is_empty(loads):
    result, requests = loads["hub"]
    assert result.code == 0 and "words 1000 77" in result.log, result
    assert any(path.endswith("vocab.json") for path in requests)


def test_a_tokenizer_with_a_complete_cache_needs_no_hub(loads):
    """As with HF_HUB_OFFLINE=1: otherwise its loader requests the list of its files, without a timeout."""
    result, requests = loads["cache"]
    assert result.code == 0 and "words 1000 77" in result.log, result
    assert requests == []


def test_a_hub_that_never_answers(loads):
    """A cache that lacks an optional file is used, as without the patches; each missing file does not wait again."""
    result, requests = loads["half"]
    assert result.code == 0 and "words 1000 77" in result.log, result
    assert requests and result.hung_s() < 4 + 5 + 15, result
    assert result.log.count("is out of reach") == 1


def test_the_library_finds_what_the_patch_downloaded(newest, tmp_path):
    """With the trainer's huggingface-hub; tests/network/guards/test_download.py has ours."""
    python = str(tiny.python())
    files = tmp_path / "files"
    files.mkdir()
    (files / "weights.bin").write_bytes(bytes(300_000))
    script = (
        "import os, sys, huggingface_hub.file_download as module\nfrom sd_scripts_patches import hub\n"
        "load = hub._cache_first(lambda *a, **k: sys.exit('the library downloads itself'))\n"
        "path = load('some/model', 'weights.bin')\n"
        "os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "assert module.hf_hub_download('some/model', 'weights.bin', local_files_only=True) == path\n"
        "print(os.path.getsize(path))"
    )
    with serving(files, silent=False) as server:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "no_proxy": "127.0.0.1",
        }
        done = subprocess.run(
            [python, "-c", script], cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0 and done.stdout.strip() == "300000", done.stderr
