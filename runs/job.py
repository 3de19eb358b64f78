"""`Job`: a run resolved once. `job.json` holds what every attempt runs, whatever tables or `run.toml` say later.

A spec names a tier and a model; what they mean is in tables that an update changes. So the flags, the environment and
the data set are settled when the run is made, and `train.sh` is a rendering of them (runs/scripts.py). An attempt is
the job plus changes, each a patch of the job as in RFC 7396. A patch is the difference of two specs that are resolved
by the same tables: what both have in common stays as the job has it. Paths are rebuilt where the run's folder is now.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import presets
from guards.reading import commit
from runs.command import commands, dataset_tables, environment, launch_options, sample_prompts
from runs.files import RunError, checksum, typed
from runs.paths import CHECKOUTS, ROOT, datasets_dir, models_dir, slug

if TYPE_CHECKING:
    from runs.spec import RunSpec

FILE = "job.json"
VERSION = commit(ROOT)  # of the tables by which this process resolves specs
TRAINED = ("environment", "launch", "commands", "dataset", "prompts")  # what the trainer reads
Patch = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every attempt of a run runs. All values are those of JSON."""

    title: str  # what it trains, for the script's first line
    environment: dict[str, str]
    launch: list[list[str]]  # the words of `accelerate launch`, by option; [] where the trainer is started directly
    commands: list[dict[str, Any]]  # {"what", "script", "flags"} of each, in order; the last one trains
    dataset: dict[str, Any]  # dataset.toml
    prompts: str  # sample_prompts.txt
    spec: dict[str, Any]  # the fields of the RunSpec that was resolved
    platform: str  # a value of sys.platform
    places: dict[str, str]  # the folders in which paths begin
    versions: dict[str, str] = field(default_factory=dict)
    digest: str = ""  # of what is trained; the monitor compares it between two starts
    run_toml: str = ""  # checksum of the run.toml that it was made from
    script: str = ""  # checksum of train.sh as it was written

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the training command; one that is False is not written."""
        flags: dict[str, Any] = self.commands[-1]["flags"]
        return flags

    @property
    def slug(self) -> str:
        """The name of the run's folder and files."""
        return slug(self.spec["name"])

    @property
    def save_dir(self) -> str:
        """The folder that checkpoints are written to; "" is the run's folder."""
        return str(self.spec.get("save_dir", ""))

    def patched(self, patch: Patch) -> "Job":
        """The job after a change."""
        return replace(self, **{name: _patched(getattr(self, name), change) for name, change in patch.items()})

    def trains(self) -> Patch:
        """Everything that the trainer reads: the flags without those that are off, its files, its environment."""
        found = {name: getattr(self, name) for name in TRAINED}
        found["commands"] = [
            {**one, "flags": {flag: value for flag, value in one["flags"].items() if value is not False}}
            for one in self.commands
        ]
        return found

    def run_spec(self) -> "RunSpec":
        """The spec that was resolved. RunError: this version does not know its model or tier any more."""
        from runs.spec import make

        return make(self.spec)


def resolve(spec: "RunSpec", folder: Path, platform: str = sys.platform) -> Job:
    """The job of a spec by the tables of this version.

    Args: as runs.command.arguments.

    Raises:
        RunError: samples are turned on without a prompt.
    """
    title = f"a LoRA of {presets.models()[spec.model]['name']}, tier {spec.tier}, "
    return Job(
        title=f"{title}with {presets.backends()[spec.backend]['label']}",
        environment=environment(spec, platform),
        launch=launch_options(spec),
        commands=commands(spec, folder, platform),
        dataset=dataset_tables(spec),
        prompts=sample_prompts(spec),
        spec=fields(spec),
        platform=platform,
        places=places(folder, spec.slug),
    )


def fields(spec: "RunSpec") -> dict[str, Any]:
    """The fields of a spec that are set."""
    return {name: value for name, value in spec.public().items() if value is not None}


def made(job: Job, run_toml: bytes) -> Job:
    """The job of a run that is made now, from the `run.toml` with these bytes."""
    checkout = CHECKOUTS.get(job.spec["backend"])
    versions = {"hangproof": VERSION, "trainer": job.spec["backend"]}
    versions |= {"trainer_commit": commit(checkout.path())} if checkout else {}
    digest = checksum(json.dumps(job.trains(), sort_keys=True).encode())
    return replace(job, versions=versions, digest=digest, run_toml=checksum(run_toml))


# A change -------------------------------------------------------------------------------------------------------------


def difference(before: Job, after: Job) -> Patch:
    """The patch that makes `after` of `before`; {} where the trainer reads the same."""
    if before.trains() == after.trains():
        return {}
    names = ("title", "spec", *TRAINED)
    return _difference({n: getattr(before, n) for n in names}, {n: getattr(after, n) for n in names})


def respecifying(job: Job, spec: "RunSpec", platform: str) -> Patch:
    """The patch that a job needs for other fields or another system. RunError: as `run_spec`."""
    folder = Path(job.places["run"])
    return difference(resolve(job.run_spec(), folder, job.platform), resolve(spec, folder, platform))


def respecified(job: Job, spec: "RunSpec", run_toml: bytes) -> Job:
    """The job with the fields of `spec`: where those that it was made from say the same, it stays as it is.

    Raises:
        RunError: as `run_spec`.
    """
    patch = respecifying(job, spec, job.platform)
    changed = replace(job.patched(patch), spec=fields(spec), run_toml=checksum(run_toml))
    return made(changed, run_toml) if patch else changed


def _table(value: Any) -> dict[str, Any] | None:
    """A table, or a list of tables by index; None for another value."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, dict) else None


def _difference(before: dict[str, Any], after: dict[str, Any]) -> Patch:
    patch: Patch = {key: None for key in before if key not in after}
    for key, value in after.items():
        here = before.get(key)
        if key in before and here == value and type(here) is type(value):
            continue
        old, new = _table(here), _table(value)
        if old is None or new is None or type(here) is not type(value):
            patch[key] = value
        else:  # a list of tables with another length is another list
            patch[key] = _difference(old, new) if isinstance(value, dict) or len(old) == len(new) else value
    return patch


def _patched(value: Any, change: Any) -> Any:
    """A value after the change that a patch has for it."""
    table = _table(value)
    if not isinstance(change, dict) or table is None:
        return change
    kept = {key: item for key, item in table.items() if change.get(key, item) is not None}
    out = {key: _patched(item, change[key]) if key in change else item for key, item in kept.items()}
    if not isinstance(value, dict):
        return list(out.values())
    return out | {key: item for key, item in change.items() if key not in out and item is not None}


# Another place --------------------------------------------------------------------------------------------------------


def places(folder: Path, name: str) -> dict[str, str]:
    """The folders in which the paths of the run `name` begin, here."""
    data = datasets_dir() / name
    return {"run": str(folder), "data": str(data), "models": str(models_dir()), "root": str(presets.data_root())}


def is_here(job: Job, folder: Path) -> bool:
    """Whether the job's paths are those of this folder and machine. A link to a folder is that folder."""
    here = places(folder, job.slug)
    return all(os.path.realpath(job.places[key]) == os.path.realpath(here[key]) for key in here)


def moved(job: Job, here: dict[str, str]) -> Job:
    """The job with its paths in other folders, as `places` has them."""
    pairs = [(job.places[key], here[key]) for key in job.places]
    if job.platform.startswith("win"):  # dataset.toml has slashes
        pairs += [(old.replace("\\", "/"), new.replace("\\", "/")) for old, new in pairs]
    pairs.sort(key=lambda pair: -len(pair[0]))

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, list):
            return [move(item) for item in value]
        if isinstance(value, str):
            for old, new in pairs:
                if value == old or value.startswith((f"{old}/", f"{old}\\")):
                    return new + value[len(old) :]
        return value

    spec = {**job.spec, **({"control_dir": move(job.spec["control_dir"])} if "control_dir" in job.spec else {})}
    return replace(job, commands=move(job.commands), dataset=move(job.dataset), spec=spec, places=here)


def for_platform(job: Job, platform: str) -> Job:
    """The job on another system, whose data loader has other rules. RunError: as `run_spec`."""
    if job.platform == platform:
        return job
    return replace(job.patched(respecifying(job, job.run_spec(), platform)), platform=platform)


# job.json -------------------------------------------------------------------------------------------------------------


@dataclass
class _Command:
    """What every attempt reads of a command."""

    what: str
    script: str
    flags: dict[str, Any]


@dataclass
class _Places:
    """What every attempt reads of the places."""

    run: str
    data: str
    models: str
    root: str


@dataclass
class _Settings:
    """What every attempt reads of the spec."""

    name: str
    model: str
    backend: str
    nodes: int
    gpus: int
    save_dir: str = ""
    secrets: list[str] = field(default_factory=list)
    edited: dict[str, str] | None = None


def dumps(job: Job) -> str:
    """The text of `job.json`."""
    return json.dumps(asdict(job), ensure_ascii=False, indent=1) + "\n"


def loads(text: str) -> Job:
    """The job of a text. ValueError, TypeError: it is none; the key is named."""
    import tomlkit

    job: Job = typed(Job, json.loads(text), "the file")
    for kind, part in [(_Settings, job.spec), (_Places, job.places), *((_Command, one) for one in job.commands)]:
        typed(kind, part)
    if not job.commands or job.spec["backend"] not in presets.backends():
        raise ValueError("commands or spec.backend: it has no training command that this version knows")
    tomlkit.dumps(job.dataset)
    return job


def load(folder: Path) -> Job | None:
    """The job of a run; None for a run that has none yet. RunError: the file is damaged."""
    path = Path(folder) / FILE
    try:
        return loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; check its disk and its permissions") from error
    except (ValueError, TypeError, RecursionError) as error:
        advice = f"make the run again from its run.toml: python -m runs render {path.parent.name}"
        raise RunError(f"{path} cannot be read: {error}; {advice}") from error
