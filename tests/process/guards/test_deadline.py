"""The limit on the time between two beats, in a real process."""

import children
import pytest

from guards import heartbeat

pytestmark = pytest.mark.slow
CODE = """
import sys, threading
from guards import crash, deadline
from guards.heartbeat import Heartbeat
deadline.record_in = beat = Heartbeat(sys.argv[1])
crash.install(beat)
beat.phase("step")
deadline.watch_phases(beat, interval_s=0.1)
threading.Event().wait()
"""


@pytest.mark.journey
def test_a_wait_that_no_guard_covers_ends_with_the_name_of_its_phase(tmp_path):
    done = children.run(CODE, tmp_path / "rank-0.hb", HANGPROOF_PHASE_STEP_S="1")
    assert done.returncode == 75, done.stderr
    assert "waited 1 s for any progress in phase step" in done.stderr
    beat = heartbeat.read(tmp_path / "rank-0.hb")
    assert beat.outcome == "deadline" and "phase step" in beat.note
