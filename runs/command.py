"""Renders a spec into the trainer's input: its arguments, `dataset.toml` and `sample_prompts.txt`.

Pure functions of the spec and the run's folder: the same spec gives the same bytes, and tests need no GPU. One renderer
serves both backends, because the built-in trainer has the flag names of sd-scripts.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs import dataset
from runs.dataset import one_line
from runs.files import Fault, RunError
from runs.paths import backend_venv, datasets_dir, models_dir, sd_scripts_dir, venv_program

if TYPE_CHECKING:
    from runs.spec import RunSpec

SAVE_PRECISION = {"bf16": "bf16", "fp16": "fp16", "no": "float"}
Flag = bool | int | float | str | list[str]


def model_files(spec: "RunSpec") -> dict[str, str]:
    """What the backend loads, by flag: paths, or for diffusers a hub id. Flags in `extra` override the model's."""
    model = presets.models()[spec.model]
    if spec.backend == "diffusers":
        source = str(models_dir() / spec.model) if model["generated"] else model["repo"]
        files = {"pretrained_model_name_or_path": source}
    else:
        needs = presets.families()[model["family"]]["needs"]
        files = {flag: str(models_dir() / name) for flag, name in model["files"].items() if flag in needs}
    return {flag: str(spec.extra.get(flag, path)) for flag, path in files.items()}


def save_interval(spec: "RunSpec") -> int:
    """Optimizer steps between saved states; 0 when states are saved by epochs only."""
    every = spec.save_every_n_steps
    return presets.defaults()["save"]["at_most_every_n_steps"] if every is None else every


def sample_interval(spec: "RunSpec") -> int:
    """Optimizer steps between sample images; 0 when they are turned off."""
    every = spec.sample_every_n_steps
    return presets.defaults()["save"]["at_most_every_n_steps"] if every is None else every


def loader(spec: "RunSpec", platform: str) -> dict:
    """The data loader's settings on a platform, as returned by presets.platform_rules."""
    persistent = bool(presets.defaults()["flags"]["persistent_data_loader_workers"])
    persistent = bool(spec.extra.get("persistent_data_loader_workers", persistent))
    return presets.platform_rules(platform, presets.loader_settings(spec.workers, persistent))


def flags(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> dict[str, Flag]:
    """All flags of the trainer by name, in the order of the script. A flag that is False is not written."""
    defaults, model = presets.defaults(), presets.models()[spec.model]
    family, every = presets.families()[model["family"]], save_interval(spec)
    rules = loader(spec, platform)
    out: dict[str, Flag] = dict(model_files(spec))
    out |= {
        "dataset_config": str(folder / "dataset.toml"),
        "output_dir": spec.save_dir or str(folder),
        "output_name": spec.slug,
        "network_module": family["network_module"],
        "network_dim": spec.rank,
        "network_alpha": spec.alpha,
    }
    out |= presets.tiers()[spec.tier]["flags"]
    out |= {"learning_rate": spec.learning_rate}
    out |= {"max_train_steps": spec.max_train_steps} if spec.max_train_steps else {"max_train_epochs": spec.epochs}
    if spec.gradient_accumulation > 1:
        out["gradient_accumulation_steps"] = spec.gradient_accumulation
    out |= defaults["all"]
    out |= {"mixed_precision": spec.mixed_precision, "seed": spec.seed, "max_data_loader_n_workers": rules["workers"]}
    out |= defaults["flags"]
    out |= {"save_precision": SAVE_PRECISION[spec.mixed_precision]}
    out |= defaults["backends"][spec.backend]["flags"]
    if spec.mixed_precision == "no":
        out["fp8_base"] = False  # sd-scripts refuses fp8 weights with float32 computation
    if every:
        out |= {"save_every_n_steps": every}
        # sd-scripts keeps the state of the current step and those of the N steps before it
        out |= dict.fromkeys(("save_last_n_steps", "save_last_n_steps_state"), every * (spec.keep_states - 1))
    if spec.save_every_n_epochs:
        out |= {"save_every_n_epochs": spec.save_every_n_epochs, "save_last_n_epochs_state": spec.keep_states}
    if samples(spec):
        out["sample_prompts"] = str(folder / "sample_prompts.txt")
        out["sample_every_n_steps"] = sample_interval(spec) or False
    if spec.trackers:
        out |= {"log_with": spec.trackers, "logging_dir": str(folder / "logs")}
    if spec.gpus > 1:
        out["ddp_timeout"] = defaults["multi_gpu"]["ddp_timeout"]
    if resume:
        out["resume"] = str(resume)
    out |= spec.extra
    out["persistent_data_loader_workers"] = rules["persistent_workers"]
    return out


def samples(spec: "RunSpec") -> list[str]:
    """The prompts of sample images (by default the trigger word); none when sample images are turned off.

    Raises:
        RunError: they are turned on explicitly, but there is nothing to draw.
    """
    turned_on = spec.sample_every_n_steps or any(
        spec.extra.get(f) for f in ("sample_every_n_epochs", "sample_at_first")
    )
    prompts = list(spec.prompts) or ([spec.trigger] if spec.trigger.strip() else [])
    if turned_on and not prompts:
        message = "Samples are turned on, but there is no prompt and no trigger word; add a prompt, or turn samples off with 0"
        raise RunError([Fault("prompts", message)])
    return prompts if turned_on or spec.sample_every_n_steps is None else []


def words(flags: Mapping[str, Flag]) -> list[list[str]]:
    """Flags as words of a command line, one list per flag.

    A value that starts with a dash is joined to its flag by `=`, because argparse would read it as another flag.
    """
    lines = []
    for flag, value in flags.items():
        if value is False:
            continue
        if value is True:
            lines.append([f"--{flag}"])
        elif isinstance(value, list):
            lines.append([f"--{flag}", *map(str, value)])
        elif str(value).startswith("-"):
            lines.append([f"--{flag}={value}"])
        else:
            lines.append([f"--{flag}", str(value)])
    return lines


def arguments(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> list[str]:
    """The trainer's arguments, in order.

    Args:
        folder: the run's folder. resume: the state folder to resume from. platform: a value of sys.platform.
    """
    return [word for line in words(flags(spec, folder, resume, platform)) for word in line]


def launch(spec: "RunSpec") -> list[list[str]]:
    """The launcher's arguments before those of the trainer: `launch`, its options, and the module to run.

    They set every option that accelerate would otherwise read from its configuration file, so that none is needed.
    """
    lines = [
        ["launch"],
        ["--mixed_precision", spec.mixed_precision],
        ["--num_processes", str(spec.gpus)],
        ["--num_machines", "1"],
        ["--dynamo_backend", "no"],
        # The GPU does the work. On a CPU, threads that wait for each other slow training down when the machine is busy.
        ["--num_cpu_threads_per_process", "1"],
    ]
    if spec.gpus > 1:
        lines += [
            ["--multi_gpu"],
            ["--main_process_port", "0"],
        ]  # 0 selects a free port, so that two runs do not collide
    if spec.backend == "diffusers":
        return [*lines, ["-m", "trainer"]]
    script = presets.families()[presets.models()[spec.model]["family"]]["script"]
    return [*lines, ["-m", "sd_scripts_patches", str(sd_scripts_dir() / script)]]


def environment(spec: "RunSpec", platform: str = sys.platform) -> dict[str, str]:
    """Variables that the script sets: UTF-8 and unbuffered output, the platform's thread limits, the spec's variables."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **loader(spec, platform)["env"],
        **dict(sorted(spec.environment.items())),
    }


def launcher(spec: "RunSpec", platform: str = sys.platform) -> Path:
    """The launcher in the backend's virtual environment (may not exist)."""
    return venv_program(backend_venv(spec.backend), "accelerate", platform)


def dataset_toml(spec: "RunSpec") -> str:
    """The text of `dataset.toml`, with one subset for each folder of the data set that has images (runs/dataset.py).

    Buckets keep the aspect ratio of an image; their area is resolution × resolution.
    """
    import tomlkit

    # sd-scripts requires multiples of 64 (train_network.assert_extra_args); small images need finer steps
    step = 64 if spec.backend == "sd-scripts" or spec.resolution >= 256 else 32
    bucketed = {
        "enable_bucket": spec.resolution >= step,
        "min_bucket_reso": max(step, spec.resolution // 2 // step * step),
        "max_bucket_reso": -(-spec.resolution * 2 // step) * step,
        "bucket_reso_steps": step,
    }
    table = {
        "general": {"shuffle_caption": False, "caption_extension": ".txt", "keep_tokens": spec.keep_tokens},
        "datasets": [
            {
                "resolution": spec.resolution,
                "batch_size": spec.batch_size,
                **bucketed,
                "subsets": [_subset(spec, folder) for folder in dataset.counts(datasets_dir() / spec.slug) or [""]],
            }
        ],
    }
    return tomlkit.dumps(table)


def _subset(spec: "RunSpec", folder: str) -> dict[str, str | int]:
    """The subset of one folder of the data set, with the repeats and the subject that its name sets."""
    repeats, subject = dataset.repeats_of(folder) or (spec.repeats, "")
    subset: dict[str, str | int] = {"image_dir": (datasets_dir() / spec.slug / folder).as_posix()}
    subset["num_repeats"] = repeats
    if tokens := one_line(spec.trigger) or subject:
        subset["class_tokens"] = tokens
    return subset


def sample_prompts(spec: "RunSpec") -> str:
    """The text of `sample_prompts.txt`: one prompt per line with size, steps and seed, so that samples are comparable.

    Options in the prompt (`--w`, `--h`, `--s`, `--d`, as in sd-scripts) are kept. A prompt that starts with # is
    indented, because the line would be a comment.
    """
    lines = []
    for prompt in spec.prompts or ([spec.trigger] if spec.trigger.strip() else []):
        text = one_line(prompt)
        for option, value in (
            ("w", spec.resolution),
            ("h", spec.resolution),
            ("s", spec.sample_steps),
            ("d", spec.seed),
        ):
            if not re.search(rf" --{option} \d", text, re.IGNORECASE):
                text += f" --{option} {value}"
        lines.append(f" {text}" if text.startswith("#") else text)
    return "".join(f"{line}\n" for line in lines)
