"""The table of the page's background commands: captions, probes, publications, imports, downloads.

A command is a process of its own, so that nothing blocks the server and a command outlives it: what it prints goes to
files in `.jobs/` of the folder that it is about, and `NAME.json` says what runs and how it ended. Any page, also one
that is opened later or by another server, reads them. `python -m ui.jobs` is that process: it starts the command, ends
it after its time limit, and writes the result.

Decision: who runs is never kept in memory. A command runs while somebody holds the file lock `NAME.lock`: its starter
takes it, and its process and the command inherit it. So of the commands of one name one runs at a time, whoever starts
them, and a command whose process was killed still counts. Windows hands no lock on: there, its process takes it again.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.process import platform, spawned
from monitor.process.platform import Lock, is_held
from monitor.process.spawned import ROOT, helper_environment, python
from runs.files import RunError, atomic_write
from runs.paths import outputs_dir
from ui.run.readers import end_of

FOLDER = ".jobs"
POSIX = sys.platform != "win32"  # a process inherits a lock, and hears of SIGTERM: on Windows, that kills it at once
TOKEN = "HANGPROOF_JOB"  # in the environment of a command's process and of all that it starts
BUSY = "It is already running"
OUTPUT_BYTES = 256 << 10  # of a command's output, from its end
GRACE_S = 20.0  # from SIGTERM to SIGKILL: a rehearsal ends its ranks first
KILL_S = 5.0  # from SIGKILL until the process is gone
HANDOVER_S = 5.0  # from the end of a command until its process has exited; until its process has the lock, on Windows
POLL_S = 0.1
Prepare = Callable[[], object]
ENDED = {  # by a command's state
    "done": "Finished",
    "failed": "Failed",
    "cancelled": "Cancelled",
    "lost": "Interrupted, for example because the machine restarted or the disk is full",
}
PROGRAM = re.compile(r"^(?:launch(?: [a-z]+)?|runs): ")  # how our commands begin their errors


@dataclass(frozen=True)
class Job:
    """A command. state: running, done, failed, cancelled, or lost (its process is gone without a result).

    seconds: how long it has run, or took.
    """

    name: str
    state: str
    seconds: float


def start(folder: Path, name: str, words: list[str], limit_s: float, prepare: Prepare = lambda: None) -> None:
    """Start a command about `folder`.

    Args:
        words: our module and its arguments. limit_s: the command is ended after this time. prepare: called once no
            command of this name runs or can start: it writes what the command reads.

    Raises:
        RunError: a command of this name runs already, or it cannot be started; whatever `prepare` raises.
    """
    # The lock would make the folder of a deleted run again, and so keep its name taken.
    if folder.parent == outputs_dir() and not folder.is_dir():
        raise RunError(f"The run {folder.name} was deleted. Reload the page.")
    jobs, token = folder / FOLDER, secrets.token_hex(8)
    lock = Lock(jobs / f"{name}.lock")
    try:
        if running(folder, name) or not lock.acquire(HANDOVER_S):
            raise RunError(BUSY)
        prepare()
        with (jobs / f"{name}.out").open("wb") as out, (jobs / f"{name}.err").open("wb") as err:
            started = {"words": words, "token": token, "began_s": time.time(), "state": "running"}
            atomic_write(jobs / f"{name}.json", json.dumps(started))
            inherited = [lock.handle] if POSIX else []
            if not inherited:
                lock.release()
            process = subprocess.Popen(
                python("ui.jobs", str(jobs), name, f"{limit_s:g}", *map(str, inherited or [-1]), *words),
                cwd=ROOT,
                env={**helper_environment(), TOKEN: token, "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=inherited,
                **platform.detached(),
            )
            _children.append(process)
        until_s = time.monotonic() + HANDOVER_S
        while not POSIX and process.poll() is None and not is_held(lock.path) and time.monotonic() < until_s:
            time.sleep(POLL_S)
    except OSError as error:
        raise RunError(f"{words[0]} cannot be started: {error.strerror or error}") from error
    finally:
        lock.release()
    _children[:] = [one for one in _children if one.poll() is None]  # none stays a zombie for long


_children: list["subprocess.Popen[bytes]"] = []


def running(folder: Path, name: str) -> bool:
    """Whether a command of this name runs, whoever started it."""
    job = read(folder, name)
    return job is not None and job.state == "running"


def _values(path: Path) -> dict[str, Any]:
    """What a `NAME.json` says. OSError, ValueError: there is none, or it is damaged."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged")
    return found


def read(folder: Path, name: str) -> Job | None:
    """The last command of this name; None when there was none."""
    path = folder / FOLDER / f"{name}.json"
    try:
        values = _values(path)
        if values["state"] == "running" and not is_held(path.with_suffix(".lock")):
            values = _values(path)  # its process writes the result before it lets the lock go
            values["state"] = "lost" if values["state"] == "running" else values["state"]
        state, began = str(values["state"]), float(values["began_s"])
        ended = began if state == "lost" else values.get("ended_s")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return Job(name, "lost", 0.0)
    seconds = (float(ended) if isinstance(ended, int | float) else time.time()) - began
    return Job(name, state, max(0.0, seconds))


@contextlib.contextmanager
def idle(folder: Path) -> Iterator[bool]:
    """Keep a run's folder from being trained in (`spawned.idle`). Raises RunError while a command works in it."""
    with spawned.idle(folder) as free:
        for name in at_work(folder):
            raise RunError(f"'{name}' is working in {folder.name}; cancel it, or wait until it has ended")
        yield free


def wait(folder: Path, name: str, wait_s: float) -> Job | None:
    """The last command of this name once it has ended, or as it is after `wait_s`; None when there was none."""
    until = time.monotonic() + wait_s
    while (job := read(folder, name)) is not None and job.state == "running" and time.monotonic() < until:
        time.sleep(0.05)
    return job


def at_work(folder: Path) -> list[str]:
    """The names of the commands that run."""
    return [path.stem for path in sorted((folder / FOLDER).glob("[!.]*.json")) if running(folder, path.stem)]


def output(folder: Path, name: str) -> tuple[str, Any, str]:
    """(what the command printed, the JSON value of its last line or None, its errors)."""
    text, errors = (
        end_of(folder / FOLDER / f"{name}{suffix}", OUTPUT_BYTES).decode("utf-8", "replace")
        for suffix in (".out", ".err")
    )
    body, _, last = text.rstrip("\n").rpartition("\n")
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        return text, None, errors
    return (body, value, errors) if isinstance(value, dict | list) else (text, None, errors)


def reason(folder: Path, name: str, otherwise: str = "It ended without a result.") -> str:
    """Why a command failed: the last line of its errors, without the name of the program."""
    lines = output(folder, name)[2].strip().splitlines()
    return PROGRAM.sub("", lines[-1][:500]) if lines else otherwise


def cancel(folder: Path, name: str) -> None:
    """End a command that runs, and all that it started; nothing when it does not run."""
    if not running(folder, name):
        return
    path = folder / FOLDER / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        values = _values(path)
        if POSIX and "pid" in values and platform.send(int(values["pid"]), values["start"], signal.SIGTERM):
            return  # its process ends it, and says so
        _kill(values["token"], GRACE_S)
        _end_with(path, values, "cancelled", None)


# The process of a command --------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """The process of one command: `JOBS NAME LIMIT_S LOCK MODULE ARGUMENTS…`. LOCK: the inherited descriptor, or -1."""
    jobs, name, limit_s, handle, *words = argv
    path, cancelled = Path(jobs) / f"{name}.json", []
    signal.signal(signal.SIGTERM, lambda *_: cancelled.append(True))
    inherited = [int(handle)] if int(handle) >= 0 else []
    if not inherited and not Lock(path.with_suffix(".lock")).acquire(HANDOVER_S):
        return 1
    me = platform.process_info(os.getpid())
    values = {**_values(path), "pid": os.getpid(), "start": me.start if me else 0.0}
    atomic_write(path, json.dumps(values))
    began_s, code = time.monotonic(), None
    try:
        process = subprocess.Popen(python(*words), cwd=ROOT, pass_fds=inherited)
    except OSError as error:
        print(error, file=sys.stderr)
    else:
        while (code := process.poll()) is None and not cancelled:
            if time.monotonic() - began_s > float(limit_s):
                print(f"ended: it took longer than {float(limit_s):.0f} s", file=sys.stderr)
                break
            time.sleep(POLL_S)
        if code is None:
            _end(process, values["token"])
    state = "cancelled" if cancelled and code is None else "done" if code == 0 else "failed"
    _end_with(path, values, state, code)
    return 0


def _end_with(path: Path, values: dict[str, Any], state: str, code: int | None) -> None:
    atomic_write(path, json.dumps({**values, "state": state, "code": code, "ended_s": time.time()}))


def _end(process: "subprocess.Popen[bytes]", token: str) -> None:
    """End a command and all that it started. It gets SIGTERM alone and first, so that it can end its own processes."""
    import psutil

    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()  # psutil compares the start time: a process number that is used again is left alone
    _kill(token, 0.0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def _kill(token: str, grace_s: float) -> None:
    """Kill every process that carries the token: those in sessions of their own too."""
    with contextlib.suppress(OSError):
        left = spawned.with_environment(TOKEN, token)
        spawned.kill(spawned.Tree("", members={one.pid: one for one in left}), grace_s, KILL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
