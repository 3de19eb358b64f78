"""What one process does and waits for, from /proc alone: for `monitor diagnose PID` and the page's "Explain this process".

It disturbs nothing: no signal, no stop. Only processes of the same user are explained, because another user's are none of the page's
business, and the kernel refuses most of it anyway.
"""

import os
import platform as machine
from pathlib import Path
from typing import Any

from monitor.process import platform
from monitor.run_folder import MonitorError

MOST_THREADS = 64
MOST_PID = 4_194_304  # proc(5)
STATES = {
    "R": "computes, or waits for a processor core",
    "S": "waits",
    "D": "waits in the kernel and cannot be killed until that ends (uninterruptible sleep)",
    "T": "is stopped by a signal; SIGCONT continues it",
    "t": "is stopped by a debugger",
    "Z": "has exited, and its parent has not collected it yet",
    "X": "has exited",
    "I": "is an idle kernel thread",
}
# What is waited for, by the beginnings of kernel functions (proc(5), wchan)
WAITS = {
    "for a lock or for another thread": "futex",
    "for a child process to end": "do_wait",
    "for a time to pass (sleep)": "hrtimer_nanosleep do_nanosleep common_nsleep",
    "for an event (network, pipe or timer)": "ep_poll do_epoll_wait poll_schedule do_sys_poll do_select",
    "for another process at a pipe": "pipe_ anon_pipe_",
    "for another process of this machine at a socket": "unix_",
    "for the network": "sk_wait inet_ tcp_",
    "for the network or a terminal": "wait_woken",
    "for a network file system (NFS)": "nfs rpc_",
    "for a network file system (SMB)": "cifs",
    "for a file system in user space (FUSE, such as sshfs or rclone)": "fuse request_wait_answer",
    "for the disk": "io_schedule folio_wait wait_on_page jbd2 ext4 xfs blk_",
    "for the NVIDIA driver": "os_acquire nvidia uvm_",
    "for a lock on a file": "flock_lock fcntl_",
    "for SIGCONT: a signal has stopped it": "do_signal_stop",
    "for a debugger": "ptrace_stop",
    "for its own core dump to be written": "do_coredump",
}
# syscall(2) numbers of calls whose first argument is a file: Linux's asm/unistd.h, generic for arm64
FILE_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {0: "reads from", 1: "writes to", 17: "reads from", 18: "writes to", 45: "receives from", 47: "receives from",
               44: "sends to", 46: "sends to", 73: "waits for a lock on", 74: "flushes", 75: "flushes"},
    "aarch64": {63: "reads from", 64: "writes to", 67: "reads from", 68: "writes to", 207: "receives from",
                212: "receives from", 206: "sends to", 211: "sends to", 32: "waits for a lock on", 82: "flushes",
                83: "flushes"},
}  # fmt: skip


def checked(pid: object) -> platform.ProcessInfo:
    """The process with this number, where it may be explained.

    Raises:
        MonitorError: no number, no such process, or another user's.
    """
    number = int(pid) if isinstance(pid, str) and pid.isascii() and pid.isdigit() and len(pid) <= 8 else pid
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= MOST_PID:
        raise MonitorError(f"{str(pid)[:40]!r} is no process number; use one from 1 to {MOST_PID:,}, as `ps` shows it")
    process = platform.process_info(number)
    if process is None:
        raise MonitorError(f"process {number} does not exist, or belongs to another user")
    if platform.LINUX:
        try:
            owner = os.stat(f"/proc/{number}").st_uid
        except OSError as error:
            raise MonitorError(f"process {number} does not exist any more") from error
        if owner != os.getuid():
            raise MonitorError(f"process {number} belongs to another user; only your own processes are explained")
    return process


def facts(process: platform.ProcessInfo) -> dict[str, Any]:
    """What /proc says about it.

    Returns:
        {"pid", "start", "name", "state" (a letter), "text" (as a phrase), "parent", "cpu_s", "memory_bytes",
        "threads": [{"tid", "name", "state", "waits"}], "lines": the same as sentences}
    """
    pid = process.pid
    threads = [thread for thread in _threads(pid) if thread]
    text = STATES.get(process.state, f"is in state {process.state}")
    main = next((thread for thread in threads if thread["tid"] == pid), None)
    if main and main["waits"] and process.state in ("S", "D"):
        text = main["waits"] if process.state == "S" else f"{text}: it {main['waits']}"
    memory = platform.private_bytes(pid)
    parent = platform.process_info(process.ppid)
    lines = [
        f"Process {pid} ({process.name}) {text}.",
        f"It has used {process.cpu_s:.1f} s of processor time and holds {memory / 1e6:,.0f} MB of its own.",
        f"Its parent is {process.ppid} ({parent.name if parent else 'gone'}).",
    ]
    waiting: dict[str, int] = {}
    for thread in threads:
        if thread["tid"] != pid:
            what = thread["waits"] or STATES.get(thread["state"], thread["state"])
            waiting[what] = waiting.get(what, 0) + 1
    for what, number in sorted(waiting.items(), key=lambda item: -item[1]):
        lines.append(f"{number} more thread{'s' * (number != 1)}: {what}.")
    return {
        "pid": pid, "start": process.start, "name": process.name, "state": process.state, "text": text,
        "parent": process.ppid, "cpu_s": round(process.cpu_s, 2), "memory_bytes": memory, "threads": threads,
        "lines": lines,
    }  # fmt: skip


def _threads(pid: int) -> list[dict[str, Any] | None]:
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task") if name.isdigit())
    except OSError:
        return []
    return [_thread(pid, tid) for tid in tids[:MOST_THREADS]]


def _thread(pid: int, tid: int) -> dict[str, Any] | None:
    folder = f"/proc/{pid}/task/{tid}"
    stat = _read(f"{folder}/stat")
    if not stat:
        return None
    head, _, tail = stat.rpartition(")")
    state = tail.split()[0] if tail.split() else ""
    waits = _waits(_read(f"{folder}/wchan")) if state in ("S", "D", "T", "t") else ""
    if state in ("S", "D") and (file := _file(pid, _read(f"{folder}/syscall"))):
        waits = f"waits {waits}; it {file}" if waits else f"it {file}"
    elif waits:
        waits = f"waits {waits}"
    return {"tid": tid, "name": head.partition("(")[2], "state": state, "waits": waits}


def _waits(wchan: str) -> str:
    """What a kernel function waits for; the function's name where it is not in the table."""
    name = wchan.strip().lstrip("_")
    if name in ("", "0"):
        return ""
    return next(
        (text for text, starts in WAITS.items() if name.startswith(tuple(starts.split()))),
        f"in the kernel ({name[:60]})",
    )


def _file(pid: int, syscall: str) -> str:
    """Which file a system call under way is about, such as `reads from pipe:[123]`; "" for other calls."""
    words = syscall.split()
    calls = FILE_CALLS.get(machine.machine(), {})
    if len(words) < 2 or not words[0].isdigit() or int(words[0]) not in calls:
        return ""
    try:
        name = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except (OSError, ValueError):
        return ""
    return f"{calls[int(words[0])]} {name[:200]}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
