"""Each known hang, injected: the process exits in time, its exit code is right, the log names what it waited for.

The small probes use the libraries and classes that sd-scripts uses, under the launcher;
tests/upstream/test_sd_scripts.py does the same in complete training runs.
"""

import sys

import patches_helpers as helpers
import pytest
from patches_probes import PROBES, check, started

from guards import heartbeat

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="workers and FIFOs as on Unix")]


@pytest.fixture(scope="module")
def futures(request, tmp_path_factory):
    with started(request, tmp_path_factory, at_once=6) as found:
        yield found


@pytest.fixture
def result(request, futures):
    return futures[request.param].result()


@helpers.asks("result", *(name for name, probe in PROBES.items() if not probe.real))
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(result, request):
    check(*result)
    if request.node.callspec.params["result"] == "rank late":
        beats = heartbeat.read_all(result[1].folder / "hb")
        assert [(b.rank, b.outcome) for b in beats] == [(0, "deadline"), (1, "running")]
