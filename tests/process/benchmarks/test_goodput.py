"""The goodput benchmark counts correctly, and its verdict names each limit that is exceeded."""

import pytest

from benchmarks import goodput


def line(what, step, t):
    return {"what": what, "step": step, "t": t, "wall": 1000.0 + t, "pid": 1}


LEDGER = [
    line("start", 0, 0.0),
    *(line("step", n, 0.1 * n) for n in range(1, 11)),
    line("step_sleeps", 10, 1.0),
    line("start", 0, 3.0),
    line("resume", 8, 3.1),
    line("step", 9, 3.2),
    line("step", 10, 3.3),
    line("step", 11, 3.5),
    line("sigkill", 11, 3.5),
    line("start", 0, 4.0),
    line("resume", 8, 4.1),
    *(line("step", n, 4.1 + 0.1 * (n - 8)) for n in range(9, 13)),
]


def test_the_ledger_is_scored_the_same_for_every_contender():
    scored = goodput.score(LEDGER, noticed=[1002.2], steps=12, unseen=[], wall_s=6.0)
    assert scored["detection_s"] == pytest.approx([1.2])
    assert scored["hang_to_step_s"] == pytest.approx([2.5])  # not 9 and 10, which had been trained before
    assert scored["crash_to_step_s"] == pytest.approx([1.0])
    assert scored["repeated"] == 5
    assert scored["useful_s"] == pytest.approx(12 * goodput.STEP_S)


def figures(hang_to_step=(1.5, 1.9), goodput_of=0.65, detection=1.4, crash_to_step=0.5, repeated=10, **changed):
    """One contender's figures as `summarize` makes them."""
    p50, p95 = hang_to_step
    changed = {"each_run": [{"faults": 5, "repeated": repeated}, {"faults": 5, "repeated": 0}] * 3, **changed}
    changed["crash_to_step_s"] = {"p50": crash_to_step, "p95": crash_to_step, "n": 6}
    made = {"runs": 3, "right_result": 3, "hangs": 9, "unseen": 0, "goodput": goodput_of}
    made |= {"detection_s": {"p50": detection, "p95": detection, "n": 9}}
    return made | {"hang_to_step_s": {"p50": p50, "p95": p95, "n": 9}, **changed}


BLIND = {"detection_s": None, "hang_to_step_s": None, "unseen": 9}


@pytest.mark.parametrize(
    ("ours", "others", "exceeded"),
    [
        ({}, {}, []),
        ({"detection": 3.1}, {}, ["detection_p95_s is 3.1, the limit is 3"]),
        ({"hang_to_step": (2.0, 2.2)}, {}, ["hang_to_step_p95_of_ft_launcher is 0.55, the limit is 0.5"]),
        ({"crash_to_step": 0.8}, {}, ["crash_to_step_p95_of_torchrun is 0.4, the limit is 0.35"]),
        ({"repeated": 11}, {}, ["repeated_for_each_fault is 1.1, the limit is 1"]),
        ({"goodput_of": 0.56}, {}, ["goodput_of_ft_launcher is 1.4, the limit is 1.5"]),
        ({"right_result": 2}, {}, ["ours: 2 of 3 runs ended with the right file"]),
        ({"unseen": 1}, {}, ["ours detected 8 of 9 hangs"]),
        ({}, {"ft_launcher": {"not_measured": "no wheel"}}, []),
    ],
)
def test_the_verdict_names_each_limit_that_is_exceeded(ours, others, exceeded):
    results = {"ours": figures(**ours), "torchrun": figures(goodput_of=0.1, crash_to_step=2.0, **BLIND)}
    results |= {"ft_launcher": figures((3.0, 4.0), 0.4, 2.2), **others}
    comparison = goodput.compare(results)
    assert goodput.judge(results, comparison) == exceeded
    assert comparison["goodput_of_torchrun"] == pytest.approx(results["ours"]["goodput"] / 0.1)
    measured = "not_measured" not in results["ft_launcher"]
    assert (comparison["hang_to_step_p50_of_ft_launcher"] is not None) == measured
