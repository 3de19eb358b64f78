"""The nursery of kohya's trainers (nursery.py): run by the interpreter of their environment, it imports what they import.

A run's arguments are those of Python: SCRIPT ARGS, or -m MODULE ARGS. What a start of Python would do with the run's
variables is done again: the import path, and sitecustomize, whose changes are made to modules that are there already.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

import nursery

from guards import amx

INSTALLED = (
    *(
        "torch",
        "torch.utils.data",
        "torch.utils.tensorboard",
        "torchvision.transforms",
        "safetensors.torch",
        "accelerate",
    ),
    *("transformers.models.clip.modeling_clip", "transformers.models.t5.modeling_t5", "transformers.optimization"),
    *(
        "diffusers",
        "diffusers.models.autoencoders",
        "diffusers.optimization",
        "diffusers.schedulers",
        "cv2",
        "numpy",
        "PIL.Image",
    ),
    *(
        "einops",
        "imagesize",
        "toml",
        "voluptuous",
        "tqdm",
        "huggingface_hub",
        "rich.logging",
        "ftfy",
        "psutil",
        "sentencepiece",
    ),
)


def main() -> None:
    """Import, serve, and become a run."""
    amx.avoid()
    for name in INSTALLED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    words = nursery.serve()
    sys.orig_argv = [sys.executable, *words]
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [sys.path[0], *path, *(place for place in sys.path[1:] if place not in path)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "sitecustomize"]
    sys.modules.pop("sitecustomize", None)
    importlib.invalidate_caches()
    site = importlib.import_module("sitecustomize")
    for name, changes in getattr(site, "AFTER", {}).items():
        for change in changes if name in sys.modules else ():
            change(sys.modules[name])
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
