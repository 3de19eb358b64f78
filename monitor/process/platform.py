"""What the operating system does for the monitor. Only this module knows which system it is.

On Linux it reads /proc directly: psutil costs ten times as much, and the monitor runs all day. A process is identified
by (pid, start), and `start` never changes while it lives: on Linux it is clock ticks since boot, because a creation
time in wall-clock seconds moves when somebody sets the clock. A process that is gone is an answer, one that cannot be
read is an OSError: a monitor that mistakes "no free descriptor" for "dead" would start a second trainer.
"""

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

from guards import reading
from guards.reading import read_bytes, read_text

LINUX = sys.platform.startswith("linux")
WINDOWS = sys.platform == "win32"
CGROUP = "/sys/fs/cgroup"
# Kills for lack of memory, the best source first: that of the cgroup (v2) does not count kills in other containers.
OOM_COUNTERS = (f"{CGROUP}/memory.events", "/proc/vmstat")
PRIVATE = "hangproof-"  # begins the names of private folders
_TICKS = os.sysconf("SC_CLK_TCK") if LINUX else 0  # of the kernel's clock in a second
_BOOT_S = 60.0  # from the boot to the machine's own process 1; that of a container starts later
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_GONE = (errno.ENOENT, errno.ESRCH, errno.EPERM)  # EPERM: another user's, hidden by `hidepid` or by the system
_STATES = {"running": "R", "stopped": "T", "zombie": "Z", "disk-sleep": "D"}  # psutil.STATUS_*
T = TypeVar("T")
Stream = IO[bytes] | int  # of a child: an open file, or a constant of subprocess
NULL = subprocess.DEVNULL


@dataclass(frozen=True)
class ProcessInfo:
    """One process at one moment. `state` is the kernel's letter (R, S, D, T, Z…); `cpu_s`: user plus system time."""

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


def process_info(pid: int) -> ProcessInfo | None:
    """The process, or None when there is none that we may see. OSError: it cannot be read now (EMFILE, ENOMEM, EIO)."""
    try:
        if not LINUX:
            return _psutil(pid, _from_psutil)
        head, _, tail = read_bytes(f"/proc/{pid}/stat").rpartition(b")")
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    fields = tail.split()
    if len(fields) < 20:
        return None  # it exited during the read
    name, cpu_s = head.partition(b"(")[2].decode("utf-8", "replace"), (int(fields[11]) + int(fields[12])) / _TICKS
    # proc(5): state is field 3, ppid 4, majflt 12, utime and stime 14 and 15, num_threads 20, starttime 22
    state = fields[0].decode()
    if state == "Z" and int(fields[17]) > 1:
        state = "D"  # only its first thread has ended: the others hold its files, and one may be in mid-write
    return ProcessInfo(pid, int(fields[19]), int(fields[1]), state, name, cpu_s, int(fields[9]))


def _psutil(pid: int, read: Callable[[Any], T]) -> T:
    """What `read` returns for this `psutil.Process`. Raises the OSError that /proc would raise."""
    import psutil

    try:
        return read(psutil.Process(pid))
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(errno.ESRCH, str(error)) from error
    except psutil.AccessDenied as error:
        raise PermissionError(errno.EPERM, str(error)) from error


def _from_psutil(process: Any) -> ProcessInfo:
    with process.oneshot():
        times, state = process.cpu_times(), _STATES.get(process.status(), "S")
        start = process._ident[1] or process.create_time()  # the public one moves with macOS's clock: psutil#2582
        cpu_s = times.user + times.system
        return ProcessInfo(process.pid, start, process.ppid(), state, process.name(), cpu_s, 0)


def scan() -> dict[int, ProcessInfo]:
    """Every process of this machine that we may see, by pid. OSError: /proc cannot be listed, or a process not read."""
    if LINUX:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        import psutil

        pids = psutil.pids()
    return {pid: info for pid in pids if (info := process_info(pid)) is not None}


def alive(pid: int, start: float) -> bool:
    """Whether exactly this process runs. A zombie is dead, although `kill(pid, 0)` succeeds on it. OSError: unknown."""
    found = process_info(pid)
    return found is not None and found.start == start and not found.dead


def boot_id() -> str:
    """A name for this boot of the machine, or for this start of the container; "" where that is not known.

    Nothing that ran before it lives on; and while a container is stopped, it has no machine.
    """
    machine = reading.boot_id()
    try:
        first = process_info(1) if machine else None
    except OSError:
        return ""
    return f"{machine}-{first.start}" if first and first.start > _BOOT_S * _TICKS else machine


def namespace(kind: str = "pid", pid: int | str = "self") -> str:
    """The kernel's name of a process's namespace: a container has other PIDs ("pid") and paths ("mnt"). "": unknown."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def environ_of(pid: int) -> dict[str, str]:
    """The environment that it was started with; {} when it is gone or not ours. OSError: it cannot be read now."""
    try:
        if LINUX:
            words = os.fsdecode(read_bytes(f"/proc/{pid}/environ")).split("\0")
            return dict(word.split("=", 1) for word in words if "=" in word)
        return _psutil(pid, lambda process: dict(process.environ()))
    except OSError as error:
        if error.errno in (*_GONE, errno.EACCES):
            return {}
        raise


def command_of(pid: int) -> str:
    """The command line of a process, for people; "" when it cannot be read."""
    with contextlib.suppress(OSError):
        if LINUX:
            return read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return " ".join(_psutil(pid, lambda process: process.cmdline()))
    return ""


def private_bytes(*pids: int) -> int:
    """Memory that these processes hold for themselves, without mapped files and libraries; 0 where not known."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if LINUX:
                resident, shared = read_bytes(f"/proc/{pid}/statm").split()[1:3]  # proc(5), in pages
                total += max(0, int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
            else:
                total += int(_psutil(pid, lambda process: process.memory_info().rss))
    return total


def send(pid: int, start: float, number: int) -> bool:
    """Send a signal to exactly this process; False when it is gone. OSError: not permitted, or it cannot be read.

    Where the system has it, through a pidfd: opened before the start time is compared, it can only reach that process.
    Without one (an old kernel, no free descriptor), a process number that is used again in between could be hit.
    """
    handle = -1
    try:
        with contextlib.suppress(OSError, AttributeError):
            handle = os.pidfd_open(pid)  # type: ignore[attr-defined,unused-ignore]
        if not alive(pid, start):
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)  # type: ignore[attr-defined,unused-ignore]
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; False when that cannot be read. Off Linux always True.

    A signal such as SIGUSR2 kills a process that has no handler, and a pid may belong to another program by now.
    """
    with contextlib.suppress(OSError):
        for line in read_bytes(f"/proc/{pid}/status").splitlines() if LINUX else ():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return not LINUX


@dataclass(frozen=True)
class Moment:
    """One reading of all three clocks, in seconds. The boot clock counts a suspend, the monotonic one does not."""

    mono_s: float
    boot_s: float
    wall_s: float

    @property
    def utc(self) -> str:
        """The wall clock as text."""
        return utc(self.wall_s)


def utc(wall_s: float) -> str:
    """UTC, ISO 8601, milliseconds."""
    return datetime.fromtimestamp(wall_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def now() -> Moment:
    """Read the clocks. Without a boot clock, `boot_s` is the monotonic one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    boot_s = time.clock_gettime(clock) if clock is not None else time.monotonic()
    return Moment(time.monotonic(), boot_s, time.time())


def oom_kills() -> dict[str, int]:
    """Processes that the kernel has killed for lack of memory, by the file that counts them; {} without one."""
    found = {path: re.search(r"^oom_kill (\d+)$", read_text(path), re.M) for path in OOM_COUNTERS}
    return {path: int(match[1]) for path, match in found.items() if match}


def kill_first(pids: Iterable[int], first: bool = True) -> None:
    """Whether the kernel, short of memory, kills these processes and their later children first. Linux only."""
    for pid in pids if LINUX else ():
        with contextlib.suppress(OSError):  # whoever raised its score may lower it again, unprivileged: proc(5)
            own = read_bytes("/proc/self/oom_score_adj")
            Path(f"/proc/{pid}/oom_score_adj").write_bytes(b"1000" if first else own)


def become_subreaper() -> None:
    """Make the kernel reparent the training's orphans to us, so that they can be seen and reaped. Linux only."""
    if LINUX:
        import ctypes

        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_children: weakref.WeakValueDictionary[int, subprocess.Popen[bytes]] = weakref.WeakValueDictionary()  # of `popen`


def popen(command: list[str], out: Stream = NULL, stdin: Stream = NULL, **options: Any) -> subprocess.Popen[bytes]:
    """A child in a session of its own, which prints into `out`; `reap` keeps its exit code for whoever waits for it.

    options: more of `subprocess.Popen`'s. OSError: it cannot be started.
    """
    options |= {"bufsize": 0, "stdin": stdin, "stdout": out, "stderr": subprocess.STDOUT, **detached()}
    child: subprocess.Popen[bytes] = subprocess.Popen(command, **options)
    _children[child.pid] = child
    return child


def reap() -> None:
    """Collect the exit status of every dead child, so that none stays a zombie: a subreaper gets all orphans.

    The status of a child of `popen` is kept for whoever waits for it. Linux only: elsewhere nobody adopts orphans.
    """
    with contextlib.suppress(ChildProcessError):  # there is none
        while LINUX and (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            child = _children.get(dead.si_pid)
            if child is None or child.returncode is not None or child.poll() is None:
                os.waitpid(dead.si_pid, os.WNOHANG)


def detached() -> dict[str, Any]:
    """Keyword arguments for `subprocess.Popen` that put a child into a session of its own."""
    if sys.platform == "win32":  # without a console, the child's children open windows (python/cpython#85785)
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"start_new_session": True}


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The monitor's beat, by which its keeper judges it: a byte in a pipe, every other second that its loop turns. A pipe
# needs no disk, which may be what the monitor is stuck on, and its end tells the keeper at once that the monitor has
# ended. Only the loop and the waits inside it beat, no thread does: a monitor that is alive and stuck is silent.
BEAT_S = 2.0
_beats = {"pipe": -1.0, "sent_s": -1e9}


def begin_beats(pipe: int) -> None:
    """Beat into this descriptor from now on; no child of this process inherits it."""
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    _beats["pipe"] = pipe
    beat()


def beat() -> None:
    """The loop turns. Costs nothing when the last beat was a moment ago, or where no keeper listens."""
    if _beats["pipe"] >= 0 and time.monotonic() - _beats["sent_s"] >= BEAT_S:
        _beats["sent_s"] = time.monotonic()
        with contextlib.suppress(OSError):  # the keeper is gone, or it was stopped and the pipe is full
            os.write(int(_beats["pipe"]), b".")


def sleep(seconds: float) -> None:
    """Sleep as a part of a wait that takes longer than a turn of the loop should."""
    beat()
    time.sleep(seconds)


class Waker:
    """Sleeps until a time is over, `wake` is called or a child exits (SIGCHLD), whichever is first."""

    def __init__(self) -> None:
        self._wakes: SimpleQueue[None] = SimpleQueue()  # a signal handler may put; it must not set a threading.Event
        if sys.platform != "win32":
            signal.signal(signal.SIGCHLD, lambda *_: self.wake())

    def wake(self) -> None:
        """End the sleep under way, else the next one."""
        self._wakes.put(None)

    def sleep(self, seconds: float) -> None:
        """Sleep at most `seconds`."""
        beat()
        with contextlib.suppress(Empty):
            self._wakes.get(timeout=seconds)
            while True:
                self._wakes.get_nowait()


def private_folder(slug: str, parent: Path | None = None) -> Path:
    """A new folder for us alone: in `parent`, or on local disk (a run's own may be on a network). OSError."""
    return Path(tempfile.mkdtemp(prefix=f"{PRIVATE}{slug[:40]}-", dir=parent))


def private_folders(parent: Path) -> list[Path]:
    """All that this user's processes have made there. OSError."""
    found = [path for path in parent.glob(f"{PRIVATE}*") if path.is_dir() and not path.is_symlink()]
    return [path for path in found if WINDOWS or path.stat().st_uid == os.getuid()]


def drop_private(path: Path) -> None:
    """Remove a folder that `private_folder` made."""
    if path.name.startswith(PRIVATE):
        shutil.rmtree(path, ignore_errors=True)


# ---- locks ----

# One monitor a run, one run a GPU. The kernel releases a lock when its holder dies, by SIGKILL too; a killed holder
# would leave a pid file behind, and a reused pid makes it look alive. A run's folder can be deleted with the lock file
# in it, so `acquire` checks that the file it locked is still at the path: else two processes could hold locks on two
# files of one name.
LOCK = "monitor.lock"  # in a run's folder: held by its monitor
PROBE_S = 1.0  # how long `acquire` waits for those who only probe; a probe takes microseconds


class NoLocks(OSError):
    """A network drive is mounted without locks."""


class Lock:
    """An exclusive lock on a file, held until `release()` or the end of the process."""

    def __init__(self, path: Path, shared: bool = False):
        """shared: other accounts use it too, in a folder that everybody may write to."""
        self.path = path
        self._shared = shared
        self._handle: int | None = None

    def acquire(self, patience_s: float = 0.0) -> bool:
        """Take the lock; False when another process holds it for `patience_s` seconds. OSError: it cannot be made."""
        began_s = time.monotonic()
        while self._handle is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = _open_shared(self.path) if self._shared else os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                locked = _lock(handle)
                if locked and _is_at(handle, self.path):
                    self._handle = handle
                    break
                # Removed between our open and our lock, or only probed: a shared lock succeeds. Windows cannot tell.
                free = locked or sys.platform == "win32" or _lock(handle, shared=True)
            finally:
                if self._handle is None:
                    os.close(handle)
            if time.monotonic() - began_s >= (max(patience_s, PROBE_S) if free else patience_s):
                return False
            time.sleep(random.uniform(0.001, 0.02))  # uneven, so that two processes do not keep probing each other
        return True

    @property
    def handle(self) -> int:
        """The descriptor of the held lock: a process that inherits it holds the lock too."""
        if self._handle is None:
            raise RuntimeError(f"the lock {self.path} is not held")
        return self._handle

    def write(self, text: str) -> None:
        """Replace the text in the lock file. It only informs people, so a full disk is no error."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.handle, 0)
            os.lseek(self.handle, 0, os.SEEK_SET)
            os.write(self.handle, text.encode())

    def release(self) -> None:
        """Release the lock, when it is held."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(OSError):
                os.close(handle)


def _open_shared(path: Path) -> int:
    """Open the file of a lock that every account may take; made when missing. OSError: something else is in its place.

    Made and opened in two steps, because Linux (fs.protected_regular) refuses to open with O_CREAT what another account
    made in such a folder. A link there could lead to a file of ours, which must not be changed.
    """
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            if hasattr(os, "fchmod"):
                os.fchmod(handle, 0o666)  # whatever the umask says
            return handle
        return _open_shared(path)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    raise OSError(errno.EPERM, "is not the file of a lock; remove it", os.fspath(path))


def _lock(handle: int, shared: bool = False) -> bool:
    """Try to lock; False when somebody else's lock forbids it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # beyond the text, so that it can be read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            what = "mount it with them, or set HANGPROOF_DATA to a folder on another disk"
            raise NoLocks(f"the data folder's disk has no file locks (flock); {what}") from error
        raise
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        # Windows removes no file that is open.
        return sys.platform == "win32" or os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock; True when unknown, because a wrong "free" lets a second writer start."""
    try:
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            return not _lock(handle, shared=True)
        finally:
            os.close(handle)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NoLocks)
