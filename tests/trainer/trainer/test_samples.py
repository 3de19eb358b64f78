"""Sample images: fixed by their seed, made when they are due, and skipped where one fails."""

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flux_parts import CPU, arguments, loaded, steps
from PIL import Image

from guards import limits
from guards.heartbeat import Heartbeat
from trainer import cache, samples
from trainer.families import sdxl
from trainer.families.flux import FAMILY

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = """# comment
a thing --w 72 --h 64 --s 2 --d 7
an\u2028other --w 64 --h 64 --s 2 --l 2 --n bad --ss euler --g 3.5.1
"""
DTYPES = (torch.float32, torch.float32)


def encoded(prompts, model, args):
    """The caches of the texts of prompts."""
    paths = cache.plan([], samples.texts(prompts), model, Path(args.output_dir), args, DTYPES, Heartbeat(None), print)
    cache.encode_texts(cache.missing_texts([], paths), model, FAMILY, args, torch.float32, CPU, Heartbeat(None))
    return paths


def test_samples_are_fixed_by_their_seed_and_a_bad_one_costs_itself_alone(model, tmp_path, monkeypatch):
    messages: list[str] = []
    (tmp_path / "p.txt").write_text(PROMPTS, encoding="utf-8")
    plain = samples.read(tmp_path / "p.txt", 42, messages.append)
    assert [p.cfg for p in samples.of_family(plain, sdxl.FAMILY)] == [7.5, 2.0], "as sd-scripts"
    prompts = samples.of_family(plain, FAMILY)
    assert [(p.width, p.height, p.steps, p.seed, p.cfg) for p in prompts] == [(64, 64, 2, 7, 1.0), (64, 64, 2, 43, 2.0)]
    for option, message in zip(("ss euler", "g 3.5.1"), messages, strict=True):
        assert f"'--{option}' is not an option of sample images" in message
    args, hb = arguments(output_dir=tmp_path, output_name="x"), Heartbeat(None)
    paths = encoded(prompts, model, args)
    transformer, parameters = loaded(model)
    sampler = samples.Sampler(prompts, paths, model, FAMILY, args, CPU, DTYPES, messages.append)

    def make(step):
        made = sampler.make(transformer, None, step, 0.1, hb, torch.no_grad, lambda: None)
        return [(p.name, Image.open(p).convert("RGB").tobytes()) for p in made]

    first, again = make(1), make(2)
    assert [name[:12] for name, _ in first] == ["x_000001_00_", "x_000001_01_"]
    assert first[0][0].endswith("_7.png")
    assert [pixels for _, pixels in first] == [pixels for _, pixels in again]
    steps(transformer, parameters, args)
    assert make(3)[0][1] != first[0][1]
    seconds = iter(range(100))
    monkeypatch.setattr(samples.time, "strftime", lambda _: f"{next(seconds):014}")
    assert make(6) != make(6) and len(list((tmp_path / "sample").glob("x_000006_*"))) == 2, "each is there once"
    assert hb.current_phase == "sample"
    # Each attempt reads the VAE again for its first sample, long after the images were encoded.
    damaged = Path(shutil.copytree(model, tmp_path / "model"))
    sampler.model = damaged
    for config, wrong in (("scheduler/scheduler_config", '{"num_train_timesteps": "x"}'), ("model_index", "{}")):
        (damaged / f"{config}.json").write_text(wrong, encoding="utf-8")
        assert make(7) == [] and "sample image 2 is skipped: " in messages[-1]
    shutil.copy(model / "model_index.json", damaged)
    sampler.model = model
    file = next((damaged / "vae").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])
    working, sampler = sampler, samples.Sampler(prompts, paths, damaged, FAMILY, args, CPU, DTYPES, messages.append)
    transformer.train().enable_gradient_checkpointing()
    assert make(4) == []
    assert "sample image 1 is skipped: TrainError" in messages[-2] and "download it again" in messages[-2]
    assert transformer.training and transformer.gradient_checkpointing
    sampler = working
    monkeypatch.setitem(limits.TABLE, "sample_least_s", limits.Limit(0.0, "a sample image"))
    monkeypatch.setattr(samples, "BUDGET_STEPS", 0.0)
    assert make(5) == []
    assert "sample image 1 is skipped: SampleError: 1 of 2 steps took longer than its limit" in messages[-2]


def test_with_a_mask_of_the_texts_neither_loses_a_token_beside_a_shorter_one():
    args, prompt = arguments(apply_t5_attn_mask=True), samples.Prompt(0, "a", 1, 64, 32, cfg=2.0)
    short, long = ({"t5": None, "clip": None, "mask": torch.tensor([[1] * n + [0] * (4 - n)])} for n in (1, 3))
    for text, without, seen in ((short, None, 1), (short, long, 3), (long, short, 3)):
        mask = FAMILY.sample(text, without, prompt, args)["joint_attention_kwargs"]["attention_mask"]
        assert mask.flatten().tolist() == [True] * seen + [False] * (4 - seen) + [True] * 8


@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_a_prompt_with_a_shift_of_its_own_does_not_change_the_images_after_it(model, tmp_path, dynamic):
    whole = Path(shutil.copytree(model, tmp_path / "model"))
    config = whole / "scheduler/scheduler_config.json"
    config.write_text(config.read_text().replace('shifting": true', f'shifting": {dynamic}'))
    args, hb = arguments(output_dir=tmp_path, output_name="x"), Heartbeat(None)
    plain = samples.Prompt(0, "a thing", 7, width=64, height=64, steps=2, cfg=1.0)
    shifted = replace(plain, shift=8.0)
    sampler = samples.Sampler([], encoded([plain], whole, args), whole, FAMILY, args, CPU, DTYPES, print)
    transformer = loaded(whole)[0]
    with torch.no_grad():
        drawn = [sampler.image(transformer, one, 1e9, hb, lambda: None) for one in (plain, shifted, plain)]
    before, other, after = (image.tobytes() for image in drawn)
    assert before == after != other


def test_a_folder_that_cannot_be_used_costs_its_samples_and_not_the_run(tmp_path):
    (tmp_path / "sample").symlink_to(tmp_path / "a disk that is gone")
    messages: list[str] = []
    args = Namespace(output_dir=tmp_path, output_name="x")
    sampler = samples.Sampler([samples.Prompt(0, "x", 1)], None, None, FAMILY, args, None, (), messages.append)
    assert sampler.make(None, None, 1, 0.1, Heartbeat(None), None, None) == []
    assert messages == [f"sample images are skipped: {tmp_path / 'sample'}: File exists"]
