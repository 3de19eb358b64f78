"""`benchmarks snapshots`: what it concludes from measured steps, and the meter inside a real training."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import trainer_helpers as helpers

from benchmarks import snapshots
from guards.snapshots import FOLDER


def rows(blocks=6, steps=20, every=4, **changed):
    """Steps of one second; a snapshot computes 10 ms in its step, 12 by the clock, and 5 in its thread in the next one; the third kind 8 times that."""
    found = []
    for number in range(blocks * steps):
        block, place = number // steps, number % every
        times = (1, 0, 8)[block % 3]
        row = {
            "block": block, "times": times, "taken": times > 0 and place == 0, "inside_s": 0.01 * times * (place == 0), "clock_s": 0.012 * times * (place == 0),
            "thread_s": 0.005 * times * (place == 1), "wall_s": 1.0, "cpu_s": 2.0, "stolen_s": 0.0, "rest_s": 0.0, "every": every, "off": "",
        }  # fmt: skip
        found.append(row | {key: value(number, row) for key, value in changed.items()})
    return found


def test_the_figures_are_those_of_the_steps():
    found = snapshots.figures(rows())
    assert found["steps"] == {"with": 25, "without": 25, "more": 25, "left_out": 0} and found["every_steps"] == 4
    assert found["in_its_step_ms"] == {"p50": 10.0, "p99": 10.0, "clock": 12.0}
    assert found["share_of_time"] == pytest.approx(0.017 * 6 / 25, abs=1e-5)
    rest = snapshots.figures(rows(rest_s=lambda n, row: 0.02 * (n == 79)))
    assert rest["share_of_time"] == pytest.approx((0.017 * 6 + 0.02) / 25, abs=1e-5)
    assert found["p99_ratio"] == {"found": 1.0, "low": 1.0, "high": 1.0}
    assert found["p99_ratio_by_work"] == pytest.approx(1 / 0.988, abs=1e-4)
    assert found["judged_by"] == "p99" and snapshots.judge("built-in", found) == []


@pytest.mark.parametrize("slower", [0.5, 1.0, 1.5])
def test_work_that_makes_a_step_longer_than_itself_counts_for_more(slower):
    """Each step with snapshots computes 10 ms, with eight times as many 80; the clock sees `slower` of that, and much else."""
    spread = {"clock_s": lambda n, row: 0.0, "thread_s": lambda n, row: 0.01 * row["times"]}
    noise = 0.3, 0.0, 0.1, 0.02, 0.0, 0.0, 0.2
    found = snapshots.figures(
        rows(30, wall_s=lambda n, row: 1.0 + noise[n % 7] + slower * 0.01 * row["times"], **spread)
    )
    assert found["slower"]["found"] == pytest.approx(slower, abs=0.01) and found["judged_by"] == "work"
    assert found["slower"]["low"] <= slower <= found["slower"]["high"]
    assert found["p99_ratio_by_work"] == pytest.approx(1 + 0.01 * max(1.0, slower), abs=5e-4)


def test_of_a_step_longer_than_asked_for_the_copy_counts_as_a_part_of_the_shorter_one():
    """15 ms of copy are 1.5 % of a second in a step of two as well; 4 ms of its thread are a part of the step that it was."""
    row = {"wall_s": 2.0, "clock_s": 0.015, "thread_s": 0.004}
    assert snapshots.longer_by_work(row, 1.0, 1.0) == pytest.approx(1 + 0.015 + 0.004 / 1.981)
    assert snapshots.longer_by_work(row | {"wall_s": 0.5}, 1.0, 1.0) == pytest.approx(1 + 0.019 / 0.481)
    assert snapshots.longer_by_work(row, 1.0, 2.0) == pytest.approx(1 + 2 * (0.015 + 0.004 / 1.981))


def test_steps_of_which_the_host_took_a_part_are_left_out():
    slow = snapshots.figures(
        rows(stolen_s=lambda n, row: 0.2 * (n % 7 == 3), wall_s=lambda n, row: 1.0 + 0.2 * (n % 7 == 3))
    )
    assert slow["steps"]["left_out"] > 0 and slow["step_s"]["with"]["p99"] == slow["step_s"]["without"]["p99"] == 1.0
    with pytest.raises(RuntimeError, match="too few are left"):
        snapshots.figures(rows(stolen_s=lambda n, row: 0.2 * (n % 4 != 0)))


def test_a_busy_machine_is_judged_by_work_and_a_limit_is_named():
    noisy = snapshots.figures(
        rows(wall_s=lambda n, row: 1.0 + 0.1 * (n % 10 == 9), clock_s=lambda n, row: 0.03 * row["taken"])
    )
    assert noisy["judged_by"] == "work" and noisy["p99_ratio_by_work"] == pytest.approx(1 / 0.97, abs=1e-4)
    (p99,) = [line for line in snapshots.judge("sd-scripts", noisy) if "p99" in line]
    assert p99 == "sd-scripts: the p99 step (work) is 1.031 times as long, the limit is 1.02"
    quiet = snapshots.figures(rows(wall_s=lambda n, row: 1.0 + 0.05 * row["taken"]))
    assert quiet["judged_by"] == "p99" and quiet["p99_ratio"]["found"] == 1.05


def test_snapshots_that_are_off_say_nothing():
    with pytest.raises(RuntimeError, match="off: no room"):
        snapshots.figures(rows(off=lambda n, row: "no room"))


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
    steps = [row for row in found if "times" in row]
    assert [(row["block"], row["times"]) for row in steps] == [(n // 2, (1, 0, 8)[n // 2 % 3]) for n in range(12)]
    assert any(row["taken"] for row in steps) and not any(row["taken"] for row in steps if not row["times"])
    assert all(row["inside_s"] > 0 for row in steps if row["taken"]) and all(row["wall_s"] > 0 for row in steps)
    assert {row["save"] for row in found if "save" in row} == {4, 8, 12, 13}
