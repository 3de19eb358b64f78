"""Cache files are read within a limit, verified, and written whole.

The modules of sd-scripts that read caches do so through their global `np`; each gets a numpy whose `load` and `savez` are
those of guards/npz.py and which is numpy in everything else. That reaches every read in every family, the lazy
member reads too, without repeating a line of their logic; `check` refuses a checkout in which a cache is read in some
other way. A cache found damaged counts as not cached: where sd-scripts asks, it is encoded at once; where it is read
in the middle of training, the run ends with an error and the restart encodes it. Once a folder has held a damaged
cache, all its caches are read in full at the start, so that a hundred of them do not take a hundred restarts.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from guards import npz
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

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
NEEDED = ("library.strategy_base", "library.strategy_flux", "library.train_util")


def apply(module: ModuleType) -> None:
    """A guarded `np` for one module, and its question "is this cached?" answered with no for a damaged file."""
    module.np = guarded_numpy()
    for name in EXPECTED[module.__name__]:
        wrap(module, name, _expected)
    if module.__name__ == "library.strategy_base":
        wrap(module, f"{LATENTS}.save_latents_to_disk", _save)


@functools.lru_cache(maxsize=1)
def guarded_numpy() -> ModuleType:
    """numpy, with our `load` for .npz files and our `savez`."""
    import numpy

    def load(file, *args, **kwargs):
        if args or kwargs or not (isinstance(file, (str, os.PathLike)) and os.fspath(file).endswith(".npz")):
            return numpy.load(file, *args, **kwargs)
        return npz.Archive(file, timeouts.seconds("npz_timeout_s"))

    def savez(file, *args, **kwargs):
        if args or not isinstance(file, (str, os.PathLike)):
            return numpy.savez(file, *args, **kwargs)
        npz.save(file, **kwargs)

    guarded = ModuleType("numpy", numpy.__doc__)
    guarded.__dict__.update(numpy.__dict__)
    guarded.__dict__.update(load=load, savez=savez, __getattr__=lambda name: getattr(numpy, name))
    return guarded


def _expected(original: Callable) -> Callable:
    def is_expected(*args, **kwargs):
        path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str) and a.endswith(".npz")), None)
        try:
            if path is not None and _doubtful(Path(path).parent) and os.path.exists(path):
                with npz.Archive(path, timeouts.seconds("npz_timeout_s")) as archive:
                    archive.verify()
            return original(*args, **kwargs)
        except ValueError as error:
            if path is None or os.path.exists(path):
                raise
            _folders[Path(path).parent] = True
            session.say(str(error))
            return False

    return is_expected


_folders: dict[Path, bool] = {}


def _doubtful(folder: Path) -> bool:
    if folder not in _folders:
        _folders[folder] = folder.is_dir() and npz.set_aside_near(folder / "any")
    return _folders[folder]


def _save(original: Callable) -> Callable:
    def save_latents_to_disk(self, npz_path, *args, **kwargs):
        try:
            return original(self, npz_path, *args, **kwargs)
        except ValueError as error:  # it adds to a file that is there: one that is damaged is gone now
            if os.path.exists(npz_path):
                raise
            session.say(str(error))
            return original(self, npz_path, *args, **kwargs)

    return save_latents_to_disk


def only_known_reads(tree: ast.Module) -> str | None:
    """Every use of numpy's load and savez goes through the global `np`, in the form that is guarded."""
    aliases = [
        (alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "numpy"
    ]
    if aliases != ["np"]:
        return f"numpy is imported as {', '.join(aliases) or 'nothing'}, expected once, as np"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "numpy" and any(a.name == "load" for a in node.names):
            return f"line {node.lineno}: numpy's load is imported by itself"
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "np.load"
            and (len(node.args) != 1 or node.keywords)
        ):
            return f"line {node.lineno}: {ast.unparse(node)} is no read that is known"
    return None


def _targets() -> tuple[Target, ...]:
    targets = []
    for module, names in EXPECTED.items():
        optional = module not in NEEDED
        targets.append(Target(module, "np", optional=optional, check=only_known_reads))
        targets += [Target(module, name, optional=optional) for name in names]
    targets += [
        Target("library.strategy_base", f"{LATENTS}.save_latents_to_disk", params=("self", "npz_path")),
    ]
    return tuple(targets)


PATCH = Patch(
    name="npz",
    why="a cache file on a dead mount blocks for ever; a damaged one fails every retry",
    targets=_targets(),
    apply=dict.fromkeys(EXPECTED, apply),
)
