"""All LoRAs of a run as one ZIP: `/downloads/RUN.zip`.

The archive is made while it is sent, from the files where they are: no copy is made on the disk, and its length is
known before, so that the browser shows the progress. LoRAs do not compress, so they are stored as they are. A single
LoRA is sent by ui/served.py, which continues an interrupted download (Range).
"""

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from runs import env_file
from runs.files import RunError
from ui import served
from ui.run import view

if TYPE_CHECKING:
    from zipstream import ZipStream

PREFIX = "/downloads/"
SUFFIX = ".zip"
EXTRAS = ("run.toml", "train.sh", "train.bat", "dataset.toml", "sample_prompts.txt")  # how the LoRAs were made


def address(folder: Path) -> str:
    """The address of a run's archive, relative to the page."""
    return f"{PREFIX[1:]}{quote(folder.name)}{SUFFIX}"


def files_of(folder: Path) -> list[Path]:
    """What a run's archive holds: its complete LoRAs and the files that made them. A link that leads elsewhere is left out."""
    known = not env_file.exposed(view.read(folder).spec)  # else the spec is invalid, and its files may hold a secret
    found = [lora.path for lora in view.loras(folder)] + [folder / name for name in EXTRAS if known]
    return [path for path in found if path.resolve().parent == folder.resolve() and served.find(str(path))]


def archive(folder: Path) -> "ZipStream":
    """The archive of a run, to be iterated once. RunError: the run has no LoRA yet."""
    from zipstream import ZIP_STORED, ZipStream

    if not view.loras(folder):
        raise RunError(f"The run {folder.name} has no LoRA yet. Wait for its first checkpoint.")
    stream = ZipStream(compress_type=ZIP_STORED, sized=True)
    for path in files_of(folder):
        stream.add_path(path, f"{folder.name}/{path.name}", recurse=False)
    return stream


async def respond(request: Request) -> Response:
    """The archive that a request names; 404 with the reason where there is none."""
    name = unquote(request.scope["path"].removeprefix(PREFIX))
    try:
        if not name.endswith(SUFFIX):
            raise RunError("Hangproof has no such page.")
        folder = view.folder_of(name.removesuffix(SUFFIX))
        stream = await anyio.to_thread.run_sync(archive, folder)
    except (RunError, OSError) as error:
        return PlainTextResponse(str(error), 404)
    headers = {
        "content-length": str(len(stream)),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(folder.name)}{SUFFIX}",
        "cache-control": "private, no-store",
    }
    if request.method == "HEAD":
        return Response(headers=headers, media_type="application/zip")
    return StreamingResponse(stream, headers=headers, media_type="application/zip")
