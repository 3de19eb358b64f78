"""The canary says "equal" only for two installations that train the same, and what differs otherwise."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches import canary

pytestmark = pytest.mark.timeout(1200)


def compared(old: str, new: str, *flags: str) -> tuple[int, dict]:
    environments = {"SD_SCRIPTS_VENV": tiny.python(), "MUSUBI_VENV": tiny_musubi.python()}
    environment = {**os.environ, **{name: str(python.parent.parent) for name, python in environments.items()}}
    done = subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", "canary", old, new, "--json", *flags],
        cwd=tiny.ROOT, env=environment, capture_output=True, text=True, timeout=1000, check=False,
    )  # fmt: skip
    assert done.stdout.count("\n") == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"] == (done.returncode == 0)
    return done.returncode, {**result, "verdicts": {row["what"]: row for row in result.get("verdicts", [])}}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the checkout's code, for a test to change."""
    tiny.need()
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


def test_a_checkout_whose_lora_learns_differently_is_found(copy):
    """The LoRA starts at zero, so the first loss is equal and the second is not."""
    file = copy / "networks" / "lora_flux.py"
    change = "\n_init = LoRAModule.__init__\ndef _other(self, *a, **k):\n    _init(self, *a, **k)\n    self.scale *= 30\nLoRAModule.__init__ = _other\n"
    file.write_text(file.read_text(encoding="utf-8") + change, encoding="utf-8")
    code, result = compared(str(tiny.checkout()), str(copy))
    assert code == 1, result
    assert result["verdicts"]["losses"]["text"].startswith("The losses differ from step 2 on, by at most ")
    assert result["old"]["losses"][0] == result["new"]["losses"][0]


def test_a_checkout_that_does_not_train_is_named_with_its_error(copy):
    file = copy / "networks" / "lora_flux.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nraise RuntimeError('broken update')\n", encoding="utf-8")
    code, result = compared(str(tiny.checkout()), str(copy))
    assert code == 1
    text = result["verdicts"]["training"]["text"]
    assert text == f"{copy}: it exited with code 1: RuntimeError: broken update."


LORA = {"sd-scripts": "networks/lora_flux.py", "musubi": "src/musubi_tuner/networks/lora.py"}


@pytest.mark.parametrize("trainer", LORA)
def test_a_commit_of_the_checkout_is_compared_with_what_it_holds_now(trainer, tmp_path):
    """The update makes the LoRA learn differently. Unpacking the old commit changes nothing in the checkout."""
    here = {"sd-scripts": tiny, "musubi": tiny_musubi}[trainer]
    if here.why_not():
        pytest.skip(here.why_not())
    copy = Path(shutil.copytree(here.checkout(), tmp_path / "copy", ignore=shutil.ignore_patterns(".git")))
    git = ["git", "-C", str(copy), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "old"]):
        subprocess.run([*git, *command], check=True)
    old = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    file = copy / LORA[trainer]
    change = "\n_init = LoRAModule.__init__\ndef _other(self, *a, **k):\n    _init(self, *a, **k)\n    self.scale *= 30\nLoRAModule.__init__ = _other\n"
    file.write_text(file.read_text(encoding="utf-8") + change, encoding="utf-8")
    subprocess.run([*git, "commit", "-qam", "new"], check=True)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if ".git" not in path.parts}
    code, result = compared(old[:10], str(copy))
    assert code == 1, result
    assert result["verdicts"]["losses"]["text"].startswith("The losses differ from step 2 on, by at most ")
    assert result["old"]["name"] == f"commit {old[:8]} of {copy}" and result["new"]["sample"]
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if ".git" not in path.parts} == before


def test_two_trainers_are_not_compared(tmp_path):
    for here in (tiny, tiny_musubi):
        if here.why_not():
            pytest.skip(here.why_not())
    done = subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", "canary", *(f"{h.checkout()}@{h.python().parent.parent}" for h in (tiny, tiny_musubi))],
        cwd=tiny.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "name two of the same trainer" in done.stderr


# The verdicts, without a checkout.


def outcome(losses=None, peak=1_000_000_000, step_s=0.1, sample="a.png", error=""):
    return canary.Outcome("X", losses or [1.5 - i / 100 for i in range(20)], peak, step_s, sample, error)


def losses_with(step: int, factor: float) -> list[float]:
    losses = outcome().losses
    return [loss * (factor if i >= step else 1) for i, loss in enumerate(losses, 1)]


def verdicts(new, pixels=(0.0, 0), tolerance=canary.TOLERANCE) -> dict[str, tuple[bool | None, str]]:
    return {v.what: (v.equal, v.text) for v in canary.compare(outcome(), new, pixels, tolerance)}


def test_losses_within_the_tolerance_are_equal_and_the_first_other_step_is_named():
    equal, text = verdicts(outcome(losses_with(7, 1.0005)))["losses"]
    assert equal is True
    assert text == "The losses differ from step 7 on, by at most 0.0005 of a loss: within the tolerance of 0.10%."
    assert verdicts(outcome(losses_with(7, 1.0005)), tolerance=0)["losses"][0] is False


def test_losses_beyond_the_tolerance_are_not_equal():
    equal, text = verdicts(outcome(losses_with(20, 1.01)))["losses"]
    assert equal is False and text.startswith("The losses differ from step 20 on, by at most 0.0099")
    assert text.endswith("more than the tolerance of 0.10%.")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_never_equal(value):
    losses = [*outcome().losses[:11], value, *outcome().losses[12:]]
    equal, text = verdicts(outcome(losses), tolerance=1e9)["losses"]
    assert equal is False and text == "The losses differ from step 12 on; in step 12 one is no number."


@pytest.mark.parametrize(
    ("pixels", "expected"), [((0.0, 0), True), ((1.9, 30), True), ((2.1, 3), False), (None, False)]
)
def test_the_sample_decides_by_its_mean_difference(pixels, expected):
    assert verdicts(outcome(sample="a.png" if pixels else ""), pixels)["sample"][0] is expected


def test_memory_decides_and_time_does_not():
    assert verdicts(outcome(peak=1_240_000_000))["memory"][0] is True
    equal, text = verdicts(outcome(peak=1_260_000_000, step_s=9.0))["memory"]
    assert equal is False and text == (
        "Peak memory: 1.00 GB before, 1.26 GB after (+26%), more than the tolerance of +25%."
    )
    assert verdicts(outcome(step_s=9.0))["speed"][0] is None
    assert verdicts(outcome(peak=0))["memory"] == (None, "The peak memory is not known on this system.")


def test_a_run_that_failed_decides_alone():
    assert verdicts(outcome([1.0], error="it exited with code 1: OSError: disk full")) == {
        "training": (False, "X: it exited with code 1: OSError: disk full.")
    }
