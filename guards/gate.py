"""The gate: a training process that the monitor starts early (a standby attempt) waits here until it is needed.

It has imported everything and touched nothing: no GPU, no file of the run, no network, no heartbeat. It waits in one
blocking read of a pipe, which costs no processor time. The monitor writes a line of JSON: "resume", the state to resume
from; "environment", more variables; "log". The end of the pipe says that the monitor has dropped it or is dead, however
it died: then the process ends quietly.

    HANGPROOF_GATE           the descriptor of the pipe; unset: nobody waits
    HANGPROOF_GATE_STAND_IN  what the script has in the place of the state, which is not known before
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

VARIABLE = "HANGPROOF_GATE"
STAND_IN = "HANGPROOF_GATE_STAND_IN"
FOLDER = "HANGPROOF_HEARTBEAT"  # the attempt's private folder
READY, PASSED = "gate-ready", "gate-passed"  # files there: it waits; it goes on
EXIT_UNUSED = 75  # EX_TEMPFAIL of sysexits.h; nobody may take it for a training that is complete
NO_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it, torch looks for GPUs without touching them


def closed() -> bool:
    """Whether this process has to wait before it trains."""
    return VARIABLE in os.environ


def wait(arguments: list[str]) -> list[str]:
    """Wait at the gate, where this process was started early; the arguments, with the state to resume from.

    Does not return when the attempt is not needed: the process ends with EXIT_UNUSED.

    Raises:
        OSError: the log cannot be opened, or the pipe is none.
    """
    if not closed():
        return arguments
    descriptor, stand_in = int(os.environ.pop(VARIABLE)), os.environ.pop(STAND_IN)
    os.environ.pop(NO_CONTEXT, None)
    folder = Path(os.environ[FOLDER])
    with contextlib.suppress(FileNotFoundError):  # dropped already: the pipe says so
        (folder / READY).touch(mode=0o600)
    with open(descriptor, "rb") as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):  # the pipe has ended before the message is complete
        shutil.rmtree(folder, ignore_errors=True)  # nobody else knows it any more
        os._exit(EXIT_UNUSED)
    found = json.loads(line)
    os.environ.update(found["environment"])
    sys.stdout.flush()
    sys.stderr.flush()
    with open(found["log"], "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    (folder / PASSED).touch(mode=0o600)
    return [word.replace(stand_in, found["resume"]) for word in arguments]
