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
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from launch.common import LaunchError, report
from monitor import config
from monitor.attempt import Attempt, AttemptView
from monitor.detect.probe import Probe
from monitor.diagnose import causes, collect, rank_report, ranks
from monitor.gpu.queue import GpuQueue
from monitor.process import platform
from monitor.resume import script
from monitor.run_folder import SCRIPT, RunFolder
from runs.command import model_files
from runs.dataset import images_in
from runs.folders import create
from runs.paths import datasets_dir, outputs_dir, run_folder
from runs.spec import RunSpec, load, make

NAME = "probe"
STEPS, MOST_STEPS = 3, 5
TOTAL_S = 110.0  # all stages together; below two minutes with the last one's end
POLL_S = 0.25
QUIET_S = (
    8.0  # without any change, and with evidence, a stage hangs; without evidence its ranks get three times as long
)
PY_SPY_S = 3.0
KILL_S = 5.0
PROBLEMS_S = 30.0  # to look for missing model files
LOG_BYTES = 65536
IMAGES = 4  # of a run's data set, and at least one for each process
TINY = {
    "name": "probe", "trigger": "prb", "model": "tiny-flux", "tier": "16G", "backend": "diffusers", "resolution": 64,
    "mixed_precision": "no", "repeats": 1,
}  # fmt: skip
TRAINS, HANGS, FAILS, SLOW, SKIPPED = "trains", "hangs", "fails", "slow", "skipped"


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
    images, folder_of_images = (
        (images_in(datasets_dir() / spec.slug), datasets_dir() / spec.slug) if run else ([], None)
    )
    if run and not images:
        raise LaunchError(f"{folder_of_images} has no images; add some, then probe the run")
    paths: dict[str, Any] = dict(model_files(spec)) if run else {}
    queue, before = GpuQueue("probe", {"gpus": gpus}), os.environ.get("HANGPROOF_DATA")
    with tempfile.TemporaryDirectory(prefix="hangproof-probe-") as folder:
        try:
            queue.ask(None)
            if not queue.acquire():
                raise LaunchError(f"{queue.message}; probe again when it is free")
            os.environ["HANGPROOF_DATA"] = folder
            few_steps = spec.changed(
                name=NAME, nodes=1, max_train_steps=steps, gradient_accumulation=1, save_every_n_steps=0,
                save_every_n_epochs=0, sample_every_n_steps=0, prompts=[], save_dir="", store="", spend_limit=0.0,
                extra={**paths, **spec.extra},
            )  # fmt: skip
            _take_images(images[: max(IMAGES, gpus * spec.batch_size)], folder_of_images, datasets_dir() / NAME, gpus)
            yield few_steps, queue
        finally:
            queue.release()
            if before is None:
                os.environ.pop("HANGPROOF_DATA", None)
            else:
                os.environ["HANGPROOF_DATA"] = before


def _take_images(images: list[Path], source: Path | None, target: Path, gpus: int) -> None:
    """Copy these images with their captions into `target`; without any, draw some."""
    target.mkdir(parents=True)
    for path in images:
        copy = target / path.relative_to(source or path.parent)
        copy.parent.mkdir(exist_ok=True)
        for file in (path, path.with_suffix(".txt")):
            if file.is_file():
                shutil.copyfile(file, copy.with_suffix(file.suffix))
    if not images:
        from PIL import Image

        for number in range(max(IMAGES, gpus)):
            Image.new("RGB", (64, 64), (40 * number % 256, 90, 160)).save(target / f"{number}.png")
            (target / f"{number}.txt").write_text(f"prb, number {number}\n", encoding="utf-8")


def _try(stage: Stage, spec: RunSpec, queue: GpuQueue, limit_s: float) -> None:
    """Run one stage to its end, its hang or its limit; fill in its result. Nothing of it lives on."""
    began_s = time.monotonic()
    shutil.rmtree(outputs_dir() / NAME, ignore_errors=True)
    folder = RunFolder(create(spec.changed(gpus=stage.processes, workers=stage.workers), datasets_dir() / NAME))
    if problems := script.start_problems(folder, PROBLEMS_S, time.sleep):
        raise LaunchError(f"it cannot be started: {'; '.join(problems)}")
    attempt = Attempt.prepare(folder, 1, platform.now(), collect.oom_kills())
    try:
        attempt.start(folder.folder / SCRIPT, None, queue.handles())
        _watch(stage, folder, attempt, began_s + limit_s)
    finally:
        attempt.kill(0.0, KILL_S)
        attempt.close()
        stage.took_s = round(time.monotonic() - began_s, 1)


def _watch(stage: Stage, folder: RunFolder, attempt: Attempt, until_s: float) -> None:
    """Follow the attempt until it ends, hangs or `until_s`, and describe what was seen."""
    limits, evidence = config.load(), None
    moved_s, last, view = time.monotonic(), None, attempt.poll(platform.now(), 0.0)
    try:
        while not view.gone and time.monotonic() < until_s:
            time.sleep(POLL_S)
            view = attempt.poll(platform.now(), 1.0)
            now_s, seen = time.monotonic(), _progress(view)
            if seen != last:
                moved_s, last = now_s, seen
                if evidence is not None:
                    evidence.close()
                    evidence = None
            elif evidence is None and now_s - moved_s >= QUIET_S / 2:
                evidence = Probe(attempt.tree, attempt.heartbeats, limits, lambda: ())
                evidence.begin(view.beats, full=True)
            elif evidence is not None and now_s - moved_s >= QUIET_S and now_s - evidence.newest.at_s >= QUIET_S / 4:
                found = evidence.sample_again(view.beats, QUIET_S)
                if found.stuck or view.stopped:
                    return _hangs(stage, folder, attempt, view, evidence)
        if view.gone:
            return _ended(stage, folder, attempt)
        # One rank computes for ever, or compiles: what has not moved for so long, and is not slow for a known reason, hangs.
        if evidence is not None and time.monotonic() - moved_s >= 3 * QUIET_S and not evidence.signals.slow:
            return _hangs(stage, folder, attempt, view, evidence)
        stage.outcome = SLOW
        stage.text = "It was still working when its time was over."
        _describe(stage, folder, attempt, view, {}, stuck=False)
    finally:
        if evidence is not None:
            evidence.close()


def _progress(view: AttemptView) -> object:
    """What changes while a stage moves."""
    return [(b.pid, b.point, b.phase, b.done, b.step, b.outcome) for b in view.beats], view.log_bytes


def _hangs(stage: Stage, folder: RunFolder, attempt: Attempt, view: AttemptView, evidence: Probe) -> None:
    until_s = time.monotonic() + PY_SPY_S
    while evidence.spy.poll() and time.monotonic() < until_s:
        time.sleep(0.05)
    stage.outcome = HANGS
    _describe(stage, folder, attempt, view, evidence.texts(), stuck=True)


def _ended(stage: Stage, folder: RunFolder, attempt: Attempt) -> None:
    view = attempt.poll(platform.now(), 0.0, fresh=True)
    status = attempt.exit_status(view.beats)
    if status.done(foreign=False, killed=False):
        stage.outcome = TRAINS
        _describe(stage, folder, attempt, view, {}, stuck=False)
        pace = f", {stage.step_s:.2g} s for the last one" if stage.step_s else ""
        stage.text = f"It trained {stage.steps} steps{pace}."
        return
    stage.outcome = FAILS
    _describe(stage, folder, attempt, view, {}, stuck=False)
    scope = _scope(folder, attempt, view)
    cause = causes.match(collect.of_crash(scope, status.code, status.signal, status.outcome, status.note, str(status)))
    stage.text = " ".join(filter(None, (f"{cause.title}.", cause.explanation, cause.advice)))


def _describe(
    stage: Stage, folder: RunFolder, attempt: Attempt, view: AttemptView, stacks: dict[int, str], stuck: bool
) -> None:
    """The rank report of the stage as it is now."""
    evidence = collect.of_process(_scope(folder, attempt, view), attempt.pid or 0, (), stacks)
    said = evidence.verdict(stuck)
    stage.report, stage.lines = ranks.as_json(evidence.ranks, said), rank_report.lines(evidence.ranks, said, stacks)
    stage.text = stage.text or said.text
    stage.steps = max((b.step for b in view.beats), default=0)
    first = next(iter(view.beats), None)
    stage.step_s = round(first.intervals[-1], 3) if first and first.intervals else None


def _scope(folder: RunFolder, attempt: Attempt, view: AttemptView) -> collect.Scope:
    return collect.Scope(
        beats=view.beats,
        members=attempt.tree.members,
        heartbeats=attempt.heartbeats,
        started_s=attempt.record.started_s,
        oom_kills_before=attempt.record.oom_kills,
        planned=max((b.planned for b in view.beats), default=0),
        best_step=view.step,
        folder=folder.folder,
        log_tail=folder.log_tail(0, LOG_BYTES),
    )


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
    signal.signal(signal.SIGTERM, _terminated)
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


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # on the way out, what was started is killed


def _print(stage: Stage, number: int, of: int) -> None:
    """A line when a stage begins and one when it has ended."""
    result = f": {stage.outcome}, {stage.took_s:.0f} s. {stage.text}" if stage.text else " …"
    print(f"{number} of {of}: {stage.name}{result}", flush=True)
