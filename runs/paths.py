"""Where runs, data sets, models and the backends' environments are; a run is found by its name, slug or folder.

Everything a user makes lies under one data root, so that moving it (a second disk, a test) is one variable.
"""

import os
import re
import sys
from pathlib import Path

from presets.tables import ROOT, data_root
from runs.files import RunError

__all__ = ["ROOT", "data_root"]

MAX_SLUG = 80
RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(10))}


def outputs_dir() -> Path:
    """The folder of all runs."""
    return data_root() / "outputs"


def datasets_dir() -> Path:
    """The folder of all data sets."""
    return data_root() / "datasets"


def models_dir() -> Path:
    """The folder of model files."""
    return data_root() / "models"


def sd_scripts_dir() -> Path:
    """The checkout of kohya's sd-scripts: `$SD_SCRIPTS_DIR`, else `sd-scripts/` in the project folder (may not exist)."""
    given = os.environ.get("SD_SCRIPTS_DIR")
    return Path(given).expanduser().absolute() if given else ROOT / "sd-scripts"


def backend_venv(backend: str) -> Path:
    """The environment a backend trains in (may not exist): the project's own, or `$SD_SCRIPTS_VENV`."""
    if backend == "diffusers":
        return ROOT / ".venv"
    given = os.environ.get("SD_SCRIPTS_VENV")
    return Path(given).expanduser().absolute() if given else ROOT / ".venv-sd-scripts"


def venv_program(venv: Path, program: str, platform: str = sys.platform) -> Path:
    """The path of a program of a virtual environment on a platform."""
    return venv / "Scripts" / f"{program}.exe" if platform.startswith("win") else venv / "bin" / program


def slug(name: str) -> str:
    """The folder and file name of a run called `name`: ASCII letters, digits, `_` and `-`, case kept, at most 80 long.

    Raises:
        RunError: nothing is left of the name, or Windows reserves what is.
    """
    from slugify import slugify

    text = slugify(name, lowercase=False, regex_pattern=r"[^-a-zA-Z0-9_]+", max_length=MAX_SLUG).strip("-")
    if not re.search(r"[a-zA-Z0-9]", text):
        raise RunError(f"the name {name!r} has no letter or digit to make a folder name of; add some, e.g. 'my-lora'")
    if text.upper() in RESERVED:
        raise RunError(f"the name {name!r} would make a folder {text!r}, which Windows reserves; choose another")
    return text


def list_runs() -> list[Path]:
    """The folders of all runs, by name."""
    return sorted(p.parent for p in outputs_dir().glob("*/run.toml") if not p.parent.name.startswith("."))


def run_folder(name: str | Path) -> Path:
    """The folder of the run that `name` means: a folder with a `run.toml`, a run's slug, or its name as typed.

    Raises:
        RunError: there is none; the message lists those there are.
    """
    text = os.fspath(name)
    for candidate in (Path(text), outputs_dir() / text):
        if text and (candidate / "run.toml").is_file():
            return candidate.absolute()
    try:
        candidate = outputs_dir() / slug(text)
    except RunError:
        candidate = None
    if candidate and (candidate / "run.toml").is_file():
        return candidate
    runs = [p.name for p in list_runs()]
    there = f"there are: {', '.join(runs)}" if runs else "there is none yet"
    raise RunError(f"no run {text!r} in {outputs_dir()}; {there}")
