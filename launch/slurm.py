"""`python -m launch slurm RUN`: an sbatch script that trains a run under Slurm, and its submission.

Decision: a plain script that a person can read and edit. Slurm schedules, starts one task on each node, and says when a
node is needed; Hangproof's monitor is that task. The script only translates: Slurm's warning into the monitor's
SIGTERM, and the monitor's exit code into `scontrol requeue` or the end of the job. The job keeps its number when it is
requeued, so all its output is in one log, and the monitor continues from the newest checkpoint on the shared disk, or
from the store.

On several nodes each monitor watches its own ranks, which meet by torchrun's rendezvous. One whose ranks hang or crash
ends them and exits with 6; its task signals the others, and the script starts the step again on the job's nodes.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.common import RUN, LaunchError, fill, report
from launch.travel import needed_gb
from monitor.process.platform import LOCK, is_held
from monitor.run_folder import find
from monitor.state import nothing_left
from runs.files import atomic_write, checksum, explained
from runs.paths import PLACES, ROOT
from runs.quoting import quote
from runs.spec import RunSpec, load

SCRIPT = "train.sbatch"
ANSWER_S = 30.0  # for an answer of Slurm's commands; a busy controller takes seconds
# From Slurm's warning to the end of the time limit. The monitor needs 25 s (preempt_total_s in monitor/config.toml).
NOTICE_S = 120
STARTS_COUNT = 50  # of one job, after which it is not requeued because something killed its monitor
# sbatch passes the environment on, and Slurm keeps it: neither a secret nor the mark of another run belongs there.
PRIVATE = tuple(f"HANGPROOF_{name}" for name in ("AUTH", "RUN", "TOKEN", "ATTEMPT", "HEARTBEAT", "RESUME", "QUIET"))

OPTIONS = (
    RUN,
    ("--submit", False, "submit the script with sbatch, and print the job's number"),
    ("--partition NAME", "", "without it the cluster's default"),
    ("--time LIMIT", "", "such as 8:00:00 or 1-12; the job is requeued at its end"),
    ("--account NAME", "", "account to charge"),
    ("--gpus N", int, "GPUs of each node (default: the run's); 0 where the cluster does not name its GPUs"),
    ("--gpus-type TYPE", "", "type of GPU, as `sinfo -o %G` names it; without it any"),
    ("--cpus N", 0, "processor cores of each node; by default one for each process"),
    ("--nodes N", 1, "nodes, for a script of your own; run.toml says it for others"),
    ("--mem SIZE", "", "memory of each node, such as 64G; without it the cluster's default"),
)


def run(args: argparse.Namespace) -> int:
    """Write train.sbatch; with --submit, submit it, unless the run has a job. Raises LaunchError, RunError."""
    folder = find(args.run)
    # Without run.toml, the folder only has a script of the user's own.
    spec = load(folder) if (folder / "run.toml").is_file() else None
    script = folder / SCRIPT
    complete(spec, args)
    with explained(f"write {SCRIPT}"):
        atomic_write(script, render(folder, spec, args), executable=True)
    value: dict[str, Any] = {"script": str(script), "job": None, "nodes": args.nodes}
    value |= {"gpus": args.gpus, "kind": args.gpus_type}
    if not args.submit:
        return report(args, f"{script}\nsubmit it with: sbatch {quote(str(script))}", value)
    job, already = submit(folder, spec)
    text = f"already queued or running as job {job}" if already else f"submitted as job {job}"
    return report(args, f"{folder.name}: {text}; its output: {folder}/slurm-{job}.log", {**value, "job": job})


def complete(spec: RunSpec | None, args: argparse.Namespace) -> None:
    """Set the nodes, and the GPUs and cores of each, as the run needs them. Raises LaunchError: a value is wrong."""
    processes, workers = (spec.gpus, spec.workers) if spec else (1, 0)
    args.nodes = spec.nodes if spec else args.nodes
    on_cpu = spec is not None and not needed_gb(spec) and not args.gpus_type
    args.gpus = args.gpus if args.gpus is not None else 0 if on_cpu else processes
    args.cpus = args.cpus or processes * (1 + workers)
    if min(args.gpus, args.cpus, args.nodes - 1) < 0:
        raise LaunchError("--gpus, --cpus and --nodes: write a number that is not negative")


def render(folder: Path, spec: RunSpec | None, args: argparse.Namespace) -> str:
    """The text of the script. args: as `complete` leaves them. Raises LaunchError: a value cannot be in it."""
    if {*"%\\"} & {*str(folder)}:  # in --output, Slurm replaces % and drops \, escaped or not (22.05, measured)
        raise LaunchError(f"Slurm cannot write into {folder}: the path has % or \\; set another HANGPROOF_DATA")
    options = {
        "job-name": job_name(folder),
        "output": f"{folder}/slurm-%j.log",
        "open-mode": "append",
        "nodes": str(args.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(args.cpus or ""),
        "gpus-per-node": ":".join(filter(None, (args.gpus_type, str(args.gpus)))) if args.gpus else "",
        **{name: getattr(args, name) for name in ("mem", "partition", "account", "time")},
        "signal": f"B:TERM@{NOTICE_S}",
        "dependency": "singleton",
    }
    for name, value in options.items():
        if any(ord(c) < 32 or ord(c) == 127 for c in value):
            raise LaunchError(f"--{name}: {value!r} contains a line break or control character; remove it")
    # sbatch reads quotes as a shell does, but no escapes
    lines = [f"#SBATCH --{name}={quote(value)}" for name, value in options.items() if value]
    return fill(
        "slurm.sbatch",
        "several" if args.nodes > 1 else "one",
        name=" ".join((spec.name if spec else folder.name).split()),
        options="\n".join(lines),
        root=quote(str(ROOT)),
        places="".join(f"export {name}={quote(os.environ[name])}\n" for name in PLACES if os.environ.get(name)),
        python=quote(sys.executable),
        run=quote(str(folder)),
        needs_gpu="export HANGPROOF_NEEDS_GPU=1\n" if spec and needed_gb(spec) else "",
        starts=str(STARTS_COUNT),
    )


def ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """The output of one of Slurm's commands, in this process's environment or another one.

    Raises LaunchError: the command failed, or did not answer in time; the message has Slurm's own words.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired as error:
        why = f"{command[0]} did not answer within {ANSWER_S:.0f} s; is slurmctld running? Try: scontrol ping"
        raise LaunchError(why) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise LaunchError(f"{command[0]} failed: {said}")
    return done.stdout


def job_name(folder: Path) -> str:
    """The name of a run's job, which no other run has: jobs of one name run one after the other. squeue splits at commas."""
    return f"hangproof-{folder.name}-{checksum(os.fsencode(folder))[:8]}".replace(",", "-")


def submit(folder: Path, spec: RunSpec | None) -> tuple[str, bool]:
    """(number of the job, whether it was there before). A run that has a job already is not submitted again.

    Raises LaunchError: there is no Slurm here, the run is complete or cannot be started, or sbatch refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(f"no sbatch on this machine; copy the project to a login node, or run there: sbatch {SCRIPT}")
    script = str(folder / SCRIPT)
    listed = ask("squeue", "--noheader", "--me", f"--name={job_name(folder)}", "--format=%i %T %o")
    for number, state, command in ((*line.strip().split(maxsplit=2), "", "")[:3] for line in listed.splitlines()):
        if command == script and state != "COMPLETING":  # the run has ended, and Slurm cleans up, perhaps for minutes
            return number, True
    if is_held(folder / LOCK):
        raise LaunchError(f"{folder.name}: a monitor runs it already; stop it: python -m monitor stop {folder.name}")
    if done := nothing_left(folder):
        raise LaunchError(f"{folder.name} is {done}")
    if spec is not None and not spec.store:
        from runs.folders import problems

        if faults := problems(spec):
            raise LaunchError(f"{folder.name} cannot be started: {'; '.join(fault.message for fault in faults)}")
    environment = {name: value for name, value in os.environ.items() if name not in PRIVATE}
    answer = ask("sbatch", "--parsable", script, environment=environment)
    return answer.strip().partition(";")[0], False
