"""The command line of the trainer: sd-scripts' flag names and defaults, and nothing else.

One renderer then serves both backends. This file is plain `add_argument` calls with literal values, because others
read it without importing it. A flag that sd-scripts knows and this trainer does not is refused with the reason
(`refused.py`); an unknown one is refused with its closest matches: an option that is dropped in silence is a different
training run.
"""

import argparse
import difflib
import math
import sys
from typing import NoReturn

from trainer.refused import reasons

CHOICES_OPTIMIZER = ("adafactor", "adamw8bit", "adamw")
CHOICES_SCHEDULER = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
NETWORK_ARGS = {"train_blocks": ("all", "single", "double"), "split_qkv": ("True", "False")}


# the smallest value that makes sense, the flags that it holds for
LEAST = {
    0: "lr_warmup_steps max_data_loader_n_workers max_grad_norm network_alpha save_last_n_steps save_last_n_steps_state "
    "sample_every_n_steps sample_every_n_epochs",
    1: "network_dim train_batch_size gradient_accumulation_steps max_train_steps max_train_epochs save_every_n_epochs "
    "save_every_n_steps save_last_n_epochs save_last_n_epochs_state t5xxl_max_token_length ddp_timeout "
    "lr_scheduler_num_cycles",
}
POSITIVE = ("learning_rate", "unet_lr", "sigmoid_scale", "discrete_flow_shift", "logit_std", "huber_c", "huber_scale")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line; 200 flags of usage would hide the reason."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def int_or_ratio(text: str) -> int | float:
    """`100` is a number of steps; `0.05` or `5%` is a share of all steps."""
    if text.endswith("%"):
        return float(text[:-1]) / 100.0
    value = float(text)
    return int(value) if value >= 1 or value == 0 else value


def parser() -> Parser:
    p = Parser(prog="python -m trainer", description="Train a FLUX.1 LoRA.", allow_abbrev=False)
    add = p.add_argument
    # model
    add("--pretrained_model_name_or_path", type=str, required=True, help="folder in diffusers' layout, or a hub id")
    add("--t5xxl_max_token_length", type=int, default=None, help="default: 512 for dev, 256 for schnell")
    add("--apply_t5_attn_mask", action="store_true", help="mask the padding of the T5 tokens")
    add("--fp8_base", action="store_true", help="keep the weights of the blocks as float8_e4m3fn")
    add("--fp8_base_unet", action="store_true", help="the same as --fp8_base: text encoders are never float8 here")
    add("--no_half_vae", action="store_true", help="encode and decode images in float32")
    add("--sdpa", action="store_true", help="scaled-dot-product attention: always used")
    add("--highvram", action="store_true", help="keep the GPU allocator's cache between caching and training")
    # data
    add("--dataset_config", type=str, required=True, help="dataset.toml, in sd-scripts' format")
    add("--resolution", type=str, default=None, help="'size' or 'width,height', where dataset.toml has none")
    add("--enable_bucket", action="store_true", help="aspect-ratio buckets, where dataset.toml does not say")
    add("--min_bucket_reso", type=int, default=256)
    add("--max_bucket_reso", type=int, default=1024)
    add("--bucket_reso_steps", type=int, default=64)
    add("--bucket_no_upscale", action="store_true")
    add("--train_batch_size", type=int, default=1, help="where dataset.toml has no batch_size")
    add("--caption_extension", type=str, default=".caption")
    add("--caption_prefix", type=str, default=None)
    add("--caption_suffix", type=str, default=None)
    add("--keep_tokens", type=int, default=0, help="has an effect only when captions are shuffled, which they are not")
    add("--cache_latents", action="store_true", help="latents are always cached, on disk")
    add("--cache_latents_to_disk", action="store_true", help="latents are always cached, on disk")
    add("--cache_text_encoder_outputs", action="store_true", help="text outputs are always cached, on disk")
    add("--cache_text_encoder_outputs_to_disk", action="store_true", help="text outputs are always cached, on disk")
    add("--max_data_loader_n_workers", type=int, default=8)
    add("--persistent_data_loader_workers", action="store_true")
    # network
    add("--network_module", type=str, default="networks.lora_flux", choices=["networks.lora_flux"])
    add("--network_dim", type=int, default=4, help="rank of the LoRA")
    add("--network_alpha", type=float, default=1.0, help="the LoRA is scaled by alpha/rank; 0 means alpha = rank")
    add("--network_dropout", type=float, default=None)
    add("--network_args", type=str, nargs="*", default=None, help="train_blocks=all|single|double")
    add("--network_train_unet_only", action="store_true", help="required: only the transformer is trained")
    add("--split_mode", action="store_true", help="one half of the transformer on the device at a time")
    # optimizer
    add("--optimizer_type", type=str, default="AdamW", help="adafactor, adamw8bit or adamw")
    add("--optimizer_args", type=str, nargs="*", default=None, help="key=value …")
    add("--learning_rate", type=float, default=2.0e-6)
    add("--unet_lr", type=float, default=None, help="wins over --learning_rate")
    add("--lr_scheduler", type=str, default="constant")
    add("--lr_warmup_steps", type=int_or_ratio, default=0)
    add("--lr_scheduler_num_cycles", type=int, default=1)
    add("--lr_scheduler_power", type=float, default=1.0)
    add("--max_grad_norm", type=float, default=1.0, help="0: no clipping")
    # training
    add("--max_train_steps", type=int, default=1600)
    add("--max_train_epochs", type=int, default=None, help="wins over --max_train_steps")
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--gradient_checkpointing", action="store_true")
    add("--mixed_precision", type=str, default="no", choices=["no", "fp16", "bf16"])
    add("--seed", type=int, default=None, help="default: 0")
    add("--ddp_timeout", type=int, default=None, help="minutes that one process waits for another (default 30)")
    add("--timestep_sampling", default="sigma", choices=["sigma", "uniform", "sigmoid", "shift", "flux_shift"])
    add("--sigmoid_scale", type=float, default=1.0)
    add("--discrete_flow_shift", type=float, default=3.0)
    add("--model_prediction_type", default="sigma_scaled", choices=["raw", "additive", "sigma_scaled"])
    add(
        "--weighting_scheme",
        type=str,
        default="uniform",
        choices=["sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform"],
    )
    add("--logit_mean", type=float, default=0.0)
    add("--logit_std", type=float, default=1.0)
    add("--mode_scale", type=float, default=1.29)
    add("--guidance_scale", type=float, default=3.5)
    add("--loss_type", type=str, default="l2", choices=["l1", "l2", "huber", "smooth_l1"])
    add("--huber_schedule", type=str, default="snr", choices=["constant", "exponential", "snr"])
    add("--huber_c", type=float, default=0.1)
    add("--huber_scale", type=float, default=1.0)
    # saving
    add("--output_dir", type=str, required=True)
    add("--output_name", type=str, default="last")
    add("--save_precision", type=str, default=None, choices=["float", "fp16", "bf16"])
    add("--save_model_as", type=str, default="safetensors", choices=["safetensors"])
    add("--save_every_n_epochs", type=int, default=None)
    add("--save_every_n_steps", type=int, default=None)
    add("--save_last_n_epochs", type=int, default=None)
    add("--save_last_n_epochs_state", type=int, default=None)
    add("--save_last_n_steps", type=int, default=None)
    add("--save_last_n_steps_state", type=int, default=None)
    add("--save_state", action="store_true")
    add("--save_state_on_train_end", action="store_true")
    add("--resume", type=str, default=None, help="a state folder to go on from")
    add("--no_metadata", action="store_true")
    add("--training_comment", type=str, default=None)
    add("--metadata_title", type=str, default=None)
    add("--metadata_author", type=str, default=None)
    add("--metadata_description", type=str, default=None)
    add("--metadata_license", type=str, default=None)
    add("--metadata_tags", type=str, default=None)
    add("--metadata_usage_hint", type=str, default=None)
    add("--metadata_trigger_phrase", type=str, default=None)
    # samples
    add(
        "--sample_prompts",
        type=str,
        default=None,
        help="a .txt file: a prompt a line, with --w --h --s --d --g --l --n",
    )
    add("--sample_every_n_steps", type=int, default=None)
    add("--sample_every_n_epochs", type=int, default=None, help="wins over --sample_every_n_steps")
    add("--sample_at_first", action="store_true")
    # logging
    add("--console_log_simple", action="store_true", help="logs are always plain lines")
    add("--logging_dir", type=str, default=None)
    add("--log_with", type=str, default=None, choices=["tensorboard", "wandb", "all"])
    add("--log_tracker_name", type=str, default=None)
    add("--wandb_run_name", type=str, default=None)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of a run. Leaves with exit code 2 and one line when a flag is unknown, refused or inconsistent."""
    p = parser()
    refuse_unknown(p, argv)
    args = p.parse_args(argv)
    problem = inconsistency(args)
    if problem:
        p.error(problem)
    return args


def refuse_unknown(p: Parser, argv: list[str]) -> None:
    """Ends with the reason at the first flag that is not ours: the flags that argparse calls missing come second."""
    known, why = set(p._option_string_actions), reasons()
    for word in argv:
        flag = word.split("=", 1)[0]
        if not flag.startswith("--") or flag in known or " " in flag:
            continue
        if flag in why:
            p.error(f"{flag} is a flag of sd-scripts that this trainer refuses: {why[flag]}")
        near = difflib.get_close_matches(flag, sorted(known | set(why)), n=3)
        p.error(f"unknown flag {flag}" + (f"; did you mean {', '.join(near)}?" if near else ""))


def inconsistency(args: argparse.Namespace) -> str | None:
    """What is wrong between the arguments, as one line; fills in what follows from them."""
    args.optimizer_type = args.optimizer_type.lower() or "adamw"
    if args.optimizer_type not in CHOICES_OPTIMIZER:
        return f"--optimizer_type {args.optimizer_type}: this trainer has {', '.join(CHOICES_OPTIMIZER)}"
    if args.lr_scheduler not in CHOICES_SCHEDULER:
        return f"--lr_scheduler {args.lr_scheduler}: this trainer has {', '.join(CHOICES_SCHEDULER)}"
    if args.lr_scheduler == "constant" and args.lr_warmup_steps:
        return "--lr_warmup_steps: the scheduler 'constant' has no warm-up; use --lr_scheduler constant_with_warmup"
    if not args.network_train_unet_only:
        return "only the transformer is trained here: add --network_train_unet_only"
    try:
        args.network_options = key_values(args.network_args, "--network_args")
        args.optimizer_options = key_values(args.optimizer_args, "--optimizer_args")
    except ValueError as problem:
        return str(problem)
    for key, value in args.network_options.items():
        if key not in NETWORK_ARGS:
            return f"--network_args {key}: this trainer has {', '.join(NETWORK_ARGS)}"
        if value not in NETWORK_ARGS[key]:
            return f"--network_args {key}={value}: one of {', '.join(NETWORK_ARGS[key])}"
    args.train_blocks = args.network_options.get("train_blocks", "all")
    if args.split_mode and args.train_blocks != "single":
        return "--split_mode trains the single blocks only: add --network_args train_blocks=single"
    if args.loss_type in ("huber", "smooth_l1") and args.huber_schedule == "snr":
        return (
            f"--loss_type {args.loss_type}: --huber_schedule snr does not apply to FLUX.1; use constant or exponential"
        )
    for least, flags in LEAST.items():
        for flag in flags.split():
            if getattr(args, flag) is not None and not getattr(args, flag) >= least:  # not: nan is refused too
                return f"--{flag} {getattr(args, flag)}: at least {least}"
    for flag in POSITIVE:
        if getattr(args, flag) is not None and not 0 < getattr(args, flag) < math.inf:
            return f"--{flag} {getattr(args, flag)}: must be above 0"
    if args.network_dropout is not None and not 0 <= args.network_dropout < 1:
        return f"--network_dropout {args.network_dropout}: from 0 to below 1"
    if (args.sample_every_n_steps or args.sample_every_n_epochs or args.sample_at_first) and not args.sample_prompts:
        return "samples are asked for, but there is no --sample_prompts FILE"
    args.fp8_base = args.fp8_base or args.fp8_base_unet
    args.network_alpha = args.network_alpha or float(args.network_dim)
    args.seed = 0 if args.seed is None else args.seed
    return None


def key_values(words: list[str] | None, flag: str) -> dict[str, str]:
    """`["a=1", "b=x"]` as a dict of strings; ValueError names the word that is not key=value."""
    out = {}
    for word in words or []:
        key, eq, value = word.partition("=")
        if not eq or not key:
            raise ValueError(f"{flag} {word!r}: expected key=value")
        out[key] = value
    return out
