"""The lower part of a run: which rank is stuck, a test of its start, and the files that run it in another place.

Each is a command of ours (`python -m launch …`, `python -m monitor diagnose`) that runs in the background (ui/jobs.py): the page
shows what the command prints, and the files that it wrote into the run's folder. What a place needs is looked up when this
part is opened, not when the page is: the page's config stays small, and no library of a cloud is imported into its server.
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runs
from runs.files import RunError
from ui import jobs, scripts, served
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.run import calls

if TYPE_CHECKING:
    import gradio as gr

    from ui.run.view import View

MINUTES = 60.0
TEXT_BYTES = 200_000  # of a file that is shown; a longer one is only a download
MOST_FILES = 20
VALUE = re.compile(r"[^\x00-\x1f\x7f]{0,300}")


@dataclass(frozen=True)
class Option:
    """An option of a command. kind: text, switch, or words (one option for each word)."""

    flag: str
    label: str
    hint: str = ""
    kind: str = "text"
    required: bool = False


@dataclass(frozen=True)
class Place:
    """Where a run can go. needs: a program (or a variable, in capitals) without which it cannot be submitted from here."""

    label: str
    about: str
    needs: str = ""
    options: tuple[Option, ...] = ()


GPU = Option("--gpu", "GPU", "As the provider names it; empty: chosen by the VRAM tier")
DISK = Option("--disk", "Disk in GB")
IMAGE = Option("--image", "Container image", "Empty: the one that the project's Dockerfile builds")
OWN_IMAGE = Option(
    "--image", "Container image", "Built from the Dockerfile and pushed where the machine can pull it", required=True
)
SECRET = Option(
    "--secret", "Names of secret variables", "Only names, such as WANDB_API_KEY; the values stay here", "words"
)
PLACES: dict[str, Place] = {
    "slurm": Place(
        "Slurm cluster",
        "A script for sbatch. Slurm starts the job again after a pre-emption, and it continues from its checkpoint.",
        "sbatch",
        (
            Option("--partition", "Partition"),
            Option("--time", "Time limit", "Such as 8:00:00 or 1-12"),
            Option("--account", "Account"),
            Option(
                "--gpus", "GPUs of each node", "Empty: as many as the run uses. 0: the cluster does not name its GPUs"
            ),
            Option("--gpus-type", "Type of GPU", "As `sinfo -o %G` names it"),
            Option("--mem", "Memory of each node", "Such as 64G"),
        ),
    ),
    "skypilot": Place(
        "SkyPilot (any cloud)",
        "A managed job on spot machines. It moves to another machine when one is taken away.",
        "sky",
        (GPU, DISK, SECRET, Option("--on-demand", "No spot machines", kind="switch")),
    ),
    "docker": Place(
        "Docker",
        "The command that trains this run in a container on this machine, or on one that shares its disk.",
        "docker",
        (IMAGE, SECRET),
    ),
    "runpod": Place(
        "RunPod",
        "A pod that fetches the run from its store, trains it, and stops itself when it is finished.",
        "RUNPOD_API_KEY",
        (GPU, DISK, OWN_IMAGE, SECRET),
    ),
    "vast": Place(
        "Vast.ai",
        "SkyPilot's managed job on spot machines of Vast.ai. It moves to another machine when one is taken away.",
        "sky",
        (GPU, DISK, SECRET, Option("--on-demand", "No spot machines", kind="switch")),
    ),
    "bundle": Place(
        "One file (ZIP)",
        "The run, its images and Hangproof in one archive. Unpack it anywhere with Python, and run train.sh, or train.bat on Windows.",
        options=(Option("--models", "Add the files of the base model (large)", kind="switch"),),
    ),
}
ALIVE = ("starting", "running", "suspect", "slow", "stopping")


def job_of(kind: str) -> str:
    """The name of the job that writes or submits for a place."""
    return f"launch-{kind}"


def value(shown: "View | None") -> dict[str, Any]:
    """What the script needs of the selected run: its name, whether it trains now, and the state of its jobs."""
    if shown is None or not shown.spec:
        return {"run": "", "alive": False, "jobs": {}}
    found = {
        name: {"state": job.state, "seconds": round(job.seconds) if job.state == "running" else 0, "stamp": job.stamp}
        for name, job in jobs.all_of(shown.folder).items()
    }
    return {"run": shown.folder.name, "alive": shown.running and shown.state in ALIVE, "jobs": found}


# Calls of the script. Each takes a dict from the browser and checks every value --------------------------------------------


def open_places(data: dict[str, Any]) -> dict[str, Any]:
    """The places with their options, and why each cannot be submitted to from here."""

    def action(folder: Path, _data: dict[str, Any]) -> dict[str, Any]:
        store = runs.load(folder).store
        return {"store": store, "places": [_place(kind, place) for kind, place in PLACES.items()]}

    return calls.answer(action, data)


def _place(kind: str, place: Place) -> dict[str, Any]:
    options = [{"flag": o.flag, "label": o.label, "hint": o.hint, "kind": o.kind} for o in place.options]
    return {
        "kind": kind,
        "label": place.label,
        "about": place.about,
        "options": options,
        "submit": bool(place.needs),
        "missing": missing(place),
    }


def missing(place: Place) -> str:
    """Why a run cannot be submitted from this machine; "" where it can be tried."""
    if place.needs.isupper():
        return (
            ""
            if os.environ.get(place.needs)
            else f"Set {place.needs} before you start Hangproof to start it from here."
        )
    if place.needs and shutil.which(place.needs) is None:
        return f"{place.needs} is not installed on this machine. Copy the files to one that has it."
    return ""


def write_files(data: dict[str, Any]) -> dict[str, Any]:
    """Start the command that writes the files for a place and, with `submit`, starts the run there."""

    def action(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        kind, submit = data.get("kind"), data.get("submit") is True
        if not isinstance(kind, str) or kind not in PLACES:
            raise RunError(OUT_OF_DATE)
        words = arguments(PLACES[kind], data.get("options"))
        if submit and (reason := missing(PLACES[kind])):
            raise RunError(reason)
        if kind == "bundle":
            words.append(f"--output={folder / folder.name}.zip")
        command = ["launch", kind, str(folder), *words, *["--submit"] * submit, "--json"]
        jobs.start(folder, job_of(kind), command, limit_s=60 * MINUTES)
        return {}

    return calls.answer(action, data)


def arguments(place: Place, given: object) -> list[str]:
    """The options of a command from what was typed. RunError: not an option of this place, or not one line."""
    if not isinstance(given, dict) or not given.keys() <= {option.flag for option in place.options}:
        raise RunError(OUT_OF_DATE)
    words = []
    for option in place.options:
        text = given.get(option.flag, "")
        if option.kind == "switch":
            words += [option.flag] * (text is True)
            continue
        if not isinstance(text, str) or not VALUE.fullmatch(text):
            raise RunError(f"{option.label}: Use one line of at most 300 characters")
        if option.required and not text.strip():
            raise RunError(f"{option.label}: Enter a value")
        values = text.split() if option.kind == "words" else [text.strip()]
        words += [f"{option.flag}={value}" for value in values if value]  # with =, a value is never another option
    return words


def _start(data: dict[str, Any], package: str, command: str, limit_s: float) -> dict[str, Any]:
    """Start `python -m PACKAGE COMMAND RUN --json` as the job COMMAND."""

    def action(folder: Path, _data: dict[str, Any]) -> dict[str, Any]:
        jobs.start(folder, command, [package, command, str(folder), "--json"], limit_s=limit_s)
        return {}

    return calls.answer(action, data)


def probe_start(data: dict[str, Any]) -> dict[str, Any]:
    """Start the probe: a few steps on one process, and on all."""
    return _start(data, "launch", "probe", 10 * MINUTES)


def diagnose(data: dict[str, Any]) -> dict[str, Any]:
    """Ask the monitor's command what each rank is doing now. Changes nothing of the run."""
    return _start(data, "monitor", "diagnose", 2 * MINUTES)


def rehearse_start(data: dict[str, Any]) -> dict[str, Any]:
    """Start the rehearsal: two steps, a sample, a checkpoint and a resume on the real model."""
    return _start(data, "launch", "rehearse", 40 * MINUTES)


def ladder_start(data: dict[str, Any]) -> dict[str, Any]:
    """Start the ladder: a few steps with 2 images, with 100, and with all."""
    return _start(data, "launch", "ladder", 20 * MINUTES)


def rank_lines(data: dict[str, Any]) -> dict[str, Any]:
    """The rank report of a run under way, from the heartbeats alone: no process is disturbed."""

    def action(folder: Path, _data: dict[str, Any]) -> dict[str, Any]:
        from monitor.cli.commands import rank_report

        found = rank_report(folder)
        return {"lines": found["lines"] if found else []}

    return calls.answer(action, data)


def cancel_job(data: dict[str, Any]) -> dict[str, Any]:
    """End a job."""

    def action(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        jobs.cancel(folder, _known(data))
        return {}

    return calls.answer(action, data)


def job_output(data: dict[str, Any]) -> dict[str, Any]:
    """What a job printed, its errors, the verdict of a probe, and the files that it wrote."""

    def action(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        name = _known(data)
        text, values, errors = jobs.output(folder, name)
        return {
            "text": text.strip(),
            "error": errors.strip()[-4000:],
            "files": written(folder, values) if name.startswith("launch-") else [],
            "verdict": VERDICTS[name](values) if name in VERDICTS else None,
        }

    return calls.answer(action, data)


def _known(data: dict[str, Any]) -> str:
    name = data.get("job")
    if not isinstance(name, str) or name not in ("diagnose", *VERDICTS, *map(job_of, PLACES)):
        raise RunError(OUT_OF_DATE)
    return name


def verdict(values: Any) -> dict[str, Any] | None:
    """The verdict of a probe or a ladder: {"good", "text"}; None without one."""
    if not isinstance(values, dict) or not isinstance(values.get("verdict"), str):
        return None
    advice = values.get("advice")
    text = f"{values['verdict']}\n{advice}" if isinstance(advice, str) else values["verdict"]
    return {"good": values.get("ok") is True, "text": text.strip()}


def rehearsal_verdict(values: Any) -> dict[str, Any] | None:
    """The result of a rehearsal, as `verdict` returns it."""
    from launch import forecast, rehearse

    try:
        found = rehearse.Rehearsal(**values)
        good = found.state == rehearse.PASSED
        lines = forecast.lines(found.forecast) if good else rehearse.failure_lines(found)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    return {"good": good, "text": "\n".join(lines)}


VERDICTS = {"probe": verdict, "ladder": verdict, "rehearse": rehearsal_verdict}


def written(folder: Path, values: Any) -> list[dict[str, Any]]:
    """The files of the run's folder that a command's JSON names: name, size, and their text or their address."""
    root, found = folder.resolve(), []
    for text in _strings(values):
        path = Path(text)
        try:
            real = path.resolve(strict=True)
            size = real.stat().st_size
            if not path.is_absolute() or not real.is_file() or not real.is_relative_to(root):
                continue
        except (OSError, ValueError, RuntimeError):
            continue
        name = real.relative_to(root).as_posix()
        one: dict[str, Any] = {"name": name, "size": size, "text": None, "url": ""}
        if real.suffix.lower() in served.DOWNLOADS:
            one["url"] = file_url(real)
        if size <= TEXT_BYTES and (content := _text(real)) is not None:
            one["text"] = content
        if one not in found and (one["url"] or one["text"] is not None):
            found.append(one)
    return found[:MOST_FILES]


def _text(path: Path) -> str | None:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return None if "\0" in content else content


def _strings(values: Any, depth: int = 0) -> list[str]:
    if isinstance(values, str):
        return [values]
    inner = list(values.values()) if isinstance(values, dict) else values if isinstance(values, list) else []
    return [text for one in inner[:100] for text in _strings(one, depth + 1)] if depth < 4 else []


def build() -> "gr.HTML":
    """The component; its value is that of `value`."""
    return scripts.component(
        "launch_tab",
        "run-elsewhere",
        open_places,
        write_files,
        probe_start,
        rehearse_start,
        ladder_start,
        rank_lines,
        diagnose,
        cancel_job,
        job_output,
    )
