"""Every row of the fault matrix, two at a time.

    python -m pytest tests/campaigns/test_faults.py          22 minutes on two free cores; HANGPROOF_SEED chooses the steps

Each row is played twice: with snapshots in memory and the standby attempt, and with both turned off (`-k off`, `-k "not
off"`). Rows that are about them are played once.
"""

import json
from functools import partial

import pytest
from patches_helpers import ahead, asks
from runs_helpers import python
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


def test_the_command_leaves_only_what_is_to_be_kept(tmp_path):
    """As a user types it; its temporary files are in a folder of the test's own."""
    (tmp_path / "tmp").mkdir()
    words = ("-m", "benchmarks", "faults", "--run", "gil_deadlock", "--keep", str(tmp_path / "kept"), "--json")
    done = python(*words, TMPDIR=str(tmp_path / "tmp"), timeout=500)
    result = json.loads(done.stdout)["rows"]["gil_deadlock"]
    # A busy machine may need longer than the row allows; the command then reports that and ends with 1.
    assert all("declared after" in problem for problem in result["problems"]), done.stderr
    assert done.returncode == bool(result["problems"]) and list((tmp_path / "tmp").iterdir()) == []
    (kept,) = (tmp_path / "kept").iterdir()
    assert result["kept"] == str(kept) and (kept / "monitor-1.txt").is_file()
    assert (kept / "data/outputs/fault/incidents/0001/report.md").is_file()
