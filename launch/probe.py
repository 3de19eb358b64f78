"""`python -m launch probe RUN` or `--gpus N`: does it train with one process, and with N? Known in two minutes, not in the morning.

Decision: the real script is started, three times with a few steps, instead of checks of drivers and ports: a group that hangs
does so in ways that no check lists. Each stage is a run in a temporary data folder (the run's own settings and base model, a few
of its images; or the tiny model), watched as the monitor watches, until it ends, hangs or has used its share of the
time. Nothing of it is left, and nothing of the run is changed. Trackers are used as the run uses them, because they are one
of the things that hang.

A program that goes on, such as the page's server, starts the command as a process: SIGTERM ends it with all that it has started.
"""

import argparse
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch import short_run
from launch.common import LaunchError, report
from launch.short_run import FAILS, HANGS, SLOW, TRAINS
from monitor.gpu.queue import GpuQueue
from runs.command import model_files
from runs.dataset import images_in
from runs.folders import create
from runs.paths import datasets_dir, outputs_dir, run_folder
from runs.spec import RunSpec, load, make

NAME = "probe"
STEPS, MOST_STEPS = 3, 5
TOTAL_S = 110.0  # all stages together; below two minutes with the last one's end
POLL_S = 0.25
QUIET_S = short_run.QUIET_S
IMAGES = 4  # of a run's data set, and at least one for each process
TINY = {
    "name": "probe", "trigger": "prb", "model": "tiny-flux", "tier": "16G", "backend": "diffusers", "resolution": 64,
    "mixed_precision": "no", "repeats": 1,
}  # fmt: skip
SKIPPED = "skipped"


@dataclass
class Stage:
    """One stage and its result. outcome: TRAINS, HANGS, FAILS, SLOW (still working when its time was over) or SKIPPED.

    text: a sentence on it. report: `ranks.as_json`; lines: the same as text. step_s: seconds of its last step.
    """

    name: str
    processes: int
    workers: int
    outcome: str = SKIPPED
    text: str = ""
    steps: int = 0
    step_s: float | None = None
    took_s: float = 0.0
    report: dict[str, Any] | None = None
    lines: list[str] = field(default_factory=list)


def stages(gpus: int) -> list[Stage]:
    """One process, N processes with 0 and with 1 loader workers. For one GPU: one process with 0 and with 1."""
    many = f"{gpus} processes" if gpus > 1 else "1 process"
    made = [Stage(f"{many}, {n} loader worker{'s' * (n != 1)}", gpus, n) for n in (0, 1)]
    return made if gpus == 1 else [Stage("1 process, 0 loader workers", 1, 0), *made]


def probe(
    run: Path | None,
    gpus: int,
    steps: int = STEPS,
    total_s: float = TOTAL_S,
    progress: Callable[[Stage, int, int], None] = lambda stage, number, of: None,
) -> dict[str, Any]:
    """Probe a run, or without one the tiny model, with 1 and with `gpus` processes.

    Changes HANGPROOF_DATA of this process while it works, so call it in a process of its own.

    Args:
        run: its folder. gpus: processes of this machine. steps: 1 to 5. total_s: for all stages.
        progress: called with each stage, its number from 1 and their count, when it begins and when it has ended.

    Returns:
        {"ok": bool, "verdict": a sentence, "advice": what to do, "run": str, "model": str, "gpus": int, "took_s": float,
        "stages": [{"name", "processes", "workers", "outcome", "text", "steps", "step_s", "took_s",
        "report": the rank report (`ranks.as_json`) or None, "lines": the rank report as text}]}

    Raises:
        LaunchError: it cannot be probed (a GPU is in use, a model file is missing). runs.files.RunError: the run is wrong.
    """
    began_s, found = time.monotonic(), stages(gpus)
    with _data_root(run, gpus, steps) as (spec, queue):
        for number, stage in enumerate(found, 1):
            left_s = total_s - (time.monotonic() - began_s)
            if any(s.outcome in (HANGS, FAILS) for s in found[: number - 1]):
                stage.text = "Not tried, because the stage before it did not train."
            else:
                progress(stage, number, len(found))
                _try(stage, spec, queue, left_s / (len(found) - number + 1))
            progress(stage, number, len(found))
    said = verdict(found)
    return {
        "ok": said[0], "verdict": said[1], "advice": said[2], "run": run.name if run else "", "model": spec.model,
        "gpus": gpus, "took_s": round(time.monotonic() - began_s, 1), "stages": [asdict(stage) for stage in found],
    }  # fmt: skip


def verdict(found: list[Stage]) -> tuple[bool, str, str]:
    """(can the run start?, a sentence, what to do) for these stages."""
    good, bad = [s for s in found if s.outcome == TRAINS], [s for s in found if s.outcome in (HANGS, FAILS)]
    late = [s for s in found if s.outcome == SLOW]
    if not bad and not late:
        return True, f"{'; '.join(s.name for s in good)}: all train.", "The run can start."
    if not bad:
        more = "Nothing hung. Give the probe more time: --limit 600."
        return False, f"{late[0].name}: {late[0].text}", more
    first = bad[0]
    before = f"{good[-1].name}: trains. " if good else ""
    ends = "stops" if first.processes == 1 else "stop"
    what = f"{first.name}: {ends}. " if first.outcome == HANGS else f"{first.name}: failed. "
    said = (first.report or {}).get("verdict", {})
    advice = str(said.get("advice", "")) if first.outcome == HANGS else ""
    if first.processes > 1 and first.workers == 1 and any(s.processes > 1 and s.workers == 0 for s in good):
        advice = f"Use 0 data loader workers. {advice}".strip()
    return False, f"{before}{what}{first.text}", advice or "Fix this, then probe again."


@contextlib.contextmanager
def _data_root(run: Path | None, gpus: int, steps: int) -> Iterator[tuple[RunSpec, GpuQueue]]:
    """A temporary data folder with a few images in it, the spec of the stages, and the GPUs taken."""
    spec = load(run) if run else make({**TINY, "gpus": gpus})
    source = datasets_dir() / spec.slug
    images = images_in(source) if run else []
    if run and not images:
        raise LaunchError(f"{source} has no images; add some, then probe the run")
    paths: dict[str, Any] = dict(model_files(spec)) if run else {}
    with short_run.gpus_of("probe", gpus) as queue, short_run.own_data_root("hangproof-probe"):
        few_steps = spec.changed(
            name=NAME, nodes=1, max_train_steps=steps, gradient_accumulation=1, save_every_n_steps=0,
            save_every_n_epochs=0, sample_every_n_steps=0, prompts=[], save_dir="", store="", spend_limit=0.0,
            extra={**paths, **spec.extra},
        )  # fmt: skip
        short_run.copy_images(images[: max(IMAGES, gpus * spec.batch_size)], source, datasets_dir() / NAME)
        if not images:
            _draw_images(datasets_dir() / NAME, max(IMAGES, gpus))
        yield few_steps, queue


def _draw_images(target: Path, count: int) -> None:
    from PIL import Image

    for number in range(count):
        Image.new("RGB", (64, 64), (40 * number % 256, 90, 160)).save(target / f"{number}.png")
        (target / f"{number}.txt").write_text(f"prb, number {number}\n", encoding="utf-8")


def _try(stage: Stage, spec: RunSpec, queue: GpuQueue, limit_s: float) -> None:
    """Run one stage to its end, its hang or its limit; fill in its result. Nothing of it lives on."""
    began_s = time.monotonic()
    shutil.rmtree(outputs_dir() / NAME, ignore_errors=True)
    folder = create(spec.changed(gpus=stage.processes, workers=stage.workers), datasets_dir() / NAME)
    short_run.refuse_unstartable(folder)
    try:
        found = short_run.run(folder, limit_s, inherit=queue.handles(), stalled_s=QUIET_S, poll_s=POLL_S)
    finally:
        stage.took_s = round(time.monotonic() - began_s, 1)
    stage.outcome, stage.text, stage.steps, stage.step_s = found.outcome, found.text, found.steps, found.step_s
    stage.report, stage.lines = found.report, found.lines
    if found.outcome == TRAINS:
        pace = f", {stage.step_s:.2g} s for the last one" if stage.step_s else ""
        stage.text = f"It trained {stage.steps} steps{pace}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m launch probe`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="name, slug or folder of a run; default: the tiny model")
    parser.add_argument("--gpus", type=int, default=0, help="processes of this machine (default: the run's, else 2)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, choices=range(1, MOST_STEPS + 1), help="steps of each stage"
    )
    parser.add_argument("--limit", type=float, default=TOTAL_S, help="seconds for all stages (default: 110)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: every stage trains. 1: one does not; the verdict says which and why."""
    short_run.end_on_sigterm()
    folder = run_folder(args.run) if args.run else None
    gpus = args.gpus or (load(folder).gpus if folder else 2)
    if gpus < 1 or args.limit <= 0:
        raise LaunchError("--gpus must be at least 1 and --limit a number of seconds")
    answer = probe(folder, gpus, args.steps, args.limit, _print)
    for stage in answer["stages"]:
        if stage["outcome"] != TRAINS and stage["lines"]:
            print("\n".join(("", f"{stage['name']}:", *(f"  {line}" for line in stage["lines"]))))
    text = f"\n{answer['verdict']}\n{answer['advice']}"
    report(args, text, answer)
    return 0 if answer["ok"] else 1


def _print(stage: Stage, number: int, of: int) -> None:
    """A line when a stage begins and one when it has ended."""
    result = f": {stage.outcome}, {stage.took_s:.0f} s. {stage.text}" if stage.text else " …"
    print(f"{number} of {of}: {stage.name}{result}", flush=True)
