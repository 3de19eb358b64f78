"""Restart or stop, and the table of limits: rules alone, no process."""

import re

import pytest

from monitor import limits, policy

LIMITS = limits.load()


def test_the_first_failure_is_answered_at_once_then_10_20_and_the_third_of_one_kind_ends_the_run():
    history = policy.History()
    plans = [policy.after_failure(history, "step/9/stuck", n == 0, False, LIMITS.restart) for n in range(3)]
    assert [p.wait_s for p in plans[:2]] == [0, 10]
    assert "3 times without one new step" in plans[2].stop


def test_a_run_that_makes_new_steps_restarts_at_once_up_to_ten_times():
    history = policy.History()
    plans = [policy.after_failure(history, f"step/{n}/stuck", True, False, LIMITS.restart) for n in range(11)]
    assert all(p.wait_s == 0 and not p.stop for p in plans[:10])
    assert "10 restarts are spent" in plans[10].stop


def test_ten_minutes_of_new_steps_give_the_allowance_back():
    history = policy.History()
    for n in range(10):
        policy.after_failure(history, f"step/{n}/stuck", True, False, LIMITS.restart)
    assert not history.progressed(599, LIMITS.restart)
    assert history.progressed(1, LIMITS.restart)
    assert policy.after_failure(history, "step/99/stuck", True, False, LIMITS.restart).stop == ""


def test_failures_of_changing_kinds_end_too_and_waiting_grows_to_five_minutes():
    history, waits = policy.History(), []
    for n in range(5):
        plan = policy.after_failure(history, f"load/0/cause-{n}", False, False, LIMITS.restart)
        waits.append(plan.wait_s)
    assert waits[:4] == [0, 10, 20, 40] and plan.stop
    changing = policy.History()
    waits = [policy.after_failure(changing, "load/0/oom", False, True, LIMITS.restart).wait_s for _ in range(10)]
    assert waits[-1] == 300, "while something is changed, the run goes on"
    assert policy.after_failure(changing, "load/0/oom", False, True, LIMITS.restart).stop


def test_a_cause_that_needs_time_gets_it_on_the_first_failure_too():
    assert policy.after_failure(policy.History(), "x", True, False, LIMITS.restart, least_wait_s=30).wait_s == 30


def test_the_times_of_a_pre_emption_fit_into_25_seconds():
    end = LIMITS.end
    assert end.preempt_save + end.preempt_grace + end.preempt_kill <= 23


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[watch]\nexitt = 3", "has no 'exitt'"),
        ("[wacht]\nexit = 3", "no section [wacht]"),
        ("[phases.steps]\nfloor = 3", "no phase 'steps'"),
        ("[end]\ngrace = -1", "0 or more"),
        ("[end]\ngrace = 'x'", "a number of seconds"),
        ("[end", "cannot read"),
    ],
)
def test_a_wrong_limits_file_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(limits.LimitsError, match=re.escape(words)):
        limits.load(path)
