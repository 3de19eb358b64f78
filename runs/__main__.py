"""`python -m runs new|show|render|fetch-model`: make a run without a browser."""

import argparse
import json
import sys
import time
from pathlib import Path

import runs
from presets import PresetError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m runs", description="Make, show and render runs without a browser.")
    commands = top.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a run's folder and print its path")
    new.add_argument("--name", required=True, help="what the LoRA is called")
    new.add_argument("--images", required=True, type=Path, help="folder with images, and captions as .txt beside them")
    new.add_argument("--trigger", help="word that calls the LoRA; the caption of images that have none")
    new.add_argument("--model", help="base model: python -m presets list")
    new.add_argument("--tier", help="VRAM tier: 12G, 16G or 20G")
    new.add_argument("--backend", help="sd-scripts or diffusers")
    new.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt for sample images; can be repeated")
    new.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of the spec (python -m runs show NAME) or a flag of the backend's trainer; can be repeated",
    )
    show = commands.add_parser("show", help="print a run's spec, or list the runs")
    show.add_argument("run", nargs="?", help="name or folder")
    render = commands.add_parser("render", help="write a run's script again from its run.toml")
    render.add_argument("run", help="name or folder")
    fetch = commands.add_parser("fetch-model", help="fetch the model files that sd-scripts needs")
    fetch.add_argument("model", help="base model: python -m presets list")
    for command in (new, show, render, fetch):
        command.add_argument("--json", action="store_true", help="end with one line of JSON")
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done, 1 failed with the reason on standard error, 2 wrong usage."""
    args = parser().parse_args(argv)
    try:
        return {"new": new, "show": show, "render": render, "fetch-model": fetch}[args.command](args)
    except (runs.RunError, PresetError) as error:
        print(f"runs: {error}", file=sys.stderr)
        return 1


def new(args: argparse.Namespace) -> int:
    """Make a run; notes and what still stands in the way of a start go to standard error."""
    from runs.command import samples
    from runs.flags import parse_settings

    given = {
        k: getattr(args, k) for k in ("name", "trigger", "model", "tier", "backend") if getattr(args, k) is not None
    }
    if args.prompt:
        given["prompts"] = args.prompt
    spec = runs.make(parse_settings(args.set, given))
    folder = runs.create(spec, args.images, tell=lambda text: print(f"note: {text}", file=sys.stderr))
    if spec.prompts and not samples(spec):
        print(
            "note: no sample image is drawn with these prompts; --set sample_every_n_steps=N says when", file=sys.stderr
        )
    for problem in runs.problems(runs.load(folder)):
        print(f"before it can start: {problem}", file=sys.stderr)
    print(folder)
    if args.json:
        print(json.dumps({"folder": str(folder)}))
    return 0


def show(args: argparse.Namespace) -> int:
    """Print a run's spec, or the runs there are."""
    if args.run is None:
        folders = runs.list_runs()
        print("\n".join(map(str, folders)) or f"no runs in {runs.outputs_dir()}")
        if args.json:
            print(json.dumps({"runs": [str(folder) for folder in folders]}))
        return 0
    folder = runs.run_folder(args.run)
    spec = runs.load(folder)
    print(runs.dumps(spec), end="")
    if args.json:
        print(json.dumps({"folder": str(folder), "spec": spec.model_dump(), "problems": runs.problems(spec)}))
    return 0


def render(args: argparse.Namespace) -> int:
    """Write a run's script again."""
    script = runs.render(runs.run_folder(args.run))
    print(script)
    if args.json:
        print(json.dumps({"folder": str(script.parent), "script": str(script)}))
    return 0


def fetch(args: argparse.Namespace) -> int:
    """Fetch model files; progress goes to standard error, at most a line a second."""
    from runs.models import fetch_model

    told = [0.0, ""]

    def tell(name: str, done: int, size: int) -> None:
        now = time.monotonic()
        if now - told[0] >= 1 or name != told[1] or done == size:
            share = f" · {100 * done / size:.0f} %" if size else ""
            print(f"{name}: {done / 1e9:.2f} of {size / 1e9:.2f} GB{share}", file=sys.stderr, flush=True)
            told[:] = [now, name]

    files = [str(path) for path in fetch_model(args.model, tell)]
    print("\n".join(files) or f"{args.model}: all files are there")
    if args.json:
        print(json.dumps({"files": files}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
