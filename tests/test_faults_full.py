"""Every row of the fault matrix: `pytest -m long tests/test_faults_full.py`, a quarter of an hour on two free cores."""

import pytest

from benchmarks import faults

ROWS = faults.table()
SLACK_S = 120.0  # how soon is for `python -m benchmarks faults --run` and `goodput` to say


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ROWS)
def test_a_fault_ends_as_the_table_says(name):
    result = faults.run(ROWS[name], slack_s=SLACK_S)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["ok"], faults.tell(ROWS[name], result)
