"""Likeness of samples and training images: computed by models of the real classes with tiny random weights."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from PIL import Image
from runs_helpers import python

from runs import likeness
from ui.run import evolution

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
MAKE = """
import sys
import torch
from transformers import (CLIPConfig, CLIPImageProcessor, CLIPModel, Dinov2Config, Dinov2Model, BitImageProcessor,
                          SiglipConfig, SiglipImageProcessor, SiglipModel)
kind, folder = sys.argv[1:]
torch.manual_seed(0)
tiny = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
size = {"height": 28, "width": 28}
if kind == "dinov2":
    model = Dinov2Model(Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14))
    processor = BitImageProcessor(size={"shortest_edge": 28}, crop_size=size)
elif kind == "clip":
    config = CLIPConfig(text_config={**tiny, "vocab_size": 50}, vision_config={**tiny, "image_size": 28, "patch_size": 14}, projection_dim=8)
    model, processor = CLIPModel(config), CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size)
else:
    config = SiglipConfig(text_config={**tiny, "vocab_size": 50}, vision_config={**tiny, "image_size": 28, "patch_size": 14})
    model, processor = SiglipModel(config), SiglipImageProcessor(size=size)
model.save_pretrained(folder)
processor.save_pretrained(folder)
"""


def make_model(kind: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", MAKE, kind, str(folder)], check=True, timeout=200, capture_output=True)


def picture(path: Path, seed: int, size: int = 40) -> None:
    pixels = numpy.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with a run: two training images, a sample that equals one of them, one that does not, a damaged one."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    images, run = tmp_path / "datasets" / "cat", tmp_path / "outputs" / "cat"
    (images / "10_more").mkdir(parents=True)
    (run / "sample").mkdir(parents=True)
    (run / "run.toml").write_text('name = "cat"\n')
    picture(images / "a.png", 1)
    picture(images / "10_more" / "b.png", 1)
    picture(images / ".hidden.png", 5)
    shutil.copy(images / "a.png", run / "sample" / "cat_000010_00_20260101120000_42.png")
    picture(run / "sample" / "cat_000020_00_20260101120000_42.png", 2)
    (run / "sample" / "cat_000030_00_20260101120000_42.png").write_bytes(b"not an image")
    return tmp_path


def compute(folder: Path, model: likeness.Model) -> subprocess.CompletedProcess:
    return python("-m", *likeness.command(folder, model))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_sample_that_is_a_training_image_scores_one(data, kind):
    folder, place = data / "outputs" / "cat", data / "models" / "likeness"
    place.parent.mkdir()
    make_model(kind, place)
    model = likeness.find_model()
    assert model == likeness.Model(place, kind)
    done = compute(folder, model)
    assert done.returncode == 0, done.stderr
    found = likeness.read(folder)
    assert (found.model, found.images) == (kind, 2) and found.own == pytest.approx(1, abs=1e-4)
    same, other = (found.scores[f"cat_0000{step}_00_20260101120000_42.png"] for step in (10, 20))
    assert same == pytest.approx(1, abs=1e-4) and other < 0.999
    assert "cat_000030_00_20260101120000_42.png is left out" in done.stderr
    shown = {one["step"]: one["likeness"] for one in evolution.summary(folder)["snapshots"]}
    assert shown[10] == pytest.approx(1, abs=1e-4) and shown[30] is None


def test_only_what_is_new_is_computed_and_a_killed_process_keeps_what_it_wrote(data):
    folder, place = data / "outputs" / "cat", data / "models" / "likeness"
    place.parent.mkdir()
    make_model("dinov2", place)
    model = likeness.Model(place, "dinov2")
    assert compute(folder, model).returncode == 0
    picture(folder / "sample" / "cat_000040_00_20260101120000_42.png", 3)
    done = compute(folder, model)
    assert "sample 2 of 2" in done.stdout and len(likeness.read(folder).scores) == 3  # the damaged one again
    for number in range(50, 80):
        picture(folder / "sample" / f"cat_0000{number}_00_20260101120000_42.png", number, 400)
    process = subprocess.Popen([sys.executable, "-m", *likeness.command(folder, model)], cwd=ROOT, stdout=-3, stderr=-3)
    until = time.monotonic() + 100
    while len(likeness.read(folder).scores) < 10 and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    kept = likeness.read(folder).scores
    assert 10 <= len(kept) <= 33
    done = compute(folder, model)
    assert done.returncode == 0 and likeness.read(folder).scores.items() >= kept.items()
    assert len(likeness.read(folder).scores) == 33 and f"sample 1 of {34 - len(kept)}" in done.stdout
    (place / "model.safetensors").write_text("{}")
    picture(folder / "sample" / "cat_000090_00_20260101120000_42.png", 9)
    done = compute(folder, model)
    assert done.returncode == 1 and "the model cannot be read" in done.stderr and "Traceback" not in done.stderr
