"""`python -m monitor run|start|status|stop|resume-all|diagnose|metrics|notify`: supervise a run, and ask about it.

Each command imports what it needs when it runs: the watching process must stay small.
"""

from __future__ import annotations

import argparse
import os
import sys

from monitor.folder import MonitorError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m monitor", description="Supervise training runs.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: str | None = "RUN") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if run:
            nargs = "?" if run == "[RUN]" else None
            command.add_argument("run", nargs=nargs, metavar="RUN", help="name, slug or folder of a run")
        command.add_argument("--json", action="store_true", help="end with one line of JSON")
        return command

    run = add("run", "supervise a run in the foreground until it ends")
    run.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)  # `start` has looked for what is missing
    add("start", "supervise a run in the background; a living training is taken up, never doubled")
    status = add("status", "what a run, or every run, is doing", "[RUN]")
    status.add_argument("--watch", action="store_true", help="keep showing it")
    stop = add("stop", "stop a run: a checkpoint first, then the end")
    stop.add_argument("--now", action="store_true", help="do not wait for a checkpoint")
    stop.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="until it has stopped, at most this long"
    )
    add("resume-all", "start every run that a reboot, a pre-emption or a killed monitor left unfinished", None)
    add("notify", "send a message to your own addresses, to see that they work (see monitor/notify.py)", None)
    add("diagnose", "explain what a run, or any process, is doing and waits for")
    metrics = add("metrics", "serve every run's status to Prometheus at /metrics", None)
    metrics.add_argument("--port", type=int, default=9477)
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed (reason on standard error), 2 wrong usage; `run` also 3 stopped, 4 budget, 5 preempted."""
    args = parser().parse_args(argv)
    try:
        if args.command == "run":
            from monitor.folder import find
            from monitor.supervisor import supervise

            return supervise(find(args.run), echo="HANGPROOF_QUIET" not in os.environ, checked=args.checked)
        from monitor import commands

        return getattr(commands, args.command.replace("-", "_"))(args)
    except MonitorError as error:
        print(f"monitor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
