"""kohya's real FLUX trainer on a CPU, with tiny models: tiny_flux.py on the checkout of the tests.

Tests call `need()` (which skips with one line when the checkout or its environment is missing), then `workdir()` for
weights, tokenizers and images (made once per session), and `arguments(work, out)` with `command(...)`.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import kohya_nursery
import tiny_flux as tiny
from tiny_flux import arguments, losses

from sd_scripts_patches.install import venv_python
from sd_scripts_patches.trainers import ROOT

__all__ = ["ROOT", "arguments", "losses"]


# One interpreter may serve all trainers; the project itself knows environments.
for variable in ("SD_SCRIPTS_VENV", "MUSUBI_VENV"):
    if os.environ.get("SD_SCRIPTS_PYTHON") and not os.environ.get(variable):
        os.environ[variable] = str(Path(os.environ["SD_SCRIPTS_PYTHON"]).absolute().parent.parent)


def checkouts() -> list[Path]:
    """Return the checkouts to test with: $SD_SCRIPTS_DIR (else sd-scripts/ in the project) and $SD_SCRIPTS_0111."""
    named = [checkout(), *filter(None, [os.environ.get("SD_SCRIPTS_0111")])]
    return [Path(one) for one in dict.fromkeys(map(str, named)) if (Path(one) / tiny.SCRIPT).is_file()]


def checkout() -> Path:
    """Return the sd-scripts checkout to test with: $SD_SCRIPTS_DIR, else sd-scripts/ in the project."""
    return Path(os.environ.get("SD_SCRIPTS_DIR") or ROOT / "sd-scripts")


def python() -> Path:
    """Return the interpreter of its environment: in $SD_SCRIPTS_VENV, else .venv-sd-scripts/."""
    return venv_python(Path(os.environ.get("SD_SCRIPTS_VENV") or ROOT / ".venv-sd-scripts"))


def installation() -> tiny.Installation:
    """Return both."""
    return tiny.Installation(checkout(), python())


def why_not(run: bool = True) -> str:
    """Return one line that says what is missing, or "". run=False: only the checkout is needed."""
    if not (checkout() / tiny.SCRIPT).is_file():
        return "no sd-scripts checkout: set SD_SCRIPTS_DIR or run ./start.sh sd-scripts"
    if run and not python().is_file():
        return f"no sd-scripts environment ({python()} is missing): set SD_SCRIPTS_VENV or run ./start.sh sd-scripts"
    return ""


def need(run: bool = True) -> None:
    """Skip the calling test with a reason when sd-scripts is missing."""
    import pytest

    if why_not(run):
        pytest.skip(why_not(run))


def home(symbol: str, module: str = "library.train_util") -> str:
    """Return the module of this checkout that defines `symbol`, which was in `module` in v0.10.1."""
    return installation().home(symbol, module)


def environment(work: Path, **extra: str) -> dict[str, str]:
    """Return the environment variables of a training process on the tiny models; `extra` wins. It finds our fault injectors."""
    found = installation().environment(work, **extra)
    return found | {"PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(Path(__file__).parent)])}


def command(*args: str, patched: bool = True, script: str = tiny.SCRIPT) -> list[str]:
    """Return the command line that runs a script of the checkout, with or without the patches."""
    return installation().command(*args, patched=patched, script=script)


def workdir(images: int = 10, blocks: str = "2,4") -> Path:
    """Return a folder with weights, tokenizers, images and site/, made once per session and checkout. Treat it as
    read-only: write caches and outputs elsewhere (`copy_of` copies the images)."""
    return _workdir(checkout(), images, blocks)


@functools.lru_cache(maxsize=8)
def _workdir(made_by: Path, images: int, blocks: str) -> Path:
    work = Path(tempfile.mkdtemp(prefix="tiny-sd-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    write_site(work)
    env = environment(work, TINY_BLOCKS=blocks)
    done = kohya_nursery.run(installation().maker(work, images), env, made_by, 300)
    if done.returncode:
        raise RuntimeError(f"tiny models were not made:\n{done.stdout}")
    return work


def copy_of(work: Path, folder: Path, name: str = "images") -> Path:
    """Copy images and captions to `folder`, for runs that write caches beside them."""
    return Path(shutil.copytree(work / name, folder / name))


@functools.lru_cache(maxsize=1)
def site() -> Path:
    """Return a folder with site/ alone, made once per session, for code that imports sd-scripts and needs no models."""
    work = Path(tempfile.mkdtemp(prefix="tiny-site-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    write_site(work)
    return work


def write_site(work: Path) -> None:
    """Write WORK/site: sitecustomize, and a replacement of torchvision when it is missing."""
    installation().write_site(work)


def toy_model(data: Path, work: Path) -> dict[str, str]:
    """Add the base model "toy-flux" (Toy Flux) for sd-scripts to the data folder's models.toml: the tiny weights.

    Returns the trainer options that it also needs.
    """
    models = data / "models" / "toy-flux"
    models.mkdir(parents=True)
    files = {"pretrained_model_name_or_path": "flux", "clip_l": "clip_l", "t5xxl": "t5xxl", "ae": "ae"}
    for name in files.values():
        (models / f"{name}.safetensors").symlink_to(work / f"{name}.safetensors")
    rows = "\n".join(f'{flag} = "toy-flux/{name}.safetensors"' for flag, name in files.items())
    (data / "models.toml").write_text(TOY_MODEL.format(files=rows), encoding="utf-8")
    return {"tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": "32"}


TOY_MODEL = """\
[models.toy-flux]
name = "Toy Flux"
note = "For tests."
family = "flux"
licence = "none"
gated = false
backends = ["sd-scripts"]
[models.toy-flux.files]
{files}
[models.toy-flux.shape]
width = 64
double_blocks = 2
single_blocks = 4
double_parameters = 150_000
single_parameters = 60_000
other_parameters = 100_000
double_lora_sides = 3000
single_lora_sides = 1200
text_parameters = 1_000_000
text_tokens = 64
text_width = 64
vae_parameters = 500_000
[models.toy-flux.settings]
resolution = 64
mixed_precision = "no"
sample_steps = 2
"""
