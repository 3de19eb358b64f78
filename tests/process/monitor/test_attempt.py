"""One attempt on a real script: how it ended, for the monitor that started it and for one that adopts it."""

from dataclasses import replace

import pytest
from monitor_helpers import wait_for

from monitor.attempt import Attempt
from monitor.process import platform
from monitor.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="a shell, and /proc")


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Starts an attempt with this script; nothing of it is alive afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def start(script: str) -> Attempt:
        (tmp_path / "train.sh").write_text(script)
        made.append(Attempt.prepare(RunFolder(tmp_path), 1))
        made[0].start(tmp_path / "train.sh", tmp_path / "training.log", {}, ())
        return made[0]

    yield start
    made[0].kill(0.1, 30)
    made[0].close()
    assert not made[0].heartbeats.exists()


def observed(attempt: Attempt):
    return attempt.poll(platform.now(), tree_s=0.1)


@pytest.mark.parametrize(("end", "code", "number"), [("exit 7", 7, None), ("kill -9 $$", 137, 9)])
def test_how_its_script_ended_is_known_to_a_monitor_that_did_not_start_it(attempt, end, code, number):
    first = attempt(f"echo begun; while [ ! -e go ]; do sleep 0.02; done; {end}\n")
    second = Attempt.adopt(first.folder, first.record)
    assert not observed(first).ended and not observed(second).ended and second.pid == first.pid
    wait_for(lambda: second.log_tail(100) == "begun\n")
    (first.folder.folder / "go").touch()
    for one in (first, second):
        wait_for(lambda one=one: observed(one).ended)
        assert (one.exit_status(()).code, one.exit_status(()).signal) == (code, number)


def test_one_whose_start_was_not_recorded_is_found_and_killed_and_one_of_the_boot_before_is_not(attempt, monkeypatch):
    """The monitor was killed between the start of the script and the note of its process number."""
    first = attempt("sleep 60 & wait\n")
    unrecorded = replace(first.record, root=None)
    found = wait_for(lambda: (one := Attempt.adopt(first.folder, unrecorded)) and one.pid == first.pid and one)
    wait_for(lambda: "sleep" in {process.name for process in found.tree.refresh().values()})
    assert {process.name for process in found.kill(0.5, 30).killed} >= {"bash", "sleep"}
    wait_for(lambda: observed(first).ended)
    monkeypatch.setattr(platform, "boot_id", lambda: "another")
    assert Attempt.adopt(first.folder, first.record) is None
