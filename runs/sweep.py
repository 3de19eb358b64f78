"""A sweep: several runs that differ in a few numbers, such as rank and learning rate, with one copy of the images.

Decision: each combination is a run of its own, with its own folder, so that everything that works for a run works for
it. The images of all are the same files (hard links): they take their space once, and deleting one run leaves the
others whole. Caches that one run has made are linked for the next one before it starts. What belongs to a sweep is in
`outputs/.sweeps/NAME.json`; the queue trains its runs one after another (jobs/queue.py).
"""

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from guards.checkpoint import files_below
from guards.metrics import utc_now
from guards.reading import read_json
from runs.files import Fault, RunError, atomic_write, building, copy_with_times, explained, typed
from runs.paths import SWEEPS, datasets_dir, free_name, outputs_dir, slug

if TYPE_CHECKING:
    from runs.dataset import Source
    from runs.spec import RunSpec

MOST = 24  # runs of a sweep
# Numbers that can be swept, with the letters that stand for them in a run's name.
SHORT = {
    "rank": "r",
    "alpha": "a",
    "learning_rate": "lr",
    "epochs": "e",
    "max_train_steps": "s",
    "batch_size": "b",
    "repeats": "n",
    "resolution": "px",
    "gradient_accumulation": "ga",
    "seed": "seed",
}
CACHE = ".hangproof-cache"  # of the built-in trainer, beside the images; no folder of images is hidden


@dataclass(frozen=True)
class Sweep:
    """A sweep on disk. `runs`: the names of their folders, with their values, in the order of training."""

    name: str
    runs: tuple[tuple[str, dict[str, float]], ...]
    created_at: str = ""


# Which runs -----------------------------------------------------------------------------------------------------------


def parse(texts: Iterable[str]) -> dict[str, list[float]]:
    """The values by field from `rank=8,16` texts.

    Raises:
        RunError: an unknown field, a value that is not a number, or too many.
    """
    from runs.spec import ALIASES, MEANT

    found: dict[str, list[float]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        key = (MEANT | ALIASES).get(key, key)
        if key not in SHORT or not equals:
            raise RunError([Fault(key, f"{text!r}: write FIELD=VALUE,VALUE with one of {', '.join(SHORT)}")])
        for word in filter(None, map(str.strip, values.replace(";", ",").split(","))):
            try:
                number, whole = float(word), int(float(word))  # which NaN and infinity have not
            except (ValueError, OverflowError):
                raise RunError([Fault(key, f"{word[:30]!r} is not a number; write for example 8,16")]) from None
            number = whole if whole == number and key != "learning_rate" else number
            if number not in found.setdefault(key, []):
                found[key].append(number)
    return found


def combinations(base: "RunSpec", values: Mapping[str, Sequence[float]]) -> list["RunSpec"]:
    """The specs of the runs, named after their values (`cat-r8-lr1e-4`); the last field changes fastest.

    Raises:
        RunError: nothing to vary, more than MOST runs, a value that the field or an edited script refuses, or two runs
            of one name.
    """
    from runs import mitigate

    total = math.prod(map(len, values.values()))
    if total < 2:
        raise RunError([Fault("sweep", "Enter at least two values of one field, such as 8, 16 for the rank")])
    if total > MOST:
        raise RunError([Fault("sweep", f"These are {total} runs; at most {MOST} are possible")])
    if "learning_rate" in values and base.extra.get("unet_lr"):
        text = "The extra option unet_lr decides the learning rate, so all runs would be the same; remove it first"
        raise RunError([Fault("sweep", text)])
    specs = []
    for numbers in itertools.product(*values.values()):
        chosen = dict(zip(values, numbers, strict=True))
        parts = "-".join(f"{SHORT[key]}{number_text(number)}" for key, number in chosen.items())
        # Epochs have an effect only where no number of steps is set
        length = {"max_train_steps": None} if "epochs" in chosen and "max_train_steps" not in chosen else {}
        name = f"{base.name[: 70 - len(parts)]}-{parts}"
        if not slug(name).endswith(slug(parts)):  # in Latin letters, the folder's name would be too long
            name = f"{base.slug[: 70 - len(parts)]}-{parts}"
        specs.append(base.changed(name=name, **chosen, **length))
        if why := mitigate.unapplied(base, specs[-1]):
            raise RunError([Fault("sweep", why)])
    names = [spec.slug.casefold() for spec in specs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RunError([Fault("sweep", f"Two runs would have the name {min(twice)}; use values that differ more")])
    return specs


def number_text(number: float) -> str:
    """A number for a name: `8`, `0.5`, `1e-4`, `1.5e-4`."""
    if number and abs(number) < 0.01:
        mantissa, exponent = f"{number:.6e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{number:g}"


# Making them ----------------------------------------------------------------------------------------------------------


def create(
    base: str, specs: Sequence["RunSpec"], values: Mapping[str, Sequence[float]], images: Path | Sequence["Source"]
) -> Sweep:
    """Create the runs of a sweep: all of them, or none.

    Args:
        images: what they share: a data set, or images with their captions.

    Raises:
        RunError: a name is taken, an image or a spec is invalid, or the disk is full.
    """
    from runs import folders

    with explained(f"create the sweep {base}"):
        if faults := list(filter(None, map(folders.name_fault, specs))):
            raise RunError(faults)
        with contextlib.ExitStack() as undo:
            for spec in specs:
                own = datasets_dir() / spec.slug
                if isinstance(images, Path):
                    with building(own) as new:
                        link_tree(images, new, lambda path: CACHE not in path.parts)
                    undo.callback(shutil.rmtree, own, ignore_errors=True)
                    images = own
                undo.callback(shutil.rmtree, folders.create(spec, images), ignore_errors=True)
                undo.callback(shutil.rmtree, own, ignore_errors=True)
                images = own
            chosen = tuple((spec.slug, {key: getattr(spec, key) for key in values}) for spec in specs)
            sweep = Sweep(slug(free_name(f"{base[:60]} sweep")), chosen, utc_now())
            (outputs_dir() / SWEEPS).mkdir(parents=True, exist_ok=True)
            text = json.dumps({"version": 1, **vars(sweep)}, ensure_ascii=False, indent=1)
            atomic_write(outputs_dir() / SWEEPS / f"{sweep.name}.json", text)
            undo.pop_all()
    return sweep


def link_tree(source: Path, target: Path, wanted: Callable[[Path], bool]) -> int:
    """Make the files of `source` available in `target` too, where they are missing, without copying them; how many.

    Args:
        wanted: whether to link a file, by its path in `source`.

    A file is copied where the file system has no hard links. Links to elsewhere are left out. Raises OSError.
    """
    count = 0
    for path in files_below(source):
        inside = path.relative_to(source)
        unfinished = path.name.startswith(".") and path.name.endswith(".tmp")
        if path.is_symlink() or not path.is_file() or (target / inside).exists() or unfinished or not wanted(inside):
            continue
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target / inside)
        except OSError:
            copy_with_times(path, target / inside)
        count += 1
    return count


def share_caches(run: str) -> int:
    """Link the caches that earlier runs of its sweep have made, for a run that is about to start; how many files.

    Only runs with its resolution and its images share them: a new run can have the name of a deleted one of the sweep.
    """
    count, outputs, datasets, own = 0, outputs_dir(), datasets_dir(), _files(datasets_dir() / run)
    for sweep in all_sweeps():
        made_for = {name: values.get("resolution") for name, values in sweep.runs}
        for other in made_for:
            if run in made_for and other != run and made_for[other] == made_for[run]:
                with contextlib.suppress(OSError):  # such as of an image that the other run does not have
                    if all(_stamp(path) == _stamp(datasets / other / inside) for inside, path in own):
                        count += link_tree(datasets / other, datasets / run, _is_cache)
                        count += link_tree(outputs / other / "cache", outputs / run / "cache", lambda path: True)
    return count


def _files(data: Path) -> list[tuple[Path, Path]]:
    """(path inside, path) of the images and captions of a data set."""
    found = ((path.relative_to(data), path) for path in files_below(data) if path.is_file())
    return [one for one in found if not _is_cache(one[0])]


def _stamp(path: Path) -> tuple[int, int]:
    """What two links to a file, and a copy that link_tree made, have in common."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _is_cache(path: Path) -> bool:
    """Whether a file of a data set, by its path in it, is a cache: of the built-in trainer, or of sd-scripts."""
    return CACHE in path.parts or path.suffix == ".npz"


# Reading them ---------------------------------------------------------------------------------------------------------


def all_sweeps() -> list[Sweep]:
    """The sweeps of which a run exists, newest first; not a damaged one, or one whose runs would be elsewhere."""
    found = []
    for path in (outputs_dir() / SWEEPS).glob("*.json"):
        with contextlib.suppress(OSError, TypeError, ValueError):
            sweep = replace(typed(Sweep, read_json(path)), name=path.stem)
            folders = [outputs_dir() / run for run, _ in sweep.runs]
            inside = all(folder.parent == outputs_dir() and folder.name[0] != "." for folder in folders)
            if inside and any(folder.is_dir() for folder in folders):
                found.append(sweep)
    return sorted(found, key=lambda one: (one.created_at, one.name), reverse=True)
