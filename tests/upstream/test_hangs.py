"""Known hangs in sd-scripts' own classes, injected under the launcher; the others are in tests/process/sd_scripts_patches/test_hangs.py."""

import re
from functools import partial

import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny
from patches_probes import PROBES


@pytest.fixture(scope="module")
def started(request, sd_scripts, tmp_path_factory):
    tiny.site()
    folders = tmp_path_factory.mktemp("probes")
    jobs = {name: partial(p.run, folders / name.replace(" ", "-")) for name, p in PROBES.items()}
    with helpers.ahead(request, "result", jobs, at_once=3) as futures:
        yield futures


@pytest.fixture
def result(request, started):
    return started[request.param].result()


@helpers.asks("result", "future, wait_for_block", "future, set_forward_only", "future, backward hook")
def test_a_stuck_future_of_block_swap(result, request):
    assert result.code == 75, result.log
    block = 0 if "backward hook" in request.node.callspec.params["result"] else 3
    assert f"waited 1 s for block {block} of 4 to be swapped in (block swap, 1 blocks)" in result.log
    assert "swap_weight_devices" in result.log, "the stack of the stuck pool thread is in the log"


@helpers.asks("result", "npz on a FIFO")
def test_an_npz_on_a_fifo(result):
    assert result.code == 1, result.log
    assert re.search(r"TimeoutError: waited 2 s for the directory of \S+x\.npz", result.log)


@helpers.asks("result", "npz truncated", "npz with a corrupt member")
def test_a_damaged_npz(result, request):
    part = "the directory" if "truncated" in request.node.callspec.params["result"] else "'latents'"
    assert result.code == 1, result.log
    assert re.search(rf"ValueError: \S+x\.npz is damaged \({part}: .*renamed to x\.npz\.corrupt", result.log), (
        result.log
    )


@helpers.asks("result", "tracker never starts, run fails")
def test_a_tracker_that_never_returns_does_not_hold_a_failed_run(result):
    """A run that does not fail continues offline (tests/upstream/test_sd_scripts.py) and saves everything (tests/upstream/test_save.py)."""
    assert result.code == 1 and "ValueError: the error of the script" in result.log, result.log
    assert "trained" in result.log
    assert "waited 2 s for trackers to start (tensorboard); the run continues offline" in result.log
