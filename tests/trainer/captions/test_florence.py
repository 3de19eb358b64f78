"""Florence-2 through transformers' own classes: a tiny model with random weights, saved and loaded as the real one is."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from draft_helpers import photo
from PIL import Image
from tiny_florence import tiny_florence
from ui_helpers import PROJECT

from captions import florence
from runs.files import RunError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_florence(tmp_path_factory.mktemp("florence"))


def test_a_folder_gets_the_captions_that_the_classes_give(model, tmp_path):
    import torch
    from transformers import Florence2ForConditionalGeneration, Florence2Processor

    for number in range(2):
        photo(tmp_path / f"{number}.png", seed=number, size=(90, 60))
    command = [sys.executable, "-m", "captions", str(tmp_path), "--with=florence", f"--model={model}", "--task=short"]
    command += ["--trigger=ohwx", "--device=cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    processor = Florence2Processor.from_pretrained(model)
    plain = Florence2ForConditionalGeneration.from_pretrained(model).eval()
    for number in range(2):
        image = Image.open(tmp_path / f"{number}.png").convert("RGB")
        inputs = processor(text="<CAPTION>", images=image, return_tensors="pt")
        with torch.inference_mode():
            ids = plain.generate(**inputs, max_new_tokens=64, num_beams=3, do_sample=False)
        text = processor.batch_decode(ids, skip_special_tokens=True)[0].strip()
        assert len(text) > 10
        assert (tmp_path / f"{number}.txt").read_text() == f"ohwx, {text}\n"


def test_each_length_asks_its_own_question_and_ends_at_its_limit(model, monkeypatch):
    monkeypatch.setattr(florence, "TASKS", {task: (word, 8) for task, (word, _) in florence.TASKS.items()})
    for task in florence.TASKS:
        caption = florence.load(model, task, device="cpu")(Image.new("RGB", (70, 50), "green"))
        assert caption and len(caption.split()) <= 8


def test_code_of_a_repository_never_runs(model, tmp_path):
    """microsoft/Florence-2-base has an auto_map, and its code would run with trust_remote_code."""
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoProcessor": "evil.P"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    florence.load(folder, "short", device="cpu")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"\x08\0\0\0\0\0\0\0damaged!"), ("model.safetensors", None), ("config.json", b"{")],
)
def test_files_that_are_not_florence_are_named(model, tmp_path, name, content):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).unlink()
    if content:
        (folder / name).write_bytes(content)
    with pytest.raises(RunError, match="cannot be loaded as Florence-2"):
        florence.load(folder, "short", device="cpu")
