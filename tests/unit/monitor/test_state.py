"""What is kept between two monitors, and what a status says about its age."""

import time

from monitor.process import platform
from monitor.run_folder import RunFolder
from monitor.state import AttemptRecord, RunState, Shutdown, State, with_age


def test_the_state_is_the_same_after_it_was_saved_and_loaded(tmp_path):
    folder = RunFolder(tmp_path)
    record = AttemptRecord("boot", 3, "token", "/tmp/x", 10, 1.5, (7, 8.0), {"/proc/vmstat": 2})
    saved = RunState(State.RECOVERING, 3, current=record, incident="0001", failing=True, shutdown=Shutdown("stopped"))
    assert saved.save(folder)
    assert RunState.load(folder) == saved


def test_old_figures_are_called_old():
    now_s = time.monotonic()
    known = {"state": "running", "alive": True, "boot": platform.boot_id()[:8], "updated_at": platform.utc(time.time())}
    fresh = with_age({**known, "updated_mono_s": now_s})
    assert fresh["stale"] == "" and fresh["age_s"] < 25
    old = with_age({**known, "updated_mono_s": now_s - 95})
    assert old["stale"].endswith("s old: the monitor does not respond") and 94 <= old["age_s"] < 130
    assert with_age({**known, "alive": False, "updated_mono_s": now_s - 95})["stale"] == ""
    rebooted = {**known, "boot": "another", "updated_at": "2026-01-01T00:00:00Z", "updated_mono_s": now_s}
    assert with_age(rebooted)["stale"]
