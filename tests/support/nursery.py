"""A process that has done its imports and forks others on request: they take five of six seconds of a tiny run, and
most of the page's start.

`Nursery(command, …)` starts it; it calls `serve()` once it has imported what they need. A request is a socket: the
nursery forks a process that forks the one that is asked for, answers with its number and its exit code, and kills it
once the other end is closed. All have one hash seed, where each process that is started has its own.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

REQUESTS = "NURSERY_REQUESTS"  # the descriptor from which the sockets of requests are received


class Nursery:
    """It has a session of its own: a signal for the group of the tests would end it before what it has forked."""

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self.requests, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command, env={**environment, REQUESTS: str(theirs.fileno())}, cwd=cwd, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)

    def start(self, argv: list[str], environment: dict[str, str], out: Path, err: Path, cwd=None) -> "Forked":
        """Fork a process with these arguments and variables. Its output is appended to the two files.

        Raises RuntimeError, with what the nursery wrote, where that has ended by itself.
        """
        request = {"argv": argv, "environment": environment, "cwd": str(cwd or ".")}
        mine, theirs = socket.socketpair()
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its missing answer says
            with theirs, out.open("ab") as first, err.open("ab") as second:
                socket.send_fds(self.requests, [b"."], [theirs.fileno(), first.fileno(), second.fileno()])
            mine.sendall(json.dumps(request).encode() + b"\n")
        return Forked(self, mine, argv)

    def run(
        self, argv: list[str], environment: dict[str, str], timeout_s=500.0, cwd: Path | None = None, merged=False
    ) -> subprocess.CompletedProcess[str]:
        """Run with these arguments and variables; merged: both streams in `stdout`. Raises TimeoutExpired."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / ("out" if merged else "err")
            forked = self.start(argv, environment, out, err, cwd)
            try:
                code = forked.wait(timeout_s)
            except subprocess.TimeoutExpired as late:
                forked.kill()
                forked.wait()
                late.output = out.read_text("utf-8", "replace")
                raise
            texts = [path.read_text("utf-8", "replace") for path in (out, err)]
        return subprocess.CompletedProcess(argv, code, texts[0], "" if merged else texts[1])

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


class Forked:
    """A process of a nursery, with what tests use of subprocess.Popen."""

    def __init__(self, nursery: Nursery, connection: socket.socket, argv: list[str]) -> None:
        self.nursery, self.args = nursery, argv
        self.answers = connection.makefile("rb", buffering=0)
        self.pid = self._answer()
        self.returncode: int | None = None

    def _answer(self) -> int:
        if line := self.answers.readline():
            return int(line)
        self.nursery.log.seek(0)
        raise RuntimeError(f"the nursery ended:\n{self.nursery.log.read().decode(errors='replace')[-3000:]}")

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self.answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._answer()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> list[str]:
    """Answer requests until nobody can make any, then exit. In each forked process it returns its arguments."""
    requests = socket.socket(fileno=int(os.environ[REQUESTS]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that answer
    while descriptors := socket.recv_fds(requests, 1, 3)[1]:
        if os.fork() == 0:
            requests.close()
            return _answer(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _answer(place: int, out: int, err: int) -> list[str]:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=place) as connection:
        request = json.loads(connection.makefile().readline())
        if (child := os.fork()) != 0:
            threading.Thread(target=lambda: connection.recv(1) or os.kill(child, signal.SIGKILL), daemon=True).start()
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"%d\n" % child)
            status = os.waitpid(child, 0)[1]
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)
    os.setsid()
    for opened, descriptor in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of the run's variables
    return request["argv"]
