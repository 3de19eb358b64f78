"""Probes of sd-scripts' own classes: block swaps that hang, and a tracker; tests/process has the others."""

import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny
from patches_probes import PROBES, check, started


@pytest.fixture(scope="module")
def futures(request, newest, tmp_path_factory):
    tiny.site()
    with started(request, tmp_path_factory, at_once=3) as found:
        yield found


@pytest.fixture
def result(request, futures):
    return futures[request.param].result()


@helpers.asks("result", *(name for name, probe in PROBES.items() if probe.real))
def test_the_process_ends_in_time_and_the_log_names_what_it_waited_for(result):
    check(*result)
