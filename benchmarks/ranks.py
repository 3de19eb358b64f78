"""`python -m benchmarks ranks --trials 100 --json`: which rank of four hangs, and where; does the run finish all the same?

Each trial is a run of four gloo ranks on the processor under the real monitor. One rank hangs, in one of five ways, at one
of the 12 check points of its start or inside of a collective operation (a barrier of the start, or the sum of the gradients
after a step). The trial counts as named when the incident's verdict has that rank and that place, and as finished when the
monitor ends with exit code 0 and the LoRA has the bytes of the undisturbed run of four ranks. Rank, place and kind are drawn
from the seed; the places take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import ranks_group
from benchmarks.faults_reference import NAME, Reference, copy_caches, create, environment, sha256
from benchmarks.report import Report
from guards import startup
from guards.heartbeat import PHASES
from runs.paths import ROOT

WORLD, STEPS = 4, 10
RUN_S = 600.0
SPEC = {"gpus": WORLD, "max_train_steps": STEPS, "save_every_n_steps": 3, "tier": "16G"}
COLLECTIVE = "collective"
PLACES = (*startup.NAMES, COLLECTIVE)
BARRIER_AT = "model"  # the first barrier of the start comes here
LIMITS = """allow_below_guards = true
[watch]
min_sample_count = 1000
stopped_s = {t}
exit_s = {exit}
poll_max_s = 0.5
tree_s = 2
launcher_s = 3
[end]
grace_s = 0.2
kill_wait_s = 10
[restart]
backoff_first_s = 0
backoff_last_s = 0
without_progress_count = 5
[check]
stack_dump_s = 2
"""


@dataclass(frozen=True)
class Trial:
    """What is injected. place: one of PLACES; step: the last completed step, of a collective after the start."""

    number: int
    rank: int
    place: str
    kind: str
    step: int = 0

    @property
    def injected(self) -> str:
        """`HANGPROOF_HANG`."""
        place = self.place
        if place == COLLECTIVE:
            place = f"all_reduce@{self.step}" if self.step else "barrier"
        return f"{self.rank}:{place}:{self.kind}"


@dataclass
class Outcome:
    """One trial. named: the verdict has the right rank and place. finished: exit code 0 and the undisturbed LoRA."""

    trial: Trial
    named: bool = False
    finished: bool = False
    verdict: str = ""
    problem: str = ""
    incidents: int = 0
    took_s: float = 0.0


def trials(count: int, seed: int) -> list[Trial]:
    """The trials of a seed: the places take turns in a shuffled order, the rest is drawn."""
    draw = random.Random(seed)
    places: list[str] = []
    while len(places) < count:
        places += draw.sample(PLACES, len(PLACES))
    made = []
    for number, place in enumerate(places[:count]):
        step = draw.choice((0, 0, *range(1, STEPS - 1))) if place == COLLECTIVE else 0
        made.append(Trial(number, draw.randrange(WORLD), place, draw.choice(tuple(ranks_group.HANGS)), step))
    return made


def limits_file(folder: Path, budget_s: float) -> Path:
    """Short limits of the monitor; budget_s is T of every phase."""
    path = folder / "limits.toml"
    phases = "".join(f"[phases.{name}]\nfloor_s = {budget_s}\nceiling_s = {budget_s}\n" for name in PHASES)
    path.write_text(LIMITS.format(t=budget_s, exit=2 * budget_s) + phases, encoding="utf-8")
    return path


def launcher(folder: Path) -> Path:
    """The program that train.sh starts instead of accelerate."""
    path = folder / "launcher"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m benchmarks.ranks_group "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@contextmanager
def nursery(scratch: Path) -> Iterator[dict[str, str]]:
    """The process that forks the ranks of all trials; the variables that name it, none where it is not permitted."""
    if not sys.platform.startswith("linux"):
        yield {}
        return
    path = scratch / "nursery.sock"
    command = [sys.executable, "-m", "benchmarks.ranks_group", "nursery", str(path)]
    env = {**environment(scratch), "OMP_NUM_THREADS": "1", **ranks_group.ROOM}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, start_new_session=True) as process:
        until_s = time.monotonic() + RUN_S
        while not path.exists() and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.1)
        yield {ranks_group.NURSERY: str(path)}
        assert process.stdin is not None
        process.stdin.close()  # its end
        process.wait(RUN_S)


def reference(scratch: Path, fork: dict[str, str]) -> Reference:
    """The undisturbed run of four ranks, without a monitor. RuntimeError with its log when it fails."""
    data = scratch / "reference"
    data.mkdir()
    run = create(data, 0, SPEC)
    log = scratch / "reference.log"
    with open(log, "wb") as out:
        env = environment(data, ACCELERATE=str(launcher(scratch)), **fork)
        command = ["bash", str(run / "train.sh")]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=RUN_S)
    lora = run / f"{NAME}.safetensors"
    if done.returncode or not lora.exists():
        raise RuntimeError(
            f"the undisturbed run failed ({done.returncode}):\n{log.read_text('utf-8', 'replace')[-3000:]}"
        )
    return Reference(data, sha256(lora), STEPS)


def run_trial(
    trial: Trial, made: Reference, scratch: Path, fork: dict[str, str], budget_s: float, keep: Path | None
) -> Outcome:
    """One run under the monitor with this hang."""
    began_s, outcome = time.monotonic(), Outcome(trial)
    folder = scratch / f"trial-{trial.number}"
    folder.mkdir()
    try:
        run = create(folder / "data", 0, SPEC)
        copy_caches(folder / "data", made, cached=True)
        mark = folder / "mark"
        env = environment(
            folder / "data",
            ACCELERATE=str(scratch / "launcher"),
            HANGPROOF_LIMITS=str(limits_file(folder, budget_s)),
            HANGPROOF_INJECT="benchmarks.ranks_group:fire",
            HANGPROOF_HANG=trial.injected,
            HANGPROOF_MARK=str(mark),
            HANGPROOF_QUIET="1",
            **fork,
        )
        code = _monitor(run, env, folder / "monitor.out")
        lora = run / f"{NAME}.safetensors"
        outcome.finished = code == 0 and lora.exists() and sha256(lora) == made.sha256
        judge(outcome, run, mark.exists())
        if not outcome.finished and not outcome.problem:
            why = "the LoRA differs" if lora.exists() else "there is no LoRA"
            outcome.problem = f"the monitor's exit code is {code}, {why}"
        if keep is not None and not (outcome.named and outcome.finished):
            shutil.copytree(run, keep / folder.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*-state"))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    finally:
        outcome.took_s = round(time.monotonic() - began_s, 1)
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _monitor(run: Path, env: dict[str, str], log: Path) -> int:
    """The exit code of `monitor run`; -1 when it did not end. Nothing of it is left behind."""
    command = [sys.executable, "-m", "monitor", "run", str(run)]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        return process.wait(RUN_S)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        if process.poll() is None:
            _kill_all_of(run)
            process.wait()


def _kill_all_of(run: Path) -> None:
    """Kill every process of a run whose monitor did not end, the monitor included."""
    from monitor.process import tree

    for process in tree.with_environment(tree.RUN, str(run)):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    from monitor.run_folder import STATUS, read_json

    status = read_json(run / STATUS) or {}
    for name in ("keeper_pid", "monitor_pid"):
        with suppress(ProcessLookupError, TypeError):
            os.kill(status[name], signal.SIGKILL)


def judge(outcome: Outcome, run: Path, injected: bool) -> None:
    """Compare the first incident's verdict with what was injected."""
    folders = sorted((run / "incidents").glob("0*"))
    outcome.incidents = len(folders)
    if not injected:
        outcome.problem = "the hang did not happen: the run ended before, or its first attempt did"
        return
    if not folders:
        outcome.problem = "there is no incident"
        return
    said: dict[str, Any] = json.loads((folders[0] / "incident.json").read_text(encoding="utf-8"))["verdict"]
    outcome.verdict = said["text"]
    trial = outcome.trial
    if trial.place != COLLECTIVE:
        right = said["point"] == trial.place
    elif trial.step:
        right = not said["point"] and said["step"] == trial.step
    else:
        right = said["point"] == BARRIER_AT
    outcome.named = right and said["rank"] == trial.rank


def summary(outcomes: list[Outcome], took_s: float) -> dict[str, Any]:
    """The result of a campaign."""
    return {
        "trials": len(outcomes),
        "named": sum(o.named for o in outcomes),
        "finished": sum(o.finished for o in outcomes),
        "took_s": round(took_s, 1),
        "trial_s": round(sorted(o.took_s for o in outcomes)[len(outcomes) // 2], 1) if outcomes else 0.0,
        "failed": [asdict(o) for o in outcomes if not (o.named and o.finished)],
    }


def campaign(
    chosen: list[Trial], budget_s: float, parallel: int, keep: Path | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Run these trials; the `summary`."""
    began_s, outcomes = time.monotonic(), []
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as folder,
        nursery(Path(folder)) as fork,
        ThreadPoolExecutor(parallel) as pool,
    ):
        scratch = Path(folder)
        made = reference(scratch, fork)
        try:
            for outcome in pool.map(lambda t: run_trial(t, made, scratch, fork, budget_s, keep), chosen):
                outcomes.append(outcome)
                if not quiet:
                    good = "ok" if outcome.named and outcome.finished else f"FAILED {outcome.problem}"
                    line = f"{outcome.trial.number:3} {outcome.trial.injected:28} {outcome.took_s:5.1f} s  {good}"
                    print(f"{line}  {outcome.verdict}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C: those under way end, no other one starts
    return summary(outcomes, time.monotonic() - began_s)


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="leave out the trials before this number")
    parser.add_argument("--budget", type=float, default=4.0, help="T of every phase, seconds")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the runs of failed trials")


def measure(args: argparse.Namespace) -> Report:
    """At least 95 of 100 trials must be named, and all of them finish."""
    result = campaign(trials(args.trials, args.seed)[args.first :], args.budget, args.parallel, args.keep)
    missed = [f"{result['named']} of {result['trials']} trials were named"] * (
        result["named"] < 0.95 * result["trials"]
    )
    unfinished = [f"{result['finished']} of {result['trials']} trials finished"] * (
        result["finished"] < result["trials"]
    )
    return Report(result, missed + unfinished)
