"""Cache files are read within a limit, verified, and written atomically.

The modules of sd-scripts that read caches use their global `np`. Each gets a numpy whose `load` and `savez` are those of
guards/npz.py and which is numpy in everything else. That covers every read in every family, the lazy reads of members
included, without a copy of their logic; `check` refuses a checkout that reads a cache in another way. A damaged cache
counts as missing: when sd-scripts looks it up, it is encoded again at once; when it is read in the middle of training,
the run ends with an error and the restart encodes it. Once a folder has held a damaged cache, all its caches are
verified at the start, so that a hundred damaged files do not take a hundred restarts.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from guards import npz
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target

LATENTS = "LatentsCachingStrategy"
EXPECTED = {
    "library.strategy_base": (f"{LATENTS}._default_is_disk_cached_latents_expected",),
    "library.strategy_flux": ("FluxTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",),
    "library.strategy_sdxl": ("SdxlTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",),
    "library.strategy_sd3": ("Sd3TextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",),
    "library.strategy_lumina": ("LuminaTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",),
    "library.strategy_anima": ("AnimaTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",),
    "library.strategy_hunyuan_image": (
        "HunyuanImageTextEncoderOutputsCachingStrategy.is_disk_cached_outputs_expected",
    ),
    "library.train_util": ("is_disk_cached_latents_is_expected",),
}
REQUIRED = ("library.strategy_base", "library.strategy_flux", "library.train_util")


@functools.lru_cache(maxsize=1)
def guarded_numpy() -> ModuleType:
    """Return numpy with our `load` for .npz files and our `savez`."""
    import numpy

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not (isinstance(file, (str, os.PathLike)) and os.fspath(file).endswith(".npz")):
            return numpy.load(file, *args, **kwargs)
        return npz.Archive(file, timeouts.seconds("npz_timeout_s"))

    def savez(file: Any, *args: Any, **kwargs: Any) -> None:
        if args or not isinstance(file, (str, os.PathLike)):
            return numpy.savez(file, *args, **kwargs)
        npz.save(file, **kwargs)

    guarded = ModuleType("numpy", numpy.__doc__)
    guarded.__dict__.update(numpy.__dict__)
    guarded.__dict__.update(load=load, savez=savez, __getattr__=lambda name: getattr(numpy, name))
    return guarded


def _expect_readable(original: Callable) -> Callable:
    def is_expected(*args: Any, **kwargs: Any) -> bool:
        path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str) and a.endswith(".npz")), None)
        try:
            if path is not None and _verify_all(Path(path).parent) and os.path.exists(path):
                with npz.Archive(path, timeouts.seconds("npz_timeout_s")) as archive:
                    archive.verify()
            return original(*args, **kwargs)
        except ValueError as error:
            if path is None or os.path.exists(path):
                raise
            _folders_to_verify[Path(path).parent] = True
            session.log(str(error))
            return False

    return is_expected


_folders_to_verify: dict[Path, bool] = {}


def _verify_all(folder: Path) -> bool:
    """Return True when the folder has held a damaged cache, so that each of its caches is read in full."""
    if folder not in _folders_to_verify:
        _folders_to_verify[folder] = folder.is_dir() and npz.found_corrupt(folder / "any")
    return _folders_to_verify[folder]


def _save(original: Callable) -> Callable:
    def save_latents_to_disk(self: Any, npz_path: str, *args: Any, **kwargs: Any) -> None:
        try:
            return original(self, npz_path, *args, **kwargs)
        except ValueError as error:  # it adds to an existing file; a damaged one has been set aside
            if os.path.exists(npz_path):
                raise
            session.log(str(error))
            return original(self, npz_path, *args, **kwargs)

    return save_latents_to_disk


def check_numpy_use(tree: ast.Module) -> str | None:
    """Return None when numpy's load and savez are used through the global `np` in the guarded form, else what is not."""
    aliases = [
        (alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "numpy"
    ]
    if aliases != ["np"]:
        return f"numpy is imported as {', '.join(aliases) or 'nothing'}; expected one import, as np"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "numpy" and any(a.name == "load" for a in node.names):
            return f"line {node.lineno}: load is imported from numpy by name"
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "np.load"
            and (len(node.args) != 1 or node.keywords)
        ):
            return f"line {node.lineno}: {ast.unparse(node)} is not a guarded form of np.load"
    return None


def _targets() -> tuple[Target, ...]:
    targets = []
    for module, names in EXPECTED.items():
        optional = module not in REQUIRED
        wait = "the read of a cache file (.npz)"
        targets.append(
            Target(
                module,
                "np",
                beside=names[0].split(".")[0],
                optional=optional,
                check=check_numpy_use,
                make=lambda _: guarded_numpy(),
                wait=wait,
            )
        )
        targets += [Target(module, name, optional=optional, make=_expect_readable, wait=wait) for name in names]
    targets += [
        Target("library.strategy_base", f"{LATENTS}.save_latents_to_disk", params=("self", "npz_path"), make=_save),
    ]
    return tuple(targets)


PATCH = Patch(
    name="npz",
    why="a cache file on a dead mount blocks for ever; a damaged one fails every retry",
    targets=_targets(),
)
