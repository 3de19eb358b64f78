"""kohya's real FLUX trainer on a CPU in about ten seconds: tiny models with random weights, no file of it changed.

The models are small because `PYTHONPATH` holds a `sitecustomize` that changes sd-scripts' model tables right after the
module that defines them has been imported. Only sizes change; the code is sd-scripts' own. `Installation`, SHARED and
FINDER also serve the other trainers and families of the tests (tests/support/tiny_families.py, tiny_musubi.py). Two
things are left out for speed: the automatic garbage collection (and that of objects made by imports), and bitsandbytes
when no 8-bit optimizer is used. torchvision, which sd-scripts imports and which has no CPU build for every platform, is
replaced by the few functions used when it is missing.

Callers ask `why_not()`, then `workdir()` for weights, tokenizers and images (made once per process), and
`arguments(work, out)` with `command(…)`. In sd-scripts' environment, `python benchmarks/tiny_flux.py CHECKOUT WORKDIR
IMAGES` makes the files.

Switches (environment of the training process): TINY_LOSSES=FILE one JSON line `[epoch, micro-step, loss]` for each
recorded loss · TINY_DIE_AFTER=N SIGKILL from inside after that many recorded losses · TINY_FAULTS="module=file[;…]" run
FILE with the name `module` bound to that module once it is imported.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sd_scripts_patches import trainers
from sd_scripts_patches.install import venv_python
from sd_scripts_patches.trainers import ROOT, TRAINERS, Trainer

SCRIPT = "flux_train_network.py"
WIDTH = {"hidden": 64, "heads": 2, "axes": [8, 12, 12], "clip": 32, "t5": 64, "vocabulary": 1000, "mlp": 2.0}

SHARED = """
import gc, json, os, signal, sys
from sd_scripts_patches.hooks import Finder

def record_losses(module):
    path = os.environ.get("TINY_LOSSES")
    if path and vars(module).get("LossRecorder") is not None and module.LossRecorder.__module__ == module.__name__:
        add, left = module.LossRecorder.add, [int(os.environ.get("TINY_DIE_AFTER", "0"))]
        def recorded(self, *, epoch, step, loss):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps([epoch, step, loss]) + "\\n")
            add(self, epoch=epoch, step=step, loss=loss)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        module.LossRecorder.add = recorded
"""
"""The beginning of each SITE."""

FINDER = """
def inject(path):
    def fault(module):
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), {"__name__": "tiny_fault", "module": module})
    return fault

for entry in filter(None, os.environ.get("TINY_FAULTS", "").split(";")):
    name, _, path = entry.partition("=")
    AFTER.setdefault(name, []).append(inject(path))

def run_steps(module, name):
    for step in AFTER[name]:
        step(module)

sys.meta_path.insert(0, Finder(AFTER.__contains__, run_steps))
"""
"""The end of each SITE: runs the functions of AFTER, and faults, right after their module."""

SITE = '''
"""Shrinks sd-scripts' FLUX when it is imported; see benchmarks/tiny_flux.py."""
WIDTH = json.loads(%(width)r)
gc.disable()

def shrink_transformer(module):
    import dataclasses
    for config in module.configs.values():
        config.params = dataclasses.replace(
            config.params, hidden_size=WIDTH["hidden"], num_heads=WIDTH["heads"], axes_dim=WIDTH["axes"],
            mlp_ratio=WIDTH["mlp"], vec_in_dim=WIDTH["clip"], context_in_dim=WIDTH["t5"], depth=2,
            depth_single_blocks=4)
        config.ae_params = dataclasses.replace(config.ae_params, ch=32, ch_mult=[1] * 4, num_res_blocks=1)

def shrink_text_encoders(module):
    import transformers
    def clip(**given):
        return transformers.CLIPTextConfig(
            hidden_size=WIDTH["clip"], intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=WIDTH["vocabulary"], max_position_embeddings=77, bos_token_id=998, eos_token_id=999, pad_token_id=999)
    def t5(**given):
        sizes = dict(d_model=WIDTH["t5"], d_ff=64, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=2)
        return transformers.T5Config(**{**given, **sizes, "vocab_size": WIDTH["vocabulary"]})
    module.CLIPConfig, module.T5Config = clip, t5

def collect_only_what_is_new(module):
    """sd-scripts collects garbage for every image it caches: with tiny models that takes half of a run."""
    clean = module.clean_memory_on_device
    def clean_memory_on_device(device):
        gc.freeze()
        return clean(device)
    module.clean_memory_on_device = clean_memory_on_device

AFTER = {"library." + name: [step] for name, step in {
    "device_utils": collect_only_what_is_new, "flux_models": shrink_transformer, "flux_utils": shrink_text_encoders,
    "train_util": record_losses, "logging_util": record_losses}.items()}

if not any("8bit" in word.lower() for word in sys.orig_argv):
    sys.modules["bitsandbytes"] = None  # "not installed": it takes a fifth of the import time and is not used here
'''

STAND_INS = {
    "torchvision": {
        "__init__.py": 'from . import transforms, utils\n__version__ = "0.0"\n',
        "utils.py": "def make_grid(images, nrow=8):\n    return images[0]\n",
        "transforms/__init__.py": """
import numpy, torch
from . import functional

class InterpolationMode:
    NEAREST = "nearest"

class Compose:
    def __init__(self, transforms):
        self.transforms = transforms
    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value

class ToTensor:
    def __call__(self, image):
        tensor = functional.pil_to_tensor(image)
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()

class Normalize:
    def __init__(self, mean, std, inplace=False):
        self.mean, self.std = (torch.tensor(v).reshape(-1, 1, 1) for v in (mean, std))
    def __call__(self, tensor):
        return (tensor - self.mean) / self.std
""",
        "transforms/functional.py": """
import numpy, torch

def pil_to_tensor(image):
    array = numpy.asarray(image)
    return torch.from_numpy(numpy.atleast_3d(array).transpose(2, 0, 1).copy())

def resize(image, size, interpolation):
    return torch.nn.functional.interpolate(image, size=size, mode=interpolation)

def gaussian_blur(image, kernel_size, sigma):
    raise NotImplementedError("the replacement has no blur")
""",
    }
}
"""Packages that may be missing: their files, as far as they are used here."""


@dataclass(frozen=True)
class Installation:
    """A checkout of a trainer and the interpreter of its environment."""

    checkout: Path
    python: Path

    @property
    def trainer(self) -> Trainer:
        """The trainer that the checkout holds; sd-scripts when it holds none."""
        return trainers.of(self.checkout) or TRAINERS["sd-scripts"]

    def environment(self, work: Path, **extra: str) -> dict[str, str]:
        """Return the environment variables of a training process on the tiny models; `extra` wins."""
        path = os.pathsep.join([str(work / "site"), str(ROOT)])
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TINY_", "PYTHONPATH"))}
        fixed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return {**keep, **fixed, self.trainer.folder_variable: str(self.checkout), **extra}

    def command(self, *args: str, patched: bool = True, script: str = "") -> list[str]:
        """Return the command line that runs a script of the checkout, with or without the patches."""
        launcher = ["-m", "sd_scripts_patches"] if patched else []
        return [str(self.python), *launcher, str(self.checkout / (script or self.trainer.script)), *args]

    def lacks(self, package: str) -> bool:
        """Return True when the environment has no such package. Nothing is imported."""
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run([str(self.python), "-c", probe], env=clean, check=False, timeout=60).returncode != 0

    def write_site(self, work: Path, customize: str, stand_ins: dict[str, dict[str, str]]) -> None:
        """Write WORK/site: the text of sitecustomize, and replacements of packages that are missing."""
        site = work / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(customize, encoding="utf-8")
        for package, files in stand_ins.items():
            for name, text in files.items() if self.lacks(package) else ():
                target = site / package / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")


def checkout() -> Path:
    """Return the sd-scripts checkout: $SD_SCRIPTS_DIR, else sd-scripts/ in the project."""
    return Path(os.environ.get("SD_SCRIPTS_DIR") or ROOT / "sd-scripts")


def python() -> Path:
    """Return the interpreter of its environment: in $SD_SCRIPTS_VENV, else .venv-sd-scripts/."""
    return venv_python(Path(os.environ.get("SD_SCRIPTS_VENV") or ROOT / ".venv-sd-scripts"))


def installation() -> Installation:
    """Return both."""
    return Installation(checkout(), python())


def why_not(run: bool = True) -> str:
    """Return one line that says what is missing, or "". run=False: only the checkout is needed."""
    if not (checkout() / SCRIPT).is_file():
        return "no sd-scripts checkout: set SD_SCRIPTS_DIR or run ./start.sh sd-scripts"
    if run and not python().is_file():
        return f"no sd-scripts environment ({python()} is missing): set SD_SCRIPTS_VENV or run ./start.sh sd-scripts"
    return ""


def command(*args: str, patched: bool = True, script: str = SCRIPT) -> list[str]:
    """Return the command line that runs a script of the checkout, with or without the patches."""
    return installation().command(*args, patched=patched, script=script)


def workdir(images: int = 10) -> Path:
    """Return a folder with weights, tokenizers, images and site/, made once per process and checkout. Treat it as
    read-only: write caches and outputs elsewhere."""
    return _workdir(checkout(), images)


@functools.lru_cache(maxsize=8)
def _workdir(made_by: Path, images: int) -> Path:
    work = Path(tempfile.mkdtemp(prefix="tiny-sd-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    write_site(work)
    make_files(installation(), work, __file__, str(images))
    return work


def make_files(found: Installation, work: Path, program: str, *args: str, **variables: str) -> None:
    """Run PROGRAM CHECKOUT WORK ARGS, which makes tiny models, in a trainer's environment. RuntimeError: it failed."""
    line = [str(found.python), program, str(found.checkout), str(work), *args]
    env, stream = found.environment(work, **variables), subprocess.PIPE
    done = subprocess.run(
        line, env=env, cwd=found.checkout, stdout=stream, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"tiny models were not made:\n{done.stdout[-3000:]}")


def write_site(work: Path) -> None:
    """Write WORK/site of sd-scripts."""
    installation().write_site(work, SHARED + SITE % {"width": json.dumps(WIDTH)} + FINDER, STAND_INS)


FLAGS = """
output_name=tiny resolution=64,64 caption_extension=.txt network_module=networks.lora_flux network_dim=4
optimizer_type=AdamW learning_rate=1e-3 lr_scheduler=cosine loss_type=l2 train_batch_size=1 mixed_precision=no
save_precision=float timestep_sampling=shift discrete_flow_shift=3.1582 model_prediction_type=raw guidance_scale=1.0
t5xxl_max_token_length=32 seed=42 max_data_loader_n_workers=0
"""


def arguments(work: Path, out: Path, *more: str, **changed: str | None) -> list[str]:
    """Return arguments of flux_train_network.py: one image per step, AdamW, LoRA rank 4, caches in memory.

    `changed` replaces or adds flags by name (None removes one); `more` is appended.
    """
    flags: dict[str, str | None] = {
        **dict(word.split("=") for word in FLAGS.split()),
        "pretrained_model_name_or_path": f"{work}/flux.safetensors",
        "clip_l": f"{work}/clip_l.safetensors",
        "t5xxl": f"{work}/t5xxl.safetensors",
        "ae": f"{work}/ae.safetensors",
        "tokenizer_cache_dir": f"{work}/tokenizers",
        "train_data_dir": f"{work}/images",
        "output_dir": str(out),
    }
    switches = ("network_train_unet_only", "sdpa", "cache_latents", "cache_text_encoder_outputs", "console_log_simple")
    return command_line({**flags, **changed}, *(f"--{switch}" for switch in switches), *more)


def command_line(flags: Mapping[str, object], *more: str) -> list[str]:
    """Return the words of a command line. A flag that is None is left out; one that is True has no value."""
    given = [
        [f"--{name}", *([] if value is True else [str(value)])] for name, value in flags.items() if value is not None
    ]
    return [*(word for words in given for word in words), *more]


def losses(path: Path) -> list[list]:
    """Return the content of TINY_LOSSES: [epoch, micro-step, loss] in the order recorded."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_tokenizers(folder: Path) -> None:
    """Write the tokenizers of trainer/tiny_flux.py with sd-scripts' cache names, by sd-scripts' version of transformers."""
    import transformers

    from trainer.tiny_flux import clip_vocabulary, write_t5_tokenizer

    clip = folder / "openai_clip-vit-large-patch14"
    clip.mkdir(parents=True)
    (clip / "vocab.json").write_text(json.dumps(clip_vocabulary()), encoding="utf-8")
    (clip / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    files = (str(clip / "vocab.json"), str(clip / "merges.txt"))
    transformers.CLIPTokenizer(*files, model_max_length=77).save_pretrained(clip)
    write_t5_tokenizer(folder / "google_t5-v1_1-xxl")


def write_images(folder: Path, count: int, sizes: Sequence[tuple[int, int]] = ((64, 64),), seed: int = 7) -> None:
    """Write `count` noise images with captions to `folder`. sizes: width and height, in turn."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True)
    noise = numpy.random.default_rng(seed)
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        pixels = noise.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
        (folder / f"{i:03d}.txt").write_text(f"a thing, number {i}", encoding="utf-8")


def make(checkout: Path, work: Path, images: int) -> None:
    """Write weights, tokenizers, images and prompts to `work`. Runs in sd-scripts' environment, with work/site."""
    import torch
    import transformers
    from safetensors.torch import save_file

    sys.path.insert(0, str(checkout))
    from library import flux_models, flux_utils

    torch.manual_seed(1)
    dev = flux_models.configs["dev"]
    gated = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    t5 = flux_utils.T5Config(**gated, tie_word_embeddings=False)
    models = {
        "flux": flux_models.Flux(dev.params),
        "ae": flux_models.AutoEncoder(dev.ae_params),
        "clip_l": transformers.CLIPTextModel(flux_utils.CLIPConfig()),
        "t5xxl": transformers.T5EncoderModel(t5),
    }
    for name, model in models.items():
        weights = {key: tensor.clone().contiguous() for key, tensor in model.state_dict().items()}
        save_file(weights, work / f"{name}.safetensors")
    write_tokenizers(work / "tokenizers")
    write_images(work / "images" / "1_thing", images)
    (work / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
