"""Cache files are read within a limit, verified, and written atomically.

numpy's own `load` and `savez` are replaced for files named .npz by those of guards/npz.py. That covers every read in
every family, the lazy reads of members included, without a copy of their logic. A damaged cache counts as missing: when
sd-scripts looks it up, it is encoded again at once; when it is read in the middle of training, the run ends with an
error and the restart encodes it. Once a folder has held a damaged cache, all its caches are verified at the start, so
that a hundred damaged files do not take a hundred restarts.

Most VAEs draw an image's latents with the generators of the training, so a restart that finds caches would draw other
numbers for all that follows. Beside the snapshots in memory is how the generators were before the first image and are
after the last batch: a restart that begins like that goes on from there, and encodes a batch that was cut off again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guards import checkpoint, npz, snapshot_files, world
from sd_scripts_patches import session, trainer_state
from sd_scripts_patches.patch import Patch, Target, around, function

LATENTS = "LatentsCachingStrategy"
EXPECTED = {
    "library.strategy_base": f"{LATENTS}._default_is_disk_cached_latents_expected",
    "library.strategy_flux": "FluxTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    "library.strategy_sdxl": "SdxlTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    "library.strategy_sd3": "Sd3TextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    "library.strategy_lumina": "LuminaTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    "library.strategy_anima": "AnimaTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    "library.strategy_hunyuan_image": "HunyuanImageTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    "library.train_util": "is_disk_cached_latents_is_expected",
}
"""Where sd-scripts looks up a cache, by module."""
REQUIRED = ("library.strategy_base", "library.strategy_flux", "library.train_util")


@around
def _load(original: Callable, file: Any, *args: Any, **kwargs: Any) -> Any:
    ours = isinstance(file, (str, os.PathLike)) and os.fspath(file).endswith(".npz")
    if args or set(kwargs) - {"mmap_mode"} or not ours:  # numpy does not map an npz
        return original(file, *args, **kwargs)
    return npz.Archive(file)


@around
def _savez(original: Callable, file: Any, *args: Any, **kwargs: Any) -> None:
    if args or not isinstance(file, (str, os.PathLike)):
        return original(file, *args, **kwargs)
    npz.save(file, **kwargs)


@around
def _expect_readable(original: Callable, *args: Any, **kwargs: Any) -> bool:
    path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str) and a.endswith(".npz")), None)
    try:
        if path is not None and _verify_all(Path(path).parent) and os.path.exists(path):
            npz.load(path)
        return original(*args, **kwargs)
    except ValueError as error:
        if path is None or os.path.exists(path):
            raise
        _folders_to_verify[Path(path).parent] = True
        session.log(str(error))
        return False


_folders_to_verify: dict[Path, bool] = {}


def _verify_all(folder: Path) -> bool:
    """Return True when the folder has held a damaged cache, so that each of its caches is read in full."""
    if folder not in _folders_to_verify:
        _folders_to_verify[folder] = any(folder.glob("*.corrupt"))
    return _folders_to_verify[folder]


@around
def _save(original: Callable, self: Any, npz_path: str, *args: Any, **kwargs: Any) -> None:
    try:
        return original(self, npz_path, *args, **kwargs)
    except ValueError as error:  # it adds to an existing file; a damaged one has been set aside
        if os.path.exists(npz_path):
            raise
        session.log(str(error))
        return original(self, npz_path, *args, **kwargs)


_begin: list[str] = []  # the run's settings and the generators before the first image


def _record() -> Path:
    return Path(os.environ.get(snapshot_files.RING, os.devnull), f"latents-{world.rank()}.jsonl")


@around
def _draw_on(original: Callable, *args: Any, **kwargs: Any) -> None:
    if not _begin:
        _begin.append(json.dumps([os.environ.get(snapshot_files.SPEC), trainer_state.generators()]))
        with contextlib.suppress(OSError):  # no process of this run has encoded an image
            begin, after, *under_way = _record().read_text("utf-8").splitlines()
            if begin == _begin[0]:
                trainer_state.restore(json.loads(after))
                # of a batch that a kill cut off: what is left of it would be encoded to other numbers
                for path in json.loads("".join(under_way) or "[]"):
                    Path(path).unlink(missing_ok=True)
    original(*args, **kwargs)


@around
def _note_draws(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    images = next((value for value in (*args, *kwargs.values()) if isinstance(value, list)), [])
    if _begin and self.cache_to_disk:
        _note([image.latents_npz for image in images if not os.path.exists(image.latents_npz)])
    original(self, *args, **kwargs)
    if _begin and self.cache_to_disk:
        _note([])


def _note(under_way: list[str]) -> None:
    """Records the generators, and the files of the batch that is encoded next."""
    with contextlib.suppress(OSError):  # there are no snapshots, or the memory is full
        lines = _begin[0], json.dumps(trainer_state.generators()), json.dumps(under_way)
        checkpoint.atomic_write(_record(), "\n".join(lines), sync=False)


WAIT = "the read of a cache file (.npz)"
PATCH = Patch(
    name="npz",
    why="a cache file on a dead mount blocks for ever; a damaged one fails every retry",
    targets=(
        function("numpy", "load(file)", _load, wait=WAIT),
        function("numpy", "savez(file)", _savez),
        *(
            Target(module, name, optional=module not in REQUIRED, make=_expect_readable, wait=WAIT)
            for module, name in EXPECTED.items()
        ),
        function("library.strategy_base", f"{LATENTS}.save_latents_to_disk(self, npz_path)", _save),
        function("library.strategy_base", f"{LATENTS}._default_cache_batch_latents(self, encode_by_vae)", _note_draws),
        function("library.train_util", "DatasetGroup.new_cache_latents(self, model, accelerator)", _draw_on),
    ),
)
