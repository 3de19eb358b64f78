"""`/healthz`: whether this server works, for health checks of containers. It needs the token, as every address does.

The answer is 200 or 503 with one sentence and nothing about the data: no name, no path, no count. 503 means that a
restart of the container helps or that the disk is gone: the data folders cannot be read, or a run is under way whose
monitor is dead (the container's entry point continues it). A pre-empted run is not a fault: it waits for its machine.
One answer serves all requests of TTL_S seconds, and a disk that does not respond costs one thread, not the server.
"""

import asyncio
import os
import time

from starlette.responses import JSONResponse, Response

from monitor.run_folder import SCRIPT
from runs.paths import datasets_dir, outputs_dir
from ui.run import view

TTL_S = 5.0
DISK_S = 5.0  # until a disk counts as gone
MONITOR_S = 30.0  # a monitor that was killed is replaced by its keeper within seconds
FINE = "ok"
UNREADABLE = "The data folders cannot be read or written."
NO_ANSWER = "The data folders do not respond."
UNWATCHED = "A run is under way, but its monitor is dead."


_unwatched: dict[str, float] = {}  # since when a run has had no monitor
_asked: asyncio.Future[str] | None = None
_asked_s = 0.0


def fault(unwatched: dict[str, float], now_s: float) -> str:
    """What is wrong; "" for nothing. `unwatched` keeps since when (monotonic) a run has had no monitor."""
    try:
        for folder in (outputs_dir(), datasets_dir()):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                return UNREADABLE
            os.listdir(folder)
        runs = (one.folder for one in view.read_all() if one.state == "orphaned")
        names = [folder.name for folder in runs if (folder / SCRIPT).is_file()]
    except OSError:
        return UNREADABLE
    for gone in set(unwatched) - set(names):
        del unwatched[gone]
    return UNWATCHED if any(now_s - unwatched.setdefault(name, now_s) >= MONITOR_S for name in names) else ""


async def respond() -> Response:
    """The answer to a request: {"status"} with 200 or 503."""
    global _asked, _asked_s
    if _asked is None or (_asked.done() and time.monotonic() - _asked_s >= TTL_S):
        _asked_s = time.monotonic()
        _asked = asyncio.ensure_future(asyncio.to_thread(fault, _unwatched, _asked_s))
    try:
        text = await asyncio.wait_for(asyncio.shield(_asked), DISK_S) or FINE
    except TimeoutError:
        text = NO_ANSWER
    return JSONResponse({"status": text}, 200 if text == FINE else 503, {"cache-control": "no-store"})
