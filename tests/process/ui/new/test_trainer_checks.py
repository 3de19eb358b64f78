"""Which version of a trainer the last run used, and what a run that continues on another one says."""

import json
import os
import sys

import pytest
import record_shapes
from checkout_helpers import commit, used

from runs.paths import ROOT
from sd_scripts_patches import versions


def test_the_last_used_version_is_that_of_the_latest_run_with_this_checkout(tmp_path, checkout, monkeypatch):
    from ui.new import trainer_checks

    folder, old, new = checkout
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path / "link"))
    used(tmp_path, folder, "1" * 40, name="earlier")
    os.utime(tmp_path / "outputs/earlier" / versions.FILE, (1, 1))
    used(tmp_path, folder, old, name="later")
    used(tmp_path, tmp_path, "2" * 40, name="elsewhere")
    broken = used(tmp_path, folder, old, name="broken")
    (broken / versions.FILE).write_text("{")
    found = trainer_checks.status("sd-scripts")
    assert (found.now, found.before, found.used) == (new, old, True)
    assert trainer_checks.status("diffusers") is None and trainer_checks.status(["x"]) is None


def test_a_run_that_continues_on_another_version_says_so(tmp_path, checkout, monkeypatch):
    from ui.run import control, run_page

    folder, old, new = checkout
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    monkeypatch.setattr(control, "start", lambda folder: None)
    made = used(tmp_path, folder, old)
    (made / "status.json").write_text(json.dumps({"state": "stopped"}))
    said = run_page.start("my-run", None)
    assert f"commit {old[:8]} of sd-scripts so far and continues on {new[:8]}" in said
    used_now = {"trainer": "sd-scripts", "checkout": str(folder), "commits": [old, new]}
    (made / versions.FILE).write_text(json.dumps(used_now))
    assert run_page.start("my-run", None) == ""


def test_what_fits_a_version_is_said_by_its_check(tmp_path, checkout, monkeypatch):
    from ui.new import trainer_checks

    folder, _, _ = checkout
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))

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
    ("platform", "interpreter", "shown"),
    [
        ("linux", str(ROOT / ".venv/bin/python"), ".venv/bin/python"),
        ("linux", "/opt/my env/bin/python", "'/opt/my env/bin/python'"),
        ("win32", r"C:\hangproof\.venv\Scripts\python.exe", r"C:\hangproof\.venv\Scripts\python.exe"),
    ],
)
def test_the_command_back_names_the_pages_own_interpreter(platform, interpreter, shown, monkeypatch):
    from ui.new import trainer_checks

    monkeypatch.setattr(sys, "executable", interpreter)
    command = trainer_checks.command_back("sd-scripts", "1" * 40, platform)
    assert command == f"{shown} -m sd_scripts_patches.versions sd-scripts {'1' * 40}"
