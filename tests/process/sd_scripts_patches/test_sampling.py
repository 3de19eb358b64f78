"""Sample images that fail cost only themselves."""

import os
import time
from types import SimpleNamespace

import torch

from sd_scripts_patches import sampling, session
from sd_scripts_patches.resume import Run


def test_a_prompt_file_damaged_during_the_run_costs_only_the_samples(capsys):
    """Anima places swapped blocks for inference before it reads the prompts. An image before it has drawn numbers."""

    def sample_images(accelerator, model):
        model.module.placed = "for inference"
        sampling._sample_one(lambda prompt: torch.manual_seed(7))({"enum": 0})
        raise ValueError("prompts.txt: no such option --q")

    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = SimpleNamespace(switch_block_swap_for_training=lambda: setattr(model, "placed", "for training"))
    assert sampling._sample_all(sample_images)(None, SimpleNamespace(module=model)) is None
    assert torch.equal(torch.get_rng_state(), before) and model.placed == "for training"
    assert "sample images skipped: ValueError: prompts.txt: no such option --q" in capsys.readouterr().err


def test_a_skipped_image_leaves_the_vae_on_its_device_and_the_model_in_its_mode(monkeypatch, capsys):
    class Vae:
        device = "cpu"

        def decode(self, x):
            raise MemoryError("no memory for a picture")

        def to(self, device):
            self.device = device

    def sample_image_inference(vae, model, prompt):
        vae.to("cuda")
        model.eval()
        vae.decode(None)

    vae, model = Vae(), torch.nn.Linear(1, 1)
    sampling._sample_one(sample_image_inference)(vae, model, {"enum": 2})
    assert vae.device == "cpu" and model.training
    assert "sample image 3 skipped: MemoryError: no memory for a picture" in capsys.readouterr().err


def test_an_image_that_a_killed_process_has_drawn_since_the_state_is_not_drawn_again(tmp_path, monkeypatch):
    """The second is older than the state, the kill cut off the third, the fourth is missing."""
    options, drawn = SimpleNamespace(output_dir=tmp_path, output_name="x"), []
    monkeypatch.setattr(session, "run", Run())
    session.run.since_s = 100.0
    (tmp_path / "sample").mkdir()
    whole = sampling.COMPLETE[".png"]
    for number, (at_s, end) in enumerate([(200, whole), (50, whole), (200, b"")]):
        path = tmp_path / "sample" / f"x_000004_{number:02d}_20261130_42.png"
        path.write_bytes(b"PNG" + end)
        os.utime(path, (at_s, at_s))
    draw = sampling._sample_one(lambda *args: drawn.append(args[1]["enum"]))
    for number in range(4):
        draw(options, {"enum": number}, None, 4)
    assert drawn == [1, 2, 3] and not path.exists()


def test_a_bar_without_items_which_its_loop_moves_is_within_the_budget_too(monkeypatch, capsys):
    """That of musubi-tuner's Qwen-Image."""
    monkeypatch.setenv("HANGPROOF_SAMPLE_BUDGET_S", "0.02")
    bar = SimpleNamespace(iterable=None, n=3, total=30)
    update = sampling._after_update(lambda bar, n: time.sleep(0.05))
    sampling._sample_one(lambda prompt: update(bar, 1))({"enum": 0})
    said = "sample image 1 skipped: BudgetExceeded: the budget of 0.02 s was exceeded after 3 denoising steps"
    assert said in capsys.readouterr().err
