"""Probes of known hangs in sd-scripts' own classes (tests/support/patches_probes.py), those of a file's tests started together."""

import pytest
import tiny_sd_scripts as tiny
from patches_probes import started


@pytest.fixture(scope="module")
def futures(request, newest, tmp_path_factory):
    tiny.site()
    with started(request, tmp_path_factory, at_once=3) as found:
        yield found


@pytest.fixture
def result(request, futures):
    return futures[request.param].result()
