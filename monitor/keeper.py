"""Restarts a monitor that was killed. `monitor run` becomes this process; the monitor is its child.

Decision: a parent that sleeps in `waitpid` costs no processor time and notices the end of its child at once; a timer or a
lock that is polled does neither. The child adopts the living training, so a restart takes the time of an import. A run that
has reached its final state is never started again, whatever ended the monitor. If this process is killed too, the monitor
goes on alone, and `python -m monitor resume-all` or systemd's `Restart=` (README) continues a run that has neither.

It sleeps as long as the training lasts, so its size matters: `monitor run` finds the run, then replaces itself with a shell
(keeper.sh), which becomes this file once the monitor was killed or failed. Windows has no such shell, and this file from the
start. It imports little more than nothing; what a failure needs is imported when there is one.
"""

from __future__ import annotations

import os
import signal
import sys
import time

if sys.platform == "win32":
    import subprocess

LOG = "monitor.log"  # as in run_folder.py
EXIT_ERROR = 70  # EX_SOFTWARE of sysexits.h: the monitor failed outside its loop
FINAL_CODES = {"completed": 0, "failed": 1, "stopped": 3, "paused": 3, "preempted": 5}
PAUSE_S = 0.5
MAX_PAUSE_S = 5.0
HEALTHY_S = 60.0  # a monitor that ran this long was healthy: earlier failures no longer count
TRIES_COUNT = 10


def become(folder: str, state: str, checked: bool, node: str = "") -> int:
    """Replace this process with the keeper of `folder`; on Windows, where that gives a new process, be it: its exit code.

    state: the file with the run's state. node: "N@HOST:PORT" for the monitor of another machine than the first one.
    Raises OSError.
    """
    options = [*["--checked"] * checked, *[f"--node={node}"] * bool(node), f"--before={_changed_ns(state)}"]
    if sys.platform == "win32":
        return keep([*options, state, folder])
    sys.stdout.flush()
    sys.stderr.flush()
    shell = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keeper.sh")
    os.execv("/bin/sh", ["sh", shell, sys.executable, state, folder, *options])


def keep(words: list[str]) -> int:
    """Run the monitor until it ends by itself; its exit code. 1 when it was killed or failed TRIES_COUNT times in a row.

    words: options, the file with the run's state, the run's folder. Options: --checked; --before=NS, when that file was last
    changed; and what keeper.sh saw: --ended=CODE, how its monitor ended (128 + N: signal N killed it), --received=SIGNAL.
    """
    *options, state, folder = words
    before = _number(options, "--before=") or 0
    ended = _number(options, "--ended=")
    received = [int(word.partition("=")[2]) for word in options if word.startswith("--received=")]
    child: list[_Child] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        for process in child:
            process.send(number)

    try:
        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), forward)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    except OSError as error:  # nothing has started yet
        run = os.path.basename(folder)
        print(f"monitor: {run}: cannot receive signals: {error.strerror or error}; start it again", file=sys.stderr)
        return 1
    failures = 0
    while True:
        began_s = time.monotonic()
        try:
            if ended is not None:
                code, ended = ended if ended <= 128 else 128 - ended, None
            else:
                code = _run_monitor(folder, options, received, child, restarted=failures > 0)
        except OSError as error:
            how = f"cannot be started: {error.strerror or error}"
        else:
            while code == 1 and failures and _is_watched(state):
                time.sleep(1.0)  # an earlier start did succeed, and its error came afterwards
            code = EXIT_ERROR if code == 1 and failures else code
            if 0 <= code != EXIT_ERROR:
                return code
            final = _state(state) if _changed_ns(state) != before else None
            if final in FINAL_CODES:
                return FINAL_CODES[final]
            how = f"was killed by {_signal_name(-code)}" if code < 0 else "failed"
        healthy = time.monotonic() - began_s >= HEALTHY_S
        failures = 1 if healthy else failures + 1
        run = os.path.basename(folder)
        if failures >= TRIES_COUNT:
            print(
                f"monitor: {run}: the monitor {how}, {failures} times in a row; see {folder}{os.sep}{LOG}",
                file=sys.stderr,
            )
            return 1
        print(f"monitor: the monitor of {run} {how}; restarting it", file=sys.stderr, flush=True)
        time.sleep(min(PAUSE_S * failures, MAX_PAUSE_S))


def _number(options: list[str], name: str) -> int | None:
    return next((int(word.partition("=")[2]) for word in options if word.startswith(name)), None)


def _run_monitor(folder: str, options: list[str], received: list[int], child: list[_Child], restarted: bool) -> int:
    """Start the monitor and wait for its end; its exit code, -N when signal N killed it. OSError: it cannot be started.

    received: signals so far, and `child`: whom to forward the next ones to; a signal may come while no monitor listens.
    """
    words = ["--child", str(os.getpid()), *["--checked"] * ("--checked" in options), *["--restarted"] * restarted]
    words += [*(w for w in options if w.startswith("--node=")), *(f"--received={number}" for number in received)]
    known = len(received)
    process = _Child([sys.executable, "-m", "monitor", "run", *words, folder])
    child[:] = [process]
    for number in received[known:]:
        process.send(number)
    code = process.wait()
    child.clear()
    return code


# The monitor's process, in a session of its own: Ctrl-C in the terminal reaches it once, through `forward`.
if sys.platform == "win32":

    class _Child:
        def __init__(self, command: list[str]):
            hidden = subprocess.CREATE_NO_WINDOW if "HANGPROOF_QUIET" in os.environ else 0
            self._process = subprocess.Popen(command, creationflags=subprocess.CREATE_NEW_PROCESS_GROUP | hidden)

        def send(self, _number: int) -> None:
            self._process.send_signal(signal.CTRL_BREAK_EVENT)

        def wait(self) -> int:
            return self._process.wait()

else:

    class _Child:
        """Not `subprocess.Popen`, whose module is larger than everything else here."""

        def __init__(self, command: list[str]):
            """Raises OSError."""
            self._ended = False
            self._pid = os.posix_spawn(command[0], command, os.environ, setsid=True, setsigdef=[signal.SIGPIPE])

        def send(self, number: int) -> None:
            """Send a signal, unless it has ended."""
            if not self._ended:
                os.kill(self._pid, number)

        def wait(self) -> int:
            """Its exit code; -N: signal N killed it."""
            while True:
                try:
                    if hasattr(os, "waitid"):  # macOS has none before Python 3.13
                        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
                        self._ended = True  # before its number is free for another process
                    return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                except OSError as error:  # must not start a second monitor
                    print(f"monitor: {error}; waiting again", file=sys.stderr, flush=True)
                    time.sleep(PAUSE_S)


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


# ---- after a failure ----


def _is_watched(state: str) -> bool:
    """Whether a living monitor holds the lock beside the file with the state (monitor.json: monitor.lock).

    True when unknown, because then another start is the worse mistake.
    """
    try:
        from pathlib import Path

        from monitor.process.locks import is_held

        return is_held(Path(state).with_suffix(".lock"))
    except (ImportError, OSError, MemoryError):
        return True


def _state(path: str) -> object:
    """The run's state; None when unknown: then the next monitor finds out whether anything is left to do."""
    try:
        from pathlib import Path

        from monitor.run_folder import read_json

        return (read_json(Path(path)) or {}).get("state")
    except (ImportError, OSError, MemoryError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
