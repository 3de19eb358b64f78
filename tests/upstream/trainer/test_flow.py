"""The trainer against kohya's real code: the same noise levels and losses, and a LoRA file that it takes.

Both sides get the same tiny FLUX weights, the same batch and the same seed; sd-scripts answers in its own environment.
"""

import json
import subprocess
from argparse import Namespace
from dataclasses import replace

import pytest
import tiny_sd_scripts
import torch
from flux_parts import load, loaded, loss_of
from safetensors.torch import save_file
from trainer_helpers import ROOT, flags

from trainer import flow, lora, tiny_flux
from trainer.arguments import parse
from trainer.families import sdxl
from trainer.families.flux import FAMILY

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLINGS = [
    {"timestep_sampling": "uniform"},
    {"timestep_sampling": "sigmoid", "sigmoid_scale": 0.7},
    {"timestep_sampling": "shift", "sigmoid_scale": 1.3, "discrete_flow_shift": 3.1582},
    {"timestep_sampling": "flux_shift"},
    *({"timestep_sampling": "sigma", "weighting_scheme": w} for w in ("sigma_sqrt", "cosmap", "none", "uniform")),
    {"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_mean": 0.3, "logit_std": 0.8},
    {"timestep_sampling": "sigma", "weighting_scheme": "mode", "mode_scale": 1.1, "discrete_flow_shift": 1.7},
]
HUBER = [{"loss_type": k, "huber_schedule": s} for k in ("huber", "smooth_l1") for s in ("constant", "exponential")]
LOSSES = [
    {"timestep_sampling": "shift", "discrete_flow_shift": 3.1582, "model_prediction_type": "raw"},
    {"timestep_sampling": "shift", "model_prediction_type": "additive"},
    {"timestep_sampling": "shift", "guidance_scale": 3.5},
    {"timestep_sampling": "shift", "apply_t5_attn_mask": True},
    *({**how, "model_prediction_type": "sigma_scaled"} for how in SAMPLINGS),
    {"timestep_sampling": "flux_shift", "loss_type": "l1"},
    *({"timestep_sampling": "sigmoid", "huber_c": 0.2, **how} for how in HUBER),
]
VELOCITY = {"v_parameterization": True, "zero_terminal_snr": True}
SDXL = [
    {}, {"min_snr_gamma": 5}, {"v_parameterization": True}, {"v_parameterization": True, "min_snr_gamma": 1}, VELOCITY,
    {**VELOCITY, "min_snr_gamma": 5}, {"loss_type": "l1"}, *({"loss_type": kind} for kind in ("huber", "smooth_l1")), *HUBER,
]  # fmt: skip


def numbered(cases: list[dict]) -> list[dict]:
    """The whole argument list of each case, as JSON can hold it, with a seed of its own for the noise."""
    settings = [vars(parse(flags("m", "d", "o", **case))) for case in cases]
    return [{**args, "noise_seed": 100 + number} for number, args in enumerate(settings)]


@pytest.fixture(scope="module")
def both(newest, tmp_path_factory):
    """Our model and batch, what was requested of sd-scripts, and its answers."""
    folder = tmp_path_factory.mktemp("beside")
    tiny_sd_scripts.write_site(folder)
    model = tiny_flux.ensure(folder / "tiny-flux")
    draw = torch.Generator().manual_seed(3)
    batch = {
        "latents": torch.randn(6, 16, 8, 12, generator=draw),
        "t5": torch.randn(6, 20, 64, generator=draw),
        "clip": torch.randn(6, 32, generator=draw),
        "mask": (torch.arange(20)[None] < torch.tensor([3, 20, 7, 12, 1, 19])[:, None]).long(),
        "alpha_masks": torch.rand(6, 64, 96, generator=draw).round(),
    }
    save_file(batch, folder / "batch.safetensors")
    transformer, parameters = loaded(model, rank=3, alpha=2.0, seed=1)
    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(parameters.items())):
            if ".lora_B." in name:  # zero until it is trained
                weight.normal_(0, 1.0, generator=torch.Generator().manual_seed(number))
    (folder / "lora.safetensors").write_bytes(lora.to_file(parameters, FAMILY.prefix, 2.0 / 3, None, {}))
    files = {"model": model, "batch": folder / "batch.safetensors", "lora": folder / "lora.safetensors"}
    requested = {name: str(path) for name, path in files.items()}
    requested |= {"losses": numbered(LOSSES), "sdxl": numbered(SDXL)}
    (folder / "requested.json").write_text(json.dumps(requested), encoding="utf-8")
    command = [tiny_sd_scripts.python(), ROOT / "tests/support/trainer_sd_scripts.py"]
    command += [folder / "requested.json", folder / "answered.json"]
    where = {"env": tiny_sd_scripts.environment(folder), "cwd": tiny_sd_scripts.checkout()}
    done = subprocess.run(command, **where, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    answered = json.loads((folder / "answered.json").read_text(encoding="utf-8"))
    return {"model": model, "batch": batch, "trained": transformer, "requested": requested, "answered": answered}


def ours(requested: dict, transformer, batch: dict) -> float:
    args = Namespace(**requested)
    with torch.no_grad():
        return loss_of(args, transformer, batch, requested["noise_seed"]).item()


def test_the_loss_is_that_of_sd_scripts_whatever_the_options(both):
    transformer = load(both["model"])
    found = [ours(one, transformer, both["batch"]) for one in both["requested"]["losses"]]
    assert found == pytest.approx(both["answered"]["losses"], rel=1e-5)
    assert len({round(value, 4) for value in found}) == len(LOSSES), "options that change nothing test nothing"


def test_the_loss_of_sdxl_is_that_of_sd_scripts_whatever_the_options(both):
    predict = lambda model, noisy, steps, batch, args: noisy / 2 + steps.view(-1, 1, 1, 1) / 1000  # noqa: E731
    family, batch, found = replace(sdxl.FAMILY, predict=predict), {"latents": both["batch"]["latents"]}, []
    for one in both["requested"]["sdxl"]:
        loss = flow.loss_of(Namespace(**one), family, None, batch, one["noise_seed"], "cpu", torch.float32)
        found.append(loss.item())
    assert found == pytest.approx(both["answered"]["sdxl"], rel=1e-5)


def test_a_lora_of_sdxl_has_the_names_of_sd_scripts(both):
    import diffusers  # after imports.heavy

    blocks = {"block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10)}
    blocks["down_block_types"] = "DownBlock2D", *["CrossAttnDownBlock2D"] * 2
    blocks["up_block_types"] = *["CrossAttnUpBlock2D"] * 2, "UpBlock2D"
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(use_linear_projection=True, **blocks)
    names = [f"{name}.lora_A.weight" for name in lora.layers(unet, sdxl.FAMILY.blocks["all"])]
    theirs = sorted(f"{name}.lora_down.weight" for name in both["answered"]["layers"])
    assert sorted(lora.kohya_names(names).values()) == theirs


def test_the_loss_below_a_mask_is_that_of_sd_scripts(both):
    transformer = load(both["model"])
    area = torch.nn.functional.interpolate(both["batch"]["alpha_masks"][:, None], size=(8, 12), mode="area")[:, 0]
    batch = {**both["batch"], "loss_mask": area}
    found = [ours(one, transformer, batch) for one in both["requested"]["losses"][:4]]
    assert found == pytest.approx(both["answered"]["masked"], rel=1e-5)
    assert all(mask < whole for mask, whole in zip(found, both["answered"]["losses"], strict=False))


def test_sd_scripts_takes_the_lora_file_and_it_does_there_what_it_did_here(both):
    requested, batch = both["requested"]["losses"][0], both["batch"]
    trained = ours(requested, both["trained"].eval(), batch)
    assert trained == pytest.approx(both["answered"]["merged"], rel=1e-5)
    assert abs(trained - both["answered"]["losses"][0]) > 1e-2
