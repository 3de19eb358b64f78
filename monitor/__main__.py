"""`python -m monitor run|start|status|stop|…`: supervise a run, and ask about it.

Each command imports what it needs when it runs: the monitor and its keeper must stay small. For the same reason
`run --child` and `run --keep`, which only `keeper.py` uses, are read without argparse.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed (reason on standard error), 2 wrong usage; `run` also 3 stopped by the user, 4
    budget spent or no progress, 5 preempted, 6 start the group of machines again, and 70 for the keeper: the monitor
    itself failed."""
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == ["run", "--keep"]:
        from monitor.keeper import keep

        return keep(words[2:])
    if words[:2] == ["run", "--child"]:
        return _child(words[2:])
    if words[:1] == ["queue"]:  # of many runs, and of a room above
        import subprocess

        return subprocess.call([sys.executable, "-m", "jobs", *words])
    return _command(words)


def _command(words: list[str]) -> int:
    """What a person types."""
    import argparse

    from monitor.run_folder import MonitorError, find, machine_number, own_folder

    top = argparse.ArgumentParser(prog="python -m monitor", description="Supervise training runs.")
    choices = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: str | None = "RUN") -> argparse.ArgumentParser:
        command = choices.add_parser(name, help=text, description=text)
        if run:
            nargs = "?" if run == "[RUN]" else None
            command.add_argument("run", nargs=nargs, metavar="RUN", help="name, slug or folder of a run")
        command.add_argument("--json", action="store_true", help="end with one line of JSON")
        return command

    run = add("run", "supervise a run in the foreground until it ends")
    run.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)  # `start` has looked for what is missing
    add("start", "supervise a run in the background; a training that is already running is adopted, never doubled")
    status = add("status", "show what a run, or every run, is doing", "[RUN]")
    status.add_argument("--watch", action="store_true", help="keep showing it")
    stop = add("stop", "stop a run: save a checkpoint first, then end")
    stop.add_argument("--now", action="store_true", help="do not wait for a checkpoint")
    stop.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait this long for the run to stop")
    for name, text in (
        ("sample", "make sample images of the current step of a run under way; the training stays the same"),
        ("save", "save a checkpoint and the LoRA of a run under way"),
        ("pause", "save a checkpoint, then end the training, so that its GPU is free; `resume` continues it"),
    ):
        wish = add(name, text)
        wish.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait this long until it is done")
    add("resume", "continue a paused, stopped or interrupted run in the background, from its newest checkpoint")
    add("queue", "runs that wait for the GPU: show them, add, move or cancel one, or start one now", None)
    add("resume-all", "start every run that a reboot, a pre-emption or a killed monitor interrupted", None)
    add("notify", "send a test message to your own addresses (see monitor/cli/notify.py)", None)
    add("diagnose", "explain what a run, or any process, is doing and what it waits for")
    metrics = add("metrics", "serve every run's status to Prometheus at /metrics", None)
    metrics.add_argument("--port", type=int, default=9477)
    args = top.parse_args(words)
    try:
        if args.command != "run":
            import json

            from monitor.cli import commands

            code, answer = getattr(commands, args.command.replace("-", "_"))(args)
            if args.json and answer is not None:
                print(json.dumps(answer, ensure_ascii=False))
            return code
        from monitor.keeper import become

        folder = find(args.run)
        own_folder(folder, machine_number(folder, os.environ)).mkdir(parents=True, exist_ok=True)
        return become(str(folder), args.checked)
    except (MonitorError, OSError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _child(words: list[str]) -> int:
    """The monitor. `words`: the keeper's pid, options, the folder.

    Options: --beat=DESCRIPTOR to beat into, --checked, --restarted, --received=SIGNAL for each so far.
    """
    import contextlib
    import signal
    import traceback
    from pathlib import Path

    from monitor.keeper import EXIT_ERROR
    from monitor.process import platform
    from monitor.run_folder import AlreadyWatched, MonitorError

    try:
        if sys.platform != "win32":
            # The background process of a shell ignores Ctrl-C, and so would the trainer; and in a session of its own it
            # gets the terminal's Ctrl-C once, from the keeper.
            for number in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(PermissionError):  # it has one
                os.setsid()
        parent_pid, *options, folder = words
        known = dict(word.partition("=")[::2] for word in options)
        if "--beat" in known:
            platform.begin_beats(int(known["--beat"]))
        echo = "HANGPROOF_QUIET" not in os.environ
        from monitor.supervisor import supervise

        received = [int(word.partition("=")[2]) for word in options if word.startswith("--received=")]
        return supervise(Path(folder), echo, "--checked" in known, int(parent_pid), "--restarted" in known, received)
    except MonitorError as error:
        print(f"monitor: {error}", file=sys.stderr)
        # An earlier start did succeed: the keeper tries again, unless somebody has started another monitor meanwhile.
        return EXIT_ERROR if "--restarted" in words and not isinstance(error, AlreadyWatched) else 1
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - the top of the process: the keeper restarts it
        traceback.print_exc()
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
