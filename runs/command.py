"""Renders a spec into the trainer's input: its arguments, `dataset.toml` and `sample_prompts.txt`.

Pure functions of the spec and the run's folder: the same spec gives the same bytes, and tests need no GPU. One renderer
serves every trainer, because all have the flag names of sd-scripts; what a family needs is in its table
(presets/families/NAME.toml). A run is one command, or several: musubi-tuner makes its caches with commands of their
own.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import presets
from presets.steps import repeats_in, repeats_of, weight_of
from runs import dataset, masks
from runs.dataset import one_line
from runs.files import Fault, RunError
from runs.paths import CHECKOUTS, datasets_dir, models_dir, outputs_dir

if TYPE_CHECKING:
    from runs.spec import RunSpec

SAVE_PRECISION = {"bf16": "bf16", "fp16": "fp16", "no": "float"}
FP8 = ("fp8_base", "fp8_scaled")
ATTENTION = ("flash_attn", "flash3", "sage_attn", "xformers")  # musubi-tuner uses them only without --sdpa
STANDALONE = {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1"}
"""Options of torchrun, which accelerate calls: the processes of one machine meet at a port that the system chooses.

With accelerate 1.6, which kohya's trainers pin, `--main_process_port 0` alone starts the ranks with MASTER_PORT=0, to
which they connect until the group's timeout ends (torch/distributed/run.py reads PET_… as defaults of its flags).
"""
LAUNCHED = {
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "OMP_NUM_THREADS": "1",  # the GPU does the work; on a CPU, threads that wait for each other slow a busy machine
}
"""What `accelerate launch` sets for one process, beside the precision (utils/launch.py of 1.6 and 1.15,
prepare_simple_launcher_cmd_env). A script of one process sets it and starts the trainer directly: the launcher imports
torch, seconds at each start, only to start a child, and orphans that child on SIGTERM.
"""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
NODE, MAIN_ADDRESS, MAIN_PORT = (f"HANGPROOF_{name}" for name in ("NODE", "MAIN_ADDRESS", "MAIN_PORT"))
NODE_VARIABLES = {
    NODE: "the number of this machine, 0 for the first",
    MAIN_ADDRESS: "the address of the first machine",
    MAIN_PORT: "a free port of the first machine, the same on all",
}
"""What the script of a run on several machines reads from its environment: the monitor sets it, or a scheduler."""
Flag = bool | int | float | str | list[str]


def model_files(spec: "RunSpec") -> dict[str, str]:
    """What the backend loads, by flag: paths, or for diffusers a hub id. Flags in `extra` override the model's."""
    model = presets.models()[spec.model]
    if presets.backends()[spec.backend]["loads"] == "repo":
        source = str(models_dir() / spec.model) if model["generated"] else expanded(model["repo"])
        files = {"pretrained_model_name_or_path": source}
    else:
        needs = presets.trainer_of(spec.model, spec.backend)["needs"]
        files = {flag: str(models_dir() / expanded(name)) for flag, name in model["files"].items() if flag in needs}
    return {flag: str(expanded(spec.extra.get(flag, path))) for flag, path in files.items()}


def expanded(value: Any) -> Any:
    """A value with the user's folder where it starts with ~/, as a shell has it: in the script it is quoted. A whole
    number has no point, which sd-scripts refuses for steps (--lr_warmup_steps 100.0)."""
    if isinstance(value, list):
        return [expanded(word) for word in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def interval(every: int | None) -> int:
    """Optimizer steps between saved states or samples, from the field of a spec; 0 where there are none."""
    return presets.defaults()["save"]["at_most_every_n_steps"] if every is None else every


NEVER = 1_000_000  # epochs between validations that are made by steps


def validation(spec: "RunSpec") -> dict[str, Flag]:
    """The flags of validation; none when no images are held out.

    sd-scripts shuffles the training images and the held-out ones apart without a seed, so that some would be both
    (library/train_util.py, split_train_val); and it validates at the end of each epoch too, unless that is far away.
    """
    if not spec.validation_split:
        return {}
    every = spec.validate_every_n_steps or interval(spec.sample_every_n_steps) or interval(spec.save_every_n_steps)
    out: dict[str, Flag] = {"validation_split": spec.validation_split, "validation_seed": spec.seed}
    out |= {"validate_every_n_steps": every} if every else {}
    return {**out, "validate_every_n_epochs": NEVER} if every and spec.backend == "sd-scripts" else out


def world(spec: "RunSpec") -> int:
    """The number of processes that train together, one for each GPU of each machine."""
    return spec.nodes * spec.gpus


def loader(spec: "RunSpec", platform: str) -> dict[str, Any]:
    """The data loader's settings on a platform: {workers, persistent, env}.

    Windows and macOS start loader workers with spawn: each imports the trainer again, and a second pass over persistent
    ones has hung. On macOS, BLAS and OpenMP threads have deadlocked with the loader's threads.
    """
    workers = 0 if platform.startswith(("win32", "darwin")) else spec.workers
    persistent = workers > 0 and bool(spec.extra.get("persistent_data_loader_workers", True))
    env = dict.fromkeys(THREADS, "1") if platform.startswith("darwin") else {}
    return {"workers": workers, "persistent": persistent, "env": env}


def tier_flags(spec: "RunSpec") -> dict[str, Any]:
    """The flags that the VRAM choice sets for the run's model and trainer."""
    return presets.tier_flags(spec.model, spec.backend, spec.tier)


def flags(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> dict[str, Flag]:
    """All flags of the training command by name, in the order of the script. A flag that is False is not written."""
    trainer, every = presets.trainer_of(spec.model, spec.backend), interval(spec.save_every_n_steps)
    rules = loader(spec, platform)
    out: dict[str, Flag] = dict(model_files(spec))
    out |= {
        "dataset_config": str(folder / "dataset.toml"),
        "output_dir": spec.save_dir or str(folder),
        "output_name": spec.slug,
        "network_module": trainer["network_module"],
        "network_dim": spec.rank,
        "network_alpha": spec.alpha,
    }
    memory = tier_flags(spec)
    out |= {flag: value for flag, value in memory.items() if flag not in trainer["memory"]}
    out |= {"learning_rate": spec.learning_rate}
    out |= {"max_train_steps": spec.max_train_steps} if spec.max_train_steps else {"max_train_epochs": spec.epochs}
    out |= spec.written("command")
    out["mixed_precision"] = spec.mixed_precision
    out |= memory
    out |= {"seed": spec.seed, "max_data_loader_n_workers": rules["workers"], "save_state": True}
    out["persistent_data_loader_workers"] = True
    out |= {**trainer["flags"], **presets.models()[spec.model]["flags"]}
    out |= {"save_precision": SAVE_PRECISION[spec.mixed_precision]}
    out |= presets.backends()[spec.backend]["flags"]
    if spec.mixed_precision == "no":
        out |= {flag: False for flag in FP8 if flag in out}  # kohya's trainers refuse them with float32 computation
    if every:
        out |= {"save_every_n_steps": every}
        # sd-scripts keeps the state of the current step and those of the N steps before it
        out |= dict.fromkeys(("save_last_n_steps", "save_last_n_steps_state"), every * (spec.keep_states - 1))
    if spec.save_every_n_epochs:
        out |= {"save_every_n_epochs": spec.save_every_n_epochs, "save_last_n_epochs_state": spec.keep_states}
    if samples(spec):
        out["sample_prompts"] = str(folder / "sample_prompts.txt")
        out["sample_every_n_steps"] = interval(spec.sample_every_n_steps) or False
    out |= validation(spec)
    if spec.trackers not in ("", "trackio"):  # that one is logged outside the training process
        out |= {"log_with": spec.trackers, "logging_dir": str(folder / "logs")}
    if world(spec) > 1:
        out["ddp_timeout"] = presets.defaults()["multi_gpu"]["ddp_timeout"]
    out["resume"] = str(resume) if resume else False
    out |= {flag: expanded(value) for flag, value in spec.extra.items()}
    if spec.backend == "musubi" and "sdpa" not in spec.extra and any(map(spec.extra.get, ATTENTION)):
        out["sdpa"] = False
    own = out.get("network_args")
    if isinstance(own, list):  # beside the user's, those that the VRAM choice needs, such as split mode
        named = [word.partition("=")[0] for word in own]
        out["network_args"] = [*(w for w in memory.get("network_args", []) if w.partition("=")[0] not in named), *own]
    out["persistent_data_loader_workers"] = rules["persistent"]
    return out


def commands(spec: "RunSpec", folder: Path, platform: str = sys.platform) -> list[dict[str, Any]]:
    """The commands of the run in order: {"what": the comment above it, "script", "flags"}. The last one trains.

    Those before it make the caches, where the training command does not; each takes some of its flags over. Finished
    caches are kept (--skip_existing); the guards read each first and make a damaged one again
    (sd_scripts_patches/musubi/caches.py).
    """
    trainer, given = presets.trainer_of(spec.model, spec.backend), flags(spec, folder, platform=platform)
    found = []
    for row in trainer["cache"]:
        own = {flag: given[flag] for flag in ("dataset_config", *row["takes"]) if flag in given}
        own |= {**row["flags"], "skip_existing": True}
        what = f"Encodes {row['phase']}; caches that exist are checked and kept."
        found.append({"what": what, "script": row["script"], "flags": own})
    return [*found, {"what": "Trains.", "script": trainer["script"], "flags": given}]


def samples(spec: "RunSpec") -> list[str]:
    """The prompts of sample images (by default the trigger word); none when sample images are turned off.

    Raises:
        RunError: they are turned on explicitly, but there is nothing to draw.
    """
    turned_on = spec.sample_every_n_steps or any(map(spec.extra.get, ("sample_every_n_epochs", "sample_at_first")))
    prompts = list(spec.prompts) or ([spec.trigger] if spec.trigger.strip() else [])
    if turned_on and not prompts:
        message = "Samples are turned on, but there is no prompt and no trigger word; "
        raise RunError([Fault("prompts", f"{message}add a prompt, or turn samples off with 0")])
    return prompts if turned_on or spec.sample_every_n_steps is None else []


def number(value: object, other: float = 0.0) -> float:
    """A flag's value as a number; `other` where it is off or not a number."""
    try:
        return other if isinstance(value, bool) else float(str(value))
    except ValueError:
        return other


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


def direct(spec: "RunSpec") -> bool:
    """Whether the script starts the trainer itself: for one process, unless an edited script uses the launcher."""
    edited = spec.edited.generated if spec.edited else ""
    return world(spec) == 1 and not any(start in edited for start in ('"$launcher" launch', '"%launcher%" launch'))


def module(backend: str, script: str) -> list[str]:
    """The words that start a script of the trainer with the guards, after the interpreter or the launcher's options."""
    checkout = CHECKOUTS.get(backend)
    return ["-m", "trainer"] if checkout is None else ["-m", "sd_scripts_patches", str(checkout.script(script))]


def launch_options(spec: "RunSpec") -> list[list[str]]:
    """The words after accelerate's launcher, `launch` and its options by line; [] where `direct`.

    The options set all that accelerate would otherwise read from its configuration file, so that none is needed. A word
    `$NAME` is the value of that variable where the script runs.
    """
    if direct(spec):
        return []
    lines = [
        ["launch"],
        ["--mixed_precision", spec.mixed_precision],
        ["--num_processes", str(world(spec))],
        ["--num_machines", str(spec.nodes)],
        ["--dynamo_backend", "no"],
        # The GPU does the work. On a CPU, threads that wait for each other slow training down when the machine is busy.
        ["--num_cpu_threads_per_process", "1"],
    ]
    if world(spec) > 1:
        # accelerate's launcher of several processes, also on processors: see guards/world.py
        lines.append(["--multi_gpu"])
    if spec.nodes > 1:
        lines += [
            ["--machine_rank", f"${NODE}"],
            ["--main_process_ip", f"${MAIN_ADDRESS}"],
            ["--main_process_port", f"${MAIN_PORT}"],
        ]
    elif spec.gpus > 1:
        lines.append(["--main_process_port", "0"])  # 0 selects a free port, so that two runs do not collide
    return lines


def environment(spec: "RunSpec", platform: str = sys.platform) -> dict[str, str]:
    """Variables that the script sets: UTF-8 and unbuffered output, the platform's thread limits, the spec's variables
    without its secrets.

    Without the launcher also what that would set. With several processes also their number: each compares it with the
    group that it finds itself in (guards/world.py).
    """
    several = {"HANGPROOF_WORLD": str(world(spec))} if world(spec) > 1 else {}
    if several and spec.nodes == 1:
        several |= STANDALONE
    return {
        **several,
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"ACCELERATE_MIXED_PRECISION": spec.mixed_precision} | LAUNCHED if direct(spec) else {}),
        **loader(spec, platform)["env"],
        **{name: value for name, value in sorted(spec.environment.items()) if name not in spec.secrets},
    }


def dataset_tables(spec: "RunSpec") -> dict[str, Any]:
    """`dataset.toml` in the shape that the trainer reads, with every folder of the data set that has images.

    Buckets keep the aspect ratio of an image; their area is resolution × resolution.
    """
    folders = list(dataset.counts(datasets_dir() / spec.slug)) or [""]
    return (_musubi_dataset if spec.backend == "musubi" else _sd_scripts_dataset)(spec, folders)


def _sd_scripts_dataset(spec: "RunSpec", folders: list[str]) -> dict[str, Any]:
    """The data set for sd-scripts and the built-in trainer: one subset for each folder (runs/dataset.py)."""
    # sd-scripts requires multiples of 64 (train_network.assert_extra_args); small images need finer steps
    step = 64 if spec.backend == "sd-scripts" or spec.resolution >= 256 else 32
    bucketed: dict[str, Any] = {
        "enable_bucket": spec.resolution >= step,
        "min_bucket_reso": max(step, spec.resolution // 2 // step * step),
        "max_bucket_reso": -(-spec.resolution * 2 // step) * step,
        "bucket_reso_steps": step,
    }
    general: dict[str, Any] = {
        "shuffle_caption": False,
        "caption_extension": ".txt",
        "keep_tokens": spec.keep_tokens,
        **spec.written("data set"),
    }
    # What makes a trainer use masks is the same for all subsets, because their images share batches.
    masked = {"alpha_mask": True} if any(map(masks.has_mask, dataset.images_in(datasets_dir() / spec.slug))) else {}
    # The trainers take these from this file, not from the flag of the same name. Captions are always .txt files.
    general, bucketed = ({k: spec.extra.get(k, value) for k, value in one.items()} for one in (general, bucketed))
    return {
        "general": {**general, "caption_extension": ".txt"},
        "datasets": [
            {
                "resolution": spec.resolution,
                "batch_size": spec.batch_size,
                **bucketed,
                "subsets": [{**_subset(spec, folder), **masked} for folder in folders],
            }
        ],
    }


def _subset(spec: "RunSpec", folder: str) -> dict[str, str | int]:
    """The subset of one folder of the data set, with the repeats and the subject that its name sets."""
    subset: dict[str, str | int] = {"image_dir": (datasets_dir() / spec.slug / folder).as_posix()}
    subset["num_repeats"] = repeats_in(folder, spec.repeats)
    if tokens := one_line(spec.trigger) or (repeats_of(folder) or (0, ""))[1]:
        subset["class_tokens"] = tokens
    return subset


def _musubi_dataset(spec: "RunSpec", folders: list[str]) -> dict[str, Any]:
    """The data set for musubi-tuner: one [[datasets]] for each folder, with a cache of its own in the run's folder."""
    general = {
        "resolution": [spec.resolution, spec.resolution],
        "caption_extension": ".txt",
        "batch_size": spec.batch_size,
        "enable_bucket": True,
        "bucket_no_upscale": False,
    }
    rows = []
    for folder in folders:
        row: dict[str, str | int] = {
            "image_directory": (datasets_dir() / spec.slug / folder).as_posix(),
            "cache_directory": (outputs_dir() / spec.slug / "cache" / folder).as_posix(),
            "num_repeats": repeats_in(folder, spec.repeats),
        }
        if spec.control_dir:
            pairs = Path(spec.control_dir).expanduser().absolute() / weight_of(folder)[1]
            row["control_directory"] = pairs.as_posix()
        rows.append(row)
    return {"general": general, "datasets": rows}


def sample_prompts(spec: "RunSpec") -> str:
    """The text of `sample_prompts.txt`: one prompt per line with size, steps and seed, so that samples are comparable.

    The family adds its own, such as the guidance. Options in the prompt (`--w`, `--h`, `--s`, `--d`, … as in
    sd-scripts) are kept. A prompt that starts with # is indented, because the line would be a comment.
    """
    family = presets.families()[presets.models()[spec.model]["family"]]
    lines = []
    for prompt in spec.prompts or ([spec.trigger] if spec.trigger.strip() else []):
        text = one_line(prompt)
        for option, value in (
            ("w", spec.resolution),
            ("h", spec.resolution),
            ("s", spec.sample_steps),
            ("d", spec.seed),
            *family["sample"].items(),
        ):
            kind = r"\S" if isinstance(value, str) else r"\d"
            if not re.search(rf" --{option} {kind}", text, re.IGNORECASE):
                text += f" --{option} {value}"
        lines.append(f" {text}" if text.startswith("#") else text)
    return "".join(f"{line}\n" for line in lines)
