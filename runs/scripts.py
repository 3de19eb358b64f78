"""`train.sh` and `train.bat`: plain scripts that a person can read, change and run, with one flag per line.

A script trains with or without the monitor. It is a rendering of a Job (runs/job.py); runs/quoting.py quotes the
values. One process is started directly, several by `accelerate launch`. Where caches are made by commands of their own,
these run first with the same interpreter: the first that fails ends the script with its exit code, and the next start
runs all of them again, which keep what is finished.
"""

import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runs import custom_script, env_file
from runs.command import NODE_VARIABLES, module, words
from runs.files import RunError
from runs.job import Job, resolve
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
    secrets = env_file.script_lines(job.spec.get("secrets", []), Path(job.places["run"]), job.platform)
    lines = [*options, start, *words(flags)]
    venv = backend_venv(backend)
    program, python = (venv_program(venv, name, job.platform) for name in ("accelerate", "python"))
    text = _template(windows).render(
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
    return env_file.with_lines(custom_script.merged(mine, base, text, job.platform)[0], secrets)


@functools.cache
def _template(windows: bool) -> "jinja2.Template":
    """The frame of a script. Filters: `word`, `command` quote; `path`: a value between quotes of cmd's own commands."""
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
    return frames.get_template(script_name(platform="win32" if windows else ""))


def _in_quotes(value: str) -> str:
    """A value for cmd's own commands (`cd`, `set`, `if exist`), which take carets literally between quotes."""
    if any(c in value for c in '"\0\r\n\x1a'):
        raise RunError(f"a batch file cannot hold {value!r}; use a path or value without quotes and control characters")
    return value.replace("%", "%%")
