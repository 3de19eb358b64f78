"""A process that has done its imports and forks others on request: they take five of six seconds of a tiny run, and
most of the page's start.

`Nursery(command, …)` starts it; it calls `serve()` once it has imported what the others need. All have one hash seed,
where each process that is started has its own.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

REPLIES = "NURSERY_REPLIES"  # the descriptor to which process numbers and exit codes are written


class Nursery:
    """Raises RuntimeError, with what it wrote, when the process ends by itself.

    It has a session of its own: a signal for the group of the tests would end it before what it has forked.
    """

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        replies, write = os.pipe()
        self.process = subprocess.Popen(
            command, env={**environment, REPLIES: str(write)}, cwd=cwd, pass_fds=[write], text=True,
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, start_new_session=True,
        )  # fmt: skip
        os.close(write)
        self.replies = os.fdopen(replies, "rb", buffering=0)
        self.said: dict[int, tuple[int, int | None]] = {}  # (process number, exit code) by number of the request
        self._unread, self._next = b"", 0
        self._lock = threading.RLock()
        atexit.register(self.close)

    def start(
        self, argv: list[str], environment: dict[str, str], out: Path, err: Path, cwd: Path | None = None
    ) -> "Forked":
        """Fork a process with these arguments and variables. Its output is appended to the two files."""
        request = {"argv": argv, "environment": environment, "out": str(out), "err": str(err), "cwd": str(cwd or "")}
        with self._lock:
            number = self._next = self._next + 1
            self.process.stdin.write(json.dumps({**request, "number": number}) + "\n")
            self.process.stdin.flush()
            while number not in self.said:
                self.listen(None)
        return Forked(self, number, argv)

    def listen(self, wait_s: float | None) -> None:
        """Read what the process has said, after at most `wait_s` seconds; None waits until it says something."""
        with self._lock:
            while select.select([self.replies], [], [], wait_s)[0]:
                wait_s = 0.0
                content = os.read(self.replies.fileno(), 65536)
                if not content:
                    self.log.seek(0)
                    raise RuntimeError(f"the nursery ended:\n{self.log.read().decode(errors='replace')[-3000:]}")
                *lines, self._unread = (self._unread + content).split(b"\n")
                self.said.update((number, (pid, code)) for number, pid, code in map(json.loads, lines))

    def run(
        self,
        argv: list[str],
        environment: dict[str, str],
        timeout_s: float = 500,
        cwd: Path | None = None,
        merged: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run with these arguments and variables; merged: both streams in `stdout`. Raises TimeoutExpired."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / ("out" if merged else "err")
            forked = self.start(argv, environment, out, err, cwd)
            with contextlib.suppress(subprocess.TimeoutExpired):
                forked.wait(timeout_s)
            code = forked.returncode
            if code is None:
                forked.kill()
                forked.wait()
            texts = [path.read_text("utf-8", "replace") for path in (out, err)]
        if code is None:
            raise subprocess.TimeoutExpired(argv, timeout_s, *texts)
        return subprocess.CompletedProcess(argv, code, texts[0], "" if merged else texts[1])

    def close(self) -> None:
        """It ends with its input, and what it has forked ends with it."""
        self.process.stdin.close()
        self.process.wait()


class Forked:
    """A process of a nursery, with what tests use of subprocess.Popen."""

    def __init__(self, nursery: Nursery, number: int, argv: list[str]) -> None:
        self.nursery, self.number, self.args = nursery, number, argv
        self.pid = nursery.said[number][0]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.nursery.listen(0)
            self.returncode = self.nursery.said[self.number][1]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        latest = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > latest:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.nursery.listen(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> list[str]:
    """Answer requests until the input ends, then exit. In each forked process it returns the process's arguments."""
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)  # an exit of a child ends the wait below
    unread, children = b"", {}
    with os.fdopen(int(os.environ[REPLIES]), "w") as replies:
        while True:
            ready, _, _ = select.select([0, wakes], [], [])
            if wakes in ready:
                os.read(wakes, 4096)
                for child, number in list(children.items()):
                    ended, status = os.waitpid(child, os.WNOHANG)
                    if ended:
                        del children[child]
                        print(json.dumps([number, child, os.waitstatus_to_exitcode(status)]), file=replies, flush=True)
            if 0 in ready:
                content = os.read(0, 65536)
                if not content:
                    break
                *lines, unread = (unread + content).split(b"\n")
                for request in map(json.loads, lines):
                    child = os.fork()
                    if child == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        os.close(wakes)
                        os.close(woken)
                        return _become(request)
                    children[child] = request["number"]
                    print(json.dumps([request["number"], child, None]), file=replies, flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def _become(request: dict) -> list[str]:
    os.setsid()
    for path, descriptor in ((os.devnull, 0), (request["out"], 1), (request["err"], 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    if request["cwd"]:
        os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of the run's variables
    return request["argv"]
