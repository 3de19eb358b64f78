"""Damaged caches: of sd-scripts one counts as missing, and then its folder is read; of musubi-tuner one is named."""

import contextlib
import io
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import patches_helpers as helpers
import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts_patches import npz
from sd_scripts_patches.musubi import caches


@pytest.fixture
def trainer(monkeypatch):
    """numpy's functions and, where it looks up and writes a cache, sd-scripts' strategy for latents, with the patch."""
    monkeypatch.setattr(npz, "_folders_to_verify", {})
    np, library = ModuleType("numpy"), ModuleType("library.strategy_base")
    np.load, np.savez = numpy.load, numpy.savez

    class LatentsCachingStrategy:
        def _default_is_disk_cached_latents_expected(self, npz_path):
            return os.path.exists(npz_path) and "latents" in np.load(npz_path).files

        def _default_cache_batch_latents(self, encode_by_vae): ...
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


def cached_from(seed: int, images: str, monkeypatch) -> list[float]:
    """Encode `images` as a process whose training starts with this seed; return what it drew, and its next number."""
    drawn = []
    encode = npz._note_draws(lambda strategy, image: drawn.append(torch.rand(1).item()))
    cache = npz._draw_on(lambda images: [encode(SimpleNamespace(cache_to_disk=True), image) for image in images])
    monkeypatch.setattr(npz, "_begin", [])
    torch.manual_seed(seed)
    cache(images)
    return [*drawn, torch.rand(1).item()]


def test_a_restart_that_finds_caches_draws_the_numbers_that_follow_them(tmp_path, monkeypatch):
    with torch.random.fork_rng():
        whole, other = cached_from(7, "abcd", monkeypatch), cached_from(8, "d", monkeypatch)
        monkeypatch.setenv("HANGPROOF_SNAPSHOTS", str(tmp_path))
        found = [cached_from(7, images, monkeypatch)[:-1] for images in ("ab", "c")]
        assert [*found[0], *found[1], *cached_from(7, "d", monkeypatch)] == whole
        assert cached_from(7, "", monkeypatch) == whole[-1:]
        assert cached_from(8, "d", monkeypatch) == other, "a training that begins otherwise draws its own numbers"


def test_a_batch_that_a_kill_cut_in_two_is_encoded_whole_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_SNAPSHOTS", str(tmp_path))
    images = [SimpleNamespace(latents_npz=str(tmp_path / f"{name}.npz")) for name in "abcd"]

    def cached(killed_after):
        """The caches of images in batches of two, and the next number; a kill comes after so many files."""

        def write(strategy, batch):
            for image, number in zip(batch, torch.rand(len(batch)).tolist(), strict=True):
                Path(image.latents_npz).write_text(str(number), encoding="utf-8")
                if len(list(tmp_path.glob("*.npz"))) == killed_after:
                    raise KeyboardInterrupt

        def cache():
            todo = [image for image in images if not Path(image.latents_npz).exists()]
            for at in range(0, len(todo), 2):
                npz._note_draws(write)(SimpleNamespace(cache_to_disk=True), todo[at : at + 2])

        monkeypatch.setattr(npz, "_begin", [])
        torch.manual_seed(7)
        with contextlib.suppress(KeyboardInterrupt):
            npz._draw_on(cache)()
        return [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("*.npz"))], torch.rand(1).item()

    with torch.random.fork_rng():
        whole = cached(5)
        for path in tmp_path.iterdir():
            path.unlink()
        for killed_after in (1, 2, 3, 4):
            cached(killed_after)
        assert cached(5) == whole


def test_a_cache_with_a_header_of_terabytes_is_renamed_before_anything_makes_room_for_it(tmp_path):
    path = tmp_path / "a_zi.safetensors"
    path.write_bytes(bytes([16, 0, 0, 0, 0, 16, 0, 0]) + b"{}" + b" " * 98)
    with pytest.raises(ValueError, match=r"a_zi\.safetensors is damaged .*renamed to a_zi\.safetensors\.corrupt"):
        caches.within_limit(path, lambda: path.open("rb").read(1 << 44))
    assert not path.exists()


def test_a_text_cache_that_a_kill_left_with_one_of_two_encoders_is_renamed_and_is_made_again(tmp_path):
    """HunyuanVideo's. --skip_existing leaves out what exists, and the training stops at the encoder that is missing."""
    half, whole = (tmp_path / f"{name}_hv_te.safetensors" for name in "ab")
    encoders = {"llm_float16": torch.ones(2), "clipL_float16": torch.ones(1), "clipL_mask": torch.ones(1)}
    save_file({"llm_float16": encoders["llm_float16"]}, half)
    save_file(encoders, whole)
    with pytest.raises(ValueError, match="outputs of one text encoder only: llm"):
        caches.read(half, lambda: load_file(half))
    assert caches.read(whole, lambda: load_file(whole)).keys() == encoders.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{half.name}.corrupt", whole.name]


@pytest.mark.parametrize("of", [lambda path: {"video_paths": [path]}, lambda path: {"data": [{"video_path": path}]}])
def test_a_video_on_a_disk_that_does_not_answer_is_named(tmp_path, monkeypatch, of):
    monkeypatch.setenv("HANGPROOF_IMAGE_TIMEOUT_S", "0.5")
    os.mkfifo(tmp_path / "a.mp4")
    (video,) = {target.make for target in caches.PATCH.targets if target.name.endswith("get_video_data")}
    with pytest.raises(TimeoutError, match=r"waited 0.5 s for video \S+a.mp4"):
        video(lambda source, idx: None)(SimpleNamespace(**of(tmp_path / "a.mp4")), 0)


def target(name):
    """The wrapper of a function of musubi-tuner's."""
    (make,) = {target.make for target in caches.PATCH.targets if target.name == name}
    return make


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("VideoDirectoryDatasource.get_video_data", lambda path: (SimpleNamespace(video_paths=[path]), 0), "video"),
        (
            "VideoJsonlDatasource.get_video_data",
            lambda path: (SimpleNamespace(data=[{"video_path": path}]), 0),
            "video",
        ),
        ("ImageDirectoryDatasource.get_image_data", lambda path: (SimpleNamespace(image_paths=[path]), 0), "image"),
        ("find_keys", lambda path: (path,), "cache file"),
    ],
)
def test_a_file_on_a_disk_that_does_not_answer_is_named(tmp_path, monkeypatch, name, arguments, what):
    for limit in ("IMAGE", "NPZ"):
        monkeypatch.setenv(f"HANGPROOF_{limit}_TIMEOUT_S", "0.5")
    os.mkfifo(tmp_path / "a")
    with pytest.raises(TimeoutError, match=rf"waited 0.5 s for {what} \S+/a"):
        target(name)(lambda *given: (tmp_path / "a").read_bytes())(*arguments(tmp_path / "a"))


def test_nan_is_refused_and_not_replaced_by_zero():
    item, written = SimpleNamespace(item_key="a.png"), []
    save = target("save_latent_cache_common")(lambda item, tensors: written.append(tensors))
    with pytest.raises(ValueError, match=r"a.png: no cache is written, because latents holds NaN or infinity"):
        save(item, {"latents": torch.tensor([1.0, float("nan")])})
    save(item, {"latents": torch.ones(1)})
    assert written == [{"latents": torch.ones(1)}]
