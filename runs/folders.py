"""Make a run on disk, render it again, say what stands in the way of a start.

Everything is checked and built in temporary folders beside their places and renamed at the end: an error, a full disk or
Ctrl-C leaves no half-made run behind, and what was there before stays.
"""

import math
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs import dataset, weights
from runs.command import dataset_toml, launcher, sample_prompts, samples
from runs.files import RunError, atomic_write, building, explained
from runs.paths import datasets_dir, outputs_dir, sd_scripts_dir
from runs.scripts import CURE, script, script_name

if TYPE_CHECKING:
    from runs.spec import RunSpec


def _silent(_: str) -> None:
    """The default listener."""


def create(
    spec: "RunSpec",
    images: Path | Iterable[Path],
    captions: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = _silent,
) -> Path:
    """Make the run's folder and its data set.

    Args:
        images: a folder, or files (images and .txt captions). The data-set folder of this very name is used as it is.
        captions: by image file name; an entry counts more than a .txt file.
        tell: called with a sentence for everything that was changed or is worth knowing.

    Returns:
        The run's folder.

    Raises:
        RunError: bad images, a name that exists, an unknown flag, a full disk, no permission: nothing has been made then.
    """
    from runs.flags import check_extra
    from runs.spec import save

    check_extra(spec)
    samples(spec)
    folder, data = outputs_dir() / spec.slug, datasets_dir() / spec.slug
    images = images if isinstance(images, str | Path) else list(images)
    reuse = isinstance(images, str | Path) and data.is_dir() and Path(images).resolve() == data.resolve()
    with explained(f"make the run {spec.slug}"):
        for place in (folder, *(() if reuse else (data,))):
            if place.exists() or place.is_symlink():
                raise RunError(_exists(place, spec.name))
        if reuse:
            count = len([dataset.check_image(path) for path in _some(dataset.images_in(data), data)])
        sources = [] if reuse else dataset.gather(images, captions, spec.trigger)
        made_data = False
        try:
            with building(folder) as work:
                if not reuse:
                    with building(data) as new:
                        count = len(dataset.ingest(sources, new, tell))
                    made_data = True
                spec = spec if spec.save_every_n_steps is not None else with_save_interval(spec, count)
                save(work, spec)
                _write(work, folder, spec)
        except BaseException:
            if made_data:
                shutil.rmtree(data, ignore_errors=True)
            raise
    return folder


def _exists(place: Path, name: str) -> str:
    if place.parent == outputs_dir():
        return f"a run called {name!r} exists: {place}; choose another name, or delete that folder"
    return (
        f"a data set called {name!r} exists: {place}; choose another name, delete that folder, "
        "or give it as the images to train on it again"
    )


def _some(images: list[Path], folder: Path) -> list[Path]:
    if not images:
        raise RunError(f"no images in {folder}; add at least one (10 to 30 make a good LoRA)")
    return images


def planned_steps(spec: "RunSpec", images: int) -> int:
    """Optimizer steps of a run on so many images. An estimate when the batch is above 1: buckets fill up unevenly."""
    if spec.max_train_steps:
        return spec.max_train_steps
    batches = math.ceil(math.ceil(images * spec.repeats / spec.batch_size) / spec.gpus)
    return spec.epochs * math.ceil(batches / spec.gradient_accumulation)


def with_save_interval(spec: "RunSpec", images: int) -> "RunSpec":
    """The spec with its steps between saved states: a tenth of the run, at most 100 (presets/defaults.toml)."""
    rule = presets.defaults()["save"]
    share = planned_steps(spec, images) // rule["share_of_run"]
    return spec.changed(save_every_n_steps=max(1, min(rule["at_most_every_n_steps"], share)))


def _write(work: Path, folder: Path, spec: "RunSpec") -> None:
    """Write what follows from a spec into `work`; `folder` is where it will be."""
    atomic_write(work / "dataset.toml", dataset_toml(spec))
    atomic_write(work / "sample_prompts.txt", sample_prompts(spec))
    atomic_write(work / script_name(), script(spec, folder), executable=True)


def render(folder: Path, spec: "RunSpec | None" = None) -> Path:
    """Write a run's script, data-set file and prompts again from its `run.toml` (or a given spec); returns the script.

    Raises:
        RunError: the spec is wrong, names another run, or the folder cannot be written.
    """
    from runs.flags import check_extra
    from runs.spec import load

    folder = Path(folder)
    spec = spec or load(folder)
    if spec.slug != folder.name:
        raise RunError(f"{folder}/run.toml: the name {spec.name!r} belongs to a folder {spec.slug!r}; change it back")
    check_extra(spec)
    with explained(f"write the script of {spec.slug}"):
        _write(folder, folder, spec)
    return folder / script_name()


def longer(fields: Mapping[str, object]) -> tuple[str, int] | None:
    """What is to be raised to train a run on: ("epochs" or "max_train_steps", how many now); None in a broken `run.toml`."""
    field = "max_train_steps" if fields.get("max_train_steps") else "epochs"
    now = fields.get(field)
    return (field, now) if isinstance(now, int) else None


def train_longer(folder: Path, total: int) -> "RunSpec":
    """Ask a run for more epochs, or for more steps where it stops after a number of them; `run.toml` and the script follow.

    Args:
        total: epochs (steps) in all, those trained already included.

    Raises:
        RunError: fewer than it asks for now, a spec that is wrong, or a folder that cannot be written.
    """
    from runs.spec import load, save

    spec = load(folder)
    field, now = longer(spec.model_dump())
    if total < now:
        raise RunError(f"{field}: {total} is less than the {now} it was to be trained for; type more than that")
    spec = spec.changed(**{field: total})
    render(folder, spec)
    with explained(f"change {folder.name}"):
        save(folder, spec)
    return spec


def write_attempt(folder: Path, spec: "RunSpec", attempt: int, resume: Path | None = None) -> Path:
    """Write the script of one attempt (1 is `train.sh` itself) and the files it reads; returns the script.

    Args:
        spec: what this attempt trains, mitigations applied; `run.toml` stays as the user wrote it.
        resume: the state folder to go on from.
    """
    folder = Path(folder)
    path = folder / script_name(attempt)
    with explained(f"write {path.name}"):
        atomic_write(folder / "dataset.toml", dataset_toml(spec))
        atomic_write(folder / "sample_prompts.txt", sample_prompts(spec))
        atomic_write(path, script(spec, folder, resume), executable=True)
    return path


def problems(spec: "RunSpec", platform: str = sys.platform, ask: bool = False) -> list[str]:
    """What stands in the way of a start, each as a sentence with its cure; empty when the run can start.

    Args:
        ask: ask the hub, too, about a base model that is to be fetched from there (seconds).
    """
    found = weights.problems(spec, ask)
    if spec.backend == "sd-scripts" and not (sd_scripts_dir() / "library").is_dir():
        found.append(f"sd-scripts is not installed at {sd_scripts_dir()}; {CURE['sd-scripts']}, or set SD_SCRIPTS_DIR")
    if not _launcher_found(spec, platform):
        found.append(f"no accelerate for the {spec.backend} backend; {CURE[spec.backend]}")
    data = datasets_dir() / spec.slug
    if not dataset.images_in(data):
        found.append(f"no images in {data}; add some")
    return found


def _launcher_found(spec: "RunSpec", platform: str) -> bool:
    import os

    given = os.environ.get("ACCELERATE")
    if given:
        return shutil.which(given) is not None
    return launcher(spec, platform).is_file() or shutil.which("accelerate") is not None
