"""A rendered script of musubi-tuner runs its three commands on the real trainer (Z-Image, tiny weights).

Kills in each command are rows of tests/campaigns/faults.toml.
"""

import tiny_musubi as tiny
from musubi_helpers import caches, environment, run_of
from runs_helpers import run_script


def test_the_script_caches_and_trains(musubi, toy_z, tmp_path):
    folder = run_of(toy_z, "toy z's", prompts=["a thing"], sample_every_n_steps=12, sample_steps=1)
    env = environment(toy_z, tmp_path / "data", TINY_LOSSES=str(tmp_path / "losses"), TIMEOUT_S="400")
    done = run_script(folder / "train.sh", None, **env)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    assert len(tiny.losses(tmp_path / "losses")) == 12
    assert len(caches(folder, "_zi")) == len(caches(folder, "_zi_te")) == 7
    slug = folder.name
    assert (folder / f"{slug}.safetensors").is_file() and (folder / f"{slug}-state/hangproof.json").is_file()
    assert list((folder / "sample").glob("*.png")) and not list(folder.rglob("*.tmp"))
