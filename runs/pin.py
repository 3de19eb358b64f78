"""A run's job on disk: pinned when the run is made, and taken from its script where a person edited that.

A run of an earlier version has no `job.json`. What it trains is in its `train.sh`, and not in the tables of today: its
flags are read from there once, and pinned. The same holds for a `train.sh` that a person edited by hand since it was
written. Where the script has more than other flags, it is kept as an edited script (runs/custom_script.py), which every
attempt runs.

Whether it was edited on the page or by hand: the spec gets the settings of the script as far as it has fields or flags
for them, because the page, the time estimate and the monitor's mitigations read the spec. Halving the learning rate
halves the one that the script has.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import presets
from presets import PresetError
from presets.syntax import Command
from presets.training import commands, file_name, flags_of
from runs import custom_script, env_file
from runs.files import Fault, RunError, atomic_write, checksum, explained
from runs.job import FILE, Job, fields, for_platform, is_here, load, made, moved, places, resolve, respecified
from runs.paths import ROOT, script_name
from runs.quoting import quote
from runs.scripts import keep, rendered, script, text_of, write
from runs.spec import ALIASES, RESERVED_FLAGS, RunSpec, load as load_spec

EDITED = f"{script_name()} was edited by hand; every attempt now trains what it says"
UNREADABLE = f"{script_name()} starts no trainer that Hangproof knows: only attempt 1 runs it, later ones run job.json"
OLDER = (
    f"an earlier version made the run: what its {script_name()} trains is kept in job.json, which every attempt runs"
)

# Fields that dataset.toml has, so that a flag of the script does not change them.
IN_DATASET = ("repeats", "batch_size", "resolution", "keep_tokens")
# What removing the flag of a field means; other fields keep their value.
REMOVED: dict[str, Any] = {"max_train_steps": None, "sample_every_n_steps": 0, "save_every_n_epochs": 0, "trackers": ""}


def pinned(folder: Path, on_note: Callable[[str], None] = lambda text: None, restarts: bool = False) -> Job:
    """The job of a run, with the paths of this machine. It and its script are written where they are missing or stale.

    Args:
        on_note: called with a sentence about each thing that was taken over.
        restarts: the run is under way, so that a script that was edited meanwhile counts from the next start.

    Raises:
        RunError: `job.json` is damaged, the spec of a run without one is wrong, or a file cannot be written.
    """
    folder = Path(folder)
    job, text = load(folder), text_of(folder / script_name())
    with explained(f"write {folder.name}/{FILE}"):
        if job is None:
            return _of_older_run(folder, on_note)
        if not is_here(job, folder) or job.platform != sys.platform or text is None:
            job = for_platform(moved(job, places(folder, job.slug)), sys.platform)
            return write(folder, job)
        if not restarts and checksum(text.encode("utf-8", "surrogateescape")) != job.script:
            found = adopted(job, text)
            on_note(EDITED if found else UNREADABLE)
            return keep(folder, replace(found, digest=made(found, b"").digest) if found else job, text)
    return job


def place(folder: Path, own_spec: bool = False) -> Job:
    """Write the job that came from another machine for this one.

    Args:
        own_spec: it came without its run.toml, because there is one here: its fields count.
    """
    (folder / script_name()).unlink(missing_ok=True)  # of another job
    job = pinned(folder)
    if not own_spec:
        return job
    return write(folder, respecified(job, load_spec(folder), (folder / "run.toml").read_bytes()))


def _of_older_run(folder: Path, on_note: Callable[[str], None]) -> Job:
    spec = load_spec(folder)
    run_toml = (folder / "run.toml").read_bytes()
    # The digest is what the monitor's state of such a run has: a checksum of run.toml.
    job = replace(made(resolve(spec, folder), run_toml), digest=checksum(run_toml))
    text = text_of(folder / script_name())  # again: reading the spec has moved secrets out of it
    if text is None:
        return write(folder, job)
    found = adopted(job, text)
    if found and (here := _here(text, Path(str(found.flags.get("dataset_config"))).parent, folder)) != text:
        atomic_write(folder / script_name(), here, executable=True)
        text, found = here, adopted(job, here)
    on_note(OLDER if found else UNREADABLE)
    return keep(folder, found or job, text)


def _here(text: str, was: Path, folder: Path) -> str:
    """A script, with the paths of now where the folder `was` of its run, or Hangproof's, was moved or copied since.

    It must not train in those of before. One with a path that the shell needs in quotes stays as it is.
    """
    if was.name == folder.name:
        text = _replaced(text, str(was.parent.parent), str(folder.parent.parent), r"(?![\w.-])")
    root = re.search(r'^export PYTHONPATH=([^\s"]+)"', text, re.M)
    return _replaced(text, root[1], str(ROOT), r'(?=["\n]|/\.venv/)') if root else text


def _replaced(text: str, old: str, new: str, followed_by: str) -> str:
    plain = quote(old + new) == old + new
    return re.sub(re.escape(old) + followed_by, lambda _: new, text) if plain else text


# What an edited script says -------------------------------------------------------------------------------------------


def adopted(job: Job, text: str) -> Job | None:
    """The job that a script on disk says; None where it has no training command that can be read.

    The spec gets the settings of the script, because mitigations start from them.
    """
    if text == rendered(job):
        return job
    plain = replace(job, spec={name: value for name, value in job.spec.items() if name != "edited"})
    try:
        training = custom_script.only(text, job.platform)
        all_commands = commands(text, training.language)
        settled = with_settings(plain.run_spec(), text, Path(job.places["run"]), job.platform)
    except (RunError, PresetError):
        return None
    *caching, last = job.commands
    trains = {**last, "flags": _flags(training.command, training.script, last["flags"])}
    plain = replace(plain, commands=[*(_edited(one, all_commands) for one in caching), trains], spec=fields(settled))
    if (now := rendered(plain)) == text:
        return plain
    return replace(plain, spec={**plain.spec, "edited": {"script": text, "generated": now}})


def _edited(one: dict[str, Any], written: list[Command]) -> dict[str, Any]:
    """A command of a job with the flags that the script gives it."""
    for command in written:
        names = [file_name(word.shape) for word in command.words]
        if one["script"] in names:
            return {**one, "flags": _flags(command, names.index(one["script"]), one["flags"])}
    return one


def _flags(command: Command, script: int, known: dict[str, Any]) -> dict[str, Any]:
    """The flags of a command behind its script. One with a word that only the shell knows has its value of `known`."""
    out: dict[str, Any] = {}
    for flag, given in flags_of(command, script + 1).items():
        values = given.values
        one = values[0] if len(values) == 1 else values or True
        out[flag] = known.get(flag, False) if None in values else one
    return {**out, "resume": False}


def adopt(spec: RunSpec, text: str, folder: Path, platform: str = sys.platform) -> RunSpec:
    """The spec of a run that uses an edited script: with the settings of the script, as far as a spec has them.

    Args:
        spec: complete, as it is saved (with its save and sample intervals).

    Raises:
        RunError: Start would refuse the script; one fault of the field "script" for each reason.
    """
    text, secrets = env_file.of_script(text)
    base = env_file.with_values(spec.changed(edited=None), secrets)
    problems = custom_script.problems(text, script(base, folder, platform=platform), platform)
    if found := [one for one in problems if one.level == "error"]:
        raise RunError([Fault("script", f"Line {one.line}: {one.text}. {one.advice}") for one in found])
    settled = with_settings(base, text, folder, platform)
    return settled.changed(edited={"script": text, "generated": script(settled, folder, platform=platform)})


def _change(spec: RunSpec, flag: str, values: list[str | None] | None, known: dict[str, Any]) -> dict[str, Any]:
    """The fields of the spec for a flag that has other values in the script; None: the script does not have it."""
    field = ALIASES.get(flag, flag)
    if field in IN_DATASET:
        return {}
    if field in type(spec).model_fields:
        return {field: values[0]} if values else {field: REMOVED[field]} if field in REMOVED else {}
    if values is None:
        return {"extra": {**spec.extra, flag: False}}
    value: Any = True if not values else values if known.get("nargs") or len(values) > 1 else values[0]
    return {"extra": {**spec.extra, flag: value}}


def with_settings(spec: RunSpec, text: str, folder: Path, platform: str) -> RunSpec:
    """The spec with the flags that the edited script changed; a value that the spec does not take is left out."""
    from runs.flags import known_flags

    before = custom_script.flags(custom_script.only(script(spec, folder, platform=platform), platform))
    after = custom_script.flags(custom_script.only(text, platform))
    known = known_flags(spec.backend, presets.models()[spec.model]["family"])
    for flag in {**before, **after}:
        values = after.get(flag)
        if values == before.get(flag) or flag in RESERVED_FLAGS or (values is not None and None in values):
            continue
        try:
            spec = spec.changed(**_change(spec, flag, values, known.get(flag, {})))
        except RunError:
            continue
    return spec.changed(max_train_steps=None) if "max_train_epochs" in after else spec  # epochs decide in each trainer
