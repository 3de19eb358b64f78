"""Which folder is a run's, and that what is written there stays."""

import os
import sys
from pathlib import Path

import pytest
from monitor_helpers import finish, monitor, toy_run

from monitor.run_folder import MonitorError, RunFolder, find


def test_a_folder_without_a_script_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    with pytest.raises(MonitorError, match="train.sh"):
        find(tmp_path)
    folder = toy_run(tmp_path / "outputs" / "my-lora")
    assert find(folder) == find("my-lora") == folder
    code, _, err = finish(monitor(Path("no-such-run"), "status", HANGPROOF_DATA=str(tmp_path)))
    assert code == 1 and "no-such-run" in err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_replaced_file_of_a_run_is_synced_with_its_folder(tmp_path, monkeypatch):
    """`monitor.json`: without that, a power cut after "saved" brings the old file back."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    assert RunFolder(tmp_path).replace("monitor.json", "{}", sync=True)
    assert synced[-1] == str(tmp_path) and len(synced) == 2
