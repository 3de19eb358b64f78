"""Each known hang, injected into the real musubi-tuner: the process exits in time and names what it waited for.

Trackers, uploads and downloads have the patches of sd-scripts (tests/upstream/test_sd_scripts.py, ../test_hub.py).
"""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import hub_server
import musubi_helpers
import patches_helpers as helpers
import pytest
import tiny_musubi as tiny

OFFLOADER = """
import time
from concurrent.futures import ThreadPoolExecutor
from musubi_tuner.modules import custom_offloading_utils as utils
pool = ThreadPoolExecutor(1)
"""
FUTURE = """
offloader = utils.ModelOffloader.__new__(utils.ModelOffloader)
offloader.futures, offloader.num_blocks, offloader.blocks_to_swap = {3: pool.submit(time.sleep, 3600)}, 4, 1
offloader.debug = offloader.supports_backward = False
offloader.wait_for_block(3)
"""
COPIER = """
copier = utils._StagedCopier.__new__(utils._StagedCopier)
copier._futures = {3: pool.submit(time.sleep, 3600)}
copier.wait(3)
"""
STREAM = """
class Stream:
    def synchronize(self):
        time.sleep(3600)
copier = utils._DirectCopier.__new__(utils._DirectCopier)
copier.copy_stream = Stream()
copier.sync()
"""
TOKENIZER = """
from musubi_tuner.zimage import zimage_utils
zimage_utils.Qwen2Tokenizer.from_pretrained("me/model")
"""
SLOW_SCHEDULER = """
import time
step = module.FlowMatchEulerDiscreteScheduler.step
def slow(*args, **kwargs):
    time.sleep(1)
    return step(*args, **kwargs)
module.FlowMatchEulerDiscreteScheduler.step = slow
"""


def probe(folder, source, env=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.py").write_text(source)
    settings = tiny.environment(tiny.workdir(), HANGPROOF_BLOCK_SWAP_TIMEOUT_S="1", **dict(env))
    settings["PYTHONPATH"] = f"{folder}:{settings['PYTHONPATH']}"
    command = [str(tiny.python()), "-m", "sd_scripts_patches", "-m", "probe", "--blocks_to_swap"]
    return helpers.watch(command, settings, tiny.checkout(), 200)


def cache_fifo(folder):
    tiny.cached(tiny.workdir(), folder)
    path = sorted((folder / "cache").glob("*_zi.safetensors"))[2]
    path.unlink()
    os.mkfifo(path)
    return musubi_helpers.train(folder, "--max_train_epochs", "2", env={"HANGPROOF_NPZ_TIMEOUT_S": "2"}, code=None)


def image_fifo(folder):
    folder.mkdir(parents=True)
    shutil.copytree(tiny.workdir() / "images", folder / "images")
    (folder / "images/003.png").unlink()
    os.mkfifo(folder / "images/003.png")
    args = tiny.caching(tiny.dataset(folder, folder / "images"))["zimage_cache_latents.py"]
    env = tiny.environment(tiny.workdir(), HANGPROOF_IMAGE_TIMEOUT_S="2")
    return helpers.watch(tiny.command("zimage_cache_latents.py", *args), env, tiny.checkout(), 200)


def tokenizer(folder):
    with hub_server.serving({"vocab.json": b"{" + b" " * 9000}) as server:
        server.faults += [hub_server.Fault("stall", 1000)] * 20
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home")}
        env |= {"HANGPROOF_EXIT_GRACE_S": "2", "HANGPROOF_HUB_TIMEOUT_S": "2", "no_proxy": "127.0.0.1,localhost"}
        return probe(folder, TOKENIZER, env)


def slow_samples(folder):
    tiny.cached(tiny.workdir("qwen_image"), folder, family="qwen_image")
    (folder / "prompts.txt").write_text("a thing --w 64 --h 64 --s 30 --d 1\n")
    (folder / "slow.py").write_text(SLOW_SCHEDULER)
    more = ["--max_train_epochs", "2", "--sample_every_n_epochs", "1", "--sample_prompts", str(folder / "prompts.txt")]
    env = {"TINY_FAULTS": f"musubi_tuner.qwen_image.qwen_image_utils={folder / 'slow.py'}"}
    env |= {"HANGPROOF_SAMPLE_BUDGET_S": "2"}
    return musubi_helpers.train(folder, *more, env=env, family="qwen_image")


class Hang(NamedTuple):
    """run: trains or probes in a folder. code: its exit code. says: in the log. saves: it goes on and saves."""

    run: Callable
    code: int
    says: str
    saves: bool = False


SWAPS = {
    "future": (FUTURE, r"block 3 of 4 to be swapped in \(block swap, 1 blocks\)"),
    "copier": (COPIER, r"block 3 to be copied to the device \(block swap\)"),
    "stream": (STREAM, r"all blocks to be copied to the device \(block swap\)"),
}
HANGS = {
    **{name: Hang(partial(probe, source=OFFLOADER + code), 75, f"waited 1 s for {what}") for name, (code, what) in SWAPS.items()},
    "cache on a FIFO": Hang(cache_fifo, 1, "TimeoutError: waited 2 s for cache file "),
    "image on a FIFO": Hang(image_fifo, 1, r"TimeoutError: waited 2 s for image \S+003.png"),
    "slow samples of a bar without items": Hang(
        slow_samples, 0, "(?s)(sample image 1 skipped: BudgetExceeded: the budget of 2 s was exceeded.*){2}", saves=True
    ),
    "tokenizer": Hang(tokenizer, 75, "hangproof: waited 2 s for a byte of the tokenizer me/model "),
}  # fmt: skip


@pytest.fixture(scope="module")
def started(request, musubi, tmp_path_factory):
    tiny.workdir()
    base = tmp_path_factory.mktemp("hangs")

    def run(name):
        folder = base / name.replace(" ", "-")
        return folder, HANGS[name].run(folder)

    with helpers.ahead(request, "name", {name: partial(run, name) for name in HANGS}) as futures:
        yield futures


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_ends_in_time_and_the_log_names_what_it_waited_for(name, started):
    hang, (folder, run) = HANGS[name], started[name].result()
    assert run.code == hang.code and re.search(hang.says, run.log), run.log[-3000:]
    assert (folder / "made/tiny.safetensors").is_file() == hang.saves
