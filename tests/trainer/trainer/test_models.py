"""A model in diffusers' layout: loaded as diffusers loads it, refused by name where it is damaged; its memory."""

import functools
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from flux_parts import CPU, a_batch, arguments, load, loss_of, no_tick
from safetensors.torch import load_file, save_file

import presets
from guards.heartbeat import Heartbeat
from presets import tables
from trainer import cache, imports, lora, models
from trainer.errors import TrainError
from trainer.families.flux import FAMILY

pytestmark = pytest.mark.usefixtures("one_thread")


def as_published(model, folder):
    """The tiny model with the files that black-forest-labs/FLUX.1-dev has: older names in CLIP, shards, no fast CLIP
    tokenizer, and single files beside the folders."""
    shutil.copytree(model, folder)
    for part, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder_2", "model")):
        original = folder / part / f"{stem}.safetensors"
        tensors = load_file(original)
        shards = {f"{stem}-0000{n + 1}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
        for file, members in shards.items():
            save_file({name: tensors[name] for name in members}, folder / part / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, members in shards.items() for name in members}}
        (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        original.unlink()
    clip = folder / "text_encoder" / "model.safetensors"
    named = {f"text_model.{name}": tensor for name, tensor in load_file(clip).items()}
    named["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(named, clip, metadata={"format": "pt"})
    (folder / "tokenizer" / "tokenizer.json").unlink()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>") | {"bos_token": "<|startoftext|>"}
    (folder / "tokenizer" / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    stated = {"add_prefix_space": False, "do_lower_case": True, "errors": "replace", "model_max_length": 77}
    settings = {**stated, **special, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "flux1-dev.safetensors").write_bytes(b"not looked at")
    return folder


def test_a_folder_as_it_is_published_encodes_and_trains_like_the_same_model_in_todays_files(model, tmp_path):
    answers = []
    for folder in (model, as_published(model, tmp_path / "flux-dev")):
        models.check(folder)
        todo = [("a thing, ünï 🎉", tmp_path / f"{folder.name}.npz")]
        cache.encode_texts(todo, folder, FAMILY, arguments(), torch.float32, CPU, Heartbeat(None))
        vae = models.load_part(folder, "vae", torch.float32, CPU)
        transformer = load(folder)
        with torch.no_grad():
            latent = vae.encode(torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)).latent_dist.mode()
            loss = loss_of(arguments(), transformer, a_batch(), 1)
        answers.append([*cache.load(todo[0][1]).values(), latent, loss])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.fixture
def folder(model, tmp_path):
    """A copy of the tiny model, to damage."""
    return Path(shutil.copytree(model, tmp_path / "a-flux"))


def load_part(folder, part):
    if part == "tokenizer":
        return models.load_tokenizer(folder, part)
    return models.load_part(folder, part, torch.float32, CPU)


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_a_part_that_lacks_a_tensor_is_refused_and_not_filled_with_noise(folder, part):
    file = next((folder / part).glob("*.safetensors"))
    tensors = load_file(file)
    gone = sorted(tensors)[-2]
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(TrainError, match=f"1 missing tensors: {re.escape(gone)}; download it again"):
        load_part(folder, part)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer/tokenizer.json", '{"added_tokens": []}'),
        ("tokenizer/tokenizer_config.json", "[" * 100_000),
        ("text_encoder/config.json", '{"model_type": "clip_text_model", "hidden_size": "x"}'),
        ("text_encoder/config.json", '{"model_type": "clip_text_model", "hidden_act": "x"}'),
        ("text_encoder/config.json", '{"quantization_config": {"quant_method": "gptq"}}'),
    ],
)
def test_a_configuration_that_the_library_cannot_read_names_its_part(folder, file, content):
    (folder / file).write_text(content)
    part = file.partition("/")[0]
    with pytest.raises(TrainError, match=rf"{part}: .*cannot be loaded: [^\0]*; download it again"):
        load_part(folder, part)


@pytest.mark.parametrize(
    ("part", "kind", "file"),
    [
        ("vae", ["diffusers", "DiffusionPipeline"], "model_index.json"),
        ("text_encoder", ["transformers", "AutoModel"], "config.json"),
        ("tokenizer", ["transformers", "AutoTokenizer"], "tokenizer_config.json"),
    ],
)
def test_code_in_a_models_folder_is_not_run_and_nobody_is_asked_to(folder, tmp_path, capsys, part, kind, file):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, part: kind}))
    own = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (folder / part / file).write_text(json.dumps({"_class_name": ["own", "Own"], "model_type": "own", "auto_map": own}))
    (folder / part / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(TrainError, match="trust_remote_code"):
        load_part(folder, part)
    assert not (tmp_path / "ran").exists() and "[y/N]" not in capsys.readouterr().out


WEIGHTS, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
# what is done to the folder of the transformer → the message
DAMAGED = {
    "vae/config.json is missing; download the complete folder": lambda at: shutil.rmtree(at.parent / "vae"),
    "is a git-lfs pointer": lambda at: (at / WEIGHTS).write_text(POINTER),
    "damaged or truncated": lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-1000]),
    "transformer/1.safetensors is missing": lambda at: (at / INDEX).write_text('{"weight_map": {"a": "1.safetensors"}}'),
    "tokenizer/tokenizer.json or vocab.json and merges.txt or spiece.model is missing": lambda at: [
        (at.parent / "tokenizer" / name).unlink() for name in ("tokenizer.json", "merges.txt")
    ],
    "index.json: cannot be read, or not valid JSON (Expecting": lambda at: (at / INDEX).write_text("{broken"),
    "transformer/config.json: not a JSON object; download it again": lambda at: (at / "config.json").write_text("[1]"),
    "missing tensors: single_transformer_blocks.4.": lambda at: (at / "config.json").write_text(
        (at / "config.json").read_text().replace('"num_single_layers": 4', '"num_single_layers": 5')
    ),
    "the folder does not exist; correct the path, or use a hub id": lambda at: shutil.rmtree(at.parent),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGED)
def test_a_model_that_cannot_be_used_says_what_and_where(folder, message):
    DAMAGED[message](folder / "transformer")
    with pytest.raises(TrainError) as error:
        load(models.locate(str(folder), no_tick))
    assert message in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{model}/transformer/" + WEIGHTS, "is a single file; this trainer reads a folder"),
        ("nobody/no-flux", "nobody/no-flux: HF_HUB_OFFLINE is set, .* unset it, or download it elsewhere"),
        ("{wan}", "model of WanPipeline; the built-in trainer has FluxPipeline, .*one of kohya's trainers"),
    ],
)
def test_what_is_no_folder_of_a_model_that_is_trained_is_refused(model, tmp_path, monkeypatch, given, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(TrainError, match=message):
        models.locate(given.format(model=model, wan=tmp_path), no_tick)


AHEAD = 2  # streamed blocks on the GPU at a time
# Bytes of a weight as it is stored, in NF4 with its share of a scale (trainer/quantized.py).
STORED = {"float8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}
# The configurations that the families' repositories have, as far as they are not the classes' defaults.
SDXL = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20), "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * 2),
    "up_block_types": (*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
SD35 = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm"}
SD35 |= {"in_channels": 16, "out_channels": 16}
LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192}
MEDIUM = {
    "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
MODELS = {
    "flux-dev": ("flux", "FluxTransformer2DModel", {"guidance_embeds": True}),
    "chroma": ("chroma", "ChromaTransformer2DModel", {}),
    "z-image": ("z_image", "ZImageTransformer2DModel", {}),
    "qwen-image": ("qwen_image", "QwenImageTransformer2DModel", {}),
    "sd35-large": ("sd3", "SD3Transformer2DModel", {**SD35, **LARGE}),
    "sd35-medium": ("sd3", "SD3Transformer2DModel", {**SD35, **MEDIUM}),
    "sdxl": ("sdxl", "UNet2DConditionModel", SDXL),
    "flux2-klein-4b": ("flux2_klein", "Flux2Transformer2DModel", {**KLEIN_4B, "guidance_embeds": False}),
    "flux2-klein-9b": ("flux2_klein", "Flux2Transformer2DModel", {**KLEIN_9B, "guidance_embeds": False}),
}


@functools.cache
def full_size(key: str) -> tuple[int, int, list[tuple[int, int]], int]:
    """Numbers in the layers that get a LoRA, in all others, and both for each block that can stream, in their order;
    the weights of a LoRA of rank 1."""
    imports.heavy()
    import diffusers  # after `heavy`

    name, class_name, config = MODELS[key]
    with torch.device("meta"):
        model = getattr(diffusers, class_name)(**config)
    family = importlib.import_module(f"trainer.families.{name}").FAMILY
    small = {f"{layer}.weight" for layer in lora.layers(model, family.blocks["all"])}

    def count(parameters) -> tuple[int, int]:
        found = [(name in small, one.numel()) for name, one in parameters]
        return sum(size for is_small, size in found if is_small), sum(size for is_small, size in found if not is_small)

    kinds = set(model._no_split_modules or ())
    blocks = [(at, one) for at, one in model.named_modules() if type(one).__name__ in kinds]
    sides = sum(sum(one.shape) for name, one in model.named_parameters() if name in small)
    return *count(model.named_parameters()), [count(one.named_parameters(prefix=at)) for at, one in blocks], sides


def weights_gb(key: str, flags: dict) -> float:
    """Frozen weights on the GPU: the stored ones in fewer bits, the others in 16, without those that stream."""
    small, others, blocks, _ = full_size(key)
    away = blocks[len(blocks) - flags.get("blocks_to_stream", 0) :][AHEAD:]
    small, others = small - sum(one for one, _ in away), others - sum(one for _, one in away)
    kind = flags.get("quantize") or ("float8" if flags.get("fp8_base") else "")
    return (small * STORED.get(kind, 2) + others * 2) / 1e9


@pytest.mark.parametrize("key", MODELS)
def test_the_tables_say_what_the_weights_of_the_model_take_in_each_tier(key):
    said, real = {}, {}
    for tier, row in tables.tiers_of(key, "diffusers").items():
        flags = tables.tier_flags(key, "diffusers", tier)
        if row["problem"] or flags.get("split_mode"):
            continue
        gb = re.search(r"([\d.]+) GB of weights", row["basis"])
        said[tier] = float(gb[1])
        real[tier] = weights_gb(key, flags)
    assert said == pytest.approx(real, abs=0.1)
    table = presets.families()[tables.models()[key]["family"]]
    assert table["lora_sides"] == pytest.approx(full_size(key)[3], rel=0.3)
