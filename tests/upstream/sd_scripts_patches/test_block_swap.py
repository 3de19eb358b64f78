"""A block swap of kohya's own offloaders that hangs: the process exits in time and names what it waited for.

All ways to wait for a block go through the functions that are guarded.
"""

import patches_helpers as helpers
import pytest
import tiny_musubi
import tiny_sd_scripts

SD_SCRIPTS = """
import time
import torch
from library.custom_offloading_utils import ModelOffloader

class Stuck(ModelOffloader):
    def swap_weight_devices(self, a, b):
        time.sleep(3600)

blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
offloader = Stuck(blocks, 1, torch.device("cpu"), supports_backward=True)
x = torch.ones(1, 2, requires_grad=True)
for block in blocks:
    x = block(x)
x.sum().backward()
"""
MUSUBI = """
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from musubi_tuner.modules import custom_offloading_utils as utils

def made(name, **values):
    found = getattr(utils, name)
    found = found.__new__(found)
    vars(found).update(values)
    return found

stuck = {3: ThreadPoolExecutor(1).submit(time.sleep, 3600)}
"""
FUTURE = "made('ModelOffloader', futures=stuck, num_blocks=4, blocks_to_swap=1, debug=False, supports_backward=False)"
STREAM = "copy_stream=SimpleNamespace(synchronize=lambda: time.sleep(3600))"
HANGS = {
    SD_SCRIPTS: "block 0 of 4 to be swapped in (block swap, 1 blocks)",  # in a hook of the backward pass
    f"{MUSUBI}{FUTURE}.wait_for_block(3)": "block 3 of 4 to be swapped in (block swap, 1 blocks)",
    f"{MUSUBI}made('_StagedCopier', _futures=stuck).wait(3)": "block 3 to be copied to the device (block swap)",
    f"{MUSUBI}made('_DirectCopier', {STREAM}).sync()": "all blocks to be copied to the device (block swap)",
}


@pytest.mark.parametrize("source", HANGS, ids=["sd-scripts", "future", "copier", "stream"])
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(newest, musubi, tmp_path, source):
    trainer = tiny_musubi if source.startswith(MUSUBI) else tiny_sd_scripts
    run = helpers.module(tmp_path, source, "--blocks_to_swap=1", trainer=trainer, HANGPROOF_BLOCK_SWAP_TIMEOUT_S="1")
    assert run.code == 75 and f"waited 1 s for {HANGS[source]}" in run.log, run.log
    assert "Segmentation fault" not in run.log, run.log
