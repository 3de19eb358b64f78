"""A tiny random FLUX in diffusers' folder layout, tokenizers included.

It runs the real code paths (VAE, CLIP, T5, transformer, scheduler, tokenizers) in a second on a CPU without a download,
so that any machine can train, hang, recover and resume. The weights are the same on every machine with the same torch.
The folder is built beside its final place and renamed under a lock, so that two runs that start at once create it once.
"""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from trainer import imports

NAME = "tiny-flux"
LOCK_TIMEOUT_S = 300.0
CLIP_TOKENS = 1000
T5_MAX_TOKENS = 64
TRANSFORMER = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
    "axes_dims_rope": (8, 12, 12),
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 4,
    "sample_size": 512,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIP = {
    "vocab_size": CLIP_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 77,
    "projection_dim": 32,
    "bos_token_id": CLIP_TOKENS - 2,
    "eos_token_id": CLIP_TOKENS - 1,
    "pad_token_id": CLIP_TOKENS - 1,
}
T5 = {
    "vocab_size": 256,
    "d_model": 64,
    "d_ff": 64,
    "d_kv": 16,
    "num_heads": 4,
    "num_layers": 2,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "is_encoder_decoder": False,
    "use_cache": False,
}
SCHEDULER = {
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


def ensure(folder: Path) -> Path:
    """Creates the model in `folder` unless it exists. Safe when other processes do the same.

    Raises: filelock.Timeout when another process holds the lock for LOCK_TIMEOUT_S.
    """
    from filelock import FileLock

    if (folder / "model_index.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock", timeout=LOCK_TIMEOUT_S):
        if (folder / "model_index.json").is_file():
            return folder
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            make(building)
            with contextlib.suppress(PermissionError):  # on a share or stick that root has mounted, modes are fixed
                building.chmod(0o755)
            if folder.exists():  # incomplete, without a model_index.json
                shutil.rmtree(folder)
            os.rename(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def make(folder: Path) -> None:
    """Writes every part of the model to `folder`. The random state of the process does not change."""
    imports.heavy()
    import torch
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        for seed, (part, build) in enumerate(
            {
                "transformer": lambda: FluxTransformer2DModel(**TRANSFORMER),
                "vae": lambda: AutoencoderKL(**VAE),
                "text_encoder": lambda: CLIPTextModel(CLIPTextConfig(**CLIP)),
                "text_encoder_2": lambda: T5EncoderModel(T5Config(**T5)),
            }.items()
        ):
            torch.manual_seed(seed)
            build().eval().save_pretrained(folder / part)
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    write_clip_tokenizer(folder / "tokenizer")
    write_t5_tokenizer(folder / "tokenizer_2")
    index = {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def byte_letters() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level BPE (the table of GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [chr(256 + i) for i in range(256 - len(plain))]
    return [chr(b) for b in plain] + moved


def clip_vocabulary() -> dict[str, int]:
    """Every byte is a token, also at the end of a word; what is left of CLIP_TOKENS has no meaning."""
    letters = byte_letters()
    vocab: dict[str, int] = {}
    for token in letters + [letter + "</w>" for letter in letters]:
        vocab.setdefault(token, len(vocab))
    while len(vocab) < CLIP_TOKENS - 2:
        vocab[f"<x{len(vocab)}>"] = len(vocab)
    return {**vocab, "<|startoftext|>": CLIP_TOKENS - 2, "<|endoftext|>": CLIP_TOKENS - 1}


def write_clip_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token a character."""
    from transformers import CLIPTokenizer

    vocab = clip_vocabulary()
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77).save_pretrained(folder)
    # older versions of transformers read the two files of the slow tokenizer
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def write_t5_tokenizer(folder: Path) -> None:
    """A Unigram tokenizer of printable ASCII characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((chr(i), -3.0) for i in range(33, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, model_max_length=T5_MAX_TOKENS).save_pretrained(folder)
