"""Caches of sd-scripts: a damaged one counts as missing, and then every cache of its folder is read in full."""

import io
import os
from types import ModuleType

import numpy
import patches_helpers as helpers
import pytest

from sd_scripts_patches import npz


@pytest.fixture
def trainer(monkeypatch):
    """numpy's functions and, where it looks up and writes a cache, sd-scripts' strategy for latents, with the patch."""
    monkeypatch.setattr(npz, "_folders_to_verify", {})
    np, library = ModuleType("numpy"), ModuleType("library.strategy_base")
    np.load, np.savez = numpy.load, numpy.savez

    class LatentsCachingStrategy:
        def _default_is_disk_cached_latents_expected(self, npz_path):
            return os.path.exists(npz_path) and "latents" in np.load(npz_path).files

        def save_latents_to_disk(self, npz_path, latents):
            found = np.load(npz_path) if os.path.exists(npz_path) else None
            kept = {name: found[name] for name in found.files} if found else {}
            np.savez(npz_path, **{**kept, "latents": latents})

    library.LatentsCachingStrategy = LatentsCachingStrategy
    for module in (np, library):
        helpers.apply(npz.PATCH, module)
    strategy = LatentsCachingStrategy()
    expected = strategy._default_is_disk_cached_latents_expected
    return np, strategy.save_latents_to_disk, lambda path: expected(str(path))


def test_a_damaged_cache_counts_as_missing_and_then_its_whole_folder_is_verified(trainer, tmp_path, capsys):
    _, save, expected = trainer
    good, flipped, short = (tmp_path / f"{name}.npz" for name in ("good", "flipped", "short"))
    for path in (good, flipped, short):
        save(path, numpy.ones((64, 64)))
    helpers.flip(flipped)
    assert expected(flipped), "only the directory of a cache is read while none has been damaged"
    short.write_bytes(short.read_bytes()[:500])
    assert [expected(path) for path in (short, flipped, good)] == [False, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flipped.npz.corrupt", "good.npz", "short.npz.corrupt"]
    assert f"{flipped} is damaged" in capsys.readouterr().err


def test_latents_replace_a_damaged_cache_and_other_files_are_left_to_numpy(trainer, tmp_path):
    np, save, _ = trainer
    path, memory = tmp_path / "a.npz", io.BytesIO()
    save(path, numpy.ones((64, 64)))
    helpers.flip(path)
    save(path, numpy.full((64, 64), 2.0))
    assert numpy.load(path)["latents"][0, 0] == 2
    np.savez(memory, a=numpy.ones(2))
    memory.seek(0)
    assert np.load(memory)["a"].tolist() == [1, 1]
