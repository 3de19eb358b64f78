"""Each image is read within a limit; an unreadable one is replaced, named and counted, and does not end the run.

A restart cannot repair an image as it repairs a damaged cache, and the original error comes after hours and names no
file. So the data set returns its next batch in place of one with such an image. This is not done in the loader: a batch
left out there would shorten the epoch and change every later count. The replacement depends on the index alone, so a
resumed run trains on the same batches. While images are cached at the start there is no batch to use instead: the error
names the file and ends the run.
"""

from __future__ import annotations

import ast
import functools
import struct
import zlib
from collections.abc import Callable
from typing import Any

from guards import limits
from guards.deadline import bounded
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, around, find_function, find_one, function

UTIL = "library.train_util"
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
"""What Pillow raises for a file that is missing, damaged, or not an image."""

_unreadable: set[str] = set()  # in this process: the trainer or one loader worker


class UnreadableImage(OSError):
    """An image that cannot be read; the message says which and why. Outside the data set it becomes a plain OSError."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"image {path} cannot be read ({reason}); fix or remove it")
        self.path = path


def _guard_group(group: Any) -> Any:
    """The group inherits __getitem__ from ConcatDataset. It is wrapped on the group as a unit, because a data set of
    image pairs reads half of each batch from another data set."""
    inherited = group.__getitem__
    group.__getitem__ = functools.wraps(inherited)(_replace_unreadable(inherited))
    return group


@around
def _load_image(original: Callable, image_path: str, *args: Any, **kwargs: Any) -> Any:
    return _read(lambda: original(image_path, *args, **kwargs), image_path, f"image {image_path}")


@around
def _get_image_size(original: Callable, self: Any, image_path: str) -> Any:
    return _read(lambda: original(self, image_path), image_path, f"the size of image {image_path}")


def _read(read: Callable[[], Any], path: str, what: str) -> Any:
    try:
        return bounded(read, limits.seconds("image_timeout_s"), what)
    except TimeoutError:
        raise  # the disk does not answer: a restart may find it working
    except DAMAGE as error:
        raise UnreadableImage(str(path), f"{type(error).__name__}: {error}") from error


@around
def _replace_unreadable(original: Callable, self: Any, index: int) -> Any:
    caching = any(getattr(dataset, "caching_mode", None) is not None for dataset in self.datasets)
    batches, limit = len(self), timeouts.count("skip_images")
    for distance in range(1 if caching else batches):
        number = (index + distance) % batches
        try:
            return original(self, number)
        except UnreadableImage as error:
            _unreadable.add(error.path)
            if caching or len(_unreadable) > limit or distance == batches - 1:
                raise OSError(str(error)) from error
            session.log(
                f"batch {number} is replaced by the next one: {error} "
                f"({len(_unreadable)} of at most {limit} unreadable images)"
            )
    raise IndexError(f"batch {index} of an empty data set")


def _caches_elsewhere(tree: ast.Module) -> str | None:
    """Up to v0.10 a data set that is being cached says so in `caching_mode`; v0.11 caches outside of `__getitem__`."""
    body = ast.unparse(find_function(tree, "BaseDataset.__init__"))
    uses = any(isinstance(node, ast.Attribute) and node.attr == "caching_mode" for node in ast.walk(tree))
    return None if not uses or "self.caching_mode = None" in body else "BaseDataset has no caching_mode"


def _inherits_from_concat(tree: ast.Module) -> str | None:
    group = find_one(tree, ast.ClassDef, lambda node: node.name == "DatasetGroup", "class DatasetGroup")
    bases = [ast.unparse(base) for base in group.bases]
    return None if bases == ["torch.utils.data.ConcatDataset"] else f"DatasetGroup inherits from {', '.join(bases)}"


PATCH = Patch(
    name="images",
    why="an image on a dead mount blocks for ever; an unreadable one ends the run after hours",
    targets=(
        function(UTIL, "load_image(image_path, alpha)", _load_image),
        function(UTIL, "BaseDataset.get_image_size(self, image_path)", _get_image_size),
        Target(UTIL, "BaseDataset.__init__", check=_caches_elsewhere),
        Target(UTIL, "DatasetGroup", check=_inherits_from_concat, make=_guard_group),
    ),
)
