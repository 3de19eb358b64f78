"""What can be changed in a run that keeps failing: each a pure `spec → (spec, sentence)`; the monitor's table names them.

The gentle ones keep what is learned: the same data, effective batch and steps, only less that can get stuck. Where a saved
state of before cannot be resumed after a change, `same_state` says so.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import presets
from runs.files import RunError

if TYPE_CHECKING:
    from runs.spec import RunSpec

STAGING = "/var/tmp/hangproof"
SAMPLING = ("sample_every_n_epochs", "sample_at_first")
VALIDATION = ("validation_split", "validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps")
CACHES = ("cache_latents_to_disk", "cache_text_encoder_outputs_to_disk")
SMALLER = {"20G": "16G", "16G": "12G"}
Changed = tuple["RunSpec", str]


def _same(spec: "RunSpec") -> Changed:
    return spec, ""


def _without(spec: "RunSpec", *flags: str) -> dict:
    return {flag: value for flag, value in spec.extra.items() if flag not in flags}


def workers_0(spec: "RunSpec") -> Changed:
    """Load data in the training process; persistent workers and prefetch go with the workers."""
    if spec.workers == 0:
        return _same(spec)
    return spec.changed(
        workers=0
    ), f"images are loaded by the trainer itself, no longer by {spec.workers} worker processes"


def batch_1(spec: "RunSpec") -> Changed:
    """One image at a time; gradients are added up, so that the effective batch stays."""
    if spec.batch_size == 1:
        return _same(spec)
    steps = spec.gradient_accumulation * spec.batch_size
    changed = spec.changed(batch_size=1, gradient_accumulation=steps)
    return (
        changed,
        f"one image at a time instead of {spec.batch_size}; {steps} are added up to a step, so the result is the same",
    )


def lean(spec: "RunSpec") -> Changed:
    """Give GPU memory back between caching and training."""
    if spec.extra.get("highvram") is False:
        return _same(spec)
    return spec.changed(
        extra={**spec.extra, "highvram": False}
    ), "GPU memory is given back after caching (no --highvram)"


def tier_down(spec: "RunSpec") -> Changed:
    """The next smaller tier. Its optimizer, and for 12G the trained blocks, differ: see same_state."""
    if spec.tier not in SMALLER:
        return _same(spec)
    tier = SMALLER[spec.tier]
    return spec.changed(tier=tier), f"tier {tier} instead of {spec.tier}: {presets.tiers()[tier]['note']}"


def no_block_swap(spec: "RunSpec") -> Changed:
    """Never swap blocks; where only the single blocks train, split mode takes its place."""
    if not spec.extra.get("blocks_to_swap"):
        return _same(spec)
    return spec.changed(
        extra=_without(spec, "blocks_to_swap")
    ), f"no block swap; the set of tier {spec.tier} fits without"


def one_gpu(spec: "RunSpec") -> Changed:
    """One GPU instead of many; gradients are added up, so that the effective batch stays."""
    if spec.gpus == 1:
        return _same(spec)
    steps = spec.gradient_accumulation * spec.gpus
    changed = spec.changed(gpus=1, gradient_accumulation=steps, extra=_without(spec, "ddp_timeout"))
    return changed, f"one GPU instead of {spec.gpus}: no other to wait for; a step adds up {steps} batches instead"


def sampling_off(spec: "RunSpec") -> Changed:
    """No sample images."""
    if not spec.sample_every_n_steps and not any(spec.extra.get(flag) for flag in SAMPLING):
        return _same(spec)
    return spec.changed(sample_every_n_steps=0, extra=_without(spec, *SAMPLING)), "no sample images any more"


def validation_off(spec: "RunSpec") -> Changed:
    """No validation."""
    if not any(spec.extra.get(flag) for flag in VALIDATION):
        return _same(spec)
    return spec.changed(extra=_without(spec, *VALIDATION)), "no validation any more"


def trackers_offline(spec: "RunSpec") -> Changed:
    """wandb writes to disk only; where it already does, or for others, no tracker at all."""
    if not spec.trackers:
        return _same(spec)
    if spec.trackers == "tensorboard" or spec.environment.get("WANDB_MODE") == "offline":
        return spec.changed(trackers=""), f"{spec.trackers} is no longer written to; the loss is in metrics.jsonl"
    environment = {**spec.environment, "WANDB_MODE": "offline"}
    return spec.changed(environment=environment), "wandb is kept offline; upload it later with `wandb sync`"


def hub_offline(spec: "RunSpec") -> Changed:
    """Use what has been downloaded, ask the hub for nothing."""
    if spec.environment.get("HF_HUB_OFFLINE") == "1":
        return _same(spec)
    environment = {**spec.environment, "HF_HUB_OFFLINE": "1"}
    return spec.changed(environment=environment), "the model hub is not asked any more; downloaded files are used"


def cache_aside(spec: "RunSpec") -> Changed:
    """Encode into memory, reading no cache file. The embedded trainer sets a bad file aside by itself."""
    if spec.backend != "sd-scripts" or all(spec.extra.get(flag) is False for flag in CACHES):
        return _same(spec)
    extra = {**spec.extra, **dict.fromkeys(CACHES, False)}
    return spec.changed(extra=extra), "cache files are not read any more; images and captions are encoded at each start"


def save_local(spec: "RunSpec") -> Changed:
    """Write states to a local disk first; they are copied into the run's folder when the script ends."""
    if spec.save_dir:
        return _same(spec)
    place = f"{STAGING}/{spec.slug}"
    return spec.changed(save_dir=place), f"states are written to {place}, and copied into the run's folder at the end"


def lower_lr(spec: "RunSpec") -> Changed:
    """Half the learning rate."""
    rate = spec.learning_rate / 2
    return spec.changed(learning_rate=rate), f"learning rate {rate:g} instead of {spec.learning_rate:g}"


def fp32_guard(spec: "RunSpec") -> Changed:
    """Compute where fp16 overflows in a wider format: bf16 for the model, float32 for the image encoder."""
    wanted = "bf16" if spec.mixed_precision == "fp16" else spec.mixed_precision
    if spec.extra.get("no_half_vae") and wanted == spec.mixed_precision:
        return _same(spec)
    changed = spec.changed(mixed_precision=wanted, extra={**spec.extra, "no_half_vae": True})
    return changed, f"images are encoded in float32, and the model computes in {wanted}"


MITIGATIONS: dict[str, Callable[["RunSpec"], Changed]] = {
    f.__name__: f
    for f in (
        workers_0, batch_1, lean, tier_down, no_block_swap, one_gpu, sampling_off, validation_off, trackers_offline,
        hub_offline, cache_aside, save_local, lower_lr, fp32_guard,
    )
}  # fmt: skip


def apply(spec: "RunSpec", name: str) -> Changed:
    """One mitigation by name: the changed spec and a sentence for the user; the same spec and "" where nothing changes.

    Raises:
        RunError: there is none of that name.
    """
    if name not in MITIGATIONS:
        raise RunError(f"no mitigation {name!r}; there are: {', '.join(MITIGATIONS)}")
    return MITIGATIONS[name](spec)


def same_state(before: "RunSpec", after: "RunSpec") -> bool:
    """Whether a state that `before` saved can be resumed by `after`: same base model, optimizer, and trained modules."""

    def shape(spec: "RunSpec") -> tuple:
        flags = {**presets.tiers()[spec.tier]["flags"], **spec.extra}
        return (
            spec.model, spec.backend, spec.rank, str(flags.get("optimizer_type")).lower(), flags.get("network_args"),
            flags.get("network_module"), str(flags.get("lr_scheduler", "constant")),
        )  # fmt: skip

    return shape(before) == shape(after)
