"""The caches: encoded once, and again only what changed or broke; each error names its file."""

import os
import time
from argparse import Namespace

import pytest
from PIL import Image as Pillow
from trainer_helpers import flags, fork, good, make_config, make_images, sha

from guards.heartbeat import Heartbeat
from trainer import cache
from trainer.arguments import parse
from trainer.cache import FOLDER
from trainer.dataset import Image
from trainer.setup import build


def test_a_run_encodes_once_and_again_only_what_changed_or_broke(tmp_path):
    """The model's own folder is made by the run. Then a restart; then a changed caption and image, and a cut cache."""
    images = make_images(tmp_path / "images")
    config = make_config(tmp_path / "dataset.toml", images)

    def encoded(number):
        """How many images and texts a start of the run encodes."""
        found = {}
        watch = lambda phase, step, hb: found.update({phase: max(found.get(phase, 0), hb.record.done)})  # noqa: E731
        argv = flags(tmp_path / "models" / "tiny-flux", config, tmp_path / f"out{number}", max_train_steps=2)
        build(parse(argv), Heartbeat(None, inject=watch))
        return found.get("cache_latents", 0), found.get("cache_text", 0)

    assert encoded(1) == (5, 5)
    assert encoded(2) == (0, 0)
    (images / "0.txt").write_text("another caption", encoding="utf-8")
    Pillow.new("RGB", (64, 64), "red").save(images / "1.png")
    cut = sorted((images / FOLDER).glob("latents-*"))[0]
    cut.write_bytes(cut.read_bytes()[:-30])
    for left, age_s in (("old", 9000), ("new", 9)):  # of a killed process; of one that writes now
        (images / FOLDER / f".{cut.name}.{left}.tmp").touch()
        os.utime(images / FOLDER / f".{cut.name}.{left}.tmp", (time.time() - age_s,) * 2)
    latents, texts = encoded(3)
    assert texts == 1 and latents in (1, 2)  # the cut one may be the changed image's
    assert len(list((images / FOLDER).glob("text-*"))) == 6
    assert [left.name for left in (images / FOLDER).glob(".*")] == [f".{cut.name}.new.tmp"]


def test_an_image_with_16_bits_of_grey_that_an_older_version_cached_as_white_is_encoded_again(model, tmp_path):
    args, file = Namespace(t5_tokens=16, apply_t5_attn_mask=False), model / "model_index.json"
    grey = [Image(file, "", 1, (64, 64), (64, 64), 0, 1, deep=deep) for deep in (False, True)]
    assert len(set(cache.plan(grey, [], model, tmp_path, args, ("", ""), Heartbeat(None), print).latents)) == 2


def test_a_cache_that_cannot_be_written_is_named(work, tmp_path):
    images = make_images(tmp_path / "images", 2)
    args = parse(flags(work["model"], make_config(tmp_path / "dataset.toml", images), tmp_path / "out"))
    (images / FOLDER).write_text("in the way", encoding="utf-8")
    with pytest.raises(OSError, match="exists") as error:
        build(args, Heartbeat(None))
    assert error.value.filename.startswith(str(images / FOLDER / "latents-"))


def test_a_damaged_cache_file_is_an_error_with_its_name_and_the_next_start_encodes_it_again(work, tmp_path):
    images = make_images(tmp_path / "images", 1)
    config = make_config(tmp_path / "dataset.toml", images)
    argv = flags(work["model"], config, tmp_path / "out", max_data_loader_n_workers=1)
    good(fork(argv))
    original = sha(tmp_path / "out" / "tiny.safetensors")
    text = next((images / FOLDER).glob("text-*"))
    data = bytearray(text.read_bytes())
    data[len(data) // 3] ^= 0xFF
    text.write_bytes(data)
    done = fork(argv)
    assert done.returncode == 1 and f"{text} is damaged" in done.stderr
    assert not text.exists() and text.with_name(text.name + ".corrupt").exists()
    assert "caching Text Encoder outputs" in good(fork(argv)).stdout
    assert sha(tmp_path / "out" / "tiny.safetensors") == original
