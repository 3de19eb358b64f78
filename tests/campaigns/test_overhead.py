"""The guards' price, measured by the benchmark that is shipped. The loop takes two minutes."""

from argparse import Namespace

import pytest
import tiny_sd_scripts as tiny

from benchmarks import overhead


def test_what_happens_once_a_step_costs_microseconds(tmp_path):
    """A client that asks its server each time takes 588 µs for a heartbeat alone."""
    costs = overhead.parts(tmp_path)
    assert costs["heartbeat_step"] <= overhead.LIMITS["heartbeat_us"], costs
    assert sum(costs.values()) < 1000, costs  # 1 % of a 100 ms step


@pytest.mark.timeout(600)
def test_all_patches_cost_one_percent_of_a_step_at_most():
    tiny.need()
    report = overhead.measure(Namespace(steps=120, monitor_seconds=0, against=None))
    assert not report.exceeded
    assert report.figures["loop"]["pairs"] == 2 * (120 - 1 - overhead.WARM_UP)


def test_the_comparison_finds_a_known_difference():
    plain = [0.1 + 0.01 * ((i * 7) % 5) for i in range(200)]
    made = overhead.compare(plain, [x + 0.002 for x in plain])
    assert made["difference_ms"] == pytest.approx(2.0, abs=1e-6) and made["share_of_100_ms"] == pytest.approx(0.02)
    assert made["low_ms"] <= made["difference_ms"] <= made["high_ms"]
