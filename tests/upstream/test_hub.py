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
    limit = {"HANGPROOF_HUB_TIMEOUT_S": "4" if server.silent else "120"}
    return {**found, **limit, "HF_HUB_ETAG_TIMEOUT": "300"}


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


def test_the_library_finds_what_the_patch_downloaded(newest, tmp_path):
    """With the trainer's huggingface-hub; tests/network/guards/test_download.py has ours."""
    script = (
        "import os, sys, huggingface_hub.file_download as module\nfrom sd_scripts_patches import hub\n"
        "load = hub._cache_first(lambda *a, **k: sys.exit('the library downloads itself'))\n"
        "path = load('some/model', 'weights.bin')\n"
        "os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "assert module.hf_hub_download('some/model', 'weights.bin', local_files_only=True) == path\n"
        "print(os.path.getsize(path))"
    )
    with hub_server.serving({"weights.bin": bytes(300_000)}) as server:
        env = os.environ | environment(server, tmp_path / "home")
        done = subprocess.run(
            [str(tiny.python()), "-c", script], cwd=tiny.ROOT, env=env, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0 and done.stdout.strip() == "300000", done.stderr
