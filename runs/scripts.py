"""The files that are rendered from a Job (runs/job.py). `train.sh` and `train.bat` are plain scripts that a person can
read, change and run, with one flag per line.

A script trains with or without the monitor; runs/quoting.py quotes its values. One process is started directly, several
by `accelerate launch`. Where caches are made by commands of their own, these run first with the same interpreter: the
first that fails ends the script with its exit code, and the next start runs all of them again, which keep what is
finished.
"""

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runs import custom_script, env_file
from runs.command import NODE_VARIABLES, module, words
from runs.files import RunError, atomic_write, checksum, explained
from runs.job import FILE, Job, dumps, resolve
from runs.paths import CHECKOUTS, ROOT, START, backend_venv, script_name, venv_program
from runs.quoting import Variable, quote, quote_cmd

if TYPE_CHECKING:
    import jinja2

    from runs.spec import RunSpec

MISSING = "no {program} for the {backend} backend: {path} does not exist and PATH has none; {install}"
NO_NODE = "{name} is not set: this run trains on {nodes} machines, and the variable holds {what}"
NOT_COPIED = "error: results could not be copied from {local} to {final}; free some space there and copy them by hand"
INSTALL = {"diffusers": f"run {START} once"} | {name: f"run {START} {name}" for name in CHECKOUTS}
UNGUARDED = "-m {} adds a limit to every wait. Without it: accelerate launch {} and the flags below"
TOGETHER = "{} processes train together{}: each on its own GPU (NCCL), or on the processor (gloo) where there is none."


def script(spec: "RunSpec", folder: Path, resume: Path | None = None, platform: str = sys.platform) -> str:
    """The text of the script of a spec, by the tables of this version.

    Args: as runs.command.arguments. Raises: as runs.job.resolve and `rendered`.
    """
    return rendered(resolve(spec, folder, platform), resume)


def rendered(job: Job, resume: Path | None = None) -> str:
    """The text of a job's script.

    Raises:
        RunError: the platform's script cannot hold a value, or several machines would train under Windows.
    """
    windows = job.platform.startswith("win")
    backend, nodes, gpus = (job.spec[key] for key in ("backend", "nodes", "gpus"))
    if nodes > 1 and windows:
        raise RunError("nodes: several machines train together under Linux only; set nodes to 1, or use WSL")
    *caching, training = job.commands
    options = [[Variable(word[1:]) if word.startswith("$") else word for word in line] for line in job.launch]
    flags = {**training["flags"], "resume": str(resume) if resume else False}
    _, guards, *guarded = start = module(backend, training["script"])
    comments = [UNGUARDED.format(guards, " ".join(path.split())) for path in guarded]
    if nodes * gpus > 1:
        comments.append(TOGETHER.format(nodes * gpus, f" on {nodes} machines" if nodes > 1 else ""))
    secrets = script_lines(job.spec.get("secrets", []), Path(job.places["run"]), job.platform)
    lines = [*options, start, *words(flags)]
    venv = backend_venv(backend)
    program, python = (venv_program(venv, name, job.platform) for name in ("accelerate", "python"))
    text = _template(windows, "train").render(
        job=job,
        root=str(ROOT),
        title=" ".join(f"Trains {job.slug}: {job.title}.".split()),
        comments=comments,
        secrets=secrets,
        no_node={n: NO_NODE.format(name=n, nodes=nodes, what=what) for n, what in NODE_VARIABLES.items()},
        launcher=str(program),
        no_launcher=MISSING.format(program="accelerate", backend=backend, path=program, install=INSTALL[backend]),
        python=str(python),
        no_python=MISSING.format(program="python", backend=backend, path=python, install=INSTALL[backend]),
        not_copied=NOT_COPIED.format(local=job.save_dir, final=job.places["run"]),
        before=[(one["what"], [module(backend, one["script"]), *words(one["flags"])]) for one in caching],
        lines=lines,
    )
    text = text.replace("\n", "\r\n") if windows else text
    if "edited" not in job.spec:
        return text
    mine, base = (job.spec["edited"][key] for key in ("script", "generated"))
    return with_lines(custom_script.merged(mine, base, text, job.platform)[0], secrets)


@functools.cache
def _template(windows: bool, name: str) -> "jinja2.Template":
    """The frame of a script, or of a part. Filters: `word`, `command` quote; `path`: a value between quotes of cmd's own commands."""
    import jinja2

    frames = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    word, continued = (quote_cmd, " ^\n  ") if windows else (quote, " \\\n  ")
    frames.filters["word"] = word
    frames.filters["command"] = lambda lines: continued.join(" ".join(map(word, line)) for line in lines)
    frames.filters["path"] = _in_quotes
    frames.filters["plain"] = lambda text: re.sub("[%^&|<>]", "", text)
    return frames.get_template(f"{name}.{'bat' if windows else 'sh'}")


def _in_quotes(value: str) -> str:
    """A value for cmd's own commands (`cd`, `set`, `if exist`), which take carets literally between quotes."""
    if any(c in value for c in '"\0\r\n\x1a'):
        raise RunError(f"a batch file cannot hold {value!r}; use a path or value without quotes and control characters")
    return value.replace("%", "%%")


def script_lines(names: Sequence[str], folder: Path, platform: str) -> str:
    """The lines of a script that read the file with the values of `names`; "" for none. For cmd, the file has plain
    NAME=VALUE lines."""
    windows, path = platform.startswith("win"), str(env_file.path_of(folder))
    return _template(windows, "secrets").render(names=names, path=path) if names else ""


def with_lines(text: str, lines: str) -> str:
    """A script that a person edited, with the lines that read the file, after the comments at its head."""
    marker = next((line for line in lines.splitlines() if "env_file=" in line), "")
    if not marker or marker in text:
        return text
    newline = "\r\n" if "\r\n" in text else "\n"
    rows = text.splitlines(keepends=True)
    head = next(
        (at for at, row in enumerate(rows) if row.strip() and not re.match(r"#|@?rem |@?echo off", row, re.I)),
        len(rows),
    )
    return "".join([*rows[:head], lines.replace("\n", newline), *rows[head:]])


def text_of(path: Path) -> str | None:
    """The text of a file of a run; None where it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None


def keep(folder: Path, job: Job, text: str) -> Job:
    """Write `job.json` for a script that stays as it is."""
    job = replace(job, script=checksum(text.encode("utf-8", "surrogateescape")))
    atomic_write(folder / FILE, dumps(job))
    return job


def write(work: Path, job: Job) -> Job:
    """Write the files that are rendered from a job, `job.json` last, into `work`. OSError, RunError: as `rendered`."""
    text = rendered(job)
    write_inputs(work, job)
    atomic_write(work / script_name(), text, executable=True)
    return keep(work, job, text)


def write_inputs(folder: Path, job: Job) -> list[str]:
    """Write the files that the trainer reads; the names of those that said something else. RunError: as `pinned`."""
    import tomlkit

    texts = {"dataset.toml": tomlkit.dumps(job.dataset), "sample_prompts.txt": job.prompts}
    different = [name for name, text in texts.items() if text_of(folder / name) != text]
    with explained(f"write the files of {job.slug}"):
        for name in different:
            atomic_write(folder / name, texts[name])
    return different
