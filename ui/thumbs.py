"""Small pictures of a run's samples for the page: `GET /thumbs/RUN/FILE`, at most THUMB pixels wide and high.

The guard (ui/security.py) and the login apply. A name in the address is compared with the names that exist and never
becomes a path by itself.
"""

import io
import threading
from functools import lru_cache
from pathlib import Path

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from runs.files import RunError
from runs.pictures import opened
from ui import served

PREFIX = "/thumbs/"
THUMB = 256
KEPT = 4096  # thumbnails in memory, some 10 kB each
FOREVER = "private, max-age=31536000, immutable"
_decoders = threading.BoundedSemaphore(2)  # a grid of a thousand samples must not take every thread of the server


async def respond(request: Request) -> Response:
    """The picture that a request names, or 404 with the reason."""
    return await anyio.to_thread.run_sync(_respond, request)


def _respond(request: Request) -> Response:
    run, _, name = request.scope["path"].removeprefix(PREFIX).partition("/")
    try:
        found = served.find(str(_sample(run, name)))  # a link out of the data folders is not followed
        if found is None:
            raise RunError(f"The sample {name[:200]!r} is gone")
        path, version = found[0], found[2].st_mtime_ns
        headers = {"etag": f'"{version:x}"', "cache-control": "private, no-cache"}
        if request.query_params.get("v") == f"{version:x}":
            headers["cache-control"] = FOREVER
        if served.unchanged(request.headers, headers["etag"]):
            return Response(status_code=304, headers=headers)
        return Response(thumbnail(path, version), headers=headers, media_type="image/webp")
    except RunError as error:
        return PlainTextResponse(str(error).encode("utf-8", "replace"), 404)


def _sample(run: str, name: str) -> Path:
    """A sample of a run by its file's name. RunError: there is none."""
    from ui.run import view
    from ui.run.calls import folder_of

    found = view.evolution(folder_of(run))
    for sample in (*found.others, *(sample for one in found.snapshots for sample in one.samples)):
        if sample.path.name == name:
            return sample.path
    raise RunError(f"The run {run!r} has no sample {name[:200]!r}")


@lru_cache(maxsize=KEPT)
def thumbnail(path: Path, version: int) -> bytes:
    """A sample in THUMB pixels as WebP. `version`: its modification time, so that a new file is drawn again.

    Raises:
        RunError: it is not an image, damaged or too large.
    """
    with _decoders, opened(path) as image:
        image.draft("RGB", (THUMB, THUMB))
        small = image.convert("RGB")
        small.thumbnail((THUMB, THUMB))
        out = io.BytesIO()
        small.save(out, "WEBP", quality=80, method=2)
    return out.getvalue()
