"""The canary says "equal" only for two installations that train the same, and what differs otherwise."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts as tiny
from selftest_helpers import compared


@pytest.fixture
def copy(newest, tmp_path) -> Path:
    """A copy of the checkout's code, for a test to change."""
    return Path(shutil.copytree(tiny.checkout(), tmp_path / "copy", ignore=shutil.ignore_patterns(".git")))


def test_a_checkout_trains_as_itself(copy):
    """NEW is a copy with its environment named: another folder must not change a digit."""
    code, result = compared(str(tiny.checkout()), f"{copy}@{tiny.python().parent.parent}", "--tolerance", "0")
    assert code == 0, result
    assert result["verdicts"]["losses"]["text"] == "The losses are equal digit for digit (20 steps)."
    assert result["verdicts"]["sample"]["text"] == "The sample images are equal pixel for pixel."
    for run in ("old", "new"):
        assert len(result[run]["losses"]) == 20 and result[run]["sample"]
        assert 0.1e9 < result[run]["peak_bytes"] < 8e9 and 0 < result[run]["step_s"] < 60
    assert result["verdicts"]["memory"]["equal"] is True and result["verdicts"]["speed"]["equal"] is None


def test_a_checkout_that_does_not_train_is_named_with_its_error(copy):
    file = copy / "networks" / "lora_flux.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nraise RuntimeError('broken update')\n", encoding="utf-8")
    code, result = compared(str(tiny.checkout()), str(copy))
    assert code == 1
    text = result["verdicts"]["training"]["text"]
    assert text == f"{copy}: it exited with code 1: RuntimeError: broken update."


def test_two_trainers_are_not_compared(newest, musubi):
    done = subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", "canary", *(f"{h.checkout()}@{h.python().parent.parent}" for h in (tiny, tiny_musubi))],
        cwd=tiny.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "name two of the same trainer" in done.stderr
