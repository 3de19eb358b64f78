"""Each known hang, injected: the process exits in time, its exit code is right, the log names what it waited for.

The small probes use the libraries that sd-scripts uses, under the launcher; tests/upstream/sd_scripts_patches/test_block_swap.py
its own classes, and tests/upstream/test_sd_scripts.py does the same in complete training runs.
"""

import re
import sys
from functools import partial

import patches_helpers as helpers
import pytest
from patches_probes import PROBES, wait_gone

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="workers and FIFOs as on Unix")]


@pytest.fixture(scope="module")
def futures(request, tmp_path_factory):
    """The probes of the selected tests, started together, because a probe mostly waits."""
    folders = tmp_path_factory.mktemp("probes")
    jobs = {name: partial(probe.run, folders / name.replace(" ", "-")) for name, probe in PROBES.items()}
    with helpers.ahead(request, "result", jobs, at_once=6) as found:
        yield found


@pytest.fixture
def result(request, futures):
    return futures[request.param].result()


@helpers.asks("result", *PROBES)
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(result):
    """The exit code and the log are those of the row, and no loader worker is left."""
    probe, run = result
    assert run.code == probe.code and probe.never not in run.log, run.log
    for text in probe.says:
        assert text in run.log, (text, run.log)
    pids = [int(pid) for pid in re.findall(r"HANG \S+ pid (\d+)", run.log)]
    assert bool(pids) == ("HANG" in probe.source), run.log
    wait_gone(pids)
