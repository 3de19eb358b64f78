"""Says whether this machine and its trainers are ready, before 24 GB are downloaded.

    ./start.sh doctor [--quick] [--json]

Each line is a fact and, where something is wrong, what to do. For each trainer of kohya's that is installed, the self-test
trains tiny weights in its own environment, plants a hang and resumes a killed run: about a minute each. --quick leaves that
out. Nothing is changed and nothing is left behind.

Exit code 0 when nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from guards import socket_folder
from runs.machine import this_machine
from runs.paths import ROOT, data_root
from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS, Trainer

OK, NOTE, FAILED = "ok", "note", "failed"
LEAST_DISK_GB = 40  # the files of FLUX.1 take 34 GB
SELF_TEST_S = 1200


@dataclass(frozen=True)
class Finding:
    """One line. action: what to do, "" when nothing is wrong."""

    name: str
    status: str
    text: str
    action: str = ""


def findings(quick: bool) -> Iterator[Finding]:
    """Yield each finding as it is known."""
    yield Finding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")
    yield from machine()
    for trainer in TRAINERS.values():
        yield from installed(trainer, quick)


def machine() -> Iterator[Finding]:
    """The GPU, the disk and the folder for temporary files."""
    here = this_machine()
    if here.note:
        yield Finding("GPU", FAILED, here.note, "Fix the driver, then run this again.")
    elif here.vram_gb:
        yield Finding("GPU", OK, f"{here.gpu_name}, {here.vram_gb:g} GB")
    else:
        yield Finding("GPU", NOTE, "no NVIDIA GPU found: only the toy model can be trained on this machine")
    if here.vram_gb and not here.cuda:
        action = "Install PyTorch with CUDA into .venv (pytorch.org, Get started)."
        yield Finding("PyTorch", FAILED, "the PyTorch of the built-in trainer cannot use the GPU", action)
    disk = f"{here.free_disk_gb:.0f} GB free in {data_root()}"
    if here.free_disk_gb < LEAST_DISK_GB:
        yield Finding(
            "disk", NOTE, f"{disk}; large base models with their checkpoints need {LEAST_DISK_GB} GB and more"
        )
    else:
        yield Finding("disk", OK, disk)
    try:
        moved = socket_folder.choose()
        yield Finding("TMPDIR", NOTE if moved else OK, moved or "short enough for the sockets of loader workers")
    except socket_folder.TooLong as error:
        yield Finding("TMPDIR", FAILED, str(error), "Set TMPDIR to a shorter folder.")


def installed(trainer: Trainer, quick: bool) -> Iterator[Finding]:
    """The checkout of a trainer, its environment, and its self-test."""
    name, command = trainer.name, f"./start.sh {trainer.key}"
    if not trainer.checkout.is_dir():
        yield Finding(name, NOTE, f"not installed; {command} installs {trainer.version}")
        return
    now = versions.commit(trainer.checkout)
    known = "the pinned one" if now == trainer.commit else "tested" if now in trainer.tested else "not tested"
    where = f"{trainer.checkout}, commit {now[:8] or 'unknown'} ({known})"
    yield Finding(name, OK if known != "not tested" else NOTE, where)
    if not trainer.environment.is_dir():
        yield Finding(name, FAILED, f"its environment {trainer.environment} is missing", f"Run {command}.")
    elif not quick:
        yield from self_test(trainer)


def self_test(trainer: Trainer) -> Iterator[Finding]:
    """The rows of the trainer's self-test that say more than "ok", and its end."""
    name = f"{trainer.name} self-test"
    print(f"{name}: about one minute …", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sd_scripts_patches", "selftest", str(trainer.checkout), "--json"],
            cwd=ROOT,
            env={**os.environ, trainer.venv_variable: str(trainer.environment)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SELF_TEST_S,
            check=False,
        )
        result = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        yield Finding(
            name, FAILED, "it ended without a result", f"Run python -m sd_scripts_patches selftest {trainer.checkout}"
        )
        return
    for check in result["checks"]:
        if check["status"] not in (OK, "not run"):
            yield Finding(f"{trainer.name} {check['name']}", check["status"], check["text"], check["action"])
    passed = f"trains, its hangs end, and its resume is exact ({result['seconds']:.0f} s)"
    yield (
        Finding(name, OK, passed)
        if result["ok"]
        else Finding(name, FAILED, "did not pass", f"Run ./start.sh {trainer.key}.")
    )


def main(argv: list[str] | None = None) -> int:
    """Print the findings, or with --json one line of JSON."""
    parser = argparse.ArgumentParser(prog="./start.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the self-tests")
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
    elif failed:
        print(f"\nFix first: {', '.join(failed)}.")
    else:
        print("\nReady.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
