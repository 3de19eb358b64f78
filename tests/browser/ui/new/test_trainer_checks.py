"""After an update the page names both versions, compares them, and puts the old one back without losing a change."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts
from ui_helpers import serving, write_run
from ui_page import RUN_S, faint_texts, nameless_controls, open_page

from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS

LABELS = {"sd-scripts": "kohya's sd-scripts", "musubi": "kohya's musubi-tuner"}


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.invalid", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, subject: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", subject)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path) -> tuple[Path, str, str]:
    """A folder in place of sd-scripts with two commits: the one of the last run, and an update."""
    folder = tmp_path / "sd-scripts"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "train_network.py").write_text("old\n")
    old = commit(folder, "the first <b>one</b>")
    (folder / "train_network.py").write_text("new\n")
    return folder, old, commit(folder, "the update")


def used(data: Path, folder: Path, old: str, **run) -> Path:
    """A run that trained with a commit of the checkout."""
    made = write_run(data, state="completed", **run)
    note = {"trainer": "sd-scripts", "checkout": str(folder), "commits": [old]}
    (made / versions.FILE).write_text(json.dumps(note))
    return made


def served(data: Path, folder: Path, venv: Path | None = None, key: str = "sd-scripts"):
    trainer = TRAINERS[key]
    environment = {trainer.folder_variable: str(folder), trainer.venv_variable: str(venv or data.parent / "none")}
    return serving(data, **environment)


def choose(tab, server, key: str = "sd-scripts") -> None:
    open_page(tab, server)
    tab.get_by_label(LABELS[key]).check()


def test_an_update_is_named_and_the_old_version_comes_back(tmp_path, tab, checkout):
    folder, old, new = checkout
    data = tmp_path / "data"
    data.mkdir()
    used(data, folder, old)
    with served(data, folder) as server:
        choose(tab, server)
        changed = tab.get_by_test_id("trainer-changed")
        changed.get_by_text("sd-scripts was changed").wait_for()
        text = changed.inner_text()
        assert f"It used {old[:8]} (" in text and "the first <b>one</b>)" in text
        assert f"now it is {new[:8]} (" in text and "the update)" in text
        assert faint_texts(tab) == [] and nameless_controls(tab) == []

        (folder / "train_network.py").write_text("edited\n")
        tab.locator("#trainer-back").click()
        tab.locator("#trainer-question").get_by_text("changed by hand (train_network.py)").wait_for()
        assert tab.locator("#trainer-back-ok").is_hidden()
        tab.locator("#trainer-back-no").click()
        git(folder, "checkout", "--", ".")

        (folder / "mine.txt").write_text("mine")
        tab.locator("#trainer-back").click()
        question = tab.locator("#trainer-question")
        question.get_by_text(f"git -C {folder} checkout --detach {old}").wait_for()
        assert f"git -C {folder} checkout main" in question.inner_text()
        assert versions.commit(folder) == new  # nothing happens before the second click
        tab.locator("#trainer-back-ok").get_by_text(f"Go back to {old[:8]}").or_(
            tab.locator("#trainer-back-ok")
        ).first.click()
        tab.get_by_test_id("trainer-changed-back").get_by_text(f"sd-scripts is at {old[:8]} again").wait_for()
        tab.locator("#trainer-compare").wait_for(state="hidden")
        assert versions.commit(folder) == old and (folder / "train_network.py").read_text() == "old\n"
        assert (folder / "mine.txt").read_text() == "mine" and git(folder, "rev-parse", "main") == new


def test_a_version_that_no_run_used_is_compared_with_the_tested_one(tmp_path, tab, checkout):
    folder, _, new = checkout
    with served(tmp_path / "data", folder) as server:
        choose(tab, server)
        changed = tab.get_by_test_id("trainer-changed")
        changed.get_by_text("which Hangproof is not tested with").wait_for()
        assert new[:8] in changed.inner_text() and TRAINERS["sd-scripts"].commit[:8] in changed.inner_text()
        tab.get_by_label("Built-in").check()
        changed.wait_for(state="detached")
        tab.locator("#trainer-test").wait_for(state="hidden")


def test_a_comparison_that_cannot_run_says_why_and_the_version_of_a_running_run_stays(tmp_path, tab, checkout):
    folder, old, new = checkout
    data = tmp_path / "data"
    data.mkdir()
    made = used(data, folder, old)
    with served(data, folder) as server:
        choose(tab, server)
        tab.locator("#trainer-compare").click()
        verdict = tab.get_by_test_id("trainer-verdict")
        verdict.get_by_text("The comparison ended without a result").wait_for()
        assert "is not a checkout of sd-scripts or musubi-tuner" in verdict.inner_text()
        tab.locator("#trainer-test").click()
        verdict.get_by_text("The self-test ended without a result").wait_for()

        from filelock import FileLock

        status = json.loads((made / "status.json").read_text())
        (made / "status.json").write_text(json.dumps({**status, "state": "running"}))
        with FileLock(str(made / "monitor.lock")):  # as a monitor that watches the run
            tab.locator("#trainer-back").click()
            tab.locator("#trainer-question").get_by_text("The run 'my run' is training with sd-scripts").wait_for()
            assert tab.locator("#trainer-back-ok").is_hidden()
        assert versions.commit(folder) == new


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


@pytest.mark.parametrize("key", LABELS)
@pytest.mark.timeout(900)
def test_both_versions_of_the_real_trainer_are_compared_and_tested_on_the_page(key, tmp_path, tab):
    here = {"sd-scripts": tiny_sd_scripts, "musubi": tiny_musubi}[key]
    if here.why_not():
        pytest.skip(here.why_not())
    folder = Path(shutil.copytree(here.checkout(), tmp_path / "copy", ignore=shutil.ignore_patterns(".git")))
    git(folder, "init", "--quiet")
    old = commit(folder, "old")
    (folder / "README.md").write_text("newer\n")
    commit(folder, "new")
    data = tmp_path / "data"
    data.mkdir()
    made = used(data, folder, old)
    (made / versions.FILE).write_text(json.dumps({"trainer": key, "checkout": str(folder), "commits": [old]}))
    with served(data, folder, here.python().parent.parent, key) as server:
        choose(tab, server, key)
        tab.locator("#trainer-compare").click()
        tab.get_by_test_id("trainer-busy").get_by_text("Comparing both versions").wait_for()
        verdict = tab.get_by_test_id("trainer-verdict").first
        verdict.wait_for(timeout=RUN_S * 1000)
        text = verdict.inner_text()
        assert text.startswith(f"The new version of {TRAINERS[key].name} trains as the old one"), text
        assert "The losses are equal digit for digit (20 steps)." in text and "Peak memory" in text
        tab.locator("#trainer-test").click()
        tab.get_by_test_id("trainer-busy").wait_for()
        verdict = tab.get_by_test_id("trainer-verdict").nth(1)
        verdict.wait_for(timeout=RUN_S * 1000)
        assert "environment (" in verdict.inner_text() and "resume (" in verdict.inner_text()
        tab.reload()
        tab.locator("body.hp-open").wait_for()
        tab.get_by_label(LABELS[key]).check()
        tab.get_by_test_id("trainer-verdict").nth(1).wait_for()  # kept for these two versions
