"""An image is read within a limit; one that cannot be read any more is passed over, named and counted, not the run's end.

The restart that mends a damaged cache cannot mend an image, and today the error comes after hours and names no file. So
the data set gives its next batch in place of one with such an image. Not the loader: were the batch left out there, the
epoch would be shorter and every later count another one. Which batch takes its place depends on nothing but its index,
so a resumed run trains on the same ones. While images are cached at the start there is nothing to pass over
to: there the error names the file and ends the run.
"""

from __future__ import annotations

import ast
import functools
import struct
import zlib
from collections.abc import Callable
from types import ModuleType

from guards.bounded import bounded
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, find_function, find_one, wrap

UTIL = "library.train_util"
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
"""What Pillow raises on a file that is missing, damaged, or no image."""

_unreadable: set[str] = set()  # in this process: the trainer or one loader worker


class UnreadableImage(OSError):
    """An image that cannot be read; the message says which and why. What leaves the data set is a plain OSError."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"image {path} cannot be read ({why}); mend or remove it")
        self.path = path


def apply(module: ModuleType) -> None:
    """Reading an image, looking up its size, and making a batch."""
    wrap(module, "load_image", _image)
    wrap(module, "BaseDataset.get_image_size", _image_size)
    # Inherited from ConcatDataset. Of the whole group, since a data set of pairs asks another one for half of each batch.
    module.DatasetGroup.__getitem__ = _batch(module.DatasetGroup.__getitem__)


def _image(original: Callable) -> Callable:
    def load_image(image_path, *args, **kwargs):
        return _read(lambda: original(image_path, *args, **kwargs), image_path, f"image {image_path}")

    return load_image


def _image_size(original: Callable) -> Callable:
    def get_image_size(self, image_path):
        return _read(lambda: original(self, image_path), image_path, f"the size of image {image_path}")

    return get_image_size


def _read(read: Callable, path: str, what: str) -> object:
    try:
        return bounded(read, timeouts.seconds("image_timeout_s"), what)
    except TimeoutError:
        raise  # a disk that does not answer: a restart may find it well again
    except DAMAGE as error:
        raise UnreadableImage(str(path), f"{type(error).__name__}: {error}") from error


def _batch(original: Callable) -> Callable:
    @functools.wraps(original)
    def __getitem__(self, index):
        caching = any(dataset.caching_mode is not None for dataset in self.datasets)
        batches, limit = len(self), timeouts.count("skip_images")
        for distance in range(1 if caching else batches):
            number = (index + distance) % batches
            try:
                return original(self, number)
            except UnreadableImage as error:
                _unreadable.add(error.path)
                if caching or len(_unreadable) > limit or distance == batches - 1:
                    raise OSError(str(error)) from error
                session.say(
                    f"batch {number} is passed over, the next one takes its place: {error} "
                    f"({len(_unreadable)} of at most {limit} such images)"
                )
        raise IndexError(f"batch {index} of an empty data set")

    return __getitem__


def _datasets_know_their_mode(tree: ast.Module) -> str | None:
    body = ast.unparse(find_function(tree, "BaseDataset.__init__"))
    return None if "self.caching_mode = None" in body else "BaseDataset has no caching_mode"


def _inherits_from_concat(tree: ast.Module) -> str | None:
    group = find_one(tree, lambda node: isinstance(node, ast.ClassDef) and node.name == "DatasetGroup", "DatasetGroup")
    bases = [ast.unparse(base) for base in group.bases]
    return None if bases == ["torch.utils.data.ConcatDataset"] else f"DatasetGroup is made of {', '.join(bases)}"


PATCH = Patch(
    name="images",
    why="an image on a dead mount blocks for ever; one that cannot be read ends the run in its middle",
    targets=(
        Target(UTIL, "load_image", params=("image_path", "alpha")),
        Target(UTIL, "BaseDataset.get_image_size", params=("self", "image_path")),
        Target(UTIL, "BaseDataset.__init__", check=_datasets_know_their_mode),
        Target(UTIL, "DatasetGroup", check=_inherits_from_concat),
    ),
    apply={UTIL: apply},
)
