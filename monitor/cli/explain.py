"""What one process does and waits for, for `monitor diagnose PID` and the page's "Explain this process".

It disturbs nothing: no signal, no stop. Only processes of the same user are explained.
"""

import contextlib
from collections import Counter
from pathlib import Path

import psutil

from guards.reading import read_text
from monitor.detect.probe import waits_for
from monitor.phrases import STATES, count
from monitor.process import platform
from monitor.run_folder import MonitorError


def checked(pid: object) -> platform.ProcessInfo:
    """The process with this number. MonitorError: it is no number of a process, or the process is another user's."""
    words = str(pid)[:40]
    with contextlib.suppress(psutil.Error):
        process = platform.process_info(int(words)) if words.isascii() and words.isdigit() else None
        if process is not None and psutil.Process(process.pid).username() == psutil.Process().username():
            return process
    raise MonitorError(f"{words!r} is no process number of yours; use one as `ps` shows it")


def facts(process: platform.ProcessInfo) -> dict[str, object]:
    """{"pid", "name", "state" (a letter), "text" (as a phrase), "lines": all that is known, as sentences}."""
    pid, parent, held = process.pid, platform.process_info(process.ppid), platform.private_bytes(process.pid)
    threads = {path.name: _waits(path) for path in Path(f"/proc/{pid}/task").glob("[0-9]*")}
    waits = threads.pop(str(pid), "waits") + " in the kernel, where no signal reaches it" * (process.state == "D")
    text = f"is {STATES[process.state]}" if process.state in "RTtZ" else waits
    lines = [
        f"Process {pid} ({process.name}) {text}.",
        f"It has used {process.cpu_s:.1f} s of processor time and holds {held / 1e6:,.0f} MB of its own.",
        f"Its parent is {process.ppid} ({parent.name if parent else 'gone'}).",
        *(f"{count(number, 'more thread')}: {what}." for what, number in Counter(threads.values()).most_common()),
    ]
    return {"pid": pid, "name": process.name, "state": process.state, "text": text, "lines": lines}


def _waits(thread: Path) -> str:
    """What a thread waits for; the kernel function's name where it is not in the table."""
    name = read_text(thread / "wchan").strip().lstrip("_")
    return "computes" if name in ("", "0") else f"waits {waits_for(name) or f'in the kernel ({name[:60]})'}"
