"""Chaos on the monitor itself: each of its calls to the operating system fails, and it is killed, while it watches.

    python -m benchmarks chaos [--json] [--short N] [--seed S] [--keep DIR]

Decision: the places are found, not listed. A run under a wrapper records every call that leaves the watching process
(`chaos_shim/sitecustomize.py`); then each place gets its trials: an error at the first call after the training has
started, an error for 5 s from there, and an error at a random later call. ENOSPC, EIO, EMFILE, ENOMEM and EACCES take
turns. The monitor is also killed with SIGKILL at random moments of a run with a hang.

Two journeys touch what the monitor does: `hang` (start, checkpoints, a hang, recovery, completion) and `crash` (a
crash, the restart, a user's stop). The training is `toy_loop.py`: 50 ms a step, no torch, a LoRA whose bytes depend
on each step.

Every trial must end completed with the LoRA of an undisturbed run, or in another final state with the reason. A
training is never unwatched for more than 10 s, which means that status.json is written, and never runs twice. On a busy
machine the limits in seconds are stretched by how much longer the undisturbed runs take (`stretch`).
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

from benchmarks import toy_loop, trial
from benchmarks.report import CannotMeasure, Report, say
from benchmarks.trial import Job, read_end, read_lines
from guards.reading import read_json
from monitor.process import platform
from runs.paths import ROOT

SHIM = ROOT / "benchmarks" / "chaos_shim"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES)
LAST_S = 5.0
PARALLEL = 6
KILLS = 50
EXIT_CODES = {"completed": (0,), "failed": (1, 4), "stopped": (3,), "preempted": (5,), "unkillable": (1,)}
UNWATCHED_LIMIT_S = 10.0
TRIAL_LIMIT_S = 75.0
SETTLE_S = 11.0  # an orphaned trainer is observed for this long: longer than UNWATCHED_LIMIT_S
SAMPLE_S = 0.2
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


@dataclass(frozen=True)
class Trial:
    """What is done to the monitor: SIGKILL `kill_after_s` after the training's start, an error at a place, or nothing.

    The error occurs at call number `call`, counted from the training's start or the monitor's, and for `for_s` after.
    """

    name: str
    journey: str
    place: Place | None = None
    errno: int = 0
    for_s: float = 0.0
    call: int = 1
    from_start: bool = False
    kill_after_s: float | None = None

    def __str__(self) -> str:
        """`os.open at monitor/state.py:41: EIO at call 1`."""
        if self.place is None:
            return f"SIGKILL {self.kill_after_s or 0:.2f} s after the start of the training"
        function, file, line = self.place
        when = f"for {self.for_s:g} s from call {self.call}" if self.for_s else f"at call {self.call}"
        return f"{function} at {file}:{line}: {errno.errorcode[self.errno]} {when}"


@dataclass
class Outcome:
    """What came of a trial. `reached`: the error or the kill did happen. `exit_code` None: it was not over in time."""

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
    output: str = ""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    # Where nothing fails, the places: their calls before the training's start and after it.
    places: dict[Place, list[int]] = field(default_factory=dict)


def judge(outcome: Outcome, stretch: float = 1.0) -> list[str]:
    """What the monitor's promises forbid and this trial shows; [] when all are kept. `stretch`: as in `play`."""
    found, ended = [], f"the monitor ended with exit code {outcome.exit_code}"
    if outcome.trainers_at_once > 1:
        found.append(f"{outcome.trainers_at_once} trainers at once")
    if outcome.unwatched_s > UNWATCHED_LIMIT_S * stretch:
        found.append(f"the training was unwatched for {outcome.unwatched_s:.1f} s")
    if outcome.exit_code is None:
        return [*found, f"not over after {TRIAL_LIMIT_S * stretch:.0f} s: {outcome.state!r}, {outcome.message!r}"]
    if outcome.trainers_left:
        found.append(f"{ended} and left a living trainer")
    if outcome.state in EXIT_CODES:
        if outcome.state == "completed" and outcome.lora != "right":
            found.append(f"completed, and the LoRA is {outcome.lora}")
        if not outcome.message:
            found.append(f"{outcome.state} without a reason")
        if outcome.exit_code not in EXIT_CODES[outcome.state]:
            found.append(f"{outcome.state} with exit code {outcome.exit_code}")
    elif outcome.started:
        found.append(f"{ended} in state {outcome.state!r}")
    elif outcome.exit_code == 0 or not outcome.output.strip() or "Traceback" in outcome.output:
        found.append(f"refused to start with exit code {outcome.exit_code} and no reason")
    return found


def play(one: Trial, keep: Path | None = None, shim: Path = SHIM, stretch: float = 1.0) -> Outcome:
    """Run the trial. Its folder is kept in `keep` when a promise was broken; nothing else of it is left.

    `stretch`: how much slower than two free cores this machine is; the limits in seconds are multiplied by it.
    """
    begun_s, token = time.monotonic(), secrets.token_hex(8)
    work = Path(tempfile.gettempdir()) / f"chaos-{token}"
    work.mkdir()
    outcome = Outcome(one)
    try:
        job = trial.ours(work, JOURNEYS[one.journey].steps, EVERY)
        job.cwd = work  # where Python puts temporary files when every folder for them fails
        with trial.started(job, environment(one, work, token, shim), token) as process:
            wait(process, token, job, outcome, stretch)
            observe(outcome, job)
        outcome.violations = judge(outcome, stretch)
        outcome.seconds = round(time.monotonic() - begun_s, 1)
        if outcome.violations and keep is not None:
            names = lambda folder, found: [n for n in found if (Path(folder) / n).is_socket()]  # noqa: E731
            shutil.copytree(work, keep / f"{one.name}-{token[:4]}", symlinks=True, ignore=names)
        return outcome
    finally:
        shutil.rmtree(work, ignore_errors=True)


def environment(one: Trial, work: Path, token: str, shim: Path) -> dict[str, str]:
    """The monitor's environment: limits of a short run, the shim first on PYTHONPATH, temporary files of its own."""
    toy = trial.toy_environment(work, JOURNEYS[one.journey].faults)
    (work / "chaos").mkdir()
    (work / "limits.toml").write_text(trial.limits_toml(LIMITS), encoding="utf-8")
    (work / "notify.toml").write_text('urls = ["json://127.0.0.1:9/"]\non = ["nothing"]\n', encoding="utf-8")
    (work / "notify.toml").chmod(0o600)
    return {
        **toy,
        "HANGPROOF_LIMITS": str(work / "limits.toml"),
        "HANGPROOF_NOTIFY": str(work / "notify.toml"),
        "HANGPROOF_GPUS": f"chaos-{token}",
        "PYTHONPATH": os.pathsep.join(map(str, (shim, ROOT))),
        "CHAOS_SHIM": str(SHIM),
        "CHAOS_ROOT": str(ROOT),
        "CHAOS_FOLDER": str(work / "chaos"),
        "CHAOS_LEDGER": toy["TOY_LEDGER"],
        "CHAOS_FAULT": json.dumps(vars(one)) if one.place else "",
    }


def wait(process: subprocess.Popen[bytes], token: str, job: Job, outcome: Outcome, stretch: float) -> None:
    """Until keeper and monitor have ended; stop and kill happen on the way. Then a living trainer is observed."""
    begun_s, started_s = time.monotonic(), 0.0
    stop_at, kill_after_s = JOURNEYS[outcome.trial.journey].stop_at, outcome.trial.kill_after_s
    watch = Watch(job.folder / "status.json", outcome)
    while process.poll() is None or left(token, " monitor run"):  # a monitor may outlive its keeper
        now_s, lines = time.monotonic(), read_lines(job.log.parent / "ledger.jsonl")
        if now_s > begun_s + TRIAL_LIMIT_S * stretch:
            return
        watch.note(len(left(token, "/toy_loop.py")), now_s)
        if not started_s and lines:
            started_s = now_s
        if kill_after_s is not None and started_s and now_s - started_s >= kill_after_s:
            outcome.reached = kill_monitor(job.folder)
            kill_after_s = None if outcome.reached else kill_after_s
        if stop_at and any(line["step"] >= stop_at for line in lines):
            (job.folder / "stop.request").write_text("{}", encoding="utf-8")
            stop_at = 0
        time.sleep(SAMPLE_S)
    outcome.exit_code, until_s = process.poll(), time.monotonic() + SETTLE_S * stretch
    while (living_s := time.monotonic()) < until_s and (trainers := left(token, "/toy_loop.py")):
        watch.note(len(trainers), living_s)
        time.sleep(SAMPLE_S)
    outcome.trainers_left = len(left(token, "/toy_loop.py"))


@dataclass
class Watch:
    """How long a training was unwatched: the gaps between two writes of status.json, while a trainer lives."""

    file: Path
    outcome: Outcome
    sign_s: float = 0.0
    stamp: tuple[int, int] = (0, 0)

    def note(self, trainers: int, now_s: float) -> None:
        """One sample: how many trainers live."""
        self.outcome.trainers_at_once = max(self.outcome.trainers_at_once, trainers)
        with contextlib.suppress(OSError):
            found = os.stat(self.file)
            if self.stamp != (found.st_mtime_ns, found.st_ino):
                self.stamp, self.sign_s = (found.st_mtime_ns, found.st_ino), now_s
        if not trainers or not self.sign_s:
            self.sign_s = now_s
        self.outcome.unwatched_s = round(max(self.outcome.unwatched_s, now_s - self.sign_s), 1)


def left(token: str, words: str) -> list[int]:
    """The trial's living processes with these words in their command, but for standby attempts."""
    return [pid for pid, command in trial.living(token).items() if words in command and not trial.waits(pid)]


def kill_monitor(folder: Path) -> bool:
    """SIGKILL the process that status.json names as the run's monitor; False when there is none."""
    pid = (read_json(folder / "status.json") or {}).get("monitor_pid")
    with contextlib.suppress(OSError):
        if pid and "monitor" in platform.command_of(pid):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def observe(outcome: Outcome, job: Job) -> None:
    """Fill in what the run's files show."""
    status, work = read_json(job.folder / "status.json") or {}, job.log.parent
    outcome.state, outcome.message = status.get("state", ""), status.get("message", "")
    outcome.started = (work / "ledger.jsonl").exists()
    outcome.reached = outcome.reached or (work / "chaos" / "fired").exists()
    lora = job.folder / "toy.safetensors"
    if lora.exists():
        right = lora.read_bytes() == toy_loop.expected(JOURNEYS[outcome.trial.journey].steps)
        outcome.lora = "right" if right else "wrong"
    outcome.output = read_end(job.log)
    for record in [record for path in (work / "chaos").glob("places-*.jsonl") for record in read_lines(path)]:
        calls = outcome.places.setdefault(tuple(record["place"]), [0, 0])
        calls[record["started"]] = max(calls[record["started"]], record["calls"])


def trials(journeys: dict[str, Outcome], seed: int) -> list[Trial]:
    """Those of all places. A place that only the start reaches fails there, at its first call."""
    found: dict[Place, tuple[str, int]] = {}  # the first journey that reaches it, and its calls after the start
    for name, outcome in journeys.items():
        for place, (_, calls) in outcome.places.items():
            if not found.get(place, ("", 0))[1]:
                found[place] = (name, calls)
    made, draw = [], random.Random(seed)
    for number, (place, (journey, calls)) in enumerate(sorted(found.items())):
        cases = [(0.0, 1), (LAST_S, 1)]
        if calls >= 2:
            cases.append((0.0, draw.randint(2, max(2, calls // 2))))  # a run of this length surely makes it
        for turn, (for_s, call) in enumerate(cases):
            code = ERRORS[(number + turn + seed) % len(ERRORS)]
            name = f"{number:03d}-{'5s' if for_s else f'call{call}'}-{errno.errorcode[code]}"
            made.append(Trial(name, journey, place, code, for_s, call, from_start=not calls))
    return made


def kills(number: int, seed: int, run_s: float) -> list[Trial]:
    """SIGKILL at random moments of the run with a hang, which lasts `run_s` seconds from the start of the training."""
    draw = random.Random(f"kills {seed}")
    moments = (draw.uniform(0.0, 0.95 * run_s) for _ in range(number))
    return [Trial(f"kill-{at_s:.2f}s", "hang", kill_after_s=at_s) for at_s in moments]


def undisturbed() -> dict[str, Outcome]:
    """The journeys without an error. They record the places."""
    return {name: play(Trial(f"undisturbed-{name}", name), stretch=10.0) for name in JOURNEYS}


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", type=int, metavar="N", help="only N places, one trial each, and N / 4 kills")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of the trials that failed in DIR")


def measure(args: argparse.Namespace) -> Report:
    """One campaign; each broken promise is a sentence."""
    if not Path("/proc/self/stat").exists():
        raise CannotMeasure("it needs /proc, so Linux")
    begun_s, journeys = time.monotonic(), undisturbed()
    broken: list[str] = []
    for name, outcome in journeys.items():
        ended = [f"it ended {outcome.state!r}: {outcome.message}"] if outcome.state != JOURNEYS[name].ends else []
        broken += [f"the undisturbed {name} journey: {violation}" for violation in (*outcome.violations, *ended)]
    draw, errors = random.Random(args.seed), trials(journeys, args.seed)
    places = {one.place for one in errors}
    number = KILLS
    if args.short is not None:
        draw.shuffle(errors)
        errors, number = list({one.place: one for one in errors}.values())[: args.short], args.short // 4
    todo = errors + kills(number, args.seed, max(1.0, journeys["hang"].seconds - 1.5))
    draw.shuffle(todo)
    say(f"{len(places)} places, {len(errors)} trials with errors, {number} kills")
    stretch = max(1.0, *(o.seconds / FREE_S for o in journeys.values()))

    def played(one: Trial) -> Outcome:
        outcome = play(one, args.keep, stretch=stretch)
        if outcome.violations:
            last = outcome.output.strip().splitlines()[-4:]
            say("\n".join([f"VIOLATION {one}: {outcome.violations}: {outcome.state!r}: {outcome.message}", *last]))
        return outcome

    with ThreadPoolExecutor(PARALLEL) as pool:
        outcomes = list(pool.map(played, todo))
    broken += [f"{o.trial} ({o.trial.name}): {'; '.join(o.violations)}" for o in outcomes if o.violations]
    tested = [o for o in outcomes if o.trial.place]
    kinds = (
        "violation" if o.violations else o.state if o.state in EXIT_CODES else "refused to start" for o in outcomes
    )
    figures = {
        "seed": args.seed,
        "places": {"in_all": len(places), "tested": len({o.trial.place for o in tested if o.reached})},
        "trials": len(tested),
        "not_reached": sum(not o.reached for o in tested),
        "kills": sum(o.reached for o in outcomes if not o.trial.place),
        "outcomes": dict(Counter(kinds)),
        "longest_unwatched_s": max(o.unwatched_s for o in outcomes),
        "stretch": round(stretch, 2),
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    return Report(figures, broken)
