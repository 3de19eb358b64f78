"""A server with OpenAI's chat completions on loopback, which can be slow, fail and lie, and a job that asks it."""

import base64
import functools
import io
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loopback import Answer, Double, Request, running
from PIL import Image

from captions import endpoint, job
from captions.work import Picture


class Folder:
    """The images of a folder as a job's work; each caption goes to a text file beside its image."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def missing(self) -> list[Picture]:
        images = sorted(path for path in self.folder.glob("*.png") if not path.with_suffix(".txt").exists())
        return [Picture(path.name, path.name, path) for path in images]

    def counts(self) -> tuple[int, int]:
        return len([*self.folder.glob("*.txt")]), len([*self.folder.glob("*.png")])

    def store(self, picture: Picture, caption: str) -> None:
        picture.path.with_suffix(".txt").write_text(caption, encoding="utf-8")


class CaptionServer(Double):
    """`answer(number, question)` is called for each request: text, or (status, body, headers), or None to send nothing.

    questions: what was asked; sizes: of the images; headers: by request.
    """

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.answer: Any = lambda number, question: f"a picture, number {number}"
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.sizes: list[tuple[int, int]] = []

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def reply(self, request: Request) -> Answer:
        question = request.json
        url = question["messages"][0]["content"][1]["image_url"]["url"]
        image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
        self.sizes.append(image.size)
        self.questions.append(question)
        self.paths.append(request.path)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        found = self.answer(len(self.questions), question)
        if found is None:
            self.closing.wait(60)
        return (200, {"choices": [{"message": {"content": found}}]}) if isinstance(found, str) else found


def drip() -> Iterator[bytes]:
    """A body without an end, one byte at a time, for as long as the client stays."""
    while True:
        yield b" "
        time.sleep(0.05)


def answering() -> AbstractContextManager[CaptionServer]:
    return running(CaptionServer())


def texts(folder: Path) -> dict[str, str]:
    """The captions of a folder, by the name of their image."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def run(server: CaptionServer, folder: Path, **limits) -> job.Report:
    """A job in this process, with a server."""
    asked = endpoint.Server(server.url, "m", "What is it?", limit_s=limits.pop("limit_s", 60.0))
    return job.run(Folder(folder), lambda: functools.partial(endpoint.ask, endpoint.checked(asked)), **limits)
