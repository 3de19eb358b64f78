"""A process that has done its imports and forks a run on request: they take five of six seconds of a tiny run.

`Nursery(command, …)` starts it; it calls `serve()` once it has imported what its runs need. All its runs have one hash seed,
where each process that is started has its own.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPLIES = "NURSERY_REPLIES"  # the descriptor to which exit codes are written


class Nursery:
    """Raises RuntimeError, with what it wrote, when the process ends by itself."""

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        replies, write = os.pipe()
        self.process = subprocess.Popen(
            command, env={**environment, REPLIES: str(write)}, cwd=cwd, pass_fds=[write], text=True,
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        os.close(write)
        self.replies = os.fdopen(replies)
        atexit.register(self.close)

    def run(
        self, argv: list[str], environment: dict[str, str], timeout_s: float = 500
    ) -> subprocess.CompletedProcess[str]:
        """Run with these arguments and variables. Raises subprocess.TimeoutExpired."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = {"argv": argv, "environment": environment, "out": str(out), "err": str(err), "limit": timeout_s}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            reply = self.replies.readline()
            if not reply:
                self.log.seek(0)
                raise RuntimeError(f"the nursery ended:\n{self.log.read().decode(errors='replace')[-3000:]}")
            code, texts = json.loads(reply), [path.read_text("utf-8", "replace") for path in (out, err)]
        if code is None:
            raise subprocess.TimeoutExpired(argv, timeout_s, *texts)
        return subprocess.CompletedProcess(argv, code, *texts)

    def close(self) -> None:
        """It ends with its input."""
        self.process.stdin.close()
        self.process.wait()


def serve() -> list[str]:
    """Answer requests until the input ends, then exit. In each forked run it returns the run's arguments."""
    with os.fdopen(int(os.environ[REPLIES]), "w") as replies:
        for line in sys.stdin:
            request = json.loads(line)
            child = os.fork()
            if child == 0:
                return _become(request)
            latest = time.monotonic() + request["limit"]
            ended, status = os.waitpid(child, os.WNOHANG)
            while not ended and time.monotonic() < latest:
                time.sleep(0.02)
                ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), file=replies, flush=True)
    os._exit(0)


def _become(request: dict) -> list[str]:
    for path, descriptor in ((os.devnull, 0), (request["out"], 1), (request["err"], 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    return request["argv"]
