"""Runs inside the training of `benchmarks ranks`: a launcher that forks its ranks, and the hang of one of them.

Decision: the ranks are forked from one process that has imported torch and diffusers, instead of four that each import them:
three of four seconds of a tiny rank are imports, and a hundred trials start eight ranks each. Everything else is real:
processes, gloo, the built-in trainer, the monitor. `ACCELERATE` names this launcher, so train.sh and the scripts of the
restarts stay as they are rendered.

That process is one for all trials where the system allows it (`nursery`): the launcher sends its arguments, its environment
and its output there. The monitor finds the processes of a run by a token in their environment, and /proc shows the one that
a process was started with; so the group writes its own over it. Elsewhere than on Linux each launcher imports.

    HANGPROOF_HANG  RANK:PLACE:KIND. PLACE is a check point (guards/startup.py), `barrier`, or `all_reduce@STEP`;
                    KIND one of HANGS. Attempt 1 only.
    HANGPROOF_MARK  a file that is made when the hang begins
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from guards.heartbeat import POINT, Heartbeat

NURSERY = "HANGPROOF_NURSERY"  # the socket of the process that forks the groups
ROOM = {"HANGPROOF_ROOM": "x" * 60_000}  # of the nursery: its processes write other variables over it
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
    """`nursery SOCKET`; or `launch --num_processes N … -m trainer ARGS`, which has the ranks forked there or forks them."""
    if argv[0] == "nursery":
        return nursery(argv[1])
    if os.environ.get(NURSERY):
        return ask_nursery(os.environ[NURSERY], argv)
    from trainer import imports

    imports.heavy()
    return group(argv)


def ask_nursery(path: str, argv: list[str]) -> int:
    """Have the nursery fork this group; its exit code, once it has ended."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
        socket.send_fds(channel, [struct.pack("<I", len(request))], [0, 1, 2])
        channel.sendall(request)
        answer = channel.recv(1)
    return answer[0] if answer else 1


def nursery(path: str) -> int:
    """Import once, then fork a group for each launcher that asks, until standard input ends."""
    from trainer import imports

    imports.heavy()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the groups
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        while True:
            channel, _ = server.accept()
            with channel:
                if os.fork() == 0:
                    server.close()
                    become_group(channel)


def become_group(channel: socket.socket) -> NoReturn:
    """This process launches the ranks of the launcher at the other end, and answers with the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(channel, 4, 3)
    data = b""
    while len(data) < struct.unpack("<I", size)[0]:
        data += channel.recv(65536)
    request = json.loads(data)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    show_environment()
    os.chdir(request["cwd"])
    code = 1
    try:
        code = group(request["argv"])
        channel.send(bytes([code]))
    finally:
        os._exit(code)


def show_environment() -> None:
    """/proc/self/environ shows os.environ as it is now, for this process and its children. OSError: it has no room for it.

    It is the memory that the process got at its start (proc(5): env_start, env_end). Nothing else points there once
    os.environ has been cleared and filled again: setenv(3) copies.
    """
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}".encode("utf-8", "surrogateescape") + b"\0" for name, value in os.environ.items())
    if not 0 < len(text) < end - begin:
        raise OSError(f"the environment needs {len(text)} bytes, and there are {end - begin}")
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def group(argv: list[str]) -> int:
    """Fork the ranks, wait for them, end all when one fails; the exit code."""
    world = int(argv[argv.index("--num_processes") + 1])
    arguments = argv[argv.index("trainer") + 1 :]
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
