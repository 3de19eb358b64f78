"""`python -m launch ladder RUN`: what is wrong with this run, the setup or the data set? It trains with 2 images, with 100, and with all.

Decision: the same settings with more and more images tell a basic problem (the model, the GPU, a setting: already two images fail)
from one of scale (a broken image, memory that grows with the data set, a slow disk, loader workers: only a larger rung fails).
Where a larger rung fails, or other images train and these do not, the images are halved until one is left: that one is named.
Each rung is a run of a few steps in a data folder of its own on the same disk, with links to the images: nothing of the run is changed.

A program that goes on, such as the page's server, starts the command as a process: SIGTERM ends it with all that it has started.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch import short_run
from launch.common import LaunchError, report
from launch.forecast import size
from launch.meter import Meter
from launch.short_run import FAILS, HANGS, SLOW, TRAINS, Result
from runs import dataset
from runs.command import model_files
from runs.dataset import images_in
from runs.files import RunError
from runs.folders import render
from runs.paths import datasets_dir, outputs_dir
from runs.spec import RunSpec, load, save

NAME = "ladder"
RUNGS = (2, 100)  # and all
STEPS = 4
LIMIT_S = 900.0  # for everything
READ_SHARE = 0.2  # of the limit, for reading every image
FIRST_SHARE = 0.4  # of the limit, for the first rung
GROWTH_BYTES, GROWTH = 500e6, 1.5  # memory grows with the data set: by so much, and so many times
SLOWER_S, SLOWER = 0.5, 2.0  # a step or an image takes longer with more images: by so much, and so many times
SKIPPED = "skipped"


@dataclass
class Rung:
    """One rung and its result. outcome: TRAINS, HANGS, FAILS, SLOW or SKIPPED. text: what happened, "" where it trains."""

    name: str
    images: int
    outcome: str = SKIPPED
    text: str = ""
    took_s: float = 0.0
    step_s: float | None = None
    image_s: float = 0.0  # for each further image
    host_bytes: int = 0
    gpu_bytes: int = 0


@dataclass
class Finding:
    """What is wrong. kind: fine, basic, image, scale, slow. image: the file in the data set that fails, "" for none."""

    kind: str
    text: str
    advice: str
    image: str = ""


class OutOfTime(Exception):
    """The limit is over."""


def rungs(images: int) -> list[Rung]:
    """The rungs for so many images: 2, 100, all, each only where there are more than in the one before."""
    sizes = sorted({min(number, images) for number in (*RUNGS, images)})
    return [
        Rung(f"all {number:,} images" if number == images and number > 2 else _images(number), number)
        for number in sizes
    ]


def _images(number: int) -> str:
    return f"{number:,} image{'s' * (number != 1)}"


def ladder(
    folder: Path, limit_s: float = LIMIT_S, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Climb the ladder for the run in `folder`. Changes HANGPROOF_DATA of this process while it works.

    Args:
        limit_s: for everything. progress: called with a line when something begins or has ended.

    Returns:
        {"ok": bool, "kind": fine|basic|image|scale|slow, "finding": sentences, "advice": what to do, "image": the image's file in
        the data set or "", "run": str, "rungs": [Rung as a dict], "took_s": float}

    Raises:
        LaunchError: it cannot be tried (a GPU is in use, no images, a model file is missing). runs.files.RunError: the run is wrong.
    """
    began_s, spec = time.monotonic(), load(folder)
    source = datasets_dir() / spec.slug
    images = images_in(source)
    if not images:
        raise LaunchError(f"{source} has no images; add some, then try again")
    files = model_files(spec)
    with short_run.gpus_of(f"ladder of {spec.name}", spec.gpus) as queue, short_run.scratch(NAME):
        few_steps = spec.changed(
            name=NAME, nodes=1, max_train_steps=STEPS, save_every_n_steps=0, save_every_n_epochs=0, sample_every_n_steps=0,
            prompts=[], save_dir="", store="", spend_limit=0.0, extra={**files, **short_run.without_uploads(spec)},
        )  # fmt: skip
        climb = Climb(few_steps, source, images, began_s + limit_s, limit_s, queue.handles(), progress)
        finding = climb.climb()
    return {
        "ok": finding.kind == "fine", "kind": finding.kind, "finding": finding.text, "advice": finding.advice,
        "image": finding.image, "run": folder.name, "rungs": [asdict(rung) for rung in climb.rungs],
        "took_s": round(time.monotonic() - began_s, 1),
    }  # fmt: skip


class Climb:
    """The rungs, one after the other, and the search for one image."""

    def __init__(
        self,
        spec: RunSpec,
        source: Path,
        images: list[Path],
        until_s: float,
        limit_s: float,
        inherit: tuple[int, ...],
        progress: Callable[[str], None],
    ):
        self.spec, self.source, self.images = spec, source, images
        self.until_s, self.limit_s, self.inherit, self.progress = until_s, limit_s, inherit, progress
        self.rungs = rungs(len(images))
        self.unreadable: dict[Path, str] = {}

    def climb(self) -> Finding:
        """The finding."""
        self._read_images()
        good: list[Path] = []
        for number, rung in enumerate(self.rungs):
            if self._left_s() <= 1:
                rung.text = "Not tried: the time was over."
                continue
            tried = self._evenly(rung.images)
            share = FIRST_SHARE * self.limit_s if number == 0 else self._left_s()
            found = self._rung(rung, tried, share)
            if rung.outcome in (HANGS, FAILS):
                for later in self.rungs[number + 1 :]:
                    later.text = "Not tried, because fewer images fail already."
                return self._explain(number, tried, good, found)
            if rung.outcome == TRAINS:
                good = tried[:2]
        return compare(self.rungs)

    def _evenly(self, count: int) -> list[Path]:
        """So many images, spread over the data set: those of one camera are often beside each other."""
        return [self.images[index * len(self.images) // count] for index in range(count)]

    def _read_images(self) -> None:
        """Open and decode every image, as long as there is time: that alone finds most broken ones."""
        self.progress(f"Reading {_images(len(self.images))} …")
        until_s, read = time.monotonic() + READ_SHARE * self.limit_s, 0
        for path in self.images:
            if time.monotonic() > until_s:
                break
            read += 1
            try:
                dataset.check_image(path)
            except RunError as error:
                self.unreadable[path] = str(error)
        bad = len(self.unreadable)
        self.progress(f"Read {read:,} of {_images(len(self.images))}: {bad or 'none'} cannot be read")

    def _rung(self, rung: Rung, images: Sequence[Path], limit_s: float) -> Result:
        self.progress(f"{rung.name} …")
        began_s, meter = time.monotonic(), Meter()
        try:
            found = self._train(images, limit_s, meter)
        finally:
            meter.close()
        rung.outcome, rung.took_s = found.outcome, round(time.monotonic() - began_s, 1)
        # The quickest: the first step is slower than the others, and so is one that other programs disturb.
        rung.step_s = round(min(meter.intervals), 3) if meter.intervals else found.step_s
        rung.image_s = meter.image_s()
        rung.host_bytes, rung.gpu_bytes = meter.memory.get("host_bytes", 0), meter.memory.get("gpu_bytes", 0)
        rung.text = "" if found.outcome == TRAINS else _said(found)
        pace = f", {rung.step_s:.3g} s a step, {size(rung.host_bytes)} of memory" if rung.step_s else ""
        self.progress(f"{rung.name}: {rung.outcome}, {rung.took_s:.0f} s{pace}")
        return found

    def _train(self, images: Sequence[Path], limit_s: float, meter: Meter | None = None) -> Result:
        """A run of a few steps with these images."""
        data, run = datasets_dir() / NAME, outputs_dir() / NAME
        for old in (data, run):
            shutil.rmtree(old, ignore_errors=True)
        run.mkdir(parents=True)
        for path in images:
            _link(path, data / path.relative_to(self.source))
        save(run, self.spec)
        render(run, self.spec)
        short_run.refuse_unstartable(run)

        def see(attempt: Any, view: Any) -> str:
            if meter is not None:
                meter.see(attempt, view)
            return ""

        return short_run.run(run, min(limit_s, self._left_s()), see, inherit=self.inherit)

    def _left_s(self) -> float:
        return max(0.0, self.until_s - time.monotonic())

    # Where one fails --------------------------------------------------------------------------------------------------------

    def _explain(self, number: int, failed: list[Path], good: list[Path], found: Result) -> Finding:
        """Why this rung fails: one image, the number of images, or everything."""
        what, advice = _said(found), short_run.what_to_change(self.spec, found)
        self.each_s = 3 * max(self.rungs[number].took_s, 20.0)
        try:
            if number == 0:
                others = [path for path in self.images if path not in failed and path not in self.unreadable]
                good = [others[0], others[-1]] if others else []
                if not good or self._fails(good):
                    advice = advice or "Read the log of the run."
                    return Finding(
                        "basic", f"Already {_images(len(failed))} fail, so it is not the data set. {what}", advice
                    )
            image = self._search(failed, good, found)
        except OutOfTime as left:
            return Finding(
                "scale",
                f"{self.rungs[number].name} fail, fewer train. {what} {left}",
                advice or "Give it more time: --limit 3600.",
            )
        if image is not None:
            name = image.relative_to(self.source).as_posix()
            why = self.unreadable.get(image, "") or self.last_failure
            return Finding(
                "image", f"One image stops the training: {name}. {why}".strip(),
                "Remove this image or export it again as JPEG or PNG, then start the run again.", name,
            )  # fmt: skip
        text = f"{_images(len(good) or 2)} train, {self.rungs[number].name} do not, and no single image is to blame. {what}"
        return Finding("scale", text, advice or "Use 0 data loader workers, or train with fewer images at once.")

    def _search(self, failed: list[Path], good: list[Path], found: Result) -> Path | None:
        """The image of `failed` that fails alone beside `good` ones; None when no single one does."""
        hints = f"{found.note}\n{found.text}\n{found.log[-4000:]}"
        suspects = [path for path in failed if path in self.unreadable]
        suspects += [path for path in failed if path not in suspects and _named(path, hints)][:3]
        for path in suspects:
            if self._fails([*good, path]):
                return path
        left = [path for path in failed if path not in good]
        while len(left) > 1:
            half = left[: len(left) // 2]
            self.progress(f"Searching: {_images(len(left))} left …")
            left = half if self._fails([*good, *half]) else left[len(half) :]
        return left[0] if left and self._fails([*good, *left]) else None

    def _fails(self, images: Sequence[Path]) -> bool:
        if self._left_s() <= 1:
            raise OutOfTime("The time was over before the search for one image ended.")
        found = self._train(images, self.each_s)
        if found.outcome == SLOW and self._left_s() <= 1:
            raise OutOfTime("The time was over before the search for one image ended.")
        failed = found.outcome in (HANGS, FAILS)
        if failed:
            self.last_failure = _said(found)
        return failed

    each_s = 60.0
    last_failure = ""


def _link(path: Path, copy: Path) -> None:
    """Put an image and its caption at `copy`, without copying where the disk allows it."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    for file in (path, path.with_suffix(".txt")):
        if file.is_file():
            target = copy.with_suffix(file.suffix)
            try:
                os.link(file, target)
            except OSError:
                shutil.copyfile(file, target)


def _named(path: Path, text: str) -> bool:
    return path.name in text or f"{path.stem}.npz" in text or f"{path.stem}_" in text


def _said(found: Result) -> str:
    """What happened, as sentences."""
    if found.cause is None:
        return found.text
    explanation = found.cause.explanation
    if found.outcome == HANGS and found.text:
        explanation = f"{explanation} {found.text}"
    return f"{found.cause.title}. {explanation}".strip()


def compare(found: Sequence[Rung]) -> Finding:
    """What rungs of which none fails say: fine, or what grows with the number of images."""
    trained = [rung for rung in found if rung.outcome == TRAINS]
    late = next((rung for rung in found if rung.outcome != TRAINS), None)
    if not trained:
        text = f"{late.name if late else 'It'}: {late.text if late else ''}".strip()
        return Finding(
            "slow", f"Nothing failed, but nothing trained either. {text}", "Give it more time: --limit 3600."
        )
    first, last = trained[0], trained[-1]
    grown = last.host_bytes - first.host_bytes
    if grown > GROWTH_BYTES and last.host_bytes > GROWTH * first.host_bytes:
        text = f"Memory grows with the data set: {size(first.host_bytes)} with {first.name}, {size(last.host_bytes)} with {last.name}."
        return Finding("scale", text, "Cache to disk (cache_latents_to_disk) or use 0 data loader workers.")
    for what, before, after in (
        ("A step", first.step_s or 0.0, last.step_s or 0.0),
        ("Encoding an image", first.image_s, last.image_s),
    ):
        if after - before > SLOWER_S and after > SLOWER * before:
            text = f"{what} takes longer with more images: {before:.2g} s with {first.name}, {after:.2g} s with {last.name}."
            return Finding(
                "scale",
                text,
                "Look at the disk's speed under Doctor. Images on a network disk: copy them to a local one.",
            )
    if late is not None:
        text = f"{last.name} train. {late.name}: {late.text} Nothing failed until then."
        return Finding("slow", text, "Give it more time: --limit 3600.")
    names = ", ".join(rung.name for rung in found)
    return Finding("fine", f"Nothing is wrong: {names} train.", "The run can start.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m launch ladder`."""
    short_run.add_arguments(parser, LIMIT_S, "everything")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: nothing is wrong. 1: something is; the finding says what."""
    folder = short_run.begin(args)
    answer = ladder(folder, args.limit, lambda line: print(line, flush=True))
    report(args, f"\n{answer['finding']}\n{answer['advice']}", answer)
    return 0 if answer["ok"] else 1
