"""A sweep: several runs that differ in a few numbers, such as rank and learning rate, with one copy of the images.

Decision: each combination is a run of its own, with its own folder, so that everything that works for a run works for
it. The images of all are the same files (hard links): they take their space once, and deleting one run leaves the
others whole. Caches that one run has made are linked for the next one before it starts. What belongs to a sweep is in
`outputs/.sweeps/NAME.json`; the queue trains its runs one after another (jobs/queue.py).
"""

import contextlib
import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guards.metrics import utc_now
from guards.reading import read_json
from runs.evolution import Losses
from runs.files import Fault, RunError, atomic_write, building, explained
from runs.growing import count_of
from runs.paths import datasets_dir, outputs_dir, slug

if TYPE_CHECKING:
    from runs.spec import RunSpec

FOLDER = ".sweeps"  # in outputs/
MOST = 24  # runs of a sweep
MOST_FIELDS = 4
WINDOW = 50  # steps that a loss is averaged over, at most a tenth of the run
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
    base: str
    fields: tuple[str, ...]
    runs: tuple[tuple[str, dict[str, float]], ...]
    created_at: str = ""


# Which runs ------------------------------------------------------------------------------------------------------------


def parse(texts: Iterable[str]) -> dict[str, list[float]]:
    """The values by field from `rank=8,16` texts.

    Raises:
        RunError: an unknown field, a value that is not a number, or too many.
    """
    from runs.spec import ALIASES

    found: dict[str, list[float]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        key = {"lr": "learning_rate", **ALIASES}.get(key, key)
        if key not in SHORT or not equals:
            raise RunError([Fault(key, f"{text!r}: write FIELD=VALUE,VALUE with one of {', '.join(SHORT)}")])
        numbers = []
        for word in values.replace(";", ",").split(","):
            if not word.strip():
                continue
            try:
                number = float(word)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise RunError([Fault(key, f"{word.strip()[:30]!r} is not a number; write for example {key}=8,16")])
            number = int(number) if number.is_integer() and key != "learning_rate" else number
            if number not in numbers:
                numbers.append(number)
        if numbers:
            found[key] = numbers
    return found


def combinations(base: "RunSpec", values: Mapping[str, Sequence[float]]) -> list["RunSpec"]:
    """The specs of the runs, named after their values (`cat-r8-lr1e-4`); the last field changes fastest.

    Raises:
        RunError: nothing to vary, more than MOST runs, a value that the field refuses, or two runs of one name.
    """
    fields = [key for key, numbers in values.items() if numbers]
    total = math.prod(len(values[key]) for key in fields)
    if not fields or total < 2:
        raise RunError([Fault("sweep", "Enter at least two values of one field, such as 8, 16 for the rank")])
    if len(fields) > MOST_FIELDS or total > MOST:
        limit = f"at most {MOST} runs of {MOST_FIELDS} fields are possible"
        raise RunError([Fault("sweep", f"These are {total} runs of {len(fields)} fields; {limit}")])
    specs = []
    for numbers in itertools.product(*(values[key] for key in fields)):
        chosen = dict(zip(fields, numbers, strict=True))
        parts = "-".join(f"{SHORT[key]}{number_text(number)}" for key, number in chosen.items())
        # Epochs have an effect only where no number of steps is set
        length = {"max_train_steps": None} if "epochs" in chosen and "max_train_steps" not in chosen else {}
        specs.append(base.changed(name=f"{base.name[: 70 - len(parts)]}-{parts}", **chosen, **length))
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


# Making them -----------------------------------------------------------------------------------------------------------


def create(
    base: str, specs: Sequence["RunSpec"], values: Mapping[str, Sequence[float]], data: Path, made: Sequence[Path] = ()
) -> Sweep:
    """Create the runs of a sweep; the runs that were made when one fails stay, and the message names it.

    Args:
        data: the data set whose images they share. made: runs of `specs` that exist already, the first ones.

    Raises:
        RunError: a name is taken, a spec is invalid, or the disk is full.
    """
    from runs import folders

    with explained(f"create the sweep {base}"):
        for spec in specs[len(made) :]:
            if fault := folders.name_fault(spec):
                raise RunError([fault])
        for spec in specs[len(made) :]:
            own = datasets_dir() / spec.slug
            with building(own) as new:
                link_tree(data, new, lambda path: CACHE not in path.parts)
            try:
                folders.create(spec, own)
            except BaseException:
                shutil.rmtree(own, ignore_errors=True)
                raise
        fields = tuple(key for key in values if values[key])
        chosen = tuple((spec.slug, {key: getattr(spec, key) for key in fields}) for spec in specs)
        sweep = Sweep(_free_name(base), base, fields, chosen, utc_now())
        (outputs_dir() / FOLDER).mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": 1, **vars(sweep)}, ensure_ascii=False, indent=1)
        atomic_write(outputs_dir() / FOLDER / f"{sweep.name}.json", text)
    return sweep


def _free_name(base: str) -> str:
    """A name that no sweep and no run has: `cat-sweep`, `cat-sweep-2`, …"""
    names = (slug(f"{base[:60]}-sweep" + (f"-{number}" if number > 1 else "")) for number in itertools.count(1))
    places = ((name, outputs_dir() / FOLDER / f"{name}.json", outputs_dir() / name) for name in names)
    return next(name for name, sweep, run in places if not sweep.exists() and not run.exists())


def is_cache(path: Path) -> bool:
    """Whether a file of a data set, by its path in it, is a cache: of the built-in trainer, or of sd-scripts."""
    return CACHE in path.parts or path.suffix == ".npz"


def link_tree(source: Path, target: Path, wanted: Callable[[Path], bool] = lambda path: True) -> int:
    """Make the files of `source` available in `target` too, where they are missing, without copying them; how many.

    Args:
        wanted: whether to link a file, by its path in `source`.

    A file is copied where the file system has no hard links. Links to elsewhere are left out. Raises OSError.
    """
    count = 0
    for where, _, names in os.walk(source):
        inside = Path(where).relative_to(source)
        own = target / inside
        for name in names:
            path = Path(where, name)
            unfinished = name.startswith(".") and name.endswith(".tmp")
            if path.is_symlink() or (own / name).exists() or unfinished or not wanted(inside / name):
                continue
            own.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, own / name)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                    raise
                shutil.copy2(path, own / name)
            count += 1
    return count


def share_caches(run: str) -> int:
    """Link the caches that earlier runs of its sweep have made, for a run that is about to start; how many files.

    Only runs with its resolution, model and trainer share them. A cache that does not fit is made again by the trainer.
    """
    sweep = next((one for one in all_sweeps() if run in dict(one.runs)), None)
    if sweep is None:
        return 0
    count, own = 0, _made_for(run)
    for other, _values in sweep.runs:
        if other == run or not own or _made_for(other) != own:
            continue
        with contextlib.suppress(OSError):
            if (datasets_dir() / other).is_dir() and (datasets_dir() / run).is_dir():
                count += link_tree(datasets_dir() / other, datasets_dir() / run, is_cache)
            if (outputs_dir() / other / "cache").is_dir():
                count += link_tree(outputs_dir() / other / "cache", outputs_dir() / run / "cache")
    return count


def _made_for(run: str) -> tuple[Any, ...]:
    """What the caches of a run depend on; () for a run that cannot be read."""
    import presets

    try:
        fields = presets.tables.read_toml(outputs_dir() / run / "run.toml")
    except (OSError, presets.PresetError):
        return ()
    return tuple(str(fields.get(key)) for key in ("model", "backend", "resolution"))


# What became of them ---------------------------------------------------------------------------------------------------


def all_sweeps() -> list[Sweep]:
    """The sweeps of which a run exists, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in (outputs_dir() / FOLDER).glob("*.json"):
            sweep = _read(path, path.stat().st_mtime_ns)
            if sweep is not None and any((outputs_dir() / run).is_dir() for run, _ in sweep.runs):
                found.append(sweep)
    return sorted(found, key=lambda one: (one.created_at, one.name), reverse=True)


def find(name: str) -> Sweep:
    """The sweep of this name. Raises RunError."""
    sweeps = all_sweeps()
    for sweep in sweeps:
        if sweep.name == name:
            return sweep
    known = f"use one of {', '.join(one.name for one in sweeps)}" if sweeps else "start one with `python -m jobs sweep`"
    raise RunError(f"no sweep {name[:100]!r}; {known}")


@lru_cache(maxsize=200)
def _read(path: Path, _changed_ns: int) -> Sweep | None:
    """A sweep from its file; None for a damaged one, or one whose runs would be elsewhere."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pairs = tuple(
            (str(run), {str(key): float(number) for key, number in chosen.items()}) for run, chosen in values["runs"]
        )
        sweep = Sweep(
            path.stem, str(values["base"]), tuple(map(str, values["fields"])), pairs, str(values["created_at"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sweep if all(run and Path(run).name == run and run[0] != "." for run, _ in pairs) else None


def table(sweep: Sweep) -> list[dict[str, Any]]:
    """One row for each run.

    Returns:
        [{"run", "values": {field: number}, "state", "steps", "final_loss", "best_loss", "val_loss", "lora": path or
        None, "seconds"}]; None where a value is not known. A loss is the mean of some steps: the last ones, or those
        with the lowest mean; val_loss is the lowest of the validations. state: that of its monitor, "new" or "deleted".
    """
    return [_row(run, values) for run, values in sweep.runs]


def _row(run: str, values: dict[str, float]) -> dict[str, Any]:
    folder = outputs_dir() / run
    status = read_json(folder / "status.json") or {}
    final, best, val = None, None, None
    with contextlib.suppress(OSError):
        metrics = folder / "metrics.jsonl"
        final, best, val = _losses(metrics, metrics.stat().st_mtime_ns)
    lora = folder / f"{run}.safetensors"
    seconds = status.get("elapsed_s")
    return {
        "run": run,
        "values": values,
        "state": str(status.get("state", "new")) if folder.is_dir() else "deleted",
        "steps": count_of(status.get("step")),
        "final_loss": final,
        "best_loss": best,
        "val_loss": val,
        "lora": str(lora) if lora.is_file() else None,
        "seconds": seconds if isinstance(seconds, int | float) else None,
    }


@lru_cache(maxsize=200)
def _losses(path: Path, _changed_ns: int) -> tuple[float | None, float | None, float | None]:
    """(final, best, lowest validation loss) of a run; the last line of a step counts, as it was trained last."""
    found = Losses(path)
    found.update()
    losses = found.between(0, len(found.by_step))
    val = min(found.validation.values(), default=None)
    if not losses:
        return None, None, val
    width = max(1, min(WINDOW, len(losses) // 10))
    sums = list(itertools.accumulate(losses, initial=0.0))
    means = [(sums[at] - sums[at - width]) / width for at in range(width, len(sums))]
    return means[-1], min(means), val


def lines(sweep: Sweep) -> list[str]:
    """The table as text, with one column for each swept field."""
    rows = table(sweep)
    validated = any(row["val_loss"] for row in rows)
    heads = ["state", "steps", "final loss", "best loss", *["validation"] * validated, "seconds", "LoRA"]
    cells = [[*sweep.fields, *heads]]
    for row in rows:
        numbers = [number_text(row["values"][key]) for key in sweep.fields if key in row["values"]]
        losses = [row["final_loss"], row["best_loss"], *[row["val_loss"]] * validated]
        texts = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        took = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
        cells.append([*numbers, row["state"], str(row["steps"]), *texts, took, Path(row["lora"] or "").name])
    widths = [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
