"""Cost, time and disk of a run, on the page and by the command."""

import json
import subprocess
import sys

import pytest
from configure_helpers import FORM
from draft_helpers import photo
from ui_helpers import PROJECT

import runs
from presets.estimate import whole
from ui.new import estimates

pytestmark = pytest.mark.slow


def test_cost_time_and_disk_are_beside_memory_and_the_command_shows_them(data, tmp_path):
    spec = runs.make(
        {"name": "cat", "model": "flux-dev", "tier": "20G", "trigger": "x", "price_per_hour": 0.5, "spend_limit": 0.1}
    )
    text = estimates.html(spec, {"": 20})
    seconds, source = estimates.time_of(spec, runs.planned_steps(spec, 20))
    assert f"about {0.5 * seconds / 3600:.2f}" in text and "spend limit of 0.1" in text and "RTX 4090" in source
    assert "samples" in text and "Cost" not in estimates.html(spec.changed(price_per_hour=0), {"": 20})
    found = whole(spec.model_dump(), {"": 18, "2_more": 1})
    assert found["steps"] == runs.planned_steps(spec, {"": 18, "2_more": 1})
    assert found["seconds"] == pytest.approx(whole(spec.model_dump(), {"": 18, "2_more": 1}, 1.0)["seconds"], rel=5)
    folder = runs.create(runs.make({**FORM, "price_per_hour": 2}), [photo(tmp_path / "a.png", 1)])
    done = subprocess.run(
        [sys.executable, "-m", "presets", "estimate", folder.name, "--json"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["steps"] == 12 and said["cost"] > 0 and "time: about" in done.stdout and "disk: about" in done.stdout
