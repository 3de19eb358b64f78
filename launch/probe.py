"""`python -m launch probe [RUN]` and `ladder RUN`: train a few steps in growing settings; the first that does not train says what is wrong.

A rung is one setting. The probe's rungs are one process, then all, with 0 and with 1 loader worker: does the start of the group hang?
The ladder's are 2 images, 100 and all: already 2 fail where the model, the GPU or a setting is wrong; only more of them where an
image is broken, a disk slow, or memory grows with the data set. The image that the error names is to blame.

Decision: the real script is started, instead of checks of drivers and ports: a group hangs in ways that no check lists. A rung
is a run in a data folder of its own on the same disk, with links to the images, watched as the monitor watches. Nothing of it is
left, and nothing of the run is changed. Trackers are used as the run uses them, because they are one of the things that hang.

A program that goes on, such as the page's server, starts the command as a process: SIGTERM ends it with all that it has started.
"""

import argparse
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch import short_run
from launch.common import LaunchError, report
from launch.short_run import FAILS, HANGS, TRAINS, Meter, Result
from runs.command import model_files
from runs.dataset import images_in
from runs.folders import render
from runs.manage import size_text
from runs.paths import datasets_dir, outputs_dir, run_folder
from runs.spec import RunSpec, load, make, save

NAME = "probe"
STEPS, MOST_STEPS = 3, 5
LIMIT_S = {"probe": 110.0, "ladder": 900.0}  # for all rungs; with the end of its last rung, the probe takes two minutes
IMAGES = 4  # of a probe, and at least one for each process
RUNGS = (2, 100)  # images of the ladder, and all
GROWTH_BYTES, GROWTH = 500e6, 1.5  # memory grows with the data set: by so much, and so many times
SLOWER_S, SLOWER = 0.5, 2.0  # a step or an image takes longer with more images: by so much, and so many times
SKIPPED = "skipped"
TINY = {
    "name": "probe", "trigger": "prb", "model": "tiny-flux", "tier": "16G", "backend": "diffusers", "resolution": 64,
    "mixed_precision": "no", "repeats": 1,
}  # fmt: skip


@dataclass
class Rung:
    """One setting and its result. outcome: TRAINS, HANGS, FAILS, SLOW (still working when its time was over) or SKIPPED.

    text: what happened, as sentences. report: `ranks.as_json`; lines: the same as text. step_s: seconds of the quickest of its last
    steps; image_s: for each further image.
    """

    name: str
    images: int
    processes: int = 1
    workers: int = 0
    outcome: str = SKIPPED
    text: str = ""
    steps: int = 0
    step_s: float | None = None
    image_s: float = 0.0
    took_s: float = 0.0
    host_bytes: int = 0
    gpu_bytes: int = 0
    report: dict[str, Any] | None = None
    lines: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What is wrong. kind: fine, basic, image, scale, slow. image: the file in the data set that fails, "" for none."""

    kind: str
    text: str
    advice: str
    image: str = ""


def group_rungs(processes: int, images: int = IMAGES) -> list[Rung]:
    """One process, all processes with 0 and with 1 loader workers. For one GPU: one process with 0 and with 1."""
    many = f"{processes} processes" if processes > 1 else "1 process"
    made = [Rung(f"{many}, {n} loader worker{'s' * (n != 1)}", images, processes, n) for n in (0, 1)]
    return made if processes == 1 else [Rung("1 process, 0 loader workers", images), *made]


def image_rungs(images: int, processes: int = 1, workers: int = 0) -> list[Rung]:
    """The rungs for so many images: 2, 100, all, each only where there are more than in the one before."""
    return [
        Rung(f"all {n:,} images" if n == images and n > 2 else _images(n), n, processes, workers)
        for n in sorted({min(n, images) for n in (*RUNGS, images)})
    ]


def _images(number: int) -> str:
    return f"{number:,} image{'s' * (number != 1)}"


class Climb:
    """Tries the rungs for the run in `folder`, or for the tiny model without one. Changes HANGPROOF_DATA of this process meanwhile.

    Raises LaunchError: it cannot be tried (a GPU is in use, no images, a model file is missing). RunError: the run is wrong.
    """

    def __init__(self, folder: Path | None, gpus: int, limit_s: float, progress: Callable[[str], None]):
        self.began_s, self.limit_s, self.progress = time.monotonic(), limit_s, progress
        self.spec = load(folder) if folder else make({**TINY, "gpus": gpus})
        self.source = datasets_dir() / self.spec.slug
        self.images = images_in(self.source) if folder else []
        if folder and not self.images:
            raise LaunchError(f"{self.source} has no images; add some, then try again")
        self.files = model_files(self.spec) if folder else {}
        self.failure: Result | None = None

    def climb(self, rungs: list[Rung], steps: int) -> None:
        """Try the rungs up to the first that fails, and fill in their results; `failure` is that of the last one."""
        gpus = max(rung.processes for rung in rungs)
        with short_run.gpus_of(f"{NAME} of {self.spec.name}", gpus) as queue, short_run.scratch(NAME) as root:
            if not self.images:
                self.source = root / "images"
                self.images = list(_drawn(self.source, max(rung.images for rung in rungs)))
            spec = short_run.reduced(
                self.spec, NAME, steps, self.files, gradient_accumulation=1, save_every_n_steps=0,
                sample_every_n_steps=0, prompts=[],
            )  # fmt: skip
            for number, rung in enumerate(rungs, 1):
                left_s = self.limit_s - (time.monotonic() - self.began_s)
                if self.failure is not None:
                    rung.text = "Not tried, because the one before it did not train."
                elif left_s <= 1:
                    rung.text = "Not tried: the time was over."
                else:
                    self.progress(f"{number} of {len(rungs)}: {rung.name} …")
                    self._try(rung, spec, left_s / (len(rungs) - number + 1), queue.handles())
                    memory = size_text(rung.host_bytes)
                    pace = f", {rung.step_s:.3g} s a step, {memory} of memory" if rung.step_s else ""
                    end = f"{rung.outcome}, {rung.took_s:.0f} s{pace}. {rung.text}".strip()
                    self.progress(f"{number} of {len(rungs)}: {rung.name}: {end}")

    def _try(self, rung: Rung, spec: RunSpec, limit_s: float, inherit: tuple[int, ...]) -> None:
        """A run of a few steps, to its end, its hang or its limit. Nothing of it lives on."""
        data, run = datasets_dir() / NAME, outputs_dir() / NAME
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        images = self._evenly(rung.images)
        if not data.is_dir() or len(images_in(data)) != len(images):  # else the caches of the rung before are used
            shutil.rmtree(data, ignore_errors=True)
            for path in images:
                short_run.link_image(path, data / path.relative_to(self.source))
        spec = spec.changed(gpus=rung.processes, workers=rung.workers)
        save(run, spec)
        render(run, spec)
        if found := short_run.problems(run):
            raise LaunchError(f"it cannot be started: {'; '.join(found)}")
        began_s, meter = time.monotonic(), Meter()
        try:
            result = short_run.run(run, limit_s, meter.see, inherit=inherit)
        finally:
            meter.close()
        rung.took_s, rung.outcome, rung.steps = round(time.monotonic() - began_s, 1), result.outcome, result.steps
        # The quickest: the first step is slower than the others, and so is one that other programs disturb.
        rung.step_s = round(min(meter.intervals), 3) if meter.intervals else result.step_s
        rung.image_s, rung.report, rung.lines = meter.image_s(), result.report, result.lines
        rung.host_bytes, rung.gpu_bytes = meter.memory.get("host_bytes", 0), meter.memory.get("gpu_bytes", 0)
        rung.text = "" if result.outcome == TRAINS else said(result)
        if result.outcome in (HANGS, FAILS):
            self.failure = result

    def _evenly(self, count: int) -> list[Path]:
        """So many images, spread over the data set: those of one camera are often beside each other."""
        count = min(count, len(self.images))
        return [self.images[index * len(self.images) // count] for index in range(count)]

    def blamed(self, rungs: list[Rung]) -> str:
        """The image of the rung that failed which its error names, if it names one only; else ""."""
        if self.failure is None:
            return ""
        images = self._evenly(next(rung.images for rung in reversed(rungs) if rung.outcome != SKIPPED))
        text = f"{self.failure.note}\n{self.failure.text}\n{self.failure.log[-4000:]}"
        named = [path.relative_to(self.source).as_posix() for path in images if _named(path, text)]
        return named[0] if len(named) == 1 else ""

    def advice(self) -> str:
        """What to do against the cause of the failure; "" where nothing failed."""
        return short_run.what_to_change(self.spec, self.failure) if self.failure else ""

    def answer(self, run: Path | None, rungs: list[Rung], found: Verdict) -> dict[str, Any]:
        """What the command reports; see `probe`."""
        return {
            "ok": found.kind == "fine", "kind": found.kind, "verdict": found.text, "advice": found.advice,
            "image": found.image, "run": run.name if run else "", "model": self.spec.model,
            "stages": [asdict(rung) for rung in rungs], "took_s": round(time.monotonic() - self.began_s, 1),
        }  # fmt: skip


def _drawn(folder: Path, count: int) -> Iterator[Path]:
    from PIL import Image

    folder.mkdir()
    for number in range(count):
        path = folder / f"{number}.png"
        Image.new("RGB", (64, 64), (40 * number % 256, 90, 160)).save(path)
        path.with_suffix(".txt").write_text(f"prb, number {number}\n", encoding="utf-8")
        yield path


def _named(path: Path, text: str) -> bool:
    """Whether a text has the name of an image, or of a cache of it (sd-scripts: STEM_0512x0512_flux.npz)."""
    pattern = rf"(?<![\w.-])({re.escape(path.name)}(?!\w)|{re.escape(path.stem)}(_\w+)?\.npz)"
    return re.search(pattern, text) is not None


def said(found: Result) -> str:
    """What happened, as sentences."""
    if found.cause is None:
        return found.text
    where = found.text if found.outcome == HANGS else ""
    return " ".join(filter(None, (where, f"{found.cause.title}.", found.cause.explanation)))


# What the rungs say ---------------------------------------------------------------------------------------------------------


def judge_group(found: Sequence[Rung], advice: str = "") -> Verdict:
    """What the rungs of a probe say. advice: against the failed rung's cause."""
    good, bad = [r for r in found if r.outcome == TRAINS], [r for r in found if r.outcome in (HANGS, FAILS)]
    if not bad:
        if late := next((r for r in found if r.outcome != TRAINS), None):
            return Verdict("slow", f"{late.name}: {late.text}", "Nothing hung. Give the probe more time: --limit 600.")
        return Verdict("fine", f"{'; '.join(r.name for r in good)}: all train.", "The run can start.")
    first = bad[0]
    before = f"{good[-1].name}: trains. " if good else ""
    ends = "failed" if first.outcome == FAILS else "stops" if first.processes == 1 else "stop"
    if first.outcome == HANGS:
        advice = str((first.report or {}).get("verdict", {}).get("advice", "")) or advice
    if first.processes > 1 and first.workers == 1 and any(r.processes > 1 and r.workers == 0 for r in good):
        advice = f"Use 0 data loader workers. {advice}".strip()
    text = f"{before}{first.name}: {ends}. {first.text}"
    return Verdict("basic", text, advice or "Fix this, then probe again.")


def judge_images(found: Sequence[Rung], image: str = "", advice: str = "") -> Verdict:
    """What the rungs of a ladder say. image: the one that the error of the failed rung names."""
    failed = next((r for r in found if r.outcome in (HANGS, FAILS)), None)
    if failed is None:
        return _grown(found)
    if image:
        change = "Remove this image or export it again as JPEG or PNG, then start the run again."
        return Verdict("image", f"One image stops the training: {image}. {failed.text}".strip(), change, image)
    if failed is found[0]:
        text = f"Already {_images(failed.images)} fail, so it is not the data set. {failed.text}"
        return Verdict("basic", text, advice or "Read the log of the run.")
    before = found[list(found).index(failed) - 1]
    text = f"{before.name} train, {failed.name} do not, and no single image is to blame. {failed.text}"
    return Verdict("scale", text, advice or "Use 0 data loader workers, or train with fewer images at once.")


def _grown(found: Sequence[Rung]) -> Verdict:
    """What rungs of which none fails say: fine, or what grows with the number of images."""
    trained = [rung for rung in found if rung.outcome == TRAINS]
    late = next((rung for rung in found if rung.outcome != TRAINS), None)
    more_time = "Give it more time: --limit 3600."
    if not trained:
        text = f"{late.name if late else 'It'}: {late.text if late else ''}".strip()
        return Verdict("slow", f"Nothing failed, but nothing trained either. {text}", more_time)
    first, last = trained[0], trained[-1]
    if last.host_bytes - first.host_bytes > GROWTH_BYTES and last.host_bytes > GROWTH * first.host_bytes:
        text = f"Memory grows with the data set: {size_text(first.host_bytes)} with {first.name}, {size_text(last.host_bytes)} with {last.name}."
        return Verdict("scale", text, "Cache to disk (cache_latents_to_disk) or use 0 data loader workers.")
    for what, before, after in (
        ("A step", first.step_s or 0.0, last.step_s or 0.0),
        ("Encoding an image", first.image_s, last.image_s),
    ):
        if after - before > SLOWER_S and after > SLOWER * before:
            text = f"{what} takes longer with more images: {before:.2g} s with {first.name}, {after:.2g} s with {last.name}."
            change = "Look at the disk's speed under Doctor. Images on a network disk: copy them to a local one."
            return Verdict("scale", text, change)
    if late is not None:
        return Verdict("slow", f"{last.name} train. {late.name}: {late.text} Nothing failed until then.", more_time)
    return Verdict("fine", f"Nothing is wrong: {', '.join(rung.name for rung in found)} train.", "The run can start.")


# The commands ---------------------------------------------------------------------------------------------------------------


def probe(
    run: Path | None, gpus: int, steps: int = STEPS, limit_s: float = LIMIT_S["probe"],
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Probe a run, or without one the tiny model, with 1 and with `gpus` processes of this machine, 1 to 5 steps each.

    Returns:
        {"ok": bool, "kind": fine|basic|image|scale|slow, "verdict": sentences, "advice": what to do, "image": the image's file in the
        data set or "", "run": str, "model": str, "stages": [Rung as a dict], "took_s": float}

    Raises LaunchError, RunError: see `Climb`.
    """
    work = Climb(run, gpus, limit_s, progress)
    rungs = group_rungs(gpus, max(IMAGES, gpus * work.spec.batch_size))
    work.climb(rungs, steps)
    return work.answer(run, rungs, judge_group(rungs, work.advice()))


def ladder(
    run: Path, limit_s: float = LIMIT_S["ladder"], progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Climb the ladder of a run; the same as `probe` returns. Raises LaunchError, RunError."""
    work = Climb(run, 1, limit_s, progress)
    rungs = image_rungs(len(work.images), work.spec.gpus, work.spec.workers)
    work.climb(rungs, STEPS + 1)
    return work.answer(run, rungs, judge_images(rungs, work.blamed(rungs), work.advice()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m launch probe` and `ladder`."""
    if parser.prog.endswith(" ladder"):
        short_run.add_arguments(parser, LIMIT_S["ladder"], "everything")
        return
    parser.add_argument("run", metavar="RUN", nargs="?", help="name, slug or folder of a run; default: the tiny model")
    parser.add_argument("--gpus", type=int, default=0, help="processes of this machine (default: the run's, else 2)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, choices=range(1, MOST_STEPS + 1), help="steps of each stage"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S["probe"], help="seconds for all stages (default: 110)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: every rung trains. 1: one does not; the verdict says which and why."""
    short_run.end_on_sigterm()
    folder = run_folder(args.run) if args.run else None

    def progress(line: str) -> None:
        print(line, flush=True)

    if args.limit <= 0:
        raise LaunchError("--limit must be a number of seconds")
    if folder is not None and args.command == "ladder":
        answer = ladder(folder, args.limit, progress)
    else:
        gpus = args.gpus or (load(folder).gpus if folder else 2)
        if gpus < 1:
            raise LaunchError("--gpus must be at least 1")
        answer = probe(folder, gpus, args.steps, args.limit, progress)
        for stage in answer["stages"]:
            if stage["outcome"] != TRAINS and stage["lines"]:
                print("\n".join(("", f"{stage['name']}:", *(f"  {line}" for line in stage["lines"]))))
    report(args, f"\n{answer['verdict']}\n{answer['advice']}", answer)
    return 0 if answer["ok"] else 1
