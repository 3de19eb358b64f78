"""Every row of the fault matrix, two at a time.

    python -m pytest tests/campaigns/test_faults.py          22 minutes on two free cores; HANGPROOF_SEED chooses the steps

Each row is played twice: with snapshots in memory and the standby attempt, and with both turned off (`-k off`, `-k "not
off"`). Rows that are about them are played once.
"""

from functools import partial

import pytest
from patches_helpers import ahead, asks
from seeds import seed

from benchmarks import faults

ROWS = faults.table()
OFF = {f"{name}-off": faults.without_recovery(r) for name, r in ROWS.items() if "recovery" not in r.get("needs", [])}
BOTH = ROWS | OFF
SLACK_S = 120.0  # `python -m benchmarks faults --run` and `goodput` measure how fast


@pytest.fixture(scope="module")
def started(request):
    jobs = {name: partial(faults.run, row, seed(), slack_s=SLACK_S) for name, row in BOTH.items()}
    with ahead(request, "result", jobs) as futures:
        yield futures


@pytest.fixture
def result(request, started):
    """The row's result."""
    return started[request.param].result()


@pytest.mark.timeout(2400)
@asks("result", *BOTH)
def test_a_fault_ends_as_the_table_requires(result):
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["ok"], result["problems"]
