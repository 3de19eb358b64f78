"""The processes of an attempt, known before anything is killed, and how they are killed.

A process group is not enough: launcher workers and loaders start sessions of their own, and a SIGTERM to
`accelerate launch` orphans the trainer (measured). So a process belongs to the run when its parent does, or when the
environment it inherited carries the run's token. From then on it is remembered by (pid, start), whatever happens to its
parent.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from monitor.process import platform
from monitor.process.locks import LOCK, Lock, is_held
from monitor.process.platform import ProcessInfo

TOKEN = "HANGPROOF_TOKEN"
RUN = "HANGPROOF_RUN"
MACHINE = "HANGPROOF_NODE"
MARKS = (TOKEN, RUN, "HANGPROOF_ATTEMPT", "HANGPROOF_HEARTBEAT", "HANGPROOF_RESUME")  # of a training alone
_TOKEN_DIGITS = 32  # random, for each attempt


@dataclass
class Tree:
    """The living processes of one attempt. `token`: what its environment carries; `root`: (pid, start) of its shell."""

    token: str
    root: tuple[int, float] | None = None
    members: dict[int, ProcessInfo] = field(default_factory=dict)

    def refresh(self) -> dict[int, ProcessInfo]:
        """Scan the machine; returns the living members, which are `members` too. OSError: /proc cannot be read."""
        everything = platform.scan()
        known = [*self.keys(), *([self.root] if self.root else [])]
        ours = {pid for pid, start in known if pid in everything and everything[pid].start == start}
        ours |= {pid for pid, process in everything.items() if self.token and not process.dead and self._marks(pid)}
        while children := {p.pid for p in everything.values() if p.ppid in ours} - ours:
            ours |= children
        found = [everything[pid] for pid in ours - {os.getpid(), os.getppid(), 0, 1}]
        # Oldest first: a parent is killed before it can replace a killed child.
        self.members = {p.pid: p for p in sorted(found, key=lambda p: (p.start, p.pid)) if not p.dead}
        return self.members

    def _marks(self, pid: int) -> bool:
        """Does its environment carry the token? False for now in the middle of an exec, and where it cannot be read."""
        with contextlib.suppress(OSError):
            return platform.environ_of(pid).get(TOKEN) == self.token
        return False

    def keys(self) -> list[tuple[int, float]]:
        """(pid, start) of every member."""
        return [(p.pid, p.start) for p in self.members.values()]


@dataclass(frozen=True)
class KillResult:
    """`killed` processes were found; `survivors` did not die in time (uninterruptible sleep). `took_s` in seconds."""

    killed: tuple[ProcessInfo, ...]
    survivors: tuple[ProcessInfo, ...]
    took_s: float


def kill(tree: Tree, grace_s: float, kill_wait_s: float, at_once: Iterable[int] = ()) -> KillResult:
    """Kill every process of the tree: SIGCONT, SIGTERM, `grace_s` to exit, SIGKILL, `kill_wait_s` to be gone.

    SIGCONT comes first, because a stopped process keeps SIGTERM pending. Every round looks for new children, so that a
    process that forks meanwhile does not escape. Never raises OSError: a signal that fails does not protect the others.

    at_once: pids that get SIGKILL instead of SIGTERM. These are the ranks: SIGTERM asks a guarded trainer for a
    checkpoint, and it either had its time for that or is stuck and would only use up the grace.
    """
    began_s, at_once, grace_over = time.monotonic(), set(at_once), False
    killed: dict[int, ProcessInfo] = {}
    signalled: set[int] = set()
    while _refresh(tree):
        took_s = time.monotonic() - began_s
        if grace_over and took_s > grace_s + kill_wait_s:
            break
        grace_over = took_s >= grace_s
        for pid, process in tree.members.items():
            if sys.platform == "win32":
                numbers = [signal.SIGTERM]  # terminates at once
            elif grace_over or pid in at_once:
                numbers = [signal.SIGKILL]
            else:
                numbers = [signal.SIGCONT, signal.SIGTERM] if pid not in signalled else []
            with contextlib.suppress(OSError):  # EPERM, EIO…: the next round tries again
                for number in numbers:
                    platform.send(pid, process.start, number)
                signalled.add(pid)
        killed |= tree.members
        waited_s = took_s - grace_s if grace_over else took_s
        platform.sleep(min(0.1, 0.005 + waited_s / 2))
    return KillResult(tuple(killed.values()), tuple(tree.members.values()), time.monotonic() - began_s)


def _refresh(tree: Tree) -> dict[int, ProcessInfo]:
    """`tree.refresh()`; while /proc cannot be read, the members known so far that are not known to be gone."""
    try:
        return tree.refresh()
    except OSError:
        with contextlib.suppress(OSError):
            tree.members = {pid: p for pid, p in tree.members.items() if platform.alive(pid, p.start)}
        return tree.members


def orphans() -> list[str]:
    """Trainings that run although no monitor watches them, one sentence a run. OSError: see `with_environment`."""
    found: dict[str, list[ProcessInfo]] = {}
    for process, folder in unwatched():
        found.setdefault(str(folder), []).append(process)
    return [
        f"unwatched: {len(processes)} {'process' if len(processes) == 1 else 'processes'} of {folder} "
        f"({', '.join(f'{p.name} {p.pid}' for p in processes[:5])}); run `python -m monitor start {folder}` to watch "
        f"the run again, or `python -m monitor stop {folder}` to kill it"
        for folder, processes in sorted(found.items())
    ]


def unwatched() -> list[tuple[ProcessInfo, Path]]:
    """The processes of runs that no monitor watches, each with its run's folder. OSError: see `with_environment`."""
    found = ((process, Path(folder)) for process, folder in _values(RUN) if folder)
    return [(process, folder) for process, folder in found if not is_held(folder / LOCK)]


@contextlib.contextmanager
def idle(folder: Path) -> Iterator[bool]:
    """Keep a monitor from starting for the run; False when one watches it, or its training is alive without one."""
    lock = Lock(folder / LOCK)
    try:
        free = lock.acquire() and not with_environment(RUN, str(folder))
        if sys.platform == "win32":
            lock.release()  # Windows renames no folder with an open file
        yield free
    finally:
        lock.release()


def with_environment(name: str, value: str) -> list[ProcessInfo]:
    """Every living process but us whose environment has `name` with that value. OSError: one cannot be read now."""
    return [process for process, found in _values(name) if found == value]


def _values(name: str) -> list[tuple[ProcessInfo, str]]:
    """(process, value) of every living process but us whose environment has `name`.

    Under RUN only what an attempt has started counts, which has a random token besides: a shell may export the other,
    and what it starts is not ours to kill. Of a run on several machines, those of another one are left out: two may be
    nodes of one host.
    """
    found, first = [], "0"  # the number of the first machine, or the only one
    for pid, process in platform.scan().items():
        if pid == os.getpid() or process.dead:
            continue
        known = platform.environ_of(pid)
        here = (known.get(MACHINE) or first) == (os.environ.get(MACHINE) or first)
        if name in known and (name != RUN or (here and len(known.get(TOKEN, "")) == _TOKEN_DIGITS)):
            found.append((process, known[name]))
    return found
