"""What an installation ends with: a training script of the checkout starts with the guards, or says why not."""

import os
import shutil

import pytest
import tiny_musubi
import tiny_sd_scripts

from sd_scripts_patches import install
from sd_scripts_patches.trainers import TRAINERS


@pytest.mark.parametrize("key", TRAINERS)
def test_a_training_script_starts_or_what_it_lacks_is_named(key, tmp_path, monkeypatch):
    tiny = {"sd-scripts": tiny_sd_scripts, "musubi": tiny_musubi}[key]
    if reason := tiny.why_not():
        pytest.skip(reason)
    installed, trainer = tiny.installation(), TRAINERS[key]
    tiny.write_site(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # what stands in for packages without a build for the CPU
    environment = installed.python.parent.parent
    assert install.starts(installed.checkout, environment, trainer) == ""

    copy = shutil.copytree(installed.checkout, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    text = (copy / trainer.script).read_text(encoding="utf-8")
    (copy / trainer.script).write_text("import no_such_module_here\n" + text, encoding="utf-8")
    said = install.starts(copy, environment, trainer)
    assert said.startswith(f"{trainer.script} does not start with {environment}{os.sep}")
    assert "No module named 'no_such_module_here'" in said
