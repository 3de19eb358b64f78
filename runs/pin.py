"""A run's job on disk: pinned when the run is made, and taken from its train.sh where that says more.

A run of an earlier version has no `job.json`. What it trains is in its `train.sh`, and not in the tables of today: its
flags are read from there once, and pinned. The same holds for a `train.sh` that a person edited by hand since it was
written. Where the script has more than other flags, it is kept as an edited script (runs/custom_script.py), which every
attempt runs.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from presets import PresetError
from presets.reader import commands
from presets.syntax import Command
from presets.training import file_name, flags_of
from runs import custom_script
from runs.adopt_script import with_settings
from runs.files import RunError, atomic_write, checksum, explained
from runs.job import FILE, Job, dumps, fields, for_platform, is_here, load, made, moved, places, resolve, respecified
from runs.scripts import rendered, script_name

EDITED = "train.sh was edited by hand; every attempt now trains what it says"
UNREADABLE = (
    "train.sh starts no trainer that Hangproof knows: the first attempt runs it, later ones run what job.json says"
)
OLDER = "the run was made by an earlier version: what its train.sh trains is kept in job.json, which every attempt runs"


def pinned(folder: Path, on_note: Callable[[str], None] = lambda text: None, restarts: bool = False) -> Job:
    """The job of a run, with the paths of this machine. It and its script are written where they are missing or stale.

    Args:
        on_note: called with a sentence about each thing that was taken over.
        restarts: the run is under way, so that a script that was edited meanwhile counts from the next start.

    Raises:
        RunError: `job.json` is damaged, the spec of a run without one is wrong, or a file cannot be written.
    """
    folder = Path(folder)
    job, text = load(folder), _text(folder / script_name())
    with explained(f"write {folder.name}/{FILE}"):
        if job is None:
            return _of_older_run(folder, on_note)
        if not is_here(job, folder) or job.platform != sys.platform or text is None:
            job = for_platform(moved(job, places(folder, job.slug)), folder, sys.platform)
            return write(folder, job)
        if not restarts and checksum(text.encode("utf-8", "surrogateescape")) != job.script:
            found = adopted(job, text)
            on_note(EDITED if found else UNREADABLE)
            return _keep(folder, replace(found, digest=made(found, b"").digest) if found else job, text)
    return job


def place(folder: Path, own_spec: bool = False) -> Job:
    """Write the job that came from another machine for this one.

    Args:
        own_spec: it came without its run.toml, because there is one here: its fields count.
    """
    from runs.spec import load as load_spec

    (folder / script_name()).unlink(missing_ok=True)  # of another job
    job = pinned(folder)
    if not own_spec:
        return job
    return write(folder, respecified(job, load_spec(folder), (folder / "run.toml").read_bytes()))


def _of_older_run(folder: Path, on_note: Callable[[str], None]) -> Job:
    from runs.spec import load as load_spec

    spec = load_spec(folder)
    run_toml = (folder / "run.toml").read_bytes()
    # The digest is what the monitor's state of such a run has: a checksum of run.toml.
    job = replace(made(resolve(spec, folder), run_toml), digest=checksum(run_toml))
    text = _text(folder / script_name())  # again: reading the spec has moved secrets out of it
    if text is None:
        return write(folder, job)
    found = adopted(job, text)
    on_note(OLDER if found else UNREADABLE)
    return _keep(folder, found or job, text)


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None


def _keep(folder: Path, job: Job, text: str) -> Job:
    """Write `job.json` for a script that stays as it is."""
    job = replace(job, script=checksum(text.encode("utf-8", "surrogateescape")))
    atomic_write(folder / FILE, dumps(job))
    return job


def write(work: Path, job: Job) -> Job:
    """Write the files that are rendered from a job, and `job.json` last, into `work`. OSError, RunError: as `rendered`."""
    text = rendered(job)
    write_inputs(work, job)
    atomic_write(work / script_name(), text, executable=True)
    return _keep(work, job, text)


def write_inputs(folder: Path, job: Job) -> list[str]:
    """Write the files that the trainer reads; the names of those that said something else. RunError: as `pinned`."""
    import tomlkit

    texts = {"dataset.toml": tomlkit.dumps(job.dataset), "sample_prompts.txt": job.prompts}
    different = [name for name, text in texts.items() if _text(folder / name) != text]
    with explained(f"write the files of {job.slug}"):
        for name in different:
            atomic_write(folder / name, texts[name])
    return different


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
    found = []
    for one in caching:
        names = ((other, [file_name(word.shape) for word in other.words]) for other in all_commands)
        at = next(((other, words.index(one["script"])) for other, words in names if one["script"] in words), None)
        found.append({**one, "flags": _flags(*at, one["flags"]) if at else one["flags"]})
    found.append({**last, "flags": _flags(training.command, training.script, last["flags"])})
    plain = replace(plain, commands=found, spec=fields(settled))
    if (now := rendered(plain)) == text:
        return plain
    return replace(plain, spec={**plain.spec, "edited": {"script": text, "generated": now}})


def _flags(command: Command, script: int, known: dict[str, Any]) -> dict[str, Any]:
    """The flags of a command behind its script. One with a word that only the shell knows has its value of `known`."""
    out: dict[str, Any] = {}
    for flag, given in flags_of(command, script + 1):
        values = given.values
        one = values[0] if len(values) == 1 else values or True
        out[flag] = known.get(flag, False) if None in values else one
    return {**out, "resume": False}
