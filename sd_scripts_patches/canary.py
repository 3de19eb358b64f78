"""`python -m sd_scripts_patches canary OLD NEW`: does an update train as before? 20 fixed-seed tiny steps in both.

OLD and NEW are checkouts of one trainer, each optionally with its environment (`CHECKOUT@VENV`). OLD may be a commit of NEW's
checkout: its files are unpacked for the comparison, and the checkout is not touched. Both train the same tiny
weights on the same images with the guards, one after the other. The losses and the sample image say whether the update
changed what is learned, the peak memory whether it needs more. The seconds a step are shown and never decide: 20 steps
of a tiny model on a processor that does other work, too, vary by more than an update changes.

Exit codes: 0 equal within the tolerance, 1 not, 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sd_scripts_patches import tiny, trial, versions
from sd_scripts_patches.tiny import Installation
from sd_scripts_patches.trial import Trial

STEPS, IMAGES, WARM_STEPS = 20, 10, 3
LIMIT_S, RUN_LIMIT_S = 900.0, 400.0
TOLERANCE = 0.001  # of a loss; other versions of PyTorch round differently, by about 0.00001 within these steps
PIXEL_TOLERANCE = 2.0  # of 255, the mean over the image
MEMORY_TOLERANCE = 0.25

PIXELS = """
import sys
import numpy
from PIL import Image
old, new = (numpy.asarray(Image.open(path).convert("RGB")).astype(int) for path in sys.argv[1:])
difference = abs(old - new) if old.shape == new.shape else numpy.full(1, 255)
print(float(difference.mean()), int(difference.max()))
"""


@dataclass(frozen=True)
class Outcome:
    """One training. error: why it did not complete, else "". peak_bytes, step_s: 0 where unknown. sample: "" for none."""

    name: str
    losses: list[float]
    peak_bytes: int
    step_s: float
    sample: str
    error: str


@dataclass(frozen=True)
class Verdict:
    """One thing compared. equal: within the tolerance; None: shown only."""

    what: str
    equal: bool | None
    text: str


class NotMade(RuntimeError):
    """The tiny models could not be made in OLD's environment; the message says why."""


def measure(old: Installation, new: Installation, trial_: Trial, commit: str = "") -> tuple[Outcome, Outcome]:
    """Train in both. commit: the one of NEW's checkout that OLD is. Raises NotMade, trial.LimitReached."""
    work = trial_.folder / "work"
    old.write_site(work)
    environment = trial_.environment(old, work)
    made = trial_.wait(trial_.start(old.maker(work, IMAGES), environment, old.checkout, "make"), RUN_LIMIT_S)
    if made.code != 0:
        raise NotMade(f"the tiny models were not made in {old.checkout}: {made.error()}. Run `selftest` on it")
    before, after = _train(old, trial_, work, "old"), _train(new, trial_, work, "new")
    return (replace(before, name=_commit_of(commit, new)) if commit else before), after


def _commit_of(commit: str, new: Installation) -> str:
    return f"commit {commit[:8]} of {new.checkout}"


def _train(target: Installation, trial_: Trial, work: Path, name: str) -> Outcome:
    folder = trial_.folder / name
    folder.mkdir()
    target.write_site(folder)
    commands, caches = target.row.caching(work, folder)
    settings = {"TINY_LOSSES": str(folder / "losses"), "HANGPROOF_RUN": str(folder)}
    environment = trial_.environment(target, folder, **settings)
    for script, words in commands.items():
        command = target.command(*words, script=script)
        job = trial_.wait(trial_.start(command, environment, target.checkout, f"{name}-{script}"), RUN_LIMIT_S)
        if job.code != 0:
            return Outcome(str(target.checkout), [], 0, 0.0, "", f"{script}: it {job.outcome()}: {job.error()}")
    arguments = target.row.arguments(
        work, folder / "made", "--sample_prompts", str(work / "prompts.txt"),
        max_train_steps=str(STEPS), sample_every_n_steps=str(STEPS), **caches,
    )  # fmt: skip
    job = trial_.wait(trial_.start(target.command(*arguments), environment, target.checkout, name), RUN_LIMIT_S)
    losses = [loss for _, _, loss in tiny.losses(folder / "losses")] if (folder / "losses").is_file() else []
    steps_s = []
    if (folder / "metrics.jsonl").is_file():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps_s = [line["step_s"] for line in lines if line["kind"] == "step" and line["step"] > WARM_STEPS]
    images = sorted((folder / "made" / "sample").glob("*.png"))
    error = "" if job.code == 0 else f"it {job.outcome()}: {job.error()}"
    if not error and len(losses) != STEPS:
        error = f"it recorded {len(losses)} losses, not {STEPS}"
    step_s = statistics.median(steps_s) if steps_s else 0.0
    return Outcome(str(target.checkout), losses, job.peak_bytes, step_s, str(images[-1]) if images else "", error)


def compare(old: Outcome, new: Outcome, pixels: tuple[float, int] | None, tolerance: float) -> list[Verdict]:
    """Return the verdicts. pixels: the mean and the largest difference of the samples; None when one is missing."""
    broken = [Verdict("training", False, f"{o.name}: {o.error}.") for o in (old, new) if o.error]
    if broken:
        return broken
    return [_losses(old, new, tolerance), _sample(old, new, pixels), _memory(old, new), _speed(old, new)]


def _losses(old: Outcome, new: Outcome, tolerance: float) -> Verdict:
    pairs = list(zip(old.losses, new.losses, strict=True))
    differs = [step for step, (a, b) in enumerate(pairs, 1) if a != b]
    if not differs:
        return Verdict("losses", True, f"The losses are equal digit for digit ({STEPS} steps).")
    by = [abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]
    most = max(by)
    if math.isinf(most):
        broken = next(step for step, part in enumerate(by, 1) if math.isinf(part))
        return Verdict(
            "losses", False, f"The losses differ from step {differs[0]} on; in step {broken} one is no number."
        )
    equal = most <= tolerance
    limit = f"within the tolerance of {tolerance:.2%}" if equal else f"more than the tolerance of {tolerance:.2%}"
    return Verdict(
        "losses", equal, f"The losses differ from step {differs[0]} on, by at most {most:.2g} of a loss: {limit}."
    )


def _sample(old: Outcome, new: Outcome, pixels: tuple[float, int] | None) -> Verdict:
    if pixels is None:
        missing = [o.name for o in (old, new) if not o.sample]
        if len(missing) == 2:
            return Verdict("sample", None, "Neither wrote a sample image.")
        return Verdict("sample", False, f"{missing[0]} wrote no sample image.")
    mean, largest = pixels
    if not largest:
        return Verdict("sample", True, "The sample images are equal pixel for pixel.")
    equal = mean <= PIXEL_TOLERANCE
    limit = "within" if equal else "more than"
    text = f"The sample images differ by {mean:.2g} of 255 on average, at most by {largest}: {limit} the tolerance of {PIXEL_TOLERANCE:g}."
    return Verdict("sample", equal, text)


def _memory(old: Outcome, new: Outcome) -> Verdict:
    if not old.peak_bytes or not new.peak_bytes:
        return Verdict("memory", None, "The peak memory is not known on this system.")
    part = new.peak_bytes / old.peak_bytes - 1
    equal = part <= MEMORY_TOLERANCE
    limit = "within" if equal else "more than"
    sizes = f"{old.peak_bytes / 1e9:.2f} GB before, {new.peak_bytes / 1e9:.2f} GB after ({part:+.0%})"
    return Verdict("memory", equal, f"Peak memory: {sizes}, {limit} the tolerance of +{MEMORY_TOLERANCE:.0%}.")


def _speed(old: Outcome, new: Outcome) -> Verdict:
    if not old.step_s or not new.step_s:
        return Verdict("speed", None, "The seconds a step were not recorded.")
    part = new.step_s / old.step_s - 1
    text = f"A step: {old.step_s:.3f} s before, {new.step_s:.3f} s after ({part:+.0%}); on a processor, so it does not decide."
    return Verdict("speed", None, text)


def _pixels(target: Installation, old: Outcome, new: Outcome) -> tuple[float, int] | None:
    if not old.sample or not new.sample:
        return None
    command = [str(target.python), "-c", PIXELS, old.sample, new.sample]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    mean, largest = done.stdout.split()
    return float(mean), int(largest)


def main(argv: list[str]) -> int:
    """Train in both, print the verdicts or JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sd_scripts_patches canary",
        description="Train the same 20 tiny steps in two checkouts or environments and compare. About one minute.",
    )
    parser.add_argument(
        "old",
        metavar="OLD",
        help="what works: CHECKOUT, CHECKOUT@VENV, or a commit of NEW's checkout, such as 6721028c",
    )
    parser.add_argument("new", metavar="NEW", type=trial.installation, help="the update: CHECKOUT or CHECKOUT@VENV")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tolerance", type=_share, default=TOLERANCE, help=f"part of a loss ({TOLERANCE}); 0: digit for digit"
    )
    options = parser.parse_args(argv)
    commit = options.old if re.fullmatch(r"[0-9a-f]{7,40}", options.old) and not Path(options.old).exists() else ""
    try:
        options.old = options.new if commit else trial.installation(options.old)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument OLD: {error}")
    if options.old.trainer != options.new.trainer:
        both = f"{options.old.trainer.name}, and {options.new.checkout} is one of {options.new.trainer.name}"
        parser.error(f"{options.old.checkout} is a checkout of {both}; name two of the same trainer")
    try:
        with Trial(LIMIT_S) as trial_:
            if commit:
                folder = versions.unpack(
                    options.new.checkout, commit, trial_.folder / f"{options.new.trainer.key}-{commit[:8]}"
                )
                options.old = Installation(folder, options.new.python)
            old, new = measure(options.old, options.new, trial_, commit)
            pixels = None if old.error or new.error else _pixels(options.old, old, new)
    except KeyboardInterrupt:
        print("\nsd_scripts_patches: stopped; nothing was left behind", file=sys.stderr)
        return 130
    except (NotMade, versions.VersionError, trial.LimitReached, OSError, subprocess.SubprocessError) as error:
        if options.json:
            print(json.dumps({"equal": False, "error": str(error), "verdicts": []}, ensure_ascii=False))
        print(f"sd_scripts_patches: canary: {error}", file=sys.stderr)
        return 1
    verdicts = compare(old, new, pixels, options.tolerance)
    equal = all(verdict.equal is not False for verdict in verdicts)
    if options.json:
        runs = {"old": asdict(old), "new": asdict(new)}
        for run in runs.values():
            run["sample"] = bool(run["sample"])
        rows = [asdict(verdict) for verdict in verdicts]
        print(
            json.dumps({"equal": equal, "tolerance": options.tolerance, **runs, "verdicts": rows}, ensure_ascii=False)
        )
    else:
        print(f"old: {old.name} with {options.old.python}\nnew: {new.name} with {options.new.python}\n")
        for verdict in verdicts:
            print({True: "equal  ", False: "differs", None: "       "}[verdict.equal], verdict.text)
        names = ", ".join(verdict.what for verdict in verdicts if verdict.equal is False)
        print(
            "\nNew trains as old." if equal else f"\nNew does not train as old ({names}). Keep old until you know why."
        )
    return 0 if equal else 1


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value
