"""`python -m trainer ARGS`: the entry point. Guards are installed first, so that an import error is recorded too."""

import contextlib
import errno
import importlib
import os
import sys

from guards import crash, deadline, gate, limits, machine, world
from guards.deadline import Deadline
from guards.heartbeat import Heartbeat
from trainer.arguments import parse
from trainer.errors import TrainError

DISK = {
    errno.ENOSPC: "the disk is full; free some space, or delete files where df -i shows no free inode",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file is larger than this file system or user may write; use another disk, or raise the limit",
    errno.EROFS: "the file system is read-only; use another folder",
    errno.EACCES: "no permission, or on Windows a program has it open; change the permissions, or use another folder",
    errno.EIO: "the disk cannot be read or written; check the disk",
}


def main(argv: list[str]) -> None:
    """Train as the arguments say, and end the process: code 0, 1 for an error, EXIT_STOPPED after a requested stop."""
    # OpenMP's threads spin while they wait for each other. On a busy machine one of them is often not scheduled: a step
    # of 0.02 s took 2.2 s on two busy cores. torch reads the variable when it is imported, so it is set here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if limited := machine.avoid_amx():
        print(f"note: {limited}", flush=True)
    if gate.closed():
        from trainer.imports import everything

        everything()
        importlib.import_module("trainer.loop")
        argv = gate.wait(argv)
    hb = Heartbeat.from_env()
    crash.install(hb)
    deadline.record_in = hb
    hb.reach("arguments")
    args = parse(argv)
    deadline.watch_phases(hb)
    try:
        world.check_launcher()
        from trainer.setup import build

        training = build(args, hb)
        from trainer.loop import train

        outcome = train(training)
    except (TrainError, world.WorldError) as problem:
        fail(hb, str(problem))
    except OSError as problem:
        if problem.errno not in DISK:
            raise
        fail(hb, f"{problem.filename or args.output_dir}: {DISK[problem.errno]}. Saved states are intact. ({problem})")
    except RuntimeError as problem:
        if type(problem).__name__ != "OutOfMemoryError":  # torch's; torch may not be imported yet
            raise
        fail(hb, f"{problem}\nThe GPU has too little memory. Lower the resolution, batch size, rank or tier.")
    if outcome == "stopped":
        hb.end("stopped", "stopped on request")
        # A launcher kills all ranks when the first exits with an error, so each waits until all have recorded the stop.
        with Deadline(
            limits.seconds("exit_grace_s"), "all ranks to stop", lambda *_: crash.exit_now(crash.EXIT_STOPPED)
        ):
            training.accelerator.wait_for_everyone()
        crash.exit_now(crash.EXIT_STOPPED)
    if training.main:
        print("model saved.", flush=True)
    hb.end("done", training.end_note)
    crash.exit_now(0)


def fail(hb: Heartbeat, reason: str) -> None:
    """Prints the reason without a traceback, records it and exits with code 1."""
    with contextlib.suppress(OSError):  # the disk with the log is full
        print(f"\nerror: {reason}", file=sys.stderr, flush=True)  # the progress bar has not ended its line
    hb.end("failed", reason)
    crash.exit_now(1)


if __name__ == "__main__":
    main(sys.argv[1:])
