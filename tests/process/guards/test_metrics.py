"""Lines on a full disk: a metric or an event that cannot be written costs that line, never a step, and no line after it."""

import json
import os
import sys

import children
import pytest

from guards.metrics import append_line

METRICS = (
    children.FULL_DISK
    + """
from guards.metrics import Metrics
metrics = Metrics(folder / "metrics.jsonl")
room(1003)
for step in range(1, 21):
    metrics.step(step, 1, 0.5, 1e-4, 0.1)
room(resource.RLIM_INFINITY)
for step in range(21, 24):
    metrics.step(step, 1, 0.5, 1e-4, 0.1)
"""
)


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE is POSIX")
def test_a_full_disk_costs_lines_and_raises_nothing_and_the_next_line_is_whole(tmp_path):
    done = children.run(METRICS, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    steps, torn = [], 0
    for line in lines:
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            torn += 1
    assert steps[-3:] == [21, 22, 23] and steps[0] == 1 and 20 not in steps and torn == 1
    assert done.stderr.count("the training goes on") == 1 and f"{23 - len(steps)} lines were lost" in done.stderr


def test_a_line_that_a_kill_cut_off_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\n{"kind": "b", "mess')
    append_line(path, {"kind": "c"})
    append_line(path, {"kind": "d"})
    assert path.read_bytes().splitlines()[-2:] == [b'{"kind": "c"}', b'{"kind": "d"}']
    assert os.stat(path).st_mode & 0o600 == 0o600
