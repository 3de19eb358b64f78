"""`python -m launch probe [RUN]`: train a few steps with one process and with all; the first rung that does not train says what is wrong.

A rung is one setting: one process, then all, with 0 and with 1 loader worker. Does the start of the group hang?

Decision: the real script is started, instead of checks of drivers and ports: a group hangs in ways that no check lists. A rung
is a run in a data folder of its own on the same disk, with links to the images, watched as the monitor watches. Nothing of it is
left, and nothing of the run is changed. Trackers are used as the run uses them, because they are one of the things that hang.

A program that goes on, such as the page's server, starts the command as a process: SIGTERM ends it with all that it has started.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch import short_run
from launch.common import LaunchError, report
from launch.short_run import FAILS, HANGS, TRAINS, Result
from runs.command import model_files
from runs.dataset import images_in
from runs.folders import render
from runs.paths import datasets_dir, outputs_dir, run_folder
from runs.spec import RunSpec, load, make, save

NAME = "probe"
STEPS, MOST_STEPS = 3, 5
LIMIT_S = 110.0  # for all rungs; with the end of its last rung, the probe takes two minutes
IMAGES = 4  # at least, and one for each process
SKIPPED = "skipped"
TINY = {
    "name": "probe", "trigger": "prb", "model": "tiny-flux", "tier": "16G", "backend": "diffusers", "resolution": 64,
    "mixed_precision": "no", "repeats": 1,
}  # fmt: skip


@dataclass
class Rung:
    """One setting and its result. outcome: TRAINS, HANGS, FAILS, SLOW (still working when its time was over) or SKIPPED.

    text: what happened, as sentences. report: `ranks.as_json`; lines: the same as text. step_s: seconds of its last step.
    """

    name: str
    processes: int = 1
    workers: int = 0
    outcome: str = SKIPPED
    text: str = ""
    steps: int = 0
    step_s: float | None = None
    took_s: float = 0.0
    report: dict[str, Any] | None = None
    lines: list[str] = field(default_factory=list)


def rungs_of(processes: int) -> list[Rung]:
    """One process, all processes with 0 and with 1 loader workers. For one GPU: one process with 0 and with 1."""
    many = f"{processes} processes" if processes > 1 else "1 process"
    made = [Rung(f"{many}, {n} loader worker{'s' * (n != 1)}", processes, n) for n in (0, 1)]
    return made if processes == 1 else [Rung("1 process, 0 loader workers"), *made]


def probe(
    run: Path | None, gpus: int, steps: int = STEPS, limit_s: float = LIMIT_S,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Probe a run, or without one the tiny model, with 1 and with `gpus` processes of this machine, 1 to 5 steps each.

    Changes HANGPROOF_DATA of this process meanwhile.

    Returns:
        {"ok": bool, "kind": fine|basic|slow, "verdict": sentences, "advice": what to do, "run": str, "model": str, "stages": [Rung as a
        dict], "took_s": float}

    Raises LaunchError: it cannot be tried (a GPU is in use, no images, a model file is missing). RunError: the run is wrong.
    """
    began_s, rungs, failure = time.monotonic(), rungs_of(gpus), None
    own = load(run) if run else make({**TINY, "gpus": gpus})
    source = datasets_dir() / own.slug
    images, files = (images_in(source), model_files(own)) if run else ([], {})
    if run and not images:
        raise LaunchError(f"{source} has no images; add some, then try again")
    count = max(IMAGES, gpus * own.batch_size)
    with short_run.gpus_of(f"{NAME} of {own.name}", gpus) as queue, short_run.scratch(NAME) as root:
        # Spread over the data set: images of one camera are often beside each other.
        used = [images[n * len(images) // min(count, len(images))] for n in range(min(count, len(images)))]
        for path in used or _drawn(root / "images", count):
            short_run.link_image(path, datasets_dir() / NAME / path.relative_to(source if used else root / "images"))
        spec = short_run.reduced(
            own, NAME, steps, files, gradient_accumulation=1, save_every_n_steps=0, sample_every_n_steps=0, prompts=[],
        )  # fmt: skip
        for number, rung in enumerate(rungs, 1):
            left_s = limit_s - (time.monotonic() - began_s)
            if failure is not None:
                rung.text = "Not tried, because the one before it did not train."
            elif left_s <= 1:
                rung.text = "Not tried: the time was over."
            else:
                progress(f"{number} of {len(rungs)}: {rung.name} …")
                failure = _try(rung, spec, left_s / (len(rungs) - number + 1), queue.handles())
                pace = f", {rung.step_s:.3g} s a step" if rung.step_s else ""
                end = f"{rung.outcome}, {rung.took_s:.0f} s{pace}. {rung.text}".strip()
                progress(f"{number} of {len(rungs)}: {rung.name}: {end}")
    kind, text, advice = judge(rungs, short_run.what_to_change(own, failure) if failure else "")
    return {
        "ok": kind == "fine", "kind": kind, "verdict": text, "advice": advice, "run": run.name if run else "",
        "model": own.model, "stages": [asdict(rung) for rung in rungs], "took_s": round(time.monotonic() - began_s, 1),
    }  # fmt: skip


def _try(rung: Rung, spec: RunSpec, limit_s: float, inherit: tuple[int, ...]) -> Result | None:
    """A run of a few steps, to its end, its hang or its limit; what failed. Nothing of it lives on."""
    run = outputs_dir() / NAME
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    spec = spec.changed(gpus=rung.processes, workers=rung.workers)
    save(run, spec)
    render(run, spec)
    if found := short_run.problems(run):
        raise LaunchError(f"it cannot be started: {'; '.join(found)}")
    began_s = time.monotonic()
    result = short_run.run(run, limit_s, inherit=inherit)
    rung.took_s, rung.outcome, rung.steps = round(time.monotonic() - began_s, 1), result.outcome, result.steps
    rung.step_s, rung.report, rung.lines = result.step_s, result.report, result.lines
    rung.text = "" if result.outcome == TRAINS else said(result)
    return result if result.outcome in (HANGS, FAILS) else None


def _drawn(folder: Path, count: int) -> Iterator[Path]:
    from PIL import Image

    folder.mkdir()
    for number in range(count):
        path = folder / f"{number}.png"
        Image.new("RGB", (64, 64), (40 * number % 256, 90, 160)).save(path)
        path.with_suffix(".txt").write_text(f"prb, number {number}\n", encoding="utf-8")
        yield path


def said(found: Result) -> str:
    """What happened, as sentences."""
    if found.cause is None:
        return found.text
    where = found.text if found.outcome == HANGS else ""
    return " ".join(filter(None, (where, f"{found.cause.title}.", found.cause.explanation)))


def judge(found: Sequence[Rung], advice: str = "") -> tuple[str, str, str]:
    """What the rungs say: (fine, basic or slow; what is wrong; what to do). advice: against the failed rung's cause."""
    good, bad = [r for r in found if r.outcome == TRAINS], [r for r in found if r.outcome in (HANGS, FAILS)]
    if not bad:
        if late := next((r for r in found if r.outcome != TRAINS), None):
            return "slow", f"{late.name}: {late.text}", "Nothing hung. Give the probe more time: --limit 600."
        return "fine", f"{'; '.join(r.name for r in good)}: all train.", "The run can start."
    first = bad[0]
    before = f"{good[-1].name}: trains. " if good else ""
    ends = "failed" if first.outcome == FAILS else "stops" if first.processes == 1 else "stop"
    if first.outcome == HANGS:
        advice = str((first.report or {}).get("verdict", {}).get("advice", "")) or advice
    if first.processes > 1 and first.workers == 1 and any(r.processes > 1 and r.workers == 0 for r in good):
        advice = f"Use 0 data loader workers. {advice}".strip()
    return "basic", f"{before}{first.name}: {ends}. {first.text}", advice or "Fix this, then probe again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m launch probe`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="name, slug or folder of a run; default: the tiny model")
    parser.add_argument("--gpus", type=int, default=0, help="processes of this machine (default: the run's, else 2)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, choices=range(1, MOST_STEPS + 1), help="steps of each stage"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all stages (default: 110)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: every rung trains. 1: one does not; the verdict says which and why."""
    short_run.end_on_sigterm()
    folder = run_folder(args.run) if args.run else None
    gpus = args.gpus or (load(folder).gpus if folder else 2)
    if args.limit <= 0 or gpus < 1:
        raise LaunchError("--limit must be a number of seconds, and --gpus at least 1")
    answer = probe(folder, gpus, args.steps, args.limit, lambda line: print(line, flush=True))
    for stage in answer["stages"]:
        if stage["outcome"] != TRAINS and stage["lines"]:
            print("\n".join(("", f"{stage['name']}:", *(f"  {line}" for line in stage["lines"]))))
    report(args, f"\n{answer['verdict']}\n{answer['advice']}", answer)
    return 0 if answer["ok"] else 1
