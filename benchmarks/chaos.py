"""Chaos on the monitor itself: each of its calls to the operating system fails, and it is killed, while it watches.

    python -m benchmarks chaos [--json] [--short N] [--seed S] [--kills 50] [--parallel 6] [--keep DIR]

Decision: the places are found, not listed. A run under a wrapper records every call that leaves the watching process
(`chaos_shim/sitecustomize.py`); then each place gets its trials: an error at the first call after the training has
started, an error for 5 s from there, and an error at a random later call. ENOSPC, EIO, EMFILE, ENOMEM and EACCES take
turns. The monitor is also killed with SIGKILL at random moments of a run with a hang.

Two journeys touch what the monitor does: `hang` (start, checkpoints, a hang, recovery, completion) and `crash` (a
crash, the restart, a user's stop). The training is `toy_loop.py`: 50 ms a step, no torch, a LoRA whose bytes depend
on each step.

Every trial must end completed with the LoRA of an undisturbed run, or in another final state with the reason. A
training is never unwatched for more than 10 s and never runs twice. Exit code 0: all of this held; 1: each violation
is printed. On a busy machine the limits in seconds are stretched by how much longer the undisturbed runs take
(`stretch`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import toy_loop
from benchmarks.chaos_seen import Seen
from benchmarks.report import CannotMeasure, Report, say
from benchmarks.trial import (
    FINAL,
    Job,
    limits_toml,
    living,
    ours,
    read_end,
    read_lines,
    read_object,
    started,
    toy_environment,
    waits,
)
from runs.paths import ROOT

SHIM = ROOT / "benchmarks" / "chaos_shim"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES)
LAST_S = 5.0
PARALLEL = 6
KILLS = 50
MINUTES = 25.0
EXIT_CODES = {"completed": (0,), "failed": (1, 4), "stopped": (3,), "preempted": (5,), "unkillable": (1,)}
UNWATCHED_LIMIT_S = 10.0
TRIAL_LIMIT_S = 75.0
SETTLE_S = 11.0  # an orphaned trainer is observed for this long: longer than UNWATCHED_LIMIT_S
SAMPLE_S = 0.05
FREE_S = 8.0  # the undisturbed journeys need less on two free cores
EVERY = 15
LIMITS = {
    "watch": {"tree_s": 1},
    "end": {"grace_s": 1, "stop_grace_s": 2, "kill_wait_s": 4, "unkillable_s": 5, "stop_save_s": 10},
    "restart": {"backoff_first_s": 0.5, "backoff_last_s": 2, "disk_wait_s": 10},
    "check": {"verify_s": 20, "render_s": 20},
}


@dataclass(frozen=True)
class Journey:
    """A training with this fault, which ends undisturbed in the state `ends`; a user stops it at `stop_at` (0: not)."""

    steps: int
    faults: str
    ends: str
    stop_at: int = 0


JOURNEYS = {
    "hang": Journey(60, "step_sleeps@34", "completed"),
    "crash": Journey(400, "raises@22", "stopped", stop_at=40),
}
Place = tuple[str, str, int]
# Places, and the outcomes of the undisturbed journeys.
Discovered = tuple[dict[Place, dict[str, Any]], dict[str, "Outcome"]]


@dataclass(frozen=True)
class Fault:
    """An error at a place: once (`for_s` 0) or from the chosen call on for `for_s` seconds."""

    place: Place
    errno: int
    for_s: float
    call: int = 1
    from_start: bool = False


@dataclass(frozen=True)
class Trial:
    """What is done to the monitor: one fault, or SIGKILL `kill_after_s` after the training's start, or nothing."""

    name: str
    journey: str
    fault: Fault | None = None
    kill_after_s: float | None = None


@dataclass
class Outcome:
    """What came of a trial. `reached`: the fault or the kill did happen."""

    trial: Trial
    state: str = ""
    message: str = ""
    exit_code: int | None = None
    started: bool = False
    reached: bool = False
    lora: str = "none"  # "right" | "wrong" | "none"
    unwatched_s: float = 0.0
    trainers_at_once: int = 0
    trainers_left: int = 0
    timed_out: bool = False
    output: str = ""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    folder: str = ""
    # Where nothing fails, the places: their calls before the training's start ("start") and after it ("started").
    places: dict[Place, dict[str, int]] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """What was done, for people: `os.open at monitor/state.py:41: EIO at call 1`."""
        fault = self.trial.fault
        if fault is None:
            return f"SIGKILL {self.trial.kill_after_s or 0:.2f} s after the start of the training"
        when = f"for {fault.for_s:g} s from call {fault.call}" if fault.for_s else f"at call {fault.call}"
        function, file, line = fault.place
        return f"{function} at {file}:{line}: {errno.errorcode[fault.errno]} {when}"

    @property
    def kind(self) -> str:
        """The outcome in one or two words."""
        if self.violations:
            return "violation"
        return self.state if self.state in FINAL else "refused to start"


def judge(outcome: Outcome, stretch: float = 1.0) -> list[str]:
    """What the monitor's promises forbid and this trial shows; [] when all are kept. `stretch`: as in `play`."""
    found = []
    if outcome.trainers_at_once > 1:
        found.append(f"{outcome.trainers_at_once} trainers at once")
    if outcome.unwatched_s > UNWATCHED_LIMIT_S * stretch:
        found.append(f"the training was unwatched for {outcome.unwatched_s:.1f} s")
    if outcome.timed_out:
        found.append(f"not over after {TRIAL_LIMIT_S * stretch:.0f} s: state {outcome.state!r}, {outcome.message!r}")
        return found
    if outcome.trainers_left:
        found.append(f"the monitor ended with exit code {outcome.exit_code} and left a living trainer")
    if outcome.state in FINAL:
        if outcome.state == "completed" and outcome.lora != "right":
            found.append(f"completed, and the LoRA is {outcome.lora}")
        if not outcome.message:
            found.append(f"{outcome.state} without a reason")
        if outcome.exit_code not in EXIT_CODES[outcome.state]:
            found.append(f"{outcome.state} with exit code {outcome.exit_code}")
    elif outcome.started:
        found.append(f"the monitor ended with exit code {outcome.exit_code} in state {outcome.state!r}")
    elif outcome.exit_code == 0 or not outcome.output.strip() or "Traceback" in outcome.output:
        found.append(f"refused to start with exit code {outcome.exit_code} and no reason")
    return found


def play(trial: Trial, keep: Path | None = None, shim: Path = SHIM, stretch: float = 1.0) -> Outcome:
    """Run the trial. Its folder is kept in `keep` when a promise was broken; nothing else of it is left.

    `stretch`: how much slower than two free cores this machine is; the limits in seconds are multiplied by it.
    """
    begun_s, token = time.monotonic(), secrets.token_hex(8)
    work = Path(tempfile.gettempdir()) / f"chaos-{token}"
    work.mkdir()
    outcome = Outcome(trial)
    try:
        job = ours(work, JOURNEYS[trial.journey].steps, EVERY)
        job.cwd = work  # where Python puts temporary files when every folder for them fails
        seen = Seen(job.folder)
        with started(job, environment(trial, work, token, shim), token) as process:
            wait(process, token, job, seen, outcome, begun_s, stretch)
            observe(outcome, process.poll(), token, job, seen)
        outcome.violations = judge(outcome, stretch)
        outcome.seconds = round(time.monotonic() - begun_s, 1)
        if outcome.violations and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            outcome.folder = str(keep / f"{trial.name}-{token[:4]}")
            shutil.copytree(work, outcome.folder, symlinks=True, ignore=_sockets)
        return outcome
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if not (Path(folder) / n).is_file() and not (Path(folder) / n).is_dir()]


def environment(trial: Trial, work: Path, token: str, shim: Path) -> dict[str, str]:
    """The monitor's environment: limits of a short run, the shim first on PYTHONPATH, temporary files of its own."""
    toy = toy_environment(work, JOURNEYS[trial.journey].faults)
    (work / "chaos").mkdir()
    (work / "limits.toml").write_text(limits_toml(LIMITS), encoding="utf-8")
    (work / "notify.toml").write_text('urls = ["json://127.0.0.1:9/"]\non = ["nothing"]\n', encoding="utf-8")
    (work / "notify.toml").chmod(0o600)
    return {
        **toy,
        "HANGPROOF_LIMITS": str(work / "limits.toml"),
        "HANGPROOF_NOTIFY": str(work / "notify.toml"),
        "HANGPROOF_GPUS": f"chaos-{token}",
        "PYTHONPATH": os.pathsep.join(map(str, (shim, ROOT / "tests/support/shims/nvml", ROOT))),
        "CHAOS_SHIM": str(SHIM),
        "CHAOS_ROOT": str(ROOT),
        "CHAOS_FOLDER": str(work / "chaos"),
        "CHAOS_LEDGER": toy["TOY_LEDGER"],
        "CHAOS_FAULT": json.dumps(vars(trial.fault)) if trial.fault else "",
    }


def wait(
    process: subprocess.Popen[bytes],
    token: str,
    job: Job,
    seen: Seen,
    outcome: Outcome,
    begun_s: float,
    stretch: float,
) -> None:
    """Until keeper and monitor have ended; the user's stop and the kill happen on the way. Then a living trainer is observed."""
    ledger, started_s = job.log.parent / "ledger.jsonl", 0.0
    stop_at, kill_after_s = JOURNEYS[outcome.trial.journey].stop_at, outcome.trial.kill_after_s
    while process.poll() is None or left(token, " monitor run"):  # a monitor may outlive its keeper
        now_s, lines = time.monotonic(), read_lines(ledger)
        if now_s > begun_s + TRIAL_LIMIT_S * stretch:
            outcome.timed_out = True
            return
        seen.sample(lines)
        if not started_s and lines:
            started_s = now_s
        if kill_after_s is not None and started_s and now_s - started_s >= kill_after_s:
            outcome.reached, kill_after_s = _kill_monitor(job.folder), None
        if stop_at and any(line["step"] >= stop_at for line in lines):
            (job.folder / "stop.request").write_text("{}", encoding="utf-8")
            stop_at = 0
        time.sleep(SAMPLE_S)
    until_s = time.monotonic() + SETTLE_S * stretch
    while left(token, "/toy_loop.py") and time.monotonic() < until_s:
        seen.sample(read_lines(ledger))
        time.sleep(SAMPLE_S)


def left(token: str, words: str) -> list[int]:
    """The trial's living processes with these words in their command, but for standby attempts."""
    return [pid for pid, command in living(token).items() if words in command and not waits(pid)]


def _kill_monitor(folder: Path) -> bool:
    """SIGKILL the process that status.json names as the run's monitor; False when there is none."""
    for _ in range(20):
        pid = read_object(folder / "status.json").get("monitor_pid")
        with contextlib.suppress(OSError):
            if pid and b"monitor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def observe(outcome: Outcome, code: int | None, token: str, job: Job, seen: Seen) -> None:
    """Fill in what the run's files and the samples show."""
    status, work = read_object(job.folder / "status.json"), job.log.parent
    outcome.exit_code = code
    outcome.state, outcome.message = status.get("state", ""), status.get("message", "")
    outcome.started = (work / "ledger.jsonl").exists()
    outcome.reached = outcome.reached or (work / "chaos" / "fired").exists()
    lora = job.folder / "toy.safetensors"
    if lora.exists():
        outcome.lora = (
            "right" if lora.read_bytes() == toy_loop.expected(JOURNEYS[outcome.trial.journey].steps) else "wrong"
        )
    outcome.unwatched_s, outcome.trainers_at_once = round(seen.unwatched_s, 1), seen.at_once
    outcome.trainers_left = len(left(token, "/toy_loop.py")) if code is not None else 0
    outcome.output = read_end(job.log)
    for record in [record for path in (work / "chaos").glob("places-*.jsonl") for record in read_lines(path)]:
        calls = outcome.places.setdefault(tuple(record["place"]), {"start": 0, "started": 0})
        key = "started" if record["started"] else "start"
        calls[key] = max(calls[key], record["calls"])


def places() -> Discovered:
    """Every place that a journey reaches, with the first that does and its numbers of calls; the journeys' outcomes."""
    found: dict[Place, dict[str, Any]] = {}
    outcomes = {name: play(Trial(f"discover-{name}", name), stretch=10.0) for name in JOURNEYS}
    for name, outcome in outcomes.items():
        for place, calls in sorted(outcome.places.items()):
            known = found.get(place)
            if known is None or (calls["started"] and not known["started"]):
                found[place] = {"journey": name, **calls}
    return found, outcomes


def trials(found: dict[Place, dict[str, Any]], seed: int) -> list[Trial]:
    """The trials of all places. A place that only the start reaches fails there, at its first call."""
    made, draw = [], random.Random(seed)
    for number, (place, calls) in enumerate(sorted(found.items())):
        from_start = not calls["started"]
        cases = [(0.0, 1), (LAST_S, 1)]
        if calls["started"] >= 2:
            cases.append((0.0, draw.randint(2, max(2, calls["started"] // 2))))  # a run of this length surely makes it
        for turn, (for_s, call) in enumerate(cases):
            code = ERRORS[(number + turn + seed) % len(ERRORS)]
            name = f"{number:03d}-{'5s' if for_s else f'call{call}'}-{errno.errorcode[code]}"
            made.append(Trial(name, calls["journey"], Fault(place, code, for_s, call, from_start)))
    return made


def kills(number: int, seed: int, run_s: float) -> list[Trial]:
    """SIGKILL at random moments of the run with a hang, which lasts `run_s` seconds from the start of the training."""
    draw = random.Random(f"kills {seed}")
    moments = (draw.uniform(0.0, 0.95 * run_s) for _ in range(number))
    return [Trial(f"kill-{at_s:.2f}s", "hang", kill_after_s=at_s) for at_s in moments]


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", type=int, metavar="N", help="only N places, one trial each")
    parser.add_argument("--kills", type=int, help=f"kills of the monitor (default {KILLS}; --short: N / 4)")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="trials at the same time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of the trials that failed in DIR")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no trial after this long")


def measure(args: argparse.Namespace) -> Report:
    """One campaign; each broken promise is a sentence."""
    if not Path("/proc/self/stat").exists() or not hasattr(os, "fork"):
        raise CannotMeasure("it needs /proc, so Linux")
    number = args.kills if args.kills is not None else (KILLS if args.short is None else args.short // 4)
    begun_s = time.monotonic()
    found, journeys = places()
    broken = [f"the undisturbed {name} journey: {v}" for name, o in journeys.items() for v in o.violations]
    broken += [
        f"the undisturbed {name} journey ended {o.state!r}: {o.message}"
        for name, o in journeys.items()
        if o.state != JOURNEYS[name].ends
    ]
    draw, errors = random.Random(args.seed), trials(found, args.seed)
    if args.short is not None:
        draw.shuffle(errors)
        errors = list({trial.fault.place: trial for trial in errors if trial.fault}.values())[: args.short]
    killing = kills(number, args.seed, max(1.0, journeys["hang"].seconds - 1.5))
    todo = killing + errors
    draw.shuffle(todo)  # what is not run within the time is then a fair sample
    say(f"{len(found)} places, {len(errors)} trials with errors, {len(killing)} kills")
    outcomes: list[Outcome] = []
    stretch = max(1.0, *(o.seconds / FREE_S for o in journeys.values()))

    def one(trial: Trial) -> None:
        if time.monotonic() > begun_s + 60 * args.minutes:
            return
        outcome = play(trial, args.keep, stretch=stretch)
        outcomes.append(outcome)
        if outcome.violations:
            broken.append(f"{outcome.what}: {'; '.join(outcome.violations)} {outcome.folder}")
            last = outcome.output.strip().splitlines()[-4:]
            say("\n".join([f"VIOLATION {broken[-1]}", f"  {outcome.state!r}: {outcome.message}", *last]))
        if len(outcomes) % 50 == 0:
            say(f"{len(outcomes)} of {len(todo)} trials")

    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(one, todo))
    if len(outcomes) < len(todo):
        broken.append(f"{len(todo) - len(outcomes)} trials were not run within {args.minutes:g} minutes")
    tested = [o for o in outcomes if o.trial.fault]
    figures = {
        "seed": args.seed,
        "places": {
            "in_all": len(found),
            "after_start": sum(c["started"] > 0 for c in found.values()),
            "tested": len({o.trial.fault.place for o in tested if o.reached and o.trial.fault}),
        },
        "trials": len(tested),
        "not_reached": sum(not o.reached for o in tested),
        "kills": sum(o.reached for o in outcomes if not o.trial.fault),
        "outcomes": dict(Counter(o.kind for o in outcomes)),
        "longest_unwatched_s": max((o.unwatched_s for o in outcomes), default=0.0),
        "stretch": round(stretch, 2),
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    return Report(figures, broken)
