"""`python -m monitor run|start|status|stop|…`: supervise a run, and ask about it.

`monitor run RUN` finds the run, then becomes the keeper: a process that restarts its child, the monitor, when that was
killed or is silent. `run --keep` and `run --child`, which are these two, are read without argparse. docs/recovery.md
says what follows when the keeper is killed too.

Decision: a parent that sleeps until its child ends, or until the beat of its child's loop stops (process/platform.py),
costs next to no processor time; a timer or a lock that is polled does. It sleeps as long as the training lasts, so its
size matters: what a command or a failure needs is imported when there is one.

A silent monitor may be stuck on the disk with the run's folder, which its log and its successor need as well. So the
keeper touches no file of the run: what it has to say is written and sent by processes of their own. The training is
left alone: the next monitor that works judges it. On Windows only the end of the monitor is noticed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOG = "monitor.log"  # as in run_folder.py
EXIT_ERROR = 70  # EX_SOFTWARE of sysexits.h: the monitor failed outside its loop
CODES = (0, 1, 3, 4, 5, 6, 130)  # of a monitor that has ended by itself; on Windows, one that crashed has any other
PAUSE_S = 0.5
MAX_PAUSE_S = 5.0
HEALTHY_S = 60.0  # a monitor that ran this long was healthy: earlier failures no longer count
TRIES_COUNT = 10
CONFIRM_S = 6.0  # after the limit: both may have been stopped, and the monitor needs a moment to beat again
KILL_WAIT_S = 10.0  # for the end of a silent monitor; then it waits in the kernel, where no signal reaches it
MAX_SILENT_S = 900.0  # the limit doubles while one monitor after another is silent: the work of a slow disk gets done
SAY_S = 1.0  # for a message, whose stream may be a file on a disk that does not respond


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed (reason on standard error), 2 wrong usage; `run` also 3 stopped by the user, 4
    budget spent or no progress, 5 preempted, 6 start the group of machines again, and 70 for the keeper: the monitor
    itself failed."""
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == ["run", "--keep"]:
        # Options come first where an earlier version, whose keeper was a shell, started this run: a monitor has ended.
        return become(words[-1]) if words[2].startswith("--") else keep(words[2:])
    if words[:2] == ["run", "--child"]:
        return _child(words[2:])
    from presets import terminal

    return terminal.command(lambda: _command(words))


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
            of_run = "name or folder of a run" + ", or the number of a process" * (name == "diagnose")
            command.add_argument("run", nargs=nargs, metavar="RUN", help=of_run)
        if name != "run":
            command.add_argument("--json", action="store_true", help="end with one line of JSON")
        return command

    run = add("run", "supervise a run in the foreground until it ends")
    run.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)  # from an earlier queue
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
    add("resume-all", "start every run that a reboot, a pre-emption or a killed monitor interrupted", None)
    add("notify", "send a test message to your own addresses (docs/recovery.md)", None)
    add("diagnose", "explain what a run, or any process, is doing and what it waits for")
    metrics = add("metrics", "serve every run's status to Prometheus at /metrics", None)
    metrics.add_argument("--port", type=int, default=9477, help="on loopback (default: 9477)")
    args = top.parse_args(words)
    try:
        if args.command != "run":
            import json

            from monitor.cli import commands

            code, answer = getattr(commands, args.command.replace("-", "_"))(args)
            if args.json and answer is not None:
                print(json.dumps(answer))
            return code
        folder = find(args.run)
        own_folder(folder, machine_number(folder, os.environ)).mkdir(parents=True, exist_ok=True)
        return become(str(folder))
    except (MonitorError, OSError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return 1


def _child(words: list[str]) -> int:
    """The monitor. `words`: the keeper's pid, options, the folder.

    Options: --outputs=FOLDER of all runs, --beat=DESCRIPTOR to beat into, --restarted, --received=SIGNAL, for each.
    """
    import traceback
    from pathlib import Path

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

        outputs = known.get("--outputs") or os.path.dirname(folder)  # a keeper of an earlier version does not name it
        received = [int(word.partition("=")[2]) for word in options if word.startswith("--received=")]
        return supervise(Path(folder), Path(outputs), echo, int(parent_pid), "--restarted" in known, received)
    except (MonitorError, platform.NoLocks) as error:
        print(f"monitor: {error}", file=sys.stderr)
        # An earlier start did succeed: the keeper tries again, unless somebody has started another monitor meanwhile.
        return EXIT_ERROR if "--restarted" in words and not isinstance(error, AlreadyWatched) else 1
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - the top of the process: the keeper restarts it
        traceback.print_exc()
        return EXIT_ERROR


# ---- the keeper ----


def become(folder: str) -> int:
    """Replace this process with the keeper of `folder`; on Windows, be it: its exit code. Raises OSError."""
    from monitor import config
    from monitor.process.spawned import MARKS
    from monitor.run_folder import notify_file
    from runs.paths import outputs_dir

    for name in MARKS:  # a shell may export them: no process but the training's may look like the training
        os.environ.pop(name, None)
    os.environ["HANGPROOF_NOTIFY"] = str(notify_file())
    try:
        silent_s = max(config.load().watch.silent_s, CONFIRM_S)
    except config.ConfigError:
        silent_s = HEALTHY_S  # the monitor says what is wrong with the limits, and ends
    words = [f"{silent_s:g}", str(outputs_dir()), folder]
    if sys.platform == "win32":
        return keep(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "monitor", "run", "--keep", *words])


def keep(words: list[str]) -> int:
    """Run the monitor until it ends by itself; its exit code. 1 after TRIES_COUNT kills or failures in a row.

    words: the seconds after which a monitor is silent, the folder of all runs, the run's folder.
    """
    base_s, outputs, folder = float(words[0]), words[1], words[2]
    run = os.path.basename(folder)
    received: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        for process in child:
            _send(process, number)

    try:
        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), forward)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    except OSError as error:  # nothing has started yet
        print(f"monitor: {run}: cannot receive signals: {error.strerror or error}; start it again", file=sys.stderr)
        return 1
    failures = silences = 0
    while True:
        began_s, limit_s = time.monotonic(), min(base_s * 2**silences, MAX_SILENT_S)
        beats = -1
        try:
            known = len(received)  # a signal may come while no monitor listens
            words = [f"--outputs={outputs}", *["--restarted"] * (failures + silences > 0)]
            process, beats = _start(folder, [*words, *(f"--received={number}" for number in received[:known])])
            child[:] = [process]
            for number in received[known:]:
                _send(process, number)
            code = _wait(process, beats, limit_s)
            if code is None:
                silences = 1 if time.monotonic() - began_s - limit_s >= HEALTHY_S else silences + 1
                _end_silent(process, run, limit_s)
                continue
            if code in CODES:
                return code
            how = f"was killed by signal {-code}" if code < 0 else "failed"
        except OSError as error:
            how = f"cannot be started: {error.strerror or error}"
        finally:
            child.clear()
            if beats >= 0:
                _close(beats)
        healthy = time.monotonic() - began_s >= HEALTHY_S
        failures = 1 if healthy else failures + 1
        if failures >= TRIES_COUNT:
            how = f"the monitor {how}, {failures} times in a row; see {folder}{os.sep}{LOG}"
            again = f"Nothing watches the training; start it again: python -m monitor start {folder}"
            _say(run, f"{how}. {again}", send=True)
            return 1
        _say(run, f"the monitor {how}; restarting it")
        time.sleep(min(PAUSE_S * failures, MAX_PAUSE_S))


def _start(folder: str, options: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The monitor's process and the descriptor of its beats, -1 on Windows. OSError: it cannot be started.

    `close_fds=False` lets Popen use posix_spawn, which either starts the process or fails: after its own fork and exec
    Popen reads from a pipe, and where that fails a monitor runs that nobody knows of.
    """
    command = [sys.executable, "-m", "monitor", "run", "--child", str(os.getpid())]
    if sys.platform == "win32":
        hidden = subprocess.CREATE_NO_WINDOW if "HANGPROOF_QUIET" in os.environ else 0
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | hidden
        # Without a console it inherits no stream by itself, and the log would lack what it prints.
        return subprocess.Popen([*command, *options, folder], stderr=sys.stderr, creationflags=flags), -1
    beats, writer = os.pipe()
    try:
        os.set_inheritable(writer, True)
        return subprocess.Popen([*command, f"--beat={writer}", *options, folder], close_fds=False), beats
    except OSError:
        _close(beats)
        raise
    finally:
        _close(writer)


def _close(descriptor: int) -> None:
    """Close it. close(2) releases it even where it fails, and a monitor that has started must not seem not to."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send it a signal, unless it has ended: its number is not used again before it is waited for."""
    if sys.platform == "win32":
        number = signal.CTRL_BREAK_EVENT
    process.send_signal(number)


def _wait(process: subprocess.Popen[bytes], beats: int, silent_s: float) -> int | None:
    """Its exit code, -N: signal N killed it; None once it has not beaten for `silent_s` seconds, and CONFIRM_S more."""
    silent = False
    while beats >= 0:
        try:
            heard = bool(select.select([beats], [], [], CONFIRM_S if silent else silent_s)[0])
            if heard and not os.read(beats, 4096):
                break
        except OSError:  # no memory: nothing is known about its beats
            if process.poll() is not None:
                break
            heard = True
            time.sleep(PAUSE_S)
        if not heard and silent:
            return None
        silent = not heard
    while sys.platform == "win32" and process.poll() is None:
        time.sleep(PAUSE_S)  # Windows delivers Ctrl-C only between two waits
    return process.wait()


def _end_silent(process: subprocess.Popen[bytes], run: str, silent_s: float) -> None:
    """Kill a silent monitor; returns once it is gone, as late as the kernel lets it go. It is reported again."""
    _say(run, f"the monitor (pid {process.pid}) has not responded for {silent_s:.0f} s; replacing it", send=True)
    wait_s = KILL_WAIT_S
    while True:
        for number in (signal.SIGKILL, signal.SIGCONT):
            _send(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
        waits = "it waits in the kernel, usually for a disk that does not respond. Check the disk with the run's folder"
        said = (
            f"the monitor (pid {process.pid}) cannot be killed: {waits}. Until that ends, nothing watches the training"
        )
        _say(run, said, send=True)
        wait_s = min(2 * wait_s, MAX_SILENT_S)


# ---- after a failure ----


def _say(run: str, text: str, send: bool = False) -> None:
    """Write a line to standard error, and `send` it to the user's addresses, by processes that may block."""
    line = f"monitor: {run}: {text}"
    try:
        if sys.platform == "win32":
            print(line, file=sys.stderr, flush=True)
        else:
            written = subprocess.Popen(["sh", "-c", 'printf "%s\\n" "$1" >&2', "sh", line])
            with contextlib.suppress(subprocess.TimeoutExpired):
                written.wait(SAY_S)
        if send:
            import json

            command, null = [sys.executable, "-m", "monitor.cli.notify"], subprocess.DEVNULL
            hidden = getattr(subprocess, "CREATE_NO_WINDOW", 0)
            sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, creationflags=hidden)
            assert sender.stdin is not None
            with sender.stdin as message:
                message.write(json.dumps({"kind": "unwatched", "title": run, "body": text}).encode())
    except OSError:  # no process can be started
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
