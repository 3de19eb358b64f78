"""Model families of sd-scripts, tiny weights, CPU, its own script: guarded they train the same numbers as unguarded.

SDXL samples in a pipeline, Lumina makes several images in one loop of its own. FLUX and Z-Image are in test_heartbeat.py of
sd_scripts_patches and of sd_scripts_patches/musubi; all other families are campaigns (tests/campaigns/test_runs_families.py).
"""

import family_trainings
import pytest


@pytest.mark.parametrize("name", ["sdxl", "lumina"])
def test_a_family_of_sd_scripts_trains_the_same_and_is_followed(newest, name, tmp_path):
    family_trainings.sd_scripts(name, tmp_path)
