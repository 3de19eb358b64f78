"""Where the images of a job come from and where its captions go. A draft's are in ui/dataset/captioning.py.

Of a folder: each caption is the text file beside its image, as kohya's trainers read it. It is written as soon as it is
known, so a job that is killed loses at most the image it was working on, and the next start continues there.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runs.dataset import CAPTION_SUFFIXES, one_line, read_caption
from runs.files import RunError, atomic_write, explained
from runs.pictures import decoded, is_image_name


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


class Folder:
    """The images of a folder. rewrite: also those with a caption file that has text."""

    def __init__(self, folder: Path, rewrite: bool = False) -> None:
        """Raises RunError: it is not a folder with images."""
        if not os.path.isdir(folder):  # Path.is_dir raises an error for a name that is too long
            raise RunError(f"{folder} is not a folder; name the folder of the images")
        with explained("read the folder"):
            files = sorted(path for path in folder.iterdir() if path.name[0] != ".")
        paths = [path for path in files if is_image_name(path)]
        if not paths:
            raise RunError(f"{folder} has no images; name the folder of the images")
        self.pictures = [Picture(path.name, path.name, path) for path in paths if path.is_file()]
        texts = {(path.stem, path.suffix.lower()): path for path in files if path.suffix.lower() in CAPTION_SUFFIXES}
        self.done = set() if rewrite else {one.key for one in self.pictures if _has_caption(one.path.stem, texts)}

    def missing(self) -> list[Picture]:
        """The images without a caption."""
        return [picture for picture in self.pictures if picture.key not in self.done]

    def counts(self) -> tuple[int, int]:
        """Images that are done, and all."""
        return len(self.done), len(self.pictures)

    def store(self, picture: Picture, caption: str) -> None:
        """Write the caption file of an image. Raises: RunError."""
        with explained("store a caption"):
            atomic_write(picture.path.with_suffix(".txt"), caption + "\n")
        self.done.add(picture.key)


def _has_caption(stem: str, texts: Mapping[tuple[str, str], Path]) -> bool:
    """Whether an image has a caption. texts: the caption files of its folder by stem and suffix, such as `A.TXT` of a camera."""
    text = next((texts[stem, suffix] for suffix in CAPTION_SUFFIXES if (stem, suffix) in texts), None)
    try:
        return text is not None and bool(one_line(read_caption(text)))
    except RunError:
        return True  # not text that we can read: left as it is


def upright(picture: Picture) -> Any:
    """The picture as it is trained: upright, turned, its part, on white, as a PIL image in RGB. Raises RunError: it is
    gone, damaged or too large."""
    return decoded(picture.path, picture.name, picture.turn, picture.crop)[0].convert("RGB")
