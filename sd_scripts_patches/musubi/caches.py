"""Cache files (.safetensors) are written atomically, read within a limit and verified; a damaged one is made again.

musubi-tuner writes a cache in place and replaces NaN by 0; `--skip_existing` trusts any file that exists, and a
training run leaves out an image whose cache is missing without a word. Here a caching command reads all caches of its
data sets first and renames each that is truncated or holds NaN, so that it is missing and made again. A cache that
turns out to be damaged during training is renamed too, and named in the error; training starts again only when the
caching command has made it anew. Images and captions are read by pool threads, for which the command polls without end:
each read has a limit.
"""

from __future__ import annotations

import glob
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from guards import checkpoint, limits
from guards.deadline import bounded
from sd_scripts_patches import images, session
from sd_scripts_patches.musubi import CACHE_TEXT, DATASET, LATENTS
from sd_scripts_patches.patch import Patch, Target, around, function

IO = "musubi_tuner.dataset.cache_io"
SOURCES = "musubi_tuner.dataset.datasources"
SAFETENSORS = "musubi_tuner.utils.safetensors_utils"
AGAIN = "run the caching command again (with --skip_existing it makes only what is missing)"
CORRUPT = ".corrupt"
HUNYUAN_ENCODERS = {"llm", "clipL"}  # of HunyuanVideo, whose command runs one after the other and merges their files
T = TypeVar("T")


def not_finite(tensors: dict[str, Any]) -> str:
    """Return the name of the first tensor that holds NaN or infinity, or ""."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            return name
    return ""


def within_limit(path: Path, function: Callable[[], T]) -> T:
    """Return `function()`, which reads the cache file `path`. A damaged file is renamed.

    Raises ValueError naming the file and what to do, TimeoutError when the disk does not answer.
    """
    from safetensors import SafetensorError

    def read_first() -> T:
        with open(path, "rb") as file:
            # A disk that does not answer blocks here, in a call that a signal interrupts.
            if int.from_bytes(file.read(8), "little") > path.stat().st_size:  # else a lack of memory
                raise ValueError("its header would be longer than the file")
        return function()

    try:
        return bounded(read_first, limits.seconds("npz_timeout_s"), f"cache file {path}")
    except (SafetensorError, ValueError, EOFError, struct.error) as error:
        damaged = path.with_name(path.name + CORRUPT)
        if path.exists():
            os.replace(path, damaged)
        raise ValueError(f"{path} is damaged ({error}), renamed to {damaged.name}; {AGAIN}") from error


def read(path: Path, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors of a cache file, as `within_limit` does. One that holds NaN is damaged."""

    def load_and_check() -> dict[str, Any]:
        tensors = load()
        bad = not_finite(tensors)
        if bad:
            raise ValueError(f"{bad} holds NaN or infinity")
        encoders = {name.split("_")[0] for name in tensors} & HUNYUAN_ENCODERS
        if encoders and encoders != HUNYUAN_ENCODERS:
            raise ValueError(f"it has the outputs of one text encoder only: {', '.join(encoders)}")
        return tensors

    return within_limit(path, load_and_check)


@around
def _read_within_limit(original: Callable, filename: Any, *args: Any, **kwargs: Any) -> Any:
    return read(Path(filename), lambda: original(filename, *args, **kwargs))


@around
def _keys_within_limit(original: Callable, safetensors_file: Any, *args: Any, **kwargs: Any) -> Any:
    """At the start of a training run the header of every cache is read."""
    return within_limit(Path(safetensors_file), lambda: original(safetensors_file, *args, **kwargs))


@around
def _write_aside(original: Callable, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
    """Write a file under a temporary name, and rename it when it is complete."""
    with checkpoint.writing_file(filename) as temporary:
        original(tensors, str(temporary), *args, **kwargs)


@around
def _refuse_nan(original: Callable, item_info: Any, sd: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    bad = not_finite(sd)
    if bad:
        raise ValueError(
            f"{item_info.item_key}: no cache is written, because {bad} holds NaN or infinity. Check the image and its "
            "caption; with fp16 try another precision of the model that makes the cache (bf16 or fp32)"
        )
    original(item_info, sd, *args, **kwargs)


def _verify_first(files_of: str) -> Callable[[Callable], Callable]:
    """Before caches are made: remove the temporary files of killed commands, read all caches in full, and rename each that is
    damaged, so that it counts as missing. files_of: the method of a data set that names them."""

    def inside(original: Callable, datasets: Any, *args: Any, **kwargs: Any) -> Any:
        from safetensors.torch import load_file

        for dataset in datasets:
            for path in checkpoint.sweep(dataset.cache_directory):
                session.log(f"removed {path}, which a killed process left")
            for number, name in enumerate(sorted(getattr(dataset, files_of)()), 1):
                try:
                    read(Path(name), lambda name=name: load_file(name))  # type: ignore[misc]
                except FileNotFoundError:
                    continue
                except ValueError as error:
                    session.log(str(error))
                session.heartbeat().item(number, note="reading the caches that exist")
        return original(datasets, *args, **kwargs)

    return around(inside)


@around
def _refuse_missing(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """An image whose cache was damaged is not left out silently."""
    pattern = os.path.join(glob.escape(str(self.cache_directory)), f"*_{self.architecture}*.safetensors{CORRUPT}")
    missing = [name for name in sorted(glob.glob(pattern)) if not os.path.exists(name.removesuffix(CORRUPT))]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} caches were damaged and have not been made again (the first is {missing[0]}); {AGAIN}, "
            f"or delete the {CORRUPT} files to train without these images"
        )
    return original(self, *args, **kwargs)


@around
def _item_within_limit(original: Callable, self: Any, idx: int) -> Any:
    """Read one image (or caption) of a data source within the limit of an image."""
    path = _path(self, idx)
    return images._read(lambda: original(self, idx), path, f"image {path}")


@around
def _video_within_limit(original: Callable, self: Any, idx: int, *args: Any, **kwargs: Any) -> Any:
    """Read the beginning of a video within the limit of an image; how long the rest takes depends on its length."""
    path = Path(_path(self, idx))
    images._read(lambda: _read_beginning(path), str(path), f"video {path}")
    return original(self, idx, *args, **kwargs)


def _read_beginning(video: Path) -> None:
    """Read a byte of a video's file; a video can also be a folder of images."""
    if not video.is_dir():
        with video.open("rb") as file:
            file.read(1)


def _path(source: Any, idx: int) -> str:
    paths = getattr(source, "image_paths", None) or getattr(source, "video_paths", None)
    if paths:
        return str(paths[idx])
    line = source.data[idx]  # of a JSONL file
    names = [name for name in ("image_path", "image_path_0", "video_path") if name in line]
    return str(line[names[0]]) if names else f"line {idx + 1} of the data set"


PATCH = Patch(
    name="caches",
    why="a truncated cache file, or one with NaN, is trusted; a read or a pool thread on a dead mount blocks for ever",
    targets=(
        Target(IO, "save_file", beside="save_latent_cache_common", make=_write_aside),
        function(SAFETENSORS, "mem_eff_save_file(tensors, filename)", _write_aside),
        function(SAFETENSORS, "find_keys(safetensors_file)", _keys_within_limit),
        function(IO, "save_latent_cache_common(item_info, sd)", _refuse_nan),
        function(IO, "save_text_encoder_output_cache_common(item_info, sd)", _refuse_nan),
        Target("musubi_tuner.dataset.bucket", "load_file", beside="BucketBatchManager", make=_read_within_limit),
        *(
            function(
                module, f"{name}(datasets, encode, args)", _verify_first("get_all_latent_cache_files"), optional=True
            )
            for module, name in LATENTS.items()
        ),
        function(
            CACHE_TEXT,
            "prepare_cache_files_and_paths(datasets)",
            _verify_first("get_all_text_encoder_output_cache_files"),
        ),
        function(DATASET, "ImageDataset.prepare_for_training(self)", _refuse_missing),
        function(DATASET, "VideoDataset.prepare_for_training(self)", _refuse_missing),
        *(
            function(SOURCES, f"{source}.{name}(self, idx)", _item_within_limit)
            for source in ("ImageDirectoryDatasource", "ImageJsonlDatasource")
            for name in ("get_image_data", "get_caption")
        ),
        *(
            function(SOURCES, f"{source}.get_video_data(self, idx)", _video_within_limit)
            for source in ("VideoDirectoryDatasource", "VideoJsonlDatasource")
        ),
    ),
)
