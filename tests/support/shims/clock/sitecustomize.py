"""Moves the clocks of the monitor: a suspend, or a wall clock that somebody sets. First on PYTHONPATH.

FAULTS_CLOCK names a JSON file {"boot": seconds, "wall": seconds} that is added to the boot clock and the wall clock.
Only the process `python -m monitor run …` is changed; the monotonic clock never is, nor is any clock of the training.
"""

import os
import sys


def _install(path):
    import json
    import time

    real_time, real_clock = time.time, time.clock_gettime

    def offset(name):
        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file).get(name, 0.0)
        except (OSError, ValueError):
            return 0.0  # not written yet

    def clock_gettime(clock):
        seconds = real_clock(clock)
        if clock == getattr(time, "CLOCK_BOOTTIME", None):
            return seconds + offset("boot")
        return seconds + offset("wall") if clock == time.CLOCK_REALTIME else seconds

    time.time, time.clock_gettime = lambda: real_time() + offset("wall"), clock_gettime


if "FAULTS_CLOCK" in os.environ and any(sys.orig_argv[i : i + 3] == ["-m", "monitor", "run"] for i in range(5)):
    _install(os.environ["FAULTS_CLOCK"])
