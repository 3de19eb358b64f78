"""A rehearsal of each of kohya's trainers with its own script."""

import pytest
import tiny_musubi
import tiny_sd_scripts
from faults_sd_scripts import create, environment
from musubi_helpers import MODELS_TOML
from short_run_helpers import launched, states

import runs
from launch.rehearse import DONE, PASSED

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty data root."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    return root


@pytest.mark.skipif(bool(tiny_sd_scripts.why_not()), reason=tiny_sd_scripts.why_not() or "-")
def test_sd_scripts_are_rehearsed_with_their_own_script(data):
    folder = create(data, {"name": "of sd-scripts", "max_train_steps": 100})
    _, found, said = launched("rehearse", folder, **environment(data))
    assert found["state"] == PASSED, said[-5000:]
    assert found["measured"]["step_s"] > 0 and found["forecast"]["steps"] == 100


@pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")
def test_musubi_tuner_is_rehearsed_with_its_three_commands(data):
    work = tiny_musubi.workdir()
    (data / "models.toml").write_text(MODELS_TOML.format(weights=(work / "dit.safetensors").as_posix()))
    fields = {"model": "toy-z", "backend": "musubi", "tier": "20G", "resolution": 64, "max_train_steps": 50, "rank": 4}
    made = runs.make({
        "name": "of musubi", "trigger": "ohwx", "workers": 0, "sample_steps": 1, "extra": {"optimizer_type": "AdamW"},
        "prompts": ["a thing"], "sample_every_n_steps": 10, **fields,
    })  # fmt: skip
    folder = runs.create(made, work / "images")
    _, found, said = launched("rehearse", folder, **tiny_musubi.environment(work, HANGPROOF_DATA=str(data)))
    assert found["state"] == PASSED, said[-5000:]
    assert found["measured"]["cache_bytes"] > 0 and states(found)["sample"] == DONE
