"""What one process does and waits for, for `monitor diagnose PID` and the page's "Explain this process".

It disturbs nothing: no signal, no stop. Only processes of the same user are explained.
"""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

from monitor.process import platform
from monitor.run_folder import MonitorError

MOST_PID = 4_194_304  # proc(5)
WAITS = {  # what is waited for, by the beginnings of kernel functions (proc(5), wchan)
    "for a lock or for another thread": "futex",
    "for a child process to end": "do_wait",
    "for a time to pass (sleep)": "hrtimer_nanosleep do_nanosleep common_nsleep",
    "for an event (network, pipe or timer)": "ep_poll do_epoll_wait poll_schedule do_sys_poll do_select",
    "for another process at a pipe": "pipe_ anon_pipe_",
    "for another process of this machine at a socket": "unix_",
    "for the network": "sk_wait inet_ tcp_ wait_woken",
    "for a network file system": "nfs rpc_ cifs fuse request_wait_answer",
    "for the disk": "io_schedule folio_wait wait_on_page jbd2 ext4 xfs blk_",
    "for the NVIDIA driver": "os_acquire nvidia uvm_",
    "for a lock on a file": "flock_lock fcntl_",
}


def checked(pid: object) -> platform.ProcessInfo:
    """The process with this number. MonitorError: it is no number of a process, or the process is another user's."""
    import psutil

    words = str(pid)
    number = int(words) if words.isascii() and words.isdigit() and len(words) <= 8 else 0
    if not 0 < number <= MOST_PID:
        raise MonitorError(f"{words[:40]!r} is no process number; use one from 1 to {MOST_PID:,}, as `ps` shows it")
    process = platform.process_info(number)
    with contextlib.suppress(psutil.Error):
        if process is not None and psutil.Process(number).username() == psutil.Process().username():
            return process
    raise MonitorError(f"process {number} does not exist, or belongs to another user")


def facts(process: platform.ProcessInfo) -> dict[str, Any]:
    """{"pid", "name", "state" (a letter), "text" (as a phrase), "lines": all that is known, as sentences}."""
    pid, parent = process.pid, platform.process_info(process.ppid)
    threads = {int(path.name): _waits(path) for path in Path(f"/proc/{pid}/task").glob("[0-9]*")}
    states = {"R": "computes, or waits for a processor core", "T": "is stopped by a signal; SIGCONT continues it",
              "t": "is stopped by a debugger", "Z": "has exited, and its parent has not collected it yet"}  # fmt: skip
    text = states.get(process.state) or threads.pop(pid, "waits")
    threads.pop(pid, None)
    text += " in the kernel, and cannot be killed until that ends (uninterruptible sleep)" * (process.state == "D")
    lines = [
        f"Process {pid} ({process.name}) {text}.",
        f"It has used {process.cpu_s:.1f} s of processor time and holds {platform.private_bytes(pid) / 1e6:,.0f} MB of its own.",
        f"Its parent is {process.ppid} ({parent.name if parent else 'gone'}).",
        *(f"{n} more thread{'s' * (n != 1)}: {what}." for what, n in Counter(threads.values()).most_common()),
    ]
    return {"pid": pid, "name": process.name, "state": process.state, "text": text, "lines": lines}


def _waits(thread: Path) -> str:
    """What a thread waits for; the kernel function's name where it is not in the table."""
    try:
        name = (thread / "wchan").read_text(encoding="utf-8", errors="replace").strip().lstrip("_")
    except OSError:
        return "ends"
    found = (what for what, starts in WAITS.items() if name.startswith(tuple(starts.split())))
    return f"waits {next(found, f'in the kernel ({name[:60]})')}" if name not in ("", "0") else "computes"
