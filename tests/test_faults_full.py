"""Every row of the fault matrix, two at a time: `pytest -m long tests/test_faults_full.py`, thirteen minutes on two cores."""

from functools import partial

import pytest
from patches_helpers import ahead, asks

from benchmarks import faults

ROWS = faults.table()
SLACK_S = 120.0  # `python -m benchmarks faults --run` and `goodput` measure how fast


@pytest.fixture(scope="module")
def started(request):
    jobs = {name: partial(faults.run, row, slack_s=SLACK_S) for name, row in ROWS.items()}
    with ahead(request, "result", jobs) as futures:
        yield futures


@pytest.fixture
def result(request, started):
    """The result of the row of that name."""
    return started[request.param].result()


@pytest.mark.long
@pytest.mark.timeout(2400)
@asks("result", *ROWS)
def test_a_fault_ends_as_the_table_requires(result):
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["ok"], faults.describe(ROWS[result["name"]], result)
