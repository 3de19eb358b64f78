"""A keeper whose disk is frozen, and one that was stopped with its monitor.

python -m pytest tests/campaigns/test_keeper.py          2 minutes, as root on Linux
"""

import os
import signal
import threading
import time

import faults
import psutil
import pytest
from fault_actions import unfreeze
from monitor_helpers import clean_up, events, finish, monitor, started, stop, toy_run, wait_for
from run_facts import status, step_of, trainers, weight
from toys import undisturbed

from monitor.state import read_status

SILENT = "[watch]\nsilent_s = 6\n"
MISSING = faults.missing("linux", "root", "fsfreeze", "mkfs.ext4", "loop")


@pytest.fixture
def disk(tmp_path):
    """A disk that stops to respond once it is frozen; a run wants 64 MB free."""
    faults.loop_disk(tmp_path / "disk", 256 << 20)
    yield tmp_path / "disk"
    faults.run("umount", "--lazy", str(tmp_path / "disk"))


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_frozen_disk_is_reported_at_once_and_the_run_goes_on_when_it_thaws(disk, tmp_path):
    folder = toy_run(disk / "toy", steps=200, pace=0.03, every=20)
    (tmp_path / "limits.toml").write_text("allow_below_guards = true\n" + SILENT)
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp"), "HANGPROOF_SHM": str(tmp_path / "tmp")}
    env["HANGPROOF_LIMITS"] = str(tmp_path / "limits.toml")
    process = monitor(folder, **env)
    try:
        wait_for(lambda: step_of(folder) > 5)
        stuck = psutil.Process(status(folder)["monitor_pid"])
        said = []
        reader = threading.Thread(target=lambda: said.extend(iter(process.stderr.readline, "")), daemon=True)
        faults.run("fsfreeze", "--freeze", str(disk))
        reader.start()
        wait_for(lambda: any("cannot be killed" in line for line in said), what="it is reported")
        assert "nothing watches the training" in said[-1], said
        assert stuck.status() == psutil.STATUS_DISK_SLEEP and len(trainers(folder)) == 1
        assert read_status(folder)["age_s"] > 10, "it can still be read, and says how old it is"
        unfreeze(disk)
        assert process.wait(180) == 0, said
        assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(200)
        assert len(events(folder, "started")) == 2, "started once, adopted once"
    finally:
        unfreeze(disk)
        clean_up(folder)
        process.kill()
        reader.join()
        process.communicate()


def test_a_keeper_that_was_stopped_with_its_monitor_does_not_replace_it(folder):
    """A laptop that sleeps, a container that is paused: the monitor gets a moment to beat again."""
    toy_run(folder, steps=5000, pace=0.03, every=100)
    process = started(folder, limits=SILENT)
    watching = status(folder)["monitor_pid"]
    for pid in (process.pid, watching):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8)
    for pid in (process.pid, watching):
        os.kill(pid, signal.SIGCONT)
    step = step_of(folder)
    wait_for(lambda: step_of(folder) > step)
    assert status(folder)["monitor_pid"] == watching
    stop(folder, "--now")
    code, _, err = finish(process)
    assert code == 3 and "not responded" not in err
