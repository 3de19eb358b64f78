"""`/healthz`: whether this server works, for health checks of containers. It needs the token, as every address does.

The answer is 200 or 503 with one sentence and nothing about the data: no name, no path, no count. 503 means that a
restart of the container helps or that the disk is gone: the data folders cannot be read, or a run is under way whose
monitor is dead (the container's entry point continues it). A pre-empted run is not a fault: it waits for its machine.
One answer serves all requests of TTL_S seconds, and a disk that does not respond costs one thread, not the server.
"""

import asyncio
import json
import os
import threading
import time

from starlette.responses import JSONResponse, Response

from monitor.process.locks import LOCK, is_held
from monitor.run_folder import SCRIPT, STATUS
from monitor.state import FINAL
from runs.paths import datasets_dir, entries, outputs_dir

TTL_S = 5.0
DISK_S = 5.0  # until a disk counts as gone
MONITOR_S = 30.0  # a monitor that was killed is replaced by its keeper within seconds
FINE = "ok"
UNREADABLE = "The data folders cannot be read or written."
NO_ANSWER = "The data folders do not respond."
UNWATCHED = "A run is under way, but its monitor is dead."


class _Latest:
    """The last answer, the thread that finds the next one, and since when each run has had no monitor."""

    def __init__(self) -> None:
        self.text, self.at_s = FINE, -TTL_S
        self.began_s: float | None = None
        self.unwatched: dict[str, float] = {}


_latest = _Latest()


def fault(unwatched: dict[str, float], now_s: float) -> str:
    """What is wrong; "" for nothing. `unwatched` keeps since when (monotonic) a run has had no monitor."""
    try:
        for folder in (outputs_dir(), datasets_dir()):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                return UNREADABLE
            os.listdir(folder)
        names = [name for name in entries(outputs_dir()) if not name.startswith(".") and _without_monitor(name)]
    except OSError:
        return UNREADABLE
    for gone in set(unwatched) - set(names):
        del unwatched[gone]
    return UNWATCHED if any(now_s - unwatched.setdefault(name, now_s) >= MONITOR_S for name in names) else ""


def _without_monitor(name: str) -> bool:
    folder = outputs_dir() / name
    try:
        state = json.loads((folder / STATUS).read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # never started, or the file is being replaced
    return state not in FINAL and (folder / SCRIPT).is_file() and not is_held(folder / LOCK)


def _refresh() -> None:
    now_s = time.monotonic()
    _latest.text = fault(_latest.unwatched, now_s) or FINE
    _latest.at_s, _latest.began_s = time.monotonic(), None


async def respond() -> Response:
    """The answer to a request: {"status"} with 200 or 503."""
    now_s = time.monotonic()
    if now_s - _latest.at_s >= TTL_S and _latest.began_s is None:
        _latest.began_s = now_s
        threading.Thread(target=_refresh, name="health", daemon=True).start()
    while (began_s := _latest.began_s) is not None and time.monotonic() - began_s < DISK_S:
        await asyncio.sleep(0.01)
    text = _latest.text if _latest.began_s is None else NO_ANSWER
    return JSONResponse({"status": text}, 200 if text == FINE else 503, {"cache-control": "no-store"})
