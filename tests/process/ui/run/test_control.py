"""What a run says that continues on another version of its trainer."""

import json
import sys

from checkout_helpers import used

from sd_scripts_patches import versions
from ui.run import control, run_page


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
