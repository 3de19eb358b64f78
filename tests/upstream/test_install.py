"""The installation of kohya's trainers, on real checkouts."""

import tiny_musubi

from sd_scripts_patches import install
from sd_scripts_patches.trainers import TRAINERS


def test_the_pins_of_the_real_musubi_tuner_are_installed(musubi):
    wanted = install.requirements(tiny_musubi.checkout(), TRAINERS["musubi"]).splitlines()
    for pin in ("accelerate==1.6.0", "diffusers==0.32.1", "transformers==4.57.6", "huggingface-hub==0.34.3"):
        assert pin in wanted
