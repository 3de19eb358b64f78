"""The processes of an attempt, known before anything is killed, and how they are ended.

A process group is not enough: launcher workers and loaders put themselves into sessions of their own, and a SIGTERM to
`accelerate launch` orphans the trainer (measured). So a process belongs to the run when its parent does (asked again and
again while parents live), or when it carries the run's token in the environment it inherited, and it is remembered by
(pid, start) from then on, whatever becomes of its parent.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from monitor import system
from monitor.locks import LOCK, is_held
from monitor.report import count
from monitor.system import Proc

TOKEN = "HANGPROOF_TOKEN"
RUN = "HANGPROOF_RUN"


@dataclass
class Tree:
    """The living processes of one attempt. `token` is what its environment carries."""

    token: str
    root: tuple[int, float] | None = None
    members: dict[int, Proc] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)  # processes whose environment was read: pid -> start

    def refresh(self) -> dict[int, Proc]:
        """Look at the whole machine again; returns the members that live, zombies left out. They are `members` too."""
        everything = system.scan()
        ours = {pid for pid, p in self.members.items() if pid in everything and everything[pid].start == p.start}
        if self.root and self.root[0] in everything and everything[self.root[0]].start == self.root[1]:
            ours.add(self.root[0])
        ours |= self._by_token(everything)
        grew = True
        while grew:
            children = {pid for pid, p in everything.items() if p.ppid in ours and pid not in ours}
            ours |= children
            grew = bool(children)
        ours -= {os.getpid(), os.getppid(), 0, 1}
        self._reap(p for pid in ours if (p := everything[pid]).dead)
        # Oldest first, so that parents are ended before they can answer the end of a child by a new one.
        living = sorted((p for pid in ours if not (p := everything[pid]).dead), key=lambda p: (p.start, p.pid))
        self.members = {p.pid: p for p in living}
        return self.members

    def _reap(self, processes: Iterable[Proc]) -> None:
        """Collect our dead children, but not the root: its `Popen` must get the exit code."""
        root = self.root[0] if self.root else None
        system.reap([p.pid for p in processes if p.ppid == os.getpid() and p.pid != root])

    def _by_token(self, everything: dict[int, Proc]) -> set[int]:
        found = set()
        if not self.token:
            return found
        needle = f"{TOKEN}={self.token}".encode()
        for pid, process in everything.items():
            if self._asked.get(pid) == process.start or process.dead:
                continue
            self._asked[pid] = process.start
            if needle in system.environ_of(pid).split(b"\0"):
                found.add(pid)
        self._asked = {pid: start for pid, start in self._asked.items() if pid in everything}
        return found

    def keys(self) -> list[tuple[int, float]]:
        """(pid, start) of every member."""
        return [(p.pid, p.start) for p in self.members.values()]


@dataclass(frozen=True)
class Ended:
    """What became of a tree: `killed` were there, `left` would not die within the time (uninterruptible sleep)."""

    killed: tuple[Proc, ...]
    left: tuple[Proc, ...]
    took_s: float


def end(tree: Tree, grace_s: float, kill_wait_s: float, at_once: Iterable[int] = ()) -> Ended:
    """End every process of the tree: CONT, TERM, `grace_s` to leave, KILL, `kill_wait_s` to be gone.

    SIGCONT first, because a stopped process keeps SIGTERM pending. New children are looked for between the rounds, so that
    a process that forks while it is being ended does not get away.

    at_once: process numbers that get KILL for TERM. The ranks: SIGTERM asks a guarded trainer for a checkpoint, and it has
    had its time for that, or stands still and would only use up the grace.
    """
    began = time.monotonic()
    killed = dict(tree.refresh())
    kill = getattr(signal, "SIGKILL", signal.SIGTERM)
    for process in list(tree.members.values()):
        if not system.WINDOWS:
            system.send(process.pid, process.start, signal.SIGCONT)
        system.send(process.pid, process.start, kill if process.pid in set(at_once) else signal.SIGTERM)
    _wait_gone(tree, killed, began + grace_s)
    deadline = time.monotonic() + kill_wait_s
    while tree.refresh() and time.monotonic() < deadline:
        killed.update(tree.members)
        for process in list(tree.members.values()):
            system.send(process.pid, process.start, kill)
        _wait_gone(tree, killed, min(deadline, time.monotonic() + 0.5))
    return Ended(tuple(killed.values()), tuple(tree.members.values()), time.monotonic() - began)


def _wait_gone(tree: Tree, killed: dict[int, Proc], deadline: float) -> None:
    pause = 0.005
    while time.monotonic() < deadline:
        if not any(system.alive(p.pid, p.start) for p in tree.members.values()):
            killed.update(tree.refresh())
            if not tree.members:
                return
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 0.1)


def strays() -> list[str]:
    """Trainings that live although nobody watches them, one sentence a run: the monitor died, or could not end them."""
    found: dict[str, list[Proc]] = {}
    for process in with_environment(RUN):
        entries = system.environ_of(process.pid).split(b"\0")
        folder = next(
            (e.partition(b"=")[2].decode("utf-8", "replace") for e in entries if e.startswith(RUN.encode() + b"=")), ""
        )
        if folder and not is_held(Path(folder) / LOCK):
            found.setdefault(folder, []).append(process)
    return [
        f"unwatched: {count(len(processes), 'process')} of {folder} ({', '.join(f'{p.name} {p.pid}' for p in processes[:5])}); "
        f"`python -m monitor start {folder}` takes them up, `python -m monitor stop {folder}` ends them"
        for folder, processes in sorted(found.items())
    ]


def with_environment(name: str, value: str | None = None) -> list[Proc]:
    """Every living process but us whose environment has `name` (with that value): how strays of dead runs are found."""
    needle = f"{name}={value}".encode() if value is not None else f"{name}=".encode()
    found = []
    for pid, process in system.scan().items():
        if pid == os.getpid() or process.dead:
            continue
        entries = system.environ_of(pid).split(b"\0")
        if needle in entries if value is not None else any(e.startswith(needle) for e in entries):
            found.append(process)
    return found
