"""What the recovery decides, without a run."""

from monitor import config, recovery
from monitor.loop import Loop
from monitor.run_folder import RunFolder
from monitor.state import History, State
from monitor.supervisor import turn

CONFIG = config.load()


def after_failures(*failures):
    """The history, and (reason to stop, seconds to wait) of these failures in a row, each (mark, new steps, changes)."""
    history, plans = History(), []
    for mark, new_steps, changes in failures:
        history, *plan = recovery.after_failure(history, mark, new_steps, changes, CONFIG.restart)
        plans.append(plan)
    return history, plans


def test_the_first_failure_is_answered_at_once_then_after_10_s_and_the_third_of_one_kind_ends_the_run():
    _, plans = after_failures(*[("step/9/stuck", n == 0, False) for n in range(3)])
    assert [wait_s for _, wait_s in plans[:2]] == [0, 10]
    assert "3 times without a new step" in plans[2][0]


def test_a_run_that_makes_new_steps_restarts_at_once_up_to_ten_times():
    _, plans = after_failures(*[(f"step/{n}/stuck", True, False) for n in range(11)])
    assert all(wait_s == 0 and not stop for stop, wait_s in plans[:10])
    assert "10 restarts are used up" in plans[10][0]


def test_ten_minutes_of_new_steps_give_the_allowance_back():
    history, _ = after_failures(*[(f"step/{n}/stuck", True, False) for n in range(10)])
    history, refunded = recovery.after_progress(history, 599, CONFIG.restart)
    assert not refunded
    history, refunded = recovery.after_progress(history, 1, CONFIG.restart)
    assert refunded
    assert recovery.after_failure(history, "step/99/stuck", True, False, CONFIG.restart)[1] == ""


def test_failures_of_changing_kinds_end_too_and_waiting_grows_to_five_minutes():
    _, plans = after_failures(*[(f"load/0/cause-{n}", False, False) for n in range(5)])
    assert [wait_s for _, wait_s in plans[:4]] == [0, 10, 20, 40] and plans[4][0]
    history, plans = after_failures(*[("load/0/oom", False, True)] * 10)
    assert plans[-1][1] == 300, "while something is changed, the run is restarted"
    assert recovery.after_failure(history, "load/0/oom", False, True, CONFIG.restart)[1]


def test_a_failure_is_counted_in_the_returned_history_only():
    """recover() may be called again after an error in its middle: the failure must not count twice."""
    history = History()
    recovery.after_failure(history, "step/1/x", False, False, CONFIG.restart)
    assert history == History()


def test_a_cause_that_needs_time_gets_it_on_the_first_failure_too():
    assert recovery.after_failure(History(), "x", True, False, CONFIG.restart, least_wait_s=30)[2] == 30


def test_a_lora_that_does_not_verify_is_never_called_completed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('name = "run"\n')
    (folder / "run.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    loop = Loop(RunFolder(folder), turn)
    try:
        loop.at = loop.at.__class__(State.RUNNING)
        assert "damaged" in recovery.complete(loop)
        (folder / "run.safetensors").unlink()
        assert "missing" in recovery.complete(loop)
    finally:
        loop.at = loop.at.__class__(State.FAILED)
        loop.close()
