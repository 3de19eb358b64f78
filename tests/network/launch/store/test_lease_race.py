"""A second writer of a run is seen in what a store was sent; tests/campaigns/test_preemption.py plays a trial of two machines."""

import pytest

from benchmarks.two_machines import Trial, judge, second_writers


def line(address: str, name: str, status: int = 200) -> str:
    return f'{address} - - [22/Nov/2026 10:00:00] "PUT /runs/t/toy/{name} HTTP/1.1" {status} -'


A, B = "10.77.0.1", "10.77.0.2"
HANDED_OVER = [
    line(A, "lease/000001.json"),
    line(B, "lease/000002.json", 412),
    line(A, "files/ab"),
    line(A, "manifests/000001-000001.json"),
    line(B, "lease/000002.json"),
    line(B, "manifests/000002-000001.json"),
]


@pytest.mark.parametrize(
    "late, writes, violations",
    [
        ([], 0, 0),
        ([line(A, "files/cd")], 1, 0),
        ([line(A, "manifests/000001-000002.json")], 1, 1),
        ([line(B, "manifests/000003-000001.json")], 0, 1),
        ([line(A, "manifests/000001-000002.json", 412)], 0, 0),
    ],
)
def test_a_second_writer_is_seen_in_the_log(late, writes, violations):
    numbers, found, texts = second_writers([*HANDED_OVER, *late], "t")
    assert (found, len(texts)) == (writes, violations) and numbers >= 2, texts


@pytest.mark.parametrize(
    "codes, reasons, whole",
    [
        ([4, 4], ["vm (process 1) since 2026 took the lease"] * 2, [False, False]),
        ([0, 4], ["80 steps", "the lease is gone"], [True, False]),
        ([0, 0], ["80 steps", "80 steps"], [True, True]),
        ([0, 1], ["80 steps", "vm (process 1) since 2026"], [True, False]),
        ([0, 4], ["80 steps", "vm (process 1) since 2026"], [False, False]),
    ],
)
def test_a_trial_without_a_winner_or_a_reason_is_a_violation(codes, reasons, whole):
    trial = Trial(0, [], codes=codes, reasons=reasons, manifests=1)
    judge(trial, whole)
    assert trial.violations
