"""A rehearsal of each of kohya's trainers with its own script."""

import musubi_helpers
import pytest
import tiny_sd_scripts
from faults_sd_scripts import create, environment
from short_run_helpers import launched, states

from launch.rehearse import DONE, PASSED

pytestmark = pytest.mark.slow


@pytest.mark.skipif(bool(tiny_sd_scripts.why_not()), reason=tiny_sd_scripts.why_not() or "-")
def test_sd_scripts_are_rehearsed_with_their_own_script(data):
    folder = create(data, {"name": "of sd-scripts", "max_train_steps": 100})
    _, found, said = launched("rehearse", folder, **environment(data))
    assert found["state"] == PASSED, said[-5000:]
    assert found["measured"]["step_s"] > 0 and found["forecast"]["steps"] == 100


def test_musubi_tuner_is_rehearsed_with_its_three_commands(toy_z, data):
    samples = {"prompts": ["a thing"], "sample_every_n_steps": 10, "sample_steps": 1}
    folder = musubi_helpers.run_of(toy_z, "of musubi", max_train_steps=50, **samples)
    _, found, said = launched("rehearse", folder, **musubi_helpers.environment(toy_z, data))
    assert found["state"] == PASSED, said[-5000:]
    assert found["measured"]["cache_bytes"] > 0 and states(found)["sample"] == DONE
