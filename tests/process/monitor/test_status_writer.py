"""What status.json says, and what is written with it."""

import sys

import children
import pytest
from monitor_helpers import events

from guards import checkpoint
from monitor import status_writer
from monitor.loop import Loop
from monitor.run_folder import RunFolder
from monitor.state import State, Transition, read_status
from monitor.supervisor import turn

SAVED = (
    children.FULL_DISK
    + """
from monitor.run_folder import RunFolder
from monitor.state import RunState
from monitor.loop import Loop
from monitor.supervisor import turn
loop = Loop(RunFolder(folder), turn)
state = loop.state
room(10)
state.restarts = 3
print(state.save(loop.folder), RunState.load(loop.folder).restarts)
state.restarts = 4  # under way: not committed
loop.write_status(force=True)
room(resource.RLIM_INFINITY)
loop.write_status(force=True)
print(RunState.load(loop.folder).restarts)
"""
)


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE is POSIX")
def test_a_state_that_the_disk_refused_is_saved_with_the_next_status(tmp_path):
    (tmp_path / "run.toml").write_text("")
    done = children.run(SAVED, tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if "cannot write" not in line]
    assert shown[-2:] == ["False 0", "3"], done.stdout


def test_a_new_checkpoint_is_shown_and_told_once_and_one_without_its_guard_file_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(status_writer, "EVERY_S", 60.0)
    (tmp_path / "run.toml").write_text('name = "run"\n')
    loop = Loop(RunFolder(tmp_path), turn)
    try:
        (tmp_path / "run-step00000030-state").mkdir()
        assert loop.write_status(force=True)
        first = read_status(tmp_path)
        assert first["checkpoint"] is None and first["state"] == "queued"
        state = tmp_path / "run-step00000020-state"
        with checkpoint.writing(state, 20, 1) as folder:
            (folder / "weights").write_bytes(b"x")
        loop.write_status()
        assert read_status(tmp_path)["updated_mono_s"] == first["updated_mono_s"], "not that soon again"
        for _ in range(2):
            loop.write_status(force=True)
        assert read_status(tmp_path)["checkpoint"] == {"path": str(state), "step": 20}
        assert [(told["step"], told["path"]) for told in events(tmp_path, "checkpoint")] == [(20, str(state))]
    finally:
        loop.at = Transition(State.FAILED)
        loop.close()
