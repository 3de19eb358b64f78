"""The lower part of a run: which rank is stuck, a test of its start, and the files that run it in another place.

Each is a command of ours (`python -m launch …`, `python -m monitor diagnose`) that runs in the background (ui/jobs.py):
the page shows what the command prints, and the files that it wrote into the run's folder. What a place needs is looked
up when this part is opened, not when the page is: the page's config stays small, and no library of a cloud is imported
into its server.
"""

import functools
import importlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import gradio as gr
from markupsafe import Markup

import runs
from launch import skypilot
from launch.__main__ import COMMANDS
from launch.common import LaunchError
from runs.dataset import counts
from runs.files import RunError
from runs.manage import size_text
from ui import jobs, served
from ui.html import box, duration, esc, region
from ui.new import rehearsal
from ui.run import cards, fold, view
from ui.run.fold import QUIET

MINUTES = 60.0
TEXT_BYTES = 200_000  # of a file that is shown; a longer one is only a download
VALUE = re.compile(r"[^\x00-\x1f\x7f]{0,300}")


class Place(NamedTuple):
    """Where a run can go. needs: a program (or a variable, in capitals) without which it cannot be submitted from here.

    labels: of the command's options (OPTIONS of its module) that the page shows.
    """

    label: str
    needs: str
    labels: dict[str, str]


SECRET = {"--secret": "Names of secret variables"}
RENTED = {"--gpu": "GPU", "--disk": "Disk in GB", **SECRET}
SPOT = {**RENTED, "--on-demand": "No spot machines"}
NODES = {"--partition": "Partition", "--time": "Time limit", "--account": "Account", "--gpus": "GPUs of each node"}
PLACES = {  # by the command that writes its files
    "slurm": Place("Slurm cluster", "sbatch", {**NODES, "--gpus-type": "Type of GPU", "--mem": "Memory of each node"}),
    "skypilot": Place("SkyPilot (any cloud)", "sky", SPOT),
    "docker": Place("Docker", "docker", {"--image": "Container image", **SECRET}),
    "runpod": Place("RunPod", "RUNPOD_API_KEY", {**RENTED, "--image": "Container image"}),
    "vast": Place("Vast.ai", "sky", SPOT),
    "bundle": Place("One file (ZIP)", "", {"--models": "Add the files of the base model"}),
}
ABOUT_DIAGNOSE = "What each rank did last, its stacks, and which rank is stuck."
ABOUT_REHEARSE = "Two steps, a sample, a checkpoint and a resume on the real model, in about two minutes."


def options(kind: str) -> list[tuple[str, str, Any, str]]:
    """(flag, label, default, help) of each option of a command that the page shows."""
    module = importlib.import_module(COMMANDS[kind][0])
    rows = {words.partition(" ")[0]: (default, text) for words, default, text in module.OPTIONS}
    return [(flag, label, *rows[flag]) for flag, label in PLACES[kind].labels.items()]


def missing(place: Place) -> str:
    """Why a run cannot be submitted from this machine; "" where it can be tried."""
    if place.needs.isupper() and not os.environ.get(place.needs):
        return f"Set {place.needs} before you start Hangproof to start it from here."
    if place.needs == "sky":
        try:
            skypilot.program()
        except LaunchError as error:
            return f"{error}."
    elif place.needs and not place.needs.isupper() and shutil.which(place.needs) is None:
        return f"{place.needs} is not installed on this machine. Copy the files to one that has it."
    return ""


def write_files(folder: Path, kind: str, values: Sequence[Any], submit: bool = False) -> None:
    """Start the command that writes the files for a place; with `submit`, it starts the run there. Raises RunError."""
    words = arguments(kind, values)
    if submit and (reason := missing(PLACES[kind])):
        raise RunError(reason)
    if kind == "bundle":
        words.append(f"--output={folder / folder.name}.zip")
    command = ["launch", kind, str(folder), *words, *["--submit"] * submit, "--json"]
    jobs.start(folder, f"launch-{kind}", command, limit_s=60 * MINUTES)


def arguments(kind: str, values: Sequence[Any]) -> list[str]:
    """The options of a command from the values of its fields. RunError: one is missing, or not one line."""
    words = []
    for (flag, label, default, _), value in zip(options(kind), values, strict=True):
        if default is False:
            words += [flag] * (value is True)
            continue
        text = str(value or "").strip()
        if not VALUE.fullmatch(text):
            raise RunError(f"{label}: Use one line of at most 300 characters")
        if default is ... and not text:
            raise RunError(f"{label}: Enter a value")
        each = text.split() if default == [] else [text]
        words += [f"{flag}={one}" for one in each if one]  # with =, a value is never another option
    return words


# What the commands did ------------------------------------------------------------------------------------------------

ERROR_LINES = 12


def result(folder: Path, name: str) -> str:
    """What a job did, as markup: its state, its file, what it printed. "" where it was never started."""
    job = jobs.read(folder, name)
    if job is None:
        return ""
    printed, values, errors = jobs.output(folder, name)
    busy, errors = job.state == "running", errors.strip()
    said = f"Running for {duration(job.seconds)}…" if busy else jobs.ENDED.get(job.state, job.state)
    problems = errors.splitlines()[-ERROR_LINES:] if job.state not in ("running", "done") else []
    file = Markup(written(folder, values)) if name.startswith("launch-") else ""
    text = "\n".join(filter(None, (printed.strip(), errors if busy else "")))
    return cards.CARD("job", job.state, said, Markup(box(map(esc, problems))), file, text)


def written(folder: Path, values: Any) -> str:
    """The file of the run's folder that a command's JSON names, with its text and a download; "" for any other."""
    named = (values.get("file") or values.get("script")) if isinstance(values, dict) else None
    try:
        path = Path(str(named)).resolve(strict=True)
        name, size = path.relative_to(folder.resolve()).as_posix(), path.stat().st_size
        data = path.read_bytes() if size <= TEXT_BYTES else b"\0"
    except (OSError, ValueError):
        return ""
    text = "" if b"\0" in data else data.decode("utf-8", "replace")
    sent = path.suffix.lower() in served.DOWNLOADS
    if not text and not sent:
        return ""
    address = served.file_url(path) if sent else f"data:text/plain;charset=utf-8,{quote(text)}"
    return cards.CARD("file", name, path.name, size_text(size), address, text)


def _ranks(folder: Path) -> str:
    """The rank report of a run under way, from the heartbeats alone: no process is disturbed."""
    from monitor.cli.commands import rank_report

    lines = rank_report(folder) if view.read(folder).running else []
    return region("Rank report", esc("\n".join(lines))) if lines else ""


# The part of the page -------------------------------------------------------------------------------------------------

ASK, SURE = "Write and submit", "Submit now? It can cost money"
NO_STORE = "This run has no store. A rented machine loses its disk, so set Store in its run.toml, or in a new LoRA under More settings."


def draw(folder: Path) -> None:
    """Make the components of the part."""
    store = runs.load(folder).store
    trains = view.read(folder).running

    def look(name: str) -> tuple[bool, str]:
        if name == "rehearse":
            return rehearsal.shown(folder, lambda: runs.load(folder), lambda: counts(runs.datasets_dir() / folder.name))
        return jobs.running(folder, name), result(folder, name)

    def follow(name: str, go: gr.Button, begin: Callable[..., None], inputs: list[Any] | None = None) -> None:
        fold.job(go, begin, functools.partial(look, name), lambda: jobs.cancel(folder, name), name, inputs)

    def check(package: str, name: str, minutes: int, title: str, about: str, label: str, can: bool = True) -> None:
        def begin() -> None:
            forget = functools.partial(rehearsal.forget, folder) if name == "rehearse" else lambda: None
            jobs.start(folder, name, [package, name, str(folder), "--json"], minutes * MINUTES, forget)

        with gr.Accordion(title, open=jobs.running(folder, name), elem_id=f"check-{name}"):
            fold.say(about, "hp-hint")
            go = gr.Button(label, variant="primary", size="sm", elem_id=f"start-{name}", interactive=can)
            follow(name, go, begin)

    if trains or jobs.read(folder, "diagnose") is not None:
        check("monitor", "diagnose", 2, "What is it doing?", ABOUT_DIAGNOSE, "Look at the stacks")
    check("launch", "rehearse", 40, "Rehearse", ABOUT_REHEARSE, "Rehearse", not trains)  # it needs the GPU
    with gr.Accordion("Run it elsewhere", open=False, elem_id="check-elsewhere"):
        fold.say(f"The run travels by its store, {store}." if store else NO_STORE, "hp-hint")
        labels = [(place.label, kind) for kind, place in PLACES.items()]
        choice = gr.Radio(labels, value="slurm", label="Where", interactive=True, elem_id="place")
        groups = []
        for kind, place in PLACES.items():
            with gr.Column(visible=kind == "slurm", elem_id=f"place-{kind}") as column:
                write, fields = _place(folder, kind, place)
                follow(f"launch-{kind}", write, lambda *values, kind=kind: write_files(folder, kind, values), fields)
            groups.append(column)
        choice.input(lambda kind: [gr.update(visible=kind == one) for one in PLACES], choice, groups, **QUIET)
    if trains:
        ranks = gr.HTML(_ranks(folder), elem_id="rank-report", apply_default_css=False)
        gr.Timer(fold.TICK_S).tick(lambda: _ranks(folder), None, ranks, key="ranks-tick", **QUIET)


def _place(folder: Path, kind: str, place: Place) -> tuple[gr.Button, list[Any]]:
    """The fields of a place and its buttons. Returns the one that writes the files, and the fields."""
    about = COMMANDS[kind][1]
    fold.say(f"{about[:1].upper()}{about[1:]}.", "hp-hint")
    fields: list[Any] = []
    with gr.Row(elem_classes="hp-fields"):
        for _, label, default, text in options(kind):
            common: dict[str, Any] = {"label": label, "info": text[:1].upper() + text[1:], "interactive": True}
            fields.append(gr.Checkbox(**common) if default is False else gr.Textbox(lines=1, max_length=300, **common))
    reason = missing(place)
    with gr.Row(elem_classes="hp-actions"):
        write = gr.Button("Write the files", variant="primary", elem_id=f"write-{kind}", min_width=140, scale=0)
        submit = gr.Button(
            ASK, visible=bool(place.needs), interactive=not reason, elem_id=f"submit-{kind}", min_width=180, scale=0
        )
    if reason:
        fold.say(reason, "hp-hint hp-missing")
    problem = gr.HTML(apply_default_css=False)

    def on_submit(asked: str, *values: Any) -> list[Any]:
        if asked != SURE:
            return [SURE, ""]
        return [ASK, fold.tried(write_files)(folder, kind, values, True)]

    submit.click(on_submit, [submit, *fields], [submit, problem], **QUIET)
    return write, fields
