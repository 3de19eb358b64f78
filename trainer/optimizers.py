"""Optimizers and learning-rate schedules with the names of sd-scripts.

The learning rate is a pure function of the step and is set before each step. A scheduler object would have a state that
must be saved and restored correctly (in sd-scripts, cosine rises again after a resume). The formulas are those of
`transformers.get_scheduler`, which sd-scripts uses.
"""

import ast
import importlib
import math
from dataclasses import dataclass

from trainer.errors import TrainError

# --optimizer_type, module, class, size of its state in sizes of the LoRA, what it takes as --optimizer_args
TABLE = """
adafactor transformers.optimization Adafactor 0.1 eps clip_threshold decay_rate beta1 weight_decay scale_parameter \
    relative_step warmup_init
adamw8bit bitsandbytes.optim AdamW8bit 0.5 betas eps weight_decay amsgrad optim_bits min_8bit_size is_paged
adamw torch.optim AdamW 2 betas eps weight_decay amsgrad maximize foreach capturable fused
lion8bit bitsandbytes.optim Lion8bit 0.25 betas weight_decay min_8bit_size is_paged
prodigy prodigyopt Prodigy 4 betas beta3 eps weight_decay decouple use_bias_correction safeguard_warmup d0 d_coef \
    growth_rate slice_p
adamwschedulefree schedulefree AdamWScheduleFree 2 betas eps weight_decay warmup_steps r weight_lr_power foreach
"""
SCHEDULE_FREE = "adamwschedulefree"  # it replaces the schedule of the learning rate


@dataclass(frozen=True)
class Kind:
    """An optimizer. state: its size in sizes of the LoRA's weights; options: what it takes as --optimizer_args."""

    module: str
    name: str
    state: float
    options: tuple[str, ...]


KINDS = {
    kind: Kind(module, name, float(state), tuple(options))
    for kind, module, name, state, *options in map(str.split, TABLE.strip().splitlines())
}


def build(kind: str, options: dict[str, str], learning_rate: float, parameters: list):
    """The optimizer `kind` (KINDS) with `--optimizer_args`.

    Raises: TrainError for an unknown option, or when the library does not work on this machine.
    """
    module = KINDS[kind].module
    settings = {"lr": learning_rate} | {key: value_of(key, text) for key, text in options.items()}
    if kind == "adafactor" and settings.setdefault("relative_step", True):
        settings["lr"] = None
    try:
        optimizer = getattr(importlib.import_module(module), KINDS[kind].name)(parameters, **settings)
    except (TypeError, ValueError) as problem:
        raise TrainError(
            f"--optimizer_type {kind} --optimizer_args {options}: {problem}; correct the options"
        ) from problem
    except (ImportError, OSError, RuntimeError) as problem:
        raise TrainError(
            f"--optimizer_type {kind}: {module} cannot be loaded ({problem}); install it for this machine, "
            "or use --optimizer_type adamw or adafactor"
        ) from problem
    if kind == SCHEDULE_FREE:
        optimizer.train()
    return optimizer


def averaged(optimizer, parameters: dict) -> dict:
    """The weights to use, by name: the average of a schedule-free optimizer; else `parameters`."""
    if "train_mode" not in optimizer.param_groups[0]:  # of schedule-free alone
        return parameters
    trained = {name: p.data.clone() for name, p in parameters.items()}
    optimizer.eval()
    found = {name: p.data.clone() for name, p in parameters.items()}
    optimizer.train()
    for name, p in parameters.items():
        p.data.copy_(trained[name])  # `eval` and `train` round
    return found


def value_of(key: str, text: str):
    """The value of one --optimizer_args, as a Python literal. Raises: TrainError."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as problem:
        raise TrainError(
            f"--optimizer_args {key}={text}: must be a number, a tuple, True, False or a quoted text"
        ) from problem


def factor(args, step: int, total: int) -> float:
    """The factor of the learning rate at `step` (0-based) of `total`."""
    warmup = args.lr_warmup_steps
    warmup = int(warmup * total) if isinstance(warmup, float) else warmup
    if step < warmup:
        return step / max(1, warmup)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    match args.lr_scheduler:
        case "linear":
            return 1 - done
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        case "cosine_with_restarts":
            return 0.5 * (1 + math.cos(math.pi * (args.lr_scheduler_num_cycles * done % 1.0))) if done < 1 else 0.0
        case "polynomial":
            end = 1e-7 / args.learning_rate  # transformers' lr_end
            return (1 - end) * (1 - done) ** args.lr_scheduler_power + end
    return 1.0
