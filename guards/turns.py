"""What one process of a machine does first, before the others do it: downloads into a cache that they share.

Decision: the waiting ranks read the first rank's heartbeat. A barrier of the process group cannot be used, because
kohya's trainers fetch tokenizers before they have one. The wait has an end, `barrier_timeout_s`, like every barrier.
"""

from __future__ import annotations

import time

from guards import heartbeat, limits, startup
from guards.deadline import Deadline
from guards.heartbeat import Heartbeat

POLL_S = 0.05
WAITS = "waiting for rank"
"""Begins the note of a rank that waits for another one."""


def reach_in_turn(beat: Heartbeat, point: str) -> None:
    """Reach `point`; on a rank that is not the first of its machine, wait until that one has passed it.

    A process without a heartbeat folder has no other rank's record, and does not wait.
    """
    beat.reach(point)
    first = beat.rank - beat.local_rank
    if beat.path is None or beat.rank == first:
        return
    if has_passed(beat, first, point):
        return
    what = f"check point {startup.number(point)}, {startup.CHECK_POINTS[point]}"
    beat.item(0, note=f"{WAITS} {first} at {what}")
    limit_s = limits.seconds("barrier_timeout_s")
    with Deadline(limit_s, f"all ranks at a barrier (this is rank {beat.rank}: rank {first} is still at {what})"):
        while not has_passed(beat, first, point):
            time.sleep(POLL_S)
    beat.item(0, note="")


def has_passed(beat: Heartbeat, rank: int, point: str) -> bool:
    """Is `rank` behind `point`? A record of an earlier command of the same script does not count: that one has ended."""
    assert beat.path is not None
    try:
        other = heartbeat.read(heartbeat.path_of(beat.path.parent, rank))
    except heartbeat.HeartbeatError:
        return False  # it has not started
    reached = other.reached[startup.NAMES.index(point)] > 0
    return other.outcome == "running" and reached and other.point != point
