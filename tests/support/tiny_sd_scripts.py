"""kohya's real FLUX trainer on a CPU, with tiny models (benchmarks/tiny_flux.py), on the checkout of the tests.

Tests call `need()` (which skips with one line when the checkout or its environment is missing), then `workdir()` for
weights, tokenizers and images (made once per session), and `arguments(work, out)` with `command(...)`.
"""

import os
import shutil
from pathlib import Path

from benchmarks.tiny_flux import (  # noqa: F401 - for the tests
    SCRIPT,
    arguments,
    checkout,
    command,
    installation,
    losses,
    python,
    why_not,
    workdir,
    write_site,
)
from sd_scripts_patches import locate
from sd_scripts_patches.patch import Target
from sd_scripts_patches.trainers import ROOT  # noqa: F401 - for the tests

# One interpreter may serve all trainers; the project itself knows environments.
for variable in ("SD_SCRIPTS_VENV", "MUSUBI_VENV"):
    if os.environ.get("SD_SCRIPTS_PYTHON") and not os.environ.get(variable):
        os.environ[variable] = str(Path(os.environ["SD_SCRIPTS_PYTHON"]).absolute().parent.parent)


def checkouts() -> list[Path]:
    """Return the checkouts to test with: $SD_SCRIPTS_DIR (else sd-scripts/ in the project) and $SD_SCRIPTS_0111."""
    named = [checkout(), *filter(None, [os.environ.get("SD_SCRIPTS_0111")])]
    return [Path(one) for one in dict.fromkeys(map(str, named)) if (Path(one) / SCRIPT).is_file()]


def need(run: bool = True) -> None:
    """Skip the calling test with a reason when sd-scripts is missing."""
    import pytest

    if why_not(run):
        pytest.skip(why_not(run))


def home(symbol: str) -> str:
    """Return the module of this checkout that defines `symbol`, which was in library.train_util in v0.10.1."""
    return locate.locate(Target("library.train_util", symbol), checkout()).module


def environment(work: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a training process on the tiny models; `extra` wins. It finds our fault injectors."""
    found = installation().environment(work, **extra)
    return found | {"PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(Path(__file__).parent)])}


def copy_of(work: Path, folder: Path) -> Path:
    """Copy images and captions to `folder`, for runs that write caches beside them."""
    return Path(shutil.copytree(work / "images", folder / "images"))
