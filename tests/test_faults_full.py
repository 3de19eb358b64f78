"""Every row of the fault matrix, a quarter of an hour: `pytest -m long tests/test_faults_full.py`."""

import pytest

from benchmarks import faults

ROWS = faults.table()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROWS)
def test_a_fault_ends_as_the_table_says(name):
    result = faults.run(ROWS[name])
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["ok"], faults.tell(ROWS[name], result)
