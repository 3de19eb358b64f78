"""The command line of the trainer. Flags and defaults are those of sd-scripts, so one renderer serves both backends.

The page reads the flags from this parser (runs/flags.py), so importing it loads no torch. A flag of sd-scripts that
this trainer does not support is refused with the reason (`unsupported.toml`), an unknown flag with similar ones: a flag
that is silently ignored would train something else.
"""

import argparse
import difflib
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import tomllib

from trainer.errors import TrainError
from trainer.families import MODULES
from trainer.optimizers import KINDS, SCHEDULE_FREE, value_of

CHOICES_SCHEDULER = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
WEIGHTINGS = ("sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform")
STORED = ("float8", "float8_scaled", "int8", "nf4")  # quantized.KINDS, which needs torch
NETWORK_ARGS = {"train_blocks": ("all", "single", "double"), "split_qkv": ("True", "False")}


# smallest allowed value: flags
MINIMUM = {
    0: "blocks_to_stream keep_tokens lr_warmup_steps max_data_loader_n_workers max_grad_norm network_alpha "
    "save_last_n_steps save_last_n_steps_state sample_every_n_steps sample_every_n_epochs",
    1: "network_dim train_batch_size gradient_accumulation_steps max_train_steps max_train_epochs save_every_n_epochs "
    "save_every_n_steps save_last_n_epochs save_last_n_epochs_state t5xxl_max_token_length ddp_timeout "
    "lr_scheduler_num_cycles validate_every_n_steps validate_every_n_epochs max_validation_steps",
}
POSITIVE = "min_snr_gamma learning_rate unet_lr sigmoid_scale discrete_flow_shift logit_std huber_c huber_scale"

SHARES = "network_dropout validation_split caption_dropout_rate ema_decay"


class Refused(Exception):
    """The arguments are wrong; the message says which and what to do."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors, because a usage of 200 flags would hide the reason."""

    def error(self, message: str) -> NoReturn:
        """Raises: Refused, instead of printing the usage and exiting."""
        raise Refused(message)


def int_or_ratio(text: str) -> int | float:
    """`100` is a number of steps; `0.05` and `5%` are a share of all steps."""
    if text.endswith("%"):
        return float(text[:-1]) / 100.0
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return int(value) if value >= 1 or value == 0 else value


def parser() -> Parser:
    """The parser of all flags."""
    p = Parser(
        prog="python -m trainer",
        usage="%(prog)s --pretrained_model_name_or_path MODEL --dataset_config FILE --output_dir FOLDER [FLAGS]",
        description="Trains a LoRA of an image model in diffusers' layout. The flags are those of kohya's sd-scripts.",
        allow_abbrev=False,
    )

    def add(name: str, kind: Callable = str, default: object = None, help: str | None = None, **more) -> None:
        """A flag with a value; kind bool: a switch."""
        if kind is bool:
            p.add_argument(f"--{name}", action="store_true", help=help)
        else:
            p.add_argument(f"--{name}", type=kind, default=default, help=help, **more)

    # model
    add("pretrained_model_name_or_path", help="folder in diffusers' layout, or a hub id", required=True)
    add("t5xxl_max_token_length", int, help="default: what the family uses")
    add("apply_t5_attn_mask", bool, help="mask the padding of the T5 tokens")
    add("quantize", help="how the frozen weights of the blocks are kept", choices=STORED)
    add("fp8_base", bool, help="same as --quantize float8")
    add("fp8_base_unet", bool, help="same as --quantize float8; text encoders are never float8")
    add("text_encoder_cpu", bool, help="encode texts on the processor, where the GPU is too small for it")
    add("no_half_vae", bool, help="encode and decode images in float32")
    add("sdpa", bool, help="scaled-dot-product attention; always used")
    add("highvram", bool, help="keep the GPU memory that caching used; otherwise it is freed before training")
    # data
    add("dataset_config", help="dataset.toml, in sd-scripts' format", required=True)
    add("resolution", help="SIZE or WIDTH,HEIGHT in pixels; used if dataset.toml has no resolution")
    add("enable_bucket", bool, help="use aspect-ratio buckets; used if dataset.toml does not set it")
    add("min_bucket_reso", int, 256)
    add("max_bucket_reso", int, 1024)
    add("bucket_reso_steps", int, 64)
    add("bucket_no_upscale", bool)
    add("train_batch_size", int, 1, "used if dataset.toml has no batch_size")
    add("caption_extension", default=".caption")
    add("caption_prefix")
    add("caption_suffix")
    add("shuffle_caption", bool, help="draw the order of a caption's tags, one of a few for each use")
    add("keep_tokens", int, 0, "tags at the beginning that stay there")
    add("caption_separator", default=",", help="between two tags")
    add("caption_dropout_rate", float, 0.0, "share of the uses of an image without its caption")
    for part in ("latents", "text_encoder_outputs"):
        for flag in (f"cache_{part}", f"cache_{part}_to_disk"):
            add(flag, bool, help=f"{part.replace('_', ' ')} are always cached on disk")
    add("max_data_loader_n_workers", int, 8)
    add("persistent_data_loader_workers", bool)
    # network
    add("network_module", help="default: the model's", choices=sorted({*MODULES.values()}))
    add("network_dim", int, 4, "rank of the LoRA")
    add("network_alpha", float, 1.0, "the LoRA is scaled by alpha / rank; 0: alpha = rank")
    add("network_dropout", float)
    add("network_args", help="train_blocks=all|single|double", nargs="*")
    add("network_weights", help="a LoRA file to begin with, of the same model and rank")
    add("network_train_unet_only", bool, help="required, because only the transformer is trained")
    add("split_mode", bool, help="keep half of the transformer on the GPU at a time; trains the single blocks only")
    add("blocks_to_stream", int, 0, "keep this many blocks in main memory, copied to the GPU for each use")
    # optimizer
    add("optimizer_type", default="AdamW", help=", ".join(KINDS))
    add("optimizer_args", help="KEY=VALUE …", nargs="*")
    add("learning_rate", float, 2.0e-6)
    add("unet_lr", float, help="overrides --learning_rate")
    add("lr_scheduler", default="constant")
    add("lr_warmup_steps", int_or_ratio, 0)
    add("lr_scheduler_num_cycles", int, 1)
    add("lr_scheduler_power", float, 1.0)
    add("max_grad_norm", float, 1.0, "0 disables clipping")
    add("ema_decay", float, help="save a moving average of the weights, for example 0.99")
    # training
    add("max_train_steps", int, 1600)
    add("max_train_epochs", int, help="overrides --max_train_steps")
    add("gradient_accumulation_steps", int, 1)
    add("gradient_checkpointing", bool)
    add("mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    add("seed", int, help="default: 0")
    add("ddp_timeout", int, help="minutes that one process waits for another; default: 60")
    add("timestep_sampling", default="sigma", choices=["sigma", "uniform", "sigmoid", "shift", "flux_shift"])
    add("sigmoid_scale", float, 1.0)
    add("discrete_flow_shift", float, 3.0)
    predictions = ["raw", "additive", "sigma_scaled"]
    add("model_prediction_type", help="default: sigma_scaled with FLUX.1 and Chroma, else raw", choices=predictions)
    add("weighting_scheme", default="uniform", choices=WEIGHTINGS, help="sigma_sqrt, cosmap: with sigma_scaled only")
    add("logit_mean", float, 0.0)
    add("logit_std", float, 1.0)
    add("mode_scale", float, 1.29)
    add("guidance_scale", float, 3.5)
    add("min_snr_gamma", float, help="SDXL: limits the weight of steps with little noise, usually 5")
    add("v_parameterization", bool, help="SDXL: the model predicts velocity instead of noise")
    add("zero_terminal_snr", bool, help="SDXL: the last timestep is noise only")
    add("loss_type", default="l2", choices=["l1", "l2", "huber", "smooth_l1"])
    add("huber_schedule", default="snr", choices=["constant", "exponential", "snr"])
    add("huber_c", float, 0.1)
    add("huber_scale", float, 1.0)
    # saving
    add("output_dir", required=True)
    add("output_name", default="last")
    add("save_precision", choices=["float", "fp16", "bf16"])
    add("save_model_as", default="safetensors", choices=["safetensors"])
    for every in ("every_n_epochs", "every_n_steps"):
        add(f"save_{every}", int)
    for last in ("epochs", "epochs_state", "steps", "steps_state"):
        add(f"save_last_n_{last}", int)
    add("save_state", bool)
    add("save_state_on_train_end", bool)
    add("resume", help="state folder to resume from")
    add("no_metadata", bool)
    add("training_comment")
    for what in ("title", "author", "description", "license", "tags", "usage_hint", "trigger_phrase"):
        add(f"metadata_{what}")
    # samples
    add("sample_prompts", help="a .txt file with one prompt per line; options: --w --h --s --d --g --l --n")
    add("sample_every_n_steps", int)
    add("sample_every_n_epochs", int, help="overrides --sample_every_n_steps")
    add("sample_at_first", bool)
    # validation
    add("validation_split", float, 0.0, "share of the images to hold out and measure the loss on")
    add("validation_seed", int, help="which images are held out, and their noise; default: --seed")
    add("validate_every_n_steps", int, help="default: at the end of each epoch")
    add("validate_every_n_epochs", int)
    add("max_validation_steps", int, help="held-out images that are used at most")
    # logging
    add("console_log_simple", bool, help="log lines are always plain")
    add("logging_dir")
    add("log_with", choices=["tensorboard", "wandb", "all"])
    add("log_tracker_name")
    add("wandb_run_name")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of a run. Exits with code 2 and one line when flags are unknown, unsupported or inconsistent."""
    try:
        return _parsed(argv)
    except Refused as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)


def problem(argv: list[str]) -> str:
    """The line with which `parse` would exit; "" when it accepts the arguments. The page asks before the start."""
    try:
        _parsed(argv)
    except Refused as refused:
        return str(refused)
    return ""


def _parsed(argv: list[str]) -> argparse.Namespace:
    p = parser()
    refuse_unknown(p, argv)
    args = p.parse_args(argv)
    if wrong := inconsistency(args):
        p.error(wrong)
    return args


@functools.cache
def reasons() -> dict[str, str]:
    """The reason against each flag of sd-scripts that this trainer does not support, by `--flag`."""
    table = tomllib.loads(Path(__file__).with_name("unsupported.toml").read_text(encoding="utf-8"))
    return {f"--{flag}": reason for reason, flags in table.items() for flag in flags.split()}


def refuse_unknown(p: Parser, argv: list[str]) -> None:
    """Raises Refused at the first unknown or unsupported flag, before argparse reports missing flags."""
    known, why = set(p._option_string_actions), reasons()
    for word in argv:
        flag = word.split("=", 1)[0]
        if not flag.startswith("--") or flag in known or " " in flag:
            continue
        if flag in why:
            p.error(f"{flag} is not supported by the built-in trainer: {why[flag]}")
        near = difflib.get_close_matches(flag, sorted(known | set(why)), n=3)
        p.error(f"unknown flag {flag}; " + (f"did you mean {', '.join(near)}?" if near else "remove it"))


def inconsistency(args: argparse.Namespace) -> str | None:
    """The first inconsistency between the arguments, as one line; sets the arguments that others determine."""
    if not args.output_name or Path(args.output_name).name != args.output_name:
        return f"--output_name {args.output_name!r}: must be the name of a file; --output_dir has its folder"
    args.optimizer_type = args.optimizer_type.lower() or "adamw"
    if args.optimizer_type not in KINDS:
        return f"--optimizer_type {args.optimizer_type}: not supported; use {' or '.join(KINDS)}"
    if args.lr_scheduler not in CHOICES_SCHEDULER:
        return f"--lr_scheduler {args.lr_scheduler}: not supported; use {' or '.join(CHOICES_SCHEDULER)}"
    if args.lr_scheduler == "constant" and args.lr_warmup_steps:
        return "--lr_warmup_steps: the scheduler 'constant' has no warm-up; use --lr_scheduler constant_with_warmup"
    if args.optimizer_type == SCHEDULE_FREE and args.lr_scheduler != "constant":
        return "--optimizer_type adamwschedulefree replaces the schedule; use --lr_scheduler constant"
    if not args.network_train_unet_only:
        return "this trainer does not train text encoders; add --network_train_unet_only"
    try:
        args.network_options = key_values(args.network_args, "--network_args")
        args.optimizer_options = key_values(args.optimizer_args, "--optimizer_args")
    except ValueError as problem:
        return str(problem)
    for key, value in args.optimizer_options.items():
        known = KINDS[args.optimizer_type].options
        if key not in known:
            return f"--optimizer_args {key}: not an option of {args.optimizer_type}; use {', '.join(known)}"
        try:
            value_of(key, value)
        except TrainError as wrong:
            return str(wrong)
    for key, value in args.network_options.items():
        if key not in NETWORK_ARGS:
            return f"--network_args {key}: not supported; use {' or '.join(NETWORK_ARGS)}"
        if value not in NETWORK_ARGS[key]:
            return f"--network_args {key}={value}: must be one of {', '.join(NETWORK_ARGS[key])}"
    args.train_blocks = args.network_options.get("train_blocks", "all")
    if args.split_mode and args.train_blocks != "single":
        return "--split_mode trains the single blocks only; add --network_args train_blocks=single"
    if args.blocks_to_stream and (args.split_mode or not args.gradient_checkpointing):
        return "--blocks_to_stream needs --gradient_checkpointing, and is instead of --split_mode; correct the flags"
    if args.zero_terminal_snr and not args.v_parameterization:  # with --min_snr_gamma, its weight would be 0 / 0
        return "--zero_terminal_snr: noise cannot be predicted where nothing else is left; add --v_parameterization"
    for least, flags in MINIMUM.items():
        for flag in flags.split():
            number = getattr(args, flag)
            if number is not None and not number >= least:  # `not … >=`, so that nan is refused too
                return f"--{flag} {number}: must be {least} or more"
    for flag in POSITIVE.split():
        if getattr(args, flag) is not None and not 0 < getattr(args, flag) < math.inf:
            return f"--{flag} {getattr(args, flag)}: must be more than 0"
    for flag in SHARES.split():
        if getattr(args, flag) is not None and not 0 <= getattr(args, flag) < 1:
            return f"--{flag} {getattr(args, flag)}: must be 0 or more and less than 1, such as 0.1"
    if (args.sample_every_n_steps or args.sample_every_n_epochs or args.sample_at_first) and not args.sample_prompts:
        return "sample images are turned on without prompts; add --sample_prompts FILE"
    args.stored = args.quantize or ("float8" if args.fp8_base or args.fp8_base_unet else "")
    args.network_alpha = args.network_alpha or float(args.network_dim)
    args.seed = 0 if args.seed is None else args.seed
    return None


def key_values(words: list[str] | None, flag: str) -> dict[str, str]:
    """`["a=1", "b=x"]` as a dict of strings. Raises ValueError for a word that is not KEY=VALUE."""
    out = {}
    for word in words or []:
        key, eq, value = word.partition("=")
        if not eq or not key:
            raise ValueError(f"{flag} {word!r}: not KEY=VALUE; write for example weight_decay=0.01")
        out[key] = value
    return out
