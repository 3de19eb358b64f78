"""Where the images of a job come from and where its captions go. A draft's are in ui/dataset/captioning.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runs.pictures import decoded


@dataclass(frozen=True)
class Picture:
    """An image to describe. key: its name for the job; name: for people; turn: quarter turns clockwise; crop: the part
    of the turned image that is trained, as fractions (left, top, right, bottom); None for all of it."""

    key: str
    name: str
    path: Path
    turn: int = 0
    crop: tuple[float, float, float, float] | None = None


class Work(Protocol):
    """The images of a job, and where their captions are stored."""

    def missing(self) -> list[Picture]:
        """The images that have no caption of this job yet."""

    def counts(self) -> tuple[int, int]:
        """(images that are done, all images)."""

    def store(self, picture: Picture, caption: str) -> None:
        """Store a caption. Raises RunError."""


def upright(picture: Picture) -> Any:
    """The picture as it is trained: upright, turned, its part, on white, as a PIL image in RGB. Raises RunError: it is
    gone, damaged or too large."""
    return decoded(picture.path, picture.name, picture.turn, picture.crop)[0].convert("RGB")
