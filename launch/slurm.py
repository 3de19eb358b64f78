"""`python -m launch slurm RUN`: an sbatch script that trains a run under Slurm, and its submission.

Decision: a plain script that a person can read and edit. Slurm schedules, starts one task on each node, and says when a node is
needed; Hangproof's monitor is that task. The script only translates: Slurm's warning into the monitor's SIGTERM, and the
monitor's exit code into `scontrol requeue` or the end of the job. The job keeps its number when it is requeued, so all its output
is in one log, and the monitor continues from the newest checkpoint on the shared disk, or from the store.

On several nodes each monitor watches its own ranks, which meet by torchrun's rendezvous. One whose ranks hang or crash ends them and
exits with 6; its task signals the others, and the script starts the step again on the nodes that the job has.
"""

import argparse
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch import slurm_nodes
from launch.common import LaunchError, add_run, report
from launch.gpus import needed_gb
from launch.slurm_nodes import NoAnswer, ask
from monitor.process.locks import LOCK, is_held
from monitor.run_folder import MonitorError
from monitor.run_folder import find as find_script
from runs.files import atomic_write, explained
from runs.paths import ROOT
from runs.quoting import quote
from runs.spec import RunSpec, load

SCRIPT = "train.sbatch"
# From Slurm's warning to the end of the time limit. The monitor needs 25 s (preempt_total_s in monitor/config.toml).
NOTICE_S = 120
STARTS_COUNT = 50  # of one job, after which it is not requeued because something killed its monitor
# Where things are, for the job: as in the shell that writes the script.
PLACES = (
    *("HANGPROOF_DATA", "HANGPROOF_LIMITS", "HF_HOME"),
    *(f"{name}_{what}" for name in ("SD_SCRIPTS", "MUSUBI") for what in ("DIR", "VENV")),
)
# sbatch passes the submitter's environment on, and Slurm keeps it: neither a secret nor the mark of another run belongs there.
PRIVATE = tuple(f"HANGPROOF_{name}" for name in ("AUTH", "RUN", "TOKEN", "ATTEMPT", "HEARTBEAT", "RESUME", "QUIET"))
TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}|infinite", re.IGNORECASE)  # sbatch(1), --time
ADVICE = (  # part of sbatch's message, what to do
    ("invalid partition", "list the partitions with sinfo, and choose one with --partition"),
    ("account", "list your accounts with `sacctmgr show associations user=$USER`, and choose one with --account"),
    ("time limit", "choose a shorter --time; sinfo shows each partition's limit"),
    (
        "node configuration",
        "no node has what the script asks for; choose another --partition, or ask for less with --cpus and --mem",
    ),
    ("qos", "ask your cluster's administrator for the QOS, and add `#SBATCH --qos=NAME` to the script"),
    ("unable to contact", "the Slurm controller does not answer; try again, or see `scontrol ping`"),
)
DECISION_S = 3.0  # for Slurm to consider a new job
NEVER = {  # why a job waits, as squeue says it: what to do, where waiting does not help
    "PartitionConfig": "no node of the partition has so many cores or is allowed; choose fewer --cpus or another --partition",
    "PartitionNodeLimit": "the partition does not give a job so many nodes; choose another --partition",
    "PartitionTimeLimit": "the partition's time limit is shorter; choose a shorter --time",
    "BadConstraints": "no node has these features; change the script",
}


@dataclass(frozen=True)
class Request:
    """What the job asks Slurm for. gpus: of each node, 0 for none; kind: their type, "" for any; "" elsewhere: the cluster's default."""

    nodes: int = 1
    gpus: int = 1
    kind: str = ""
    cpus: int = 0
    partition: str = ""
    time: str = ""
    account: str = ""
    mem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_run(parser)
    parser.add_argument(
        "--submit", action="store_true", help="submit the script with sbatch, and print the job's number"
    )
    parser.add_argument("--partition", default="", metavar="NAME", help="partition; without it the cluster's default")
    parser.add_argument(
        "--time", default="", metavar="LIMIT", help="time limit, as 8:00:00 or 1-12; the job is requeued at its end"
    )
    parser.add_argument("--account", default="", metavar="NAME", help="account to charge")
    parser.add_argument(
        "--gpus-type",
        default="",
        metavar="TYPE",
        help="type of GPU, as sinfo -o %%G names it; without it any that fits",
    )
    parser.add_argument(
        "--cpus", type=int, default=0, metavar="N", help="processor cores of each node; by default one for each process"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes, for a script of your own; run.toml says it for others"
    )
    parser.add_argument(
        "--mem", default="", metavar="SIZE", help="memory of each node, as 64G; without it the cluster's default"
    )


def run(args: argparse.Namespace) -> int:
    """Write the script, and submit it where asked."""
    folder, spec = find(args.run)
    script = folder / SCRIPT
    wanted = request(spec, args)
    with explained(f"write {SCRIPT}"):
        atomic_write(script, render(folder, spec, wanted), executable=True)
    value: dict[str, Any] = {"folder": str(folder), "script": str(script), "job": None, **asdict(wanted)}
    if not args.submit:
        return report(args, f"{script}\nsubmit it with: sbatch {quote(str(script))}", value)
    job, already = submit(folder, spec)
    text = f"already queued or running as job {job}" if already else f"submitted as job {job}"
    return report(
        args,
        f"{folder.name}: {text}; its output: {folder / f'slurm-{job}.log'}",
        {**value, "job": job, "already": already},
    )


def find(name: str) -> tuple[Path, RunSpec | None]:
    """The folder of a run and its spec; None for a folder that only has a script of the user's own. Raises LaunchError, RunError."""
    try:
        folder = find_script(name)
    except MonitorError as error:
        raise LaunchError(str(error)) from error
    return folder, load(folder) if (folder / "run.toml").is_file() else None


def request(spec: RunSpec | None, args: argparse.Namespace) -> Request:
    """What the run asks of the cluster that this machine belongs to.

    Raises:
        LaunchError: a value is wrong, Slurm does not answer, or no node can train the run.
    """
    if args.time and not TIME.fullmatch(args.time):
        raise LaunchError(
            f"--time {args.time}: write minutes, hours:minutes:seconds or days-hours, such as 90, 8:00:00 or 1-12"
        )
    nodes, gpus, workers = (spec.nodes, spec.gpus, spec.workers) if spec else (args.nodes, 1, 0)
    needs_gb = needed_gb(spec) if spec else 0.0
    kind, cpus = args.gpus_type, args.cpus or gpus * (1 + workers)
    try:
        found = slurm_nodes.nodes(args.partition, gpu=spec is None or needs_gb > 0)
    except NoAnswer as error:
        if args.submit:
            raise
        print(f"note: {error}; so the script asks for any GPU", file=sys.stderr)
        found = None
    if spec and not needs_gb and not kind:
        gpus = 0  # a model that trains on the CPU
    elif found is not None:
        fitting = kind or slurm_nodes.choose(found, gpus)
        gpus, kind = (0, "") if fitting is None else (gpus, fitting)
        if needs_gb and not gpus:
            where = f"partition {args.partition}" if args.partition else "this cluster"
            print(
                f"note: {where} names no GPU, so the job asks for none; the run does not train without one",
                file=sys.stderr,
            )
    if found is not None and not args.cpus:  # fewer cores make a run slower; more than a node has make it wait for ever
        cpus = min(cpus, max((node.cpus for node in found), default=cpus))
    return Request(nodes, gpus, kind, cpus, args.partition, args.time, args.account, args.mem)


def render(folder: Path, spec: RunSpec | None, wanted: Request) -> str:
    """The text of the script.

    Raises:
        LaunchError: a value cannot be written into it.
    """
    options = [
        ("job-name", job_name(folder)),
        ("output", f"{_plain_path(folder)}/slurm-%j.log"),
        ("open-mode", "append"),
        ("nodes", str(wanted.nodes)),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(wanted.cpus or "")),
        ("gpus-per-node", ":".join(filter(None, (wanted.kind, str(wanted.gpus)))) if wanted.gpus else ""),
        ("mem", wanted.mem),
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("time", wanted.time),
        ("signal", f"B:TERM@{NOTICE_S}"),
        ("dependency", "singleton"),
    ]
    lines = [f"#SBATCH --{name}={_value(name, value)}" for name, value in options if value]
    places = {name: str(Path(os.environ[name]).expanduser().absolute()) for name in PLACES if os.environ.get(name)}
    return TEMPLATE.format(
        name=" ".join((spec.name if spec else folder.name).split()),
        options="\n".join(lines),
        root=quote(str(ROOT)),
        places="".join(f"export {name}={quote(value)}\n" for name, value in places.items()),
        python=quote(sys.executable),
        run=quote(str(folder)),
        needs_gpu="export HANGPROOF_NEEDS_GPU=1\n" if spec and needed_gb(spec) else "",
        group=GROUP if wanted.nodes > 1 else "",
        task=TASKS if wanted.nodes > 1 else TASK,
        again=AGAIN.format(starts=STARTS_COUNT) if wanted.nodes > 1 else "",
        starts=STARTS_COUNT,
    )


def job_name(folder: Path) -> str:
    """The name of a run's job: jobs of one name run one after the other."""
    return f"hangproof-{folder.name}"


def submit(folder: Path, spec: RunSpec | None) -> tuple[str, bool]:
    """(number of the job, whether it was there before). A run that has a job already is not submitted again.

    Raises:
        LaunchError: there is no Slurm on this machine, the run cannot be started, or sbatch refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"no sbatch on this machine; copy the project to a login node of the cluster, or run there: sbatch {SCRIPT}"
        )
    script = str(folder / SCRIPT)
    listed = ask("squeue", "--noheader", "--me", f"--name={job_name(folder)}", "--format=%i %o")
    for number, _, command in (line.strip().partition(" ") for line in listed.splitlines()):
        if command == script:
            return number, True
    if is_held(folder / LOCK):
        raise LaunchError(
            f"{folder.name}: a monitor runs it already; stop it first with `python -m monitor stop {folder.name}`"
        )
    if spec is not None and not spec.store:
        from runs.folders import problems

        if faults := problems(spec):
            raise LaunchError(f"{folder.name} cannot be started: {'; '.join(fault.message for fault in faults)}")
    environment = {name: value for name, value in os.environ.items() if name not in PRIVATE}
    try:
        answer = ask("sbatch", "--parsable", script, environment=environment)
    except LaunchError as error:
        advice = next(
            (text for part, text in ADVICE if part in str(error).lower()), f"fix {script} and submit it again"
        )
        raise LaunchError(f"{error}; {advice}") from error
    job = answer.strip().partition(";")[0]
    _check(job, script)
    return job, False


def _check(job: str, script: str) -> None:
    """Cancel a new job that can never start: Slurm takes it and lets it wait. Raises LaunchError then."""
    until_s = time.monotonic() + DECISION_S
    while time.monotonic() < until_s:
        try:
            reason = ask("squeue", "--noheader", f"--jobs={job}", "--format=%r").strip()
        except NoAnswer:
            return  # it is submitted
        if reason in NEVER:
            ask("scancel", job)
            raise LaunchError(
                f"the job could never start, so it was cancelled: {reason}, {NEVER[reason]}; see {script}"
            )
        if reason not in ("None", "Priority"):
            return
        time.sleep(0.3)


def _plain_path(folder: Path) -> str:
    """The path of the folder for --output, in which Slurm replaces % and drops backslashes, escaped or not (22.05, measured)."""
    if any(c in str(folder) for c in "%\\"):
        raise LaunchError(
            f"Slurm cannot write a log into {folder}: the path has % or \\; set HANGPROOF_DATA to another folder"
        )
    return str(folder)


def _value(name: str, value: str) -> str:
    """A value quoted for a line #SBATCH, where sbatch reads quotes as a shell does, but no escapes. Raises LaunchError."""
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise LaunchError(f"--{name}: {value!r} contains a line break or control character; remove it")
    return quote(value)


# Braces that bash reads are doubled.
TEMPLATE = """#!/bin/bash
# Trains {name} under Slurm, watched by Hangproof's monitor. Submit it: sbatch {file}
# Written by `python -m launch slurm`, which replaces it. Options of sbatch's command line override these lines.
{options}
#SBATCH --requeue
set -u
cd {root} || exit 1
{places}python={python}
run={run}
{needs_gpu}export HANGPROOF_GPUS=     # Slurm gives each job its GPUs, so the monitor need not queue for them
export SLURM_EXIT_ERROR=79 # srun's own failures; the monitor's codes are 0 to 6
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}
{group}
# One machine writes a run. A node that Slurm gave up may still train: wait until its monitor is gone.
flock --timeout 600 "$run/monitor.lock" true

# Where the job runs, as Slurm knows it: elsewhere, or nowhere, once Slurm or the user has ended it here. Then Slurm signals the
# monitor itself. Fails while Slurm does not answer.
state() {{ squeue --noheader --jobs "$SLURM_JOB_ID" --format "%T %B"; }}
here="RUNNING $SLURMD_NODENAME"

# Near the time limit, Slurm warns this shell only (B:TERM). Pass it on to the monitor: it saves a checkpoint and exits with 5.
# (A SIGTERM to srun would kill the monitor at once.)
warned=0 leaves=0
trap 'warned=1; leaves=1; [ "$(state)" != "$here" ] || scancel --signal=TERM "$SLURM_JOB_ID"' TERM

train() {{
  {task}
  step=$!
  while :; do
    warned=0
    wait "$step"
    code=$?
    [ "$warned" = 1 ] || break # else the signal ended the wait, not the step
  done
}}
train
{again}
# Back into the queue, unless the job has ended here. Slurm's controller may be restarting.
requeue() {{
  for pause in 5 10 20 40 60; do
    if now=$(state); then
      [ "$now" = "$here" ] || return
      echo "hangproof: $1; requeueing job $SLURM_JOB_ID"
      scontrol requeue "$SLURM_JOB_ID" && return
    fi
    echo "hangproof: $1; Slurm did not requeue the job, trying again in $pause s"
    sleep "$pause"
  done
  echo "hangproof: the job is not requeued; submit it again to continue the run"
}}
killed="the step ended with code $code"
case $code in
  5 | 6) requeue "preempted, and saved" ;;
  0) echo "hangproof: completed" ;;
  1 | 2) echo "hangproof: failed; the reason is above and in $run/monitor.log" ;;
  3) echo "hangproof: stopped by its user" ;;
  4) echo "hangproof: restarts make no progress, so the job is not requeued; see $run/incidents" ;;
  *) # killed by a signal (128 and more), or srun could not start it (79)
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {starts} ]; then
      requeue "$killed"
    else
      echo "hangproof: $killed, and the job was requeued {starts} times; submit it again once the cause is fixed"
    fi
    ;;
esac
exit "$code"
""".replace("{file}", SCRIPT)

GROUP = """
# Where the nodes' ranks meet: at this node, the first one.
HANGPROOF_MAIN_ADDRESS=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
HANGPROOF_MAIN_PORT=$((20000 + SLURM_JOB_ID % 10000))
export HANGPROOF_MAIN_ADDRESS HANGPROOF_MAIN_PORT
"""

TASK = """srun --nodes=1 --ntasks=1 "$python" -m monitor run "$run" &"""

# A warning that reached the first node alone ends the others' parts, too. srun's exit code is the largest of its tasks', so the
# monitor's are put in an order: 0 < 5 (preempted) < 6 (again) < 1, 3, 4, which end the run; a kill (128 and more) is above all.
TASKS = """srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 bash -c '
    trap signalled=1 TERM
    export HANGPROOF_NODE=$SLURM_PROCID
    "$0" -m monitor run "$1" & monitor=$!
    while :; do
      signalled=0
      wait "$monitor"
      code=$?
      [ "$signalled" = 1 ] || break # else the signal ended the wait, not the monitor
    done
    [ "$code" = 0 ] || scancel --signal=TERM "$SLURM_JOB_ID.$SLURM_STEP_ID"
    case $code in [1-4]) exit $((code + 10)) ;; *) exit "$code" ;; esac
  ' "$python" "$run" &"""

AGAIN = """starts=1
while [ "$code" = 6 ] && [ "$leaves" = 0 ] && [ "$starts" -lt {starts} ]; do
  starts=$((starts + 1))
  echo "hangproof: a machine has ended its part; starting all of them again ($starts)"
  train
done
[ "$code" -le 10 ] || [ "$code" -gt 14 ] || code=$((code - 10))
"""
