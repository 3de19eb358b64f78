"""A call with a limit, beside an alarm of other code and within another call, and a limit between two beats."""

import os
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from guards import deadline, heartbeat, npz


@pytest.fixture
def alarm():
    """Whatever a test sets is undone."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("outer_s", [60, 0.3], ids=["due later", "due first"])
def test_an_alarm_of_other_code_keeps_handler_and_time_and_the_read_its_limit(tmp_path, monkeypatch, alarm, outer_s):
    monkeypatch.setenv("HANGPROOF_NPZ_TIMEOUT_S", "1")
    os.mkfifo(tmp_path / "x.npz")
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    signal.setitimer(signal.ITIMER_REAL, outer_s)
    with pytest.raises(TimeoutError, match=r"waited 1 s for .*x\.npz"):
        npz.load(str(tmp_path / "x.npz"))
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    assert (rung, 0 < left_s < outer_s - 0.9) == ([], True) if outer_s > 1 else (rung, left_s) == ([True], 0)


def test_a_read_within_a_read_reports_the_limit_that_expired(alarm):
    def inner(seconds):
        deadline.bounded(lambda: time.sleep(60), seconds, "the inner")

    with pytest.raises(TimeoutError, match="the outer"):
        deadline.bounded(lambda: inner(60), 0.5, "the outer")
    with pytest.raises(TimeoutError, match="the inner"):
        deadline.bounded(lambda: inner(0.5), 60, "the outer")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


LOOKS = {  # what happens until the next look: the phase, a call with (beat, clock), when the limit of 20 s ends it
    "nothing": ("step", lambda beat, clock: None, 25),
    "items": ("step", lambda beat, clock: beat.item(1), 100),
    "items of another process, which this one waits for": ("step", lambda beat, clock: clock.other.item(1), 100),
    "much that is read": ("load", lambda beat, clock: clock.read(2 << 20), 100),
    "much that is read through a mapping": ("load", lambda beat, clock: clock.read(2 << 20, "read_bytes"), 100),
    "little that is read": ("load", lambda beat, clock: clock.read(1 << 10), 25),
    "much that is read, in a phase that reads nothing": ("step", lambda beat, clock: clock.read(2 << 20), 25),
    "a machine that sleeps for once": ("step", lambda beat, clock: clock.sleep(50) if clock.now_s == 20 else None, 95),
}


@pytest.mark.parametrize("what", LOOKS)
def test_a_process_ends_when_its_phase_brings_no_progress_for_longer_than_its_limit(tmp_path, monkeypatch, what):
    """In place of the thread, on a clock that stands still between two looks."""
    phase, happens, ends_s = LOOKS[what]
    clock = SimpleNamespace(now_s=0, bytes=Counter())
    clock.sleep = lambda interval_s: setattr(clock, "now_s", clock.now_s + interval_s)
    clock.read = lambda count, counter="rchar": clock.bytes.update({counter: count})

    def sleep(interval_s):
        if threading.current_thread() is not threading.main_thread():  # that of the deadlines of other tests
            return time.sleep(interval_s)
        clock.sleep(interval_s)
        happens(beat, clock)
        if clock.now_s >= 100:
            raise InterruptedError

    for module in (deadline, heartbeat):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    beat, clock.other = (heartbeat.Heartbeat(heartbeat.path_of(tmp_path, rank), rank, 2) for rank in (1, 0))
    monkeypatch.setattr(deadline, "moved_bytes", lambda process, counters: sum(clock.bytes[name] for name in counters))
    monkeypatch.setattr(deadline, "expire", expire := Mock(side_effect=InterruptedError))
    monkeypatch.setattr(deadline.threading, "Thread", lambda target, **_: SimpleNamespace(start=target))
    monkeypatch.setenv(f"HANGPROOF_PHASE_{phase.upper()}_S", "20")
    beat.phase(phase)
    with pytest.raises(InterruptedError):
        deadline.watch_phases(beat)
    assert clock.now_s == ends_s
    assert expire.call_args_list == ([((20, f"any progress in phase {phase}"),)] if ends_s < 100 else [])


@pytest.mark.parametrize(("stops_s", "ends_s"), [(0, 20), (300, 320)])
def test_a_deadline_does_not_count_the_time_for_which_the_process_was_stopped(monkeypatch, stops_s, ends_s):
    """As by Slurm's suspend or `docker pause`, which stop what it waits for as well."""
    clock = SimpleNamespace(now_s=0.0)

    def sleep(seconds):
        clock.now_s += max(seconds, 0.1) + (stops_s if clock.now_s < 10 <= clock.now_s + seconds else 0)

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    for name, value in (("_open", {}), ("_stopped_s", 0.0), ("_thread", "in its place")):
        monkeypatch.setattr(deadline, name, value)
    with deadline.Deadline(20, "a batch", action=Mock(side_effect=InterruptedError)), pytest.raises(InterruptedError):
        deadline._watch()
    assert clock.now_s == pytest.approx(ends_s, abs=0.3)
