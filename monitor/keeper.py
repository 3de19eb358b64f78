"""Restarts a monitor that was killed or is silent. `monitor run` becomes this process; the monitor is its child.

Decision: a parent that sleeps until its child ends, or until the beat of its child's loop stops (process/platform.py),
costs next to no processor time; a timer or a lock that is polled does. The child adopts the living training, so a
restart takes the time of an import. A run that has reached its final state is never started again, whatever ended the
monitor. If this process is killed too, the monitor goes on alone, and `python -m monitor resume-all` or systemd's
`Restart=` (README) continues a run that has neither.

A silent monitor may be stuck on the disk with the run's folder, which its log and its successor need as well. So this
process touches no file of the run: what it has to say is written and sent by processes of their own, and it tries again
at growing intervals. The training is left alone: it works, or waits for the same disk, and the next monitor that works
judges it. On Windows only the end of the monitor is noticed.

It sleeps as long as the training lasts, so its size matters: `monitor run` finds the run, then replaces itself with
this file, which imports little more than nothing; what a failure needs is imported when there is one.
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
PAUSE_S = 0.5
MAX_PAUSE_S = 5.0
HEALTHY_S = 60.0  # a monitor that ran this long was healthy: earlier failures no longer count
TRIES_COUNT = 10
CONFIRM_S = 6.0  # after the limit: both may have been stopped, and the monitor needs a moment to beat again
KILL_WAIT_S = 10.0  # for the end of a silent monitor; then it waits in the kernel, where no signal reaches it
MAX_SILENT_S = 900.0  # the limit doubles while one monitor after another is silent: the work of a slow disk gets done
SAY_S = 1.0  # for a message, whose stream may be a file on a disk that does not respond


def become(folder: str, checked: bool) -> int:
    """Replace this process with the keeper of `folder`; on Windows, be it: its exit code. Raises OSError."""
    from guards.limits import LimitError
    from monitor import config
    from monitor.process.spawned import MARKS

    for name in MARKS:  # a shell may export them: no process but the training's may look like the training
        os.environ.pop(name, None)
    try:
        silent_s = max(config.load().watch.silent_s, CONFIRM_S)
    except (config.ConfigError, LimitError):
        silent_s = HEALTHY_S  # the monitor says what is wrong with the limits, and ends
    words = [f"--silent-s={silent_s:g}", *["--checked"] * checked, folder]
    if sys.platform == "win32":
        return keep(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "monitor", "run", "--keep", *words])


def keep(words: list[str]) -> int:
    """Run the monitor until it ends by itself; its exit code. 1 after TRIES_COUNT kills or failures in a row.

    words: options, the run's folder. Options: --checked; --silent-s=SECONDS.
    """
    *options, folder = words
    run = os.path.basename(folder)
    limits = [word.partition("=")[2] for word in options if word.startswith("--silent-s=")]
    base_s = float(limits[0]) if limits else HEALTHY_S
    checked = [word for word in options if word == "--checked"]
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
            words = [*checked, *["--restarted"] * (failures + silences > 0)]
            process, beats = _start(folder, [*words, *(f"--received={number}" for number in received[:known])])
            child[:] = [process]
            for number in received[known:]:
                _send(process, number)
            code = _wait(process, beats, limit_s)
            if code is None:
                silences = 1 if time.monotonic() - began_s - limit_s >= HEALTHY_S else silences + 1
                _end_silent(process, run, limit_s)
                continue
            if 0 <= code != EXIT_ERROR:
                return code
            how = f"was killed by signal {-code}" if code < 0 else "failed"
        except OSError as error:
            how = f"cannot be started: {error.strerror or error}"
        finally:
            child.clear()
            if beats >= 0:
                os.close(beats)
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

    It has a session of its own: Ctrl-C in the terminal reaches it once, through `forward`.
    """
    command = [sys.executable, "-m", "monitor", "run", "--child", str(os.getpid())]
    if sys.platform == "win32":
        hidden = subprocess.CREATE_NO_WINDOW if "HANGPROOF_QUIET" in os.environ else 0
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | hidden
        return subprocess.Popen([*command, *options, folder], creationflags=flags), -1
    beats, writer = os.pipe()
    try:
        words = [f"--beat={writer}", *options, folder]
        return subprocess.Popen([*command, *words], start_new_session=True, pass_fds=[writer]), beats
    except OSError:
        os.close(beats)
        raise
    finally:
        os.close(writer)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send it a signal, unless it has ended: its number is not used again before it is waited for."""
    if sys.platform == "win32":
        number = signal.CTRL_BREAK_EVENT
    process.send_signal(number)


def _wait(process: subprocess.Popen[bytes], beats: int, silent_s: float) -> int | None:
    """Its exit code, -N: signal N killed it; None once it has not beaten for `silent_s` seconds, and CONFIRM_S more."""
    silent = False
    while beats >= 0:
        if select.select([beats], [], [], CONFIRM_S if silent else silent_s)[0]:
            silent = False
            if not os.read(beats, 4096):
                break
        elif silent:
            return None
        else:
            silent = True
    return process.wait()


def _end_silent(process: subprocess.Popen[bytes], run: str, silent_s: float) -> None:
    """Kill a silent monitor; returns once it is gone, which takes as long as the kernel keeps it. It is reported again and again."""
    _say(run, f"the monitor (pid {process.pid}) has not responded for {silent_s:.0f} s; replacing it", send=True)
    wait_s = KILL_WAIT_S
    while True:
        for number in (signal.SIGKILL, signal.SIGCONT):
            _send(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
        _say(
            run,
            f"the monitor (pid {process.pid}) does not respond and cannot be killed: it waits in the kernel, usually for a disk "
            "that does not respond. Nothing watches the training until that ends. Check the disk with the run's folder",
            send=True,
        )
        wait_s = min(2 * wait_s, MAX_SILENT_S)


# ---- after a failure ----


def _say(run: str, text: str, send: bool = False) -> None:
    """Write a line to standard error, and `send` it to the user's addresses, by processes of their own: what blocks, blocks them."""
    line = f"monitor: {run}: {text}"
    if sys.platform == "win32":
        print(line, file=sys.stderr, flush=True)
        return
    try:
        written = subprocess.Popen(["sh", "-c", 'printf "%s\\n" "$1" >&2', "sh", line])
        with contextlib.suppress(subprocess.TimeoutExpired):
            written.wait(SAY_S)
        if send:
            import json

            null = subprocess.DEVNULL
            sender = subprocess.Popen(
                [sys.executable, "-m", "monitor.cli.notify"], stdin=subprocess.PIPE, stdout=null, stderr=null
            )
            assert sender.stdin is not None
            with sender.stdin as message:
                message.write(json.dumps({"kind": "unwatched", "title": run, "body": text}).encode())
    except OSError:  # no process can be started
        print(line, file=sys.stderr, flush=True)
