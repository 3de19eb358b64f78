"""Says whether this machine and its trainers are ready, before 24 GB are downloaded.

    ./start.sh doctor [--quick] [--json]

Each line is a fact and, where something is wrong, what to do. For each trainer of kohya's that is installed, a
training script is started with the guards as far as its help, which imports all that a training needs: up to half a minute
each. --quick leaves that out. Nothing is changed and nothing is left behind. The page's tab "Doctor" shows the same lines, from `--quick --json`.

Exit code 0 when nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import doctor_machine as machine
from doctor_machine import FAILED, NOTE, OK, Finding
from monitor.process import platform, spawned
from runs.files import RunError
from runs.paths import venv_program
from sd_scripts_patches import install, versions
from sd_scripts_patches.trainers import TRAINERS, Trainer

CHECK_S = 120
END_S = 10.0
PATCHES = (sys.executable, "-m", "sd_scripts_patches")


def findings(quick: bool) -> Iterator[Finding]:
    """Yield each finding as it is known."""
    yield Finding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")
    for check in (machine.gpu, machine.memory, machine.folders, built_in, left_over):
        yield from check()
    for trainer in TRAINERS.values():
        yield from installed(trainer, quick)


def built_in() -> Iterator[Finding]:
    """The environment of the built-in trainer."""
    yield from machine.python_versions("built-in trainer", Path(sys.executable))


def left_over() -> Iterator[Finding]:
    """Trainers that nobody watches."""
    try:
        found = orphans()
    except OSError as error:
        yield Finding("orphans", NOTE, f"the processes could not be listed: {error.strerror}")
        return
    if not found:
        yield Finding("orphans", OK, "no trainer runs without a monitor")
    for one in found:
        text = f"{one['name']} (pid {one['pid']}) of the run {one['run']}, {one['age_s'] / 60:.0f} min old, {one['memory_bytes'] / 1e9:.1f} GB"
        fix = f"Watch the run again: python -m monitor start {one['run']}. Or end it: python -m monitor stop {one['run']}."
        yield Finding("orphans", NOTE, text, fix)


def orphans() -> list[dict[str, Any]]:
    """The trainers of ours that run although no monitor watches them, oldest first.

    Returns:
        [{"pid", "start", "name", "run": the folder's name, "age_s", "memory_bytes"}]; [] where nothing is left over.
    """
    boot_s = platform.now().boot_s
    found: list[dict[str, Any]] = []
    for process, folder in spawned.unwatched():
        started_s = (
            process.start / os.sysconf("SC_CLK_TCK") if platform.LINUX else process.start - time.time() + boot_s
        )  # since boot
        found.append({
            "pid": process.pid, "start": process.start, "name": process.name, "run": folder.name,
            "age_s": round(max(0.0, boot_s - started_s), 1), "memory_bytes": platform.private_bytes(process.pid),
        })  # fmt: skip
    return sorted(found, key=lambda one: (-one["age_s"], one["pid"]))


def end_orphan(pid: object, start: object) -> str:
    """End one process that `orphans` lists, with those that it started; returns what came of it.

    Raises RunError: it is none of them (any more).
    """
    listed = [(one, folder) for one, folder in spawned.unwatched() if (one.pid, one.start) == (pid, start)]
    if not listed:
        raise RunError("This process is not an orphan any more; look again")
    ((process, folder),) = listed
    left = spawned.kill(spawned.Tree("", members={process.pid: process}), END_S / 2, END_S / 2).survivors
    if left:
        raise RunError(
            f"Process {left[0].pid} does not end: it is stuck in the kernel. Restart the machine to remove it"
        )
    return f"Process {process.pid} ({process.name} of {folder.name}) was ended"


def installed(trainer: Trainer, quick: bool) -> Iterator[Finding]:
    """The checkout of a trainer, its guards, its environment, and whether it starts."""
    name, command = trainer.name, f"./start.sh {trainer.key}"
    if not trainer.checkout.is_dir():
        yield Finding(name, NOTE, f"not installed; {command} installs {trainer.version}")
        return
    now = versions.commit(trainer.checkout)
    known = "the pinned one" if now == trainer.commit else "tested" if now in trainer.tested else "not tested"
    where = f"{trainer.checkout}, commit {now[:8] or 'unknown'} ({known})"
    action = f"To get the pinned one, move this folder away and run {command}." if known == "not tested" else ""
    yield Finding(name, NOTE if action else OK, where, action)
    if not trainer.environment.is_dir():
        yield Finding(name, FAILED, f"its environment {trainer.environment} is missing", f"Run {command}.")
        return
    yield from guards(trainer)
    yield from machine.python_versions(name, venv_program(trainer.environment, "python"), kohya=True)
    if not quick:
        yield start(trainer)


def guards(trainer: Trainer) -> Iterator[Finding]:
    """Whether every guard finds its place in the checkout."""
    name, again = f"{trainer.name} guards", f"Run python -m sd_scripts_patches check {trainer.checkout}"
    result = machine.ask([*PATCHES, "check", trainer.checkout, "--json"], CHECK_S)
    if isinstance(result, str):
        yield Finding(name, FAILED, f"they could not be checked: {result}", again)
    elif result["ok"]:
        yield Finding(name, OK, f"all {len(result['patches'])} are compatible with this checkout")
    else:
        yield Finding(name, FAILED, "not all of them are compatible with this checkout", again)


def start(trainer: Trainer) -> Finding:
    """Whether a training script of the trainer starts."""
    name = f"{trainer.name} start"
    print(f"{name}: importing its libraries …", file=sys.stderr, flush=True)
    if failed := install.starts(trainer.checkout, trainer.environment, trainer):
        return Finding(name, FAILED, failed, f"Delete {trainer.environment} and run ./start.sh {trainer.key}.")
    return Finding(name, OK, f"{trainer.script} and its libraries can be imported, with the guards")


def main(argv: list[str] | None = None) -> int:
    """Print the findings, or with --json one line of JSON."""
    parser = argparse.ArgumentParser(prog="./start.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="do not start the trainers")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    options = parser.parse_args(argv)
    found = []
    for finding in findings(options.quick):
        found.append(finding)
        if not options.json:
            print(f"{finding.status:<7} {finding.name}: {finding.text}", flush=True)
            if finding.action:
                print(f"{'':<7} → {finding.action}", flush=True)
    failed = [finding.name for finding in found if finding.status == FAILED]
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, ensure_ascii=False))
    else:
        print(f"\nFix first: {', '.join(failed)}." if failed else "\nReady.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
