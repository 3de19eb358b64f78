"""A server with OpenAI's chat completions on loopback, which can be slow, fail and lie."""

import base64
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loopback import Answers as Handler
from loopback import Server, running
from PIL import Image


class CaptionServer(Server):
    """`answer(number, question)` is called for each request: text, or (status, body, headers), or None to send nothing.

    questions: what was asked; sizes: of the images; headers: by request.
    """

    def __init__(self) -> None:
        super().__init__(Answers)
        self.answer: Any = lambda number, question: f"a picture, number {number}"
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.sizes: list[tuple[int, int]] = []

    @property
    def url(self) -> str:
        return f"{super().url}/v1"


class Answers(Handler):
    server: CaptionServer

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        url = question["messages"][0]["content"][1]["image_url"]["url"]
        image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
        server = self.server
        server.sizes.append(image.size)
        server.questions.append(question)
        server.paths.append(self.path)
        server.headers.append({key.lower(): value for key, value in self.headers.items()})
        found = server.answer(len(server.questions), question)
        if found is None:
            server.closing.wait(60)
            return
        if isinstance(found, str):
            found = 200, json.dumps({"choices": [{"message": {"content": found}}]}).encode(), {}
        status, body, headers = found
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if isinstance(body, bytes):
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in body:  # a byte now and then, for as long as the client stays
            self.wfile.write(piece)
            self.wfile.flush()
            if server.closing.wait(0.05):
                return


def drip() -> Iterator[bytes]:
    """A body without an end, one byte at a time."""
    while True:
        yield b" "


@contextmanager
def answering() -> Iterator[CaptionServer]:
    """A running server."""
    with running(CaptionServer()) as server:
        yield server


def slow(seconds: float, text: str = "a slow picture"):
    """An `answer` that takes a while."""

    def answer(number: int, question: Any) -> str:
        time.sleep(seconds)
        return f"{text} {number}"

    return answer
