"""`/healthz`: whether this server works, for health checks of containers. It needs the token, as every address does.

The answer is 200 or 503 with one sentence and nothing about the data: no name, no path, no count. 503 means that the
disk is gone: the data folders cannot be read or do not respond. Requests at the same time share one look at them, so a
disk that does not respond costs one thread, not the server.
"""

import asyncio
import os

from starlette.responses import JSONResponse, Response

from runs.paths import datasets_dir, outputs_dir

DISK_S = 5.0  # until a disk counts as gone
FINE = "ok"
UNREADABLE = "The data folders cannot be read or written."
NO_ANSWER = "The data folders do not respond."

_asked: asyncio.Future[str] | None = None


def fault() -> str:
    """What is wrong; "" for nothing."""
    try:
        for folder in (outputs_dir(), datasets_dir()):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                return UNREADABLE
            os.listdir(folder)
    except OSError:
        return UNREADABLE
    return ""


async def respond() -> Response:
    """The answer to a request: {"status"} with 200 or 503."""
    global _asked
    if _asked is None or _asked.done():
        _asked = asyncio.ensure_future(asyncio.to_thread(fault))
    try:
        text = await asyncio.wait_for(asyncio.shield(_asked), DISK_S) or FINE
    except TimeoutError:
        text = NO_ANSWER
    return JSONResponse({"status": text}, 200 if text == FINE else 503, {"cache-control": "no-store"})
