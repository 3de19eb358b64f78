"""Prepares everything before the first step (device, data, caches, model, LoRA, optimizer) as one `Training`.

The order finds errors early and keeps memory low: everything that needs no model is checked first. Text encoders and
VAE are loaded one after the other, only if something is not cached, and are freed before the transformer is loaded.
Each part begins with a check point of the heartbeat. What all processes share (folders, the model's files, trackers)
one process does, and the others wait for it at a barrier with a deadline.
"""

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards import checkpoint, deadline, limits, loader, world as group
from guards.snapshots import Snapshots
from guards.state_saves import StateSaves
from guards.step_requests import StepRequests
from trainer import cache, dataset, families, imports, lora, models, optimizers, samples, states, streaming, validation
from trainer.data_order import EpochSampler
from trainer.errors import TrainError

SDXL_ONLY = ("min_snr_gamma", "v_parameterization", "zero_terminal_snr")


@dataclass
class Training:
    """The input of the loop. per_epoch: optimizer steps. images: those trained on, without the held-out ones."""

    args: Any
    hb: Any
    log: Callable[[str], None]
    accelerator: Any
    dtype: Any
    images: list
    order: EpochSampler
    loader: Any
    transformer: Any
    parameters: dict
    average: dict  # of the weights, with --ema_decay; else empty
    optimizer: Any
    sampler: samples.Sampler
    validator: validation.Validator
    family: families.Family
    belongs: dict
    per_epoch: int
    epochs: int
    total: int
    requests: StepRequests  # of the user and the monitor
    snapshots: Snapshots  # in memory, for a restart
    saves: StateSaves
    trained: dict = field(default_factory=dict)  # the weights that are trained, while the model has the final ones
    end_note: str = ""  # what a run that is done reports with its outcome
    state: tuple[int, Path] | None = None  # the newest state that this process saved or loaded: its step and folder

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which logs and saves."""
        return self.accelerator.is_main_process


def build(args, hb) -> Training:
    """Prepares a run. Raises: TrainError for errors that the user can fix."""
    hb.reach("folders")
    output = Path(args.output_dir)
    if group.rank() == 0:  # the others cannot write before it: they wait for it in make_accelerator
        make_folder(output)
        for folder in (output, output / "sample"):
            checkpoint.sweep(folder)
    if args.resume:
        states.check(Path(args.resume))
    elif args.network_weights:
        lora.check(args.network_weights)
    hb.reach("data")
    seed = args.seed if args.validation_seed is None else args.validation_seed
    images, held = validation.split(dataset.read(Path(args.dataset_config), args), args.validation_split, seed)
    hb.phase("import")
    hb.reach("arguments")
    imports.heavy()
    import torch

    accelerator = make_accelerator(args, hb)
    if args.stored and accelerator.device.type == "mps":
        raise TrainError(f"--quantize {args.stored}: Apple's GPUs do not support it; remove the flag")
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device

    def log(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    prompts = samples.read(Path(args.sample_prompts), args.seed, log) if args.sample_prompts else []
    hb.reach("model")
    hb.phase("load", note="finding the model")
    with first_on_each_machine(accelerator, "the model's files"):
        model = models.locate(args.pretrained_model_name_or_path, lambda done, total: hb.item(done))
    family = families.of(model)
    check_family(args, family, model)
    prompts = samples.of_family(prompts, family)
    args.t5_tokens = models.t5_tokens(model, family, args.t5xxl_max_token_length)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.mixed_precision, torch.float32)
    half_vae = args.mixed_precision == "bf16" and device.type != "cpu" and not args.no_half_vae
    dtypes = (torch.bfloat16 if half_vae else torch.float32, dtype)
    if held:
        log(f"held out for validation: {len(held)} of {len(images) + len(held)} images")
    every = fill_caches(args, hb, log, accelerator, [*images, *held], prompts, model, family, output, dtypes)
    ends = slice(len(images)), slice(len(images), None)
    paths, held_paths = (cache.Paths(every.latents[end], every.texts[end], every.prompts) for end in ends)

    hb.reach("model")
    hb.phase("load", note=family.denoiser)
    home = torch.device("cpu") if args.split_mode or args.blocks_to_stream else device
    transformer = models.load_denoiser(model, family, dtype, home, args.stored, lambda done, total: hb.item(done))
    hb.reach("network")
    parameters = lora.add(
        transformer,
        rank=args.network_dim,
        alpha=args.network_alpha,
        blocks=family.blocks[args.train_blocks],
        dropout=args.network_dropout or 0.0,
        seed=args.seed,
        cast_inputs=args.mixed_precision == "no",
    )
    if args.network_weights and not args.resume:  # a state has all weights, and the file may be gone by now
        lora.begin_with(parameters, args.network_weights, args.network_alpha / args.network_dim)
    transformer.train()
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if args.split_mode:
        streaming.split(transformer, family.halves, device)
    elif args.blocks_to_stream:
        streaming.blocks(transformer, args.blocks_to_stream, device)
    hb.reach("loader")
    rate = args.unet_lr if args.unet_lr is not None else args.learning_rate
    optimizer = optimizers.build(args.optimizer_type, args.optimizer_options, rate, list(parameters.values()))
    if optimizer.param_groups[0]["lr"] is None:
        log("Adafactor finds its own learning rate; add --optimizer_args relative_step=False to use --learning_rate")
    optimizer = accelerator.prepare(optimizer)

    if rank == 0:
        check_room(output, args, parameters)

    order = EpochSampler(images, args.seed, rank, world)
    per_epoch = -(-len(order) // args.gradient_accumulation_steps)
    total = args.max_train_epochs * per_epoch if args.max_train_epochs else args.max_train_steps
    hb.plan(total)
    encoded = [path.name for files in (paths.latents, *paths.texts) for path in files]
    belongs = {
        **{flag: getattr(args, flag) for flag in states.FLAGS},
        "model": models.fingerprint(model, family.denoiser),
        "data": cache.name_of(*((image.repeats, image.batch_size) for image in images), *encoded),
        "world": world,
    }
    memory = Snapshots.from_env()
    return Training(
        args=args,
        hb=hb,
        log=log,
        accelerator=accelerator,
        dtype=dtype,
        images=images,
        order=order,
        loader=make_loader(args, order, paths, device),
        transformer=transformer,
        parameters=parameters,
        average={name: p.data.clone() for name, p in parameters.items()} if args.ema_decay else {},
        optimizer=optimizer,
        sampler=samples.Sampler(prompts, paths, model, family, args, device, dtypes, log),
        validator=validation.Validator(args, family, held_paths, device, dtype),
        family=family,
        belongs=belongs,
        per_epoch=per_epoch,
        epochs=-(-total // per_epoch),
        total=total,
        requests=StepRequests.from_env(),
        snapshots=memory,
        saves=StateSaves(memory, hb),
    )


def check_family(args, family: families.Family, model: Path) -> None:
    """Raises a TrainError for flags that the model does not have, or that it needs; sets the default of its prediction."""
    default = "sigma_scaled" if family.key in ("flux", "chroma") else "raw"
    args.model_prediction_type = args.model_prediction_type or default
    if args.weighting_scheme in ("sigma_sqrt", "cosmap") and args.model_prediction_type != "sigma_scaled":
        ignored = f"--weighting_scheme {args.weighting_scheme} does nothing"
        print(f"warning: {ignored}: it is of --model_prediction_type sigma_scaled only", flush=True)
    if family.key == "sdxl" and not args.v_parameterization:
        scheduler = models.config(model, "scheduler", "scheduler_config.json")
        if scheduler.get("prediction_type") == "v_prediction":
            raise TrainError(f"{model}: this model predicts velocity, as its scheduler says; add --v_parameterization")
    if args.network_module not in (None, family.module):
        raise TrainError(
            f"--network_module {args.network_module}: {family.name} needs {family.module}; correct the flag"
        )
    if args.train_blocks not in family.blocks:
        raise TrainError(
            f"--network_args train_blocks={args.train_blocks}: {family.name} has {' and '.join(family.blocks)} only"
        )
    wrong = [f"--{flag}" for flag in SDXL_ONLY if getattr(args, flag)]
    if wrong and family.key != "sdxl":
        raise TrainError(f"{' and '.join(wrong)}: of SDXL, and the model is {family.name}; remove the flag")
    if args.huber_schedule == "snr" and args.loss_type in ("huber", "smooth_l1") and family.key != "sdxl":
        raise TrainError(
            f"--loss_type {args.loss_type}: {family.name} has no --huber_schedule snr; use constant or exponential"
        )
    if args.blocks_to_stream and family.denoiser != "transformer":
        raise TrainError(f"--blocks_to_stream: not with {family.name}, which is small; remove the flag")
    if args.apply_t5_attn_mask and family.key != "flux":
        raise TrainError(f"--apply_t5_attn_mask: of FLUX.1, and the model is {family.name}; remove the flag")
    if args.split_mode and not family.halves:
        raise TrainError(f"--split_mode: {family.name} has no halves; use --quantize nf4 to save memory")


def make_folder(output: Path) -> None:
    """Create the output folder. Raises: TrainError when that fails, or it cannot be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise TrainError(
            f"--output_dir {output}: cannot be created: {problem.strerror}; use another folder"
        ) from problem
    if not os.access(output, os.W_OK):
        raise TrainError(
            f"--output_dir {output}: no permission to write; use another folder, or change its permissions"
        )


def check_room(output: Path, args, parameters: dict) -> None:
    """Raises a TrainError when the disk has no space for one LoRA and one state: the first save would fail."""
    weights = 4 * sum(parameter.numel() for parameter in parameters.values())
    needed = weights * (2 + optimizers.KINDS[args.optimizer_type].state)
    free = shutil.disk_usage(output).free
    if free < needed:
        raise TrainError(
            f"--output_dir {output}: {free / 1e6:.0f} MB are free, but one save of this LoRA needs {needed / 1e6:.0f} "
            "MB; free some space, use another folder, or lower --network_dim"
        )


def barrier(accelerator, what: str) -> None:
    """Waits until all processes are here, at most `barrier_timeout_s`; then this process ends with a message."""
    if accelerator.num_processes > 1:
        with group.barrier(limits.seconds("barrier_timeout_s"), what):
            accelerator.wait_for_everyone()


@contextlib.contextmanager
def first_on_each_machine(accelerator, what: str) -> Iterator[None]:
    """One process of each machine runs the block, then the others, which find the files in place."""
    if not accelerator.is_local_main_process:
        barrier(accelerator, what)
    yield
    if accelerator.is_local_main_process:
        barrier(accelerator, what)


def make_accelerator(args, hb):
    """The accelerator, once all ranks have joined, with its tracker. Raises: TrainError for flags that fail here."""
    hb.reach("accelerator")
    from accelerate import Accelerator, InitProcessGroupKwargs
    from torch import distributed

    chosen = group.choose_backend()
    if chosen and group.rank() == 0:
        print(chosen, flush=True)
    try:
        with group.barrier(limits.seconds("group_s"), "joining the group"):
            accelerator = Accelerator(
                mixed_precision=args.mixed_precision,
                kwargs_handlers=[InitProcessGroupKwargs(timeout=group.timeout(args.ddp_timeout))],
                log_with=args.log_with,
                project_dir=args.logging_dir,
            )
    except (ValueError, ImportError) as problem:
        raise TrainError(
            f"--mixed_precision {args.mixed_precision} --log_with {args.log_with}: {problem}; change or remove the flag"
        ) from problem
    group.check(accelerator.num_processes)
    hb.describe(str(accelerator.device), distributed.get_backend() if distributed.is_initialized() else "")
    if args.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainError("--mixed_precision fp16 needs a GPU; on a CPU use bf16 or no")
    if args.log_with and not accelerator.log_with:  # accelerate silently ignores trackers that it cannot import
        raise TrainError(
            f"--log_with {args.log_with}: run `{sys.executable} -m pip install {args.log_with}`, or remove the flag"
        )
    hb.reach("tracker")
    if args.log_with and accelerator.is_main_process:
        config = {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, bool))}
        names = {"wandb": {"name": args.wandb_run_name}} if args.wandb_run_name else {}
        start = lambda: accelerator.init_trackers(args.log_tracker_name or "network_train", config, names)  # noqa: E731
        try:
            deadline.call(
                start, seconds=limits.seconds("tracker_timeout_s"), what=f"starting the tracker {args.log_with}"
            )
        except TimeoutError as problem:
            print(f"{problem}. Training continues without it.", file=sys.stderr, flush=True)
    return accelerator


def fill_caches(args, hb, log, accelerator, images, prompts, model, family, output, dtypes) -> cache.Paths:
    """Encodes what is not cached: each process a share, then all wait for each other.

    Machines that share no disk lack what the others have encoded: each encodes it again, to the same numbers.
    """
    import torch

    hb.reach("data")
    paths = cache.plan(images, samples.texts(prompts), model, output, args, dtypes, hb, log)
    shares = [(accelerator.process_index, accelerator.num_processes)]
    if group.local_size() < accelerator.num_processes:
        shares.append((accelerator.local_process_index, group.local_size()))
    device = accelerator.device
    for first, step in shares:
        share = slice(first, None, step)
        texts, latents = cache.missing_texts(images, paths)[share], cache.missing_latents(images, paths)[share]
        barrier(accelerator, "the list of caches")  # before any file is written, so that all share the same list
        if latents:
            log("caching latents...")
            cache.encode_latents(latents, model, family, dtypes[0], device, hb)
        hb.reach("tokenizer")
        if texts:
            log("caching Text Encoder outputs...")
            where = torch.device("cpu") if args.text_encoder_cpu else device
            cache.encode_texts(texts, model, family, args, dtypes[1], where, hb)
        if texts or latents:
            gc.collect()  # T5 is 9 GB: it must be freed before the transformer is loaded
            if device.type == "cuda" and not args.highvram:
                torch.cuda.empty_cache()
        barrier(accelerator, "the caches of all ranks")
    return paths


def make_loader(args, order: EpochSampler, paths: cache.Paths, device):
    """The batches of an epoch in `order`, made by workers that cannot outlive the training."""
    import torch
    from torch.utils.data import DataLoader

    workers = min(args.max_data_loader_n_workers, os.cpu_count() or 1, len(order))
    settings = loader.rules(
        num_workers=workers,
        persistent_workers=args.persistent_data_loader_workers,
        prefetch_factor=2 if workers else None,
    )
    return DataLoader(
        cache.Batches(paths),
        batch_size=None,
        sampler=order,
        generator=torch.Generator().manual_seed(0),
        worker_init_fn=loader.die_with_parent,
        pin_memory=device.type == "cuda",
        **settings,
    )
