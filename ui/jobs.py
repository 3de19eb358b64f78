"""Commands that the page runs for a run in the background: a probe, the files for another place, a diagnosis.

A command is a process of its own, so that nothing blocks the server and a command outlives it: what it prints goes to files in
`outputs/RUN/.jobs/`, and `NAME.json` says what runs and how it ended. Any page, also one that is opened later, reads them.
`python -m ui.jobs` is that process: it starts the command, ends it after its time limit, and writes the result.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.process import platform
from monitor.process.subjob import ROOT, helper_environment, python
from runs.files import RunError, atomic_write

FOLDER = ".jobs"
OUTPUT_BYTES = 256 << 10  # of a command's output, from its end
START_S = 20.0  # until the process has said that it runs
GRACE_S = 20.0  # from SIGTERM to SIGKILL: a probe ends its ranks first


@dataclass(frozen=True)
class Job:
    """A command of a run. state: running, done, failed, cancelled, or lost (its process is gone without a result).

    seconds: how long it has run, or took. stamp: changes when there is something new to show.
    """

    name: str
    state: str
    seconds: float
    stamp: str


def start(folder: Path, name: str, words: list[str], limit_s: float) -> None:
    """Start a command for the run in `folder`.

    Args:
        words: our module and its arguments. limit_s: the command is ended after this time.

    Raises:
        RunError: it runs already, or cannot be started.
    """
    known = read(folder, name)
    if known is not None and known.state == "running":
        raise RunError("It is running already")
    jobs = folder / FOLDER
    try:
        jobs.mkdir(exist_ok=True)
        (jobs / f"{name}.json").unlink(missing_ok=True)
        process = subprocess.Popen(
            python("ui.jobs", str(jobs), name, f"{limit_s:g}", *words),
            cwd=ROOT,
            env={**helper_environment(), "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **platform.detached(),
        )
    except OSError as error:
        raise RunError(f"{words[0]} cannot be started: {error.strerror or error}") from error
    until = time.monotonic() + START_S
    while not (jobs / f"{name}.json").exists() and time.monotonic() < until:
        if process.poll() is not None:
            raise RunError(f"{words[0]} ended at once with exit code {process.returncode}")
        time.sleep(0.02)
    _children.append(process)
    for old in [one for one in _children if one.poll() is not None]:  # none stays a zombie for long
        _children.remove(old)


_children: list["subprocess.Popen[bytes]"] = []


def read(folder: Path, name: str) -> Job | None:
    """The last command of this name; None when there was none."""
    path = folder / FOLDER / f"{name}.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        state, began, pid, start_s = values["state"], float(values["began_s"]), int(values["pid"]), values["start"]
        ended = values.get("ended_s")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return Job(name, "lost", 0.0, "")
    if state == "running" and not platform.alive(pid, start_s):
        state, ended = "lost", began
    seconds = (float(ended) if isinstance(ended, int | float) else time.time()) - began
    size = sum(_size(path.with_suffix(suffix)) for suffix in (".out", ".err"))
    return Job(name, str(state), max(0.0, seconds), f"{began:.3f}-{state}-{size}")


def all_of(folder: Path) -> dict[str, Job]:
    """The last command of each name."""
    try:
        names = [name[:-5] for name in os.listdir(folder / FOLDER) if name.endswith(".json") and name[0] != "."]
    except OSError:
        return {}
    return {name: job for name in sorted(names) if (job := read(folder, name)) is not None}


def output(folder: Path, name: str) -> tuple[str, Any, str]:
    """(what the command printed, the JSON value of its last line or None, its errors)."""
    text, errors = (_tail(folder / FOLDER / f"{name}{suffix}") for suffix in (".out", ".err"))
    body, _, last = text.rstrip("\n").rpartition("\n")
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        return text, None, errors
    return (body, value, errors) if isinstance(value, dict | list) else (text, None, errors)


def cancel(folder: Path, name: str) -> None:
    """End a command that runs; nothing when it does not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads((folder / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        if values["state"] == "running":
            platform.send(int(values["pid"]), values["start"], signal.SIGTERM)


def exit_code(work: Callable[[], object]) -> int:
    """Do the work of a job's process: 0, or 1 after a RunError, which is then on standard error."""
    try:
        work()
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return file.read(OUTPUT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def main(argv: list[str]) -> int:
    """The process of one command: `JOBS NAME LIMIT_S MODULE ARGUMENTS…`."""
    jobs, name, limit_s, *words = argv
    path, cancelled = Path(jobs) / f"{name}.json", []
    signal.signal(signal.SIGTERM, lambda *_: cancelled.append(True))
    me = platform.process_info(os.getpid())
    values: dict[str, Any] = {
        "words": words,
        "pid": os.getpid(),
        "start": me.start if me else 0.0,
        "began_s": time.time(),
        "state": "running",
    }
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        atomic_write(path, json.dumps(values))
        began_s = time.monotonic()
        try:
            process = subprocess.Popen(python(*words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        except OSError as error:
            err.write(str(error).encode())
            code: int | None = None
        else:
            while (code := process.poll()) is None and not cancelled:
                if time.monotonic() - began_s > float(limit_s):
                    err.write(f"ended: it took longer than {float(limit_s):.0f} s\n".encode())
                    break
                time.sleep(0.1)
            if code is None:
                _end(process)
    state = "cancelled" if cancelled and code is None else "done" if code == 0 else "failed"
    atomic_write(path, json.dumps({**values, "state": state, "code": code, "ended_s": time.time()}))
    return 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all that it started."""
    import psutil

    with contextlib.suppress(psutil.Error):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        process.terminate()
        until = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()  # psutil compares the start time: a process number that is used again is left alone
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
