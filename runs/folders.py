"""Creates a run on disk, renders it again, and lists the problems that prevent a start.

A run is checked and built in temporary folders that are renamed at the end: an error, a full disk or Ctrl-C leaves no
incomplete run and changes nothing that existed before.
"""

import functools
import glob
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from guards.checkpoint import writing_file
from presets import steps
from presets.steps import Images, weight_of
from runs import dataset, env_file, masks, mitigate, pictures, pin, staging, weights
from runs.command import direct, expanded, flags, samples
from runs.files import Fault, RunError, atomic_write, building, checksum, copy_with_times, explained
from runs.flags import check_extra
from runs.job import Job, made, resolve, respecified
from runs.paths import CHECKOUTS, ROOT, backend_venv, datasets_dir, entries, outputs_dir, script_name, venv_program
from runs.scripts import INSTALL, rendered, write, write_inputs

if TYPE_CHECKING:
    from runs.spec import RunSpec

# Characters of a path in Windows, and of the longest one of a run beside the folder of runs and twice the name:
# OUTPUTS\NAME\.NAME-step00000000-state.1234567.tmp\.hangproof.json.1234567.tmp
MAX_PATH, DEEP = 259, 62


def create(
    spec: "RunSpec",
    images: Path | Sequence[dataset.Source],
    on_note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Create the run's folder and its data set.

    Args:
        images: a folder, or images with their captions. The run's own data-set folder is used as it is.
        on_note: called with one sentence for each image that was changed and each warning.

    Returns:
        The run's folder.

    Raises:
        RunError: invalid images, a name that exists, an unknown flag, a full disk, no permission. Nothing was created.
    """
    from runs.spec import dumps, save

    if spec.extra or spec.backend in CHECKOUTS:  # a checkout can lack a flag of the tables
        check_extra(spec)
    samples(spec)
    if spec.store and "://" not in spec.store and not spec.store.startswith("~"):  # what copies works in another folder
        spec = spec.changed(store=os.path.abspath(spec.store))
    folder, data = outputs_dir() / spec.slug, datasets_dir() / spec.slug
    reuse = isinstance(images, str | Path) and data.is_dir() and Path(images).resolve() == data.resolve()
    with explained(f"create the run {spec.slug}"):
        if fault := name_fault(spec, data if reuse else None):
            raise RunError([fault])
        spec = with_own_save_dir(spec)
        if reuse:
            found = dataset.images_in(data)
            if not found:
                raise RunError(dataset.NO_IMAGES.format(where=data))
            for path in found:
                pictures.decoded(path)[0].close()
        sources = [] if reuse else dataset.gather(images, spec.trigger)
        made_data = False
        try:
            with building(folder) as work:
                if not reuse:
                    with building(data) as new:
                        dataset.ingest(sources, new, on_note, masks.supported(spec.backend))
                    made_data = True
                count = dataset.counts(data)
                spec = with_intervals(spec, count, dataset.read_captions(spec.slug).values())
                env_file.forget(folder)  # of an earlier run of this name whose folder was deleted by hand
                save(work, spec, folder)
                if spec.secrets:
                    on_note(env_file.kept_text(spec.secrets))
                write(work, made(resolve(spec, folder), dumps(spec).encode()))
        except BaseException:
            if made_data:
                shutil.rmtree(data, ignore_errors=True)
            raise
    return folder


def name_fault(spec: "RunSpec", own_data: Path | None = None) -> Fault | None:
    """Why the name of a new run cannot be used: a run or a data set has it, or it is too long; None when it is free.

    Names that differ only in case are the same folder on Windows and macOS, so they are refused everywhere.

    Args:
        own_data: a data set that may have the name, because the run uses it.
    """
    if (over := len(str(outputs_dir())) + 2 * len(spec.slug) + DEEP - MAX_PATH) > 0 and sys.platform == "win32":
        import ctypes

        if not ctypes.windll.ntdll.RtlAreLongPathsEnabled() & 0xFF:  # a BOOLEAN
            how = f"shorten the name by {-(-over // 2)} letters, or switch long paths on in Windows"
            return Fault("name", f"Windows takes {MAX_PATH} characters in a path, too few for its checkpoints; {how}")
    for kind, parent in (("run", outputs_dir()), ("data set", datasets_dir())):
        for taken in entries(parent):
            if taken.casefold() == spec.slug.casefold() and parent / taken != own_data:
                use = ", or use it as the images of this run" if kind == "data set" else ""
                why = f" in {parent / taken}; choose another name, or delete that {kind}{use}"
                if taken != spec.slug:
                    why = f", and Windows and macOS do not tell it from {spec.slug!r}; choose another name"
                shown = spec.name if taken == spec.slug else taken
                return Fault("name", f"A {kind} named {shown!r} already exists{why}")
    return None


def with_own_save_dir(spec: "RunSpec") -> "RunSpec":
    """The spec with a folder of its own in `save_dir`: runs of a sweep would resume and copy each other's states."""
    if not spec.save_dir or spec.edited:  # an edited script names the folder itself
        return spec
    given = Path(os.path.abspath(os.path.expanduser(spec.save_dir)))  # the trainer and the monitor work elsewhere
    # The run that it was made from has its own folder there.
    own = given.parent if given.name == spec.slug or (outputs_dir() / given.name).is_dir() else given
    own /= spec.slug
    if entries(own):
        raise RunError([Fault("save_dir", f"{own} has files already; delete them, or choose another name for the run")])
    return spec.changed(save_dir=str(own))


def planned_steps(spec: "RunSpec", images: Images) -> int:
    """Optimizer steps of a run, as its trainer counts them.

    Args:
        images: by folder, whose name may set repeats, their number or their buckets. Without buckets it is the least
            number for batch sizes above 1, because buckets do not fill evenly.
    """
    return steps.planned_steps(spec.model_dump(), images)


def with_intervals(spec: "RunSpec", images: Mapping[str, int], captions: Iterable[str] = ()) -> "RunSpec":
    """The spec with the save and sample intervals that a new run gets where it has none; unchanged without images.

    Checkpoints come every tenth of the run, at most 100 steps apart, and samples about every tenth of it
    (presets/defaults.toml), so that each LoRA that stays has samples of its step. The prompts are those of the spec,
    else the trigger word, else the first caption. Without any, samples are turned off.

    Args:
        images: their number by folder.
    """
    if not sum(images.values()):
        return spec
    steps, found = planned_steps(spec, images), dict[str, object]()
    if spec.save_every_n_steps is None:
        rule = presets.defaults()["save"]
        share = steps // rule["share_of_run"]
        found["save_every_n_steps"] = max(1, min(rule["at_most_every_n_steps"], share))
    if spec.sample_every_n_steps is None:
        first = "" if spec.prompts else spec.trigger.strip()
        if not spec.prompts and not first:
            first = next((text for one in captions if (text := dataset.one_line(one).replace("--", " "))), "")
            found["prompts"] = [first] if first else []
        save = epochs_interval(spec, images)
        every = _sample_interval(steps, save if 0 < save <= steps else steps)
        found["sample_every_n_steps"] = every if spec.prompts or first else 0
    return spec.changed(**found) if found else spec


def epochs_interval(spec: "RunSpec", images: Mapping[str, int]) -> int:
    """The steps between LoRAs that are saved by epochs; 0 where none are."""
    epoch = spec.model_copy(update={"epochs": 1, "max_train_steps": None})
    return spec.save_every_n_epochs * planned_steps(epoch, images)


def _sample_interval(total: int, save: int) -> int:
    """The steps between samples of a run of `total` steps that keeps a LoRA every `save` steps: half to twice a tenth
    of the run. The samples fall on those steps if they can, and then also on the last step."""
    tenth = max(1, total // presets.defaults()["samples"]["share_of_run"])
    parts = [save // n for n in range(1, 21) if save % n == 0]
    parts += [save * n for n in range(max(1, tenth // save - 5), tenth // save + 6)]
    fitting = [n for n in parts if tenth <= 2 * n <= 4 * tenth]
    return min(fitting, key=lambda n: (total % n != 0, abs(n - tenth)), default=tenth)


def render(folder: Path, source: Path | None = None) -> Path:
    """Make a run's job again from its `run.toml` and the tables of this version, and write its script.

    Args:
        source: the folder whose `run.toml` is used instead.

    Returns:
        The script's path.

    Raises:
        RunError: the spec is invalid or belongs to another run, or the folder cannot be written.
    """
    from runs.spec import load

    folder, source = Path(folder), Path(source or folder)
    spec = load(source)
    if spec.slug != folder.name:
        raise RunError(f"{source}/run.toml: name {spec.name!r} belongs to the folder {spec.slug}; change it back")
    check_extra(spec)
    with explained(f"write the script of {spec.slug}"):
        env_file.keep(folder, spec)
        write(folder, made(resolve(spec, folder), (source / "run.toml").read_bytes()))
    return folder / script_name()


def longer(fields: Mapping[str, object]) -> tuple[str, int] | None:
    """The field that sets a run's length ("epochs" or "max_train_steps") and its value; None where it is invalid."""
    field = "max_train_steps" if fields.get("max_train_steps") else "epochs"
    now = fields.get(field)
    return (field, now) if isinstance(now, int) else None


def train_longer(folder: Path, total: int) -> "RunSpec":
    """Raise the epochs of a run (or its steps, where max_train_steps limits it) in `run.toml`, the job and the script.

    Everything else stays as the job has it. The LoRA so far, which the longer run replaces, is kept under another name.

    Args:
        total: the total of epochs or steps, including those already trained.

    Raises:
        RunError: `total` is less than the current value, the spec is invalid, an edited script has no place for it, or
            the folder cannot be written.
    """
    from runs.spec import dumps, load, save

    spec, job = load(folder), pin.pinned(folder)
    settled = job.run_spec()
    found, as_made = longer(settled.model_dump()), longer(spec.model_dump())
    assert found is not None and as_made is not None, "a valid spec has epochs"
    field, now = found
    if field != as_made[0]:
        raise RunError([Fault("script", f"{script_name()} was edited by hand, and sets {field}; change it there")])
    if total < now:
        raise RunError([Fault(field, f"Must be {now} or more; the run is set to {now} already")])
    spec = spec.changed(**{field: total})
    if why := mitigate.unapplied(settled, settled.changed(**{field: total})):
        raise RunError([Fault("script", f"{why}; change it in {script_name()}")])
    longer_job = respecified(job, settled.changed(**{field: total}), dumps(spec).encode())
    lora, kept = (folder / f"{folder.name}{end}.safetensors" for end in ("", f"-{now}-{field.split('_')[-1]}"))
    with explained(f"change {folder.name}"):
        if job.run_toml != checksum((folder / "run.toml").read_bytes()):  # edited since it was made: that still holds
            longer_job = replace(longer_job, run_toml=job.run_toml)
        others = folder.glob(f"{glob.escape(folder.name)}-*.safetensors")
        if total > now and lora.is_file() and lora.stat().st_mtime_ns not in {p.stat().st_mtime_ns for p in others}:
            with writing_file(kept) as temporary:  # once, though the length may be raised again before it goes on
                copy_with_times(lora, temporary)
        write(folder, longer_job)
        save(folder, spec)
    return spec


def write_attempt(folder: Path, job: Job, attempt: int, resume: Path | None = None) -> Path:
    """Write the script of an attempt (1 is `train.sh` itself) and the files that it reads; returns the script's path.

    Args:
        job: the run's job with the changes of this attempt; `job.json` is not changed.
        resume: the state folder to resume from.

    Raises:
        RunError: a file cannot be written, or the script cannot hold a value.
    """
    folder = Path(folder)
    path = folder / script_name(attempt)
    with explained(f"write {path.name}"):
        local = job.spec.get("save_dir")
        if local and Path(local).is_relative_to(staging.base()):
            staging.prepare(folder)
        write_inputs(folder, job)
        atomic_write(path, rendered(job, resume), executable=True)
    return path


def problems(spec: "RunSpec", platform: str = sys.platform, ask: bool = False, with_data: bool = True) -> list[Fault]:
    """What prevents a start, each with the field that it concerns; empty when the run can start.

    Args:
        ask: also ask the model hub about a base model that is not on this machine; takes up to 8 seconds.
        with_data: whether the data set is judged as well, which a draft does not have yet.
    """
    found = [Fault("model", problem) for problem in weights.problems(spec, ask)]
    first, states = expanded(spec.extra.get("network_weights") or ""), (outputs_dir() / spec.slug).glob("*-state")
    if first and not any(states) and (why := weights.file_fault(ROOT / str(first))):  # a state has all weights
        found.append(Fault("extra", f"network_weights: {first} {why}; correct the path"))
    checkout = CHECKOUTS.get(spec.backend)
    if checkout is not None and not checkout.installed():
        fix = f"{INSTALL[spec.backend]}, or set {checkout.variable}_DIR"
        found.append(Fault("backend", f"{checkout.name} is not installed at {checkout.path()}; {fix}"))
    elif not _launcher_found(spec, platform):
        found.append(Fault("backend", f"no accelerate for the {spec.backend} backend; {INSTALL[spec.backend]}"))
    if platform == "darwin" and (kind := flags(spec, outputs_dir() / spec.slug, platform=platform).get("quantize")):
        text = f"this choice quantizes the base model ({kind}), which Apple's GPUs cannot train; choose more GPU memory"
        found.append(Fault("tier", text))
    own = checkout is None and not any(map(os.environ.get, ("TRAINER_PYTHON", "ACCELERATE")))
    if own and spec.trackers in ("tensorboard", "wandb") and importlib.util.find_spec(spec.trackers) is None:
        fix = f"run {sys.executable} -m pip install {spec.trackers}, or choose none"
        found.append(Fault("trackers", f"{spec.trackers} is not installed; {fix}"))
    model = presets.models()[spec.model]
    if model["control"] and not spec.control_dir:
        text = f"{model['name']} learns from pairs; set the folder that has a control image for each image"
        found.append(Fault("control_dir", text))
    if not with_data:
        return found
    data = datasets_dir() / spec.slug
    if not (images := dataset.images_in(data)):
        found.append(Fault("images", f"no images in {data}; add at least one image"))
    named = {image.with_suffix(""): image.name for image in images}
    if checkout and (twin := next((one for one in images if named[one.with_suffix("")] != one.name), None)):
        why = f"{checkout.name} would train one of them twice, as it caches images by the name before the suffix"
        text = f"{twin} and {named[twin.with_suffix('')]}: {why}; rename one, with a caption of that name"
        found.append(Fault("images", text))
    if model["control"] and (fault := unpaired(spec, (image.relative_to(data) for image in images))):
        found.append(fault)
    return found


def unpaired(spec: "RunSpec", images: Iterable[Path]) -> Fault | None:
    """The first image without a control image; None without a folder of them. images: their paths in the data set."""
    folder = Path(spec.control_dir).expanduser().absolute()

    @functools.cache
    def stems(inside: Path) -> set[str]:
        return {os.path.normcase(path.stem) for path in (folder / inside).glob("*.*")}

    for image in images if spec.control_dir else ():
        stem = Path(weight_of(image.parent.as_posix())[1]) / image.stem  # one with a weight is in a folder of its own
        if os.path.normcase(stem.name) not in stems(stem.parent):
            text = f"No control image {stem.as_posix()}.* in {folder}; add one for each image, under the same name"
            return Fault("control_dir", text)
    return None


def _launcher_found(spec: "RunSpec", platform: str) -> bool:
    """Whether the program that the script starts is there; an environment counts when it has accelerate."""
    names = ("TRAINER_PYTHON", "ACCELERATE") if direct(spec) else ("ACCELERATE",)
    if chosen := next(filter(None, map(os.environ.get, names)), ""):
        return shutil.which(chosen) is not None
    own = venv_program(backend_venv(spec.backend), "accelerate", platform)
    return own.is_file() or shutil.which("accelerate") is not None
