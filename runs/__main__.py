"""`python -m runs new|show|estimate|render|rename|fetch-model`: runs without a browser."""

import argparse
import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import runs
from guards.reading import read_text
from presets import PresetError, terminal, tiers
from runs import env_file
from runs.files import explained

READ = (runs.script_name(), "dataset.toml", "sample_prompts.txt")  # what an attempt runs and reads
AGAIN = "base model, optimizer or trained layers differ. Change them back, or make a new run"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m runs", description="Create, show and render runs without a browser.")
    commands = top.add_subparsers(dest="command", required=True)
    new = terminal.add_command(commands, "new", "create a run and print the path of its folder")
    new.add_argument("--name", required=True, help="name of the LoRA")
    new.add_argument(
        "--images", required=True, type=Path, help="folder of the images, with captions as .txt files of the same name"
    )
    new.add_argument(
        "--trigger", help="word that activates the LoRA in a prompt; also the caption of images without one"
    )
    new.add_argument("--model", help="base model (list them with: python -m presets list)")
    new.add_argument("--tier", help=f"VRAM tier: {', '.join(tiers())}")
    new.add_argument(
        "--backend",
        help="trainer: diffusers (built-in), sd-scripts or musubi; by default the one that trains the base model",
    )
    new.add_argument("--prompt", action="append", metavar="TEXT", help="prompt of a sample image; can be repeated")
    new.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a setting (list them with: python -m runs fields) or a flag of the trainer; can be repeated",
    )
    terminal.add_command(commands, "fields", "list the settings of a run, their defaults and the trainers' flags")
    show = terminal.add_command(commands, "show", "print a run's spec, or list the runs")
    show.add_argument("run", nargs="?", help="name or folder of a run")
    estimate = terminal.add_command(commands, "estimate", "estimate the GPU memory, time, disk space and cost of a run")
    estimate.add_argument("run", help="name or folder of a run, or its run.toml")
    render = terminal.add_command(
        commands, "render", "make a run again after its run.toml was changed: its job and script"
    )
    render.add_argument("run", help="name or folder of a run")
    rename = terminal.add_command(commands, "rename", "give a run another label; its folder and files keep their names")
    rename.add_argument("run", help="name or folder of a run")
    rename.add_argument("label", help="the name that the page shows")
    fetch = terminal.add_command(commands, "fetch-model", "download the model files that kohya's trainers need")
    fetch.add_argument("model", help="base model (list them with: python -m presets list)")
    for command in (new, show, estimate, render, rename, fetch):
        command.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done. 1: failed, with the reason on standard error. 2: wrong usage."""
    args = parser().parse_args(argv)
    if args.command == "fields":
        from runs.fields import reference

        print(reference(), end="")
        return 0
    actions = {"new": new, "show": show, "estimate": estimate, "render": render, "rename": rename, "fetch-model": fetch}
    try:
        result = actions[args.command](args)
    except (runs.RunError, PresetError) as error:
        print(f"runs: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    return 0


def new(args: argparse.Namespace) -> dict[str, Any]:
    """Create a run. Notes, warnings, and problems that prevent a start, go to standard error.

    An impossible value creates nothing, as on the page.
    """
    from runs import dataset, masks
    from runs.command import samples
    from runs.flags import settings
    from runs.machine import this_machine
    from runs.sanity import IMPOSSIBLE, judge

    given = {key: getattr(args, key) for key in ("name", "trigger", "model", "tier", "backend")}
    fields = {key: value for key, value in {**given, "prompts": args.prompt}.items() if value is not None}
    found, faults = settings(args.set, fields)
    if faults:
        raise runs.RunError(faults)
    spec = runs.make(found)
    data = runs.datasets_dir().resolve()
    own = args.images.resolve() == data / spec.slug
    with explained("read the images"):
        sources = [] if own else dataset.gather(args.images)
        placed = [(one.folder, one.weight) for one in sources]
        images = Counter(dataset.folder_names(placed)) or dataset.counts(args.images)
    if args.images.resolve().parent != data and (sets := dataset.repeats_of(args.images.absolute().name)):
        print(f"note: the folder's name sets {sets[0]} repeats", file=sys.stderr)
    findings = judge(spec, images, this_machine(spec.backend))
    if impossible := [finding for finding in findings if finding.severity == IMPOSSIBLE]:
        raise runs.RunError(impossible)
    ignored = masks.ignored_note(spec.backend, sum(one.mask is not None for one in sources))
    for text in (*findings, *filter(None, [ignored])):
        print(f"warning: {text}", file=sys.stderr)
    folder = runs.create(spec, sources or args.images, on_note=lambda text: print(f"note: {text}", file=sys.stderr))
    if spec.prompts and not samples(spec):
        print("note: sample images are turned off; turn them on with --set sample_every_n_steps=N", file=sys.stderr)
    for problem in runs.problems(runs.load(folder)):
        print(f"not ready to start: {problem.message}", file=sys.stderr)
    print(folder)
    return {"folder": str(folder)}


def show(args: argparse.Namespace) -> dict[str, Any]:
    """Print a run's spec, or list the runs."""
    if args.run is None:
        folders = runs.list_runs()
        print("\n".join(map(str, folders)) or f"no runs in {runs.outputs_dir()}")
        return {"runs": [str(folder) for folder in folders]}
    folder = runs.run_folder(args.run)
    spec = runs.load(folder)
    print(runs.dumps(spec), end="")
    problems = [problem.message for problem in runs.problems(spec)] if args.json else []
    return {"folder": str(folder), "spec": spec.public(), "problems": problems}


def estimate(args: argparse.Namespace) -> dict[str, Any]:
    """Print what a run needs: GPU memory, and with its images time, disk space and cost."""
    from presets import estimate as table
    from runs import dataset, history, manage

    path = Path(args.run)
    folder = path.parent if path.name == "run.toml" and path.is_file() else runs.run_folder(args.run)
    spec = runs.load(folder)
    fields, images = spec.model_dump(), dataset.counts(runs.datasets_dir() / spec.slug)
    found = table.estimate(fields)
    for stage, gigabytes in found["stages_gb"].items():
        print(f"GPU memory, {stage}: {gigabytes:.1f} GB" + (" (the most)" if stage == found["peak_stage"] else ""))
    enough = [tier for tier, is_enough in found["tiers"].items() if is_enough]
    print(f"tiers with enough memory: {', '.join(enough) or 'none'} ({found['note']})")
    if not images:
        return found
    steps, disk = runs.planned_steps(spec, images), table.disk(fields, images)
    seconds, source = history.expected(spec, steps)
    cost = table.cost(fields, seconds)
    parts = ", ".join(f"{name} {manage.size_text(size)}" for name, size in disk.items())
    time = f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(seconds / 60, 1):.0f} min"
    print(f"time: about {time} for {steps:,} steps ({source})")
    print(f"disk: about {manage.size_text(sum(disk.values()))} ({parts})")
    if cost is not None:
        print(f"cost: about {cost:.2f} at {spec.price_per_hour:g} per hour")
    return {**found, "steps": steps, "seconds": round(seconds), "time_source": source, "disk_bytes": disk, "cost": cost}


def render(args: argparse.Namespace) -> dict[str, Any]:
    """Make a run's job again from its `run.toml`; how its files differ from before goes to standard error."""
    from runs import job as jobs
    from runs.custom_script import diff
    from runs.mitigate import same_state, unapplied

    folder = runs.run_folder(args.run)
    try:
        before = runs.pinned(folder)
    except runs.RunError:  # damaged, which this corrects, or the spec is wrong, which the next line says
        before = None
    files = {path: read_text(path) for path in (folder / name for name in READ) if before}
    script = runs.render(folder)
    after = jobs.load(folder)
    changed = [line for path, text in files.items() for line in diff(text, read_text(path)) if line[0] in "+-"]
    for line in changed:
        print(f"changed: {line}", file=sys.stderr)
    saved = next(folder.glob("*-state"), None)
    if changed and saved and before and after and not same_state(before, after):
        print(f"warning: the run cannot go on from its states, such as {saved.name}: {AGAIN}", file=sys.stderr)
    spec = runs.load(folder)
    if before and spec.edited and (why := unapplied(before.run_spec(), spec)):
        print(f"warning: {why}", file=sys.stderr)
    if secrets := spec.secrets:
        print(f"note: {env_file.kept_text(secrets)}", file=sys.stderr)
    print(script)
    return {"folder": str(folder), "script": str(script), "changed": changed}


def rename(args: argparse.Namespace) -> dict[str, Any]:
    """Give a run another label."""
    from runs import manage

    manage.rename(args.run, args.label)
    folder = runs.run_folder(args.run)
    print(f"{folder}: {manage.label_of(folder)}")
    return {"folder": str(folder), "label": manage.label_of(folder)}


def fetch(args: argparse.Namespace) -> dict[str, Any]:
    """Download model files; progress goes to standard error, at most one line per second."""
    from runs.weights import fetch_model, reporter

    say = functools.partial(print, file=sys.stderr, flush=True)
    files = [str(path) for path in fetch_model(args.model, reporter(say))]
    print("\n".join(files) or f"{args.model}: all files are downloaded already")
    return {"files": files}


if __name__ == "__main__":
    sys.exit(terminal.command(main))
