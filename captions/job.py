"""The loop over the images: one caption after the other, each stored at once, each wait with a limit.

An image that fails is left for the next start, and the job goes on. It stops with the reason when the first images all
fail, when many in a row fail, or when the next one would meet the same refusal.
"""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from captions.text import NoCaption, cleaned
from captions.work import Picture, Work, upright
from guards.deadline import Deadline
from runs.files import RunError

LOAD_S = 900.0  # a model to load: 1.6 GB from a slow network disk
IMAGE_S = 300.0  # one image: the large model on a slow processor
FIRST_FAILURES = 5  # images that fail before one succeeds
FAILURES_IN_A_ROW = 20
EXIT_STUCK = 75
Describe = Callable[[Any], str]
say = functools.partial(print, flush=True)  # a line for whoever watches the job


@dataclass
class Report:
    """What a job did. left: images without a caption; reason: why it stopped early, "" when it did not."""

    written: int = 0
    failed: int = 0
    left: int = 0
    reason: str = ""


def limited(seconds: float, what: str) -> Deadline:
    """End the process when the block takes longer: a model that hangs in the driver cannot be interrupted."""

    def end(limit_s: float, waited_for: str) -> None:
        sys.stderr.write(
            f"captions: waited {limit_s:g} s for {waited_for}, so the job ended. All captions so far are stored; "
            "start it again to continue.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_STUCK)

    return Deadline(seconds, what, end)


def run(
    work: Work,
    load: Callable[[], Describe],
    frame: Callable[[str], str] = str,
    load_s: float = LOAD_S,
    image_s: float = IMAGE_S,
) -> Report:
    """Write the missing captions of `work`, and print one line about each image. Raises RunError: the engine cannot be
    loaded, or a caption cannot be stored.

    Args:
        load: returns the function from an image to its caption; called once, when there is something to do. frame: what
            each caption becomes. load_s, image_s: limits in seconds for the model to load, and for one image.
    """
    report, missing = Report(), work.missing()
    if not missing:
        return report
    with limited(load_s, "the model to load"):
        describe = load()
    row, last = 0, ""
    for number, picture in enumerate(missing):
        done, total = work.counts()
        say(f"Image {done + 1} of {total}: {picture.name}")
        try:
            with limited(image_s, f"a caption of {picture.name}"):
                caption = frame(_caption(describe, picture))
        except NoCaption as problem:
            last = str(problem)
            row, report.failed = row + 1, report.failed + 1
            say(f"{picture.name}: no caption: {last}")
            if problem.fatal or row >= (FAILURES_IN_A_ROW if report.written else FIRST_FAILURES):
                report.left = len(missing) - number - 1
                report.reason = last
                break
            continue
        work.store(picture, caption)
        row, report.written = 0, report.written + 1
    if not report.written and report.failed and not report.reason:
        report.reason = last  # fewer images than FIRST_FAILURES, and all failed
    return report


def _caption(describe: Describe, picture: Picture) -> str:
    """Raises NoCaption."""
    try:
        return cleaned(describe(upright(picture)))
    except RunError as error:
        raise NoCaption(str(error)) from error
    except MemoryError as error:
        raise NoCaption("out of memory; use a smaller model", fatal=True) from error
    except (OSError, ValueError, RuntimeError, TypeError, IndexError) as error:  # of the engines, on one image
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise NoCaption(reason, fatal="out of memory" in reason) from error


def summary(report: Report) -> str:
    """One sentence about a job that ended."""
    text = f"{report.written} caption{'s' * (report.written != 1)} written"
    if report.failed:
        text += f", {report.failed} failed"
    if report.left:
        text += f", {report.left} left"
    return f"{text}."
