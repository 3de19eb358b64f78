"""`python -m trainer ARGS`: the door. Guards first, so that even an error while importing leaves last words."""

import errno
import os
import sys

from guards import crash, deadline
from guards.heartbeat import Heartbeat
from trainer.arguments import parse
from trainer.errors import TrainError

DISK = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "the file is larger than is allowed here",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "no permission to write there",
    errno.EIO: "the disk does not read or write: check it",
}


def main(argv: list[str]) -> None:
    args = parse(argv)
    # OpenMP's threads spin while they wait for each other. On a machine with other work one of them is off the processor
    # most of the time: a step of 0.02 s took 2.2 s on two busy cores. Read when torch is imported, so it is set here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    hb = Heartbeat.from_env()
    crash.install(hb)
    deadline.use_heartbeat(hb)
    try:
        from trainer.setup import build

        training = build(args, hb)
        from trainer.loop import train

        outcome = train(training)
    except TrainError as problem:
        fail(hb, str(problem))
    except OSError as problem:
        if problem.errno not in DISK:
            raise
        fail(hb, f"{problem.filename or args.output_dir}: {DISK[problem.errno]}; saved states are whole ({problem})")
    except RuntimeError as problem:
        if type(problem).__name__ != "OutOfMemoryError":  # torch's; its module may not be imported yet
            raise
        fail(
            hb,
            f"{problem}\nthe GPU's memory is too small for this: a smaller tier, --resolution or batch size needs less",
        )
    if outcome == "stopped":
        hb.end("stopped", "stopped on request")
        training.accelerator.wait_for_everyone()  # a launcher ends all ranks when the first leaves with an error
        crash.leave(crash.EXIT_STOPPED)
    if training.main:
        print("model saved.", flush=True)
    hb.end("done")
    crash.leave(0)


def fail(hb: Heartbeat, reason: str) -> None:
    """Ends the process with a reason that people can act on; a traceback would bury it."""
    print(f"\nerror: {reason}", file=sys.stderr, flush=True)  # the progress bar has left the line open
    hb.end("failed", reason)
    crash.leave(1)


if __name__ == "__main__":
    main(sys.argv[1:])
