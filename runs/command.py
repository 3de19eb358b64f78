"""From a spec to what a trainer reads: its arguments, `dataset.toml`, `sample_prompts.txt`.

Pure functions of the spec and the run's folder, so that the same spec gives the same bytes and a test needs no GPU.
One renderer serves both backends, because the embedded trainer takes sd-scripts' flag names.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs.files import RunError
from runs.paths import backend_venv, datasets_dir, models_dir, sd_scripts_dir, venv_program

if TYPE_CHECKING:
    from runs.spec import RunSpec

SAVE_PRECISION = {"bf16": "bf16", "fp16": "fp16", "no": "float"}
Flag = bool | int | float | str | list[str]


def model_files(spec: "RunSpec") -> dict[str, str]:
    """What the backend loads, by flag: paths, or for diffusers a hub id. What `extra` names wins over the model's own."""
    model = presets.models()[spec.model]
    if spec.backend == "diffusers":
        place = str(models_dir() / spec.model) if model["generated"] else model["repo"]
        files = {"pretrained_model_name_or_path": place}
    else:
        needs = presets.families()[model["family"]]["needs"]
        files = {flag: str(models_dir() / name) for flag, name in model["files"].items() if flag in needs}
    return {flag: str(spec.extra.get(flag, path)) for flag, path in files.items()}


def save_interval(spec: "RunSpec") -> int:
    """Optimizer steps between saved states; 0 when only epochs are saved."""
    every = spec.save_every_n_steps
    return presets.defaults()["save"]["at_most_every_n_steps"] if every is None else every


def loader(spec: "RunSpec", platform: str) -> dict:
    """The data loader's settings on a platform, as presets.platform_rules gives them."""
    persistent = bool(presets.defaults()["flags"]["persistent_data_loader_workers"])
    asked = bool(spec.extra.get("persistent_data_loader_workers", persistent))
    return presets.platform_rules(platform, presets.loader_settings(spec.workers, asked))


def flags(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> dict[str, Flag]:
    """All flags of the trainer by name, in the order they are written; False means left out."""
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
        out["fp8_base"] = False  # sd-scripts refuses fp8 weights that are computed with in float32
    if every:
        out |= {"save_every_n_steps": every}
        # "until N steps elapsed": the state of the step itself and those of N steps before it stay
        out |= dict.fromkeys(("save_last_n_steps", "save_last_n_steps_state"), every * (spec.keep_states - 1))
    if spec.save_every_n_epochs:
        out |= {"save_every_n_epochs": spec.save_every_n_epochs, "save_last_n_epochs_state": spec.keep_states}
    if samples(spec):
        out["sample_prompts"] = str(folder / "sample_prompts.txt")
        out["sample_every_n_steps"] = spec.sample_every_n_steps or False
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
    """The prompts that samples are made of; none when no samples are asked for. Without prompts: the trigger word."""
    asked = spec.sample_every_n_steps or any(spec.extra.get(f) for f in ("sample_every_n_epochs", "sample_at_first"))
    prompts = list(spec.prompts) or ([spec.trigger] if spec.trigger.strip() else [])
    if asked and not prompts:
        raise RunError("samples are asked for, but there is no prompt and no trigger word; add --prompt TEXT")
    return prompts if asked else []


def words(flags: Mapping[str, Flag]) -> list[list[str]]:
    """Flags as the words of a command line, one list a flag.

    A value that starts with a dash is joined to its flag by `=`: argparse would take it for a flag of its own.
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
        folder: the run's folder. resume: a state folder to go on from. platform: as sys.platform writes it.
    """
    return [word for line in words(flags(spec, folder, resume, platform)) for word in line]


def launch(spec: "RunSpec") -> list[list[str]]:
    """What stands before the trainer's arguments, after the launcher's own name: `launch`, its options, the module.

    Every answer that accelerate would otherwise take from its configuration file is given, so none is needed.
    """
    lines = [
        ["launch"],
        ["--mixed_precision", spec.mixed_precision],
        ["--num_processes", str(spec.gpus)],
        ["--num_machines", "1"],
        ["--dynamo_backend", "no"],
        # The GPU does the work; where the CPU does, threads that wait for one another stand still on a busy machine.
        ["--num_cpu_threads_per_process", "1"],
    ]
    if spec.gpus > 1:
        lines += [["--multi_gpu"], ["--main_process_port", "0"]]  # 0: a free port, so that two runs do not collide
    if spec.backend == "diffusers":
        return [*lines, ["-m", "trainer"]]
    script = presets.families()[presets.models()[spec.model]["family"]]["script"]
    return [*lines, ["-m", "sd_scripts_patches", str(sd_scripts_dir() / script)]]


def environment(spec: "RunSpec", platform: str = sys.platform) -> dict[str, str]:
    """Variables that the script sets: UTF-8 and unbuffered output, the platform's thread limits, the spec's own."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **loader(spec, platform)["env"],
        **dict(sorted(spec.environment.items())),
    }


def launcher(spec: "RunSpec", platform: str = sys.platform) -> Path:
    """The launcher of the backend's own environment (may not exist)."""
    return venv_program(backend_venv(spec.backend), "accelerate", platform)


def dataset_toml(spec: "RunSpec") -> str:
    """The data set as sd-scripts reads it. Buckets: the aspect ratio is kept, the area is resolution × resolution."""
    import tomlkit

    # sd-scripts asserts steps in multiples of 64 (train_network.assert_extra_args); small pictures want finer ones
    step = 64 if spec.backend == "sd-scripts" or spec.resolution >= 256 else 32
    bucketed = {
        "enable_bucket": spec.resolution >= step,
        "min_bucket_reso": max(step, spec.resolution // 2 // step * step),
        "max_bucket_reso": -(-spec.resolution * 2 // step) * step,
        "bucket_reso_steps": step,
    }
    subset = {"image_dir": (datasets_dir() / spec.slug).as_posix(), "num_repeats": spec.repeats}
    if one_line(spec.trigger):
        subset["class_tokens"] = one_line(spec.trigger)
    table = {
        "general": {"shuffle_caption": False, "caption_extension": ".txt", "keep_tokens": spec.keep_tokens},
        "datasets": [
            {
                "resolution": spec.resolution,
                "batch_size": spec.batch_size,
                **bucketed,
                "subsets": [subset],
            }
        ],
    }
    return tomlkit.dumps(table)


def one_line(text: str) -> str:
    """Text without line breaks, NULs and doubled spaces."""
    return " ".join(text.replace("\0", " ").split())


def sample_prompts(spec: "RunSpec") -> str:
    """One prompt a line, with size, steps and seed, so that samples of different steps can be compared.

    What a prompt already says (`--w`, `--h`, `--s`, `--d`, as in sd-scripts) stays. A line that begins with # is a
    comment there, so such a prompt is indented.
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
