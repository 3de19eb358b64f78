"""Every model family of sd-scripts with tiny weights.

A family is a row of data/tiny_families.toml (its script, the sizes that tiny_shrink.py changes, the flags of a run) and
`make_NAME`, which makes its weights and tokenizers. Only sizes change; loading, caching, training, sampling and saving
are sd-scripts' own code. Each run has five images, ten steps in two epochs, a state every third step, a sample image.

`workdir` runs it in sd-scripts' environment: `python tests/support/tiny_families.py CHECKOUT WORKDIR FAMILY`.
"""

import atexit
import functools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_sd_scripts as tiny

from benchmarks import tiny_flux
from trainer.tiny_flux import byte_letters, write_t5_tokenizer

IMAGES, STEPS, EPOCHS, STATE_EVERY, SAMPLE_EVERY = 5, 10, 2, 3, 5
WIDTH, VOCABULARY = 32, 1000
"""The width of text encoders whose width nothing else fixes, and the tokens of every tokenizer here."""

DECODER = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
ON_DISK = "network_train_unet_only cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk"


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """The families by name."""
    import tomllib  # the interpreter of sd-scripts, which needs no table, may have none

    return tomllib.loads(Path(__file__).with_name("data").joinpath("tiny_families.toml").read_text(encoding="utf-8"))


def own_flags(name: str, work: Path) -> dict[str, str]:
    """The flags that only this family has."""
    row = table()[name]
    given = {**dict.fromkeys(row.get("files", ()), "{work}/{flag}.safetensors"), **row.get("flags", {})}
    return {flag: value.format(work=work, flag=flag) for flag, value in given.items()}


# -- what makes the weights: it runs in sd-scripts' environment, with the sizes changed


def fill(model: Any) -> Any:
    """Give every tensor of a model random values of a sensible size, and return it.

    Some are not initialized, and some start at zero: the loss would not depend on the LoRA.
    """
    import torch

    for name, tensor in model.state_dict(keep_vars=True).items():
        data = tensor.data
        if not data.is_floating_point():
            continue
        if data.ndim > 1:
            data.normal_(std=1 / math.sqrt(max(data[0].numel(), 1)))
        else:
            data.fill_(1.0 if name.endswith(("weight", "scale", "gamma")) else 0.0)
            data.add_(torch.randn_like(data), alpha=0.02)
    return model


def save(path: Path, model: Any, rename: Callable[[str], str] = str, dtype: Any = None) -> None:
    """Write a model's weights, or tensors by name, as safetensors. rename: name in the model → name in the file."""
    from safetensors.torch import save_file

    tensors = model if isinstance(model, dict) else model.state_dict()
    save_file({rename(name): (t.to(dtype) if dtype else t).clone().contiguous() for name, t in tensors.items()}, path)


def make_sd15(work: Path) -> None:
    from library import model_util
    from transformers import CLIPTextModel

    unet = model_util.UNet2DConditionModel(**model_util.create_unet_diffusers_config(False))
    text = CLIPTextModel(model_util.CLIPTextConfig())
    vae = model_util.AutoencoderKL(**model_util.create_vae_diffusers_config())
    path = str(work / "model.safetensors")
    model_util.save_stable_diffusion_checkpoint(False, path, fill(text), fill(unet), None, 0, 0, {}, None, fill(vae))


def make_sdxl(work: Path) -> None:
    import torch
    from library import model_util, sdxl_model_util, sdxl_original_unet
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    unet = fill(sdxl_original_unet.SdxlUNet2DConditionModel())
    texts = [fill(kind(sdxl_model_util.CLIPTextConfig())) for kind in (CLIPTextModel, CLIPTextModelWithProjection)]
    vae = fill(model_util.AutoencoderKL(**model_util.create_vae_diffusers_config()))
    path, scale = str(work / "model.safetensors"), torch.tensor(4.6)
    sdxl_model_util.save_stable_diffusion_checkpoint(path, *texts, unet, 0, 0, None, vae, scale, {})


def make_sd3(work: Path) -> None:
    from library import flux_utils, sd3_models, sd3_utils
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    width, patches = 128, 16 * 16
    mmdit = fill(
        sd3_models.MMDiT(
            input_size=None, pos_embed_max_size=16, patch_size=2, in_channels=16, adm_in_channels=2 * WIDTH,
            num_patches=patches, context_embedder_in_features=64, context_embedder_out_features=width, depth=2,
            qk_norm="rms", x_block_self_attn_layers=[0],
        )
    )  # fmt: skip
    vae = fill(sd3_models.SDVAE())
    tensors = {f"model.diffusion_model.{name}": t for name, t in mmdit.state_dict().items()}
    tensors |= {f"first_stage_model.{name}": t for name, t in vae.state_dict().items()}
    save(work / "model.safetensors", tensors)
    for name in ("clip_l", "clip_g"):
        save(work / f"{name}.safetensors", fill(CLIPTextModelWithProjection(sd3_utils.CLIPTextConfig())))
    save(work / "t5xxl.safetensors", fill(T5EncoderModel(flux_utils.T5Config(**T5))))


def make_chroma(work: Path) -> None:
    from library import chroma_models, flux_models, flux_utils
    from transformers import T5EncoderModel

    save(work / "model.safetensors", fill(chroma_models.Chroma(chroma_models.chroma_params)))
    save(work / "ae.safetensors", fill(flux_models.AutoEncoder(flux_models.configs["dev"].ae_params)))
    save(work / "t5xxl.safetensors", fill(T5EncoderModel(flux_utils.T5Config(**T5))))


def make_lumina(work: Path) -> None:
    from library import flux_models, lumina_models, lumina_util

    save(work / "model.safetensors", fill(lumina_models.NextDiT_2B_GQA_patch2_Adaln_Refiner()))
    save(work / "ae.safetensors", fill(flux_models.AutoEncoder(flux_models.configs["schnell"].ae_params)))
    save(work / "gemma2.safetensors", fill(lumina_util.Gemma2Model(lumina_util.Gemma2Config())))
    in_cache(work / "tokenizers", "google/gemma-2-2b", write_t5_tokenizer)  # Gemma's is of pieces, too


def make_hunyuan(work: Path) -> None:
    import torch
    import transformers
    from library import hunyuan_image_models, hunyuan_image_text_encoder, hunyuan_image_vae

    encoders = hunyuan_image_text_encoder
    save(work / "model.safetensors", fill(hunyuan_image_models.HYImageDiffusionTransformer()))
    save(work / "vae.safetensors", fill(hunyuan_image_vae.HunyuanVAE2D()), dtype=torch.float16)
    qwen = encoders.Qwen2_5_VLForConditionalGeneration(encoders.Qwen2_5_VLConfig(text_config={}, vision_config={}))
    released = lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")  # noqa: E731
    save(work / "text_encoder.safetensors", fill(qwen), released, torch.bfloat16)
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.save_pretrained(work / "tokenizers/google_byt5-small")
    in_cache(work / "hub", "google/byt5-small", tokenizer.save_pretrained)
    in_cache(work / "hub", "Qwen/Qwen2.5-VL-7B-Instruct", write_bytes)
    byt5 = encoders.T5ForConditionalGeneration(encoders.T5Config(**BYT5)).get_encoder()
    encoders.add_special_token(tokenizer, byt5)
    tensors = {f"encoder.{name}": t for name, t in fill(byt5).state_dict().items() if "embed_tokens" not in name}
    save(work / "byt5.safetensors", {**tensors, "shared.weight": byt5.embed_tokens.weight.data}, dtype=torch.float16)


def make_anima(work: Path) -> None:
    import transformers
    from library import anima_models, qwen_image_autoencoder_kl

    save(work / "model.safetensors", fill(anima_models.Anima(**ANIMA)), lambda name: f"net.{name}")
    save(work / "vae.safetensors", fill(qwen_image_autoencoder_kl.AutoencoderKLQwenImage()))
    config = transformers.Qwen3Config(**DECODER, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    fill(transformers.Qwen3ForCausalLM(config)).save_pretrained(work / "qwen3")
    write_bytes(work / "qwen3")


T5 = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True, "tie_word_embeddings": False}
BYT5 = {**T5, "d_kv": 64, "d_model": 1472, "vocab_size": 384, "is_encoder_decoder": True, "num_decoder_layers": 4}
ANIMA = {"concat_padding_mask": True, "use_adaln_lora": True, "use_llm_adapter": True, "pos_emb_cls": "rope3d"}


# -- tokenizers


def write_bytes(folder: Path) -> None:
    """Write a tokenizer as Qwen's: every byte is a token."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(byte_letters())}), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    names = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    transformers.Qwen2TokenizerFast(*names).save_pretrained(folder)


def in_cache(hub: Path, repository: str, write: Callable[[Path], Any]) -> None:
    """Write the files of a repository as the hub's cache keeps them: what sd-scripts loads by the repository's name.

    The cache also remembers which files the repository does not have, so that nobody asks for them again.
    """
    folder, commit = hub / f"models--{repository.replace('/', '--')}", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit, "utf-8")
    write(folder / "snapshots" / commit)
    (folder / ".no_exist" / commit).mkdir(parents=True)
    optional = "added_tokens.json chat_template.jinja config.json merges.txt special_tokens_map.json tokenizer.json"
    for name in f"{optional} tokenizer.model tokenizer_config.json vocab.json".split():
        if not (folder / "snapshots" / commit / name).exists():
            (folder / ".no_exist" / commit / name).touch()


# -- runs


def why_not(name: str) -> str:
    """Return why a family cannot be trained with this checkout, or ""."""
    script = table()[name]["script"]
    missing = not (tiny.checkout() / script).is_file()
    return tiny.why_not() or (f"this checkout has no {script}" if missing else "")


def workdir(name: str) -> Path:
    """Return a folder with weights, tokenizers, images and site/ of a family, made once per session and checkout."""
    return _workdir(tiny.checkout(), name)


@functools.lru_cache(maxsize=32)
def _workdir(made_by: Path, name: str) -> Path:
    work = Path(tempfile.mkdtemp(prefix=f"tiny-{name}-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    tiny.write_site(work)
    (work / "sizes.json").write_text(json.dumps(table()[name]["sizes"]), encoding="utf-8")
    for module, code in table()[name].get("extra", {}).items():
        (work / f"{module}.py").write_text(code, encoding="utf-8")
    tiny_flux.make_files(tiny.installation(), work, __file__, name, **environment(name, work))
    return work


def environment(name: str, work: Path, faults: str = "", **extra: str) -> dict[str, str]:
    """Return the environment of a process that trains this family. faults: more entries of TINY_FAULTS."""
    entries = [f"{module}={Path(__file__).with_name('tiny_shrink.py')}" for module in table()[name]["sizes"]]
    entries += [f"{module}={work / module}.py" for module in table()[name].get("extra", {})] + [faults]
    shrunk = {"TINY_SIZES": str(work / "sizes.json"), "TINY_FAULTS": ";".join(filter(None, entries))}
    hub = {"HF_HUB_CACHE": str(work / "hub")} if (work / "hub").is_dir() else {}
    return tiny.environment(work, **shrunk, **hub, **extra)


FLAGS = f"""
output_name=tiny resolution=64,64 caption_extension=.txt network_dim=4 optimizer_type=AdamW learning_rate=1e-3
lr_scheduler=cosine loss_type=l2 mixed_precision=no save_precision=float seed=42 max_data_loader_n_workers=0
max_train_epochs={EPOCHS} save_every_n_steps={STATE_EVERY} sample_every_n_steps={SAMPLE_EVERY}
"""


def arguments(name: str, work: Path, images: Path, out: Path, *more: str, **changed: str | None) -> list[str]:
    """Return the arguments of a run of this family: ten steps with everything that the guards change.

    `changed` replaces or adds flags by name (None removes one); `more` is appended.
    """
    family = table()[name]
    flags: dict[str, str | None] = {
        **dict(word.split("=") for word in FLAGS.split()),
        "pretrained_model_name_or_path": f"{work}/model.safetensors",
        "tokenizer_cache_dir": f"{work}/tokenizers",
        "train_data_dir": str(images),
        "output_dir": str(out),
        "network_module": family["network"],
        "sample_prompts": f"{work}/prompts.txt",
        **own_flags(name, work),
        **changed,
    }
    switches = (*family.get("switches", ON_DISK.split()), "sdpa", "save_state", "console_log_simple")
    return tiny_flux.command_line({**flags, **dict.fromkeys(switches, True)}, *more)


def main(checkout: str, work: str, name: str) -> None:
    """Write the weights, tokenizers, images and prompts of a family."""
    import torch

    sys.path.insert(0, checkout)
    torch.manual_seed(1)
    folder, tokenizers = Path(work), Path(work, "tokenizers")  # those of FLUX.1, and a second CLIP's
    tiny_flux.write_tokenizers(tokenizers)
    copy = tokenizers / "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k"
    shutil.copytree(tokenizers / "openai_clip-vit-large-patch14", copy)
    write_bytes(tokenizers / "Qwen_Qwen2.5-VL-7B-Instruct")
    globals()[f"make_{name}"](folder)
    tiny_flux.write_images(folder / "images" / "1_thing", IMAGES)
    (folder / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(*sys.argv[1:])
