"""Changes to a run that keeps failing. The monitor's table of causes (causes.toml) names them.

Each mitigation is a pure function `spec → (fields that change, sentence)`, or a row of mitigations.toml. An extra flag
overrides the flag of a typed field, so a mitigation also changes every extra flag that would undo it. Few ask whether
they are needed: `apply` compares what the trainer would read before and after, and one that changes nothing there gives
the same spec and no sentence, so that the monitor takes the next one. Most mitigations keep what is learned (same data,
effective batch, steps). `same_state` says whether the saved states can still be resumed.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import presets
from runs import custom_script, staging
from runs.command import number, tier_flags
from runs.files import RunError, private_folder
from runs.job import Job, Patch, difference, resolve, respecifying
from runs.paths import outputs_dir
from runs.scripts import script

if TYPE_CHECKING:
    from runs.spec import RunSpec, Value

ENCODER_BATCHES = ("vae_batch_size", "text_encoder_batch_size")
HUB = ("huggingface_repo_id", "save_state_to_huggingface", "resume_from_huggingface", "async_upload")
RATES = ("unet_lr", "text_encoder_lr")  # sd-scripts and the built-in trainer prefer these to learning_rate
# In network_args of sd-scripts: learning rates by layer; they do not decide what is trained
REGEX_RATES = "network_reg_lrs="
NO_HALF_VAE = ("sd-scripts", "diffusers")  # the trainers that have --no_half_vae
SEVERAL_GPUS = ("ddp_timeout", "ddp_gradient_as_bucket_view", "ddp_static_graph")
SWAPPING = ("blocks_to_swap", "cpu_offload_checkpointing")  # neither works together with split mode
OFFLINE = ("1", "true", "yes", "on")
Change = tuple[dict[str, Any], str]
"""Other values of fields, and a sentence for the user."""
NOTHING: Change = ({}, "")


def _without(spec: "RunSpec", *names: str) -> dict[str, "Value"]:
    return {flag: value for flag, value in spec.extra.items() if flag not in names}


def workers_0(spec: "RunSpec") -> Change:
    """Load data in the training process; persistent workers and prefetching are turned off with the workers."""
    sentence = f"the training process loads the images itself instead of {spec.workers} worker processes"
    return {"workers": 0, "extra": _without(spec, "persistent_data_loader_workers")}, sentence


def batch_1(spec: "RunSpec") -> Change:
    """Process one image at a time, also while encoding; gradients are accumulated, so the effective batch stays."""
    extra = {**spec.extra, **{flag: 1 for flag in ENCODER_BATCHES if number(spec.extra.get(flag, 1)) > 1}}
    if spec.batch_size == 1:
        return {"extra": extra}, "images and captions are encoded one at a time"
    steps = spec.gradient_accumulation * spec.batch_size
    sentence = f"batch size 1 instead of {spec.batch_size}; gradients of {steps} batches make up one step as before"
    return {"batch_size": 1, "gradient_accumulation": steps, "extra": extra}, sentence


def tier_down(spec: "RunSpec") -> Change:
    """The next smaller tier. Its optimizer, and for 12G the trained blocks, differ: see same_state."""
    tiers = presets.tiers_of(spec.model, spec.backend)
    now = tiers[spec.tier]
    below = [name for name, tier in tiers.items() if tier["vram_gb"] < now["vram_gb"] and not tier["problem"]]
    below = [name for name in below if tiers[name]["flags"] != now["flags"]]  # larger GPUs can have the same flags
    if not below:
        return NOTHING
    tier = max(below, key=lambda name: tiers[name]["vram_gb"])
    smaller = tiers[tier]
    # Extra flags override a tier's. Those of the optimizer and of the trained blocks decide its memory.
    split = ("split_mode", *SWAPPING) if smaller["flags"].get("split_mode") else ()
    extra = _without(spec, "optimizer_type", "optimizer_args", *split)
    if split:
        extra |= _network_args(extra, smaller["flags"]["network_args"])
    removed = "".join(f", without --{flag}" for flag in spec.extra if flag not in extra)
    return {"tier": tier, "extra": extra}, f"tier {tier} instead of {spec.tier}{removed}: {smaller['note']}"


def less_vram(spec: "RunSpec") -> Change:
    """Less GPU memory, with states that can be resumed: the next tier, else its fp8 settings, else batch size 1."""
    lower, sentence = tier_down(spec)
    if lower:
        smaller = spec.changed(**lower)
        if same_state(*(resolve(one, Path("run")) for one in (spec, smaller))):
            return lower, sentence
        now = {**tier_flags(spec), **spec.extra}
        fp8 = {f: value for f, value in tier_flags(smaller).items() if f.startswith("fp8") and not now.get(f)}
        if fp8:
            sentence = f"the base model is kept in fp8 as in tier {smaller.tier}; the optimizer stays"
            return {"extra": {**spec.extra, **fp8}}, sentence
    return batch_1(spec) if spec.batch_size > 1 else NOTHING


def _network_args(extra: dict[str, "Value"], wanted: list[str]) -> dict[str, "Value"]:
    """The extra flag network_args with a tier's arguments; {} where the tier's own flag stays in force."""
    given = extra.get("network_args")
    if not isinstance(given, list):
        return {}
    replaced = (*(word.partition("=")[0] + "=" for word in wanted), "in_dims=")
    return {"network_args": [*(word for word in given if not word.startswith(replaced)), *wanted]}


def no_block_swap(spec: "RunSpec") -> Change:
    """Never swap blocks between GPU and host memory."""
    if not number(spec.extra.get("blocks_to_swap", 0)):
        return NOTHING  # a flag of 0 swaps none
    return {"extra": _without(spec, "blocks_to_swap")}, "no blocks are swapped (without --blocks_to_swap)"


def one_gpu(spec: "RunSpec") -> Change:
    """One GPU of each machine instead of several; gradients are accumulated, so the effective batch stays."""
    if spec.gpus == 1:
        return NOTHING  # the seeds below would be a change
    steps = spec.gradient_accumulation * spec.gpus
    # kohya's trainers then keep the noise and the order of several processes (sd_scripts_patches/batch_seeds.py)
    seeds = {} if spec.backend == "diffusers" else {"HANGPROOF_BATCH_SEEDS": "1"}
    fields = {
        "gpus": 1,
        "gradient_accumulation": steps,
        "environment": {**spec.environment, **seeds},
        "extra": spec.extra if spec.nodes > 1 else _without(spec, *SEVERAL_GPUS),
    }
    each = " in each machine" if spec.nodes > 1 else ""
    return fields, f"one GPU instead of {spec.gpus}{each}; gradients of {steps} batches make up one step as before"


def trackers_offline(spec: "RunSpec") -> Change:
    """Keep wandb offline; where it is offline already, or could be set online by a file, use no tracker."""
    if spec.trackers in ("", "trackio"):  # trackio runs outside the training process
        return NOTHING
    certain = spec.environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if spec.trackers == "tensorboard" or certain or spec.extra.get("log_tracker_config"):
        return {"trackers": ""}, f"trackers ({spec.trackers}) are turned off; metrics.jsonl keeps the loss"
    environment = {**spec.environment, "WANDB_MODE": "offline"}
    return {"environment": environment}, "wandb writes to disk only; upload the run later with `wandb sync`"


def hub_offline(spec: "RunSpec") -> Change:
    """Use downloaded files only and contact no model hub."""
    given = spec.environment.get("HF_HUB_OFFLINE", "")
    environment = {**spec.environment, "HF_HUB_OFFLINE": given if given.lower() in OFFLINE else "1"}
    uploads = ", and nothing is uploaded" if spec.extra.get("huggingface_repo_id") else ""
    sentence = f"the model hub is not contacted; files that are already downloaded are used{uploads}"
    return {"environment": environment, "extra": _without(spec, *HUB)}, sentence


def save_local(spec: "RunSpec") -> Change:
    """Write states to a local disk first; the script copies them into the run's folder when it ends."""
    if spec.save_dir:
        return NOTHING
    try:
        private_folder(staging.base())
        place = str(staging.place(outputs_dir() / spec.slug))
    except OSError:
        return NOTHING  # somebody else has made the folder, or the run has none that can be written
    return {"save_dir": place}, f"checkpoints are written to {place} and copied to the run's folder at the end"


def lower_lr(spec: "RunSpec") -> Change:
    """Halve every learning rate, those of extra flags included: they override the field."""
    if _relative_steps(spec):
        return NOTHING
    halved = {flag: _halved(spec.extra[flag]) for flag in RATES if spec.extra.get(flag)}
    rates: list[tuple[str, Value, Value]] = [("learning rate", spec.learning_rate, spec.learning_rate / 2)]
    rates += [(flag, spec.extra[flag], half) for flag, half in halved.items()]
    sentence = ", ".join(f"{name} {_shown(half)} instead of {_shown(was)}" for name, was, half in rates)
    return {"learning_rate": spec.learning_rate / 2, "extra": {**spec.extra, **halved}}, sentence


def _relative_steps(spec: "RunSpec") -> bool:
    """Whether the optimizer finds its own learning rate: Adafactor, unless relative_step=False."""
    in_force = {**tier_flags(spec), **spec.extra}
    if str(in_force.get("optimizer_type")).lower() != "adafactor":
        return False
    words = in_force.get("optimizer_args")
    options = dict(word.partition("=")[::2] for word in words) if isinstance(words, list) else {}
    return options.get("relative_step", "True") != "False" or options.get("warmup_init", "False") != "False"


def _halved(value: "Value") -> "Value":
    """Half a rate, or half of each of several; what is not a number stays."""
    if isinstance(value, list):
        return [str(_halved(word)) for word in value]
    return number(value) / 2 or value


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else f"{number(value):g}"


def fp32_guard(spec: "RunSpec") -> Change:
    """Compute in a format with a wider range where fp16 overflows: the model in bf16, the image encoder in float32."""
    if spec.mixed_precision == "no" or presets.trainer_of(spec.model, spec.backend)["precisions"]:
        return NOTHING  # everything is float32 already, or the model's weights decide
    extra = _without(spec, "full_fp16")  # sd-scripts refuses --full_fp16 with bf16
    half_vae = spec.backend in NO_HALF_VAE and not spec.extra.get("no_half_vae")
    extra |= {"no_half_vae": True} if half_vae else {}
    parts = ["images are encoded in float32"] * half_vae
    parts += ["the model computes in bf16 instead of fp16"] * (spec.mixed_precision == "fp16")
    return {"mixed_precision": "bf16", "extra": extra}, "; ".join(parts)


def _of_table(row: dict[str, Any], spec: "RunSpec") -> Change:
    """A mitigation of mitigations.toml."""
    if spec.backend != row.get("backend", spec.backend):
        return NOTHING
    extra = _without(spec, *row.get("without", ())) | row.get("flags", {})
    return {**row.get("fields", {}), "extra": extra}, row["sentence"]


MITIGATIONS: dict[str, Callable[["RunSpec"], Change]] = {
    f.__name__: f
    for f in (
        workers_0, batch_1, tier_down, less_vram, no_block_swap, one_gpu, trackers_offline, hub_offline, save_local,
        lower_lr, fp32_guard,
    )
}  # fmt: skip
_TABLE = presets.tables.read_toml(Path(__file__).with_name("mitigations.toml"))
MITIGATIONS |= {name: functools.partial(_of_table, row) for name, row in _TABLE.items()}


def apply(spec: "RunSpec", name: str, platform: str = sys.platform) -> tuple["RunSpec", str]:
    """The spec after a mitigation, and a sentence for the user; the same spec and "" where the trainer reads the same.

    Raises:
        RunError: no mitigation has this name.
    """
    if name not in MITIGATIONS:
        raise RunError(f"no mitigation {name!r}; there are: {', '.join(MITIGATIONS)}")
    fields, sentence = MITIGATIONS[name](spec)
    changed = spec.changed(**fields)
    before, after = (resolve(one, Path("run"), platform) for one in (spec, changed))
    if not difference(before, after) or unapplied(spec, changed, platform):
        return spec, ""
    return changed, sentence


def change(job: Job, name: str) -> tuple[Patch, str]:
    """A mitigation as a patch of a run's job, and its sentence; ({}, "") where the trainer would read the same.

    Raises:
        RunError: no mitigation has this name, or this version does not know the run's model or tier any more.
    """
    changed, sentence = apply(job.run_spec(), name, job.platform)
    patch = respecifying(job, changed, job.platform)
    return (patch, sentence) if patch and difference(job, job.patched(patch)) else ({}, "")


def refusal(spec: "RunSpec", name: str, platform: str = sys.platform) -> str:
    """Why a mitigation would change the run, but cannot change the script that the user edited; "" where it can."""
    return unapplied(spec, spec.changed(**MITIGATIONS[name](spec)[0]), platform)


def unapplied(spec: "RunSpec", changed: "RunSpec", platform: str = sys.platform) -> str:
    """Why the script that the user edited cannot take a change, as a sentence; "" where it can, or is not edited."""
    if spec.edited is None or changed == spec:
        return ""
    left = []
    for one in (spec, changed):
        now = script(one.changed(edited=None), outputs_dir() / spec.slug, platform=platform)
        left.append(custom_script.merged(spec.edited.script, spec.edited.generated, now, platform)[1])
    own = ["it writes its checkpoints itself"] if changed.save_dir != spec.save_dir else []
    wrong = [one for one in left[1] if one not in left[0]] + own
    return f"The edited script cannot take this change: {'; '.join(wrong)}" if wrong else ""


def same_state(before: Job, after: Job) -> bool:
    """Whether `after` can resume a state that `before` saved: same base model, optimizer and trained modules."""
    return _shape(before) == _shape(after)


def _shape(job: Job) -> tuple[object, ...]:
    """What a saved state depends on."""
    flags = job.flags
    words = flags.get("network_args") or []
    return (
        job.spec["model"],
        job.spec["backend"],
        str(flags.get("network_dim")),
        str(flags.get("optimizer_type")).lower(),
        [word for word in (words if isinstance(words, list) else [str(words)]) if not word.startswith(REGEX_RATES)],
        flags.get("network_module"),
        str(flags.get("lr_scheduler", "constant")),
    )
