"""Which version of a trainer the last run used, and what a run that continues on another one says."""

import json
import os
import sys

import pytest
import record_shapes
from checkout_helpers import commit, used

from sd_scripts_patches import versions
from ui.new import trainer_checks
from ui.run import control, run_page


@pytest.fixture
def data(tmp_path, checkout, monkeypatch):
    """The data root, and the checkout in the place of sd-scripts."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(checkout[0]))
    return tmp_path


def test_the_last_used_version_is_that_of_the_latest_run_with_this_checkout(data, checkout, monkeypatch):
    folder, old, new = checkout
    (data / "link").symlink_to(folder)
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(data / "link"))
    used(data, folder, "1" * 40, name="earlier")
    os.utime(data / "outputs/earlier" / versions.FILE, (1, 1))
    used(data, folder, old, name="later")
    used(data, data, "2" * 40, name="elsewhere")
    broken = used(data, folder, old, name="broken")
    (broken / versions.FILE).write_text("{")
    found = trainer_checks.status("sd-scripts")
    assert (found.now, found.before, found.used) == (new, old, True)
    assert trainer_checks.status("diffusers") is None and trainer_checks.status(["x"]) is None


def test_a_run_that_continues_on_another_version_says_so(data, checkout, monkeypatch):
    folder, old, new = checkout
    monkeypatch.setattr(control, "start", lambda folder: None)
    made = used(data, folder, old)
    (made / "status.json").write_text(json.dumps({"state": "stopped"}))
    said = run_page.start("my-run", None)
    assert f"commit {old[:8]} of sd-scripts so far and continues on {new[:8]}" in said
    used_now = {"trainer": "sd-scripts", "checkout": str(folder), "commits": [old, new]}
    (made / versions.FILE).write_text(json.dumps(used_now))
    assert run_page.start("my-run", None) == ""


def test_what_fits_a_version_is_said_by_its_check(data, checkout):
    folder, _, _ = checkout

    def note() -> str:
        found = trainer_checks.status("sd-scripts")
        assert found is not None
        return trainer_checks.note(found)

    assert "is not a checkout of sd-scripts or musubi-tuner" in note()
    facts = next(facts for facts in record_shapes.load() if facts["trainer"] == "sd-scripts")
    record_shapes.write_checkout(facts, folder)
    commit(folder, "a checkout")
    assert "block_swap" not in note()
    (folder / "library/custom_offloading_utils.py").write_text("")
    commit(folder, "without block swap")
    said = note()
    assert "Not guarded in this version: " in said and "block_swap (" in said


@pytest.mark.parametrize(
    ("platform", "interpreter", "shown", "start"),
    [
        ("linux", "/opt/my env/bin/python", "'/opt/my env/bin/python'", "./start.sh"),
        ("win32", r"C:\hangproof\.venv\python.exe", r"C:\hangproof\.venv\python.exe", r".\start.bat"),
    ],
)
def test_the_command_back_names_the_pages_own_interpreter(platform, interpreter, shown, start, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter)
    command = trainer_checks.command_back("sd-scripts", "1" * 40, platform)
    assert command == f"{shown} -m sd_scripts_patches.versions sd-scripts {'1' * 40} && {start} sd-scripts"
