"""`python tests/support/canary.py OLD NEW`: does an update of a trainer train as before? 20 fixed-seed tiny steps in both.

For those who pin a new commit of kohya's trainers. OLD and NEW are checkouts of one trainer, each optionally with its
environment (`CHECKOUT@VENV`); `git worktree add` makes a checkout of an old commit. Both train the same tiny weights on
the same images with the guards, one after the other. The losses say whether the update changed what is learned.

Exit codes: 0 equal within the tolerance, 1 not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sd_scripts_patches import tiny, trial
from sd_scripts_patches.tiny import Installation
from sd_scripts_patches.trial import Trial

STEPS, IMAGES = 20, 10
RUN_LIMIT_S = 400.0
TOLERANCE = 0.001  # of a loss; other versions of PyTorch round differently, by about 0.00001 within these steps


class NotTrained(RuntimeError):
    """A training did not complete; the message says which, and why."""


def run(job: trial.Job, what: str, trial_: Trial) -> None:
    """Wait for a process. Raises NotTrained."""
    trial_.wait(job, RUN_LIMIT_S)
    if job.code != 0:
        raise NotTrained(f"{what} {job.outcome()}: {job.error()}")


def train(target: Installation, trial_: Trial, work: Path, name: str) -> list[float]:
    """Train in a folder NAME of the trial; return the losses."""
    folder = trial_.folder / name
    folder.mkdir()
    target.write_site(folder)
    commands, caches = target.row.caching(work, folder)
    settings = {"TINY_LOSSES": str(folder / "losses"), "HANGPROOF_RUN": str(folder)}
    environment = trial_.environment(target, folder, **settings)
    arguments = target.row.arguments(work, folder / "made", max_train_steps=str(STEPS), **caches)
    for script, words in {**commands, target.row.SCRIPT: arguments}.items():
        line, label = target.command(*words, script=script), f"{name}-{Path(script).name}"
        job = trial_.start(line, environment, target.checkout, label)
        run(job, f"{target.checkout}: {script}", trial_)
    return [loss for _, _, loss in tiny.losses(folder / "losses")]


def losses_differ(old: list[float], new: list[float], tolerance: float) -> str:
    """Return how the losses differ by more than `tolerance` of a loss, "" when they do not."""
    if len(old) != STEPS or len(new) != STEPS:
        return f"OLD recorded {len(old)} losses and NEW {len(new)}, not {STEPS}"
    by = [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in zip(old, new, strict=True)]
    wrong = [step for step, part in enumerate(by, 1) if not part <= tolerance or not math.isfinite(new[step - 1])]
    return f"the losses differ from step {wrong[0]} on, by up to {max(by):.2g} of a loss" if wrong else ""


def compare(old: Installation, new: Installation, tolerance: float = TOLERANCE) -> str:
    """Train in both and return what differs, "" for nothing. Raises NotTrained."""
    with Trial() as trial_:
        work = trial_.folder / "work"
        old.write_site(work)
        made = trial_.start(old.maker(work, IMAGES), trial_.environment(old, work), old.checkout, "make")
        run(made, f"{old.checkout}: making the tiny models", trial_)
        return losses_differ(train(old, trial_, work, "old"), train(new, trial_, work, "new"), tolerance)


def main(arguments: list[str] | None = None) -> int:
    """Compare, print what differs, and return the exit code."""
    parser = argparse.ArgumentParser(description="Train the same 20 steps in two versions of a trainer and compare.")
    for name in ("OLD", "NEW"):
        parser.add_argument(name.lower(), metavar=name, type=trial.installation, help="CHECKOUT or CHECKOUT@VENV")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"part of a loss ({TOLERANCE})")
    options = parser.parse_args(arguments)
    if options.old.trainer != options.new.trainer:
        parser.error(f"OLD is {options.old.trainer.name} and NEW is {options.new.trainer.name}")
    try:
        difference = compare(options.old, options.new, options.tolerance)
    except NotTrained as error:
        difference = str(error)
    print(difference or "NEW trains as OLD: the losses agree.")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
