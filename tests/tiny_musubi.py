"""kohya's real musubi-tuner (Z-Image) on a CPU: a tiny model with random weights, no file of it changed.

Tests call `why_not()` (the reason to skip, or ""), `workdir()` for weights and images (made once per session),
`cache(...)` for both caching commands, and `arguments(work, out)` with `command(...)` for training. The model is small
because `PYTHONPATH` holds a `sitecustomize` that changes musubi-tuner's modules right after each was imported: sizes, and
stand-ins for the VAE and the text encoder, whose weights are large. torchvision and av, of which hardly anything is
used for images, are replaced when they are missing.

$MUSUBI_DIR is the checkout, $MUSUBI_VENV the environment in which it runs.

Switches (environment of the process): TINY_STEP_S seconds added to each forward pass · TINY_LOSSES=FILE one JSON line
`[epoch, micro-step, loss]` for each recorded loss · TINY_FAULTS="module=file[;…]" run FILE with the name `module` bound
to that module of musubi_tuner (`utils.train_utils`) once it is imported.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((64, 64), (96, 48), (48, 96))
"""Width and height of the images in turn: three buckets."""

SITE = '''
"""Shrinks musubi-tuner's Z-Image when it is imported; see tests/tiny_musubi.py."""
import hashlib, importlib.abc, json, os, sys, time, types

def shrink(module):
    module.DEFAULT_TRANSFORMER_DIM, module.DEFAULT_TRANSFORMER_N_LAYERS = 64, 4
    module.DEFAULT_TRANSFORMER_N_REFINER_LAYERS = 1
    module.DEFAULT_TRANSFORMER_N_HEADS = module.DEFAULT_TRANSFORMER_N_KV_HEADS = 2
    module.DEFAULT_TRANSFORMER_CAP_FEAT_DIM, module.ROPE_AXES_DIMS = 48, [8, 12, 12]

def slow_down(module):
    pause_s = float(os.environ.get("TINY_STEP_S", "0"))
    if pause_s:
        original = module.ZImageTransformer2DModel.forward
        def forward(self, *args, **kwargs):
            time.sleep(pause_s)
            return original(self, *args, **kwargs)
        module.ZImageTransformer2DModel.forward = forward

def replace_vae(module):
    import torch
    class Vae(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32
        def encode(self, pixels):
            weight = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(7)) / 14
            latents = torch.nn.functional.conv2d(pixels.float(), weight, stride=8)
            return types.SimpleNamespace(mode=lambda: latents)
        def decode(self, latents):
            return torch.nn.functional.interpolate(latents[:, :3], scale_factor=8)
    module.load_autoencoder_kl = lambda *args, **kwargs: Vae()

def replace_text_encoder(module):
    import torch
    class Encoder(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32
    def embed(tokenizer, encoder, prompts):
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = [int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) for prompt in prompts]
        rows = [torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows), torch.ones(len(rows), 16, dtype=torch.bool)
    module.load_qwen3 = lambda *args, **kwargs: (None, Encoder())
    module.get_text_embeds = embed

def record_losses(module):
    path = os.environ.get("TINY_LOSSES")
    if path:
        add = module.LossRecorder.add
        def recorded(self, *, epoch, step, loss):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps([epoch, step, loss]) + "\\n")
            return add(self, epoch=epoch, step=step, loss=loss)
        module.LossRecorder.add = recorded

AFTER = {
    "zimage.zimage_config": [shrink], "zimage.zimage_model": [slow_down], "zimage.zimage_autoencoder": [replace_vae],
    "zimage.zimage_utils": [replace_text_encoder], "utils.train_utils": [record_losses],
}

def inject(path):
    def fault(module):
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), {"__name__": "tiny_fault", "module": module})
    return fault

for entry in filter(None, os.environ.get("TINY_FAULTS", "").split(";")):
    name, _, path = entry.partition("=")
    AFTER.setdefault(name, []).append(inject(path))
AFTER = {"musubi_tuner." + name: steps for name, steps in AFTER.items()}

class Loader(importlib.abc.Loader):
    def __init__(self, inner, name):
        self.inner, self.name = inner, name
    def create_module(self, spec):
        return self.inner.create_module(spec)
    def exec_module(self, module):
        self.inner.exec_module(module)
        for step in AFTER[self.name]:
            step(module)
    def __getattr__(self, attribute):
        return getattr(self.inner, attribute)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in AFTER:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1:]:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    spec.loader = Loader(spec.loader, name)
                    return spec

sys.meta_path.insert(0, Finder())
'''
STAND_INS = {
    "torchvision": """
class utils:
    @staticmethod
    def make_grid(images, nrow=8):
        return images[0]
""",
    "av": '__version__ = "0.0"\n',
}


def checkout() -> Path:
    """Return the checkout of musubi-tuner."""
    return Path(os.environ.get("MUSUBI_DIR", "musubi-tuner")).resolve()


def python() -> Path:
    """Return the interpreter of the environment in which musubi-tuner runs."""
    return Path(os.environ.get("MUSUBI_VENV", ".venv-musubi")).absolute() / "bin" / "python"


def why_not() -> str:
    """Return why musubi-tuner cannot be run here, or ""."""
    if not (checkout() / "src/musubi_tuner/training/trainer_base.py").is_file():
        return f"no checkout of musubi-tuner at {checkout()}; set MUSUBI_DIR"
    return "" if python().is_file() else f"no environment of musubi-tuner at {python()}; set MUSUBI_VENV"


def environment(work: Path, **extra: str) -> dict[str, str]:
    """Return the environment variables of a process on the tiny model; `extra` wins."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TINY_", "PYTHONPATH"))}
    fixed = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**keep, **fixed, "PYTHONPATH": os.pathsep.join([str(work / "site"), str(ROOT)]), **extra}


def command(script: str, *args: str, patched: bool = True, folder: str = "") -> list[str]:
    """Return the command line of a script in the checkout (or in `folder` of it)."""
    launcher = ["-m", "sd_scripts_patches"] if patched else []
    return [str(python()), *launcher, str(checkout() / folder / script), *args]


def caching(dataset: Path, *more: str) -> dict[str, list[str]]:
    """Return script → arguments of both caching commands."""
    common = ["--dataset_config", str(dataset), "--device", "cpu", "--num_workers", "1", *more]
    return {
        "zimage_cache_latents.py": [*common, "--vae", "tiny"],
        "zimage_cache_text_encoder_outputs.py": [*common, "--text_encoder", "tiny"],
    }


def arguments(work: Path, dataset: Path, out: Path, *more: str, **changed: str | None) -> list[str]:
    """Return arguments of zimage_train_network.py. `changed` replaces or adds flags (None removes one)."""
    flags: dict[str, str | None] = {
        "dit": str(work / "dit.safetensors"),
        "vae": "tiny",
        "text_encoder": "tiny",
        "dataset_config": str(dataset),
        "mixed_precision": "bf16",
        "timestep_sampling": "shift",
        "discrete_flow_shift": "2.0",
        "optimizer_type": "adamw",
        "learning_rate": "1e-3",
        "lr_scheduler": "cosine",
        "network_module": "networks.lora_zimage",
        "network_dim": "4",
        "seed": "42",
        "max_data_loader_n_workers": "0",
        "output_dir": str(out),
        "output_name": "tiny",
    }
    flags.update(changed)
    line = [part for name, value in flags.items() if value is not None for part in (f"--{name}", value)]
    return [*line, "--sdpa", *more]


def losses(path: Path) -> list[list]:
    """Return the content of TINY_LOSSES: [epoch, micro-step, loss] in the order recorded."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def dataset(folder: Path, images: Path, batch_size: int = 1) -> Path:
    """Write the configuration of a data set whose caches are in FOLDER/cache; return its path."""
    path = folder / "dataset.toml"
    path.write_text(
        f'[general]\nresolution = [64, 64]\ncaption_extension = ".txt"\nbatch_size = {batch_size}\nenable_bucket = true\n\n'
        f"[[datasets]]\nimage_directory = {json.dumps(images.as_posix())}\n"
        f"cache_directory = {json.dumps((folder / 'cache').as_posix())}\nnum_repeats = 1\n",
        encoding="utf-8",
    )
    return path


@functools.lru_cache(maxsize=1)
def workdir(images: int = 7) -> Path:
    """Return a folder with weights, images, caches (`cached()` copies them) and site/, made once per session. Read-only."""
    work = Path(tempfile.mkdtemp(prefix="tiny-musubi-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    site = work / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    for name, text in STAND_INS.items():
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
        if subprocess.run([str(python()), "-c", probe], check=False, timeout=60).returncode:
            (site / f"{name}.py").write_text(text, encoding="utf-8")
    env = environment(work)
    _checked([str(python()), str(Path(__file__).resolve()), str(work), str(images)], env)
    config = dataset(work, work / "images")
    for script, args in caching(config).items():
        _checked(command(script, *args, patched=False), {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{checkout()}/src"})
    return work


def cached(work: Path, folder: Path, batch_size: int = 1) -> Path:
    """Copy the caches to FOLDER/cache and return the configuration that uses them."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(work / "cache", folder / "cache")
    return dataset(folder, work / "images", batch_size)


def _checked(line: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(line, env=env, cwd=checkout(), timeout=300, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{line[1]} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def make(work: Path, images: int) -> None:
    """Write weights and images to `work`. Runs in musubi-tuner's environment with work/site on the path."""
    sys.path.insert(0, str(checkout() / "src"))
    import numpy
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    (work / "images").mkdir()
    noise = numpy.random.default_rng(3)
    for i in range(images):
        width, height = SIZES[i % len(SIZES)]
        pixels = noise.integers(0, 255, (height, width, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(work / "images" / f"{i:02d}.png")
        (work / "images" / f"{i:02d}.txt").write_text(f"a thing, number {i}", encoding="utf-8")

    from musubi_tuner.zimage import zimage_model

    model = zimage_model.create_model("torch", False, torch.float32)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(value.shape) if "norm" in name else torch.randn(tuple(value.shape), generator=generator) * 0.05
        for name, value in model.state_dict().items()
    }
    save_file(weights, work / "dit.safetensors")
    (work / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
