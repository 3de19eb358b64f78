"""The limit on the time between two beats, in real processes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import children
import pytest

from guards import heartbeat

pytestmark = pytest.mark.slow
CODE = """
import sys, time
from guards import crash, deadline
from guards.heartbeat import Heartbeat
beat = Heartbeat({folder!r})
crash.install(beat)
deadline.record_in = beat
beat.phase({phase!r})
deadline.watch_phases(beat, interval_s=0.1)
{body}
print("ended by itself")
"""


def run(tmp_path, phase: str, body: str, **limits_s: str):
    return children.run(CODE.format(folder=str(tmp_path / "rank-0.hb"), phase=phase, body=body), **limits_s)


@pytest.mark.journey
def test_a_wait_that_no_guard_covers_ends_with_the_name_of_its_phase(tmp_path):
    done = run(tmp_path, "step", "import threading; threading.Event().wait()", HANGPROOF_PHASE_STEP_S="1")
    assert done.returncode == 75, done.stderr
    assert "waited 1 s for any progress in phase step" in done.stderr
    beat = heartbeat.read(tmp_path / "rank-0.hb")
    assert beat.outcome == "deadline" and "phase step" in beat.note


PROGRESS = {
    "step": "for n in range(30): time.sleep(0.15); beat.item(n)",
    "cache_text": "for n in range(9): time.sleep(0.5); beat.step(n)",
    "load": "for n in range(30): time.sleep(0.15); open('/dev/zero', 'rb').read(3 << 20)",
}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count the bytes of a process")
def test_a_process_that_makes_progress_is_left_alone(tmp_path):
    def one(phase):
        folder = tmp_path / phase
        folder.mkdir()
        return run(folder, phase, PROGRESS[phase], **{f"HANGPROOF_PHASE_{phase.upper()}_S": "3"})

    with ThreadPoolExecutor(3) as pool:
        for done in pool.map(one, PROGRESS):
            assert (done.returncode, done.stdout) == (0, "ended by itself\n"), done.stderr
