"""Chaos on the monitor itself: each call it makes to the operating system fails, and it is killed, while it watches a run.

    python -m benchmarks chaos [--json] [--short N] [--seed S] [--kills 50] [--parallel 6] [--all-errors] [--keep DIR]
    python -m benchmarks chaos --opens 0.02 [--trials 10]   instead: this part of all opens fails, in runs of ten minutes

Decision: the places are found, not listed. A run under a wrapper records every call that leaves the watching process
(`shims/chaos/sitecustomize.py`); then each place gets its trials: an error at the first call after the training has started,
an error for 5 s from there, and an error at a random later call. ENOSPC, EIO, EMFILE, ENOMEM and EACCES take turns, or each
place gets all of them with --all-errors. The monitor is also killed with SIGKILL at random moments of a run with a hang.

Every trial must end completed with the LoRA of an undisturbed run, or in another final state with the reason. A training is
never unwatched for more than 10 s and never runs twice. Exit code 0: all of this held; 1: each violation is printed. On a
busy machine the limits in seconds are stretched by how much longer the undisturbed runs take (`stretch`).
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.chaos_run import FREE_S, SHIM, Fault, Outcome, Trial, discover, later_call, play
from benchmarks.chaos_sampler import Sampler
from benchmarks.report import CannotMeasure, Report, say
from runs.paths import ROOT

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES)
LAST_S = 5.0
PARALLEL = 6
KILLS = 50
MINUTES = 25.0
# The short journeys, whose every call gets its trials, with the state in which each ends undisturbed.
ENDS = {"hang": "completed", "crash": "stopped"}

Place = tuple[str, str, int]
Discovered = tuple[
    dict[Place, dict[str, Any]], dict[str, Outcome]
]  # places, and the outcomes of the undisturbed journeys


def label(place: Place) -> str:
    """`os.open at monitor/state.py:41`."""
    return f"{place[0]} at {place[1]}:{place[2]}"


def places(sampler: Sampler, root: Path) -> Discovered:
    """Every place that a journey reaches, with the first journey that does and its numbers of calls; the journeys' outcomes."""
    found: dict[Place, dict[str, Any]] = {}
    outcomes = {}
    for journey in ENDS:
        reached, outcomes[journey] = discover(journey, sampler, root)
        for place, calls in sorted(reached.items()):
            known = found.get(place)
            if known is None or (calls["started"] and not known["started"]):
                found[place] = {"journey": journey, **calls}
    return found, outcomes


def trials(found: dict[Place, dict[str, Any]], seed: int, all_errors: bool = False) -> list[Trial]:
    """The trials of all places. A place that only the start reaches fails there, at its first call."""
    made, draw = [], random.Random(seed)
    for number, (place, calls) in enumerate(sorted(found.items())):
        from_start = not calls["started"]
        cases = [(0.0, 1), (LAST_S, 1)]
        if calls["started"] >= 2:
            cases.append((0.0, later_call(calls["started"], draw)))
        for turn, (for_s, call) in enumerate(cases):
            chosen = ERRORS if all_errors else (ERRORS[(number + turn + seed) % len(ERRORS)],)
            for code in chosen:
                name = f"{number:03d}-{'5s' if for_s else f'call{call}'}-{errno.errorcode[code]}"
                made.append(Trial(name, calls["journey"], Fault(place, code, for_s, call, from_start)))
    return made


def kills(number: int, seed: int, run_s: float) -> list[Trial]:
    """SIGKILL at random moments of the run with a hang, which lasts `run_s` seconds from the start of the training."""
    draw = random.Random(f"kills {seed}")
    moments = (draw.uniform(0.0, 0.95 * run_s) for _ in range(number))
    return [Trial(f"kill-{at_s:.2f}s", "hang", kill_after_s=at_s) for at_s in moments]


def opens(rate: float, number: int, seed: int) -> list[Trial]:
    """Runs of ten minutes with two hangs and two crashes, in which each call that opens something fails with probability `rate`."""
    return [Trial(f"opens-{n}", "opens", rate=rate, seed=n) for n in range(seed, seed + number)]


def campaign(
    todo: list[Trial], one: Callable[[Trial], Outcome], parallel: int, until_s: float
) -> Iterator[tuple[Trial, Outcome]]:
    """Each trial with its outcome, as they end; none is begun after `until_s` (monotonic)."""
    waiting, running = list(todo), dict[Future, Trial]()
    with ThreadPoolExecutor(parallel) as pool:
        while waiting or running:
            while waiting and len(running) < parallel and time.monotonic() < until_s:
                trial = waiting.pop(0)
                running[pool.submit(one, trial)] = trial
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


def describe(outcome: Outcome) -> str:
    """A trial that broke a promise, in lines for people."""
    fault = outcome.trial.fault
    what = f"SIGKILL {outcome.trial.kill_after_s or 0:.2f} s after the start of the training"
    if fault is not None:
        when = f"for {fault.for_s:g} s from call {fault.call}" if fault.for_s else f"at call {fault.call}"
        what = f"{label(fault.place)}: {errno.errorcode[fault.errno]} {when}"
    lines = [f"VIOLATION {what} ({outcome.trial.journey} journey)"]
    lines += [f"  {violation}" for violation in outcome.violations]
    lines += [f"  state {outcome.state!r}, exit code {outcome.exit_code}: {outcome.message}"]
    if outcome.folder:
        lines += [f"  kept: {outcome.folder}"]
    last = outcome.output.strip().splitlines()[-4:]
    return "\n".join(lines + [f"  | {line[:200]}" for line in last])


def run(
    root: Path = ROOT,
    seed: int = 0,
    short: int | None = None,
    number_of_kills: int = KILLS,
    parallel: int = PARALLEL,
    all_errors: bool = False,
    keep: Path | None = None,
    minutes: float = MINUTES,
    shim: Path = SHIM,
    discovered: Discovered | None = None,
) -> dict[str, Any]:
    """The campaign's figures; "ok": every promise was kept.

    short: this many places, drawn by the seed. discovered: what `places` returned before, to save its time.
    """
    begun_s = time.monotonic()
    with Sampler() as sampler:
        found, journeys = discovered or places(sampler, root)
        broken = [f"the undisturbed {name} journey: {v}" for name, o in journeys.items() for v in o.violations]
        broken += [
            f"the undisturbed {name} journey ended {o.state!r}: {o.message}"
            for name, o in journeys.items()
            if o.state != ENDS[name]
        ]
        chosen = found
        if short is not None:
            drawn = random.Random(f"places {seed}").sample(sorted(found), min(short, len(found)))
            chosen = {place: found[place] for place in drawn}
        errors = trials(chosen, seed, all_errors)
        if short is not None:  # one trial a place
            errors = [
                random.Random(f"{seed} {p}").choice([t for t in errors if t.fault and t.fault.place == p])
                for p in chosen
            ]
        killing = kills(number_of_kills, seed, max(1.0, journeys["hang"].seconds - 1.5))
        todo = killing + errors
        random.Random(seed).shuffle(todo)  # what is not run within the time is then a fair sample
        say(f"{len(found)} places, {len(errors)} trials with errors, {len(killing)} kills")
        outcomes: list[Outcome] = []
        violations: list[Outcome] = []
        stretch = max(1.0, *(o.seconds / FREE_S for o in journeys.values()))
        one = functools.partial(play, sampler=sampler, root=root, keep=keep, shim=shim, stretch=stretch)
        for _, outcome in campaign(todo, one, parallel, begun_s + 60 * minutes):
            outcomes.append(outcome)
            if outcome.violations:
                violations.append(outcome)
                say(describe(outcome))
            if len(outcomes) % 50 == 0:
                say(f"{len(outcomes)} of {len(todo)} trials, {len(violations)} violations")
        sampled_s = sampler.longest_s
    tested = [o for o in outcomes if o.trial.fault]
    return {
        "root": str(root),
        "seed": seed,
        "places": {
            "in_all": len(found),
            "after_start": sum(c["started"] > 0 for c in found.values()),
            "start_only": sum(not c["started"] for c in found.values()),
            "tested": len({o.trial.fault.place for o in tested if o.reached and o.trial.fault}),
        },
        "trials": len(tested),
        "not_reached": sum(not o.reached for o in tested),
        "kills": sum(o.reached for o in outcomes if not o.trial.fault),
        "not_run": len(todo) - len(outcomes),
        "outcomes": dict(Counter(o.kind for o in outcomes)),
        "broken_promises": dict(Counter(kind_of(v) for o in violations for v in o.violations)),
        "violations": [record(o) for o in violations],
        "undisturbed": broken,
        "longest_unwatched_s": max((o.unwatched_s for o in outcomes), default=0.0),
        "stretch": round(stretch, 2),
        "longest_sample_s": round(sampled_s, 2),
        "seconds": round(time.monotonic() - begun_s, 1),
        "ok": not violations and not broken and len(outcomes) == len(todo),
    }


def run_opens(todo: list[Trial], root: Path, parallel: int, keep: Path | None, minutes: float) -> dict[str, Any]:
    """The figures of the trials that `opens` made; "ok": every run completed with the right LoRA and was watched."""
    begun_s = time.monotonic()
    with Sampler() as sampler:
        one = functools.partial(play, sampler=sampler, root=root, keep=keep, stretch=2.0)
        outcomes = [outcome for _, outcome in campaign(todo, one, parallel, begun_s + 60 * minutes)]
    for outcome in outcomes:
        if outcome.violations:
            say(f"VIOLATION {outcome.trial.name}: {'; '.join(outcome.violations)}; {outcome.message} {outcome.folder}")
    return {
        "trials": len(outcomes),
        "not_run": len(todo) - len(outcomes),
        "outcomes": dict(Counter(o.kind for o in outcomes)),
        "longest_unwatched_s": max((o.unwatched_s for o in outcomes), default=0.0),
        "seconds": round(time.monotonic() - begun_s, 1),
        "ok": len(outcomes) == len(todo) and not any(o.violations for o in outcomes),
    }


def kind_of(violation: str) -> str:
    """The violation without its numbers, so that equal ones count together."""
    return (
        "".join("N" if c.isdigit() else c for c in violation.partition(":")[0]).replace("NN", "N").replace("N.N", "N")
    )


def record(outcome: Outcome) -> dict:
    """A violation as JSON."""
    fault = outcome.trial.fault
    return {
        "place": label(fault.place) if fault else None,
        "error": errno.errorcode[fault.errno] if fault else "SIGKILL",
        "for_s": fault.for_s if fault else None,
        "call": fault.call if fault else None,
        "kill_after_s": outcome.trial.kill_after_s,
        "journey": outcome.trial.journey,
        "violations": outcome.violations,
        "state": outcome.state,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "folder": outcome.folder,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", type=int, metavar="N", help="only N places, one trial each")
    parser.add_argument("--kills", type=int, help=f"kills of the monitor (default {KILLS}; --short: N / 4)")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="trials at the same time")
    parser.add_argument("--all-errors", action="store_true", help="every error at every place, not one in turn")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of the trials that failed in DIR")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no trial after this long")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose monitor is tested (default: this one's)")
    parser.add_argument("--opens", type=float, metavar="RATE", help="this part of all opens fails, instead of one call")
    parser.add_argument("--trials", type=int, default=10, help="with --opens: how many runs")


def measure(args: argparse.Namespace) -> Report:
    """One campaign; each broken promise is a sentence."""
    if not Path("/proc/self/stat").exists() or not hasattr(os, "fork"):
        raise CannotMeasure("it needs /proc, so Linux")
    root = args.checkout.resolve()
    if args.opens:
        result = run_opens(opens(args.opens, args.trials, args.seed), root, args.parallel, args.keep, args.minutes)
    else:
        number = args.kills if args.kills is not None else (KILLS if args.short is None else args.short // 4)
        result = run(root, args.seed, args.short, number, args.parallel, args.all_errors, args.keep, args.minutes)
    broken = [
        *result.get("undisturbed", []),
        *(f"{v['place'] or v['error']}: {'; '.join(v['violations'])}" for v in result["violations"]),
    ]
    if result["not_run"]:
        broken.append(f"{result['not_run']} trials were not run within {args.minutes:g} minutes")
    return Report(result, broken)
