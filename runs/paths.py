"""The folders of runs, data sets, models and backends. A run is found by its name, slug or folder.

Everything that a user creates is in one data folder, so that one variable moves it to another disk.
"""

import contextlib
import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from presets.tables import ROOT, START, data_root
from runs.files import RunError, explained, unwritable

__all__ = ["ROOT", "START", "data_root"]

MAX_SLUG = 80
SWEEPS = ".sweeps"  # in outputs/
# Where things are. A relative path is one of the folder that the user is in; the page and the monitor work in another.
PLACES = (
    *("HANGPROOF_DATA", "HANGPROOF_LIMITS", "HANGPROOF_NOTIFY", "HANGPROOF_SHM", "HANGPROOF_LOCKS", "HF_HOME"),
    *(f"{name}_{what}" for name in ("SD_SCRIPTS", "MUSUBI") for what in ("DIR", "VENV")),
)
os.environ.update(  # Path.expanduser fails where there is no such user
    {name: str(Path(os.path.expanduser(os.environ[name])).absolute()) for name in PLACES if os.environ.get(name)}
)
RESERVED_NAMES = re.compile(r"CON|PRN|AUX|NUL|(COM|LPT)[0-9]", re.I)


def outputs_dir() -> Path:
    """The folder of all runs."""
    return data_root() / "outputs"


def datasets_dir() -> Path:
    """The folder of all data sets."""
    return data_root() / "datasets"


def config_dir() -> Path:
    """The folder of this account's settings and secrets."""
    base = os.environ.get("APPDATA") if os.name == "nt" else os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "hangproof"


def entries(folder: Path) -> list[str]:
    """The names in a folder; none where it does not exist."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def models_dir() -> Path:
    """The folder of model files."""
    return data_root() / "models"


@dataclass(frozen=True)
class Checkout:
    """A trainer that is a git checkout with an environment of its own.

    name: as users know it, and its folder where ./start.sh puts it, in the project folder. $VARIABLE_DIR and
    $VARIABLE_VENV name other folders. scripts: the folder of its scripts; marker: what every checkout has.
    """

    name: str
    variable: str
    scripts: str
    marker: str

    def path(self) -> Path:
        """The checkout (may not exist)."""
        return _from_environment(f"{self.variable}_DIR", self.name)

    def script(self, name: str) -> Path:
        """The path of one of its scripts (may not exist)."""
        return self.path() / self.scripts / name

    def installed(self) -> bool:
        """Whether a checkout is there."""
        return (self.path() / self.marker).exists()


CHECKOUTS = {
    "sd-scripts": Checkout("sd-scripts", "SD_SCRIPTS", ".", "library"),
    "musubi": Checkout("musubi-tuner", "MUSUBI", "src/musubi_tuner", "src/musubi_tuner/training"),
}
"""The checkouts by backend. The built-in trainer has none."""


def _from_environment(variable: str, folder: str) -> Path:
    given = os.environ.get(variable)
    return Path(given).expanduser().absolute() if given else ROOT / folder


def backend_venv(backend: str) -> Path:
    """The virtual environment of a backend (may not exist): `.venv`, or its checkout's, such as `.venv-musubi`."""
    checkout = CHECKOUTS.get(backend)
    return _from_environment(f"{checkout.variable}_VENV", f".venv-{backend}") if checkout else ROOT / ".venv"


def venv_program(venv: Path, program: str, platform: str = sys.platform) -> Path:
    """The path of a program in a virtual environment."""
    return venv / "Scripts" / f"{program}.exe" if platform.startswith("win") else venv / "bin" / program


def script_name(attempt: int = 1, platform: str = sys.platform) -> str:
    """The file name of an attempt's script; the first is the one that a person starts."""
    suffix = "bat" if platform.startswith("win") else "sh"
    return f"train.{suffix}" if attempt == 1 else f"train.attempt-{attempt}.{suffix}"


def check_folders() -> None:
    """Create the data folders and write a temporary file into each. RunError: one cannot be written."""
    for folder in (outputs_dir(), datasets_dir()):
        with explained(f"write into the data folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        if why := unwritable(folder):
            raise RunError(why)


def slug(name: str) -> str:
    """The folder and file name of a run: ASCII letters, digits, `_` and `-`, at most 80 characters, case kept.

    Raises:
        RunError: the name has no letter or digit, or Windows reserves it.
    """
    from slugify import slugify

    text = slugify(name, lowercase=False, regex_pattern=r"[^-a-zA-Z0-9_]+", max_length=MAX_SLUG).strip("-")
    if not re.search(r"[a-zA-Z0-9]", text):
        raise RunError("Use at least one letter or digit")
    if RESERVED_NAMES.fullmatch(text):
        raise RunError(f"Windows reserves the name {text}; choose another name")
    return text


def free_name(name: str) -> str:
    """`name`, or the first of `name 2`, `name 3`, … that no run, sweep or data set has, in any case of its letters.

    Of a name that leaves no room for the number in its folder's name, the folder's name is shortened.
    """
    places = (outputs_dir(), datasets_dir(), outputs_dir() / SWEEPS)
    taken = {entry.removesuffix(".json").casefold() for place in places for entry in entries(place)}
    if slug(name).casefold() not in taken:
        return name
    numbered = re.search(r"^(.*\S) (\d{1,6})$", name.strip())
    stem, number = (numbered[1], int(numbered[2])) if numbered else (name.strip(), 1)
    if not slug(f"{stem} 999999").endswith("-999999"):
        stem = slug(name)[: MAX_SLUG - 10]
    candidates = (f"{stem} {count}" for count in itertools.count(number + 1))
    return next(one for one in candidates if slug(one).casefold() not in taken)


def list_runs() -> list[Path]:
    """The folders of all runs, by name."""
    return with_file("run.toml")


def with_file(name: str) -> list[Path]:
    """The folders of runs that have this file, by name, without those that this account may not read.

    OSError: the folder of all runs cannot be listed, or its disk fails.
    """
    found = []
    for folder in (outputs_dir() / entry for entry in sorted(entries(outputs_dir())) if not entry.startswith(".")):
        with contextlib.suppress(PermissionError):
            if (folder / name).is_file():
                found.append(folder)
    return found


def run_folder(name: str | Path) -> Path:
    """The folder of a run. `name` is a folder with a `run.toml`, a run's slug, or its name.

    Raises:
        RunError: there is no such run; the message lists the runs.
    """
    text = os.fspath(name)
    candidates = [Path(text), outputs_dir() / text]
    with contextlib.suppress(RunError):
        candidates.append(outputs_dir() / slug(text))
    for candidate in candidates:
        with contextlib.suppress(OSError):  # a name that is too long, or a folder that may not be read
            if text and (candidate / "run.toml").is_file():
                return candidate.absolute()
    runs = [p.name for p in list_runs()]
    known = f"use one of {', '.join(runs)}" if runs else "create one with `python -m runs new`"
    raise RunError(f"no run {text!r} in {outputs_dir()}; {known}")
