"""What the commands about a run print, and what they refuse."""

import json
import sys
from pathlib import Path

import pytest
from monitor_helpers import STATUS, finish, monitor, started, toy_run, wait_for
from run_facts import status, step_of
from toys import GO, fault_at

from monitor.cli import commands
from monitor.process.platform import Lock
from monitor.run_folder import MonitorError, RunFolder
from monitor.state import read_status

LINUX = sys.platform.startswith("linux")


def test_status_says_whether_somebody_watches(tmp_path):
    assert read_status(tmp_path) is None
    RunFolder(tmp_path).write_status({"state": "running", "name": "x"})
    assert read_status(tmp_path)["alive"] is False
    lock = Lock(tmp_path / "monitor.lock")
    lock.acquire()
    assert read_status(tmp_path)["alive"] is True
    lock.release()


def test_the_runs_are_shown_until_all_have_ended(tmp_path, capsys):
    folder = toy_run(tmp_path / "toy")
    RunFolder(folder).write_status(STATUS)
    assert commands.watch([folder, tmp_path / "other"], 0.0) == 0
    shown = capsys.readouterr().out
    assert "step 12 of 100" in shown and "not watched" in shown and "other: not started" in shown


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="/proc")
def test_diagnose_explains_a_living_run_and_any_process(folder):
    toy_run(folder, fault_at(5, "time.sleep(3600)"))
    process = monitor(folder, limits="[phases.step]\nfloor_s = 600\n[check]\nstack_dump_s = 20\n")
    wait_for(lambda: step_of(folder) == 5)
    code, out, _ = finish(monitor(folder, "diagnose", "--json"))
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["summary"] == "no progress" and found["step"] == 5
    assert "fault (toy.py" in found["where"] and "fault" in out
    pid, limits = found["processes"][-1]["pid"], str(folder.parent / "limits.toml")
    code, out, _ = finish(monitor(Path(str(pid)), "diagnose", HANGPROOF_LIMITS=limits))
    assert code == 0 and "no progress" in out and "hrtimer_nanosleep" in out
    (folder / "stop.request").write_text('{"now": true}')
    finish(process)
    assert status(folder)["state"] == "stopped"
    code, _, err = finish(monitor(folder, "diagnose"))
    assert code == 1 and "nothing of it runs" in err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals between processes are POSIX")
def test_a_request_that_cannot_be_done_says_why(folder):
    toy_run(folder, f"def fault(step):\n{GO}", steps=20)
    with pytest.raises(MonitorError, match="toy: sample images can be made while it trains, but it is never started"):
        commands.request(folder, "sample")
    process = started(folder, 1)
    name = commands.request(folder, "save")
    assert name == commands.request(folder, "save")  # two requests of one kind are one
    (folder / "go").touch()
    assert finish(process)[0] == 0
    found = commands.outcome(folder, name)
    assert found and not found["done"] and found["message"] == "a checkpoint not made: the run is completed"
    with pytest.raises(MonitorError, match="it is completed"):
        commands.request(folder, "save")
