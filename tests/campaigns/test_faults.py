"""Every row of the fault matrix (faults.toml), two at a time; those of kohya's trainers need their checkouts.

    python -m pytest -s tests/campaigns/test_faults.py [-k step_sleeps]          45 minutes on two free cores

HANGPROOF_SEED chooses the steps. Each row of the built-in trainer is played twice: with snapshots in memory and the
standby attempt, and with both turned off (`-k off`, `-k "not off"`). Rows that are about them are played once.
HANGPROOF_SLACK_S=5, on an idle machine, also requires that each hang is declared as soon as its row says.
"""

import os
from functools import partial

import pytest
from faults import play, table, without_recovery
from patches_helpers import ahead
from seeds import seed

ROWS = table()
TWICE = [row for row in ROWS.values() if row["trainer"] == "built-in" and "recovery" not in row.get("needs", [])]
BOTH = ROWS | {row["name"]: row for row in map(without_recovery, TWICE)}
SLACK_S = float(os.environ.get("HANGPROOF_SLACK_S", "120"))


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    jobs = {name: partial(play, row, seed(), folder / name, SLACK_S) for name, row in BOTH.items()}
    with ahead(request, "played", jobs) as futures:
        yield futures


@pytest.fixture
def played(request, started):
    return started[request.param].result


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("played", BOTH, indirect=True)
def test_a_fault_ends_as_the_table_requires(played):
    played()
