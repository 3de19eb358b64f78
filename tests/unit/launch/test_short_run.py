"""What a killed short run left behind is removed by the next one; what another one uses stays."""

import os
import subprocess
import sys

from launch import short_run
from monitor.process import platform, tree


def test_folders_of_dead_processes_go_with_what_they_started_and_others_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    me = platform.process_info(os.getpid())
    names = (f"probe-{dead.pid}-1.0-x", f"probe-{me.pid}-{me.start}-x", "notes")
    gone, used, other = (tmp_path / name for name in names)
    for folder in (gone, used, other):
        (folder / "outputs/cat").mkdir(parents=True)
    marks = {tree.RUN: str(gone / "outputs/cat"), tree.TOKEN: "0" * 32}
    left = subprocess.Popen(["sleep", "60"], env=os.environ | marks)
    try:
        assert short_run.sweep(tmp_path) == [gone]
        assert left.wait(10) < 0, "it was killed"
    finally:
        left.kill()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([used.name, other.name])
    assert short_run.owner_alive(used / "outputs/cat") and not short_run.owner_alive(gone / "outputs/cat")
    assert short_run.sweep(tmp_path / "nowhere") == []
