"""`benchmarks snapshots`: what it concludes from measured steps, and the meter inside a real training."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import trainer_helpers as helpers

from benchmarks import snapshots
from guards.snapshots import FOLDER


def rows(blocks=4, steps=20, every=4, **changed):
    """Steps of one second; a snapshot keeps its step waiting for 12 ms, and its thread uses 5 in the next one."""
    found = []
    for number in range(blocks * steps):
        block, place = number // steps, number % every
        taking = block % 2 == 0
        row = {
            "block": block, "snapshots": taking, "taken": taking and place == 0, "clock_s": 0.012 * (taking and place == 0),
            "thread_s": 0.005 * (taking and place == 1), "wall_s": 1.0, "stolen_s": 0.0, "rest_s": 0.0, "every": every, "off": "",
        }  # fmt: skip
        found.append(row | {key: value(number) for key, value in changed.items()})
    return found


def test_the_figures_are_those_of_the_steps():
    found = snapshots.figures(rows())
    assert found["steps"] == {"with": 25, "without": 25, "left_out": 0} and found["every_steps"] == 4
    assert found["snapshots"] == 6 and found["in_its_step_ms"] == 12.0
    assert found["share_of_time"] == pytest.approx(0.017 * 6 / 25, abs=1e-5)
    assert snapshots.judge({"built-in": found}) == []
    rest = snapshots.figures(rows(rest_s=lambda n: 0.25 * (n == 59)))
    assert rest["share_of_time"] == pytest.approx((0.017 * 6 + 0.25) / 25, abs=1e-5)
    (line,) = snapshots.judge({"built-in": rest, "sd-scripts": {"skipped": "no checkout"}})
    assert line == "built-in: snapshots take 1.41% of the time, the limit is 1%"


def test_steps_of_which_the_host_took_a_part_are_left_out():
    slow = snapshots.figures(rows(stolen_s=lambda n: 0.2 * (n % 7 == 3), wall_s=lambda n: 1.0 + 0.2 * (n % 7 == 3)))
    assert slow["steps"]["left_out"] > 0 and slow["step_s"] == {"with": 1.0, "without": 1.0}
    with pytest.raises(RuntimeError, match="too few are left"):
        snapshots.figures(rows(stolen_s=lambda n: 0.2 * (n % 4 != 0)))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_the_meter_measures_each_step_of_a_training(tmp_path):
    from trainer.tiny_flux import ensure

    ring, record = Path(tempfile.mkdtemp(prefix="hangproof-test-", dir="/dev/shm")), tmp_path / "record"
    config = helpers.make_config(tmp_path / "data.toml", helpers.make_images(tmp_path / "images"))
    try:
        done = helpers.fork(
            helpers.flags(
                ensure(tmp_path / "model"), config, tmp_path / "out", max_train_steps=13, save_every_n_steps=4, save_state=True
            ),
            **{FOLDER: str(ring), "METER_RECORD": str(record), "METER_BLOCK": "2"},
            HANGPROOF_INJECT="benchmarks.snapshot_meter:fire",
            HANGPROOF_HEARTBEAT=str(tmp_path / "beat"),
        )  # fmt: skip
    finally:
        shutil.rmtree(ring, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["block"], row["snapshots"]) for row in found] == [(n // 2, n // 2 % 2 == 0) for n in range(12)]
    assert any(row["taken"] for row in found) and not any(row["taken"] for row in found if not row["snapshots"])
    assert all(row["clock_s"] > 0 for row in found if row["taken"]) and all(row["wall_s"] > 0 for row in found)
