"""After an update the page names both versions, compares them, and puts the old one back without losing a change."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts
from checkout_helpers import commit, git, used
from ui_helpers import serving
from ui_page import RUN_S, faint_texts, nameless_controls, open_page

from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS

LABELS = {"sd-scripts": "kohya's sd-scripts", "musubi": "kohya's musubi-tuner"}


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
