"""Removes everything of a scenario, even when the process that plays it is killed: SIGKILL, a closed terminal, a test cut short.

    python -m benchmarks.faults_cleanup TOKEN ROOT FOLDER…

Decision: a process of its own, in its own session, reads its standard input to the end. The player writes `DONE` when it has
cleaned up itself. An end of file without it means that the player is dead; then this process unfreezes the file system,
kills every process that carries the token, unmounts and deletes. A file system that stays frozen would hang `sync` for all.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from monitor.process import platform

SCENARIO = "HANGPROOF_SCENARIO"
DONE = b"done"


def living(token: str) -> dict[int, str]:
    """Living processes of the scenario with this token: pid -> command line."""
    needle, found = f"{SCENARIO}={token}".encode(), {}
    for pid, process in platform.scan().items():
        if not process.dead and needle in platform.environ_of(pid).split(b"\0"):
            found[pid] = platform.command_of(pid)
    return found


def kill_all(token: str, frozen: Path | None, timeout_s: float = 20.0) -> None:
    """Kill every process of the scenario. `frozen`: a file system that must be unfrozen before they can die."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = living(token)
        for pid in left:
            if (found := platform.process_info(pid)) is not None:
                platform.send(pid, found.start, signal.SIGKILL)
        if frozen is not None:  # each time: one of them may have been about to freeze it
            unfreeze(frozen)
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.1)


def unfreeze(frozen: Path) -> None:
    """Let a frozen file system take writes again; does nothing when it is not frozen."""
    run("fsfreeze", "--unfreeze", str(frozen), check=False)


def unmount(at: Path) -> None:
    """Detach a file system now; it goes away as soon as nobody uses it."""
    run("umount", "--lazy", str(at), check=False)


def run(*command: str, check: bool = True) -> None:
    """Run a short command without its output. subprocess.CalledProcessError where `check` is set and it fails."""
    subprocess.run(command, check=check, capture_output=True, timeout=60)


def start(token: str, root: Path, folders: list[Path]) -> subprocess.Popen[bytes]:
    """Start the cleanup process of the scenario in `root`; it deletes `folders`. `communicate(DONE)` ends it."""
    command = [sys.executable, "-m", "benchmarks.faults_cleanup", token, str(root), *map(str, folders)]
    project = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        command, cwd=project, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def main(token: str, root: str, *folders: str) -> None:
    """Wait for the player's end, and clean up where it could not."""
    if sys.stdin.buffer.read() == DONE:
        return
    frozen = Path(root) / "frozen"
    kill_all(token, frozen if frozen.is_dir() else None)
    for mount in (frozen, Path(root) / "disk", Path(root) / "shm"):
        if mount.is_mount():
            unmount(mount)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
