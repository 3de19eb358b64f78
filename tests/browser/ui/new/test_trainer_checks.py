"""After an update the page names both versions and what fits, tests the new one, and puts the old one back without losing a change."""

import json

from checkout_helpers import git, used
from filelock import FileLock
from ui_helpers import serving
from ui_page import faint_texts, nameless_controls, open_page

from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS


def test_an_update_is_named_tested_and_the_old_version_comes_back(tmp_path, tab, checkout):
    folder, old, new = checkout
    data = tmp_path / "data"
    with serving(data, SD_SCRIPTS_DIR=str(folder), SD_SCRIPTS_VENV=str(tmp_path / "none")) as server:
        open_page(tab, server)
        tab.get_by_label("kohya's sd-scripts").check()
        changed, question = tab.get_by_test_id("trainer-changed"), tab.locator("#trainer-question")
        changed.get_by_text("which Hangproof is not tested with").wait_for()  # no run used it
        assert new[:8] in changed.inner_text() and TRAINERS["sd-scripts"].commit[:8] in changed.inner_text()
        tab.get_by_label("Built-in").check()
        changed.wait_for(state="detached")
        tab.locator("#trainer-test").wait_for(state="hidden")

        made = used(data, folder, old)
        tab.get_by_label("kohya's sd-scripts").check()
        changed.get_by_text("sd-scripts was changed").wait_for()
        text = changed.inner_text()
        assert f"It used {old[:8]} (" in text and "the first <b>one</b>)" in text
        assert f"now it is {new[:8]} (" in text and "the update)" in text
        assert faint_texts(tab) == [] and nameless_controls(tab) == []

        # What cannot run says why.
        assert "is not a checkout of sd-scripts or musubi-tuner" in text
        tab.locator("#trainer-test").click()
        verdict = tab.get_by_test_id("trainer-verdict")
        verdict.get_by_text("The self-test ended without a result").wait_for()
        assert "is not a checkout of sd-scripts or musubi-tuner" in verdict.inner_text()

        def refused(text: str) -> None:
            tab.locator("#trainer-back").click()
            question.get_by_text(text).wait_for()
            assert tab.locator("#trainer-back-ok").is_hidden() and versions.commit(folder) == new
            tab.locator("#trainer-back-no").click()

        # The old version comes back, but not under a run, over an edit, or without a second click.
        status = (made / "status.json").read_text()
        (made / "status.json").write_text(json.dumps({**json.loads(status), "state": "running"}))
        with FileLock(str(made / "monitor.lock")):  # as a monitor that watches the run
            refused("The run 'my run' is training with sd-scripts")
        (made / "status.json").write_text(status)
        (folder / "train_network.py").write_text("edited\n")
        refused("changed by hand (train_network.py)")
        git(folder, "checkout", "--", ".")
        (folder / "mine.txt").write_text("mine")
        tab.locator("#trainer-back").click()
        question.get_by_text(f"git -C {folder} checkout --detach {old}").wait_for()
        assert f"git -C {folder} checkout main" in question.inner_text()
        assert versions.commit(folder) == new
        tab.locator("#trainer-back-ok").click()
        tab.get_by_test_id("trainer-changed-back").get_by_text(f"sd-scripts is at {old[:8]} again").wait_for()
        tab.locator("#trainer-back").wait_for(state="hidden")
        assert versions.commit(folder) == old and (folder / "train_network.py").read_text() == "old\n"
        assert (folder / "mine.txt").read_text() == "mine" and git(folder, "rev-parse", "main") == new
