"""`python tests/support/canary.py OLD NEW`: does an update of a trainer train as before? 20 fixed-seed tiny steps in both.

For those who pin a new commit of kohya's trainers. OLD and NEW are checkouts of one trainer, each optionally with its environment
(`CHECKOUT@VENV`). OLD may be a commit of NEW's checkout: its files are unpacked for the comparison, and the checkout is not
touched. Both train the same tiny weights on the same images with the guards, one after the other. The losses and the sample
image say whether the update changed what is learned.

Exit codes: 0 equal within the tolerance, 1 not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sd_scripts_patches import tiny, trial, versions
from sd_scripts_patches.tiny import Installation
from sd_scripts_patches.trial import Trial

STEPS, IMAGES = 20, 10
LIMIT_S, RUN_LIMIT_S = 900.0, 400.0
TOLERANCE = 0.001  # of a loss; other versions of PyTorch round differently, by about 0.00001 within these steps
PIXEL_TOLERANCE = 2.0  # of 255, the mean over the image

PIXELS = """
import sys
import numpy
from PIL import Image
old, new = (numpy.asarray(Image.open(path).convert("RGB")).astype(int) for path in sys.argv[1:])
print(float(abs(old - new).mean()) if old.shape == new.shape else 255.0)
"""


@dataclass(frozen=True)
class Outcome:
    """One training. sample: the image that it made, "" for none."""

    losses: list[float]
    sample: str


class NotTrained(RuntimeError):
    """A training did not complete; the message says which, and why."""


def run(job: trial.Job, what: str, trial_: Trial) -> None:
    """Wait for a process. Raises NotTrained, trial.LimitReached."""
    trial_.wait(job, RUN_LIMIT_S)
    if job.code != 0:
        raise NotTrained(f"{what} {job.outcome()}: {job.error()}")


def prepare(target: Installation, trial_: Trial) -> Path:
    """Make the tiny models and images; return their folder."""
    work = trial_.folder / "work"
    target.write_site(work)
    made = trial_.start(target.maker(work, IMAGES), trial_.environment(target, work), target.checkout, "make")
    run(made, f"{target.checkout}: making the tiny models", trial_)
    return work


def train(target: Installation, trial_: Trial, work: Path, name: str) -> Outcome:
    """Train in a folder NAME of the trial."""
    folder = trial_.folder / name
    folder.mkdir()
    target.write_site(folder)
    commands, caches = target.row.caching(work, folder)
    settings = {"TINY_LOSSES": str(folder / "losses"), "HANGPROOF_RUN": str(folder)}
    environment = trial_.environment(target, folder, **settings)
    arguments = target.row.arguments(
        work, folder / "made", "--sample_prompts", str(work / "prompts.txt"),
        max_train_steps=str(STEPS), sample_every_n_steps=str(STEPS), **caches,
    )  # fmt: skip
    for script, words in {**commands, target.row.SCRIPT: arguments}.items():
        line, label = target.command(*words, script=script), f"{name}-{Path(script).name}"
        job = trial_.start(line, environment, target.checkout, label)
        run(job, f"{target.checkout}: {script}", trial_)
    images = sorted((folder / "made" / "sample").glob("*.png"))
    return Outcome([loss for _, _, loss in tiny.losses(folder / "losses")], str(images[-1]) if images else "")


def losses_differ(old: list[float], new: list[float], tolerance: float) -> str:
    """Return how the losses differ by more than `tolerance` of a loss, "" when they do not."""
    if len(old) != STEPS or len(new) != STEPS:
        return f"OLD recorded {len(old)} losses and NEW {len(new)}, not {STEPS}"
    by = [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in zip(old, new, strict=True)]
    wrong = [step for step, part in enumerate(by, 1) if not part <= tolerance or not math.isfinite(new[step - 1])]
    return f"the losses differ from step {wrong[0]} on, by up to {max(by):.2g} of a loss" if wrong else ""


def samples_differ(python: Path, old: str, new: str) -> str:
    """Return how the sample images differ, "" when they are as good as equal."""
    if not old or not new:
        return f"{'OLD' if not old else 'NEW'} wrote no sample image"
    done = subprocess.run(
        [str(python), "-c", PIXELS, old, new], capture_output=True, text=True, timeout=120, check=True
    )
    mean = float(done.stdout)
    return f"the sample images differ by {mean:.2g} of 255 on average" if mean > PIXEL_TOLERANCE else ""


def unpack(checkout: Path, commit: str, folder: Path) -> Path:
    """Write the files of a commit of a checkout to `folder`, which is returned. Raises versions.VersionError."""
    archive = folder.with_name(f"{folder.name}.tar")
    versions.git(checkout, "archive", "--format=tar", f"--output={archive}", commit)
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return folder


def compare(old_text: str, new: Installation, tolerance: float = TOLERANCE) -> list[str]:
    """Train in both and return what differs. old_text: as the command line names it.

    Raises NotTrained, ValueError (two trainers), argparse.ArgumentTypeError, versions.VersionError, trial.LimitReached.
    """
    with Trial(LIMIT_S) as trial_:
        if re.fullmatch(r"[0-9a-f]{7,40}", old_text) and not Path(old_text).exists():
            old = Installation(unpack(new.checkout, old_text, trial_.folder / f"old-{new.trainer.key}"), new.python)
        else:
            old = trial.installation(old_text)
        if old.trainer != new.trainer:
            raise ValueError(f"OLD is {old.trainer.name} and NEW is {new.trainer.name}; name two of the same trainer")
        work = prepare(old, trial_)
        before, after = train(old, trial_, work, "old"), train(new, trial_, work, "new")
        losses = losses_differ(before.losses, after.losses, tolerance)
        return list(filter(None, [losses, samples_differ(old.python, before.sample, after.sample)]))


def main(arguments: list[str] | None = None) -> int:
    """Compare, print what differs, and return the exit code."""
    parser = argparse.ArgumentParser(description="Train the same 20 steps in two versions of a trainer and compare.")
    parser.add_argument("old", metavar="OLD", help="CHECKOUT, CHECKOUT@VENV, or a commit of NEW's checkout")
    parser.add_argument("new", metavar="NEW", type=trial.installation, help="CHECKOUT or CHECKOUT@VENV")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"part of a loss ({TOLERANCE})")
    options = parser.parse_args(arguments)
    try:
        differences = compare(options.old, options.new, options.tolerance)
    except (ValueError, argparse.ArgumentTypeError, versions.VersionError) as error:
        parser.error(str(error))
    except (NotTrained, trial.LimitReached) as error:
        differences = [str(error)]
    print("\n".join(differences) or "NEW trains as OLD: the losses and the sample image agree.")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
