"""Nothing of a scene is left behind, whoever ends the one who plays it: SIGKILL, a closed terminal, a test run cut short.

    python -m benchmarks.faults_guard TOKEN ROOT PASSING…

Decision: a process of its own, in a session of its own, that reads its standard input until that ends. When the player is
through, it says so; when the input just ends, the player is gone, and the guard does what it would have done: thaw, end
every process that carries the token, unmount, delete. A frozen file system that nobody thaws would hang `sync` for all.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from monitor import system

SCENE = "HANGPROOF_SCENE"
DONE = b"done"


def living(token: str) -> dict[int, str]:
    """Living processes of the scene with this token: number → command line."""
    needle, found = f"{SCENE}={token}".encode(), {}
    for pid, process in system.scan().items():
        if not process.dead and needle in system.environ_of(pid).split(b"\0"):
            found[pid] = system.command_of(pid)
    return found


def strike(token: str, frozen: Path | None, patience_s: float = 20.0) -> None:
    """End every process of the scene. `frozen`: a file system that may have to thaw before they can die."""
    deadline = time.monotonic() + patience_s
    while True:
        left = living(token)
        for pid in left:
            if (found := system.proc(pid)) is not None:
                system.send(pid, found.start, signal.SIGKILL)
        if frozen is not None:  # each time: one of them may have been about to freeze it
            thaw(frozen)
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.1)


def thaw(frozen: Path) -> None:
    """Let a frozen file system take writes again; nothing when it is not frozen."""
    run("fsfreeze", "--unfreeze", str(frozen), check=False)


def unmount(at: Path) -> None:
    """Take a file system away, now or as soon as nobody uses it."""
    run("umount", "--lazy", str(at), check=False)


def run(*command: str, check: bool = True) -> None:
    """A short command, its words unheard. subprocess.CalledProcessError where `check` and it fails."""
    subprocess.run(command, check=check, capture_output=True, timeout=60)


def set_up(token: str, root: Path, passing: list[Path]) -> subprocess.Popen:
    """Start a guard of the scene in `root`; `passing`: the folders that go with it. `communicate(DONE)` ends the guard."""
    command = [sys.executable, "-m", "benchmarks.faults_guard", token, str(root), *map(str, passing)]
    project = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        command, cwd=project, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def main(token: str, root: str, *passing: str) -> None:
    """Wait for the player's end, and clean up where it could not."""
    if sys.stdin.buffer.read() == DONE:
        return
    frozen = Path(root) / "frozen"
    strike(token, frozen if frozen.is_dir() else None)
    for place in (frozen, Path(root) / "disk"):
        if place.is_mount():
            unmount(place)
    for folder in passing:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
