"""The model hub: cached files need no network, and a hub that is out of reach leaves the library to its own error."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub_server
import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny

TOKENIZER = """
from transformers import CLIPTokenizer
from library.strategy_base import TokenizeStrategy
made = TokenizeStrategy()._load_tokenizer(CLIPTokenizer, "openai/clip-vit-large-patch14")
print("words", len(made), made.model_max_length, flush=True)
"""


def environment(server, home: Path) -> dict[str, str]:
    found = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": server.url, "HF_HOME": str(home), "no_proxy": "127.0.0.1,localhost"}
    return {**found, "HANGPROOF_HUB_TIMEOUT_S": "120", "HANGPROOF_HUB_REACH_S": "4" if server.silent else "120"}


@pytest.fixture(scope="module")
def loads(newest, tmp_path_factory):
    """A tokenizer loaded three times: from the hub; from the cache that this created, with a silent hub; and from a copy
    of the cache as a killed download leaves it, with a silent hub. For each: the result and the requests to the hub."""
    base, results = tmp_path_factory.mktemp("hub"), {}
    folder = tiny.workdir() / "tokenizers" / "openai_clip-vit-large-patch14"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def load(name):
        (base / name).mkdir()
        home = base / f"{name}-home"
        if name != "hub":
            shutil.copytree(base / "hub-home", home, symlinks=True)
        if name == "half":
            (removed,) = home.rglob(f"snapshots/{hub_server.COMMIT}/special_tokens_map.json")
            removed.unlink()
        with hub_server.serving(files) as server:
            server.silent = name != "hub"
            result = helpers.module(base / name, TOKENIZER, **environment(server, home))
            results[name] = result, [path for _, path, _ in server.requests]

    load("hub")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, ("cache", "half")))
    return results


@pytest.mark.parametrize("name", ["hub", "cache", "half"])
def test_a_tokenizer_comes_from_the_hub_or_from_the_cache_as_it_is(loads, name):
    """With a complete cache its loader would request the list of its files, without a timeout. A cache that lacks an
    optional file is used, as without the patches; each missing file does not wait again."""
    result, requests = loads[name]
    assert result.code == 0 and "words 1000 77" in result.log, result
    assert any(path.endswith("vocab.json") for path in requests) == (name == "hub")
    assert bool(requests) == (name != "cache") and result.log.count("is out of reach") == (name == "half")


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
    return subprocess.run(
        [str(tiny.python()), "-c", LOAD], cwd=tiny.ROOT, env=env, capture_output=True, text=True, timeout=300
    )


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
