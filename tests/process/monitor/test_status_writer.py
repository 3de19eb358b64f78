"""What status.json says, and what is written with it."""

import sys

import children
import pytest

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
