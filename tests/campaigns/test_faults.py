"""Every row of the fault matrix, two at a time.

    python -m pytest tests/campaigns/test_faults.py          22 minutes on two free cores; HANGPROOF_SEED chooses the steps

Each row is played twice: with snapshots in memory and the standby attempt, and with both turned off (`-k off`, `-k "not off"`).
Rows that are about them are played once.
"""

import os
import subprocess
import sys
import time
from functools import partial

import pytest
from patches_helpers import ahead, asks
from seeds import seed

from benchmarks import faults, faults_reference
from monitor.process import platform
from runs.paths import ROOT

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
    """The row and its result."""
    return BOTH[request.param], started[request.param].result()


@pytest.mark.timeout(2400)
@asks("result", *BOTH)
def test_a_fault_ends_as_the_table_requires(result):
    row, played = result
    if played["skipped"]:
        pytest.skip(played["skipped"])
    assert played["ok"], faults.describe(row, played)


def test_a_killed_player_leaves_nothing_either(tmp_path):
    faults_reference.reference(0, {})  # made before, so that what is found below belongs to the scenario
    scratch = tmp_path / "tmp"
    scratch.mkdir()

    def ours() -> dict[int, str]:
        needle = f"\0TMPDIR={scratch}/".encode()
        found = [pid for pid, process in platform.scan().items() if not process.dead]
        return {pid: platform.command_of(pid) for pid in found if needle in b"\0" + platform.environ_of(pid)}

    def until(what, met):
        end = time.monotonic() + 300
        while not met():
            assert time.monotonic() < end, f"not within 300 s: {what}; {ours()}, {list(scratch.iterdir())}"
            time.sleep(0.1)

    command = [sys.executable, "-m", "benchmarks", "faults", "--run", "step_sleeps"]
    player = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL)
    try:
        until("a trainer at work", lambda: any("trainer" in line for line in ours().values()))
    finally:
        player.kill()
        player.wait()
    until("the end of all that it started", lambda: not ours() and not list(scratch.iterdir()))
