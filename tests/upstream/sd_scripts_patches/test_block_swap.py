"""A block swap of sd-scripts' own offloader that hangs: the process exits in time and names what it waited for."""

import patches_helpers as helpers

SWAP = """
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


def test_the_process_ends_in_time_and_the_log_names_the_block_it_waited_for(newest, tmp_path):
    """In a hook of the backward pass. All ways to wait for a block go through the function that is guarded."""
    run = helpers.module(tmp_path, SWAP, HANGPROOF_BLOCK_SWAP_TIMEOUT_S="1")
    waited = "waited 1 s for block 0 of 4 to be swapped in (block swap, 1 blocks)"
    assert run.code == 75 and waited in run.log, run.log
    assert "swap_weight_devices" in run.log and "Segmentation fault" not in run.log, run.log
