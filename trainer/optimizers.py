"""Optimizers and learning-rate schedules with the names of sd-scripts.

The learning rate is a pure function of the step and is set before each step. A scheduler object would have a state that
must be saved and restored correctly (in sd-scripts, cosine rises again after a resume). The formulas are those of
`transformers.get_scheduler`, which sd-scripts uses.
"""

import ast
import math

from trainer.errors import TrainError


def build(kind: str, options: dict[str, str], learning_rate: float, parameters: list):
    """The optimizer `kind` (adafactor, adamw8bit, adamw) with `--optimizer_args`.

    Raises: TrainError for an unknown option, or when the library does not work on this machine.
    """
    settings = {key: value_of(key, text) for key, text in options.items()}
    try:
        if kind == "adafactor":
            from transformers.optimization import Adafactor

            relative = settings.setdefault("relative_step", True)
            return Adafactor(parameters, lr=None if relative else learning_rate, **settings)
        if kind == "adamw8bit":
            return adamw_8bit()(parameters, lr=learning_rate, **settings)
        from torch.optim import AdamW

        return AdamW(parameters, lr=learning_rate, **settings)
    except (TypeError, ValueError) as problem:
        raise TrainError(
            f"--optimizer_type {kind} --optimizer_args {options}: {problem}; correct the options"
        ) from problem


def adamw_8bit():
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as problem:
        raise TrainError(
            f"--optimizer_type adamw8bit: bitsandbytes cannot be loaded ({problem}); install it for this machine, "
            "or use --optimizer_type adamw or adafactor"
        ) from problem
    return AdamW8bit


def value_of(key: str, text: str):
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


def set_learning_rate(optimizer, learning_rate: float) -> None:
    """Sets the rate of every group, except for Adafactor with relative steps (lr None), which finds its own."""
    for group in optimizer.param_groups:
        if group["lr"] is not None:
            group["lr"] = learning_rate
