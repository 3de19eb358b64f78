"""Sample images that fail cost only themselves."""

import torch

from sd_scripts_patches import sampling


def test_a_prompt_file_damaged_during_the_run_costs_only_the_samples(capsys):
    def sample_images(*args):
        torch.manual_seed(7)
        raise ValueError("prompts.txt: no such option --q")

    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert sampling._sample_all(sample_images)() is None
    assert torch.equal(torch.get_rng_state(), before)
    assert "sample images skipped: ValueError: prompts.txt: no such option --q" in capsys.readouterr().err


def test_a_skipped_image_leaves_the_vae_on_its_device(monkeypatch, capsys):
    class Vae:
        device = "cpu"

        def decode(self, x):
            raise MemoryError("no memory for a picture")

        def to(self, device):
            self.device = device

    def sample_image_inference(vae, prompt):
        vae.to("cuda")
        vae.decode(None)

    vae = Vae()
    sampling._sample_one(sample_image_inference)(vae, {"enum": 2})
    assert vae.device == "cpu"
    assert "sample image 3 skipped: MemoryError: no memory for a picture" in capsys.readouterr().err
