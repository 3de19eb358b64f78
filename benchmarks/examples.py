"""The built-in trainer beside diffusers' own example scripts for a LoRA: the losses of the same steps, and their time.

    python -m benchmarks examples [--checkout DIFFUSERS] [--family flux|sdxl] [--model FOLDER]

Both train one image with the same noise, noise levels and first weights, in full precision. In turns, each round is a
run of both. Limits: a loss is not further from the script's than 1e-5 of it, and the time from a step to the next is
not longer. The script for FLUX.1 encodes text and image in each step, that for SDXL the image; the trainer has both
cached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import CannotMeasure, Report, ratio, say
from benchmarks.tiny_flux import command_line
from benchmarks.trial import clean_environment, read_lines
from runs.paths import ROOT
from trainer import tiny_flux

SCRIPTS = {"flux": "train_dreambooth_lora_flux.py", "sdxl": "train_dreambooth_lora_sdxl.py"}
CAPTION, SIZE, RANK, RATE, SEED, T5_TOKENS, DECAY = "a photo of a cat", 64, 4, 1e-3, 42, 64, 1e-4
# Both train with these; report_to: all of the trackers that are installed, which are none.
SCRIPT_FLAGS = f"""
resolution={SIZE} train_batch_size=1 num_train_epochs=1 rank={RANK} learning_rate={RATE} adam_weight_decay={DECAY}
lr_scheduler=constant lr_warmup_steps=0 checkpointing_steps=1000000 seed={SEED} report_to=all
"""
TRAINER_FLAGS = f"""
output_name=ours network_dim={RANK} network_alpha={RANK} learning_rate={RATE} optimizer_type=adamw seed={SEED}
t5xxl_max_token_length={T5_TOKENS} guidance_scale=1 timestep_sampling=sigma discrete_flow_shift=1 weighting_scheme=none
model_prediction_type=raw max_data_loader_n_workers=0
"""
COMPARED = 20  # losses
FIRST = 5  # steps that warm up, whose time does not count
CLOSE = 1e-5  # relative
SLOWER = 1.0  # of the script's time a step
LONGEST_S = 900


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    checkout = os.environ.get("DIFFUSERS_DIR", "diffusers")
    parser.add_argument("--checkout", type=Path, default=Path(checkout), help="a checkout of diffusers (DIFFUSERS_DIR)")
    parser.add_argument("--family", choices=SCRIPTS, default="flux")
    parser.add_argument(
        "--model", type=Path, help="a model in diffusers' layout; default for flux: a tiny one with random weights"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)


def measure(arguments: argparse.Namespace) -> Report:
    """Train rounds with both. Raises: CannotMeasure without the checkout or a model."""
    script = arguments.checkout / "examples/dreambooth" / SCRIPTS[arguments.family]
    if not script.is_file():
        raise CannotMeasure(f"{script} does not exist; --checkout is a checkout of github.com/huggingface/diffusers")
    if arguments.model is None and arguments.family != "flux":
        raise CannotMeasure(f"--family {arguments.family} needs --model FOLDER, a model in diffusers' layout")
    with tempfile.TemporaryDirectory(prefix="hangproof-examples-") as temporary:
        folder = Path(temporary)
        model = arguments.model or tiny_flux.ensure(folder / "model")
        for contender in ("ours", "theirs"):  # a folder each: the script opens all that is in it
            one_image(folder / f"images of {contender}")
        rounds = []
        for number in range(arguments.rounds):
            say(f"round {number + 1} of {arguments.rounds}")
            theirs = run_script(script, arguments.family, model, folder, arguments.steps)
            rounds.append((run_trainer(model, folder, arguments.steps), theirs))
    return report(rounds)


def report(rounds: list[tuple[list[dict], list[dict]]]) -> Report:
    """The figures of all rounds; each has the steps of the trainer and those of the script, a loss and a time each."""
    ours, theirs = rounds[0]
    losses = [(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=True)][:COMPARED]
    furthest = max(abs(a - b) / abs(b) for a, b in losses)
    times = ratio((step_time(ours), step_time(theirs)) for ours, theirs in rounds)
    assert times is not None
    figures = {
        "losses": [[round(a, 7), round(b, 7)] for a, b in losses],
        "largest_relative_difference": furthest,
        "step_time_ratio": times,
        "step_s": [[round(step_time(one), 5) for one in both] for both in rounds],
    }
    exceeded = [f"a loss differs by {furthest:.1e} of the script's, the limit is {CLOSE}"] if furthest > CLOSE else []
    if times["median"] > SLOWER:
        exceeded.append(f"a step takes {times['median']} times as long as the script's, the limit is {SLOWER}")
    return Report(figures, exceeded)


def step_time(steps: list[dict]) -> float:
    """The median of the seconds from one step to the next."""
    at_s = [step["mono_s"] for step in steps[FIRST:]]
    return statistics.median(after - before for before, after in itertools.pairwise(at_s))


def one_image(folder: Path) -> None:
    """One image, in the size in which it is trained."""
    import numpy
    from PIL import Image

    folder.mkdir()
    pixels = numpy.random.default_rng(SEED).integers(0, 255, (SIZE, SIZE, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(folder / "cat.png")


def words_of(text: str) -> dict[str, str]:
    """The flags of a table above."""
    return dict(word.split("=") for word in text.split())


def run_script(script: Path, family: str, model: Path, folder: Path, steps: int) -> list[dict]:
    """The steps of the example script: `loss` and the clock `mono_s` of each."""
    result = folder / "result.json"
    flags: dict[str, object] = {
        **words_of(SCRIPT_FLAGS),
        "pretrained_model_name_or_path": model,
        "instance_data_dir": folder / "images of theirs",
        "instance_prompt": CAPTION,
        "output_dir": folder / "theirs",
        "repeats": steps,
        "max_train_steps": steps,
    }
    if family == "flux":
        flags |= {"max_sequence_length": T5_TOKENS, "guidance_scale": 1, "weighting_scheme": "none", "lora_alpha": RANK}
    program = [sys.executable, str(ROOT / "benchmarks/example_script.py"), str(script), str(SEED), str(result)]
    run([*program, *command_line(flags)], folder)
    return json.loads(result.read_text(encoding="utf-8"))


def run_trainer(model: Path, folder: Path, steps: int) -> list[dict]:
    """The steps of the built-in trainer: `loss` and the clock `mono_s` of each."""
    config, output = folder / "dataset.toml", folder / "ours"
    config.write_text(
        f'[[datasets]]\nresolution = {SIZE}\nbatch_size = 1\n[[datasets.subsets]]\nimage_dir = "{folder / "images of ours"}"\n'
        f'num_repeats = {steps}\nclass_tokens = "{CAPTION}"\n',
        encoding="utf-8",
    )
    flags: dict[str, object] = {
        **words_of(TRAINER_FLAGS),
        "pretrained_model_name_or_path": model,
        "dataset_config": config,
        "output_dir": output,
        "max_train_steps": steps,
    }
    words = command_line(flags, "--optimizer_args", f"weight_decay={DECAY}", "--network_train_unet_only")
    (output / "metrics.jsonl").unlink(missing_ok=True)
    run([sys.executable, "-m", "trainer", *words], folder, HANGPROOF_RUN=str(output))
    return [line for line in read_lines(output / "metrics.jsonl") if "step_s" in line]


def run(command: list[str], folder: Path, **extra: str) -> None:
    """A contender, to its end. Raises: CannotMeasure with its last lines when it fails."""
    # One thread: with more, another program on the machine delays all of a step's products, and the ratio is a lottery.
    environment = clean_environment(HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **extra)
    with (folder / "log").open("w+", encoding="utf-8") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=LONGEST_S, check=False
        )
        if done.returncode:
            log.seek(0)
            raise CannotMeasure(f"{' '.join(command[:4])} … ended with {done.returncode}:\n{log.read()[-4000:]}")
