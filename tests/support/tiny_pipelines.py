"""A tiny random model of each family of the built-in trainer, in diffusers' layout: the real classes, in a second.

FLUX.1's is trainer/tiny_flux.py, which also has the tokenizers.
"""

import json
from pathlib import Path

import pytest

from trainer import imports, tiny_flux

torch = pytest.importorskip("torch")
imports.heavy()
diffusers, transformers = pytest.importorskip("diffusers"), pytest.importorskip("transformers")
QWEN_TOKENS = 600
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHIFT = {"num_train_timesteps": 1000, "shift": 3.0}


def write_qwen_tokenizer(folder: Path) -> None:
    """Every byte is a token, and the marks of a chat are one each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(tiny_flux.byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark) for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    named = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    made = transformers.Qwen2TokenizerFast(tokenizer_object=tokenizer, **named, model_max_length=2048)
    made.chat_template = CHAT
    made.save_pretrained(folder)


def autoencoder(channels: int, **changed):
    return diffusers.AutoencoderKL(**{**tiny_flux.VAE, "latent_channels": channels, **changed})


def clip(projected: bool):
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return kind(transformers.CLIPTextConfig(**tiny_flux.CLIP | {"num_hidden_layers": 3}))


def t5():
    return transformers.T5EncoderModel(transformers.T5Config(**tiny_flux.T5))


def qwen3(layers: int = 3):
    config = transformers.Qwen3Config(
        vocab_size=QWEN_TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config) if layers > 3 else transformers.Qwen3Model(config)


def qwen_vl():
    text = {
        "vocab_size": QWEN_TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "max_position_embeddings": 2048,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
        "fullatt_block_indexes": [0], "window_size": 112,
    }  # fmt: skip
    marks = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 500)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def flow_scheduler(**changed):
    return diffusers.FlowMatchEulerDiscreteScheduler(**{**SHIFT, **changed})


def chroma():
    return {
        "transformer": diffusers.ChromaTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=64, axes_dims_rope=(8, 12, 12), approximator_num_channels=16, approximator_hidden_dim=32,
            approximator_layers=1,
        ),
        "vae": autoencoder(16), "text_encoder": t5(), "tokenizer": tiny_flux.write_t5_tokenizer, "scheduler": flow_scheduler(),
    }  # fmt: skip


def z_image():
    return {
        "transformer": diffusers.ZImageTransformer2DModel(
            in_channels=16, dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32, axes_dims=[8, 12, 12],
            axes_lens=[512, 64, 64],
        ),
        "vae": autoencoder(16), "text_encoder": qwen3(), "tokenizer": write_qwen_tokenizer, "scheduler": flow_scheduler(),
    }  # fmt: skip


def qwen_image():
    return {
        "transformer": diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=(8, 12, 12),
        ),
        "vae": diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), "text_encoder": qwen_vl(),
        "tokenizer": write_qwen_tokenizer, "scheduler": flow_scheduler(use_dynamic_shifting=True),
    }  # fmt: skip


def sd3():
    return {
        "transformer": diffusers.SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64, pos_embed_max_size=32, qk_norm="rms_norm",
        ),
        "vae": autoencoder(16), "text_encoder": clip(True), "text_encoder_2": clip(True), "text_encoder_3": t5(),
        "tokenizer": tiny_flux.write_clip_tokenizer, "tokenizer_2": tiny_flux.write_clip_tokenizer,
        "tokenizer_3": tiny_flux.write_t5_tokenizer, "scheduler": flow_scheduler(),
    }  # fmt: skip


def flux2_klein():
    return {
        "transformer": diffusers.Flux2Transformer2DModel(
            patch_size=1, in_channels=128, num_layers=1, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=96, axes_dims_rope=(8, 8, 8, 8), guidance_embeds=False,
        ),
        "vae": diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=32, norm_num_groups=4, sample_size=64,
        ),
        "text_encoder": qwen3(28), "tokenizer": write_qwen_tokenizer, "scheduler": flow_scheduler(use_dynamic_shifting=True),
    }  # fmt: skip


def sdxl():
    return {
        "unet": diffusers.UNet2DConditionModel(
            sample_size=32, block_out_channels=(16, 32), layers_per_block=1, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=6 * 8 + 32, cross_attention_dim=64, norm_num_groups=4,
        ),
        "vae": autoencoder(4, scaling_factor=0.13025, shift_factor=None, use_quant_conv=True, use_post_quant_conv=True),
        "text_encoder": clip(False), "text_encoder_2": clip(True), "tokenizer": tiny_flux.write_clip_tokenizer,
        "tokenizer_2": tiny_flux.write_clip_tokenizer,
        "scheduler": diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
    }  # fmt: skip


MAKERS = {
    "ChromaPipeline": chroma,
    "ZImagePipeline": z_image,
    "QwenImagePipeline": qwen_image,
    "StableDiffusion3Pipeline": sd3,
    "Flux2KleinPipeline": flux2_klein,
    "StableDiffusionXLPipeline": sdxl,
}


def make(pipeline: str, folder: Path) -> Path:
    """Write the tiny model of a pipeline to `folder`."""
    index: dict = {"_class_name": pipeline}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part, made in MAKERS[pipeline]().items():
            if callable(made) and not hasattr(made, "save_pretrained"):
                made(folder / part)
                named = json.loads((folder / part / "tokenizer_config.json").read_text())["tokenizer_class"]
                index[part] = ["transformers", {"TokenizersBackend": "T5TokenizerFast"}.get(named, named)]
            else:
                for parameter in made.eval().parameters() if hasattr(made, "eval") else ():
                    if not parameter.any():  # some layers of new models are zero: their output depends on nothing
                        torch.nn.init.normal_(parameter, std=0.02)
                made.save_pretrained(folder / part)
                index[part] = [type(made).__module__.split(".")[0], type(made).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
