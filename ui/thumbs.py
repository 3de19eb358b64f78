"""The HTTP API of a run's snapshots, for programs. Reads only.

    GET /api/evolution                            runs: name of the folder, name, state, address
    GET /api/evolution/RUN                        all snapshots of a run
    GET /api/evolution/RUN/snapshot/STEP          one; 404 names the steps that exist
    GET /api/evolution/RUN/thumb/FILE             a sample, at most THUMB pixels wide and high

Every answer but a picture is JSON, errors too: {"error": sentence, …}. The guard (ui/security.py) and the login apply. A name
in the address is compared with the names that exist and never becomes a path by itself. Each answer has an ETag, so that a
client that asks again gets 304 where nothing changed.
"""

import hashlib
import io
import json
import re
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response

from runs.dataset import opened
from runs.files import RunError
from ui import served

PREFIX = "/api/evolution"
THUMB = 256
KEPT = 4096  # thumbnails in memory, some 10 kB each
STEP = re.compile(r"\d{1,12}", re.ASCII)
FOREVER = "private, max-age=31536000, immutable"
_decoders = threading.BoundedSemaphore(2)  # a grid of a thousand samples must not take every thread of the server


class Missing(Exception):
    """There is no such thing: the body of a 404."""

    def __init__(self, error: str, **more: Any):
        super().__init__(error)
        self.body = {"error": error, **more}


async def respond(request: Request) -> Response:
    """The answer to a request of this API."""
    words = request.scope["path"].removeprefix(PREFIX).strip("/").split("/")
    return await anyio.to_thread.run_sync(_respond, request, [word for word in words if word])


def _respond(request: Request, words: list[str]) -> Response:
    try:
        return _answer(request, words)
    except Missing as missing:
        return _json(request, missing.body, 404)
    except RunError as error:
        return _json(request, {"error": str(error)}, 404)


def _answer(request: Request, words: list[str]) -> Response:
    from ui.run import evolution

    match words:
        case []:
            return _json(request, {"runs": listed()})
        case [run]:
            return _json(request, evolution.body(_folder(run)))
        case [run, "snapshot", step]:
            return _json(request, _snapshot(_folder(run), step))
        case [run, "thumb", name]:
            return _thumb(request, _folder(run), name)
    raise Missing("There is no such address; use /api/evolution/RUN or /api/evolution/RUN/snapshot/STEP")


def listed() -> list[dict[str, Any]]:
    """All runs, newest first."""
    from ui.run import view

    return [
        {"run": one.folder.name, "name": one.name, "state": one.state, "url": f"{PREFIX[1:]}/{one.folder.name}"}
        for one in view.read_all()
    ]


def _folder(run: str) -> Path:
    from ui.run.calls import folder_of

    try:
        return folder_of(run)
    except RunError as error:
        names = [one["run"] for one in listed()]
        raise Missing(f"There is no run {run[:100]!r}; GET {PREFIX} lists the runs", runs=names[:100]) from error


def _snapshot(folder: Path, step: str) -> dict[str, Any]:
    from ui.run import evolution

    found = evolution.snapshot(folder, int(step)) if STEP.fullmatch(step) else None
    if found is None:
        steps = evolution.evolution(folder).steps
        have = f"it has the steps {', '.join(map(str, steps))}" if steps else "it has none yet"
        raise Missing(f"The run {folder.name!r} has no snapshot of step {step[:20]!r}; {have}", steps=steps)
    return {"run": folder.name, **found}


def _json(request: Request, content: dict[str, Any] | bytes, status: int = 200) -> Response:
    body = content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": etag, "cache-control": "private, no-cache"}
    if status == 200 and served.unchanged(request.headers, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, "application/json")


# Pictures -------------------------------------------------------------------------------------------------------------


def _sample(folder: Path, name: str) -> Path:
    """A sample of a run by its file's name."""
    from ui.run import evolution

    found = evolution.evolution(folder)
    for sample in (*found.others, *(sample for one in found.snapshots for sample in one.samples)):
        if sample.path.name == name:
            return sample.path
    raise Missing(f"The run {folder.name!r} has no sample {name[:200]!r}")


def _thumb(request: Request, folder: Path, name: str) -> Response:
    found = served.find(str(_sample(folder, name)))  # a link out of the data folders is not followed
    if found is None:
        raise Missing(f"The sample {name[:200]!r} is gone")
    path, version = found[0], found[2].st_mtime_ns
    headers = {"etag": f'"{version:x}"', "cache-control": "private, no-cache"}
    if request.query_params.get("v") == f"{version:x}":
        headers["cache-control"] = FOREVER
    if served.unchanged(request.headers, headers["etag"]):
        return Response(status_code=304, headers=headers)
    return Response(thumbnail(path, version), headers=headers, media_type="image/webp")


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
