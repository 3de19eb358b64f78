"""What the operating system must do for us, and the only place that knows which one it is.

On Linux /proc is read directly (a psutil scan costs ten times as much, and this runs all day); elsewhere psutil answers.
A process is known by (pid, start), where `start` never changes while it lives: on Linux clock ticks since boot, because a
creation time in wall-clock seconds moves when somebody sets the clock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LINUX = sys.platform.startswith("linux")
WINDOWS = sys.platform == "win32"
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") and not WINDOWS else 100
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Proc:
    """One process at one moment. `state` is the kernel's letter (R, S, D, T, Z…); `cpu_s` is its own time, user and system."""

    pid: int
    start: float
    ppid: int
    state: str
    name: str
    cpu_s: float
    major_faults: int

    @property
    def dead(self) -> bool:
        return self.state in ("Z", "X", "x")


def proc(pid: int) -> Proc | None:
    """The process, or None when there is none of that number."""
    if not LINUX:
        return _psutil_proc(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None  # gone: ENOENT, or ESRCH while it was going
    head, _, tail = data.rpartition(b")")
    f = tail.split()
    # proc(5): state is field 3, ppid 4, majflt 12, utime..cstime 14-17, starttime 22
    return Proc(
        pid=pid,
        start=int(f[19]),
        ppid=int(f[1]),
        state=f[0].decode(),
        name=head.partition(b"(")[2].decode("utf-8", "replace"),
        cpu_s=(int(f[11]) + int(f[12])) / _TICKS,
        major_faults=int(f[9]),
    )


def _psutil_proc(pid: int) -> Proc | None:
    import psutil

    letters = {psutil.STATUS_STOPPED: "T", psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_DISK_SLEEP: "D"}
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Proc(
                pid=pid,
                start=process.create_time(),
                ppid=process.ppid(),
                state=letters.get(process.status(), "R" if process.status() == psutil.STATUS_RUNNING else "S"),
                name=process.name(),
                cpu_s=times.user + times.system,
                major_faults=0,
            )
    except psutil.Error:
        return None


def scan() -> dict[int, Proc]:
    """Every process of this machine that we may see."""
    if LINUX:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        import psutil

        pids = psutil.pids()
    return {pid: found for pid in pids if (found := proc(pid)) is not None}


def alive(pid: int, start: float) -> bool:
    """Is this very process running? A zombie is dead: `kill(pid, 0)` would say that it lives."""
    found = proc(pid)
    return found is not None and found.start == start and not found.dead


def environ_of(pid: int) -> bytes:
    """The environment a process was started with, as NUL-separated `key=value`; b"" where we may not look."""
    if LINUX:
        try:
            return Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return b""
    import psutil

    try:
        return "\0".join(f"{k}={v}" for k, v in psutil.Process(pid).environ().items()).encode("utf-8", "replace")
    except psutil.Error:
        return b""


def command_of(pid: int) -> str:
    """The command line of a process, for people; "" where we may not look."""
    if LINUX:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            return ""
    import psutil

    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def send(pid: int, start: float, number: int) -> bool:
    """Send a signal to this very process; False when it is gone. A pidfd closes the gap in which a number is reused."""
    if not hasattr(os, "pidfd_open"):
        if not alive(pid, start):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS or not alive(pid, start):  # ENOSYS: a kernel before 5.3
            return False
        os.kill(pid, number)
        return True
    try:
        if not alive(pid, start):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def boot_seconds() -> float:
    """Seconds since boot, suspended time included; where no such clock exists, the monotonic one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(clock) if clock is not None else time.monotonic()


def boot_id() -> str:
    """A name for this boot: after a reboot, process numbers and monotonic times of before mean nothing."""
    if LINUX:
        with contextlib.suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    import psutil

    return str(round(psutil.boot_time() / 10))


def become_subreaper() -> bool:
    """Have orphans of the training reparented to us, so that they can be seen and reaped. Linux only; False elsewhere."""
    if not LINUX:
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap(pids: list[int]) -> None:
    """Collect those of our own children that have ended, so that they do not stay zombies."""
    if WINDOWS:
        return
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def detached() -> dict:
    """Keyword arguments for `subprocess.Popen` that put a child in a session of its own."""
    if WINDOWS:
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS}
    return {"start_new_session": True}


def shell_command(script: Path) -> list[str]:
    """How a rendered script is run on this system."""
    return ["cmd", "/c", str(script)] if WINDOWS else ["bash", str(script)]


class Waker:
    """Sleeps until a time is over, a signal came, or the watched process ended, whichever is first."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._pidfd: int | None = None

    def watch(self, pid: int | None) -> None:
        """Wake when `pid` ends (where the kernel can tell; elsewhere the next look notices); None: nothing to watch."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if pid is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)

    def sleep(self, seconds: float) -> None:
        """Sleep at most `seconds`."""
        if WINDOWS:
            time.sleep(seconds)
            return
        watched = [self._read] + ([self._pidfd] if self._pidfd is not None else [])
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if self._read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 512)
        if self._pidfd is not None and self._pidfd in ready:
            self.watch(None)  # it ended: level-triggered, so it would wake us for ever

    def close(self) -> None:
        self.watch(None)
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
