"""The model hub: cached files need no network, and a hub that is out of reach leaves the library to its own error."""

import os
import subprocess
from pathlib import Path

import hub_server
import patches_helpers as helpers
import tiny_sd_scripts as tiny

TOKENIZER = """
import os, sys
from transformers import CLIPTokenizer
from library.strategy_base import TokenizeStrategy
for removed in ("", *sys.argv[1:]):
    if removed:
        os.remove(removed)
    made = TokenizeStrategy()._load_tokenizer(CLIPTokenizer, "openai/clip-vit-large-patch14")
    print("words", len(made), made.model_max_length, flush=True)
"""


def environment(server, home: Path) -> dict[str, str]:
    found = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": server.url, "HF_HOME": str(home), "no_proxy": "127.0.0.1,localhost"}
    return {**found, "HANGPROOF_HUB_TIMEOUT_S": "120", "HANGPROOF_HUB_REACH_S": "4" if server.silent else "120"}


def test_a_tokenizer_comes_from_the_hub_then_from_the_cache_as_it_is(newest, tmp_path):
    """With a complete cache its loader would request the list of its files, without a timeout. A cache that lacks an
    optional file, as a killed download leaves it, is used, as without the patches; a silent hub is waited for once."""
    folder = tiny.workdir() / "tokenizers" / "openai_clip-vit-large-patch14"
    with hub_server.serving({path.name: path.read_bytes() for path in folder.iterdir()}) as server:
        found = helpers.module(tmp_path, TOKENIZER, **environment(server, tmp_path / "home"))
        assert found.code == 0 and "words 1000 77" in found.log, found
        assert any(path.endswith("vocab.json") for _, path, _ in server.requests)
        server.requests.clear()
        server.silent = True
        (optional,) = (tmp_path / "home").rglob(f"snapshots/{hub_server.COMMIT}/special_tokens_map.json")
        found = helpers.module(tmp_path, TOKENIZER, str(optional), **environment(server, tmp_path / "home"))
        complete, _, half = found.log.partition("words 1000 77")
        assert found.code == 0 and "out of reach" not in complete, found
        assert half.count("is out of reach") == 1 and "words 1000 77" in half, found
        assert server.requests and not any(path.endswith("vocab.json") for _, path, _ in server.requests)


LOAD = """
import huggingface_hub.file_download as module
from sd_scripts_patches import hub
hub.prepare(True)
load = hub._cache_first(module.hf_hub_download)
print("arrived", load("me/model", "weights.bin"), flush=True)
"""
WEIGHTS = bytes(range(256)) * 12_000  # 3 MB


def load(server, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment(server, home) | {"HANGPROOF_HUB_TIMEOUT_S": "5"}
    command = [str(tiny.python()), "-c", LOAD]
    return subprocess.run(command, cwd=tiny.ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_a_stalled_download_ends_the_process_is_resumed_and_what_arrives_damaged_is_deleted(newest, tmp_path):
    """With the trainer's huggingface-hub, which resumes its partial file."""
    with hub_server.serving({"weights.bin": WEIGHTS}) as server:
        server.faults = [hub_server.Fault("stall", 2_500_000)]
        done = load(server, tmp_path / "home")
        assert done.returncode == 75 and "waited 5 s for a byte of weights.bin of me/model" in done.stderr
        server.requests.clear()
        server.faults = [hub_server.Fault("flipped")]
        done = load(server, tmp_path / "home")
        asked = [headers["range"] for _, _, headers in server.requests if "range" in headers]
        assert asked == [f"bytes={2 << 20}-"] and "weights.bin of me/model arrived damaged" in done.stderr
        done = load(server, tmp_path / "home")
        assert Path(done.stdout.split()[-1]).read_bytes() == WEIGHTS, done.stderr
