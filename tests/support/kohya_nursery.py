"""The nurseries of the trainers, kohya's and ours (nursery.py): `run` forks a process that has its imports done.

As a program, run by the interpreter of their environment, it is the nursery: it imports the packages named, which the
trainers import, and no module of kohya's. A run's arguments are those of Python: SCRIPT ARGS, or -m MODULE ARGS. What a
start of Python does with variables is done again: the import path, and sitecustomize, whose changes are made to
modules that are there already. A run with a hub or a cache of its own, which are read at import, is not forked.
"""

import gc
import importlib
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import nursery

INSTALLED = """
torch torch.utils.data torch.utils.tensorboard safetensors.torch accelerate numpy cv2 PIL.Image tqdm huggingface_hub
transformers.models.clip.modeling_clip transformers.models.t5.modeling_t5 transformers.optimization diffusers
transformers.pipelines diffusers.models.autoencoders diffusers.optimization diffusers.schedulers
diffusers.pipelines.pipeline_utils einops imagesize toml voluptuous rich.logging ftfy psutil sentencepiece av
"""
_nurseries: dict[tuple[str, bool, str], nursery.Nursery] = {}
_starting = threading.Lock()


def run(command: list[str], env: dict[str, str], cwd: Path, timeout_s: float, merged: bool = True):
    """Run a command of a trainer's interpreter; merged: both streams in `stdout`. Raises subprocess.TimeoutExpired."""
    own_hub = any(env.get(name) != os.environ.get(name) for name in ("HF_ENDPOINT", "HF_HUB_CACHE"))
    if own_hub or not hasattr(os, "fork"):
        return subprocess.run(
            command, env=env, cwd=cwd, timeout=timeout_s, check=False, text=True, encoding="utf-8", errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )  # fmt: skip
    python, *words = command
    names = "torch.utils.data accelerate" if python == sys.executable else INSTALLED
    names = "trainer" if words[:2] == ["-m", "trainer"] else names
    key = (python, (cwd / "src/musubi_tuner").is_dir(), names)  # missing packages have other replacements there
    with _starting:
        if key not in _nurseries:
            first = {name: value for name, value in env.items() if not name.startswith(("TINY_", "HANGPROOF_"))}
            _nurseries[key] = nursery.Nursery([python, str(Path(__file__).resolve()), *names.split()], first, cwd)
    return _nurseries[key].run(words, env, timeout_s, cwd, merged)


def main() -> None:
    """Import, serve, and become a run."""
    from guards import machine

    machine.avoid_amx()
    own = os.environ["PYTHONPATH"].split(os.pathsep)
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    if sys.argv[1:] == ["trainer"]:
        importlib.import_module("trainer.imports").heavy()
    gc.freeze()  # the trainers collect garbage often: not that of these imports
    words = nursery.serve()
    sys.orig_argv = [sys.executable, *words]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:] = [*path, *(place for place in sys.path[1:] if place not in own)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "sd_scripts_patches.hooks"]
    for name in [name for name in sys.modules if name.split(".")[0] in ("sitecustomize", "torchvision")]:
        if "site-packages" not in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]  # each work folder has its own
    importlib.invalidate_caches()
    try:
        changes = getattr(importlib.import_module("sitecustomize"), "AFTER", {})
    except ModuleNotFoundError:
        changes = {}
    for name in [name for name in changes if name in sys.modules]:
        for change in changes[name]:
            change(sys.modules[name])
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
