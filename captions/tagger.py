"""Captions by a tagger: the tags of an image above a threshold, by onnxruntime.

For models in the layout of SmilingWolf's: `model.onnx` takes a square image, BGR, 0 to 255, and answers with a
probability for each row of `selected_tags.csv` (category 0: general, 4: character, 9: rating). The preparation of the
image is that of huggingface.co/spaces/SmilingWolf/wd-tagger.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from captions.florence import gpu_is_free
from captions.text import NoCaption
from runs.files import RunError

GENERAL, CHARACTER = 0, 4
MOST_TAGS = 100_000
# Tags that are faces: their underscores are eyes and mouths (the same list as in SmilingWolf's space).
FACES = "0_0 (o)_(o) +_+ +_- ._. <o>_<o> <|>_<|> =_= >_< 3_3 6_9 >_o @_@ ^_^ o_o u_u x_x |_| ||_||"
INSTALL = (
    "onnxruntime is not installed; install it with `.venv/bin/pip install onnxruntime` (onnxruntime-gpu for an NVIDIA GPU), "
    "then start again"
)


def read_tags(path: Path) -> list[tuple[str, int]]:
    """(name, category) of each tag, in the order of the model's answer. Raises RunError: it is not such a table."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                (row["name"], int(row["category"]))
                for row, _ in zip(csv.DictReader(file), range(MOST_TAGS), strict=False)
            ]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise RunError(f"{path} is not a table of tags with the columns name and category ({error})") from error
    if not rows:
        raise RunError(f"{path} has no tags")
    return rows


def caption_of(
    tags: list[tuple[str, int]],
    probabilities: Any,
    general: float = 0.35,
    character: float = 0.85,
    without: str = "",
    underscores: bool = False,
) -> str:
    """The tags of an image, characters first, the most probable first, with commas between them.

    Args:
        general, character: least probabilities. without: tags to leave out, separated by commas. underscores: keep them.
    """
    gone, faces = {plain(tag) for tag in without.split(",")}, FACES.split()
    found = []
    for (name, category), probability in zip(tags, probabilities, strict=True):
        least = {GENERAL: general, CHARACTER: character}.get(category)
        if least is not None and probability >= least and plain(name) not in gone:
            found.append((category != CHARACTER, -float(probability), name))
    shown = (name.replace("_", " ") if not underscores and name not in faces else name for *_, name in sorted(found))
    return ", ".join(shown)


def plain(tag: str) -> str:
    """A tag as it is compared: `Long_Hair` and `long hair` are the same."""
    return " ".join(tag.replace("_", " ").split()).casefold()


def square(image: Any, side: int) -> Any:
    """The image on a white square of `side` pixels, as an array of floats: 1 × side × side × 3, BGR, 0 to 255."""
    import numpy
    from PIL import Image

    longest = max(image.size)
    padded = Image.new("RGB", (longest, longest), "white")
    padded.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    if longest != side:
        padded = padded.resize((side, side), Image.Resampling.BICUBIC)
    return numpy.asarray(padded, dtype=numpy.float32)[None, :, :, ::-1]


def load(folder: Path, gpu_gb: float = 0.0, **choice: Any) -> Callable[[Any], str]:
    """A function from an image (PIL, RGB) to its tags, on the GPU where gpu_gb are free. Raises RunError: onnxruntime is
    missing, or the files are not those of a tagger. choice: of caption_of."""
    try:
        import onnxruntime
    except ImportError as error:
        raise RunError(INSTALL) from error
    import numpy
    from onnxruntime.capi import onnxruntime_pybind11_state as faults

    damage = (faults.Fail, faults.InvalidProtobuf, faults.InvalidGraph, faults.NoSuchFile, faults.NotImplemented)
    tags = read_tags(folder / "selected_tags.csv")
    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    wanted = ["CUDAExecutionProvider"] if has_cuda and gpu_is_free(gpu_gb) else []
    try:
        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=[*wanted, "CPUExecutionProvider"])
    except (*damage, ValueError) as error:
        raise RunError(f"{folder / 'model.onnx'} cannot be loaded ({error}); download the model again") from error
    given, answered = session.get_inputs(), session.get_outputs()
    shape = given[0].shape if len(given) == 1 and len(answered) == 1 else []
    if len(shape) != 4 or 3 not in shape[1:] or not isinstance(shape[2], int):
        takes = [one.shape for one in given]
        raise RunError(f"{folder / 'model.onnx'} is not a tagger: it takes {takes}, not one image")
    channels_first, side = shape[1] == 3, shape[2]

    def caption(image: Any) -> str:
        pixels = square(image, side)
        if channels_first:
            pixels = pixels.transpose(0, 3, 1, 2)
        try:
            (answer,) = session.run(None, {given[0].name: numpy.ascontiguousarray(pixels)})
        except (faults.Fail, faults.RuntimeException, faults.InvalidArgument, faults.EPFail) as error:
            raise RuntimeError(str(error)) from error  # theirs have no common class
        found = numpy.asarray(answer).reshape(-1)
        if len(found) != len(tags):
            raise RunError(
                f"{folder}: the model has {len(found)} tags, selected_tags.csv has {len(tags)}; use files of one model"
            )
        if not (text := caption_of(tags, found, **choice)):
            raise NoCaption("no tag is as probable as the thresholds ask; lower them")
        return text

    return caption
