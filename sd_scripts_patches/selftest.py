"""`python -m sd_scripts_patches selftest DIR`: does this installation train, and is it guarded? One minute, no model file.

The trainer itself (sd-scripts' FLUX script, musubi-tuner's Z-Image caching and training) trains a tiny model with
random weights (tiny.py), in the user's checkout and environment, with the guards: once to the end, once killed with
SIGKILL and resumed, once with a loader worker that sleeps for ever. A static check alone cannot answer the question: a
guard counts when it has ended a real hang, and a resume is exact when each loss has the same digits as those of the
undisturbed run. It runs on the processor, so it needs no GPU.

DIR may be CHECKOUT@VENV. Exit codes: 0 all checks passed, 1 at least one failed, 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from guards import checkpoint, crash
from sd_scripts_patches import compatibility, registry, tiny, trainers, trial
from sd_scripts_patches.patch import Incompatible
from sd_scripts_patches.tiny import Installation
from sd_scripts_patches.trial import Job, Trial

OK, NOTE, FAILED, SKIPPED = "ok", "note", "failed", "not run"
IMAGES, STEPS, STATE_EVERY, KILL_AFTER = 6, 12, 4, 9
"""Two epochs of 6 steps. Killed in step 10, the run resumes from step 8: in the middle of its second epoch."""
WORKER_LIMIT_S = 10
RUN_LIMIT_S, HANG_LIMIT_S = 300.0, 60.0
VERSIONS = ("torch", "torchvision", "accelerate", "transformers", "diffusers", "huggingface-hub")

DIE = f"""
import os, signal
left, add = [{KILL_AFTER}], module.LossRecorder.add
def recorded(self, *, epoch, step, loss):
    add(self, epoch=epoch, step=step, loss=loss)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
module.LossRecorder.add = recorded
"""
SLEEP = """
import os, time
from torch.utils.data import get_worker_info
real, loaded = module.{name}.__getitem__, [0]
def getitem(self, index):
    loaded[0] += get_worker_info() is not None
    if loaded[0] == 4:
        with open({marker!r}, "w") as file:
            file.write(f"{{time.monotonic()}} {{os.getpid()}}")
        time.sleep(36000)
    return real(self, index)
module.{name}.__getitem__ = getitem
"""


@dataclass(frozen=True)
class Check:
    """One row of the result. text: what was found. action: what to do; only where it failed. log: the end of a log."""

    name: str
    status: str
    text: str
    action: str = ""
    log: tuple[str, ...] = ()


def _failed(name: str, text: str, action: str, job: Job | None = None) -> Check:
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", job.log) if line.strip()][-12:] if job else []
    return Check(name, FAILED, text, action, tuple(lines))


def run(target: Installation, trial_: Trial, stand_in: bool = False) -> Iterator[Check]:
    """Yield each check as it is known. stand_in: train although torchvision is missing."""
    work = trial_.folder / "work"
    target.write_site(work)
    left = ["environment", "versions", "GPU", "guards", "caches", "train", "LoRA", "hang", "resume"]
    if not target.row.caching(work, work)[0]:
        left.remove("caches")
    for check in _checks(target, trial_, work, stand_in):
        left.remove(check.name)
        yield check
    for name in left:
        yield Check(name, SKIPPED, "a check above failed")


def _checks(target: Installation, trial_: Trial, work: Path, stand_in: bool) -> Iterator[Check]:
    environment = trial_.environment(target, work)
    environment.pop("CUDA_VISIBLE_DEVICES")
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # whether the user's environment sees a GPU is one of its facts
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    command = [str(target.python), "-m", "sd_scripts_patches.selftest", str(target.checkout), str(work)]
    preparing = trial_.start(command, environment, target.checkout, "prepare")
    guards = _guards(target, work)
    trial_.wait(preparing, RUN_LIMIT_S)
    facts_file = work / "facts.json"
    facts = json.loads(facts_file.read_text(encoding="utf-8")) if facts_file.is_file() else {}
    yield (ready := _environment(target, facts, preparing, stand_in))
    if facts:
        yield _versions(target, facts["packages"])
    if facts.get("gpu"):
        yield Check("GPU", NOTE if facts["gpu"].startswith("none") else OK, f"{facts['gpu']} (not used here)")
    yield guards
    if FAILED in (ready.status, guards.status):
        return
    if commands := target.row.caching(work, work)[0]:
        yield (cached := _caches(target, trial_, work, commands))
        if cached.status == FAILED:
            return

    whole = _start(target, trial_, work, "undisturbed")
    killed = _start(target, trial_, work, "killed", fault=(target.row.LOSSES, DIE))
    trial_.wait(whole, RUN_LIMIT_S)
    trial_.wait(killed, RUN_LIMIT_S)
    yield (trained := _train(trial_, whole))
    if trained.status == FAILED:
        return

    lora = _made(trial_, "undisturbed") / "tiny.safetensors"
    marker = trial_.folder / "asleep"
    sleep = (target.row.ITEMS, SLEEP.format(marker=str(marker), name=target.row.ITEMS.partition(":")[2]))
    limits = {"HANGPROOF_DATALOADER_TIMEOUT_S": str(WORKER_LIMIT_S), "HANGPROOF_DATALOADER_FIRST_BATCH_S": "120"}
    more = ("--network_weights", str(lora))
    hung = _start(target, trial_, work, "hang", *more, fault=sleep, workers="1", **limits)
    state = checkpoint.newest_valid(_made(trial_, "killed")) if _made(trial_, "killed").is_dir() else None
    resumed = _start(target, trial_, work, "killed", "--resume", str(state), log="resumed") if state else None
    pid = _wait_for_hang(trial_, hung, marker)
    worker_left = bool(pid) and _still_there(pid)
    yield _lora(lora, hung)
    yield _hang(hung, marker, worker_left)
    if resumed is not None:
        trial_.wait(resumed, RUN_LIMIT_S)
    yield _resume(trial_, killed, state, resumed)


def _environment(target: Installation, facts: dict, job: Job, stand_in: bool) -> Check:
    name, trainer, script = "environment", target.trainer, target.row.SCRIPT
    listed = target.checkout / "requirements.txt"
    pip = f"{target.python} -m pip install -r {listed}, or " if listed.is_file() else ""
    again = (
        f"Install its requirements again: {pip}delete {target.python.parent.parent} and run ./start.sh {trainer.key}"
    )
    missing = [package for package in target.row.STAND_INS if facts and not facts["packages"][package]]
    names = " and ".join(missing) + (" is" if len(missing) == 1 else " are")
    if missing and not stand_in:
        pinned = _pinned(target)
        wanted = " ".join(f"{package}=={pinned[package]}" if package in pinned else package for package in missing)
        text = f"{target.python}: {names} missing, and {trainer.name} imports {'it' if len(missing) == 1 else 'them'}"
        return _failed(name, text, f"Install it: {target.python} -m pip install {wanted}")
    if job.code != 0:
        text = f"{script} cannot be imported with {target.python}: {job.error()}"
        return _failed(name, text, f"{again}. If a file of {target.checkout} was changed, restore it.", job)
    text = f"{script} and its libraries can be imported (Python {facts['python']}, {job.took_s:.0f} s)"
    if missing:
        return Check(name, NOTE, f"{text}; {names} missing and replaced for this test only")
    return Check(name, OK, text)


def _pinned(target: Installation) -> dict[str, str]:
    """Return package → version of what the checkout pins."""
    try:
        listed = "\n".join([*target.trainer.extra, *trainers.requirements(target.checkout)])
    except ValueError:
        return {}
    return dict(re.findall(r"^([\w-]+)(?:\[[^\]]*\])?==([\w.]+)", listed, re.MULTILINE))


def _versions(target: Installation, found: dict[str, str]) -> Check:
    pinned, rows, differs = _pinned(target), [], False
    for package in VERSIONS:
        has = (found.get(package) or "missing").partition("+")[0]
        other = package in pinned and pinned[package] != has
        differs |= other
        rows.append(f"{package} {has}" + (f" (pinned: {pinned[package]})" if other else ""))
    return Check("versions", NOTE if differs else OK, ", ".join(rows))


def _guards(target: Installation, work: Path) -> Check:
    name, patches = "guards", registry.patches(target.trainer.name)
    arguments = target.row.arguments(work, work / "out")
    refusal, spared = compatibility.refusal(patches, target.source, arguments, strict=False)
    if refusal:
        action = f"Use the tested commit (./start.sh {target.trainer.key} names it); the table above says which wait is open."
        return Check(
            name, FAILED, refusal.splitlines()[-1].removeprefix("hangproof: "), action, tuple(refusal.splitlines()[:-1])
        )
    targets = [t.verdict for patch in patches for t in compatibility.check_patch(patch, target.source).targets]
    parts = [f"{targets.count(verdict)} {verdict}" for verdict in compatibility.VERDICTS if verdict in targets]
    names = registry.MUSUBI_NAMES if target.trainer.name == compatibility.MUSUBI else registry.NAMES
    left_out = [patch for patch in names if patch not in {p.name for p in patches}]
    notes = [f"not guarded: {line}" for line in spared] + [f"left out by you: {patch}" for patch in left_out]
    return Check(name, NOTE if notes else OK, "; ".join([f"{len(patches)} patches: {', '.join(parts)}", *notes]))


def _caches(target: Installation, trial_: Trial, work: Path, commands: dict[str, list[str]]) -> Check:
    """Run the commands that come before a training, at the same time: they write different files."""
    name, jobs = "caches", []
    for script, arguments in commands.items():
        environment = trial_.environment(target, work)
        command = target.command(*arguments, script=script)
        jobs.append((script, trial_.start(command, environment, target.checkout, Path(script).stem)))
    for _, job in jobs:
        trial_.wait(job, RUN_LIMIT_S)
    for script, job in jobs:
        if job.code != 0:
            action = (
                "The end of its log is above; look the error up in the checkout's issues, or use the tested commit."
            )
            return _failed(name, f"{script} {job.outcome()}: {job.error()}", action, job)
    files = len(list((work / "cache").glob("*.safetensors")))
    if files != 2 * IMAGES:
        action = "Run the self-test again; if it stays, use the tested commit."
        return _failed(name, f"{' and '.join(commands)} wrote {files} files, not {2 * IMAGES}", action, jobs[0][1])
    took_s = max(job.took_s for _, job in jobs)
    return Check(name, OK, f"{' and '.join(commands)} wrote {files} files in {took_s:.0f} s")


def _made(trial_: Trial, name: str) -> Path:
    return trial_.folder / name / "made"


def _start(
    target: Installation, trial_: Trial, work: Path, name: str, *more: str,
    fault: tuple[str, str] | None = None, workers: str = "0", log: str = "", **extra: str,
) -> Job:  # fmt: skip
    """Start a training in folder NAME. fault: ("module:class" of the trainer, the code to run where it is defined)."""
    folder = trial_.folder / name
    folder.mkdir(exist_ok=True)
    settings = {"TINY_LOSSES": str(folder / "losses"), "HANGPROOF_RUN": str(folder), **extra}
    if fault is not None:
        (folder / "fault.py").write_text(fault[1], encoding="utf-8")
        module, _, symbol = fault[0].partition(":")
        settings["TINY_FAULTS"] = f"{target.home(symbol, module)}={folder / 'fault.py'}"
    arguments = target.row.arguments(
        work, folder / "made", "--save_state", *more,
        max_train_steps=str(STEPS), save_every_n_steps=str(STATE_EVERY), max_data_loader_n_workers=workers,
    )  # fmt: skip
    environment = trial_.environment(target, work, **settings)
    return trial_.start(target.command(*arguments), environment, target.checkout, log or name)


def _losses(trial_: Trial, name: str) -> list[tuple[tuple[int, int], float]]:
    path = trial_.folder / name / "losses"
    return [((epoch, step), loss) for epoch, step, loss in tiny.losses(path)] if path.is_file() else []


def _train(trial_: Trial, job: Job) -> Check:
    name, losses = "train", [loss for _, loss in _losses(trial_, "undisturbed")]
    action = "The end of its log is above; look the error up in the checkout's issues, or use the tested commit."
    if job.code != 0:
        return _failed(name, f"the tiny training {job.outcome()}: {job.error()}", action, job)
    if len(losses) != STEPS or not all(math.isfinite(loss) for loss in losses):
        return _failed(name, f"{len(losses)} of {STEPS} steps have a loss, the last ones {losses[-3:]}", action, job)
    return Check(
        name, OK, f"{STEPS} steps in {job.took_s:.0f} s, start included; loss {losses[0]:.4f} to {losses[-1]:.4f}"
    )


def _lora(path: Path, loader: Job) -> Check:
    name, verdict = "LoRA", checkpoint.verify_lora(path)
    action = "Run the self-test again; if it stays, the checkout's saving code is at fault: use the tested commit."
    if not verdict.usable:
        return _failed(name, "; ".join((*verdict.problems, verdict.error)), action)
    loaded = re.search(r"load network weights from .*", loader.log)
    if loaded is None or "All keys matched" not in loaded[0]:
        return _failed(name, f"the trainer itself could not load {path.name}: {loader.error()}", action, loader)
    return Check(
        name, OK, f"complete, {path.stat().st_size // 1024} KB, and the trainer's own loader takes all its keys"
    )


def _wait_for_hang(trial_: Trial, job: Job, marker: Path) -> int:
    """Wait until the hung training has ended, or its limit after the hang. Returns the worker's pid, 0 without a hang."""
    end_s = time.monotonic() + RUN_LIMIT_S
    while job.process.poll() is None and not (marker.is_file() and marker.read_text()) and time.monotonic() < end_s:
        time.sleep(trial.POLL_S)
    trial_.wait(job, HANG_LIMIT_S)
    return int(marker.read_text().split()[1]) if marker.is_file() else 0


def _still_there(pid: int) -> bool:
    end_s = time.monotonic() + WORKER_LIMIT_S
    while trial.is_alive(pid) and time.monotonic() < end_s:
        time.sleep(trial.POLL_S)
    return trial.is_alive(pid)


def _hang(job: Job, marker: Path, worker_left: bool) -> Check:
    name = "hang"
    action = "Do not train unattended with this installation: use the tested commit, without --hangproof_without."
    if not marker.is_file():
        return _failed(
            name, f"the planted hang was not reached: the training {job.outcome()}: {job.error()}", action, job
        )
    hung_s = job.started_s + job.took_s - float(marker.read_text().split()[0])
    if job.code is None:
        text = f"a loader worker slept, and no guard ended the training: killed after {hung_s:.0f} s"
        return _failed(name, text, action, job)
    message = re.search(r"waited \d+ s for batch \d+ of the data loader from worker \d+ \(pid \d+\)", job.log)
    if job.code != crash.EXIT_DEADLINE or message is None:
        text = f"a loader worker slept, and the training ended, but not by its guard: it {job.outcome()}: {job.error()}"
        return _failed(name, text, action, job)
    if worker_left:
        return _failed(name, "the guard ended the training, and its sleeping worker stayed behind", action, job)
    return Check(
        name, OK, f"a loader worker that sleeps for ever: ended by its guard {hung_s:.0f} s later ({message[0]})"
    )


def _resume(trial_: Trial, killed: Job, state: Path | None, resumed: Job | None) -> Check:
    name = "resume"
    action = "Do not rely on restarts with this installation: use the tested commit, without --hangproof_without."
    if killed.code is None or killed.code == 0:
        return _failed(name, f"the run that kills itself {killed.outcome()}", action, killed)
    if state is None or resumed is None:
        text = (
            f"killed in step {KILL_AFTER + 1}, the run left no complete state, and one each {STATE_EVERY} steps was due"
        )
        return _failed(name, text, action, killed)
    if resumed.code != 0:
        return _failed(
            name, f"resumed from {state.name}, the training {resumed.outcome()}: {resumed.error()}", action, resumed
        )
    whole, both = _losses(trial_, "undisturbed"), _losses(trial_, "killed")
    after = dict(both[KILL_AFTER:])
    last, expected = dict(both), dict(whole)
    wrong = [step for step, (key, loss) in enumerate(whole, 1) if last.get(key) != loss]
    if wrong or last.keys() != expected.keys():
        text = f"killed in step {KILL_AFTER + 1} and resumed from {state.name}, the losses differ from the undisturbed run's"
        where = f" from step {wrong[0]} on ({len(wrong)} of {STEPS})" if wrong else f": {len(last)} steps, not {STEPS}"
        return _failed(name, text + where, action, resumed)
    due = STEPS - KILL_AFTER // STATE_EVERY * STATE_EVERY
    if len(after) != due or len(both) != KILL_AFTER + due:
        text = f"resumed from {state.name}, {len(both) - KILL_AFTER} steps were trained, and {due} were left"
        return _failed(name, text, action, resumed)
    text = f"killed by SIGKILL in step {KILL_AFTER + 1}, resumed from {state.name}: all {STEPS} losses equal digit for digit"
    return Check(name, OK, text)


def prepare(checkout: Path, work: Path) -> None:
    """Write facts.json and the tiny models to `work`. Runs in the trainer's environment."""
    packages: dict[str, str] = {}
    target = Installation(checkout, Path(sys.executable))
    for name in dict.fromkeys((*VERSIONS, *target.row.STAND_INS)):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = ""
    facts = {"python": ".".join(map(str, sys.version_info[:3])), "packages": packages, "gpu": ""}
    file = work / "facts.json"
    file.write_text(json.dumps(facts), encoding="utf-8")

    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["gpu"] = f"{len(names)} visible to PyTorch: {', '.join(names)}"
    elif torch.backends.mps.is_available():
        facts["gpu"] = "Apple GPU, visible to PyTorch"
    else:
        facts["gpu"] = "none visible to PyTorch: this environment can train real models on the processor only"
    file.write_text(json.dumps(facts), encoding="utf-8")
    sys.path.insert(0, str(target.source))
    for module in target.row.IMPORTS:
        importlib.import_module(module)
    target.row.make(checkout, work, IMAGES)


def main(argv: list[str]) -> int:
    """Run the checks, print the table or JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sd_scripts_patches selftest",
        description="Train tiny random weights with your trainer, plant a hang, kill and resume. About one minute.",
    )
    parser.add_argument(
        "checkout", metavar="DIR", type=trial.installation, help="sd-scripts or musubi-tuner, or DIR@VENV"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--without-torchvision",
        action="store_true",
        help="train although torchvision (or av) is missing, for platforms that have no build of it",
    )
    options = parser.parse_args(argv)
    target, started_s, checks = options.checkout, time.monotonic(), []
    if not options.json:
        print(f"Self-test of {target.checkout}\nwith {target.python}\n", flush=True)
    try:
        with Trial() as trial_:
            for check in run(target, trial_, options.without_torchvision):
                checks.append(check)
                if not options.json:
                    print(shown(check), flush=True)
    except KeyboardInterrupt:
        print("\nsd_scripts_patches: stopped; nothing was left behind", file=sys.stderr)
        return 130
    except (Incompatible, OSError) as error:
        action = "Close other programs and run it again."
        checks.append(Check("self-test", FAILED, f"{type(error).__name__}: {error}", action))
        if not options.json:
            print(shown(checks[-1]))
    failed = [check.name for check in checks if check.status == FAILED]
    took_s = time.monotonic() - started_s
    if options.json:
        rows = [asdict(check) for check in checks]
        values = {
            "checkout": str(target.checkout),
            "trainer": target.trainer.key,
            "python": str(target.python),
            "ok": not failed,
            "seconds": round(took_s, 1),
        }
        print(json.dumps({**values, "checks": rows}, ensure_ascii=False))
    elif failed:
        print(f"\nFailed after {took_s:.0f} s: {', '.join(failed)}. Nothing was left behind.")
    else:
        print(f"\nPassed in {took_s:.0f} s: this installation trains, its hangs end, and its resume is exact.")
    return 1 if failed else 0


def shown(check: Check) -> str:
    """Return a row of the table, with the log and what to do below it."""
    lines = [f"{check.status:<8} {check.name:<12} {check.text}"]
    lines += [f"{'':<9}| {line}" for line in check.log]
    if check.action:
        lines.append(f"{'':<9}→ {check.action}")
    return "\n".join(lines)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
