"""One trial of the chaos benchmark: a short training under the monitor, one thing done to the monitor, and the verdict.

Two journeys touch what the monitor does: `hang` (start, checkpoints, a hang, recovery, completion) and `crash` (a crash,
the restart, a user's stop). `opens` is a run of ten minutes with both, for errors at random calls that open something. The training is `toy_loop.py`: 50 ms a step, no torch, a LoRA whose bytes depend on each step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import checkout, toy_loop
from benchmarks.chaos_sampler import Sampler, Seen
from benchmarks.goodput import read_ledger
from benchmarks.goodput_contenders import Job, begin, finish, ours
from runs.paths import ROOT

SHIM = ROOT / "benchmarks" / "shims" / "chaos"
FINAL = ("completed", "failed", "stopped", "preempted", "unkillable")
EXIT_CODES = {"completed": (0,), "failed": (1, 4), "stopped": (3,), "preempted": (5,), "unkillable": (1,)}
UNWATCHED_LIMIT_S = 10.0
TRIAL_LIMIT_S = 75.0
SETTLE_S = 11.0  # an orphaned trainer is observed for this long: longer than UNWATCHED_LIMIT_S
STEP_S = 0.05
FREE_S = 8.0  # the undisturbed journeys need less on two free cores
EVERY = 15
LIMITS: checkout.Limits = {
    "watch": {"tree_s": 1},
    "end": {"grace_s": 1, "stop_grace_s": 2, "kill_wait_s": 4, "unkillable_s": 5, "stop_save_s": 10},
    "restart": {"backoff_first_s": 0.5, "backoff_last_s": 2, "disk_wait_s": 10},
    "check": {"verify_s": 20, "render_s": 20},
}


@dataclass(frozen=True)
class Journey:
    """A training of `steps` with these faults; the user stops it at step `stop_at` (0: never). It may take `limit_s`."""

    steps: int
    faults: str
    stop_at: int = 0
    limit_s: float = TRIAL_LIMIT_S
    every: int = EVERY  # steps between two checkpoints


JOURNEYS = {
    "hang": Journey(60, "step_sleeps@34"),
    "crash": Journey(400, "raises@22", stop_at=40),
    "opens": Journey(11_000, "step_sleeps@1034,raises@3034,step_sleeps@5034,raises@7034", 0, 1500.0, 500),
}


@dataclass(frozen=True)
class Fault:
    """An error at a place: once (`for_s` 0) or from the chosen call on for `for_s` seconds."""

    place: tuple[str, str, int]
    errno: int
    for_s: float
    call: int = 1
    from_start: bool = False


@dataclass(frozen=True)
class Trial:
    """What is done to the monitor: one fault, or SIGKILL `kill_after_s` after the training's start, or nothing.

    rate: instead, each call that opens something fails with this probability, from the training's start on, drawn by `seed`.
    """

    name: str
    journey: str
    fault: Fault | None = None
    kill_after_s: float | None = None
    rate: float = 0.0
    seed: int = 0


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
        found.append(
            f"not over after {JOURNEYS[outcome.trial.journey].limit_s * stretch:.0f} s: state {outcome.state!r}, {outcome.message!r}"
        )
        return found
    if outcome.trainers_left:
        found.append(f"the monitor ended with exit code {outcome.exit_code} and left a living trainer")
    if outcome.state in FINAL:
        if outcome.trial.rate and outcome.state != "completed":
            found.append(f"{outcome.state} where only the watcher was disturbed")
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


def play(
    trial: Trial,
    sampler: Sampler,
    root: Path = ROOT,
    keep: Path | None = None,
    shim: Path = SHIM,
    stretch: float = 1.0,
) -> Outcome:
    """Run the trial. Its folder is kept in `keep` when a promise was broken; nothing else of it is left.

    `stretch`: how much slower than two free cores this machine is; the limits in seconds are multiplied by it.
    """
    begun_s, token = time.monotonic(), secrets.token_hex(8)
    work = Path(tempfile.gettempdir()) / f"chaos-{token}"
    work.mkdir()
    journey, outcome = JOURNEYS[trial.journey], Outcome(trial)
    try:
        job = ours(work, journey.steps, journey.every, root)
        seen = sampler.add(token, job.folder)
        job.cwd = work  # where Python puts temporary files when every folder for them fails
        process = begin(job, environment(trial, work, token, root, shim))
        try:
            wait(process, trial, job, work, seen, outcome, begun_s + journey.limit_s * stretch)
            until = time.monotonic() + SETTLE_S * stretch
            while seen.trainers() and time.monotonic() < until and not outcome.timed_out:
                time.sleep(0.1)
        finally:
            observe(outcome, process.poll(), job, work, journey, seen)
            finish(process, token)
            sampler.remove(token)
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


def environment(trial: Trial, work: Path, token: str, root: Path, shim: Path) -> dict[str, str]:
    """The monitor's environment: limits of a short run, the shim first on PYTHONPATH, temporary files of its own."""
    for name in ("tmp", "injected", "chaos"):
        (work / name).mkdir()
    (work / "limits.toml").write_text(checkout.limits_toml(LIMITS), encoding="utf-8")
    (work / "notify.toml").write_text('urls = ["json://127.0.0.1:9/"]\non = ["nothing"]\n', encoding="utf-8")
    (work / "notify.toml").chmod(0o600)
    return {
        "TOY_RUN": token,
        "TOY_LEDGER": str(work / "ledger.jsonl"),
        "TOY_FAULTS": JOURNEYS[trial.journey].faults,
        "TOY_FAULTS_DONE": str(work / "injected"),
        "TOY_STEP_S": str(STEP_S),
        "TMPDIR": str(work / "tmp"),
        "HANGPROOF_LIMITS": str(work / "limits.toml"),
        "HANGPROOF_NOTIFY": str(work / "notify.toml"),
        "HANGPROOF_GPUS": f"chaos-{token}",
        "PYTHONPATH": os.pathsep.join(map(str, (shim, SHIM.parent / "nvml", root))),
        "CHAOS_SHIM": str(SHIM),
        "CHAOS_ROOT": str(root),
        "CHAOS_FOLDER": str(work / "chaos"),
        "CHAOS_LEDGER": str(work / "ledger.jsonl"),
        "CHAOS_FAULT": json.dumps(vars(trial.fault)) if trial.fault else "",
        "CHAOS_RATE": json.dumps({"rate": trial.rate, "errno": errno.EMFILE, "seed": trial.seed}) if trial.rate else "",
    }


def wait(
    process: subprocess.Popen[bytes], trial: Trial, job: Job, work: Path, seen: Seen, outcome: Outcome, until_s: float
) -> None:
    """Until keeper and monitor have ended; the user's stop and the kill happen on the way."""
    ledger, stop_at, started_s = work / "ledger.jsonl", JOURNEYS[trial.journey].stop_at, 0.0
    kill_after_s = trial.kill_after_s
    while process.poll() is None or seen.monitors:  # a monitor may outlive its keeper
        now_s = time.monotonic()
        if now_s > until_s:
            outcome.timed_out = True
            return
        if not started_s and ledger.exists():
            started_s = now_s
        if kill_after_s is not None and started_s and now_s - started_s >= kill_after_s:
            outcome.reached, kill_after_s = _kill_monitor(job.folder), None
        if stop_at and any(line["step"] >= stop_at for line in read_ledger(ledger)):
            (job.folder / "stop.request").write_text("{}", encoding="utf-8")
            stop_at = 0
        time.sleep(0.05)


def _kill_monitor(folder: Path) -> bool:
    """SIGKILL the process that status.json names as the run's monitor; False when there is none."""
    for _ in range(20):
        pid = _json(folder / "status.json").get("monitor_pid")
        with contextlib.suppress(OSError):
            if pid and b"monitor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def observe(outcome: Outcome, code: int | None, job: Job, work: Path, journey: Journey, seen: Seen) -> None:
    """Fill in what the run's files and the samples show."""
    status = _json(job.folder / "status.json")
    outcome.exit_code = code
    outcome.state, outcome.message = status.get("state", ""), status.get("message", "")
    outcome.started = (work / "ledger.jsonl").exists()
    outcome.reached = outcome.reached or (work / "chaos" / "fired").exists()
    lora = job.folder / "toy.safetensors"
    if lora.exists():
        outcome.lora = "right" if lora.read_bytes() == toy_loop.expected(journey.steps) else "wrong"
    outcome.unwatched_s, outcome.trainers_at_once = round(seen.unwatched_s, 1), seen.at_once
    outcome.trainers_left = len(seen.trainers()) if code is not None else 0
    with contextlib.suppress(OSError):
        outcome.output = job.log.read_text(encoding="utf-8", errors="replace")[-3000:]


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def discover(journey: str, sampler: Sampler, root: Path = ROOT) -> tuple[dict[tuple[str, str, int], dict], Outcome]:
    """Every place that a run of this journey reaches: place -> {"started": calls after the start, "start": calls before it}."""
    token = secrets.token_hex(4)
    kept = Path(tempfile.gettempdir()) / f"chaos-places-{token}"
    kept.mkdir()
    shim = kept / "shim"
    shim.mkdir()
    found: dict[tuple[str, str, int], dict] = {}
    try:
        (shim / "sitecustomize.py").write_text(
            f"import os\nos.environ['CHAOS_FOLDER'] = {str(kept)!r}\n"
            "exec(compile(open(os.environ['CHAOS_SHIM'] + '/sitecustomize.py').read(), 'chaos', 'exec'))\n",
            encoding="utf-8",
        )
        outcome = play(Trial(f"discover-{journey}", journey), sampler, root, shim=shim, stretch=10.0)
        for path in kept.glob("places-*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                calls = found.setdefault(tuple(record["place"]), {"start": 0, "started": 0})
                key = "started" if record["started"] else "start"
                calls[key] = max(calls[key], record["calls"])
        return found, outcome
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def later_call(calls: int, draw: random.Random) -> int:
    """A call after the first, of those that a run of this length surely makes."""
    return draw.randint(2, max(2, calls // 2))


if __name__ == "__main__":
    sys.exit("run `python -m benchmarks chaos`")
