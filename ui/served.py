"""Which files of the data folders the page sends, and as what; and all LoRAs of a run as one ZIP.

A file that was uploaded or written by a trainer can contain anything. Only a known image is shown by the browser;
everything else in the table is a download. Gradio itself would send an uploaded .html or .svg as a page of this origin,
whose script could then do all that the user can. Gradio's own route for files is not reachable.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import NotModifiedResponse

from runs import env_file
from runs.files import RunError
from runs.paths import datasets_dir, outputs_dir
from ui.run import view
from ui.run.readers import stamp

if TYPE_CHECKING:
    from zipstream import ZipStream

PREFIX = "/gradio_api/file="
ARCHIVES = "/downloads/"  # RUN.zip
# In an archive: how the LoRAs were made
EXTRAS = ("run.toml", "train.sh", "train.bat", "dataset.toml", "sample_prompts.txt")
ZIP = "application/zip"
PRIVATE = {"cache-control": "private, no-store"}
LINES_BYTES = 1 << 20  # of a log, at a time
IMAGES = {f".{kind}": f"image/{kind}" for kind in ("png", "jpeg", "webp", "gif", "avif")} | {".jpg": "image/jpeg"}
TEXTS = (".txt", ".log", ".md", ".toml", ".json", ".jsonl", ".sh", ".bat")
DOWNLOADS = {
    ".safetensors": "application/octet-stream",
    ".zip": ZIP,
    **dict.fromkeys(TEXTS, "text/plain; charset=utf-8"),
}
# The ZIPs that the page made of drafts (ui/new/export.py).
EXPORT = re.compile(r"\.drafts/[0-9a-f]{24}/export/[A-Za-z0-9_-]+\.zip")
# The hidden folders whose images the page shows: those of a draft. `.uploads` is not among them.
DRAFT = re.compile(r"\.drafts/[0-9a-f]{24}/[A-Za-z0-9_-]+(/[^./][^/]*)+")
KINDS = {"outputs": {**IMAGES, **DOWNLOADS}, "datasets": IMAGES}


def file_url(path: Path, versioned: bool = False) -> str:
    """URL of a file in the data folders; relative, so that it works behind a proxy with a path prefix.

    versioned: with the version that the file has now, so that a browser keeps what it got.
    """
    version = f"?v={stamp(path).mtime_ns:x}" if versioned else ""
    return f"{PREFIX[1:]}{quote(path.as_posix())}{version}"


def find(text: str) -> tuple[Path, str, os.stat_result] | None:
    """(path, content type, stat) of a file that may be sent; None for any other text. Links are followed before."""
    try:
        given = Path(text)
        if not given.is_absolute():
            return None
        path = given.resolve(strict=True)
        found = path.stat()
        roots = {"outputs": outputs_dir().resolve(), "datasets": datasets_dir().resolve()}
    except (OSError, ValueError, RuntimeError):  # missing, a null character, a loop of links
        return None
    kind = next((name for name, root in roots.items() if path.is_relative_to(root)), None)
    if kind is None or not stat.S_ISREG(found.st_mode):
        return None
    inside = path.relative_to(roots[kind]).as_posix()
    if re.search(r"(^|/)\.", inside) and not (kind == "datasets" and DRAFT.fullmatch(inside)):
        return None
    content_type = KINDS[kind].get(path.suffix.lower())
    if kind == "datasets" and EXPORT.fullmatch(inside):
        content_type = ZIP
    return (path, content_type, found) if content_type else None


async def respond(request: Request) -> Response:
    """The file that a request names, whole or in part; 404 for a file that is not sent."""
    found = await anyio.to_thread.run_sync(find, request.scope["path"].removeprefix(PREFIX))
    if found is None:
        return PlainTextResponse("There is no such file, or Hangproof does not send this kind of file.", 404)
    path, content_type, status = found
    if path.suffix.lower() == ".log" and (hidden := await anyio.to_thread.run_sync(_without_secrets, path)):
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(path.name)}", **PRIVATE}
        return StreamingResponse(hidden, headers=headers, media_type=content_type)
    image, known = content_type.startswith("image/"), request.headers.get("if-none-match", "")
    same = request.query_params.get("v") == f"{status.st_mtime_ns:x}"
    response = FileResponse(
        path,
        media_type=content_type,
        stat_result=status,
        filename=path.name,
        content_disposition_type="inline" if image else "attachment",
        headers={"cache-control": "private, max-age=31536000, immutable" if image and same else "private, no-cache"},
    )
    if response.headers["etag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return NotModifiedResponse(response.headers)
    return response


def _without_secrets(log: Path) -> Iterator[bytes] | None:
    """A run's log without the values of its secrets, which the log view hides too; None where it has none."""
    outputs = outputs_dir()
    run = outputs / log.relative_to(outputs.resolve()).parts[0]
    if not env_file.read(run):
        return None

    def parts() -> Iterator[bytes]:
        hide = env_file.masking(run)
        with log.open("rb") as file:
            while lines := file.readlines(LINES_BYTES):
                yield hide(b"".join(lines))

    return parts()


def archive_url(folder: Path) -> str:
    """The address of a run's archive, relative to the page."""
    return f"{ARCHIVES[1:]}{quote(folder.name)}.zip"


def archive(folder: Path) -> "ZipStream":
    """A run's complete LoRAs and the files that made them, to be iterated once, without links that lead elsewhere.

    The archive is made while it is sent, so no copy is on the disk; its length is known before. LoRAs do not compress.

    Raises:
        RunError: the run has no LoRA yet.
    """
    from zipstream import ZIP_STORED, ZipStream

    loras = [lora.path for lora in view.loras(folder)]
    if not loras:
        raise RunError(f"The run {folder.name} has no LoRA yet. Wait for its first checkpoint.")
    known = not env_file.exposed(view.read(folder).spec)  # else the spec is invalid, and its files may hold a secret
    stream = ZipStream(compress_type=ZIP_STORED, sized=True)
    for path in [*loras, *(folder / name for name in EXTRAS if known)]:
        if path.resolve().parent == folder.resolve() and find(str(path)):
            stream.add_path(path, f"{folder.name}/{path.name}", recurse=False)
    return stream


async def respond_archive(request: Request) -> Response:
    """The archive that a request names; 404 with the reason where there is none."""
    name = request.scope["path"].removeprefix(ARCHIVES)
    try:
        if not name.endswith(".zip"):
            raise RunError("Hangproof has no such page.")
        slug = name.removesuffix(".zip")
        stream = await anyio.to_thread.run_sync(lambda: archive(view.folder_of(slug)))
    except (RunError, OSError) as error:
        return PlainTextResponse(str(error), 404)
    headers = {
        "content-length": str(len(stream)),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(slug)}.zip",
        **PRIVATE,
    }
    if request.method == "HEAD":
        return Response(headers=headers, media_type=ZIP)
    return StreamingResponse(stream, headers=headers, media_type=ZIP)
