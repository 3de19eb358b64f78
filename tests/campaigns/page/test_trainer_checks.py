"""After an update of the real trainer, the page says what fits it and tests it. A minute each; needs sd-scripts or musubi-tuner."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts
from checkout_helpers import commit, git, used
from ui_helpers import serving
from ui_page import RUN_S, open_page

from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS

LABELS = {"sd-scripts": "kohya's sd-scripts", "musubi": "kohya's musubi-tuner"}


@pytest.mark.parametrize("key", LABELS)
@pytest.mark.timeout(900)
def test_an_update_of_the_real_trainer_is_checked_and_tested_on_the_page(key, tmp_path, tab):
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
    trainer = TRAINERS[key]
    environment = {trainer.folder_variable: str(folder), trainer.venv_variable: str(here.python().parent.parent)}
    with serving(data, **environment) as server:
        open_page(tab, server)
        tab.get_by_label(LABELS[key]).check()
        tab.get_by_test_id("trainer-changed").get_by_text(re.compile(r"All \d+ guards fit this version\.")).wait_for()
        tab.locator("#trainer-test").click()
        tab.get_by_test_id("trainer-busy").wait_for()
        verdict = tab.get_by_test_id("trainer-verdict")
        verdict.wait_for(timeout=RUN_S * 1000)
        assert "environment (" in verdict.inner_text() and "resume (" in verdict.inner_text()
        tab.reload()
        tab.locator("body.hp-open").wait_for()
        tab.get_by_label(LABELS[key]).check()
        verdict.wait_for()  # kept for this version
