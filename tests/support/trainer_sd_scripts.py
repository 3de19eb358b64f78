"""What kohya's sd-scripts computes of the same numbers: run in its environment by tests/upstream/trainer/test_flow.py.

`python tests/support/trainer_sd_scripts.py ASKED.json ANSWERED.json`. ASKED: `model` (diffusers' folder of the tiny
FLUX), `batch` (safetensors), `lora` (a file of our trainer), `losses` and `sdxl` (lists of training arguments with a
`noise_seed`). Everything that is called is sd-scripts' own; only sizes are given.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

CHECKOUT = Path.cwd()
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "networks")]  # its tools import their neighbours by bare names

from flux_train_network import FluxNetworkTrainer  # noqa: E402
from library import flux_models, flux_utils, sdxl_original_unet  # noqa: E402
from networks import convert_flux_lora, flux_merge_lora, lora  # noqa: E402
from sdxl_train_network import SdxlNetworkTrainer  # noqa: E402

DOUBLE, SINGLE = 2, 4
UNUSED = """
ip_noise_gamma masked_loss weighted_captions full_fp16 noise_offset multires_noise_iterations min_timestep max_timestep
scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss
"""
NOT_USED = dict.fromkeys(UNUSED.split())


def flux(weights: dict):
    params = flux_models.FluxParams(
        in_channels=64, vec_in_dim=32, context_in_dim=64, hidden_size=64, mlp_ratio=4.0, num_heads=2, depth=DOUBLE,
        depth_single_blocks=SINGLE, axes_dim=[8, 12, 12], theta=10_000, qkv_bias=True, guidance_embed=True,
    )  # fmt: skip
    model = flux_models.Flux(params)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def loss_of(trainer, args, model, latents: torch.Tensor, texts: list, **more) -> float:
    given = {"latents": latents, "text_encoder_outputs_list": texts, "loss_weights": torch.ones(len(latents)), **more}
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)
    schedule = trainer.get_noise_scheduler(args, accelerator.device)
    torch.manual_seed(args.noise_seed)
    with torch.no_grad():
        value = trainer.process_batch(
            given, [], model, None, None, schedule, torch.float32, torch.float32, accelerator, args, None, None,
            is_train=False, train_text_encoder=False,
        )  # fmt: skip
    return value.item()


def loss(requested: dict, model, batch: dict, masked: bool = False) -> float:
    args, trainer, text = SimpleNamespace(**requested, **NOT_USED), FluxNetworkTrainer(), batch["t5"]
    trainer.model_type = "flux"
    texts = [batch["clip"], text, torch.zeros(*text.shape[:2], 3), batch["mask"]]
    masks = batch["alpha_masks"] if masked else None
    return loss_of(trainer, args, model, batch["latents"], texts, alpha_masks=masks)


def sdxl_loss(requested: dict, latents: torch.Tensor) -> float:
    """The loss of a U-Net whose prediction is half of what it gets, and the share of the timestep."""
    args, trainer = SimpleNamespace(**requested, **NOT_USED), SdxlNetworkTrainer()
    trainer.vae_scale_factor = 1.0
    trainer.call_unet = lambda *given, **_: given[3] / 2 + given[4].view(-1, 1, 1, 1) / 1000
    return loss_of(trainer, args, None, latents, [torch.zeros(1)])


def sdxl_layers() -> list[str]:
    """What a LoRA of the full-size SDXL calls its layers."""
    with torch.device("meta"):
        unet, empty = sdxl_original_unet.SdxlUNet2DConditionModel(), torch.nn.Module()
        return [one.lora_name for one in lora.create_network(1.0, 4, 1.0, None, [empty], unet).unet_loras]


def merged(lora: str, weights: dict, folder: Path) -> dict:
    """The weights with the LoRA of `folder / "converted.safetensors"` merged in; its own converter makes it."""
    base, converted = folder / "flux.safetensors", folder / "converted.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, base)
    how = {"src": "ai-toolkit", "dst": "sd-scripts", "src_path": lora, "dst_path": str(converted)}
    convert_flux_lora.main(SimpleNamespace(**how))
    merge = flux_merge_lora.merge_to_flux_model
    return merge("cpu", "cpu", str(base), None, None, [str(converted)], [1.0], torch.float32, torch.float32)[0]


def main(source: Path, target: Path) -> None:
    requested = json.loads(source.read_text(encoding="utf-8"))
    batch = load_file(requested["batch"])
    theirs = load_file(Path(requested["model"]) / "transformer" / "diffusion_pytorch_model.safetensors")
    weights = flux_utils.convert_diffusers_sd_to_bfl(theirs, DOUBLE, SINGLE)
    model = flux(weights)
    trained = flux(merged(requested["lora"], weights, target.parent))
    answer = {
        "losses": [loss(one, model, batch) for one in requested["losses"]],
        "masked": [loss(one, model, batch, True) for one in requested["losses"][:4]],
        "merged": loss(requested["losses"][0], trained, batch),
        "sdxl": [sdxl_loss(one, batch["latents"]) for one in requested["sdxl"]],
        "layers": sdxl_layers(),
    }
    target.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
