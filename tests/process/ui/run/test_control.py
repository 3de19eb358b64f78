"""A run that is started and stopped, and what it says when it continues on another version of its trainer."""

import json
import sys

import pytest
from checkout_helpers import used
from ui_helpers import write_run

from monitor.process.platform import LOCK, Lock
from runs.files import RunError
from sd_scripts_patches import versions
from ui.run import control, run_page


def test_a_stop_is_asked_of_the_monitor_and_what_cannot_be_done_says_why(data):
    folder = write_run(data, state="stopped", reason="by the user", message="")
    for act in (control.start, control.stop):
        with pytest.raises(RunError, match="train.sh is missing"):
            act(folder)
    (folder / "train.sh").touch()
    with pytest.raises(RunError, match="nothing of it runs"):
        control.stop(folder)
    lock = Lock(folder / LOCK)
    assert lock.acquire()
    control.start(folder)  # it is watched already
    control.stop(folder)
    lock.release()
    assert json.loads((folder / "stop.request").read_text()) == {"now": False}
    with pytest.raises(RunError, match="cannot be written: No space left. Free some space"), control.refusals():
        raise OSError(28, "No space left")


def test_a_run_that_continues_on_another_version_says_so(data, checkout, monkeypatch):
    folder, old, new = checkout
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    monkeypatch.setattr(control, "start", lambda folder: None)
    made = used(data, folder, old)
    (made / "status.json").write_text(json.dumps({"state": "stopped"}))
    said = run_page.start("my-run", None)
    assert f"commit {old[:8]} of sd-scripts so far and continues on {new[:8]}" in said
    used_now = {"trainer": "sd-scripts", "checkout": str(folder), "commits": [old, new]}
    (made / versions.FILE).write_text(json.dumps(used_now))
    assert run_page.start("my-run", None) == ""


def test_the_command_back_names_the_pages_own_interpreter(monkeypatch):
    for platform, interpreter, shown, start in (
        ("linux", "/opt/my env/bin/python", "'/opt/my env/bin/python'", "./start.sh"),
        ("win32", r"C:\hangproof\.venv\python.exe", r"C:\hangproof\.venv\python.exe", r".\start.bat"),
    ):
        monkeypatch.setattr(sys, "executable", interpreter)
        command = control.command_back("sd-scripts", "1" * 40, platform)
        assert command == f"{shown} -m sd_scripts_patches.versions sd-scripts {'1' * 40} && {start} sd-scripts"
