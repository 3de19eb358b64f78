"""A call with a limit, beside an alarm of other code and within another call."""

import os
import signal
import time

import pytest

from guards import deadline, npz

needs_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no SIGALRM on this platform")


@pytest.fixture
def alarm():
    """Whatever a test sets is undone."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@needs_alarm
@pytest.mark.parametrize("outer_s", [60, 0.3], ids=["due later", "due first"])
def test_an_alarm_of_other_code_keeps_its_handler_and_its_time_and_the_read_its_limit(
    tmp_path, monkeypatch, alarm, outer_s
):
    monkeypatch.setenv("HANGPROOF_NPZ_TIMEOUT_S", "1")
    os.mkfifo(tmp_path / "x.npz")
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    signal.setitimer(signal.ITIMER_REAL, outer_s)
    with pytest.raises(TimeoutError, match=r"waited 1 s for .*x\.npz"):
        npz.load(str(tmp_path / "x.npz"))
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    assert (rung, 0 < left_s < outer_s - 0.9) == ([], True) if outer_s > 1 else (rung, left_s) == ([True], 0)


@needs_alarm
def test_a_read_within_a_read_reports_the_limit_that_expired(alarm):
    def inner(seconds):
        deadline.bounded(lambda: time.sleep(60), seconds, "the inner")

    with pytest.raises(TimeoutError, match="the outer"):
        deadline.bounded(lambda: inner(60), 0.5, "the outer")
    with pytest.raises(TimeoutError, match="the inner"):
        deadline.bounded(lambda: inner(0.5), 60, "the outer")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
