"""Runs inside the training of `benchmarks ranks`: a launcher that forks its ranks, and the hang of one of them.

Decision: the ranks are forked from one process that has imported torch and diffusers, instead of four that each import them:
three of four seconds of a tiny rank are imports, and a hundred trials start eight ranks each. Everything else is real:
processes, gloo, the built-in trainer, the monitor. `ACCELERATE` names this launcher, so train.sh and the scripts of the
restarts stay as they are rendered.

    HANGPROOF_HANG  RANK:PLACE:KIND. PLACE is a check point (guards/startup.py), `barrier`, or `all_reduce@STEP`;
                    KIND one of HANGS. Attempt 1 only.
    HANGPROOF_MARK  a file that is made when the hang begins
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from guards.heartbeat import POINT, Heartbeat

FOREVER_S = 24 * 3600.0
POLL_S = 0.02


def sleeps() -> None:
    """The main thread sleeps, as in a wait without a limit."""
    time.sleep(FOREVER_S)


def lock() -> None:
    """The main thread waits for a lock that nobody releases."""
    taken = threading.Lock()
    taken.acquire()
    taken.acquire()


def pipe() -> None:
    """The main thread reads from a pipe into which nobody writes: a dead mount, a server that does not answer."""
    os.read(os.pipe()[0], 1)


def spins() -> None:
    """The main thread computes for ever."""
    while True:
        pass


def stopped() -> None:
    """The process is stopped by a signal."""
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS: dict[str, Callable[[], None]] = {f.__name__: f for f in (sleeps, lock, pipe, spins, stopped)}


def fire(moment: str, step: int, heartbeat: Heartbeat) -> None:
    """`HANGPROOF_INJECT`: called at each beat and check point of a rank."""
    wanted = os.environ.get("HANGPROOF_HANG", "")
    if not wanted or os.environ.get("HANGPROOF_ATTEMPT") != "1":
        return
    rank, place, kind = wanted.split(":")
    if heartbeat.rank != int(rank):
        return
    if moment == POINT + place:
        hang(kind)
    elif place == "barrier" and moment == POINT + "accelerator":
        _hang_in("barrier", kind)
    elif place.startswith("all_reduce@") and moment == "step" and step == int(place.partition("@")[2]):
        _hang_in("all_reduce", kind)


def hang(kind: str) -> None:
    """Make the mark, then hang."""
    Path(os.environ["HANGPROOF_MARK"]).touch()
    HANGS[kind]()


def _hang_in(collective: str, kind: str) -> None:
    """From now on this rank hangs inside of this collective operation, before the others can complete it."""
    from torch import distributed

    def instead(*_args: Any, **_kwargs: Any) -> None:
        hang(kind)

    instead.__name__ = collective
    setattr(distributed, collective, instead)


def main(argv: list[str]) -> int:
    """`launch --num_processes N … -m trainer ARGS`: fork the ranks, wait for them, end all when one fails."""
    world = int(argv[argv.index("--num_processes") + 1])
    arguments = argv[argv.index("trainer") + 1 :]
    from trainer import imports

    imports.heavy()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            become(rank, world, port, arguments)
        children[pid] = rank
    code = 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(POLL_S)
            continue
        children.pop(pid, None)
        if status and not code:
            code = 1
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return code


def become(rank: int, world: int, port: int, arguments: list[str]) -> NoReturn:
    """This process is rank `rank` from now on."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import torch

    torch.set_num_threads(1)
    from trainer.__main__ import main as train

    try:
        train(arguments)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001 - what an interpreter does with an error that nobody caught
        sys.excepthook(*sys.exc_info())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
